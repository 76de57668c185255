"""Tests whose ranks are the processes of one mpirun: `mpirun -n 3 python -m pytest --with-mpi
tests/mpi`.

pytest-mpi has the markers. Here is what it leaves to the project: rank 0 alone reports and makes
folders, and a test that fails on one rank ends all of them, since the others may wait for it.
"""

import sys
import time

import pytest

SECONDS_TO_FORWARD_OUTPUT = 1.0  # for the launcher, before the ranks end
SECONDS_BETWEEN_LOOKS = 1e-4  # whether the other ranks have come, too


def under_mpirun(config):
    """Whether pytest was told so; never where pytest-mpi is not installed."""
    return config.getoption("--with-mpi", False) or config.getoption("--only-mpi", False)


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if under_mpirun(config):
        from mpi4py import MPI

        config.pluginmanager.register(EndTogether(MPI.COMM_WORLD))
        if MPI.COMM_WORLD.rank > 0:
            reporter = config.pluginmanager.getplugin("terminalreporter")
            config.pluginmanager.unregister(reporter)


class EndTogether:
    """A plugin that ends all ranks when a test fails on one of them."""

    def __init__(self, world):
        self.world = world

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        if report.failed and self.world.size > 1:
            rank = f"rank {self.world.rank} of {self.world.size}"
            sys.stderr.write(f"{rank}: {report.nodeid}\n{report.longreprtext}\n")
            sys.stderr.flush()
            time.sleep(SECONDS_TO_FORWARD_OUTPUT)
            self.world.Abort(1)


@pytest.fixture
def world():
    """All ranks. They start and end each test together, so that a failure belongs to its test."""
    from mpi4py import MPI

    wait_for_all_ranks(MPI.COMM_WORLD)
    yield MPI.COMM_WORLD
    wait_for_all_ranks(MPI.COMM_WORLD)


@pytest.fixture
def shared_folder(world, request):
    """A new folder, the same one on all ranks.

    pytest-mpi's `mpi_tmp_path` lets every rank make a folder, though only that of rank 0 is used.
    When the ranks end, all of them would clear away old folders at once, and some fail to remove
    what another has just removed.
    """
    folder = request.getfixturevalue("tmp_path") if world.rank == 0 else None
    return world.bcast(folder)


def wait_for_all_ranks(world):
    """Wait as `barrier` does, but asleep: inside MPI a rank would keep the core of another one."""
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(SECONDS_BETWEEN_LOOKS)
