"""A time limit on the start of a run, until all ranks are connected.

MPI waits for all ranks when it starts, and mpi4py keeps Python's lock meanwhile. So a second
process watches the time."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

from einmpi.errors import InputError
from einmpi.process.environment import (
    START_TIMEOUT_VARIABLE,
    is_launched,
    launcher_rank,
    launcher_size,
    launcher_size_on_node,
)
from einmpi.process.names import NAMES, ranks_present
from einmpi.process.signals import print_last_line
from einmpi.units import parse_seconds

_DEFAULT_LIMIT = "60s"
# Seconds. Longer waits mean that there is no limit, and poll counts milliseconds up to 24 days.
_LARGEST_LIMIT = 24 * 3600
# Seconds between the lines of two ranks: time for the launcher to end all ranks after the first.
_TURN_SECONDS = 0.5
# Turns that a machine with all of its ranks leaves to the others: their clocks start when their
# ranks do, and a busy Slurm takes seconds to end a step.
_TURNS_FOR_OTHER_MACHINES = 20
_MOST_LISTED_RANKS = 8


@contextlib.contextmanager
def startup_deadline() -> Iterator[None]:
    """End this rank with one line if the `with` block, which connects the ranks, takes too long.

    Only the start has a limit: later one rank may rightly wait for another for hours.
    """
    if not is_launched():
        yield
        return
    NAMES.claim(str(launcher_rank()))
    seconds = _limit_in_seconds()
    if not seconds:
        yield
        return
    reader, writer = os.pipe()
    rank_pid = os.getpid()
    watcher_pid = 0
    with contextlib.suppress(OSError):  # no more processes are allowed: go on without a limit
        watcher_pid = os.fork()
        if watcher_pid == 0:
            _watch_deadline(rank_pid, reader, seconds)
    os.close(reader)
    try:
        yield
    finally:
        os.close(writer)  # ends the second process
        if watcher_pid:
            os.waitpid(watcher_pid, 0)


def _limit_in_seconds() -> float:
    text = os.environ.get(START_TIMEOUT_VARIABLE, "").strip() or _DEFAULT_LIMIT
    with_unit = f"{text}s" if text.isdecimal() else text
    try:
        seconds = parse_seconds(with_unit, START_TIMEOUT_VARIABLE)
        if seconds > _LARGEST_LIMIT:
            raise InputError(
                START_TIMEOUT_VARIABLE,
                f"{text} is more than {_LARGEST_LIMIT // 3600}h",
                "a shorter time, or 0 for no limit",
            )
    except InputError as error:
        error.everywhere = True
        raise
    return seconds


def _watch_deadline(rank_pid: int, reader: int, seconds: float) -> NoReturn:
    """Do the work of the second process. Its pipe ends when the rank is connected, or gone."""
    try:
        _close_inherited_descriptors(reader)
        pipe = select.poll()
        pipe.register(reader)
        if pipe.poll(seconds * 1000):
            os._exit(0)
        rank = launcher_rank()
        present = ranks_present()
        expected = launcher_size_on_node()
        turns = _turns_before(rank, present, expected)
        if pipe.poll(turns * _TURN_SECONDS * 1000):
            os._exit(0)
        problem = _describe_missing_ranks(present, expected)
        print_last_line(
            rank, f"{problem} after {seconds:g} s; {START_TIMEOUT_VARIABLE} sets the limit"
        )
        _cancel_slurm_step()
        os.kill(rank_pid, signal.SIGKILL)
    finally:
        os._exit(1)


def _turns_before(rank: int, present: list[int], expected: int | None) -> int:
    """Return how many turns other ranks have before this one prints.

    One rank prints for a machine, and a machine with a missing rank comes first.
    """
    turns = 0
    if expected is None or len(present) >= expected:
        turns = 2 + min(rank, 20)
        if expected is not None and expected != launcher_size():
            turns += _TURNS_FOR_OTHER_MACHINES
    if rank != min(present, default=rank):
        turns += 4
    return turns


def _close_inherited_descriptors(kept: int) -> None:
    """Close all but standard error and the pipe: a launcher waits for the end of the others."""
    for descriptor in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    os.closerange(3, kept)
    os.closerange(kept + 1, 2**16)


def _cancel_slurm_step() -> None:
    """End all ranks under srun, which otherwise lets the others wait."""
    if "SLURM_STEP_ID" not in os.environ or not shutil.which("scancel"):
        return
    step = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ['SLURM_STEP_ID']}"
    command = ["scancel", "--signal=KILL", step]
    subprocess.run(command, stderr=subprocess.DEVNULL, timeout=5, check=False)
    time.sleep(0.2)


def _describe_missing_ranks(present: list[int], expected: int | None) -> str:
    """Say which ranks have not started, as far as this machine knows."""
    size = launcher_size()
    if not present or expected is None:
        return "not all ranks have started"
    missing = expected - len(present)
    have_not_started = "has not started" if missing == 1 else "have not started"
    if expected == size and missing:
        names = [str(rank) for rank in range(size) if rank not in present]
        listed = ", ".join(names[:_MOST_LISTED_RANKS])
        if missing > _MOST_LISTED_RANKS:
            listed += f" and {missing - _MOST_LISTED_RANKS} more"
        noun = "rank" if missing == 1 else "ranks"
        return f"{noun} {listed} of {size} {have_not_started}"
    if expected == size:
        return f"all {size} ranks have started but cannot connect to each other"
    machine = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    if missing:
        if expected == 1:
            return f"the only rank of {machine} {have_not_started}"
        return f"{missing} of the {expected} ranks of {machine} {have_not_started}"
    if expected == 1:
        return f"the only rank of {machine} has started, those of other machines have not"
    return f"all {expected} ranks of {machine} have started, those of other machines have not"


# ---- first use -----------------------------------------------------------------------------------
#
# The time that goes into first uses: kernels are compiled, libraries are loaded. Runs that
# follow do not need it, so it is measured apart from computing and loading.


COMPILING = "kernels"
LOADING_GENERATORS = "generators"


class _FirstUses(threading.local):
    """What the first uses of a thread took. Ranks may be threads of one process."""

    def __init__(self) -> None:
        self.seconds = {COMPILING: 0.0, LOADING_GENERATORS: 0.0}
        self.is_measuring = False


_FIRST_USES = _FirstUses()


@contextmanager
def first_use(what: str) -> Iterator[None]:
    """Count the time of this block as a first use. In a block inside another, only that counts."""
    if _FIRST_USES.is_measuring:
        yield
        return
    _FIRST_USES.is_measuring = True
    start = time.perf_counter()
    try:
        yield
    finally:
        _FIRST_USES.seconds[what] += time.perf_counter() - start
        _FIRST_USES.is_measuring = False


def first_use_seconds() -> float:
    """Return what all first uses of this thread have taken so far."""
    return sum(_FIRST_USES.seconds.values())


def first_uses() -> Mapping[str, float]:
    """Return the seconds of each kind of first use of this thread."""
    return dict(_FIRST_USES.seconds)
