"""The times of a message and of a byte, inside a node and between nodes, by the calls of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from einmpi.cli.calibrate.clock import measure_seconds
from einmpi.comm.base import Comm, Group

_ROUNDS = 20  # of small messages that are timed together
# Bytes that a rank receives in an exchange, from the first measured one to the largest of a run.
_SMALLEST_EXCHANGE = 2**16
_LARGEST_EXCHANGE = 2**24
_GROWTH = 4  # from one size to the next
_COUNTED_SIZES = 3  # only the largest ones count: small ones say more about latency
_FEWEST_REPEATS = 5  # about as many as `measure_seconds` makes at least


def inside_and_between(nodes: Sequence[int], rank: int) -> tuple[Group, Group]:
    """Return the ranks on the node of a rank, and the ranks with the same place on all nodes.

    `nodes` is the node of each rank. The ranks of a node are in different groups of the second
    kind, so that they share the network.
    """
    ranks_of_node: dict[int, list[int]] = {}
    for other, node in enumerate(nodes):
        ranks_of_node.setdefault(node, []).append(other)
    inside = ranks_of_node[nodes[rank]]
    place = inside.index(rank)
    between = [ranks[place] for ranks in ranks_of_node.values() if place < len(ranks)]
    return tuple(inside), tuple(sorted(between))


def latency(comm: Comm, group: Group, budget: float) -> float:
    """Return the seconds of a small message.

    The ranks send around a ring: each sends on what it has received, so a round takes one message.
    """
    place = group.index(comm.rank)
    following = group[(place + 1) % len(group)]
    preceding = group[place - 1]
    outgoing = np.zeros(1, np.uint8)
    incoming = np.zeros(1, np.uint8)

    def send_around() -> None:
        if len(group) == 1:
            return
        for _ in range(_ROUNDS):
            comm.sendrecv(following, outgoing, preceding, incoming)

    return measure_seconds(comm, send_around, budget) / _ROUNDS


def byte_time(comm: Comm, group: Group, budget: float) -> float:
    """Return the seconds per byte that a rank receives from the others of its group at once.

    This is the median of the largest sizes that there is time for.
    """
    found: list[float] = []
    size = _SMALLEST_EXCHANGE
    remaining = budget
    while size <= _LARGEST_EXCHANGE:
        if found and _FEWEST_REPEATS * size * found[-1] >= remaining:
            break
        seconds = measure_seconds(comm, _exchange(comm, group, size), budget / 8)
        found.append(seconds / size)
        remaining -= _FEWEST_REPEATS * seconds
        size *= _GROWTH
    return median(found[-_COUNTED_SIZES:])


def _exchange(comm: Comm, group: Group, size: int) -> Callable[[], None]:
    """Return a function in which each rank of the group receives `size` bytes from the others."""
    others = max(1, len(group) - 1)
    bytes_from_each = -(-size // others)
    counts = [0 if member == comm.rank else bytes_from_each for member in group]
    send = np.ones(sum(counts), np.uint8)
    receive = np.zeros(sum(counts), np.uint8)
    return lambda: comm.alltoallv(group, send, counts, receive, counts)
