"""What one rank does: its steps in order, and the points at which a run can be saved."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from einmpi.schedule.layout import Layout
from einmpi.schedule.steps import Slot, Step


@dataclass(frozen=True)
class SavePoint:
    """A vertex is done when this many steps are. Its tensor lies in a slot; copies that only it needed are gone."""

    vertex: str
    steps: int
    slot: Slot
    layout: Layout  # partial results where an axis cuts PARTIAL
    inside: bool = False  # of a group: not all that is needed from here on need be there


@dataclass(frozen=True)
class Schedule:
    """What one rank does, in order. Ranks that the plan leaves idle have no steps, but they come to all points."""

    rank: int
    ranks: int
    digest: str  # of the plan: equal on all ranks
    steps: tuple[Step, ...]
    points: tuple[SavePoint, ...] = ()  # one for each vertex, in order
    outside: tuple[Slot, ...] = ()  # in the slow tier when it begins: what a checkpoint brings back

    @cached_property
    def parts(self) -> tuple[tuple[tuple[Step, ...], SavePoint | None], ...]:
        """The steps up to each point; then those after the last one."""
        found, start = [], 0
        for point in self.points:
            found.append((self.steps[start : point.steps], point))
            start = point.steps
        return (*found, (self.steps[start:], None))

    def __str__(self) -> str:
        return "\n".join([f"rank {self.rank} of {self.ranks}", *map(str, self.steps)])
