"""Exchange and Reduce steps: pack, call the communicator once, unpack. Large messages go between
pairs of ranks, in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod

import numpy as np

from einmpi.comm.base import Comm
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.runtime.backend import Array
from einmpi.runtime.buffers import Buffers
from einmpi.schedule.regions import Region, chunks, elements, flat_range
from einmpi.schedule.steps import MESSAGE_BUFFER_BYTES, Exchange, Reduce, Slot

# MPI's own reduction needs few messages, but aggregates slowly: on two ranks it takes 2 to 5 times
# as long as ours for 32 MB. It is used for small slots in large groups.
LARGE_GROUP = 16  # ranks
SMALL_SLOT_BYTES = 2**16


def exchange(step: Exchange, buffers: Buffers, comm: Comm) -> None:
    """Build the target's block from the blocks of a group."""
    moves = step.moves
    buffers.make(step.target)
    if moves.own is not None:
        _copy_own(step, buffers)
    if len(moves.group) == 1:
        return
    # Every choice is the same on all members: it depends on nothing that differs between them.
    at_once = moves.fits_at_once(_buffer_elements(step, step.target))
    if moves.same_to_all:
        pieces = _pieces_of_all(step)
        counts = _contiguous_counts(pieces, step.target)
        if counts is not None:
            flat = buffers[step.target].reshape(-1)
            comm.allgatherv(moves.group, flat[: sum(counts)], counts)
            return
        if at_once:
            _gather_at_once(step, pieces, buffers, comm)
            return
    if at_once:
        _exchange_at_once(step, buffers, comm)
        return
    pairs = _Pairs(step.source, step.target, moves.group, _buffer_elements(step, step.target))
    for to, source in _rounds(moves.group, moves.me):
        pairs.send_and_receive(to, moves.sends[to], source, moves.receives[source], buffers, comm)


def reduce(step: Reduce, buffers: Buffers, comm: Comm) -> None:
    """Aggregate each member's piece of a slot over the group, in place."""
    group, me, pieces = step.reduction.group, step.reduction.me, step.reduction.pieces
    if len(group) == 1:
        return
    # All members know all pieces, so they choose alike. A piece much larger than the others would
    # take too large a buffer.
    most = (len(group) - 1) * max(map(_count, pieces))
    fits = step.slot.nbytes <= _buffer_bytes(step)
    if fits and most <= prod(step.slot.shape) + len(group):
        _reduce_at_once(step, buffers, comm)
        return
    limit = _buffer_elements(step, step.slot)
    pairs = _Pairs(step.slot, step.slot, group, limit, step.aggregation)
    for to, source in _rounds(group, me):
        pairs.send_and_receive(to, pieces[to], source, pieces[me], buffers, comm)


def _buffer_bytes(step: Exchange | Reduce) -> int:
    return min(step.buffer_bytes, MESSAGE_BUFFER_BYTES)


def _buffer_elements(step: Exchange | Reduce, slot: Slot) -> int:
    """Return how many elements of a slot a message buffer holds."""
    return _buffer_bytes(step) // np.dtype(slot.dtype).itemsize


def _rounds(group: Sequence[int], me: int) -> Iterator[tuple[int, int]]:
    """Yield rounds (to, from): in each, every member sends to one and receives from one."""
    size = len(group)
    for distance in range(1, size):
        yield (me + distance) % size, (me - distance) % size


def _count(region: Region | None) -> int:
    return 0 if region is None else elements(region)


def _extents(slot: Slot) -> tuple[int, ...]:
    return slot.shape or (1,)


def _flat_range(region: Region, slot: Slot) -> slice | None:
    """Return where a region is in a slot whose elements are in a row; None if it has gaps."""
    found = flat_range(region, _extents(slot))
    return None if found is None else slice(*found)


def _parts(regions: Sequence[Region | None], buffer: Array) -> dict[int, tuple[Region, Array]]:
    """Return each member's region, where there is one, with its part of a buffer."""
    found = {}
    start = 0
    for member, region in enumerate(regions):
        if region is not None:
            stop = start + elements(region)
            found[member] = region, buffer[start:stop]
            start = stop
    return found


# ---- exchange -----------------------------------------------------------------------------------


def _copy_own(step: Exchange, buffers: Buffers) -> None:
    """Copy what the rank has already, piece by piece."""
    assert step.moves.own is not None
    backend = buffers.backend
    limit = _buffer_elements(step, step.target)
    there, here = step.moves.own
    for source_region, target_region in zip(chunks(there, limit), chunks(here, limit), strict=True):
        source_range = _flat_range(source_region, step.source)
        target_range = _flat_range(target_region, step.target)
        if source_range is not None:
            packed = buffers[step.source].reshape(-1)[source_range]
            backend.unpack(packed, buffers[step.target], target_region)
        elif target_range is not None:
            packed = buffers[step.target].reshape(-1)[target_range]
            backend.pack(buffers[step.source], source_region, packed)
        else:
            with buffers.message_buffer(elements(source_region), step.target) as packed:
                backend.pack(buffers[step.source], source_region, packed)
                backend.unpack(packed, buffers[step.target], target_region)


def _pieces_of_all(step: Exchange) -> list[Region | None]:
    """Return the place in the target of every member's piece, where all members get all."""
    moves = step.moves
    pieces = list(moves.receives)
    if step.source == step.target:
        next_member = (moves.me + 1) % len(moves.group)
        pieces[moves.me] = moves.sends[next_member]
    elif moves.own is not None:
        pieces[moves.me] = moves.own[1]
    return pieces


def _contiguous_counts(pieces: Sequence[Region | None], target: Slot) -> list[int] | None:
    """Return the sizes of the pieces if these fill the target one after another, else None."""
    end = 0
    for piece in pieces:
        if piece is None:
            continue
        place = flat_range(piece, _extents(target))
        if place is None or place[0] != end:
            return None
        end = place[1]
    return list(map(_count, pieces))


def _gather_at_once(
    step: Exchange, pieces: Sequence[Region | None], buffers: Buffers, comm: Comm
) -> None:
    """Gather all members' pieces in one message buffer."""
    me = step.moves.me
    array = buffers[step.target]
    counts = list(map(_count, pieces))
    with buffers.message_buffer(sum(counts), step.target) as everything:
        parts = _parts(pieces, everything)
        if me in parts:
            buffers.backend.pack(array, *parts[me])
        comm.allgatherv(step.moves.group, everything, counts)
        for member, (region, packed) in parts.items():
            if member != me:
                buffers.backend.unpack(packed, array, region)


def _exchange_at_once(step: Exchange, buffers: Buffers, comm: Comm) -> None:
    """Exchange everything with one call of the communicator."""
    moves = step.moves
    send_counts = list(map(_count, moves.sends))
    receive_counts = list(map(_count, moves.receives))
    with (
        buffers.message_buffer(sum(send_counts), step.source) as send,
        buffers.message_buffer(sum(receive_counts), step.target) as receive,
    ):
        for region, packed in _parts(moves.sends, send).values():
            buffers.backend.pack(buffers[step.source], region, packed)
        comm.alltoallv(moves.group, send, send_counts, receive, receive_counts)
        for region, packed in _parts(moves.receives, receive).values():
            buffers.backend.unpack(packed, buffers[step.target], region)


# ---- messages between pairs of ranks ------------------------------------------------------------


@dataclass(frozen=True)
class _Pairs:
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
        place = _flat_range(region, self.source)
        if place is not None:
            return buffers[self.source].reshape(-1)[place]
        buffer = stack.enter_context(buffers.message_buffer(elements(region), self.source))
        buffers.backend.pack(buffers[self.source], region, buffer)
        return buffer

    def _incoming(self, region: Region | None, buffers: Buffers, stack: ExitStack) -> Array:
        """Return the part of the slot itself if it is contiguous and replaced, else a buffer."""
        if region is None:
            return None
        place = _flat_range(region, self.target)
        if place is not None and self.aggregation is None:
            return buffers[self.target].reshape(-1)[place]
        return stack.enter_context(buffers.message_buffer(elements(region), self.target))

    def _unpack(self, incoming: Array, region: Region, buffers: Buffers) -> None:
        """Put a message at its place in the slot, unless it was received there."""
        if self.aggregation is not None:
            buffers.backend.combine(self.aggregation, buffers[self.target], region, incoming)
        elif _flat_range(region, self.target) is None:
            buffers.backend.unpack(incoming, buffers[self.target], region)


# ---- reduce -------------------------------------------------------------------------------------


def _reduce_at_once(step: Reduce, buffers: Buffers, comm: Comm) -> None:
    """Send all pieces with one call of the communicator.

    Every member aggregates what it receives in a fixed order. Many small pieces are left to the
    communicator, if it can aggregate.
    """
    group, me, pieces = step.reduction.group, step.reduction.me, step.reduction.pieces
    many_and_small = len(group) >= LARGE_GROUP and step.slot.nbytes <= SMALL_SLOT_BYTES
    if many_and_small and AGGREGATIONS[step.aggregation].mpi == "SUM":
        done = _reduce_scatter(step, buffers, comm)
        if done:
            return
    sends = list(pieces)
    sends[me] = None
    receives = [pieces[me]] * len(group)
    receives[me] = None
    send_counts = list(map(_count, sends))
    receive_counts = list(map(_count, receives))
    with (
        buffers.message_buffer(sum(send_counts), step.slot) as send,
        buffers.message_buffer(sum(receive_counts), step.slot) as receive,
    ):
        for region, packed in _parts(sends, send).values():
            buffers.backend.pack(buffers[step.slot], region, packed)
        comm.alltoallv(group, send, send_counts, receive, receive_counts)
        parts = _parts(receives, receive)
        for _, member in _rounds(group, me):
            if member in parts:
                buffers.backend.combine(step.aggregation, buffers[step.slot], *parts[member])


def _reduce_scatter(step: Reduce, buffers: Buffers, comm: Comm) -> bool:
    """Let the communicator sum up the pieces; return False if it cannot."""
    pieces = step.reduction.pieces
    own = pieces[step.reduction.me]
    counts = list(map(_count, pieces))
    with (
        buffers.message_buffer(sum(counts), step.slot) as send,
        buffers.message_buffer(_count(own), step.slot) as receive,
    ):
        for region, packed in _parts(pieces, send).values():
            buffers.backend.pack(buffers[step.slot], region, packed)
        done = comm.reduce_scatter(step.group, send, counts, receive)
        if done and own is not None:
            buffers.backend.unpack(receive, buffers[step.slot], own)
    return done
