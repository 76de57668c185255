"""The schedule of one rank: its steps in order, and the points at which a run can be saved."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from einmpi.schedule.layout import Layout
from einmpi.schedule.steps import Slot, Step


@dataclass(frozen=True)
class SavePoint:
    """The point after which a vertex is complete.

    Its tensor is in a slot; slots that only this vertex needed are freed.
    """

    vertex: str
    steps: int  # how many steps come before this point
    slot: Slot
    layout: Layout  # with partial results where an axis cuts PARTIAL
    # In the middle of a group, or while a tensor is dropped that is computed again: what later
    # steps need may not be there.
    inside: bool = False


@dataclass(frozen=True)
class Schedule:
    """What one rank does, in order.

    Ranks that the plan leaves idle have no steps, but they have all save points.
    """

    rank: int
    ranks: int
    digest: str  # of the plan: equal on all ranks
    steps: tuple[Step, ...]
    points: tuple[SavePoint, ...] = ()  # one for each vertex of the program, in order
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
    def parts(self) -> tuple[tuple[tuple[Step, ...], SavePoint | None], ...]:
        """The steps up to each save point; then those after the last one."""
        found: list[tuple[tuple[Step, ...], SavePoint | None]] = []
        start = 0
        for point in self.points:
            found.append((self.steps[start : point.steps], point))
            start = point.steps
        found.append((self.steps[start:], None))
        return tuple(found)

    @cached_property
    def overlaps(self) -> bool:
        """Whether transfers go on while later steps are done."""
        return any(step.background for step in self.steps)

    def __str__(self) -> str:
        return "\n".join([f"rank {self.rank} of {self.ranks}", *map(str, self.steps)])
