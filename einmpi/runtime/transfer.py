"""Transfers: pack, call the communicator once, unpack or combine. Large messages go between pairs
of ranks, in pieces. What is the same in every run is worked out in the first one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np

from einmpi.comm.base import Comm
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.runtime.backend import Array
from einmpi.runtime.buffers import Buffers
from einmpi.schedule.regions import Region, Slot, chunks, elements, flat_range, packed
from einmpi.schedule.steps import MESSAGE_BUFFER_BYTES, Transfer

# ---- pairs ---------------------------------------------------------------------------------------
#
# Large messages, between pairs of ranks and in pieces.


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
        if self.aggregation is not None or slice_of(region, self.target) is None:
            array = buffers[self.target]
            buffers.backend.unpack(incoming, array, region, self.aggregation)


# ---- messages ------------------------------------------------------------------------------------
#
# How the members of a group send each other the pieces of an exchange or a reduction.


class Piece(NamedTuple):
    """A member's region of a slot, and its place in a message buffer."""

    member: int
    region: Region
    place: slice


class GatherInPlace(NamedTuple):
    """All members' pieces lie in the target one after another, so they are received there."""

    counts: Sequence[int]
    place: slice  # of all pieces in the target, whose elements are taken as a row


class Gather(NamedTuple):
    """All members' pieces are gathered in one message buffer."""

    counts: Sequence[int]
    total: int
    own: Sequence[Piece]
    others: Sequence[Piece]


class AtOnce(NamedTuple):
    """Each member gets pieces of its own, by one call of the communicator."""

    sent: Sequence[Piece]
    send_counts: Sequence[int]
    received: Sequence[Piece]  # in the order in which they are unpacked or aggregated
    receive_counts: Sequence[int]


Messages: TypeAlias = GatherInPlace | Gather | AtOnce


def messages_of(step: Transfer) -> Messages | None:
    """Return the messages of a step; None if it has none, or sends them in pairs."""
    if len(step.group) == 1:
        return None
    if step.aggregation is None:
        return messages_of_exchange(step)
    return messages_of_reduce(step)


def messages_of_exchange(step: Transfer) -> Messages | None:
    """Return how the members of an exchange send each other their pieces; None for in pairs.

    Every choice is the same on all members: it depends on nothing that differs between them.
    """
    moves = step.moves
    at_once = moves.fits_at_once(buffer_elements(step, step.target))
    if moves.same_to_all:
        regions = _pieces_of_all(step)
        counts = list(map(_count, regions))
        place = _place_in_a_row(regions, step.target)
        if place is not None:
            return GatherInPlace(counts, place)
        if at_once:
            pieces = packed_pieces(regions)
            own = [piece for piece in pieces if piece.member == moves.me]
            others = [piece for piece in pieces if piece.member != moves.me]
            return Gather(counts, sum(counts), own, others)
    if at_once:
        return _at_once(moves.sends, moves.receives)
    return None


def messages_of_reduce(step: Transfer) -> AtOnce | None:
    """Return how the members of a reduction send each other their pieces; None for in pairs.

    All members know all pieces, so they choose alike. A piece much larger than the others would
    take too large a buffer. Every member aggregates what it receives in a fixed order.
    """
    group, me, pieces = step.group, step.moves.me, step.moves.pieces
    most = (len(group) - 1) * max(map(_count, pieces))
    fits = step.target.nbytes <= buffer_bytes(step)
    if not fits or most > prod(step.target.shape) + len(group):
        return None
    sends = list(pieces)
    sends[me] = None
    receives = [pieces[me]] * len(group)
    receives[me] = None
    messages = _at_once(sends, receives)
    received = {piece.member: piece for piece in messages.received}
    in_order = [received[member] for _, member in rounds(group, me) if member in received]
    return messages._replace(received=in_order)


def are_boxes(messages: Messages) -> bool:
    """Return whether all pieces that are packed or unpacked are boxes, and so views of slots."""
    pieces: list[Piece] = []
    if isinstance(messages, Gather):
        pieces = [*messages.own, *messages.others]
    elif isinstance(messages, AtOnce):
        pieces = [*messages.sent, *messages.received]
    return all(is_box(piece.region) for piece in pieces)


def is_box(region: Region) -> bool:
    return all(len(runs) == 1 for runs in region)


def buffer_bytes(step: Transfer) -> int:
    return min(step.buffer_bytes, MESSAGE_BUFFER_BYTES)


def buffer_elements(step: Transfer, slot: Slot) -> int:
    """Return how many elements of a slot a message buffer holds."""
    return buffer_bytes(step) // np.dtype(slot.dtype).itemsize


def packed_pieces(regions: Sequence[Region | None]) -> list[Piece]:
    """Return each member's region, where there is one, one after another in a message buffer."""
    found = []
    start = 0
    for member, region in enumerate(regions):
        if region is not None:
            stop = start + elements(region)
            found.append(Piece(member, region, slice(start, stop)))
            start = stop
    return found


def _at_once(sends: Sequence[Region | None], receives: Sequence[Region | None]) -> AtOnce:
    return AtOnce(
        packed_pieces(sends),
        list(map(_count, sends)),
        packed_pieces(receives),
        list(map(_count, receives)),
    )


def _pieces_of_all(step: Transfer) -> list[Region | None]:
    """Return the place in the target of every member's piece, where all members get all."""
    moves = step.moves
    pieces = list(moves.receives)
    if step.source == step.target:
        next_member = (moves.me + 1) % len(moves.group)
        pieces[moves.me] = moves.sends[next_member]
    elif moves.own is not None:
        pieces[moves.me] = moves.own[1]
    return pieces


def _place_in_a_row(pieces: Sequence[Region | None], target: Slot) -> slice | None:
    """Return where the pieces lie in the target; None unless they follow one another there."""
    start = end = None
    for piece in pieces:
        if piece is None:
            continue
        place = flat_range(piece, extents_of(target))
        if place is None or end not in (None, place[0]):
            return None
        start = place[0] if start is None else start
        end = place[1]
    return slice(start or 0, end or 0)


def _count(region: Region | None) -> int:
    return 0 if region is None else elements(region)


# MPI's own reduction needs few messages, but aggregates slowly: on two ranks it takes 2 to 5 times
# as long as ours for 32 MB. It is used for small slots in large groups.
LARGE_GROUP = 16  # ranks
SMALL_SLOT_BYTES = 2**16

PreparedTransfer: TypeAlias = Callable[[Buffers, Comm], None]


def transfer(step: Transfer, buffers: Buffers, comm: Comm) -> None:
    """Do an exchange or a reduction among the ranks of a group."""
    in_shared_memory = buffers.shared.transfers.get(step.number)
    if in_shared_memory is not None:
        in_shared_memory(step, buffers, comm)
        return
    for slot in step.writes:
        buffers.make(slot)
    buffers.backend.calls.get(step, None, lambda: _prepare(step))(buffers, comm)


def _prepare(step: Transfer) -> PreparedTransfer:
    """Work out all of a transfer that is the same in every run."""
    if step.counts is not None:
        return partial(_gather_counted, step, step.counts)
    if step.aggregation is not None:
        return _prepare_reduce(step)
    return _prepare_halo(step) if step.arriving else _prepare_exchange(step)


def _prepare_exchange(step: Transfer) -> PreparedTransfer:
    """Prepare what a rank has already, and what comes from others."""
    parts: list[PreparedTransfer] = []
    if step.moves.own is not None:
        parts.append(_prepare_own_copy(step))
    if len(step.moves.group) > 1:
        parts.append(_prepare_messages(step))

    def run_exchange(buffers: Buffers, comm: Comm) -> None:
        for part in parts:
            part(buffers, comm)

    return run_exchange


def _prepare_messages(step: Transfer) -> PreparedTransfer:
    """Prepare how the members of an exchange send each other their pieces."""
    messages = messages_of_exchange(step)
    if isinstance(messages, GatherInPlace):
        return partial(_gather_in_place, step, messages)
    if isinstance(messages, Gather):
        return partial(_gather, step, messages)
    if messages is not None:
        return partial(_exchange_at_once, step, messages)
    moves = step.moves
    pairs = Pairs(step.source, step.target, moves.group, buffer_elements(step, step.target))

    def exchange_in_pairs(buffers: Buffers, comm: Comm) -> None:
        for to, source in rounds(moves.group, moves.me):
            sent = moves.sends[to]
            pairs.send_and_receive(to, sent, source, moves.receives[source], buffers, comm)

    return exchange_in_pairs


def _gather_counted(step: Transfer, slot: Slot, buffers: Buffers, comm: Comm) -> None:
    """Gather rows one after another, of which the members have as many as the values say."""
    rows = buffers.backend.to_host(buffers[slot])
    if len(step.group) > 1:
        width = prod(step.target.shape[1:])
        counts = [int(count) * width for count in rows.tolist()]
        comm.allgatherv(step.group, buffers[step.target].reshape(-1)[: sum(counts)], counts)


def _prepare_reduce(step: Transfer) -> PreparedTransfer:
    """Prepare to aggregate the pieces of all members, or what this rank has in another slot."""
    group, me, pieces = step.group, step.moves.me, step.moves.pieces
    if len(group) == 1:
        return _do_nothing if step.source == step.target else partial(_accumulate, step)
    messages = messages_of_reduce(step)
    if messages is not None:
        return partial(_reduce_at_once, step, messages, is_left_to_communicator(step))
    limit = buffer_elements(step, step.target)
    pairs = Pairs(step.target, step.target, group, limit, step.aggregation)

    def reduce_in_pairs(buffers: Buffers, comm: Comm) -> None:
        for to, source in rounds(group, me):
            pairs.send_and_receive(to, pieces[to], source, pieces[me], buffers, comm)

    return reduce_in_pairs


def _do_nothing(_: Buffers, __: Comm) -> None:
    pass


def _accumulate(step: Transfer, buffers: Buffers, _: Comm) -> None:
    """Combine a slot with another one."""
    assert step.moves.own is not None
    added = buffers[step.source].reshape(-1)
    aggregation = step.required_aggregation
    buffers.backend.unpack(added, buffers[step.target], step.moves.own[1], aggregation)


# ---- exchange -----------------------------------------------------------------------------------


def _prepare_own_copy(step: Transfer) -> PreparedTransfer:
    """Prepare to copy what the rank has already, piece by piece."""
    assert step.moves.own is not None
    limit = buffer_elements(step, step.target)
    there, here = step.moves.own
    regions = list(zip(chunks(there, limit), chunks(here, limit), strict=True))
    copies: list[Callable[[Buffers], None]] = []
    for source_region, target_region in regions:
        source_range = slice_of(source_region, step.source)
        target_range = slice_of(target_region, step.target)
        if source_range is not None:
            copies.append(partial(_copy_from_range, step, source_range, target_region))
        elif target_range is not None:
            copies.append(partial(_copy_to_range, step, source_region, target_range))
        else:
            copies.append(partial(_copy_by_buffer, step, source_region, target_region))

    def copy_own(buffers: Buffers, _: Comm) -> None:
        for copy in copies:
            copy(buffers)

    return copy_own


def _copy_from_range(
    step: Transfer, source_range: slice, target_region: Region, buffers: Buffers
) -> None:
    packed = buffers[step.source].reshape(-1)[source_range]
    buffers.backend.unpack(packed, buffers[step.target], target_region)


def _copy_to_range(
    step: Transfer, source_region: Region, target_range: slice, buffers: Buffers
) -> None:
    packed = buffers[step.target].reshape(-1)[target_range]
    buffers.backend.pack(buffers[step.source], source_region, packed)


def _copy_by_buffer(
    step: Transfer, source_region: Region, target_region: Region, buffers: Buffers
) -> None:
    with buffers.message_buffer(elements(source_region), step.target) as packed:
        buffers.backend.pack(buffers[step.source], source_region, packed)
        buffers.backend.unpack(packed, buffers[step.target], target_region)


def _gather_in_place(step: Transfer, messages: GatherInPlace, buffers: Buffers, comm: Comm) -> None:
    """Gather pieces that lie in the target one after another."""
    flat = buffers[step.target].reshape(-1)
    comm.allgatherv(step.moves.group, flat[messages.place], messages.counts)


def _gather(step: Transfer, messages: Gather, buffers: Buffers, comm: Comm) -> None:
    """Gather all members' pieces in one message buffer."""
    array = buffers[step.target]
    with buffers.message_buffer(messages.total, step.target) as everything:
        for piece in messages.own:
            buffers.backend.pack(array, piece.region, everything[piece.place])
        comm.allgatherv(step.moves.group, everything, messages.counts)
        for piece in messages.others:
            buffers.backend.unpack(everything[piece.place], array, piece.region)


def _exchange_at_once(step: Transfer, messages: AtOnce, buffers: Buffers, comm: Comm) -> None:
    """Exchange everything with one call of the communicator."""
    target = buffers[step.target]
    with exchanged(messages, step.source, step.target, step.group, buffers, comm) as receive:
        for piece in messages.received:
            buffers.backend.unpack(receive[piece.place], target, piece.region)


@contextmanager
def exchanged(
    messages: AtOnce,
    source: Slot,
    target: Slot,
    group: tuple[int, ...],
    buffers: Buffers,
    comm: Comm,
) -> Iterator[Array]:
    """Lend a buffer with all that this rank has received."""
    with (
        buffers.message_buffer(sum(messages.send_counts), source) as send,
        buffers.message_buffer(sum(messages.receive_counts), target) as receive,
    ):
        for piece in messages.sent:
            buffers.backend.pack(buffers[source], piece.region, send[piece.place])
        comm.alltoallv(group, send, messages.send_counts, receive, messages.receive_counts)
        yield receive


# ---- reduce -------------------------------------------------------------------------------------


def is_left_to_communicator(step: Transfer) -> bool:
    """Return whether the communicator sums up the pieces, if it can: many and small ones."""
    many_and_small = len(step.group) >= LARGE_GROUP and step.target.nbytes <= SMALL_SLOT_BYTES
    return many_and_small and AGGREGATIONS[step.required_aggregation].mpi == "SUM"


def _reduce_at_once(
    step: Transfer, messages: AtOnce, by_communicator: bool, buffers: Buffers, comm: Comm
) -> None:
    """Send all pieces with one call of the communicator, and aggregate what arrives."""
    if by_communicator and _reduce_scatter(step, buffers, comm):
        return
    slot = step.target
    with exchanged(messages, slot, slot, step.group, buffers, comm) as receive:
        array = buffers[slot]
        for piece in messages.received:
            packed = receive[piece.place]
            buffers.backend.unpack(packed, array, piece.region, step.required_aggregation)


def _reduce_scatter(step: Transfer, buffers: Buffers, comm: Comm) -> bool:
    """Let the communicator sum up the pieces; return False if it cannot."""
    pieces = step.moves.pieces
    own = pieces[step.moves.me]
    counts = [0 if piece is None else elements(piece) for piece in pieces]
    with (
        buffers.message_buffer(sum(counts), step.target) as send,
        buffers.message_buffer(counts[step.moves.me], step.target) as receive,
    ):
        for piece in packed_pieces(pieces):
            buffers.backend.pack(buffers[step.target], piece.region, send[piece.place])
        done = comm.reduce_scatter(step.group, send, counts, receive)
        if done and own is not None:
            buffers.backend.unpack(receive, buffers[step.target], own)
    return done


# ---- halo exchange -------------------------------------------------------------------------------
#
# Halos that stay beside the block: what other ranks send arrives in slots of its own.


def _prepare_halo(step: Transfer) -> PreparedTransfer:
    """Prepare the messages, which are those of ranks that put block and halo together."""
    moves = step.moves
    messages = messages_of_exchange(step)
    if messages is not None:
        assert isinstance(messages, AtOnce), "a halo is not the same for all ranks"
        return _prepare_at_once(step, messages)
    limit = buffer_elements(step, step.target)
    pairs = []
    for slot in step.arriving:
        pairs.append(Pairs(step.source, slot or step.target, moves.group, limit))

    def exchange_in_pairs(buffers: Buffers, comm: Comm) -> None:
        for to, source in rounds(moves.group, moves.me):
            sent = moves.sends[to]
            received = moves.receives[source]
            place = None if received is None else packed(received)
            pairs[source].send_and_receive(to, sent, source, place, buffers, comm)

    return exchange_in_pairs


def _prepare_at_once(step: Transfer, messages: AtOnce) -> PreparedTransfer:
    """Prepare to exchange everything with one call of the communicator."""
    source = step.source
    group = step.group

    def exchange_at_once(buffers: Buffers, comm: Comm) -> None:
        with exchanged(messages, source, source, group, buffers, comm) as receive:
            for piece in messages.received:
                slot = step.arriving[piece.member]
                assert slot is not None, "each message has a slot"
                buffers[slot].reshape(-1)[...] = receive[piece.place]

    return exchange_at_once
