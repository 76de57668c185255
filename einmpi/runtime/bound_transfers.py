"""Exchanges and reductions with all that is the same in every run bound to them: message buffers,
views of these and of slots that keep their memory, and the call of the communicator. Callers
ignore floating-point errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from einmpi.comm.base import Comm
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.runtime.backend import HostArray
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.kept_memory import KeptMemory
from einmpi.runtime.messages import (
    AtOnce,
    Gather,
    GatherInPlace,
    Piece,
    is_box,
    messages_of,
    messages_of_reduce,
)
from einmpi.runtime.transfer import transfer
from einmpi.schedule.regions import Region, shape
from einmpi.schedule.steps import Exchange, Reduce, Slot

BoundCall: TypeAlias = Callable[[Buffers], None]
SlotView: TypeAlias = Callable[[Buffers], HostArray]  # a part of a slot in this run


def bind_exchange(step: Exchange, number: int, kept: KeptMemory, comm: Comm) -> list[BoundCall]:
    """Return the calls that do an exchange, given the number of the step in its schedule."""
    messages = messages_of(step)
    own = step.moves.own
    is_bound = own is None or (is_box(own[0]) and is_box(own[1]))
    if isinstance(messages, GatherInPlace):
        is_bound = is_bound and step.target.name in kept.slots
    elif len(step.group) > 1:
        is_bound = is_bound and number in kept.received
    if not is_bound:
        return [lambda buffers: transfer(step, buffers, comm)]
    calls: list[BoundCall] = []
    if step.target.name not in kept.slots:
        calls.append(lambda buffers: buffers.make(step.target))
    if own is not None:
        source_view = _slot_view(step.source, own[0], kept)
        target_view = _slot_view(step.target, own[1], kept)
        calls.append(_bind_copy(target_view, source_view))
    if isinstance(messages, GatherInPlace):
        everything = kept.slots[step.target.name].reshape(-1)[messages.place]
        gather = comm.prepare_allgatherv(step.group, everything, messages.counts)
        calls.append(lambda _: gather())
    elif isinstance(messages, Gather):
        everything = kept.received[number]
        gather = comm.prepare_allgatherv(step.group, everything, messages.counts)
        calls += _bind_packing(messages.own, step.target, everything, kept)
        calls.append(lambda _: gather())
        calls += _bind_unpacking(messages.others, step.target, everything, kept)
    elif isinstance(messages, AtOnce):
        calls += _bind_messages(messages, step.source, step.group, number, kept, comm)
        received = kept.received[number]
        calls += _bind_unpacking(messages.received, step.target, received, kept)
    return _counted(calls, kept.beside_the_plan.get(number, 0))


def bind_reduce(step: Reduce, number: int, kept: KeptMemory, comm: Comm) -> list[BoundCall]:
    """Return the calls that do a reduction, given the number of the step in its schedule."""
    if len(step.group) == 1:
        return []
    messages = messages_of_reduce(step)
    if messages is None or number not in kept.received:
        return [lambda buffers: transfer(step, buffers, comm)]
    calls = _bind_messages(messages, step.slot, step.group, number, kept, comm)
    combine = AGGREGATIONS[step.aggregation].combine
    for view, message in _views(messages.received, step.slot, kept.received[number], kept):
        calls.append(_bind_combining(combine, view, message))
    return _counted(calls, kept.beside_the_plan.get(number, 0))


def _counted(calls: list[BoundCall], nbytes: int) -> list[BoundCall]:
    """Return the calls of a step whose messages are counted as long as it lasts."""
    if nbytes == 0:
        return calls

    def begin(buffers: Buffers) -> None:
        buffers.grow(nbytes)

    def end(buffers: Buffers) -> None:
        buffers.bytes_in_use -= nbytes

    return [begin, *calls, end]


def _bind_messages(
    messages: AtOnce,
    source: Slot,
    group: tuple[int, ...],
    number: int,
    kept: KeptMemory,
    comm: Comm,
) -> list[BoundCall]:
    """Return the calls that pack all messages of a step, send and receive them."""
    send = kept.sent[number]
    send_and_receive = comm.prepare_alltoallv(
        group, send, messages.send_counts, kept.received[number], messages.receive_counts
    )
    calls = _bind_packing(messages.sent, source, send, kept)
    calls.append(lambda _: send_and_receive())
    return calls


def _bind_packing(
    pieces: Sequence[Piece], slot: Slot, buffer: HostArray, kept: KeptMemory
) -> list[BoundCall]:
    """Return the calls that copy pieces of a slot to their places in a message buffer."""
    calls = []
    for view, message in _views(pieces, slot, buffer, kept):
        calls.append(_bind_copy(_always(message), view))
    return calls


def _bind_unpacking(
    pieces: Sequence[Piece], slot: Slot, buffer: HostArray, kept: KeptMemory
) -> list[BoundCall]:
    """Return the calls that copy pieces from a message buffer to their places in a slot."""
    calls = []
    for view, message in _views(pieces, slot, buffer, kept):
        calls.append(_bind_copy(view, _always(message)))
    return calls


def _bind_copy(target: SlotView, source: SlotView) -> BoundCall:
    def copy(buffers: Buffers) -> None:
        target(buffers)[...] = source(buffers)

    return copy


def _bind_combining(combine: np.ufunc, view: SlotView, message: HostArray) -> BoundCall:
    def combine_with_message(buffers: Buffers) -> None:
        part = view(buffers)
        combine(part, message, out=part)  # by its name: numpy deprecates a third one

    return combine_with_message


# ---- views ---------------------------------------------------------------------------------------


def _views(
    pieces: Sequence[Piece], slot: Slot, buffer: HostArray, kept: KeptMemory
) -> list[tuple[SlotView, HostArray]]:
    """Return pieces as parts of the slot and of the message buffer, in the same shape."""
    found = []
    for piece in pieces:
        view = _slot_view(slot, piece.region, kept)
        extents = shape(piece.region) if slot.shape else ()
        found.append((view, buffer[piece.place].reshape(extents)))
    return found


def _slot_view(slot: Slot, box: Region, kept: KeptMemory) -> SlotView:
    """Return what gives a box of a slot: always the same view if the slot keeps its memory."""
    index: Any = ...  # a view, even of a slot without dimensions
    if slot.shape:
        index = tuple(slice(*runs[0]) for runs in box)
    if slot.name in kept.slots:
        return _always(kept.slots[slot.name][index])
    name = slot.name
    return lambda buffers: buffers.arrays[name][index]


def _always(view: HostArray) -> SlotView:
    return lambda _: view
