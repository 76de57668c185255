"""The times of a message and of a byte, inside a node and between nodes, by the calls of a run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from einmpi.cli.calibrate.clock import Action, Figure
from einmpi.comm.base import Comm, Group

_SMALL_MESSAGES = 20  # that are timed together
# Bytes that a rank receives in an exchange, up to the largest of a run.
_EXCHANGES = tuple(4**power for power in range(8, 13))


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


def latency(comm: Comm, group: Group, budget: float) -> Figure:
    """Return the figure of a small message.

    The ranks send around a ring: each sends on what it has received, so a round takes one message.
    """
    place = group.index(comm.rank)
    following = group[(place + 1) % len(group)]
    preceding = group[place - 1]
    outgoing = np.zeros(1, np.uint8)
    incoming = np.zeros(1, np.uint8)

    def send_around(messages: int) -> None:
        if len(group) == 1:
            return
        for _ in range(messages):
            comm.sendrecv(following, outgoing, preceding, incoming)

    return Figure(comm, lambda size: partial(send_around, size), float, (_SMALL_MESSAGES,), budget)


def byte_time(comm: Comm, group: Group, budget: float) -> Figure:
    """Return the figure of a byte that a rank receives from the others of its group at once."""
    return Figure(comm, lambda size: _exchange(comm, group, size), float, _EXCHANGES, budget)


def _exchange(comm: Comm, group: Group, size: int) -> Action:
    """Return a function in which each rank of the group receives `size` bytes from the others."""
    others = max(1, len(group) - 1)
    bytes_from_each = -(-size // others)
    counts = [0 if member == comm.rank else bytes_from_each for member in group]
    send = np.ones(sum(counts), np.uint8)
    receive = np.zeros(sum(counts), np.uint8)
    return lambda: comm.alltoallv(group, send, counts, receive, counts)
