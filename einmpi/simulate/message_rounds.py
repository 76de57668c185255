"""The messages of one rank of a dry run, in the rounds in which MpiComm would send them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

from einmpi.comm.base import Array, CountingComm, Counts, Group, count_shared
from einmpi.comm.mpi import is_gathered_directly

# What MPICH does with a gather or a sum that einmpi leaves to MPI: below these bytes in all, few
# large messages in steps that double; otherwise one piece after another around a ring. SimGrid
# replays collectives of all ranks only, so those of a group are written as their messages.
DOUBLING_BYTES = 2**19

Message: TypeAlias = tuple[int, int]  # the other rank, and the bytes; 0 for no message


class MessageRounds(CountingComm):
    """Counts what a rank receives, and takes every call apart into its messages.

    A subclass says what becomes of them: lines of a trace, or seconds.
    """

    def __init__(self, rank: int, nodes: tuple[int, ...]) -> None:
        super().__init__(rank, len(nodes), 1)
        self.nodes = nodes
        self.received_shared = 0

    @abstractmethod
    def send_together(self, receives: Sequence[Message], sends: Sequence[Message]) -> None:
        """Receive and send messages that are all on their way at the same time."""

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

    def barrier_rounds(self, group: Group) -> list[tuple[int, int]]:
        """Return for each round of a barrier the ranks that signal this one and that it signals."""
        place = group.index(self.rank)
        found = []
        distance = 1
        while distance < len(group):
            found.append((group[place - distance], group[(place + distance) % len(group)]))
            distance *= 2
        return found

    # ---- payload ---------------------------------------------------------------------------------

    def alltoallv(
        self,
        group: Group,
        send: Array,
        send_counts: Counts,
        receive: Array,
        receive_counts: Counts,
    ) -> None:
        super().alltoallv(group, send, send_counts, receive, receive_counts)
        self._exchange_with_all(group, send_counts, receive_counts, send.dtype.itemsize)

    def allgatherv(self, group: Group, buffer: Array, counts: Counts) -> None:
        super().allgatherv(group, buffer, counts)
        place = group.index(self.rank)
        sizes = [count * buffer.dtype.itemsize for count in counts]
        if is_gathered_directly(group, buffer):
            own = [counts[place]] * len(group)
            self._exchange_with_all(group, own, counts, buffer.dtype.itemsize)
        elif len(group) > 2 and is_power_of_two(len(group)) and sum(sizes) < DOUBLING_BYTES:
            self._exchange_by_halves(group, place, sizes, is_gather=True)
        else:
            self._gather_around_ring(group, place, sizes)

    def reduce_scatter(self, group: Group, send: Array, counts: Counts, receive: Array) -> bool:
        if not super().reduce_scatter(group, send, counts, receive):
            return False
        sizes = [count * send.dtype.itemsize for count in counts]
        place = group.index(self.rank)
        if is_power_of_two(len(group)):
            self._exchange_by_halves(group, place, sizes, is_gather=False)
        else:
            self._scatter_pair_by_pair(group, place, sizes)
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

    def _exchange_with_all(
        self, group: Group, send_counts: Counts, receive_counts: Counts, itemsize: int
    ) -> None:
        """Post all receives, then all sends, each rank beginning with another one."""
        place = group.index(self.rank)
        receives = []
        sends = []
        for step in range(1, len(group)):
            source = place - step
            receives.append((group[source], receive_counts[source] * itemsize))
            target = (place + step) % len(group)
            sends.append((group[target], send_counts[target] * itemsize))
        self.send_together(receives, sends)

    def _gather_around_ring(self, group: Group, place: int, sizes: Sequence[int]) -> None:
        """Each rank passes on the piece that came last."""
        following = group[(place + 1) % len(group)]
        for step in range(len(group) - 1):
            received = group[place - 1], sizes[place - step - 1]
            self.send_round(received, (following, sizes[place - step]), group)

    def _exchange_by_halves(
        self, group: Group, place: int, sizes: Sequence[int], is_gather: bool
    ) -> None:
        """Exchange pieces with ranks whose distance doubles, or halves where sums are scattered.

        In each round of a gather, two ranks exchange all that they have; in one of a sum, each gets
        the half that it needs.
        """
        distances = [2**number for number in range(len(group).bit_length() - 1)]
        for distance in distances if is_gather else reversed(distances):
            other = place ^ distance
            first = place // distance * distance
            others_first = other // distance * distance
            own = sum(sizes[first : first + distance])
            others = sum(sizes[others_first : others_first + distance])
            received, sent = (others, own) if is_gather else (own, others)
            self.send_round((group[other], received), (group[other], sent))

    def _scatter_pair_by_pair(self, group: Group, place: int, sizes: Sequence[int]) -> None:
        for step in range(1, len(group)):
            target = (place + step) % len(group)
            self.send_round((group[place - step], sizes[place]), (group[target], sizes[target]))


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
