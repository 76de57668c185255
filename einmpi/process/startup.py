"""The start of a rank has a time limit, until all ranks have come together.

MPI waits for all ranks when it starts, and mpi4py keeps Python's lock meanwhile: so a second process has the clock."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import NoReturn

from einmpi.errors import InputError
from einmpi.process.environment import (
    given_rank,
    given_size,
    given_size_here,
    launched,
    present,
    take,
)
from einmpi.process.supervise import last_words
from einmpi.units import parse_seconds

VARIABLE = "EINMPI_START_TIMEOUT"
_DEFAULT = "60s"
_MOST = (
    24 * 3600
)  # whoever waits longer wants no limit; and the system counts milliseconds, up to 24 days
_TURN = (
    0.5  # seconds from one rank's last words to the next one's: time for the launcher to end all
)
_LISTED = 8


@contextlib.contextmanager
def all_must_come() -> Iterator[None]:
    """Inside, all ranks come together. Where this takes longer than the limit, this rank ends with one line.

    Only the start has a limit. Later one rank may wait for another for hours, and all is well.
    """
    seconds = _limit() if launched() else 0.0
    if not seconds:
        yield
        return
    take(str(given_rank()))
    reader, writer = os.pipe()
    rank, clock = os.getpid(), 0
    with contextlib.suppress(OSError):  # no more processes allowed: without a limit
        clock = os.fork()
        if clock == 0:
            _keep_time(rank, reader, seconds)
    os.close(reader)
    try:
        yield
    finally:
        os.close(writer)  # the clock stops
        if clock:
            os.waitpid(clock, 0)


def _limit() -> float:
    text = os.environ.get(VARIABLE, "").strip() or _DEFAULT
    try:
        seconds = parse_seconds(f"{text}s" if text.isdecimal() else text, VARIABLE)
        if seconds > _MOST:
            raise InputError(
                VARIABLE, f"{text} is more than {_MOST // 3600}h", "less, or 0 for no limit"
            )
        return seconds
    except InputError as error:
        error.everywhere = True
        raise


def _keep_time(rank: int, reader: int, seconds: float) -> NoReturn:
    """The second process. Its pipe ends when the rank has done, or is gone."""
    try:
        # What a launcher knows a rank by must end with the rank.
        for descriptor in (0, 1):
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
        os.closerange(3, reader)
        os.closerange(reader + 1, 2**16)
        pipe = select.poll()
        pipe.register(reader)
        if pipe.poll(seconds * 1000):
            os._exit(0)
        own, here, expected = given_rank(), present(), given_size_here()
        # One speaks for a machine, and a machine where somebody is missing comes first.
        turns = 0 if expected is not None and len(here) < expected else 2 + min(own, 20)
        turns += 0 if own == min(here, default=own) else 4
        if pipe.poll(turns * _TURN * 1000):
            os._exit(0)
        last_words(own, f"{_who(here, expected)} after {seconds:g} s; {VARIABLE} sets the limit")
        if "SLURM_STEP_ID" in os.environ and shutil.which(
            "scancel"
        ):  # srun lets the others wait, if nobody tells it
            step = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ['SLURM_STEP_ID']}"
            subprocess.run(
                ["scancel", "--signal=KILL", step],
                stderr=subprocess.DEVNULL,
                timeout=5,
                check=False,
            )
            time.sleep(0.2)
        os.kill(rank, signal.SIGKILL)
    finally:
        os._exit(1)


def _who(here: list[int], expected: int | None) -> str:
    """Who has not come, as far as this machine knows."""
    size = given_size()
    if not here or expected is None:
        return "not all ranks have started"
    missing = expected - len(here)
    have_not = f"{'has' if missing == 1 else 'have'} not started"
    if expected == size and missing:
        names = [str(rank) for rank in range(size) if rank not in here]
        more = f" and {missing - _LISTED} more" if missing > _LISTED else ""
        return f"rank{'s' * (missing > 1)} {', '.join(names[:_LISTED])}{more} of {size} {have_not}"
    if expected == size:
        return f"all {size} ranks have started, but do not come together"
    machine = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    if missing:
        return f"{missing} of the {expected} ranks of {machine} {have_not}"
    return f"all {expected} ranks of {machine} have started, those of other machines have not"
