"""Aggregates of a tensor that was computed right before: both in one pass over memory, so that the
tensor is still in the cache when it is aggregated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from einmpi.schedule.halo import Sweep
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Free, Kernel, Reuse, Step, Store

MIN_SWEPT_BYTES = 2**22  # of the tensor: a smaller one stays in the cache anyway


def with_folds(
    schedule: Schedule,
    is_map: Callable[[Kernel], bool],
    is_fold: Callable[[Kernel, Kernel], bool],
) -> Schedule:
    """Return the schedule with aggregates computed together with the tensor that they aggregate.

    `is_map` tells whether a kernel can be computed some rows at a time, `is_fold` whether a kernel
    can aggregate the target of another one in this way. What was between them comes after both,
    and a save point there is inside.
    """
    steps: list[Step] = []
    new_counts = [0]  # of steps, for each count of the old steps
    inside: set[int] = set()
    written_over = {step.slot for step in schedule.steps if isinstance(step, Reuse)}
    sweep_position: int | None = None  # in the new steps, as long as folds can be added
    first_inside = 0
    for number, step in enumerate(schedule.steps, start=1):
        sweep = _sweep_of(step, is_map)
        last = steps[sweep_position] if sweep_position is not None else None
        if isinstance(step, Kernel) and isinstance(last, Sweep) and is_fold(step, last.kernel):
            assert sweep_position is not None
            steps[sweep_position] = replace(last, folds=(*last.folds, step))
            inside.update(range(first_inside, number))
        elif sweep is not None and sweep.kernel.target not in written_over:
            steps.append(sweep)
            sweep_position = len(steps) - 1
            first_inside = number
        else:
            steps.append(step)
            # Without a halo there is no memory to spare, where something is freed between both.
            is_freed = isinstance(step, Free) and isinstance(last, Sweep) and bool(last.blocks)
            if not isinstance(step, Store) and not is_freed:
                sweep_position = None
        new_counts.append(len(steps))
    found: list[Step] = []
    for step in steps:
        is_plain = isinstance(step, Sweep) and not step.blocks and not step.folds
        found.append(step.kernel if isinstance(step, Sweep) and is_plain else step)
    points = []
    for point in schedule.points:
        is_inside = point.inside or point.steps in inside
        points.append(replace(point, steps=new_counts[point.steps], inside=is_inside))
    return replace(schedule, steps=tuple(found), points=tuple(points))


def _sweep_of(step: Step, is_map: Callable[[Kernel], bool]) -> Sweep | None:
    """Return a step as a sweep to which aggregates can be added, if it is one."""
    if isinstance(step, Sweep):
        sweep = step
    elif isinstance(step, Kernel):
        sweep = Sweep(step)
    else:
        return None
    is_large = sweep.kernel.target.nbytes >= MIN_SWEPT_BYTES
    return sweep if is_large and is_map(sweep.kernel) else None
