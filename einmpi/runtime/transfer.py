"""Exchange and Reduce steps: pack, one call of the communicator, unpack; large ones rank by rank, in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from math import prod
from typing import Any

import numpy as np

from einmpi.comm.base import Comm
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.runtime.buffers import Buffers
from einmpi.schedule.regions import Region, chunks, elements, flat_range
from einmpi.schedule.steps import MESSAGE_BUFFER_BYTES, Exchange, Reduce, Slot

# MPI's own reduction needs few messages, but adds slowly: 2 to 5 times slower than ours at 32 MB on two ranks.
MANY_MEMBERS, LITTLE = 16, 2**16


def exchange(step: Exchange, buffers: Buffers, comm: Comm) -> None:
    moves = step.moves
    buffers.make(step.target)
    if moves.own is not None:
        _copy(step, buffers)
    if len(moves.group) == 1:
        return
    limit = _stage(step) // np.dtype(step.target.dtype).itemsize
    # Each choice is the same on all members: it looks at nothing that differs between them.
    if moves.everybody:
        pieces = _everybodys_pieces(step)
        if (counts := _in_a_row(pieces, step.target)) is not None:
            comm.allgatherv(moves.group, buffers[step.target].reshape(-1)[: sum(counts)], counts)
            return
        if moves.most <= limit:
            _gather_at_once(step, pieces, buffers, comm)
            return
    if moves.most <= limit:
        _all_at_once(step, buffers, comm)
    else:
        rounds = _rounds(moves.group, moves.me)
        for to, source in rounds:
            _pair(
                step.source,
                step.target,
                moves.group,
                (to, moves.sends[to]),
                (source, moves.receives[source]),
                _stage(step),
                buffers,
                comm,
                None,
            )


def reduce(step: Reduce, buffers: Buffers, comm: Comm) -> None:
    if len(step.group) == 1:
        return
    # All members know all pieces, so they choose alike. Pieces of very unequal size would take too large a buffer.
    most = (len(step.group) - 1) * max(map(_count, step.reduction.pieces))
    if step.slot.nbytes <= _stage(step) and most <= prod(step.slot.shape) + len(step.group):
        _reduce_at_once(step, buffers, comm)
        return
    for to, source in _rounds(step.group, step.reduction.me):
        _pair(
            step.slot,
            step.slot,
            step.group,
            (to, step.reduction.pieces[to]),
            (source, step.reduction.pieces[step.reduction.me]),
            _stage(step),
            buffers,
            comm,
            step.aggregation,
        )


def _stage(step: Exchange | Reduce) -> int:
    return min(step.buffer_bytes, MESSAGE_BUFFER_BYTES)


def _rounds(group: Sequence[int], me: int) -> list[tuple[int, int]]:
    """In each round everybody sends to one member and receives from one."""
    size = len(group)
    return [((me + k) % size, (me - k) % size) for k in range(1, size)]


def _count(region: Region | None) -> int:
    return 0 if region is None else elements(region)


def _extents(slot: Slot) -> tuple[int, ...]:
    return slot.shape or (1,)


def _copy(step: Exchange, buffers: Buffers) -> None:
    """What the rank has already, piece by piece."""
    assert step.moves.own is not None
    limit = _stage(step) // np.dtype(step.target.dtype).itemsize
    for there, here in zip(*(chunks(region, limit) for region in step.moves.own), strict=True):
        source, target = (
            flat_range(there, _extents(step.source)),
            flat_range(here, _extents(step.target)),
        )
        if source is not None:
            packed = buffers[step.source].reshape(-1)[slice(*source)]
            buffers.backend.unpack(packed, buffers[step.target], here)
        elif target is not None:
            packed = buffers[step.target].reshape(-1)[slice(*target)]
            buffers.backend.pack(buffers[step.source], there, packed)
        else:
            with buffers.stage(elements(there), step.target) as packed:
                buffers.backend.pack(buffers[step.source], there, packed)
                buffers.backend.unpack(packed, buffers[step.target], here)


def _everybodys_pieces(step: Exchange) -> list[Region | None]:
    """The place in the target of every member's piece, where all members get all."""
    moves = step.moves
    pieces = list(moves.receives)
    if step.source == step.target:
        pieces[moves.me] = moves.sends[(moves.me + 1) % len(moves.group)]
    elif moves.own is not None:
        pieces[moves.me] = moves.own[1]
    return pieces


def _in_a_row(pieces: Sequence[Region | None], target: Slot) -> list[int] | None:
    """The sizes of the pieces, where these fill the target one after another."""
    end = 0
    for piece in pieces:
        if piece is not None:
            place = flat_range(piece, _extents(target))
            if place is None or place[0] != end:
                return None
            end = place[1]
    return list(map(_count, pieces))


def _gather_at_once(
    step: Exchange, pieces: Sequence[Region | None], buffers: Buffers, comm: Comm
) -> None:
    me, array = step.moves.me, buffers[step.target]
    counts = list(map(_count, pieces))
    with buffers.stage(sum(counts), step.target) as everything:
        parts = _parts(pieces, everything)
        if me in parts:
            buffers.backend.pack(array, *parts[me])
        comm.allgatherv(step.moves.group, everything, counts)
        for member, (region, packed) in parts.items():
            if member != me:
                buffers.backend.unpack(packed, array, region)


def _all_at_once(step: Exchange, buffers: Buffers, comm: Comm) -> None:
    moves = step.moves
    send_counts, receive_counts = list(map(_count, moves.sends)), list(map(_count, moves.receives))
    with (
        buffers.stage(sum(send_counts), step.source) as send,
        buffers.stage(sum(receive_counts), step.target) as receive,
    ):
        for region, packed in _parts(moves.sends, send).values():
            buffers.backend.pack(buffers[step.source], region, packed)
        comm.alltoallv(moves.group, send, send_counts, receive, receive_counts)
        for region, packed in _parts(moves.receives, receive).values():
            buffers.backend.unpack(packed, buffers[step.target], region)


def _parts(regions: Sequence[Region | None], buffer: Any) -> dict[int, tuple[Region, Any]]:
    """Each member's region, where there is one, with its part of the buffer."""
    found, start = {}, 0
    for member, region in enumerate(regions):
        if region is not None:
            found[member] = region, buffer[start : start + elements(region)]
            start += elements(region)
    return found


def _pair(
    source: Slot,
    target: Slot,
    group: Sequence[int],
    sent: tuple[int, Region | None],
    received: tuple[int, Region | None],
    stage: int,
    buffers: Buffers,
    comm: Comm,
    aggregation: str | None,
) -> None:
    """One message to a member and one from a member, in pieces that fit into a buffer each."""
    limit = stage // np.dtype(target.dtype).itemsize
    sends = chunks(sent[1], limit) if sent[1] is not None else []
    receives = chunks(received[1], limit) if received[1] is not None else []
    for number in range(max(len(sends), len(receives))):
        send = sends[number] if number < len(sends) else None
        receive = receives[number] if number < len(receives) else None
        with ExitStack() as stack:
            outgoing = _message(send, source, buffers, stack, packed=True)
            incoming = _message(
                receive, target, buffers, stack, packed=False, direct=aggregation is None
            )
            comm.sendrecv(
                None if send is None else group[sent[0]],
                outgoing,
                None if receive is None else group[received[0]],
                incoming,
            )
            if receive is None:
                continue
            if aggregation is not None:
                buffers.backend.combine(aggregation, buffers[target], receive, incoming)
            elif flat_range(receive, _extents(target)) is None:
                buffers.backend.unpack(incoming, buffers[target], receive)


def _message(
    region: Region | None,
    slot: Slot,
    buffers: Buffers,
    stack: ExitStack,
    packed: bool,
    direct: bool = True,
) -> Any:
    """A part of the slot itself where it lies in one piece, else a buffer, filled if it is to be sent."""
    if region is None:
        return None
    place = flat_range(region, _extents(slot))
    if direct and place is not None:
        return buffers[slot].reshape(-1)[slice(*place)]
    buffer = stack.enter_context(buffers.stage(elements(region), slot))
    if packed:
        buffers.backend.pack(buffers[slot], region, buffer)
    return buffer


def _reduce_at_once(step: Reduce, buffers: Buffers, comm: Comm) -> None:
    """Everybody adds up the pieces in a fixed order; many small ones are left to the communicator, if it can."""
    own = step.reduction.pieces[step.reduction.me]
    many = len(step.group) >= MANY_MEMBERS and step.slot.nbytes <= LITTLE
    if (
        many
        and AGGREGATIONS[step.aggregation].mpi == "SUM"
        and _reduce_scatter(step, buffers, comm)
    ):
        return
    others = [
        None if member == step.reduction.me else region
        for member, region in enumerate(step.reduction.pieces)
    ]
    contributions = [
        None if member == step.reduction.me else own for member in range(len(step.group))
    ]
    counts = list(map(_count, others)), list(map(_count, contributions))
    with (
        buffers.stage(sum(counts[0]), step.slot) as send,
        buffers.stage(sum(counts[1]), step.slot) as receive,
    ):
        for region, packed in _parts(others, send).values():
            buffers.backend.pack(buffers[step.slot], region, packed)
        comm.alltoallv(step.group, send, counts[0], receive, counts[1])
        parts = _parts(contributions, receive)
        for _, member in _rounds(step.group, step.reduction.me):
            if member in parts:
                buffers.backend.combine(step.aggregation, buffers[step.slot], *parts[member])


def _reduce_scatter(step: Reduce, buffers: Buffers, comm: Comm) -> bool:
    counts, own = list(map(_count, step.reduction.pieces)), step.reduction.pieces[step.reduction.me]
    with (
        buffers.stage(sum(counts), step.slot) as send,
        buffers.stage(counts[step.reduction.me], step.slot) as receive,
    ):
        for region, packed in _parts(step.reduction.pieces, send).values():
            buffers.backend.pack(buffers[step.slot], region, packed)
        done = comm.reduce_scatter(step.group, send, counts, receive)
        if done and own is not None:
            buffers.backend.unpack(receive, buffers[step.slot], own)
    return done
