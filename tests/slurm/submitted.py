"""Jobs that tests submit: what they need to find einmpi and its launcher, and their results."""

import re

import numpy as np
import pytest
from mpi_helpers import OPEN_MPI, ROOT

import einmpi

SRUN = "srun --mpi=pmix" if OPEN_MPI else "srun --mpi=pmi2"
TWO_BY_TWO = ("--nodes=2", "--ntasks-per-node=2")
SETTINGS = {
    "LAUNCH": SRUN,
    "EINMPI_BACKEND": "numpy",
}  # no GPU is needed to try the script for GPUs


def printed(folder, job):
    return (folder / job["StdOut"]).read_text()


def norms(text):
    """Of the results that a run has printed."""
    return {
        name: float(norm)
        for name, norm in re.findall(r"^  (\w+)  \w+ [\d×]+  norm (\S+)", text, re.MULTILINE)
    }


def expected(job, **sizes):
    return {
        name: float(np.linalg.norm(array))
        for name, array in einmpi.reference(einmpi.load(job, **sizes)).items()
    }


def check(folder, job, ranks, path, **sizes):
    """Check that a job has succeeded on so many ranks with the results of the reference."""
    text = printed(folder, job)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), text
    assert f" on {ranks} ranks " in text and text.count(" norm ") == len(norms(text)), (
        text
    )  # no rank ran by itself
    wanted = expected(folder / path, **sizes)
    assert norms(text) == pytest.approx(wanted, rel=1e-5)


def check_page(text):
    """docs/slurm.md shows the results that were printed."""
    page = (ROOT / "docs/slurm.md").read_text()
    for line in re.findall(r"^  .* norm .*$", text, re.MULTILINE):
        assert line in page, line
