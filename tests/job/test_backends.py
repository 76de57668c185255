"""A backend is one record: a new one can be added at run time and used in a job."""

import sys
import types

import numpy as np
import pytest
from job_text import PROGRAM, error

import einmpi
from einmpi.compiled.running import on_host
from einmpi.job.settings import BACKENDS, BackendRecord

JOB = PROGRAM + 'inputs.A = { random = "arange", shape = [3] }\nrun.backend = "counted"\n'


@pytest.fixture
def calls(monkeypatch):
    """Add a backend that counts how often it is set up and computes on the CPU."""
    made = []

    def workplace(job, comm):
        made.append(job.backend)
        return on_host(job, comm)

    module = types.ModuleType("counted_backend")
    module.workplace = workplace
    monkeypatch.setitem(sys.modules, "counted_backend", module)
    record = BackendRecord("counted", "for a test", "counted_backend:workplace")
    monkeypatch.setitem(BACKENDS, "counted", record)
    return made


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
    assert list(BACKENDS) == ["numpy", "cupy"]
    assert error(JOB) == ("job.toml:3:5: unknown backend 'counted'; expected one of numpy, cupy")
