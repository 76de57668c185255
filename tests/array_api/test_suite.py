"""The test suite of the array API standard, where there is a copy of it; it takes minutes.

git clone --recursive https://github.com/data-apis/array-api-tests
pip install -r array-api-tests/requirements.txt
ARRAY_API_TESTS=array-api-tests python -m pytest -m slow tests/array_api/test_suite.py
"""

import importlib.util
import os
import re
from pathlib import Path

import pytest
from mpi_helpers import needs_mpirun, run_mpi

import einmpi.array_api as xp

# A tensor on two ranks cannot be handed over without a copy, and the suite asks for that.
FAILURES = {1: [], 2: ["array_api_tests/test_dlpack.py::test_dunder_dlpack"]}


def why_not():
    """Return why the suite cannot run here, or None."""
    folder = os.environ.get("ARRAY_API_TESTS")
    if folder is None:
        return "ARRAY_API_TESTS does not name a copy of the suite"
    if not (Path(folder) / "array-api" / "src").is_dir():
        return f"{folder} is no copy of the suite with its submodule: git clone --recursive"
    for name in ("hypothesis", "ndindex", "pytest_jsonreport"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed: pip install -r requirements.txt of the suite"
    return None


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
@pytest.mark.parametrize("ranks", FAILURES)
def test_the_suite_of_the_standard(ranks):
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    suite = str(Path(os.environ["ARRAY_API_TESTS"]).resolve())
    done = run_mpi(ranks, ["-m", "bench", "array_api", suite], timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    score = re.search(rf"version {xp.__array_api_version__}: \S+ % of (\d+) tests", done.stdout)
    assert score is not None, done.stdout
    assert int(score[1]) > 1300
    failed = re.findall(r"^failed (.*)$", done.stdout, re.MULTILINE)
    assert failed == FAILURES[ranks], done.stdout
