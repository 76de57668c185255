"""What is left of a schedule after one of its save points."""

from __future__ import annotations

from dataclasses import replace

from einmpi.schedule.steps import Exchange, Load, Schedule, Step, Store, reads, writes


def remaining(schedule: Schedule, done: int) -> Schedule:
    """The schedule after its first `done` vertices: the same steps in the same order, so that it gives the same bits.

    The tensors of the save points before must be in their slots. Inputs are loaded again where they are still used,
    and what is stored already is stored again, which costs nothing.
    """
    end = schedule.points[done - 1].steps
    before, after = schedule.steps[:end], schedule.steps[end:]
    used = {slot.name for step in after for slot in reads(step)}
    again = tuple(step for step in before if isinstance(step, Store)
                  or (_loads(step) and any(slot.name in used for slot in writes(step))))  # fmt: skip
    shift = len(again) - end
    points = tuple(replace(point, steps=point.steps + shift) for point in schedule.points[done:])
    return replace(schedule, steps=again + after, points=points)


def _loads(step: Step) -> bool:
    """Whether it fills the slot of an input: from where it lies, or, in place, from other ranks that have loaded it."""
    return isinstance(step, Load) or (isinstance(step, Exchange) and step.source == step.target)
