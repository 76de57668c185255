"""Settings and fixtures for all tests: hypothesis, which tests run, a Slurm cluster, folders."""

import os
import shutil
import sys

import pytest
import selection
from mpi_helpers import ROOT
from slurm import cluster

# Tests start hundreds of interpreters. Where the environment forbids bytecode, as containers often
# do, each of them would compile the package again: a third of what the start of a rank takes.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_configure(config):
    # tests/mpi tries no properties, and without hypothesis its many ranks start in less time.
    if not config.getoption("--with-mpi", False):
        settle_examples()


def settle_examples():
    """Properties are tried on the same examples each time, and a slow machine is no failure.

    EINMPI_EXAMPLES=5000 searches differently each time, where a test asks for it further too.
    """
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "settled",
        deadline=None,
        derandomize=not os.environ.get("EINMPI_EXAMPLES"),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    settings.load_profile("settled")


def pytest_addoption(parser):
    parser.addoption(
        "--slice",
        type=selection.parsed,
        metavar="K/N",
        help="run the K-th of N slices of the tests; a test is always in the same slice",
    )


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(config, items):
    selection.mark_samples(items, whole_files=not any("::" in name for name in config.args))
    if wanted := config.getoption("--slice"):
        items[:], others = selection.divided(items, *wanted)
        config.hook.pytest_deselected(items=others)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """Two nodes of a real Slurm for the tests marked `slurm`, or a skip that says why not."""
    if reason := cluster.why_not():
        pytest.skip(f"no Slurm: {reason}")
    with cluster.running(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """Run the test in a new working folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def project(tmp_path):
    """A folder with the jobs and their scripts, to submit from."""
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs", ignore=shutil.ignore_patterns("*.h5"))
    return tmp_path
