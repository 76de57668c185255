"""The calls of one rank of a dry run, and their messages in the rounds of MpiComm."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from einmpi.comm.base import Array, CountingComm, Counts, Group, count_shared
from einmpi.comm.mpi import broadcasting_member, is_gathered_directly

# What MPICH does with a gather or a sum that einmpi leaves to MPI: below these bytes in all, few
# large messages in steps that double; otherwise one piece after another around a ring. SimGrid
# replays collectives of all ranks only, so those of a group are written as their messages.
DOUBLING_BYTES = 2**19

Message: TypeAlias = tuple[int, int]  # the other rank, and the bytes; 0 for no message


class CallComm(CountingComm):
    """Counts what a rank receives, and passes on each call with the bytes of its pieces.

    A subclass says what becomes of the calls.
    """

    def __init__(self, rank: int, nodes: tuple[int, ...]) -> None:
        super().__init__(rank, len(nodes), 1)
        self.nodes = nodes
        self.received_shared = 0

    @abstractmethod
    def exchange(self, group: Group, sent: Sequence[int], received: Sequence[int]) -> None:
        """Exchange pieces with all other members at once."""

    @abstractmethod
    def gather(self, group: Group, sizes: Sequence[int]) -> None:
        """Get the pieces of all members."""

    @abstractmethod
    def scatter_sums(self, group: Group, sizes: Sequence[int]) -> None:
        """Sum up what all members have, so that each gets its piece of the sum."""

    @abstractmethod
    def send_round(self, received: Message | None, sent: Message | None, ring: Group = ()) -> None:
        """Receive a message and send one at the same time, as all members of a group do.

        In a ring, each member sends to the next one.
        """

    @abstractmethod
    def barrier_among(self, group: Group) -> None:
        """Wait until all members of a group, which are on one node, have come here."""

    @abstractmethod
    def copy_shared(self, nbytes: int) -> None:
        """Copy bytes from memory that ranks share."""

    def read_shared(self, nbytes: int, copied: int) -> None:
        """Note bytes of other ranks in shared memory, and how many of them the rank copies."""
        count_shared(self, nbytes)
        if copied:
            self.copy_shared(copied)

    def alltoallv(
        self,
        group: Group,
        send: Array,
        send_counts: Counts,
        receive: Array,
        receive_counts: Counts,
    ) -> None:
        super().alltoallv(group, send, send_counts, receive, receive_counts)
        itemsize = send.dtype.itemsize
        self.exchange(group, _sizes(send_counts, itemsize), _sizes(receive_counts, itemsize))

    def allgatherv(self, group: Group, buffer: Array, counts: Counts) -> None:
        super().allgatherv(group, buffer, counts)
        self.gather(group, _sizes(counts, buffer.dtype.itemsize))

    def reduce_scatter(self, group: Group, send: Array, counts: Counts, receive: Array) -> bool:
        if not super().reduce_scatter(group, send, counts, receive):
            return False
        self.scatter_sums(group, _sizes(counts, send.dtype.itemsize))
        return True

    def sendrecv(
        self, to: int | None, send: Array | None, source: int | None, receive: Array | None
    ) -> None:
        super().sendrecv(to, send, source, receive)
        received = sent = None
        if source is not None and receive is not None:
            received = source, receive.nbytes
        if to is not None and send is not None:
            sent = to, send.nbytes
        self.send_round(received, sent)


def _sizes(counts: Counts, itemsize: int) -> list[int]:
    return [int(count) * itemsize for count in counts]


class MessageRounds(CallComm):
    """Takes every call apart into its messages.

    A subclass says what becomes of them: lines of a trace, or seconds.
    """

    @abstractmethod
    def send_together(self, receives: Sequence[Message], sends: Sequence[Message]) -> None:
        """Receive and send messages that are all on their way at the same time."""

    def barrier_rounds(self, group: Group) -> list[tuple[int, int]]:
        """Return for each round of a barrier the ranks that signal this one and that it signals."""
        place = group.index(self.rank)
        found = []
        for distance in barrier_distances(len(group)):
            found.append((group[place - distance], group[(place + distance) % len(group)]))
        return found

    def exchange(self, group: Group, sent: Sequence[int], received: Sequence[int]) -> None:
        """Post all receives, then all sends, each rank beginning with another one."""
        place = group.index(self.rank)
        receives = []
        sends = []
        for step in range(1, len(group)):
            source = place - step
            receives.append((group[source], received[source]))
            target = (place + step) % len(group)
            sends.append((group[target], sent[target]))
        self.send_together(receives, sends)

    def gather(self, group: Group, sizes: Sequence[int]) -> None:
        place = group.index(self.rank)
        if is_gathered_directly(group, sum(sizes)):
            self.exchange(group, [sizes[place]] * len(group), sizes)
            return
        rounds = rounds_of_gather(place, sizes)
        self._send_rounds(group, rounds, group if goes_around_ring(sizes) else ())

    def scatter_sums(self, group: Group, sizes: Sequence[int]) -> None:
        self._send_rounds(group, rounds_of_sums(group.index(self.rank), sizes))

    def _send_rounds(self, group: Group, rounds: Iterator[Round], ring: Group = ()) -> None:
        for each in rounds:
            received = group[each.source], int(each.received)
            self.send_round(received, (group[each.target], int(each.sent)), ring)


# ---- rounds --------------------------------------------------------------------------------------
#
# The places in a group are numbers, or arrays of numpy for many ranks at once; then the sizes are
# an array, too.


Places: TypeAlias = Any


class Round(NamedTuple):
    """The places of a rank's partners in its group, and the bytes."""

    source: Places
    received: Any
    target: Places
    sent: Any


def rounds_of_gather(place: Places, sizes: Any) -> Iterator[Round]:
    """Yield the rounds of a gather that is left to MPI."""
    root = broadcasting_member(sizes)
    if root is not None:
        return _along_tree(place, sizes, root)
    if is_doubling(sizes):
        return _by_halves(place, sizes, is_gather=True)
    return _around_ring(place, sizes)


def is_doubling(sizes: Any) -> bool:
    """Return whether a gather that is left to MPI goes in steps that double."""
    return len(sizes) > 2 and is_power_of_two(len(sizes)) and sum(sizes) < DOUBLING_BYTES


def goes_around_ring(sizes: Any) -> bool:
    """Return whether each rank only sends to the next one in a gather that is left to MPI."""
    return broadcasting_member(sizes) is None and not is_doubling(sizes)


def rounds_of_sums(place: Places, sizes: Any) -> Iterator[Round]:
    """Yield the rounds of sums that are left to MPI."""
    if is_power_of_two(len(sizes)):
        return _by_halves(place, sizes, is_gather=False)
    return _pair_by_pair(place, sizes)


def _along_tree(place: Places, sizes: Any, root: int) -> Iterator[Round]:
    """Each rank that has the only piece passes it on, first to the farthest half of the others."""
    size = len(sizes)
    behind = (place - root) % size
    for distance in reversed(barrier_distances(size)):
        sends = (behind % (2 * distance) == 0) & (behind + distance < size)
        receives = behind % (2 * distance) == distance
        source, target = (place - distance) % size, (place + distance) % size
        yield Round(source, sizes[root] * receives, target, sizes[root] * sends)


def _around_ring(place: Places, sizes: Any) -> Iterator[Round]:
    """Each rank passes on the piece that came last."""
    size = len(sizes)
    for step in range(size - 1):
        received = sizes[(place - step - 1) % size]
        yield Round((place - 1) % size, received, (place + 1) % size, sizes[(place - step) % size])


def _by_halves(place: Places, sizes: Any, is_gather: bool) -> Iterator[Round]:
    """Exchange pieces with ranks whose distance doubles, or halves where sums are scattered.

    In each round of a gather, two ranks exchange all that they have; in one of a sum, each gets the
    half that it needs.
    """
    bytes_before = np.concatenate([[0], np.cumsum(sizes)])
    distances = [2**number for number in range(len(sizes).bit_length() - 1)]
    for distance in distances if is_gather else reversed(distances):
        other = place ^ distance
        first = place // distance * distance
        others_first = other // distance * distance
        own = bytes_before[first + distance] - bytes_before[first]
        others = bytes_before[others_first + distance] - bytes_before[others_first]
        received, sent = (others, own) if is_gather else (own, others)
        yield Round(other, received, other, sent)


def _pair_by_pair(place: Places, sizes: Any) -> Iterator[Round]:
    size = len(sizes)
    for step in range(1, size):
        target = (place + step) % size
        yield Round((place - step) % size, sizes[place], target, sizes[target])


def barrier_distances(size: int) -> list[int]:
    """Return for each round of a barrier how far the rank is that each member signals."""
    return [2**number for number in range((size - 1).bit_length())]


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
