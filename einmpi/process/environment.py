"""A rank before it has MPI: what its launcher has told it, its cores, and which other ranks of its machine it sees."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import zlib
from collections.abc import Set

# Set by the launchers of MPICH, Open MPI and Slurm: without one of them this is a single process, and MPI stays off.
_RANK = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")
# A step of Slurm may also be that of mpirun's helpers, so its size counts last.
_STEP = "SLURM_STEP_NUM_TASKS"
_SIZE = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", _STEP)
_SIZE_HERE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")

_kept: list[socket.socket] = []


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


def tasks_of_step() -> int:
    """How many processes srun started; 1 where it did not."""
    return _number((_STEP,)) or 1


def given_size_here() -> int | None:
    """How many of them on this machine, where that is known."""
    tasks = re.findall(
        r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    )  # such as 4(x3),2
    nodes = [int(count) for count, times in tasks for _ in range(int(times or 1))]
    node = _number(("SLURM_NODEID",))
    if "MPI_LOCALNRANKS" not in os.environ and node is not None and node < len(nodes):
        return nodes[node]
    return _number(_SIZE_HERE)


def _number(names: tuple[str, ...]) -> int | None:
    return next(
        (int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()), None
    )


def own_cores() -> Set[int]:
    """The cores that this process may use, by number; threads of one core count as several."""
    return (
        os.sched_getaffinity(0)
        if hasattr(os, "sched_getaffinity")
        else frozenset(range(os.cpu_count() or 1))
    )


# ---- who is here ----------------------------------------------------------------------------------------------------


def take(name: str) -> bool:
    """Take a name that one rank of a machine can have; it goes with its process. Whether this one has it now."""
    mine = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        mine.bind(_address(name))
    except OSError as error:
        mine.close()
        return (
            error.errno != errno.EADDRINUSE
        )  # no such names on this system: everybody is the first
    _kept.append(mine)
    return True


def taken(name: str) -> bool:
    """Whether a rank of this machine has the name now."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as knock:
        try:
            knock.connect(_address(name))
        except OSError:
            return False
    return True


def present() -> list[int]:
    """The ranks of this machine that have taken their number as a name."""
    return [rank for rank in range(given_size()) if taken(str(rank))]


def _address(name: str) -> str:
    """Ranks of one run have the same launcher: above them, and above the scripts that they may be wrapped in."""
    launcher = os.getppid()
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{os.getpgrp()}/stat") as file:
        launcher = int(file.read().rpartition(")")[2].split()[1])
    run = zlib.crc32(
        os.environ.get("PMIX_NAMESPACE", "").encode()
    )  # a launcher may have several runs
    return f"\0einmpi-{launcher}-{run:08x}-{name}"
