"""Estimators and metrics of scikit-learn on DistArrays (bench/kernels/scikit_learn_cases.py)."""

import json

import pytest
from mpi_helpers import environment, needs_mpirun, run_mpi

pytest.importorskip("sklearn", "1.9", reason="earlier ones take arrays of other libraries alone")

OWN = ["-m", "bench", "scikit_learn", "--own", "einmpi"]


def problems(ranks, *arguments):
    done = run_mpi(ranks, [*OWN, *arguments], environment(SCIPY_ARRAY_API="1"), timeout=600)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    rows = [json.loads(line) for line in lines]
    return {row["case"]: row["problem"] for row in rows}


@pytest.mark.slow
@needs_mpirun
@pytest.mark.mpirun
def test_some_on_two_ranks():
    """One that stays in the namespace, and one that needs arrays of numpy."""
    names = ["StandardScaler", "confusion_matrix"]
    assert problems(2, "--cases", *names) == dict.fromkeys(names, "")


@needs_mpirun
@pytest.mark.slow
@pytest.mark.mpirun
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_results_are_those_of_numpy(ranks):
    found = problems(ranks)
    assert len(found) == 31
    assert not {name: problem for name, problem in found.items() if problem}
