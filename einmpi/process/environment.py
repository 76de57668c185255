"""What the environment says about a rank before MPI has started: its launcher, rank and cores."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Set

# Set for each rank by the launchers of MPICH, Open MPI and Slurm.
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
_STEP_TASKS = "SLURM_STEP_NUM_TASKS"
# A Slurm step may be the one of mpirun's own helper processes, so its size is tried last.
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", _STEP_TASKS)
_NODE_SIZE_VARIABLES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")
_PMI_PREFIXES = ("PMI_", "PMIX_", "PALS_")


def python_command() -> list[str]:
    """Return the command that starts Python again, for a module of this package.

    The current folder is on the search path of that process only if it is on the one of this
    process, as with `python -m einmpi`: other users may be able to put modules there.
    """
    if sys.path and sys.path[0] in ("", os.getcwd()):
        return [sys.executable]
    return [sys.executable, "-P"]


def is_launched() -> bool:
    """Return whether a launcher started this process as a rank. Otherwise MPI stays off."""
    for name in (*RANK_VARIABLES, "MPI_LOCALRANKID"):
        if name in os.environ:
            return True
    # The batch script of a Slurm job has SLURM_PROCID too; only srun sets PMI variables as well.
    if "SLURM_PROCID" not in os.environ:
        return False
    return any(name.startswith(_PMI_PREFIXES) for name in os.environ)


def launcher_rank() -> int:
    """Return the rank that the launcher gave to this process, or 0 without a launcher."""
    return _first_number(*RANK_VARIABLES, "SLURM_PROCID") or 0


def launcher_size() -> int:
    """Return how many processes the launcher started, or 1 where it does not say."""
    return _first_number(*_SIZE_VARIABLES) or 1


def launcher_size_on_node() -> int | None:
    """Return how many processes the launcher started on this machine, or None if unknown."""
    if "MPI_LOCALNRANKS" not in os.environ:
        tasks_per_node = _slurm_tasks_per_node()
        node = _first_number("SLURM_NODEID")
        if node is not None and node < len(tasks_per_node):
            return tasks_per_node[node]
    return _first_number(*_NODE_SIZE_VARIABLES)


def slurm_step_tasks() -> int:
    """Return how many processes srun started, or 1 without srun."""
    return _first_number(_STEP_TASKS) or 1


def available_cores() -> Set[int]:
    """Return the numbers of the cores this process may use. Hardware threads count separately."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return frozenset(range(os.cpu_count() or 1))


def _slurm_tasks_per_node() -> list[int]:
    """Expand Slurm's notation: 4(x3),2 is [4, 4, 4, 2]."""
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts: list[int] = []
    for tasks, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(repeats or 1)
    return counts


def _first_number(*names: str) -> int | None:
    """Return the value of the first of these variables that is a number."""
    for name in names:
        value = os.environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return None
