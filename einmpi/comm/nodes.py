"""Which ranks of a communicator share a node. `mpi` is mpi4py's module, not imported here."""

from __future__ import annotations

import os
import zlib
from typing import Any, NamedTuple

import numpy as np

from einmpi.process.environment import available_cores


class Node(NamedTuple):
    """The node of a rank: its ranks, the place of this one, and the cores of all of them."""

    ranks: int
    rank: int
    cores: int


def sort_by_node(comm: Any, mpi: Any) -> tuple[Any, tuple[int, ...]]:
    """Return a duplicate of a communicator in which the ranks of a node follow each other.

    Also return the node of each rank. A mesh needs the ranks of a node together.
    """
    duplicate = comm.Dup()
    on_node = _ranks_on_node(duplicate, mpi)
    lowest_rank = np.array([on_node.bcast(duplicate.rank)], np.int64)  # stands for the node
    on_node.Free()
    lowest_ranks = np.empty(duplicate.size, np.int64)
    duplicate.Allgather([lowest_rank, mpi.INT64_T], [lowest_ranks, mpi.INT64_T])
    nodes = np.unique(lowest_ranks, return_inverse=True)[1]
    is_sorted = bool((np.diff(nodes) >= 0).all())
    if is_sorted:
        return duplicate, tuple(nodes.tolist())
    key = int(nodes[duplicate.rank]) * duplicate.size + duplicate.rank
    reordered = duplicate.Split(0, key)
    duplicate.Free()
    return reordered, tuple(np.sort(nodes).tolist())


def node_of(comm: Any, mpi: Any) -> Node:
    """Describe the node of this rank. Its ranks may be bound to different cores."""
    on_node = _ranks_on_node(comm, mpi)
    cores: set[int] = set()
    for cores_of_rank in on_node.allgather(available_cores()):
        cores |= cores_of_rank
    node = Node(on_node.size, on_node.rank, len(cores))
    on_node.Free()
    return node


def _ranks_on_node(comm: Any, mpi: Any) -> Any:
    """Return a communicator of the ranks on this node."""
    on_node = comm.Split_type(mpi.COMM_TYPE_SHARED)
    if comm.allreduce(on_node.size, mpi.MAX) > 1 or comm.size == 1:
        return on_node
    # No two ranks share memory: each is on a node of its own, or MPI does not know better, like
    # Open MPI under srun and some builds of MPICH. Then names of machines decide: ranks are first
    # grouped by a hash of the name, then by the name itself.
    on_node.Free()
    name = f"{mpi.Get_processor_name()} {os.environ.get('SLURMD_NODENAME', '')}"
    same_hash = comm.Split(zlib.crc32(name.encode()) % 2**31)
    names = same_hash.allgather(name)
    on_node = same_hash.Split(names.index(name))
    same_hash.Free()
    return on_node
