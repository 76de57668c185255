"""Which slots of a schedule lie in memory that the ranks of a node share, and which exchanges and
reductions need no messages then. All members of a group find the same."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from einmpi.runtime.host_memory import ALIGNMENT
from einmpi.runtime.sharing import inputs
from einmpi.runtime.sharing.inputs import Group, is_inside_node
from einmpi.runtime.transfer import is_box, is_left_to_communicator
from einmpi.schedule.regions import Slot, names_of, whole
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Step, Transfer, numbered

# A gathered slot is one block for the whole group: each member writes its piece at its place, or
# computes it there, and after a barrier all of them read all of it. A published slot is the block
# of one member, from which others take what they need, or which they add to their own partial
# results.
#
# The memory of a slot is written again only when all members have finished with it. They have if
# the group has done a whole transfer, with its barrier, after the last use of the one slot and
# before the first use of the other. So the uses of a slot are counted in transfers of its group.


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
class ComputedPiece:
    """A slot that this rank computes inside of the slot that it is a piece of."""

    slot: Slot
    exchange: Transfer  # that completes the other slot
    offset: int  # in the other slot, in bytes


@dataclass(frozen=True)
class SharedSlots:
    """The shared slots of a schedule by name, and the steps without messages.

    The steps of a group are in order, and groups come in the order of their first steps.
    """

    slots: Mapping[str, SharedSlot] = field(default_factory=dict)
    steps: Sequence[Transfer] = ()
    # Those that this rank computes inside of these slots, by their own name.
    pieces: Mapping[str, ComputedPiece] = field(default_factory=dict)

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
        steps = [step for step in self.steps if step.group == group]
        pieces = {
            name: piece for name, piece in self.pieces.items() if piece.exchange.group == group
        }
        return SharedSlots(slots, steps, pieces)

    def joined(self, other: SharedSlots) -> SharedSlots:
        """Return what these groups and other ones share; the order of groups stays."""
        return SharedSlots(
            {**self.slots, **other.slots},
            [*self.steps, *other.steps],
            {**self.pieces, **other.pieces},
        )


def find_shared_slots(
    schedule: Schedule,
    nodes: Sequence[int],
    with_pieces: bool = True,
    with_published: bool = True,
) -> SharedSlots:
    """Return the slots that the ranks of a node can share, given the node of each rank."""
    if not schedule.may_share:
        return SharedSlots()
    search = _Search(schedule)
    for _, step in numbered(schedule.lowered_steps, Transfer):
        if not is_inside_node(step.group, nodes):
            continue
        if search.can_gather(step):
            search.gather(step)
        elif with_published and search.can_publish(step):
            search.publish(step)
    if not search.shared:
        return SharedSlots()
    gathering = search.gathers_of_computed() if with_pieces else []
    slots = search.slots({step.target.name: step.source for step in gathering})
    pieces = {}
    for step in gathering:
        offset = _piece_offset(step)
        if offset is not None:
            pieces[step.source.name] = ComputedPiece(step.source, step, offset)
    return SharedSlots(slots, search.shared, pieces)


class _Search:
    """The search for slots that the ranks of a node can share.

    What it finds for a group depends only on what all members of the group know.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.steps = schedule.lowered_steps
        self.writers = _writers(self.steps)
        self.first_transfers = _first_transfers(self.steps)
        self.unsuitable = _unsuitable_slots(schedule)
        # The slots found so far, by name.
        self.groups: dict[str, Group] = {}
        self.areas: dict[str, int] = {}  # bytes
        self.published: set[str] = set()
        self.shared: list[Transfer] = []  # the steps that need no messages

    def can_gather(self, step: Transfer) -> bool:
        """Return whether an exchange completes a block that all members of its group need."""
        target = step.target
        if not step.moves.same_to_all or target.name in self.unsuitable:
            return False
        filling = self.writers[target.name]
        are_moves = all(_brings(each) for each in filling)
        return are_moves and filling[-1] is step and target.nbytes >= inputs.MIN_SHARED_BYTES

    def gather(self, step: Transfer) -> None:
        """Put the target of an exchange into the memory of its group."""
        self.groups[step.target.name] = step.group
        self.areas[step.target.name] = step.target.nbytes
        self.shared.append(step)

    def can_publish(self, step: Transfer) -> bool:
        """Return whether members can read what a step moves where it was computed."""
        slot = step.source
        if slot.name in self.unsuitable or _published_bytes(step) < inputs.MIN_SHARED_BYTES:
            return False
        if any(map(_brings, self.writers[slot.name])):
            return False
        return step.group == self.first_transfers[slot.name].group

    def publish(self, step: Transfer) -> None:
        """Put what a step moves into the memory of its group, once for each member."""
        name = step.source.name
        self.groups[name] = step.group
        self.areas[name] = max(_published_bytes(step), self.areas.get(name, 0))
        self.published.add(name)
        self.shared.append(step)

    def gathers_of_computed(self) -> list[Transfer]:
        """Return the exchanges whose pieces are computed by one kernel each.

        These are the same on all members, even on those that have no piece: the times of slots
        depend on them.
        """
        found = []
        for step in self.shared:
            if not step.moves.same_to_all:
                continue
            source = step.source
            if source.name in self.unsuitable or source.name in self.published:
                continue
            kernels = self.writers[source.name]
            is_computed = len(kernels) == 1 and kernels[0].only_kernel is not None
            is_alone = len(self.writers[step.target.name]) == 1
            if is_computed and is_alone and self.first_transfers[source.name] is step:
                found.append(step)
        return found

    def slots(self, sources: Mapping[str, Slot]) -> dict[str, SharedSlot]:
        """Return the slots that were found, given those that are computed inside of them."""
        times = _Times(self.steps, self.shared)
        found = {}
        for slot in times.slots():
            name = slot.name
            if name not in self.groups:
                continue
            group = self.groups[name]
            first = times.first(slot, group)
            last = times.last(slot, group)
            if name in sources:
                first = min(first, times.first(sources[name], group))
                last = max(last, times.last(sources[name], group))
            is_published = name in self.published
            found[name] = SharedSlot(slot, group, is_published, self.areas[name], first, last)
        return found


def _writers(steps: Sequence[Step]) -> dict[str, list[Step]]:
    """Return the steps that write each slot, in order."""
    found: dict[str, list[Step]] = {}
    for step in steps:
        for slot in step.writes:
            found.setdefault(slot.name, []).append(step)
    return found


def _brings(step: Step) -> bool:
    """Return whether a step fills a slot with elements that are there already."""
    return step.kind in ("load", "exchange")


def _first_transfers(steps: Sequence[Step]) -> dict[str, Transfer]:
    """Return the first exchange or reduction that reads each slot, with messages or without.

    A slot can be in the memory of one group only. All ranks take the group of this step. Which
    steps need no messages would not do: that depends on the nodes of each rank's groups.
    """
    found: dict[str, Transfer] = {}
    for _, step in numbered(steps, Transfer):
        found.setdefault(step.source.name, step)
    return found


def _unsuitable_slots(schedule: Schedule) -> Collection[str]:
    """Return the slots that outlive a run, or that share memory with another slot of the rank."""
    found: set[str] = set()
    for step in schedule.lowered_steps:
        found.update(names_of((*step.keeps, *step.reuses)))
        found.update(reuse.source.name for reuse in step.reuse_steps)
    for source, target in schedule.updates:
        found.update((source.name, target.name))
    return found


def _piece_offset(step: Transfer) -> int | None:
    """Return where in the target the source could lie, in bytes; None if it could not.

    It must lie there as in memory of its own: without gaps, and aligned as on all ranks.
    """
    source = step.source
    target = step.target
    if step.moves.own is None or source.nbytes == 0:
        return None
    there, here = step.moves.own
    if there != tuple(map(whole, source.shape)) or not is_box(here):
        return None
    pairs = zip(source.shape, target.shape, strict=True)
    cut = [dimension for dimension, (part, extent) in enumerate(pairs) if part != extent] or [0]
    if len(cut) > 1 or prod(target.shape[: cut[0]]) > 1:
        return None
    first_row = here[cut[0]][0][0]
    offset = first_row * prod(target.shape[cut[0] + 1 :]) * np.dtype(target.dtype).itemsize
    return offset if offset % ALIGNMENT == 0 else None


def _published_bytes(step: Transfer) -> int:
    """Return a bound on the bytes of the slot that other members read; 0 if they cannot read it.

    The bound is the same on all members. A halo is small, and comes from few neighbours.
    """
    if step.aggregation is not None:
        return 0 if is_left_to_communicator(step) else step.target.nbytes
    moves = step.moves
    if moves.same_to_all or moves.is_halo or moves.largest_block is None:
        return 0
    return moves.largest_block * np.dtype(step.source.dtype).itemsize


class _Times:
    """When slots are used, counted in transfers of a group."""

    def __init__(self, steps: Sequence[Step], shared: Sequence[Transfer]) -> None:
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
            if step.kind == "load":
                self.loaded.update(step.writes)
            if id(step) in shared_ids:
                self.transfers.setdefault(step.group, []).append(number)
                self.completed_by[step.writes[0]] = number
        # A backend may leave elements where they are, and read them when the target is read.
        for _, transfer in reversed(list(numbered(steps, Transfer))):
            if not transfer.moves.same_to_all:
                last = max(self.last_use[transfer.source], self.last_use[transfer.target])
                self.last_use[transfer.source] = last

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
