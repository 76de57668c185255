"""The memory in which the slots of a schedule lie that ranks share. It is set up by all ranks
together, and used again from run to run."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.comm.base import (
    Comm,
    SharingError,
    all_agree,
    count_shared,
    gather_texts_among,
    sharing_nodes,
)
from einmpi.errors import failure
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.runtime.backend import (
    MANY_BOXES,
    HostArray,
    SharedArrays,
    SharedTransfer,
)
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.kept_memory import ArrayUse, place_arrays
from einmpi.runtime.sharing.inputs import Group, find_shared_inputs
from einmpi.runtime.sharing.slots import ComputedPiece, SharedSlot, SharedSlots, find_shared_slots
from einmpi.runtime.transfer import rounds
from einmpi.schedule.memory import bytes_needed, peak_bytes
from einmpi.schedule.regions import Region, Slot, indices, packed, paired_boxes
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Transfer

# ---- transfers -----------------------------------------------------------------------------------
#
# Exchanges and reductions in memory that the members of a group share: barriers and copies, or
# no copies at all, in place of messages.


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
) -> dict[int, SharedTransfer]:
    """Return the transfers in shared memory by the number of their steps.

    The members of a group tell each other where in their blocks the elements are that others need,
    so all of them call this. `advance` is called after every transfer of a group.
    """
    transfers: dict[int, SharedTransfer] = {}
    for group in found.groups:
        steps = [step for step in found.steps if step.group == group]
        recutting = [step for step in steps if _recuts(step)]
        senders = _senders_of(recutting, group, comm) if recutting else {}
        for step in steps:
            if step.aggregation is not None:
                transfers[step.number] = _prepare_reduce(step, array_of, advance)
            elif step.number in senders:
                recut = _SharedRecut(step, senders[step.number], array_of, advance)
                transfers[step.number] = recut.receive
            else:
                piece = found.pieces.get(step.source.name)
                is_inside = piece is not None and piece.exchange is step
                transfers[step.number] = _prepare_gather(step, is_inside, advance)
    return transfers


def _recuts(step: Transfer) -> bool:
    return step.aggregation is None and not step.moves.same_to_all


def _prepare_gather(step: Transfer, is_inside: bool, advance: Advance) -> SharedTransfer:
    """Prepare to write the own piece of a block, which all members read when all have done so.

    The piece need not be written if it was computed inside of the block.
    """
    own = _own_pairs(step)

    def gather(_: Transfer, buffers: Buffers, comm: Comm) -> None:
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
        self, step: Transfer, senders: Sequence[_Sender], array_of: ArrayOf, advance: Advance
    ) -> None:
        self.step = step
        self.senders = senders
        self.array_of = array_of
        self.advance = advance
        self.own = _own_pairs(step)

    def receive(self, step: Transfer, buffers: Buffers, comm: Comm) -> None:
        """Build the target's block, or copy what arrives to halo buffers."""
        source = buffers.shared_array(step.source)
        if step.arriving:
            self._receive_beside(step.arriving, buffers, comm)
            return
        target = np.atleast_1d(buffers.make(step.target))
        if self.own:
            _copy(np.atleast_1d(source), target, self.own)
        comm.barrier_among(step.group)
        for sender in self.senders:
            _copy(self._block_of(sender), target, sender.elements)
        self._finish(comm)

    def _receive_beside(
        self, arriving: Sequence[Slot | None], buffers: Buffers, comm: Comm
    ) -> None:
        """Copy what each member has for this rank to a slot of its own, and leave the block."""
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


def _prepare_reduce(step: Transfer, array_of: ArrayOf, advance: Advance) -> SharedTransfer:
    """Prepare to aggregate the own piece with those of the others, in the order of messages."""
    group = step.group
    me = step.moves.me
    own_piece = step.moves.pieces[step.moves.me]
    places: IndexPairs = () if own_piece is None else _index_pairs(own_piece, own_piece)
    combine = AGGREGATIONS[step.required_aggregation].combine

    def reduce(step: Transfer, buffers: Buffers, comm: Comm) -> None:
        block = np.atleast_1d(buffers.shared_array(step.target))
        comm.barrier_among(group)
        for _, member in rounds(group, me):
            other = np.atleast_1d(array_of(step.target, group[member]))
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
    exchanges: Sequence[Transfer], group: Group, comm: Comm
) -> dict[int, list[_Sender]]:
    """Return the members from whose blocks each exchange takes elements."""
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
        found[step.number] = senders
    return found


def _own_pairs(step: Transfer) -> IndexPairs:
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


# What a group keeps after a run, for the next one: new memory costs time. More is given back.
MOST_KEPT_BYTES = 2**28
# In `Comm.kept`: the memory by the group, and how often groups have given some back. This count is
# the same on all ranks, also on those that have no group.
_KEPT_MEMORY = "memory of groups"
_TIMES_GIVEN_BACK = "times that groups gave back memory"


class _Choice(NamedTuple):
    """What groups share besides blocks that are loaded or copied together."""

    with_pieces: bool
    with_published: bool


# The best one comes first. Another one may need less memory.
_CHOICES = (_Choice(True, True), _Choice(False, True), _Choice(False, False))


class _Places(NamedTuple):
    """Where the slots of a group lie in its memory, by name, and how large that is."""

    offsets: dict[str, int]
    nbytes: int


class SharedMemory(SharedArrays):
    """The shared slots of a schedule, as one rank uses them in one run after another."""

    def __init__(self, found: SharedSlots, comm: Comm) -> None:
        """Prepare the transfers. All ranks call it."""
        super().__init__()
        self.found = found
        self.comm = comm
        self.places = {group: _places_of(found, group) for group in found.groups}
        self.bytes_per_rank = sum(
            -(-places.nbytes // len(group)) for group, places in self.places.items()
        )
        most_bytes = max((places.nbytes for places in self.places.values()), default=0)
        # The memory of the largest group on any rank, so that all ranks agree when to ask for it.
        self.most_bytes_anywhere = -comm.lowest(-most_bytes)
        # How often groups had given back memory when all of them had theirs; -1: not yet.
        self.complete_since = -1
        self.memory: dict[Group, npt.NDArray[np.uint8]] = {}
        self.times: dict[Group, int] = {}  # transfers of each group so far in this run
        self.postponed: list[tuple[SharedSlot, Callable[[], None]]] = []
        self.transfers = prepare_shared_transfers(found, comm, self.array_of, self.advance)

    # ---- runs ------------------------------------------------------------------------------------

    def allocate_everywhere(self) -> bool:
        """Get the memory of all groups; return whether all of them have it. All ranks call it."""
        self.complete_since = -1
        is_possible = self.comm.lowest(int(self._allocate())) == 1
        if is_possible:
            self.complete_since = self._times_given_back()
        return is_possible

    def _allocate(self) -> bool:
        """Get the memory of this rank's groups; return whether that was possible."""
        kept = self.comm.kept.setdefault(_KEPT_MEMORY, {})
        is_possible = True
        for group, places in self.places.items():
            memory = kept.get(group)
            if memory is None or memory.nbytes < places.nbytes:
                try:
                    memory = self.comm.share_memory(group, places.nbytes)
                except SharingError:
                    is_possible = False  # go on: the members of other groups wait for this rank
                    continue
                kept[group] = memory
            if self.memory.get(group) is not memory:
                self.memory[group] = memory
                own = self.found.of_group(group)
                for name, shared in own.slots.items():
                    self.arrays[name] = self.array_of(shared.slot, self.comm.rank)
                for name, piece in own.pieces.items():
                    self.arrays[name] = self._array_of_piece(piece)
        return is_possible

    def begin_run(self) -> None:
        """Wait until no member of any group reads what the last run has left.

        All ranks call it. They send messages only if memory may have been given back since the
        last run; if it cannot be had again on some node, all of them raise an error.
        """
        if self.most_bytes_anywhere == 0 or self.complete_since == self._times_given_back():
            self._allocate()  # without messages: groups have kept this much, perhaps in new memory
        elif not self.allocate_everywhere():
            raise failure(
                'no memory for what the ranks of a node share; set shared = "off" in [run]'
            )
        self.postponed.clear()
        for group in self.places:
            self.times[group] = 0
            self.comm.barrier_among(group)

    def _times_given_back(self) -> int:
        times: int = self.comm.kept.get(_TIMES_GIVEN_BACK, 0)
        return times

    def end_run(self, keep: bool) -> None:
        """Give back the memory of groups that have much of it, unless it is needed again soon.

        All ranks call it.
        """
        if keep:
            return
        gives_back = self.most_bytes_anywhere > MOST_KEPT_BYTES
        if gives_back:
            self.comm.kept[_TIMES_GIVEN_BACK] = self._times_given_back() + 1
        for group, memory in [*self.memory.items()]:
            if memory.nbytes > MOST_KEPT_BYTES:
                if gives_back:
                    self.comm.kept[_KEPT_MEMORY].pop(group, None)
                del self.memory[group]
                own = self.found.of_group(group)
                for name in (*own.slots, *own.pieces):
                    del self.arrays[name]

    # ---- slots -----------------------------------------------------------------------------------

    def array_of(
        self, slot: Slot, rank: int, shape: tuple[int, ...] | None = None
    ) -> npt.NDArray[Any]:
        """Return the array that a rank of the group has for a slot, perhaps in another shape."""
        shared = self.found.slots[slot.name]
        offset = self.places[shared.group].offsets[slot.name]
        if shared.is_published:
            offset += shared.group.index(rank) * shared.area_bytes
        memory = self.memory[shared.group]
        extents = slot.shape if shape is None else shape
        return np.ndarray(extents, slot.dtype, memory, offset)

    def _array_of_piece(self, piece: ComputedPiece) -> npt.NDArray[Any]:
        """Return the array of a slot inside of the one that it is a piece of."""
        target = self.found.slots[piece.exchange.target.name]
        offset = self.places[target.group].offsets[target.slot.name] + piece.offset
        return np.ndarray(piece.slot.shape, piece.slot.dtype, self.memory[target.group], offset)

    def is_free(self, slot: Slot) -> bool:
        piece = self.found.pieces.get(slot.name)
        name = slot.name if piece is None else piece.exchange.target.name
        shared = self.found.slots.get(name)
        return shared is None or self.times[shared.group] >= shared.first

    def postpone(self, slot: Slot, action: Callable[[], None]) -> None:
        self.postponed.append((self.found.slots[slot.name], action))

    def advance(self, group: Group) -> None:
        """Note that a group has done a transfer, and do what waited for it."""
        self.times[group] += 1
        for shared, action in [*self.postponed]:
            if self.is_free(shared.slot):
                self.postponed.remove((shared, action))
                action()


def _places_of(found: SharedSlots, group: Group) -> _Places:
    slots = [shared for shared in found.slots.values() if shared.group == group]
    uses = [ArrayUse((shared.nbytes,), "uint8", shared.first, shared.last) for shared in slots]
    offsets, nbytes = place_arrays(uses)
    names = [shared.slot.name for shared in slots]
    return _Places(dict(zip(names, offsets, strict=True)), nbytes)


def set_up_shared_memory(schedule: Schedule, comm: Comm) -> SharedMemory | None:
    """Return the shared slots of a schedule; None if no rank has any. All ranks call it.

    Each group shares as much as fits: no member needs more memory than its schedule needs without.
    """
    nodes = sharing_nodes(comm)
    choice = choose_shared_slots(schedule, nodes)
    answer: bool | None = None
    while True:
        try:
            group, fits = choice.send(answer)
        except StopIteration as end:
            chosen: SharedSlots = end.value
            break
        answer = all_agree(comm, group, fits)
    memory = SharedMemory(chosen, comm)
    if memory.most_bytes_anywhere and not memory.allocate_everywhere():
        memory = SharedMemory(SharedSlots(), comm)
    memory.inputs = find_shared_inputs(schedule, nodes)
    return memory if memory.most_bytes_anywhere or memory.inputs else None


def choose_shared_slots(
    schedule: Schedule, nodes: Sequence[int]
) -> Generator[tuple[Group, bool], bool | None, SharedSlots]:
    """Choose what each group shares, given the node of each rank.

    Yield whether a choice fits on this rank, and take whether it does on all members of the group.
    """

    @cache
    def found(choice: _Choice) -> SharedSlots:
        return find_shared_slots(schedule, nodes, choice.with_pieces, choice.with_published)

    everything = found(_CHOICES[0])
    limit = peak_bytes(schedule) if everything.steps else 0
    chosen = SharedSlots()
    for group in everything.groups:
        for choice in _CHOICES:
            more = chosen.joined(found(choice).of_group(group))
            fits = scheduled_bytes(schedule, more) <= limit
            if (yield group, fits):
                chosen = more
                break
    return chosen


def scheduled_bytes(schedule: Schedule, found: SharedSlots) -> int:
    """Return the most bytes on this rank, with its share of the memory of each group."""
    shared = 0
    for group in found.groups:
        shared += -(-_places_of(found, group).nbytes // len(group))
    names = {*found.slots, *found.pieces}
    return shared + max(bytes_needed(schedule.steps, names), default=0)
