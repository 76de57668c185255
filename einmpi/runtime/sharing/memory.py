"""The memory in which the slots of a schedule lie that ranks share. It is set up by all ranks
together, and used again from run to run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from einmpi.comm.base import Comm, SharingError
from einmpi.comm.shared_memory import all_agree, sharing_nodes
from einmpi.errors import EinmpiError, failure
from einmpi.runtime.memory_placement import ArrayUse, place_arrays
from einmpi.runtime.sharing.arrays import SharedArrays
from einmpi.runtime.sharing.inputs import Group, find_shared_inputs
from einmpi.runtime.sharing.slots import (
    ComputedPiece,
    SharedSlot,
    SharedSlots,
    find_shared_slots,
)
from einmpi.runtime.sharing.transfers import prepare_shared_transfers
from einmpi.schedule.memory import bytes_needed, peak_bytes
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Slot

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
        self.transfers, self.transfers_beside = prepare_shared_transfers(
            found, comm, self.array_of, self.advance
        )

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
                EinmpiError.status,
                'no memory for what the ranks of a node share; set shared = "off" in [run]',
                everywhere=True,
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
