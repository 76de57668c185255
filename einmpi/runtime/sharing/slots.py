"""Which slots of a schedule lie in memory that the ranks of a node share, and which exchanges and
reductions need no messages then. All members of a group find the same."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from einmpi.runtime.sharing import inputs
from einmpi.runtime.sharing.inputs import Group, is_inside_node
from einmpi.runtime.transfer import is_left_to_communicator
from einmpi.schedule.memory_steps import Reuse
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.slots import names_of
from einmpi.schedule.steps import Exchange, Load, Reduce, Slot, Step

# A gathered slot is one block for the whole group: each member writes its piece at its place, and
# after a barrier all of them read all of it. A published slot is the block of one member, from
# which others take what they need, or which they add to their own partial results.
#
# The memory of a slot is written again only when all members have finished with it. They have if
# the group has done a whole transfer, with its barrier, after the last use of the one slot and
# before the first use of the other. So the uses of a slot are counted in transfers of its group.

SharedStep: TypeAlias = Exchange | Reduce


@dataclass(frozen=True)
class SharedSlot:
    """A slot in the memory of a group.

    Its memory is in use from the `first` to the `last` of the times between transfers of the
    group: time 0 is before the first transfer, time 1 before the second one.
    """

    slot: Slot
    group: Group
    is_published: bool  # each member has its own
    area_bytes: int  # for the slot of one member; the same on all members
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        """The bytes of the group's memory that it takes."""
        return self.area_bytes * len(self.group) if self.is_published else self.area_bytes


@dataclass(frozen=True)
class SharedSlots:
    """The shared slots of a schedule by name, and the steps without messages.

    The steps of a group are in order, and groups come in the order of their first steps.
    """

    slots: Mapping[str, SharedSlot] = field(default_factory=dict)
    steps: Sequence[SharedStep] = ()

    @property
    def groups(self) -> list[Group]:
        """The groups that share memory, in an order that all their members agree on."""
        return list(dict.fromkeys(step.group for step in self.steps))

    @property
    def bytes_received(self) -> int:
        """The bytes that this rank gets from others without messages."""
        return sum(step.nbytes for step in self.steps)

    def of_group(self, group: Group) -> SharedSlots:
        """Return what one group shares."""
        slots = {name: shared for name, shared in self.slots.items() if shared.group == group}
        return SharedSlots(slots, [step for step in self.steps if step.group == group])

    def joined(self, other: SharedSlots) -> SharedSlots:
        """Return what these groups and other ones share; the order of groups stays."""
        return SharedSlots({**self.slots, **other.slots}, [*self.steps, *other.steps])


def find_shared_slots(
    schedule: Schedule, nodes: Sequence[int], with_published: bool = True
) -> SharedSlots:
    """Return the slots that the ranks of a node can share, given the node of each rank."""
    steps = schedule.lowered_steps
    if schedule.outside or any(step.places or step.evicts for step in steps):
        return SharedSlots()  # slots leave memory and come back, on each rank at other times
    if schedule.may_overlap:
        return SharedSlots()  # transfers go on in the background, in an order of their own
    writers = _writers(steps)
    unsuitable = _unsuitable_slots(schedule)
    groups: dict[str, Group] = {}
    areas: dict[str, int] = {}
    published: set[str] = set()
    shared: list[SharedStep] = []
    for step in steps:
        if not isinstance(step, Exchange | Reduce) or not is_inside_node(step.group, nodes):
            continue
        if _gathers(step, writers) and step.writes[0].name not in unsuitable:
            (slot,) = step.writes
            groups[slot.name] = step.group
            areas[slot.name] = slot.nbytes
            shared.append(step)
            continue
        area = _published_bytes(step)
        (slot,) = step.reads
        is_computed = not any(isinstance(each, Load | Exchange) for each in writers[slot.name])
        if not with_published or area < inputs.MIN_SHARED_BYTES or not is_computed:
            continue
        if slot.name in unsuitable or groups.setdefault(slot.name, step.group) != step.group:
            continue
        published.add(slot.name)
        areas[slot.name] = max(area, areas.get(slot.name, 0))
        shared.append(step)
    if not shared:
        return SharedSlots()
    times = _Times(steps, shared)
    found = {}
    for slot in times.slots():
        name = slot.name
        if name in groups:
            group = groups[name]
            first = times.first(slot, group)
            last = times.last(slot, group)
            found[name] = SharedSlot(slot, group, name in published, areas[name], first, last)
    return SharedSlots(found, shared)


def _writers(steps: Sequence[Step]) -> dict[str, list[Step]]:
    """Return the steps that write each slot, in order."""
    found: dict[str, list[Step]] = {}
    for step in steps:
        for slot in step.writes:
            found.setdefault(slot.name, []).append(step)
    return found


def _unsuitable_slots(schedule: Schedule) -> Collection[str]:
    """Return the slots that outlive a run, or that share memory with another slot of the rank."""
    found: set[str] = set()
    for step in schedule.lowered_steps:
        found.update(names_of((*step.keeps, *step.reuses)))
        if isinstance(step, Reuse):
            found.add(step.source.name)
    for source, target in schedule.updates:
        found.update((source.name, target.name))
    return found


def _gathers(step: SharedStep, writers: Mapping[str, Sequence[Step]]) -> bool:
    """Return whether an exchange completes a block that all members of its group need."""
    if not isinstance(step, Exchange) or not step.moves.same_to_all:
        return False
    filling = writers[step.target.name]
    are_moves = all(isinstance(each, Load | Exchange) for each in filling)
    return are_moves and filling[-1] is step and step.target.nbytes >= inputs.MIN_SHARED_BYTES


def _published_bytes(step: SharedStep) -> int:
    """Return a bound on the bytes of the slot that other members read; 0 if they cannot read it.

    The bound is the same on all members. A halo is small, and comes from few neighbours.
    """
    if isinstance(step, Reduce):
        return 0 if is_left_to_communicator(step) else step.slot.nbytes
    moves = step.moves
    if moves.same_to_all or moves.is_halo or moves.largest_block is None:
        return 0
    return moves.largest_block * np.dtype(step.source.dtype).itemsize


class _Times:
    """When slots are used, counted in transfers of a group."""

    def __init__(self, steps: Sequence[Step], shared: Sequence[SharedStep]) -> None:
        self.first_use: dict[Slot, int] = {}  # the number of the step
        self.last_use: dict[Slot, int] = {}
        self.loaded: set[Slot] = set()
        self.transfers: dict[Group, list[int]] = {}  # the numbers of the steps of each group
        self.completed_by: dict[Slot, int] = {}
        shared_ids = set(map(id, shared))
        for number, step in enumerate(steps):
            for slot in (*step.reads, *step.writes):
                self.first_use.setdefault(slot, number)
                self.last_use[slot] = number
            if isinstance(step, Load):
                self.loaded.add(step.slot)
            if id(step) in shared_ids:
                self.transfers.setdefault(step.group, []).append(number)
                self.completed_by[step.writes[0]] = number
        # A backend may leave elements where they are, and read them when the target is read.
        for step in reversed(steps):
            if isinstance(step, Exchange) and not step.moves.same_to_all:
                last = max(self.last_use[step.source], self.last_use[step.target])
                self.last_use[step.source] = last

    def slots(self) -> list[Slot]:
        return list(self.first_use)

    def first(self, slot: Slot, group: Group) -> int:
        """Return the time at which a slot is written first.

        An input may be read ahead, as early as the transfer before its own is done.
        """
        transfers = self.transfers[group]
        first = bisect_left(transfers, self.first_use[slot])
        if slot in self.loaded:
            own_transfer = bisect_left(transfers, self.completed_by[slot])
            first = min(first, max(0, own_transfer - 1))
        return first

    def last(self, slot: Slot, group: Group) -> int:
        """Return the time at which a slot is used last."""
        return bisect_right(self.transfers[group], self.last_use[slot])
