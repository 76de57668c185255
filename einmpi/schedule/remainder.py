"""What is left of a schedule after one of its save points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import (
    Begin,
    Drop,
    Evict,
    Exchange,
    Fetch,
    Free,
    Group,
    Load,
    Place,
    Slot,
    Step,
    Store,
    reads,
    writes,
)


def remaining(schedule: Schedule, done: int) -> Schedule:
    """The schedule after its first `done` vertices: the same steps in the same order, so that it gives the same bits.

    The tensors of the save points before must be in their slots. Inputs are loaded again where they are still used,
    and what is stored already is stored again, which costs nothing.
    """
    end = schedule.points[done - 1].steps
    before, after = schedule.steps[:end], schedule.steps[end:]
    used = {slot.name for step in after for slot in reads(step)}
    again = tuple(
        step
        for step in before
        if isinstance(step, Store)
        or (_loads(step) and any(slot.name in used for slot in writes(step)))
    )
    outside: tuple[Slot, ...] = ()
    if any(isinstance(step, Place | Evict) for step in schedule.steps):
        # Memory is short: all begins outside, and then what was in memory is fetched.
        there, inside = _lying(before)
        loaded = {slot for step in again for slot in writes(step)}
        again = (*(Place(slot) for slot in there if slot in loaded), *again, *map(Fetch, inside))
        outside = tuple(slot for slot in there if slot not in loaded)
    shift = len(again) - end
    points = tuple(replace(point, steps=point.steps + shift) for point in schedule.points[done:])
    return replace(schedule, steps=again + after, points=points, outside=outside)


def _lying(steps: Sequence[Step]) -> tuple[list[Slot], list[Slot]]:
    """The slots that have values after these steps, but for those that stay between runs; and which are in memory."""
    memory: dict[Slot, None] = {}
    outside: dict[Slot, None] = {}
    single = [
        part for step in steps for part in (step.steps if isinstance(step, Group) else (step,))
    ]
    for step in single:
        if isinstance(step, Free | Drop):
            memory.pop(step.slot, None)
        if isinstance(step, Free):
            outside.pop(step.slot, None)
        elif isinstance(step, Fetch):
            memory[step.slot] = None
        elif isinstance(step, Place | Evict):
            outside[step.slot] = None
        elif not isinstance(step, Begin) and not (isinstance(step, Load) and step.kept):
            memory.update(dict.fromkeys(slot for slot in writes(step) if slot not in outside))
    return list(memory | outside), list(memory)


def _loads(step: Step) -> bool:
    """Whether it fills the slot of an input: from where it lies, or, in place, from other ranks that have loaded it."""
    return isinstance(step, Load) or (isinstance(step, Exchange) and step.source == step.target)
