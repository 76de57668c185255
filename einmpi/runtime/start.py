"""The start of a rank: what its launcher has told it, and a time limit until all ranks have come together.

MPI waits for all ranks when it starts, and mpi4py keeps Python's lock meanwhile: so a second process has the clock."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import NoReturn

from einmpi.errors import InputError
from einmpi.runtime.watch import last_words
from einmpi.units import parse_seconds

VARIABLE = "EINMPI_START_TIMEOUT"
_DEFAULT = "60s"
# Set by the launchers of MPICH, Open MPI and Slurm: without one of them this is a single process, and MPI stays off.
_RANK = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")
_SIZE = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_SIZE_HERE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")
_TURN = 0.5  # seconds from one rank's last words to the next one's: time for the launcher to end all
_LISTED = 8


# ---- what the launcher says -----------------------------------------------------------------------------------------


def launched() -> bool:
    """Whether a launcher started this process as one of its ranks."""
    # A batch script of Slurm has SLURM_PROCID as well, though nothing launched it; srun brings PMI along.
    pmi = any(name.startswith(("PMI_", "PMIX_", "PALS_")) for name in os.environ)
    return any(name in os.environ for name in _RANK) or ("SLURM_PROCID" in os.environ and pmi)


def given_rank() -> int:
    """The rank that the launcher gave to this process; known before MPI has started."""
    return _number((*_RANK[:-1], "SLURM_PROCID")) or 0


def given_size() -> int:
    """How many processes the launcher started; 1 where it does not say."""
    return _number(_SIZE) or 1


def _size_here() -> int | None:
    """How many of them on this machine."""
    tasks = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))  # such as 4(x3),2
    nodes = [int(count) for count, times in tasks for _ in range(int(times or 1))]
    node = _number(("SLURM_NODEID",))
    if "MPI_LOCALNRANKS" not in os.environ and node is not None and node < len(nodes):
        return nodes[node]
    return _number(_SIZE_HERE)


def _number(names: tuple[str, ...]) -> int | None:
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()), None)


# ---- the time limit -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def all_must_come() -> Iterator[None]:
    """Inside, all ranks come together. Where this takes longer than the limit, this rank ends with one line.

    Only the start has a limit. Later one rank may wait for another for hours, and all is well.
    """
    seconds = _limit() if launched() else 0.0
    if not seconds:
        yield
        return
    with contextlib.ExitStack() as stack:
        here = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        with contextlib.suppress(OSError):  # no such names on this system: nobody knows then who is missing
            here.bind(_address(given_rank()))
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
        return parse_seconds(f"{text}s" if text.isdecimal() else text)
    except ValueError as error:
        wrong = InputError(VARIABLE, *str(error).split("; ", 1))
        wrong.everywhere = True
        raise wrong from None


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
            return os._exit(0)
        own, present, here = given_rank(), _present(), _size_here()
        # One speaks for a machine, and a machine where somebody is missing comes first.
        turns = 0 if here is not None and len(present) < here else 2 + min(own, 20)
        turns += 0 if own == min(present, default=own) else 4
        if pipe.poll(turns * _TURN * 1000):
            return os._exit(0)
        last_words(own, f"{_who(present, here)} after {seconds:g} s; {VARIABLE} sets the limit")
        if "SLURM_STEP_ID" in os.environ and shutil.which("scancel"):  # srun lets the others wait, if nobody tells it
            step = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ['SLURM_STEP_ID']}"
            subprocess.run(["scancel", "--signal=KILL", step], stderr=subprocess.DEVNULL, timeout=5, check=False)
            time.sleep(0.2)
        os.kill(rank, signal.SIGKILL)
    finally:
        os._exit(1)


def _present() -> list[int]:
    """The ranks of this machine that have come."""
    found = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as knock:
        for rank in range(given_size()):
            with contextlib.suppress(OSError):
                knock.connect(_address(rank))
                found.append(rank)
    return found


def _address(rank: int) -> str:
    """A name that only this machine knows, and that goes with its process. Ranks of one run have the same launcher:
    above them, and above the scripts that they may be wrapped in."""
    launcher = os.getppid()
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{os.getpgrp()}/stat") as file:
        launcher = int(file.read().rpartition(")")[2].split()[1])
    return f"\0einmpi-{launcher}-{rank}"


def _who(present: list[int], here: int | None) -> str:
    """Who has not come, as far as this machine knows."""
    size = given_size()
    if not present or here is None:
        return "not all ranks have started"
    if len(present) == here == size:
        return f"the {size} ranks have started and do not come together"
    if here == size:
        missing = sorted({*range(size)} - {*present})
        more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        names = ", ".join(map(str, missing[:_LISTED]))
        return f"rank{'s' * (len(missing) > 1)} {names}{more} of {size} {'have' if missing[1:] else 'has'} not started"
    return f"{len(present)} of {here} ranks of {os.uname().nodename} have started, and not all of other machines"
