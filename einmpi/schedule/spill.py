"""More than fits into memory: what is copied out of it when, and comes back before it is used; what is done in pieces.

Each rank decides for itself: only its own slots are concerned, and messages stay as they are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence

import numpy as np

from einmpi.schedule.memory import bytes_needed, earliest_start, reordered
from einmpi.schedule.passes import in_passes
from einmpi.schedule.steps import (
    Drop,
    Evict,
    Fetch,
    Kernel,
    Place,
    Slot,
    Step,
    loads_among,
)


def with_spills(steps: Sequence[Step], limit: int) -> list[Step]:
    """The steps with those added that keep a rank below the limit; kernels that are too large in passes."""
    return _fetch_early(_evict_early(_Spilling(steps, limit).run()), limit)


class _Spilling:
    """Goes through the steps. When memory is short, the slot goes that is used again last of all (Belady's rule)."""

    def __init__(self, steps: Sequence[Step], limit: int) -> None:
        self.steps, self.limit = steps, limit
        # Not ours to move. How many bytes of them a rank may have: one that has fewer would cut kernels otherwise, and
        # ranks that compute the same would get other bits.
        self.kept: dict[str, int] = {}
        for _, load in loads_among(steps):
            if load.kept:
                itemsize = np.dtype(load.slot.dtype).itemsize
                self.kept[load.slot.name] = load.layout.most() * itemsize
        self.memory: dict[str, Slot] = {}
        self.outside: set[str] = (
            set()
        )  # slots whose values are in the slow tier, perhaps in memory too
        self.held = 0  # bytes of memory
        self.held_kept = 0  # the most of them that stay, on any rank
        self.done: list[Step] = []
        self.uses: dict[str, list[int]] = {}
        self.kernels: dict[str, list[int]] = {}  # those uses that are kernels
        for number, step in enumerate(steps):
            for name in {slot.name for slot in (*step.reads, *step.writes)}:
                self.uses.setdefault(name, []).append(number)
                if step.kernels:
                    self.kernels.setdefault(name, []).append(number)

    def run(self) -> list[Step]:
        for number, step in enumerate(self.steps):
            for slot in step.frees:
                self.leave_memory(slot)
                self.outside.discard(slot.name)
            if step.kernels and not self.fits(step):
                (kernel,) = step.kernels
                self.compute_in_passes(number, kernel)
                continue
            if step.kernels:
                self.bring(number, (*step.reads, *step.writes), 0)
                self.outside.difference_update(slot.name for slot in step.writes)
            elif step.writes:
                self.move(number, step)
            # Others need nothing in memory: an output that is stored may be in either tier.
            self.done.append(step)
        return self.done

    # ---- steps ------------------------------------------------------------------------------------------------------

    def move(self, number: int, step: Step) -> None:
        """Data come or go: in memory, or outside where there is no room or a kernel wants them there."""
        slots = dict.fromkeys((*step.reads, *step.writes))
        made = step.writes
        messages = step.working_bytes
        if step.keeps or (
            self.fits(step) and not all(self.wanted_outside(number, slot) for slot in made)
        ):
            self.bring(number, list(slots), messages)
            self.outside.difference_update(slot.name for slot in made)
            return
        for slot in slots:
            if slot.name in self.kept:
                continue
            if slot.name in self.memory:
                self.evict(slot)
            elif slot.name not in self.outside:
                self.done.append(Place(slot))
                self.outside.add(slot.name)
        self.make_room(number, messages, ())

    def compute_in_passes(self, number: int, step: Kernel) -> None:
        inside = tuple(
            operand for operand, slot in enumerate(step.operands) if slot.name in self.kept
        )
        for slot in dict.fromkeys(step.operands):
            if slot.name in self.memory and slot.name not in self.kept:
                self.evict(slot)
        found = in_passes(step, self.limit - self.held_kept, inside)
        assert found is not None, (
            f"{step.vertex}: the plan promised that it can be done in {self.limit} bytes"
        )
        self.make_room(number, found.buffers, ())
        self.done += [Place(step.target), found]
        self.outside.add(step.target.name)

    # ---- memory -----------------------------------------------------------------------------------------------------

    def fits(self, step: Step) -> bool:
        """Whether a step can be done in memory, when all else is outside."""
        slots = {
            slot.name: slot.nbytes
            for slot in (*step.reads, *step.writes)
            if slot.name not in self.kept
        }
        return self.held_kept + sum(slots.values()) + step.working_bytes <= self.limit

    def wanted_outside(self, number: int, slot: Slot) -> bool:
        """Whether the next kernel that uses a slot is done in passes."""
        later = self.kernels.get(slot.name, [])
        place = bisect_right(later, number)
        return place < len(later) and not self.fits(self.steps[later[place]])

    def bring(self, number: int, slots: Collection[Slot], messages: int) -> None:
        """Have slots in memory, those that are outside and new ones, and some bytes for messages."""
        missing = {slot.name: slot for slot in slots if slot.name not in self.memory}
        self.make_room(
            number,
            sum(slot.nbytes for slot in missing.values()) + messages,
            {slot.name for slot in slots},
        )
        for name, slot in missing.items():
            if name in self.outside:
                self.done.append(Fetch(slot))
            self.memory[name] = slot
            self.held += slot.nbytes
            self.held_kept += self.kept.get(name, 0)

    def make_room(self, number: int, wanted: int, used: Collection[str]) -> None:
        while self.held + wanted > self.limit:
            movable = [
                slot
                for name, slot in self.memory.items()
                if name not in used and name not in self.kept
            ]
            assert movable, f"step {number} does not fit into {self.limit} bytes"
            # Of those that are used again together, one that need not be copied, then the largest.
            self.evict(
                max(
                    movable,
                    key=lambda slot: (
                        self.next_use(slot, number),
                        slot.name in self.outside,
                        slot.nbytes,
                        slot.name,
                    ),
                )
            )

    def next_use(self, slot: Slot, number: int) -> int:
        uses = self.uses[slot.name]
        place = bisect_right(uses, number)
        return uses[place] if place < len(uses) else len(self.steps)

    def evict(self, slot: Slot) -> None:
        if slot.name not in self.outside:
            self.done.append(Evict(slot))
            self.outside.add(slot.name)
        self.done.append(Drop(slot))
        self.leave_memory(slot)

    def leave_memory(self, slot: Slot) -> None:
        if self.memory.pop(slot.name, None) is not None:
            self.held -= slot.nbytes


# ---- copies run beside kernels --------------------------------------------------------------------------------------


def _evict_early(steps: Sequence[Step]) -> list[Step]:
    """Each Evict directly behind the step that changed the slot last: its memory stays until it is dropped."""
    behind: dict[int, list[Step]] = {}
    changed: dict[str, int] = {}
    for number, step in enumerate(steps):
        for slot in step.writes:
            changed[slot.name] = number
        for slot in step.evicts:
            behind.setdefault(changed[slot.name], []).append(step)
    found: list[Step] = []
    for number, step in enumerate(steps):
        if not step.evicts:
            found.append(step)
        found += behind.get(number, ())
    return found


def _fetch_early(steps: Sequence[Step], limit: int) -> list[Step]:
    """Each Fetch as early as there is memory for it, and not before one that is wanted earlier."""
    needed = bytes_needed(steps)
    before: dict[int, list[Step]] = {}
    moved: set[int] = set()
    first = 0
    left: dict[str, int] = {}  # the last step that had to do with a slot
    for number, step in enumerate(steps):
        for slot in step.fetches:
            size = slot.nbytes
            not_before = max(first, left[slot.name] + 1)
            start = earliest_start(steps, needed, number, size, limit, first=not_before)
            if start is not None:
                first = start
                before.setdefault(start, []).append(step)
                moved.add(number)
                for k in range(start, number):
                    needed[k] += size
        for slot in (*step.reads, *step.writes, *step.places, *step.drops):
            left[slot.name] = number
    return reordered(steps, before, moved)
