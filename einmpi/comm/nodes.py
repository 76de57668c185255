"""Which ranks of a communicator share a node. `mpi` is mpi4py's module, which this one does not import."""

from __future__ import annotations

import os
import zlib
from typing import Any

import numpy as np

from einmpi.process.environment import available_cores


def by_node(comm: Any, mpi: Any) -> tuple[Any, tuple[int, ...]]:
    """A duplicate of a communicator, and the node of each of its ranks. A mesh wants the ranks of a node together."""
    ours = comm.Dup()
    node = _neighbours(ours, mpi)
    first = np.array([node.bcast(ours.rank)], np.int64)  # the lowest rank there stands for the node
    node.Free()
    firsts = np.empty(ours.size, np.int64)
    ours.Allgather([first, mpi.INT64_T], [firsts, mpi.INT64_T])
    places = np.unique(firsts, return_inverse=True)[1]
    if (np.diff(places) < 0).any():
        sorted_ = ours.Split(0, int(places[ours.rank]) * ours.size + ours.rank)
        ours.Free()
        return sorted_, tuple(np.sort(places).tolist())
    return ours, tuple(places.tolist())


def node_of(comm: Any, mpi: Any) -> tuple[int, int, int]:
    """How many ranks this node has, which of them this one is, and how many cores they have together: each may be
    bound to its own."""
    node = _neighbours(comm, mpi)
    ranks, rank, together = node.size, node.rank, set().union(*node.allgather(available_cores()))
    node.Free()
    return ranks, rank, len(together)


def _neighbours(comm: Any, mpi: Any) -> Any:
    """A communicator of the ranks on this node."""
    node = comm.Split_type(mpi.COMM_TYPE_SHARED)
    if comm.allreduce(node.size, mpi.MAX) > 1 or comm.size == 1:
        return node
    # No two ranks share memory: they are on nodes of their own, or MPI does not know better, as Open MPI under srun and
    # some builds of MPICH do not. Names tell: first groups of names that look alike, then of names that are alike.
    node.Free()
    name = f"{mpi.Get_processor_name()} {os.environ.get('SLURMD_NODENAME', '')}"
    alike = comm.Split(zlib.crc32(name.encode()) % 2**31)
    names = alike.allgather(name)
    node = alike.Split(names.index(name))
    alike.Free()
    return node
