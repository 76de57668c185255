"""The backend for GPUs without a GPU: a stand-in for cupy whose copies come as late as they may (tests/fake_cupy.py)."""

from dataclasses import replace

import fake_cupy
import numpy as np
import pytest
from distributed import assert_close, run_on_threads
from run_cases import cases

import einmpi

CASES = cases()


def on_gpu(job):
    return replace(job, backend="cupy")


@pytest.mark.parametrize("name", CASES)
def test_every_case_on_threads(name, monkeypatch):
    fake_cupy.install(monkeypatch)
    job, arrays = CASES[name]
    for ranks in (1, 4):
        assert_close(run_on_threads(on_gpu(job), ranks, arrays).outputs, einmpi.reference(job, arrays))
