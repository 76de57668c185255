"""The schedule of one rank: its steps in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from einmpi.schedule.steps import SavePoint, Slot, Step


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
        return tuple(step for step in self.steps if isinstance(step, SavePoint))

    @cached_property
    def overlaps(self) -> bool:
        """Whether transfers go on while later steps are done."""
        return any(step.background for step in self.steps)

    def __str__(self) -> str:
        shown = [str(step) for step in self.steps if not isinstance(step, SavePoint)]
        return "\n".join([f"rank {self.rank} of {self.ranks}", *shown])
