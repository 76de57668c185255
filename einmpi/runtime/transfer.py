"""Exchange and Reduce steps: pack, call the communicator once, unpack. Large messages go between
pairs of ranks, in pieces. What is the same in every run is worked out in the first one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np

from einmpi.comm.base import Comm
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.runtime.backend import Array
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.pairs import Pairs, extents_of, rounds, slice_of
from einmpi.schedule.regions import Region, chunks, elements, flat_range
from einmpi.schedule.steps import MESSAGE_BUFFER_BYTES, Exchange, Reduce, Slot

# MPI's own reduction needs few messages, but aggregates slowly: on two ranks it takes 2 to 5 times
# as long as ours for 32 MB. It is used for small slots in large groups.
LARGE_GROUP = 16  # ranks
SMALL_SLOT_BYTES = 2**16

Transfer: TypeAlias = Callable[[Buffers, Comm], None]  # an exchange or a reduction, prepared


def exchange(step: Exchange, buffers: Buffers, comm: Comm) -> None:
    """Build the target's block from the blocks of a group."""
    buffers.backend.calls.get(step, None, lambda: _prepare_exchange(step))(buffers, comm)


def reduce(step: Reduce, buffers: Buffers, comm: Comm) -> None:
    """Aggregate each member's piece of a slot over the group, in place."""
    buffers.backend.calls.get(step, None, lambda: _prepare_reduce(step))(buffers, comm)


def _prepare_exchange(step: Exchange) -> Transfer:
    """Work out all of an exchange that is the same in every run."""
    target = step.target
    transfers: list[Transfer] = []
    if step.moves.own is not None:
        transfers.append(_prepare_own_copy(step))
    if len(step.moves.group) > 1:
        transfers.append(_prepare_messages(step))

    def run_exchange(buffers: Buffers, comm: Comm) -> None:
        buffers.make(target)
        for transfer in transfers:
            transfer(buffers, comm)

    return run_exchange


def _prepare_messages(step: Exchange) -> Transfer:
    """Choose how the members of an exchange send each other their pieces.

    Every choice is the same on all members: it depends on nothing that differs between them.
    """
    moves = step.moves
    at_once = moves.fits_at_once(_buffer_elements(step, step.target))
    if moves.same_to_all:
        pieces = _pieces_of_all(step)
        counts = _contiguous_counts(pieces, step.target)
        if counts is not None:
            return partial(_gather_in_place, step, counts, sum(counts))
        if at_once:
            return _prepare_gather(step, pieces)
    if at_once:
        return _prepare_exchange_at_once(step)
    pairs = Pairs(step.source, step.target, moves.group, _buffer_elements(step, step.target))

    def exchange_in_pairs(buffers: Buffers, comm: Comm) -> None:
        for to, source in rounds(moves.group, moves.me):
            sent = moves.sends[to]
            pairs.send_and_receive(to, sent, source, moves.receives[source], buffers, comm)

    return exchange_in_pairs


def _prepare_reduce(step: Reduce) -> Transfer:
    """Work out all of a reduction that is the same in every run.

    All members know all pieces, so they choose alike. A piece much larger than the others would
    take too large a buffer.
    """
    group, me, pieces = step.reduction.group, step.reduction.me, step.reduction.pieces
    if len(group) == 1:
        return _do_nothing
    most = (len(group) - 1) * max(map(_count, pieces))
    fits = step.slot.nbytes <= _buffer_bytes(step)
    if fits and most <= prod(step.slot.shape) + len(group):
        return _prepare_reduce_at_once(step)
    limit = _buffer_elements(step, step.slot)
    pairs = Pairs(step.slot, step.slot, group, limit, step.aggregation)

    def reduce_in_pairs(buffers: Buffers, comm: Comm) -> None:
        for to, source in rounds(group, me):
            pairs.send_and_receive(to, pieces[to], source, pieces[me], buffers, comm)

    return reduce_in_pairs


def _do_nothing(_: Buffers, __: Comm) -> None:
    pass


def _buffer_bytes(step: Exchange | Reduce) -> int:
    return min(step.buffer_bytes, MESSAGE_BUFFER_BYTES)


def _buffer_elements(step: Exchange | Reduce, slot: Slot) -> int:
    """Return how many elements of a slot a message buffer holds."""
    return _buffer_bytes(step) // np.dtype(slot.dtype).itemsize


def _count(region: Region | None) -> int:
    return 0 if region is None else elements(region)


class _Piece(NamedTuple):
    """A member's region of a slot, and its place in a message buffer."""

    member: int
    region: Region
    place: slice


def _packed_pieces(regions: Sequence[Region | None]) -> list[_Piece]:
    """Return each member's region, where there is one, one after another in a message buffer."""
    found = []
    start = 0
    for member, region in enumerate(regions):
        if region is not None:
            stop = start + elements(region)
            found.append(_Piece(member, region, slice(start, stop)))
            start = stop
    return found


# ---- exchange -----------------------------------------------------------------------------------


def _prepare_own_copy(step: Exchange) -> Transfer:
    """Prepare to copy what the rank has already, piece by piece."""
    assert step.moves.own is not None
    limit = _buffer_elements(step, step.target)
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
    step: Exchange, source_range: slice, target_region: Region, buffers: Buffers
) -> None:
    packed = buffers[step.source].reshape(-1)[source_range]
    buffers.backend.unpack(packed, buffers[step.target], target_region)


def _copy_to_range(
    step: Exchange, source_region: Region, target_range: slice, buffers: Buffers
) -> None:
    packed = buffers[step.target].reshape(-1)[target_range]
    buffers.backend.pack(buffers[step.source], source_region, packed)


def _copy_by_buffer(
    step: Exchange, source_region: Region, target_region: Region, buffers: Buffers
) -> None:
    with buffers.message_buffer(elements(source_region), step.target) as packed:
        buffers.backend.pack(buffers[step.source], source_region, packed)
        buffers.backend.unpack(packed, buffers[step.target], target_region)


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
        place = flat_range(piece, extents_of(target))
        if place is None or place[0] != end:
            return None
        end = place[1]
    return list(map(_count, pieces))


def _gather_in_place(
    step: Exchange, counts: Sequence[int], total: int, buffers: Buffers, comm: Comm
) -> None:
    """Gather pieces that fill the target one after another."""
    flat = buffers[step.target].reshape(-1)
    comm.allgatherv(step.moves.group, flat[:total], counts)


def _prepare_gather(step: Exchange, regions: Sequence[Region | None]) -> Transfer:
    """Prepare to gather all members' pieces in one message buffer."""
    target = step.target
    group, me = step.moves.group, step.moves.me
    counts = list(map(_count, regions))
    total = sum(counts)
    pieces = _packed_pieces(regions)
    own = [piece for piece in pieces if piece.member == me]
    others = [piece for piece in pieces if piece.member != me]

    def gather(buffers: Buffers, comm: Comm) -> None:
        array = buffers[target]
        with buffers.message_buffer(total, target) as everything:
            for piece in own:
                buffers.backend.pack(array, piece.region, everything[piece.place])
            comm.allgatherv(group, everything, counts)
            for piece in others:
                buffers.backend.unpack(everything[piece.place], array, piece.region)

    return gather


def _prepare_exchange_at_once(step: Exchange) -> Transfer:
    """Prepare to exchange everything with one call of the communicator."""
    moves = step.moves
    messages = _Messages(step.source, step.target, moves.group, moves.sends, moves.receives)

    def exchange_at_once(buffers: Buffers, comm: Comm) -> None:
        with messages.exchanged(buffers, comm) as receive:
            for piece in messages.received:
                buffers.backend.unpack(receive[piece.place], buffers[step.target], piece.region)

    return exchange_at_once


class _Messages:
    """The messages of one call of the communicator: what each member gets and sends."""

    def __init__(
        self,
        source: Slot,
        target: Slot,
        group: tuple[int, ...],
        sends: Sequence[Region | None],
        receives: Sequence[Region | None],
    ) -> None:
        self.source = source
        self.target = target
        self.group = group
        self.sent = _packed_pieces(sends)
        self.received = _packed_pieces(receives)
        self.send_counts = list(map(_count, sends))
        self.receive_counts = list(map(_count, receives))
        self.sent_elements = sum(self.send_counts)
        self.received_elements = sum(self.receive_counts)

    @contextmanager
    def exchanged(self, buffers: Buffers, comm: Comm) -> Iterator[Array]:
        """Lend a buffer with all that this rank has received."""
        with (
            buffers.message_buffer(self.sent_elements, self.source) as send,
            buffers.message_buffer(self.received_elements, self.target) as receive,
        ):
            for piece in self.sent:
                buffers.backend.pack(buffers[self.source], piece.region, send[piece.place])
            comm.alltoallv(self.group, send, self.send_counts, receive, self.receive_counts)
            yield receive


# ---- reduce -------------------------------------------------------------------------------------


def _prepare_reduce_at_once(step: Reduce) -> Transfer:
    """Prepare to send all pieces with one call of the communicator.

    Every member aggregates what it receives in a fixed order. Many small pieces are left to the
    communicator, if it can aggregate.
    """
    slot = step.slot
    group, me, pieces = step.reduction.group, step.reduction.me, step.reduction.pieces
    many_and_small = len(group) >= LARGE_GROUP and slot.nbytes <= SMALL_SLOT_BYTES
    by_communicator = many_and_small and AGGREGATIONS[step.aggregation].mpi == "SUM"
    sends = list(pieces)
    sends[me] = None
    receives = [pieces[me]] * len(group)
    receives[me] = None
    messages = _Messages(slot, slot, group, sends, receives)
    received = {piece.member: piece for piece in messages.received}
    in_order = [received[member] for _, member in rounds(group, me) if member in received]

    def reduce_at_once(buffers: Buffers, comm: Comm) -> None:
        if by_communicator and _reduce_scatter(step, buffers, comm):
            return
        with messages.exchanged(buffers, comm) as receive:
            array = buffers[slot]
            for piece in in_order:
                packed = receive[piece.place]
                buffers.backend.combine(step.aggregation, array, piece.region, packed)

    return reduce_at_once


def _reduce_scatter(step: Reduce, buffers: Buffers, comm: Comm) -> bool:
    """Let the communicator sum up the pieces; return False if it cannot."""
    pieces = step.reduction.pieces
    own = pieces[step.reduction.me]
    counts = list(map(_count, pieces))
    with (
        buffers.message_buffer(sum(counts), step.slot) as send,
        buffers.message_buffer(_count(own), step.slot) as receive,
    ):
        for piece in _packed_pieces(pieces):
            buffers.backend.pack(buffers[step.slot], piece.region, send[piece.place])
        done = comm.reduce_scatter(step.group, send, counts, receive)
        if done and own is not None:
            buffers.backend.unpack(receive, buffers[step.slot], own)
    return done
