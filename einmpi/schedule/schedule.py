"""The schedule of one rank: its steps in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from einmpi.schedule.regions import Slot
from einmpi.schedule.steps import SavePoint, Spill, Step, numbered


@dataclass(frozen=True)
class Schedule:
    """What one rank does, in order.

    Ranks that the plan leaves idle have only the save points.
    """

    rank: int
    ranks: int
    digest: str  # of the plan: equal on all ranks
    steps: tuple[Step, ...]
    # Inputs that can be updated in place, and the slot that is written over each of them.
    updates: tuple[tuple[Slot, Slot], ...] = ()
    outside: tuple[Slot, ...] = ()  # in the slow tier from the start: restored from a checkpoint
    # The steps as they were lowered, before a backend joined kernels: apart from those that manage
    # memory they are of the same kinds, in the same order, on all ranks. None for the rest of a
    # run that is resumed.
    lowered_steps: tuple[Step, ...] = field(default=(), repr=False, compare=False)
    # Whether slots may lie in memory that ranks share: not if, on some rank, slots may leave memory
    # or transfers go on while kernels run. The plan decides, so that all ranks agree.
    may_share: bool = True

    @cached_property
    def points(self) -> tuple[SavePoint, ...]:
        """The save points, one for each vertex of the program, in order."""
        return tuple(point for _, point in numbered(self.steps, SavePoint))

    @cached_property
    def overlaps(self) -> bool:
        """Whether transfers go on while later steps are done."""
        return any(step.background for step in self.steps)

    def __str__(self) -> str:
        points = dict(numbered(self.steps, SavePoint))
        shown = [str(step) for number, step in enumerate(self.steps) if number not in points]
        return "\n".join([f"rank {self.rank} of {self.ranks}", *shown])


# ---- remainder -----------------------------------------------------------------------------------
#
# What is left of a schedule after one of its save points.


def remaining(schedule: Schedule, done: int) -> Schedule:
    """Return the schedule after its first `done` vertices.

    The steps and their order are the same, and so is every bit of the results. The tensors of
    earlier save points must be in their slots. Inputs that are still used are loaded again, and
    outputs that are complete are stored again, which costs nothing.
    """
    end = schedule.steps.index(schedule.points[done - 1]) + 1
    before = schedule.steps[:end]
    after = schedule.steps[end:]
    again = _repeated(before, after)
    outside: list[Slot] = []
    if any(step.spills("place", "evict") for step in schedule.steps):
        # Memory is short: everything begins in the slow tier, and what was in memory is fetched.
        valid, in_memory = _slots_after(before)
        loaded: set[Slot] = set()
        for step in again:
            loaded.update(step.writes)
        places = [Spill(slot, "place") for slot in valid if slot in loaded]
        outside = [slot for slot in valid if slot not in loaded]
        fetches = [Spill(slot, "fetch") for slot in in_memory]
        again = [*places, *again, *fetches]
    steps = (*again, *after)
    return replace(schedule, steps=steps, outside=tuple(outside), lowered_steps=())


def _repeated(before: Sequence[Step], after: Sequence[Step]) -> list[Step]:
    """Return the steps to repeat: those that fill inputs still in use, and those that store."""
    used: set[Slot] = set()
    for step in after:
        used.update(step.reads)
    repeated = []
    for step in before:
        fills_used = step.completes_slot and used.intersection(step.writes)
        if fills_used or step.kind == "store":
            repeated.append(step)
    return repeated


def _slots_after(steps: Sequence[Step]) -> tuple[list[Slot], list[Slot]]:
    """Return the slots that have values after some steps, and those of them in memory.

    Inputs that stay between runs are left out.
    """
    memory: dict[Slot, None] = {}
    slow: dict[Slot, None] = {}
    for step in steps:
        for slot in step.spills("place", "evict"):
            slow[slot] = None
        for slot in step.spills("fetch"):
            memory[slot] = None
        for slot in step.writes:
            if slot not in slow and slot not in step.keeps:
                memory[slot] = None
        for slot in step.spills("drop"):
            memory.pop(slot, None)
        for slot in step.frees:
            memory.pop(slot, None)
            slow.pop(slot, None)
    return list(memory | slow), list(memory)
