"""On several workers (`pytest -n 2 --dist loadgroup`) one has all tests that start ranks: they need the cores."""

import shutil

import pytest
from mpi_helpers import ROOT
from slurm import cluster


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """Two nodes of a real Slurm for all tests marked `slurm`; where there can be none they say why."""
    if reason := cluster.why_not():
        pytest.skip(f"no Slurm: {reason}")
    with cluster.running(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """The working folder is a new one."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def project(tmp_path):
    """A folder with the jobs and their scripts, to submit from."""
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs", ignore=shutil.ignore_patterns("*.h5"))
    return tmp_path


def pytest_collection_modifyitems(config, items):
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if item.get_closest_marker("mpi"):
                item.add_marker(pytest.mark.xdist_group("ranks"))
