"""What plans move under each memory limit, from the lowest that works to as much as is of use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from einmpi.planner.plan import Plan
from einmpi.planner.planning import TooLittleMemory
from einmpi.planner.text.tables import Row, table_lines
from einmpi.units import show_bytes

MOST_POINTS = 16  # of a curve; each takes as long as planning with a limit
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
    limit. Those between rise by the same factor. Far below the peak without a limit all plans keep
    most of their tensors outside of memory, so there are no points there.
    """
    free = plan_with(None)
    try:
        plan_with(1)
        lowest = 1
    except TooLittleMemory as error:
        lowest = error.least
    highest = max(lowest, free.peak)
    smallest_share = max(lowest / highest, SMALLEST_SHARE)
    limits = {lowest, highest}
    for number in range(1, MOST_POINTS - 1):
        share = smallest_share ** (number / (MOST_POINTS - 1))
        limits.add(max(lowest, round(highest * share)))
    points = []
    for limit in sorted(limits):
        plan = plan_with(limit)
        words = plan.words_predicted
        points.append(CurvePoint(limit, words, plan.bytes_predicted, plan.peak, plan.spilled))
    return points


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
    found = []
    for point in points:
        found.append(
            {
                "memory": point.limit,
                "words": point.words,
                "bytes": point.nbytes,
                "peak": point.peak,
                "spilled": point.spilled,
            }
        )
    return found
