"""Exchanges and reductions in memory that the members of a group share: barriers and copies, or
no copies at all, in place of messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from einmpi.comm.base import Comm, count_shared
from einmpi.comm.shared_memory import gather_texts_among
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.runtime.array_parts import MANY_BOXES
from einmpi.runtime.backend import HostArray
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.pairs import rounds
from einmpi.runtime.sharing.arrays import SharedTransfer, TransferBeside
from einmpi.runtime.sharing.inputs import Group
from einmpi.runtime.sharing.slots import SharedSlots
from einmpi.schedule.regions import Region, indices, packed, paired_boxes
from einmpi.schedule.steps import Exchange, Reduce, Slot

Index: TypeAlias = Any  # of a box or of a list of elements, as numpy takes it
IndexPairs: TypeAlias = Sequence[tuple[Index, Index]]
Advance: TypeAlias = Callable[[Group], None]


class ArrayOf(Protocol):
    """What gives the array that a rank has for a slot, perhaps in another shape than here."""

    def __call__(
        self, slot: Slot, rank: int, shape: tuple[int, ...] | None = None
    ) -> HostArray: ...


class _Sender(NamedTuple):
    """A member of the group from whose block elements are taken: its extents, and which."""

    rank: int
    shape: tuple[int, ...]
    elements: IndexPairs  # there, and in the target
    packed_elements: IndexPairs  # there, and in a slot with nothing else


def prepare_shared_transfers(
    found: SharedSlots, comm: Comm, array_of: ArrayOf, advance: Advance
) -> tuple[dict[int, SharedTransfer], dict[int, TransferBeside]]:
    """Return the transfers in shared memory by the identity of their steps.

    Also return those that can leave a block where it is, and put what arrives beside it.

    The members of a group tell each other where in their blocks the elements are that others need,
    so all of them call this. `advance` is called after every transfer of a group.
    """
    transfers: dict[int, SharedTransfer] = {}
    transfers_beside: dict[int, TransferBeside] = {}
    for group in found.groups:
        steps = [step for step in found.steps if step.group == group]
        recutting = [step for step in steps if _recuts(step)]
        senders = _senders_of(recutting, group, comm) if recutting else {}
        for step in steps:
            if isinstance(step, Reduce):
                transfers[id(step)] = _prepare_reduce(step, array_of, advance)
            elif id(step) in senders:
                recut = _SharedRecut(step, senders[id(step)], array_of, advance)
                transfers[id(step)] = recut.receive
                transfers_beside[id(step)] = recut.receive_beside
            else:
                piece = found.pieces.get(step.source.name)
                is_inside = piece is not None and piece.exchange is step
                transfers[id(step)] = _prepare_gather(step, is_inside, advance)
    return transfers, transfers_beside


def _recuts(step: Exchange | Reduce) -> bool:
    return isinstance(step, Exchange) and not step.moves.same_to_all


def _prepare_gather(step: Exchange, is_inside: bool, advance: Advance) -> SharedTransfer:
    """Prepare to write the own piece of a block, which all members read when all have done so.

    The piece need not be written if it was computed inside of the block.
    """
    own = _own_pairs(step)

    def gather(buffers: Buffers, comm: Comm) -> None:
        buffers.make(step.target)
        target = np.atleast_1d(buffers.shared_array(step.target))
        if own:
            piece = buffers[step.source]
            if not (is_inside and piece is buffers.shared.arrays[step.source.name]):
                _copy(np.atleast_1d(piece), target, own)
        comm.barrier_among(step.group)
        count_shared(comm, step.nbytes)
        advance(step.group)

    return gather


class _SharedRecut:
    """An exchange in which a rank copies what it needs from the blocks of other members."""

    def __init__(
        self, step: Exchange, senders: Sequence[_Sender], array_of: ArrayOf, advance: Advance
    ) -> None:
        self.step = step
        self.senders = senders
        self.array_of = array_of
        self.advance = advance
        self.own = _own_pairs(step)

    def receive(self, buffers: Buffers, comm: Comm) -> None:
        """Build the target's block."""
        step = self.step
        source = buffers.shared_array(step.source)
        target = np.atleast_1d(buffers.make(step.target))
        if self.own:
            _copy(np.atleast_1d(source), target, self.own)
        comm.barrier_among(step.group)
        for sender in self.senders:
            _copy(self._block_of(sender), target, sender.elements)
        self._finish(comm)

    def receive_beside(self, arriving: Sequence[Slot | None], buffers: Buffers, comm: Comm) -> None:
        """Copy what each member has for this rank to a slot of its own, and leave the block."""
        buffers.shared_array(self.step.source)
        comm.barrier_among(self.step.group)
        for sender in self.senders:
            slot = arriving[self.step.group.index(sender.rank)]
            assert slot is not None, "each message has a slot"
            target = np.atleast_1d(buffers.make(slot))
            _copy(self._block_of(sender), target, sender.packed_elements)
        self._finish(comm)

    def _block_of(self, sender: _Sender) -> HostArray:
        return np.atleast_1d(self.array_of(self.step.source, sender.rank, sender.shape))

    def _finish(self, comm: Comm) -> None:
        count_shared(comm, self.step.nbytes)
        self.advance(self.step.group)


def _prepare_reduce(step: Reduce, array_of: ArrayOf, advance: Advance) -> SharedTransfer:
    """Prepare to aggregate the own piece with those of the others, in the order of messages."""
    group = step.group
    own_piece = step.reduction.pieces[step.reduction.me]
    places: IndexPairs = () if own_piece is None else _index_pairs(own_piece, own_piece)
    combine = AGGREGATIONS[step.aggregation].combine

    def reduce(buffers: Buffers, comm: Comm) -> None:
        block = np.atleast_1d(buffers.shared_array(step.slot))
        comm.barrier_among(group)
        for _, member in rounds(group, step.reduction.me):
            other = np.atleast_1d(array_of(step.slot, group[member]))
            with np.errstate(all="ignore"):
                for place, _ in places:
                    part = block[place]
                    combine(part, other[place], out=part)
                    is_view = isinstance(place[0], slice)
                    if not is_view:
                        block[place] = part
        count_shared(comm, step.nbytes)
        advance(group)

    return reduce


def _senders_of(
    steps: Iterable[Exchange | Reduce], group: Group, comm: Comm
) -> dict[int, list[_Sender]]:
    """Return the members from whose blocks each exchange takes elements."""
    exchanges = [step for step in steps if isinstance(step, Exchange)]
    own = [(step.source.shape, step.moves.sends) for step in exchanges]
    all_members = [json.loads(text) for text in gather_texts_among(comm, group, json.dumps(own))]
    found: dict[int, list[_Sender]] = {}
    for number, step in enumerate(exchanges):
        moves = step.moves
        senders = []
        for _, member in rounds(group, moves.me):
            received = moves.receives[member]
            if received is None:
                continue
            extents, sends = all_members[member][number]
            there = tuple(tuple(map(tuple, runs)) for runs in sends[moves.me])
            pairs = _index_pairs(there, received)
            packed_pairs = _index_pairs(there, packed(received))
            senders.append(_Sender(group[member], tuple(extents), pairs, packed_pairs))
        found[id(step)] = senders
    return found


def _own_pairs(step: Exchange) -> IndexPairs:
    """Return what this rank has already, in the source and in the target."""
    if step.moves.own is None or step.source == step.target:
        return ()
    return _index_pairs(*step.moves.own)


def _index_pairs(one: Region, two: Region) -> IndexPairs:
    """Return the elements of two regions, which correspond, as indices of two arrays."""
    if prod(map(len, one)) > MANY_BOXES or prod(map(len, two)) > MANY_BOXES:
        return [(np.ix_(*map(indices, one)), np.ix_(*map(indices, two)))]
    return list(paired_boxes(one, two))


def _copy(source: HostArray, target: HostArray, pairs: IndexPairs) -> None:
    for there, here in pairs:
        target[here] = source[there]
