"""A backend is one record: a new one is registered at run time and can be used in a job."""

import sys
import types

import numpy as np
import pytest
from job_text import PROGRAM, error

import einmpi
from einmpi.compiled.running import on_host
from einmpi.job.settings import (
    BackendRecord,
    all_backends,
    backend_names,
    register_backend,
    unregister_backend,
)

JOB = PROGRAM + 'inputs.A = { random = "arange", shape = [3] }\nrun.backend = "counted"\n'


@pytest.fixture
def calls(monkeypatch):
    """Register a backend that counts how often it is set up and computes on the CPU."""
    made = []

    def workplace(job, comm):
        made.append(job.backend)
        return on_host(job, comm)

    module = types.ModuleType("counted_backend")
    module.workplace = workplace
    monkeypatch.setitem(sys.modules, "counted_backend", module)
    register_backend(BackendRecord("counted", "for a test", "counted_backend:workplace"))
    yield made
    unregister_backend("counted")


@pytest.mark.usefixtures("in_folder")
def test_a_new_backend_runs_a_job(calls):
    with open("job.toml", "w") as file:
        file.write(JOB)
    job = einmpi.load("job.toml")
    assert job.backend == "counted" and calls == []
    np.testing.assert_array_equal(einmpi.run(job)["Z"].gather(), [1, 2, 3])
    assert calls == ["counted"]


@pytest.mark.usefixtures("in_folder")
def test_unknown_backends():
    assert backend_names() == ("numpy", "cupy")
    assert error(JOB) == ("job.toml:3:5: unknown backend 'counted'; expected one of numpy, cupy")


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="there is a backend 'numpy' already"):
        register_backend(all_backends()[0])
