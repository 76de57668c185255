"""Schedules that need more than fits into memory: which slots leave it and come back when, and
which kernels are computed in passes. Each rank decides for itself; messages do not change."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from einmpi.schedule.memory import bytes_needed, earliest_start, reordered
from einmpi.schedule.passes import in_passes
from einmpi.schedule.regions import names_of
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

# Example: memory holds two of the slots a, b and c, which kernels use in the order a, b, c, a, b.
# When c is loaded, b leaves memory, since its next use is further away than that of a (Belady's
# rule):
#
#     load a; kernel on a
#     load b; evict b; kernel on b     the copy to the slow tier begins as soon as b has its values
#     drop b; load c; kernel on c      c gets the memory of b
#     free c; fetch b; kernel on a     b comes back while the kernel runs
#     kernel on b


def with_spills(steps: Sequence[Step], limit: int) -> list[Step]:
    """Add the steps that keep a rank below `limit` bytes, and cut kernels that are too large."""
    spilling = _Spilling(steps, limit)
    spilling.add_steps()
    return _fetch_early(_evict_early(spilling.done), limit)


class _Spilling:
    """Goes through the steps and keeps track of which slots are in memory and in the slow tier.

    When memory is short, the slot whose next use is furthest away leaves it.
    """

    def __init__(self, steps: Sequence[Step], limit: int) -> None:
        self.steps = steps
        self.limit = limit
        self.done: list[Step] = []
        self.memory: dict[str, Slot] = {}
        self.bytes_in_use = 0
        self.outside: set[str] = set()  # values are in the slow tier, perhaps in memory too
        # Inputs that stay between runs must not be moved. Count the most bytes that any rank has
        # of them: otherwise a rank with fewer bytes would cut its kernels differently, and ranks
        # that compute the same values would get different bits.
        self.kept_bytes: dict[str, int] = {}
        for _, load in loads_among(steps):
            if load.kept:
                itemsize = np.dtype(load.slot.dtype).itemsize
                self.kept_bytes[load.slot.name] = load.layout.max_elements() * itemsize
        self.kept_in_use = 0
        self.uses: dict[str, list[int]] = {}  # the steps that use each slot
        self.kernel_uses: dict[str, list[int]] = {}  # those of them that are kernels
        for number, step in enumerate(steps):
            for name in set(names_of((*step.reads, *step.writes))):
                self.uses.setdefault(name, []).append(number)
                if step.kernels:
                    self.kernel_uses.setdefault(name, []).append(number)

    def add_steps(self) -> None:
        for number, step in enumerate(self.steps):
            for slot in step.frees:
                self.leave_memory(slot)
                self.outside.discard(slot.name)
            if step.kernels and not self.fits(step):
                (kernel,) = step.kernels
                self.compute_in_passes(number, kernel)
                continue
            if step.kernels:
                self.bring(number, (*step.reads, *step.writes), step.working_bytes)
                self.outside.difference_update(names_of(step.writes))
            elif step.writes:
                self.move(number, step)
            # Others need nothing in memory: an output that is stored may be in either tier.
            self.done.append(step)

    # ---- steps ----------------------------------------------------------------------------------

    def move(self, number: int, step: Step) -> None:
        """Prepare a step that loads or moves data.

        It works in memory, unless there is no room or a kernel wants its result outside.
        """
        slots = dict.fromkeys((*step.reads, *step.writes))
        if self.works_in_memory(number, step):
            self.bring(number, list(slots), step.working_bytes)
            self.outside.difference_update(names_of(step.writes))
            return
        for slot in slots:
            if slot.name in self.kept_bytes:
                continue
            if slot.name in self.memory:
                self.evict(slot)
            elif slot.name not in self.outside:
                self.done.append(Place(slot))
                self.outside.add(slot.name)
        self.make_room(number, step.working_bytes, ())

    def works_in_memory(self, number: int, step: Step) -> bool:
        if step.keeps:
            return True
        if not self.fits(step):
            return False
        return not all(self.wanted_outside(number, slot) for slot in step.writes)

    def wanted_outside(self, number: int, slot: Slot) -> bool:
        """Return whether the next kernel that uses a slot is computed in passes."""
        later = self.kernel_uses.get(slot.name, [])
        position = bisect_right(later, number)
        if position == len(later):
            return False
        return not self.fits(self.steps[later[position]])

    def compute_in_passes(self, number: int, kernel: Kernel) -> None:
        """Replace a kernel by passes, from operands outside to a target outside."""
        for slot in dict.fromkeys(kernel.operands):
            if slot.name in self.memory and slot.name not in self.kept_bytes:
                self.evict(slot)
        inside = []
        for operand, slot in enumerate(kernel.operands):
            if slot.name in self.kept_bytes:
                inside.append(operand)
        passes = in_passes(kernel, self.limit - self.kept_in_use, inside)
        assert passes is not None, (
            f"{kernel.vertex}: the plan promised that it can be done in {self.limit} bytes"
        )
        self.make_room(number, passes.buffers, ())
        self.done += [Place(kernel.target), passes]
        self.outside.add(kernel.target.name)

    # ---- memory ---------------------------------------------------------------------------------

    def fits(self, step: Step) -> bool:
        """Return whether a step can be done in memory when everything else is outside."""
        sizes = {slot.name: slot.nbytes for slot in (*step.reads, *step.writes)}
        needed = self.kept_in_use + step.working_bytes
        for name, nbytes in sizes.items():
            if name not in self.kept_bytes:
                needed += nbytes
        return needed <= self.limit

    def bring(self, number: int, slots: Iterable[Slot], working_bytes: int) -> None:
        """Make sure that slots are in memory: fetch them, or make room for new ones."""
        used = {slot.name: slot for slot in slots}
        missing = [slot for slot in used.values() if slot.name not in self.memory]
        wanted = sum(slot.nbytes for slot in missing) + working_bytes
        self.make_room(number, wanted, used)
        for slot in missing:
            if slot.name in self.outside:
                self.done.append(Fetch(slot))
            self.memory[slot.name] = slot
            self.bytes_in_use += slot.nbytes
            self.kept_in_use += self.kept_bytes.get(slot.name, 0)

    def make_room(self, number: int, wanted: int, used: Collection[str]) -> None:
        """Evict slots until so many bytes are free; the slots `used` stay."""

        def priority(slot: Slot) -> tuple[int, bool, int, str]:
            # Of slots with the same next use, prefer one that need not be copied, then the largest.
            next_use = self.next_use(slot, number)
            return next_use, slot.name in self.outside, slot.nbytes, slot.name

        while self.bytes_in_use + wanted > self.limit:
            movable = []
            for name, slot in self.memory.items():
                if name not in used and name not in self.kept_bytes:
                    movable.append(slot)
            assert movable, f"step {number} does not fit into {self.limit} bytes"
            self.evict(max(movable, key=priority))

    def next_use(self, slot: Slot, number: int) -> int:
        """Return the next step after `number` that uses a slot, or the number of all steps."""
        uses = self.uses[slot.name]
        position = bisect_right(uses, number)
        return uses[position] if position < len(uses) else len(self.steps)

    def evict(self, slot: Slot) -> None:
        if slot.name not in self.outside:
            self.done.append(Evict(slot))
            self.outside.add(slot.name)
        self.done.append(Drop(slot))
        self.leave_memory(slot)

    def leave_memory(self, slot: Slot) -> None:
        if self.memory.pop(slot.name, None) is not None:
            self.bytes_in_use -= slot.nbytes


# ---- copies run during kernels ------------------------------------------------------------------


def _evict_early(steps: Sequence[Step]) -> list[Step]:
    """Move each Evict directly behind the step that wrote the slot last.

    The slot stays in memory until it is dropped.
    """
    evicts_after: dict[int, list[Step]] = {}
    written: dict[str, int] = {}
    for number, step in enumerate(steps):
        for slot in step.writes:
            written[slot.name] = number
        for slot in step.evicts:
            evicts_after.setdefault(written[slot.name], []).append(step)
    found: list[Step] = []
    for number, step in enumerate(steps):
        if not step.evicts:
            found.append(step)
        found += evicts_after.get(number, ())
    return found


def _fetch_early(steps: Sequence[Step], limit: int) -> list[Step]:
    """Move each Fetch forward as far as there is memory, but not before an earlier Fetch."""
    needed = bytes_needed(steps)
    fetches_before: dict[int, list[Step]] = {}
    moved: set[int] = set()
    last_start = 0
    last_use: dict[str, int] = {}  # the last step so far that used or dropped a slot
    for number, step in enumerate(steps):
        for slot in step.fetches:
            first = max(last_start, last_use[slot.name] + 1)
            start = earliest_start(steps, needed, number, slot.nbytes, limit, first=first)
            if start is None:
                continue
            last_start = start
            fetches_before.setdefault(start, []).append(step)
            moved.add(number)
            for k in range(start, number):
                needed[k] += slot.nbytes
        for slot in (*step.reads, *step.writes, *step.places, *step.drops):
            last_use[slot.name] = number
    return reordered(steps, fetches_before, moved)
