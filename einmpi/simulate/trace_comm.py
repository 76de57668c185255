"""One rank of a dry run that notes its messages: the lines of a trace that SimGrid replays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import IntEnum

from einmpi.comm.base import (
    SUMMABLE,
    Array,
    Counts,
    Group,
    allgatherv_bytes,
    alltoallv_bytes,
    count_received,
    count_shared,
    reduce_scatter_bytes,
    sendrecv_bytes,
)
from einmpi.comm.local import CountingComm
from einmpi.comm.mpi import MOST_BYTES, is_gathered_directly

# What MPICH does with a gather or a sum that einmpi leaves to MPI: below these bytes in all, few
# large messages in steps that double; otherwise one piece after another around a ring. SimGrid
# replays collectives of all ranks only, so those of a group are written as their messages.
DOUBLING_BYTES = 2**19
BYTES_OF_A_SIGNAL = 1  # of a barrier


class Tag(IntEnum):
    """What a message of a trace is."""

    PAYLOAD = 0  # elements that one rank passes to another
    SIGNAL = 1  # a round of a barrier, which is not counted
    COPY = 2  # a rank copies from memory that it shares: a message to itself, which is not counted


BYTE = 6  # the number of MPI_BYTE in a trace
_PAYLOAD = int(Tag.PAYLOAD)  # quicker to write than a member of an Enum


class TraceComm(CountingComm):
    """Counts what a rank receives, and writes down the messages in which MpiComm would send it."""

    def __init__(self, rank: int, nodes: tuple[int, ...]) -> None:
        super().__init__(rank, len(nodes), 1)
        self.nodes = nodes
        self.received_shared = 0
        self.lines: list[str] = []
        self.messages = 0  # that it sends, with elements
        self.signals = 0

    def add(self, action: str) -> None:
        """Add an action to the trace."""
        self.lines.append(f"{self.rank} {action}")

    # ---- payload ---------------------------------------------------------------------------------

    def alltoallv(
        self,
        group: Group,
        send: Array,
        send_counts: Counts,
        receive: Array,
        receive_counts: Counts,
    ) -> None:
        received = alltoallv_bytes(self, group, send, send_counts, receive, receive_counts)
        count_received(self, received)
        self._exchange_with_all(group, send_counts, receive_counts, send.dtype.itemsize)

    def allgatherv(self, group: Group, buffer: Array, counts: Counts) -> None:
        count_received(self, allgatherv_bytes(self, group, buffer, counts))
        place = group.index(self.rank)
        sizes = [count * buffer.dtype.itemsize for count in counts]
        if is_gathered_directly(group, buffer):
            own = [counts[place]] * len(group)
            self._exchange_with_all(group, own, counts, buffer.dtype.itemsize)
        elif len(group) > 2 and is_power_of_two(len(group)) and sum(sizes) < DOUBLING_BYTES:
            self._gather_by_doubling(group, place, sizes)
        else:
            self._gather_around_ring(group, place, sizes)

    def reduce_scatter(self, group: Group, send: Array, counts: Counts, receive: Array) -> bool:
        received = reduce_scatter_bytes(self, group, send, counts, receive)
        if send.dtype.name not in SUMMABLE:
            return False
        count_received(self, received)
        sizes = [count * send.dtype.itemsize for count in counts]
        place = group.index(self.rank)
        if is_power_of_two(len(group)):
            self._scatter_by_halving(group, place, sizes)
        else:
            self._scatter_pair_by_pair(group, place, sizes)
        return True

    def sendrecv(
        self, to: int | None, send: Array | None, source: int | None, receive: Array | None
    ) -> None:
        count_received(self, sendrecv_bytes(self, to, send, source, receive))
        if source is not None and receive is not None:
            self._receive(source, receive.nbytes)
        if to is not None and send is not None:
            self._send(to, send.nbytes)
        self._wait()

    def _exchange_with_all(
        self, group: Group, send_counts: Counts, receive_counts: Counts, itemsize: int
    ) -> None:
        """Post all receives, then all sends, each rank beginning with another one."""
        place = group.index(self.rank)
        for step in range(1, len(group)):
            source = place - step
            self._receive(group[source], receive_counts[source] * itemsize)
        for step in range(1, len(group)):
            target = (place + step) % len(group)
            self._send(group[target], send_counts[target] * itemsize)
        self._wait()

    def _gather_around_ring(self, group: Group, place: int, sizes: Sequence[int]) -> None:
        """Each rank passes on the piece that came last."""
        following = group[(place + 1) % len(group)]
        for step in range(len(group) - 1):
            self._receive(group[place - 1], sizes[place - step - 1])
            self._send(following, sizes[place - step])
            self._wait()

    def _gather_by_doubling(self, group: Group, place: int, sizes: Sequence[int]) -> None:
        """In each round, two ranks exchange all that they have."""
        distance = 1
        while distance < len(group):
            other = place ^ distance
            first = place // distance * distance
            others_first = other // distance * distance
            self._receive(group[other], sum(sizes[others_first : others_first + distance]))
            self._send(group[other], sum(sizes[first : first + distance]))
            self._wait()
            distance *= 2

    def _scatter_by_halving(self, group: Group, place: int, sizes: Sequence[int]) -> None:
        """In each round, two ranks exchange the half of the sums that the other one needs."""
        distance = len(group) // 2
        while distance:
            other = place ^ distance
            first = place // distance * distance
            others_first = other // distance * distance
            self._receive(group[other], sum(sizes[first : first + distance]))
            self._send(group[other], sum(sizes[others_first : others_first + distance]))
            self._wait()
            distance //= 2

    def _scatter_pair_by_pair(self, group: Group, place: int, sizes: Sequence[int]) -> None:
        for step in range(1, len(group)):
            self._receive(group[place - step], sizes[place])
            target = (place + step) % len(group)
            self._send(group[target], sizes[target])
            self._wait()

    def _receive(self, source: int, nbytes: int) -> None:
        for part in parts_of(nbytes):
            self.add(f"irecv {source} {_PAYLOAD} {part} {BYTE}")

    def _send(self, to: int, nbytes: int) -> None:
        for part in parts_of(nbytes):
            self.add(f"isend {to} {_PAYLOAD} {part} {BYTE}")
            self.messages += 1

    def _wait(self) -> None:
        if self.lines and not self.lines[-1].endswith("waitall"):
            self.add("waitall")

    # ---- shared memory ---------------------------------------------------------------------------

    def barrier_among(self, group: Group) -> None:
        place = group.index(self.rank)
        distance = 1
        while distance < len(group):
            source = group[place - distance]
            target = group[(place + distance) % len(group)]
            self.add(f"irecv {source} {Tag.SIGNAL:d} {BYTES_OF_A_SIGNAL} {BYTE}")
            self.add(f"isend {target} {Tag.SIGNAL:d} {BYTES_OF_A_SIGNAL} {BYTE}")
            self.add("waitall")
            self.signals += 1
            distance *= 2

    def read_shared(self, nbytes: int, copied: int) -> None:
        """Note bytes of other ranks in shared memory, and how many of them the rank copies."""
        count_shared(self, nbytes)
        if copied:
            self.add(f"irecv {self.rank} {Tag.COPY:d} {copied} {BYTE}")
            self.add(f"isend {self.rank} {Tag.COPY:d} {copied} {BYTE}")
            self.add("waitall")


def parts_of(nbytes: int) -> list[int]:
    """Return the sizes of the messages in which MPI can count so many bytes."""
    sizes = [MOST_BYTES] * (nbytes // MOST_BYTES)
    if nbytes % MOST_BYTES:
        sizes.append(nbytes % MOST_BYTES)
    return sizes


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def payload_bytes(lines: Sequence[str]) -> Counter[str]:
    """Return the bytes of elements that a trace sends and receives: isend and irecv."""
    found: Counter[str] = Counter()
    for line in lines:
        words = line.split()
        if words[1] in ("isend", "irecv") and int(words[3]) == Tag.PAYLOAD:
            found[words[1]] += int(words[4])
    return found
