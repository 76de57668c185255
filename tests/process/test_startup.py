"""What a rank knows before MPI has started, and the limit on the time until all have come."""

import os
import re
import signal
import subprocess
import sys

import pytest
from mpi_helpers import OUTER, ROOT

from einmpi.errors import InputError
from einmpi.process import environment, names, startup


@pytest.fixture
def launcher(monkeypatch):
    """Set only these variables of a launcher, and release all claimed names at the end."""
    for name in os.environ:
        if name.startswith(OUTER):
            monkeypatch.delenv(name)
    yield lambda **settings: [monkeypatch.setenv(name, value) for name, value in settings.items()]
    names.NAMES.release_all()


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, (False, 0, 1, None)),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, (False, 0, 1, None)),
        ({"PMI_RANK": "2", "PMI_SIZE": "8", "MPI_LOCALNRANKS": "4"}, (True, 2, 8, 4)),
        (
            {"PMIX_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"},
            (True, 1, 3, 3),
        ),
        (
            {
                "PMI_RANK": "13",
                "PMI_SIZE": "14",
                "SLURM_STEP_TASKS_PER_NODE": "4(x3),2",
                "SLURM_NODEID": "3",
            },
            (True, 13, 14, 2),
        ),
        (
            {
                "PMIX_RANK": "5",
                "SLURM_STEP_NUM_TASKS": "8",
                "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
                "SLURM_NODEID": "1",
            },
            (True, 5, 8, 4),
        ),
    ],
)
def test_what_launchers_say(launcher, settings, found):
    launcher(**settings)
    told = (
        environment.is_launched(),
        environment.launcher_rank(),
        environment.launcher_size(),
        environment.launcher_size_on_node(),
    )
    assert told == found


def test_names(launcher):
    """Each has one owner on a machine; ranks see each other by them."""
    launcher(PMIX_NAMESPACE=f"test {os.getpid()}", PMI_SIZE="5")
    assert names.ranks_present() == []
    assert [names.NAMES.claim(name) for name in ("3", "1", "1")] == [True, True, False]
    assert names.ranks_present() == [1, 3]


LAST_LINE = """
import sys
from einmpi.process.signals import print_last_line
from einmpi.process.environment import launcher_rank
from einmpi.process.startup import startup_deadline
with startup_deadline():
    pass
print("ready", flush=True)
sys.stdin.readline()
print_last_line(launcher_rank(), "terminated")
"""


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_one_rank_of_a_machine_prints_even_if_the_others_come_late(launcher, order):
    """A busy machine lets one rank print and end before another one has noticed anything."""
    ranks = []
    for number in range(3):
        settings = {"PMIX_NAMESPACE": f"late {os.getpid()} {order}", "PMI_RANK": str(number)}
        command = [sys.executable, "-c", LAST_LINE]
        ranks.append(
            subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PMI_SIZE": "3", **settings},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for rank in ranks:
        assert rank.stdout.readline() == "ready\n"
    lines = [ranks[number].communicate("now\n", timeout=120)[1] for number in order]
    assert lines == [f"einmpi: error: rank {order[0]}: terminated\n", "", ""]


@pytest.mark.parametrize(
    ("size", "expected", "here", "text"),
    [
        (3, 3, [0, 1], "rank 2 of 3 has not started"),
        (3, 3, [1], "ranks 0, 2 of 3 have not started"),
        (64, 64, [7], "ranks 0, 1, 2, 3, 4, 5, 6, 8 and 55 more of 64 have not started"),
        (3, 3, [0, 1, 2], "all 3 ranks have started but cannot connect to each other"),
        (64, 4, [8, 9, 10], "1 of the 4 ranks of n3 has not started"),
        (64, 4, [8, 9, 10, 11], "all 4 ranks of n3 have started, those of other machines have not"),
        (64, None, [8], "not all ranks have started"),
    ],
)
def test_who_is_missing(launcher, size, expected, here, text):
    launcher(PMI_SIZE=str(size), SLURMD_NODENAME="n3")
    assert startup._describe_missing_ranks(here, expected) == text


def test_machines_with_all_of_their_ranks_wait_for_the_others(launcher):
    """Long enough for a busy Slurm to end a step after the first line."""
    launcher(PMI_SIZE="3")
    of_missing = startup._turns_before(0, [0], 2)
    of_complete = startup._turns_before(2, [2], 1)
    assert of_missing == 0 and (of_complete - of_missing) * startup._TURN_SECONDS >= 10
    alone = startup._turns_before(0, [0, 1, 2], 3)
    assert alone * startup._TURN_SECONDS <= 1


RANK = """
import ctypes, os, sys, time
from einmpi.process.startup import startup_deadline
with startup_deadline():
    if sys.argv[1] == "waits":
        ctypes.PyDLL(None).sleep(600)  # keeps Python's lock, as MPI does when it starts
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("done, and no process is left")
"""


def rank(how, **settings):
    kept = {key: value for key, value in os.environ.items() if not key.startswith(OUTER)}
    kept |= {
        "PYTHONPATH": str(ROOT),
        "PMI_RANK": "1",
        "PMI_SIZE": "3",
        "MPI_LOCALNRANKS": "3",
        **settings,
    }
    command = [sys.executable, "-c", RANK, how]
    return subprocess.run(
        command, env=kept, capture_output=True, text=True, timeout=120, start_new_session=True
    )


@pytest.mark.parametrize("limit", ["0.3s", "1"])
def test_the_others_do_not_come(limit):
    done = rank("waits", EINMPI_START_TIMEOUT=limit)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
    seconds = limit.removesuffix("s")
    assert done.stderr == (
        f"einmpi: error: rank 1: ranks 0, 2 of 3 have not started after {seconds} s; "
        "EINMPI_START_TIMEOUT sets the limit\n"
    )


@pytest.mark.parametrize("limit", ["0", "", "10min"])
def test_all_come(limit):
    done = rank("comes", EINMPI_START_TIMEOUT=limit)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done, and no process is left\n", "")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("soon", "'soon' is not a time; expected a number and"),
        ("3000000", "3000000 is more than 24h; expected a shorter time, or 0"),
    ],
)
def test_no_time(launcher, text, wrong):
    launcher(PMI_RANK="0", EINMPI_START_TIMEOUT=text)
    message = re.escape(f"EINMPI_START_TIMEOUT: {wrong}")
    with pytest.raises(InputError, match=message) as found, startup.startup_deadline():
        raise AssertionError("it went on")
    assert found.value.everywhere
