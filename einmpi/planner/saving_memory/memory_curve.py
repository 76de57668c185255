"""What plans move under each memory limit, from the lowest that works to as much as is of use."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from einmpi.planner.plan import Plan
from einmpi.planner.planning import TooLittleMemory
from einmpi.planner.saving_memory.mixtures import searches_kept
from einmpi.planner.text.summary import Row, table_lines
from einmpi.units import show_bytes

POINTS = 16  # of a curve, at first
# Points between two that differ by more than a tenth are added up to this number.
MOST_POINTS = 40
LARGEST_STEP = 1.1
CLOSEST_LIMITS = 1.005  # limits that are closer than this have no point between them
# Limits below this share of the memory that is of use are left out, but for the lowest.
SMALLEST_SHARE = 1 / 16


@dataclass(frozen=True)
class CurvePoint:
    """The plan under one memory limit."""

    limit: int  # bytes of a rank
    words: int
    nbytes: int
    peak: int  # bytes of a rank
    spilled: int  # bytes of a rank that are kept outside of memory


def memory_curve(plan_with: Callable[[int | None], Plan]) -> list[CurvePoint]:
    """Return the plans under rising limits, given a function that plans with a limit or without.

    The first limit is the lowest that works, and the last one leaves the plan as it is without a
    limit. Those between rise by the same factor, and where the words of two neighbours differ by
    more than a tenth there are others between them. Far below the peak without a limit all plans
    keep most of their tensors outside of memory, so there are no points there.
    """
    with searches_kept():
        free = plan_with(None)
        try:
            plan_with(1)
            lowest = 1
        except TooLittleMemory as error:
            lowest = error.least
        highest = max(lowest, free.peak_in_all)
        smallest_share = max(lowest / highest, SMALLEST_SHARE)
        limits = {lowest, highest}
        for number in range(1, POINTS - 1):
            share = smallest_share ** (number / (POINTS - 1))
            limits.add(max(lowest, round(highest * share)))
        points = [_point(plan_with, limit) for limit in sorted(limits)]
        while len(points) < MOST_POINTS:
            limit = _limit_at_largest_step(points)
            if limit is None:
                break
            points.append(_point(plan_with, limit))
            points.sort(key=lambda point: point.limit)
    return points


def _point(plan_with: Callable[[int | None], Plan], limit: int) -> CurvePoint:
    plan = plan_with(limit)
    cost = plan.cost_in_all
    spilled = max(each.spilled for each in plan.loops or (plan,))
    return CurvePoint(limit, cost.words, cost.nbytes, plan.peak_in_all, spilled)


def _limit_at_largest_step(points: Sequence[CurvePoint]) -> int | None:
    """Return the limit between the neighbours that differ most; None if no step is large."""
    steps = []
    for point, following in itertools.pairwise(points):
        is_close = following.limit <= point.limit * CLOSEST_LIMITS
        if not is_close and point.words > LARGEST_STEP * following.words:
            middle = round(math.sqrt(point.limit * following.limit))
            if point.limit < middle < following.limit:
                steps.append((point.words - following.words, middle))
    return max(steps)[1] if steps else None


def curve_text(points: Sequence[CurvePoint]) -> str:
    """Return the points as a table."""
    has_spilled = any(point.spilled for point in points)
    rows: list[Row] = [("memory limit", "words", "bytes", "peak memory")]
    if has_spilled:
        rows = [(*rows[0], "outside of memory")]
    for point in points:
        row: Row = (
            show_bytes(point.limit),
            f"{point.words:,}",
            show_bytes(point.nbytes),
            show_bytes(point.peak),
        )
        if has_spilled:
            row = (*row, show_bytes(point.spilled))
        rows.append(row)
    return "\n".join(line.rstrip() for line in table_lines(rows, left=0))


def curve_json(points: Sequence[CurvePoint]) -> list[dict[str, Any]]:
    """Return the points as JSON."""
    keys = ("memory", "words", "bytes", "peak", "spilled")
    return [dict(zip(keys, astuple(point), strict=True)) for point in points]
