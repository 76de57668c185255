"""What a message and a byte take, inside a node and between nodes, by the calls that a run makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from einmpi.cli.calibrate.clock import seconds_of
from einmpi.comm.base import Comm, Group

_ROUNDS = 20  # of small messages, timed together
_SMALLEST, _LARGEST = (
    2**16,
    2**24,
)  # bytes that a rank gets in an exchange; runs send no more in one
_SIZES = 3  # that count: small ones say more about latency


def inside_and_between(nodes: Sequence[int], rank: int) -> tuple[Group, Group]:
    """The ranks of this rank's node, and those on all nodes that have the same place as this one; `nodes` has the node
    of every rank. All ranks of a node belong to different groups of the second kind, so they share the network."""
    members: dict[int, list[int]] = {}
    for other, node in enumerate(nodes):
        members.setdefault(node, []).append(other)
    inside = members[nodes[rank]]
    place = inside.index(rank)
    return tuple(inside), tuple(
        sorted(found[place] for found in members.values() if place < len(found))
    )


def latency(comm: Comm, group: Group, budget: float) -> float:
    """Seconds for a small message. Around a ring: a rank sends on what it was sent, so a round takes one message."""
    me, byte, back = group.index(comm.rank), np.zeros(1, np.uint8), np.zeros(1, np.uint8)

    def rounds() -> None:
        for _ in range(_ROUNDS if len(group) > 1 else 0):
            comm.sendrecv(group[(me + 1) % len(group)], byte, group[me - 1], back)

    return seconds_of(comm, rounds, budget) / _ROUNDS


def byte_time(comm: Comm, group: Group, budget: float) -> float:
    """Seconds for a byte that a rank gets from the others of its group, all at once: the median of the largest sizes
    that there is time for."""
    found: list[float] = []
    size, left = _SMALLEST, budget
    while size <= _LARGEST and (
        not found or 5 * size * found[-1] < left
    ):  # 5 is about the fewest repeats
        seconds = seconds_of(comm, _exchange(comm, group, size), budget / 8)
        found.append(seconds / size)
        left -= 5 * seconds
        size *= 4
    return median(found[-_SIZES:])


def _exchange(comm: Comm, group: Group, size: int) -> Callable[[], None]:
    others = max(1, len(group) - 1)
    counts = [0 if member == comm.rank else -(-size // others) for member in group]
    send, receive = np.ones(sum(counts), np.uint8), np.zeros(sum(counts), np.uint8)
    return lambda: comm.alltoallv(group, send, counts, receive, counts)
