"""The times of a message and of a byte, inside a node and between nodes, by the calls of a run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from einmpi.cli.calibrate.clock import Action, Figure
from einmpi.comm.base import Group
from einmpi.compiled.backends import Workplace
from einmpi.runtime.backend import Array

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


def latency(workplace: Workplace, group: Group, budget: float) -> Figure:
    """Return the figure of a small message.

    The ranks send around a ring: each sends on what it has received, so a round takes one message.
    """
    comm = workplace.comm
    place = group.index(comm.rank)
    following = group[(place + 1) % len(group)]
    preceding = group[place - 1]
    outgoing = _bytes(workplace, 1)
    incoming = _bytes(workplace, 1)

    def send_around(messages: int) -> None:
        if len(group) == 1:
            return
        for _ in range(messages):
            comm.sendrecv(following, outgoing, preceding, incoming)
        workplace.backend.wait()

    return Figure(comm, lambda size: partial(send_around, size), float, (_SMALL_MESSAGES,), budget)


def byte_time(workplace: Workplace, group: Group, budget: float) -> Figure:
    """Return the figure of a byte that a rank receives from the others of its group at once."""
    action_of = partial(_exchange, workplace, group)
    return Figure(workplace.comm, action_of, float, _EXCHANGES, budget)


def _exchange(workplace: Workplace, group: Group, size: int) -> Action:
    """Return a function in which each rank of the group receives `size` bytes from the others."""
    comm = workplace.comm
    others = max(1, len(group) - 1)
    bytes_from_each = -(-size // others)
    counts = [0 if member == comm.rank else bytes_from_each for member in group]
    send = _bytes(workplace, sum(counts))
    receive = _bytes(workplace, sum(counts))

    def exchange() -> None:
        comm.alltoallv(group, send, counts, receive, counts)
        workplace.backend.wait()

    return exchange


def _bytes(workplace: Workplace, count: int) -> Array:
    """Return an array whose memory the system has already provided."""
    array = workplace.backend.allocate_message(count, "uint8", slow=False)
    workplace.backend.from_host(np.ones(count, np.uint8), array)
    return array
