"""Large messages, between pairs of ranks and in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from einmpi.comm.base import Comm
from einmpi.runtime.backend import Array
from einmpi.runtime.buffers import Buffers
from einmpi.schedule.regions import Region, chunks, elements, flat_range
from einmpi.schedule.steps import Slot


def rounds(group: Sequence[int], me: int) -> Iterator[tuple[int, int]]:
    """Yield rounds (to, from): in each, every member sends to one and receives from one."""
    size = len(group)
    for distance in range(1, size):
        yield (me + distance) % size, (me - distance) % size


def extents_of(slot: Slot) -> tuple[int, ...]:
    return slot.shape or (1,)


def slice_of(region: Region, slot: Slot) -> slice | None:
    """Return where a region is in a slot whose elements are in a row; None if it has gaps."""
    found = flat_range(region, extents_of(slot))
    return None if found is None else slice(*found)


@dataclass(frozen=True)
class Pairs:
    """Messages between pairs of members, in pieces that fit into a buffer each."""

    source: Slot
    target: Slot
    group: Sequence[int]
    limit: int  # elements of a message
    aggregation: str | None = None  # of what arrives with what is there; None: it is replaced

    def send_and_receive(
        self,
        to: int,
        sent: Region | None,
        source: int,
        received: Region | None,
        buffers: Buffers,
        comm: Comm,
    ) -> None:
        """Send one region to a member, and receive one from a member."""
        sends: list[Region | None] = [] if sent is None else [*chunks(sent, self.limit)]
        receives: list[Region | None] = [] if received is None else [*chunks(received, self.limit)]
        count = max(len(sends), len(receives))
        sends += [None] * (count - len(sends))
        receives += [None] * (count - len(receives))
        for send, receive in zip(sends, receives, strict=True):
            with ExitStack() as stack:
                outgoing = self._outgoing(send, buffers, stack)
                incoming = self._incoming(receive, buffers, stack)
                comm.sendrecv(
                    None if send is None else self.group[to],
                    outgoing,
                    None if receive is None else self.group[source],
                    incoming,
                )
                if receive is not None:
                    self._unpack(incoming, receive, buffers)

    def _outgoing(self, region: Region | None, buffers: Buffers, stack: ExitStack) -> Array:
        """Return the part of the slot itself if it is contiguous, else a buffer with it."""
        if region is None:
            return None
        place = slice_of(region, self.source)
        if place is not None:
            return buffers[self.source].reshape(-1)[place]
        buffer = stack.enter_context(buffers.message_buffer(elements(region), self.source))
        buffers.backend.pack(buffers[self.source], region, buffer)
        return buffer

    def _incoming(self, region: Region | None, buffers: Buffers, stack: ExitStack) -> Array:
        """Return the part of the slot itself if it is contiguous and replaced, else a buffer."""
        if region is None:
            return None
        place = slice_of(region, self.target)
        if place is not None and self.aggregation is None:
            return buffers[self.target].reshape(-1)[place]
        return stack.enter_context(buffers.message_buffer(elements(region), self.target))

    def _unpack(self, incoming: Array, region: Region, buffers: Buffers) -> None:
        """Put a message at its place in the slot, unless it was received there."""
        if self.aggregation is not None:
            buffers.backend.combine(self.aggregation, buffers[self.target], region, incoming)
        elif slice_of(region, self.target) is None:
            buffers.backend.unpack(incoming, buffers[self.target], region)
