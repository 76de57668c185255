"""How the members of a group send each other the pieces of an exchange or a reduction."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np

from einmpi.runtime.pairs import extents_of, rounds
from einmpi.schedule.regions import Region, elements, flat_range
from einmpi.schedule.steps import MESSAGE_BUFFER_BYTES, Exchange, Reduce, Slot


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


def messages_of(step: Exchange | Reduce) -> Messages | None:
    """Return the messages of a step; None if it has none, or sends them in pairs."""
    if len(step.group) == 1:
        return None
    if isinstance(step, Exchange):
        return messages_of_exchange(step)
    return messages_of_reduce(step)


def messages_of_exchange(step: Exchange) -> Messages | None:
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


def messages_of_reduce(step: Reduce) -> AtOnce | None:
    """Return how the members of a reduction send each other their pieces; None for in pairs.

    All members know all pieces, so they choose alike. A piece much larger than the others would
    take too large a buffer. Every member aggregates what it receives in a fixed order.
    """
    group, me, pieces = step.reduction.group, step.reduction.me, step.reduction.pieces
    most = (len(group) - 1) * max(map(_count, pieces))
    fits = step.slot.nbytes <= buffer_bytes(step)
    if not fits or most > prod(step.slot.shape) + len(group):
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


def buffer_bytes(step: Exchange | Reduce) -> int:
    return min(step.buffer_bytes, MESSAGE_BUFFER_BYTES)


def buffer_elements(step: Exchange | Reduce, slot: Slot) -> int:
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
