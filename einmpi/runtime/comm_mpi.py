"""The only module that imports mpi4py."""

from __future__ import annotations

import os
import time
from typing import Any

# Set by the launchers of MPICH, Open MPI and Slurm: without one of them this is a single process, and MPI stays off.
_LAUNCHED = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")


def world() -> Any | None:
    """The world communicator when a launcher started this process, else None."""
    if not any(name in os.environ for name in _LAUNCHED):
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD


def wait_for_status(comm: Any, status: int | None) -> int:
    """Rank 0 passes its exit status; the others sleep until it comes, so that they take no core from it."""
    import numpy as np

    box = np.array([0 if status is None else status])
    request = comm.Ibcast(box, root=0)
    while not request.Test():
        time.sleep(0.01)
    return int(box[0])
