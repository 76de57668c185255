"""Exchange and Reduce steps: pack, call the communicator once, unpack. Large messages go between
pairs of ranks, in pieces. What is the same in every run is worked out in the first one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

from einmpi.comm.base import Comm
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.runtime.backend import Array
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.messages import (
    AtOnce,
    Gather,
    GatherInPlace,
    buffer_elements,
    messages_of_exchange,
    messages_of_reduce,
    packed_pieces,
)
from einmpi.runtime.pairs import Pairs, rounds, slice_of
from einmpi.schedule.regions import Region, chunks, elements
from einmpi.schedule.steps import Exchange, Reduce, Slot

# MPI's own reduction needs few messages, but aggregates slowly: on two ranks it takes 2 to 5 times
# as long as ours for 32 MB. It is used for small slots in large groups.
LARGE_GROUP = 16  # ranks
SMALL_SLOT_BYTES = 2**16

Transfer: TypeAlias = Callable[[Buffers, Comm], None]  # an exchange or a reduction, prepared


def transfer(step: Exchange | Reduce, buffers: Buffers, comm: Comm) -> None:
    """Do an exchange or a reduction among the ranks of a group."""
    in_shared_memory = buffers.shared.transfers.get(id(step))
    if in_shared_memory is not None:
        in_shared_memory(buffers, comm)
        return
    buffers.backend.calls.get(step, None, lambda: _prepare(step))(buffers, comm)


def _prepare(step: Exchange | Reduce) -> Transfer:
    return _prepare_exchange(step) if isinstance(step, Exchange) else _prepare_reduce(step)


def _prepare_exchange(step: Exchange) -> Transfer:
    """Work out all of an exchange that is the same in every run."""
    target = step.target
    parts: list[Transfer] = []
    if step.moves.own is not None:
        parts.append(_prepare_own_copy(step))
    if len(step.moves.group) > 1:
        parts.append(_prepare_messages(step))

    def run_exchange(buffers: Buffers, comm: Comm) -> None:
        buffers.make(target)
        for part in parts:
            part(buffers, comm)

    return run_exchange


def _prepare_messages(step: Exchange) -> Transfer:
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


def _prepare_reduce(step: Reduce) -> Transfer:
    """Work out all of a reduction that is the same in every run."""
    group, me, pieces = step.reduction.group, step.reduction.me, step.reduction.pieces
    if len(group) == 1:
        return _do_nothing
    messages = messages_of_reduce(step)
    if messages is not None:
        return partial(_reduce_at_once, step, messages, is_left_to_communicator(step))
    limit = buffer_elements(step, step.slot)
    pairs = Pairs(step.slot, step.slot, group, limit, step.aggregation)

    def reduce_in_pairs(buffers: Buffers, comm: Comm) -> None:
        for to, source in rounds(group, me):
            pairs.send_and_receive(to, pieces[to], source, pieces[me], buffers, comm)

    return reduce_in_pairs


def _do_nothing(_: Buffers, __: Comm) -> None:
    pass


# ---- exchange -----------------------------------------------------------------------------------


def _prepare_own_copy(step: Exchange) -> Transfer:
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


def _gather_in_place(step: Exchange, messages: GatherInPlace, buffers: Buffers, comm: Comm) -> None:
    """Gather pieces that lie in the target one after another."""
    flat = buffers[step.target].reshape(-1)
    comm.allgatherv(step.moves.group, flat[messages.place], messages.counts)


def _gather(step: Exchange, messages: Gather, buffers: Buffers, comm: Comm) -> None:
    """Gather all members' pieces in one message buffer."""
    array = buffers[step.target]
    with buffers.message_buffer(messages.total, step.target) as everything:
        for piece in messages.own:
            buffers.backend.pack(array, piece.region, everything[piece.place])
        comm.allgatherv(step.moves.group, everything, messages.counts)
        for piece in messages.others:
            buffers.backend.unpack(everything[piece.place], array, piece.region)


def _exchange_at_once(step: Exchange, messages: AtOnce, buffers: Buffers, comm: Comm) -> None:
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


def is_left_to_communicator(step: Reduce) -> bool:
    """Return whether the communicator sums up the pieces, if it can: many and small ones."""
    many_and_small = len(step.group) >= LARGE_GROUP and step.slot.nbytes <= SMALL_SLOT_BYTES
    return many_and_small and AGGREGATIONS[step.aggregation].mpi == "SUM"


def _reduce_at_once(
    step: Reduce, messages: AtOnce, by_communicator: bool, buffers: Buffers, comm: Comm
) -> None:
    """Send all pieces with one call of the communicator, and aggregate what arrives."""
    if by_communicator and _reduce_scatter(step, buffers, comm):
        return
    slot = step.slot
    with exchanged(messages, slot, slot, step.group, buffers, comm) as receive:
        array = buffers[slot]
        for piece in messages.received:
            packed = receive[piece.place]
            buffers.backend.combine(step.aggregation, array, piece.region, packed)


def _reduce_scatter(step: Reduce, buffers: Buffers, comm: Comm) -> bool:
    """Let the communicator sum up the pieces; return False if it cannot."""
    pieces = step.reduction.pieces
    own = pieces[step.reduction.me]
    counts = [0 if piece is None else elements(piece) for piece in pieces]
    with (
        buffers.message_buffer(sum(counts), step.slot) as send,
        buffers.message_buffer(counts[step.reduction.me], step.slot) as receive,
    ):
        for piece in packed_pieces(pieces):
            buffers.backend.pack(buffers[step.slot], piece.region, send[piece.place])
        done = comm.reduce_scatter(step.group, send, counts, receive)
        if done and own is not None:
            buffers.backend.unpack(receive, buffers[step.slot], own)
    return done
