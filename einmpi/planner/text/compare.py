"""Plans side by side: those of all strategies, and those under rising memory limits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from einmpi.errors import InputError
from einmpi.planner.machine import BYTES
from einmpi.planner.plan import Plan
from einmpi.planner.planning import TooLittleMemory
from einmpi.planner.saving_memory.mixtures import searches_kept
from einmpi.planner.strategies import STRATEGIES
from einmpi.planner.text.explain import gap, loops_of
from einmpi.planner.text.summary import Note, Row, in_words, note_line, table_lines
from einmpi.units import show_bytes, show_count, show_seconds

REPEATED_WORK = 1.25  # times the fewest operations of a rank; more are pointed out


@dataclass(frozen=True)
class Comparison:
    """The plans of one graph by several strategies, as a table with notes."""

    plans: tuple[Plan, ...]
    rows: tuple[Row, ...]  # the table, its head first
    notes: tuple[Note, ...]  # below the table

    @property
    def text(self) -> str:
        return "\n".join([*table_lines(self.rows), *map(note_line, self.notes)])


def compare(make: Callable[[str], Plan], names: Iterable[str] = STRATEGIES) -> Comparison:
    """Compare the plans that `make` returns for each strategy's name, of all or of these.

    A strategy that does not apply says why. Below the table, the best plan is summarised in words.
    If no strategy applies, the error is that of the first, which is the default.
    """
    head: Row = ("strategy",)
    rows: list[Row] = []
    plans: list[Plan] = []
    refused: list[Note] = []
    first_error: InputError | None = None
    for name in names:
        try:
            plan = make(name)
        except InputError as error:
            first_error = first_error or error
            refused.append(("", f"{name}: {error}"))
            continue
        plans.append(plan)
        cells = _cells(plan)
        head = tuple(cells)
        rows.append(tuple(cells.values()))
    if not plans and first_error is not None:
        raise first_error
    return Comparison(tuple(plans), (head, *rows), (*refused, *_winner(plans)))


def _cells(plan: Plan) -> dict[str, str]:
    """Return a plan's row of the table: heading of a column → what stands in it."""
    if len(plan.loops) > 1:
        return _cells_of_loops(plan)
    cells = {
        "strategy": plan.strategy,
        "words": show_count(plan.words_predicted),
        "bytes": show_bytes(plan.bytes_predicted),
    }
    if plan.nodes > 1 and plan.bytes_between is not None:
        cells["between nodes"] = show_bytes(plan.bytes_between)
    if plan.seconds_predicted is not None:
        cells["seconds"] = show_seconds(plan.seconds_predicted)
    if plan.loop is not None:
        cells["all steps"] = show_bytes(plan.all_steps.nbytes)
    cells["operations a rank"] = show_count(plan.operations_busiest)
    cells["busiest rank"] = show_bytes(plan.bytes_busiest)
    cells["peak memory"] = show_bytes(plan.peak)
    cells["lower bound"] = show_count(plan.lower_bound)
    cells["gap"] = gap(plan)
    cells["paper's cost"] = show_count(plan.paper_cost)
    return cells


def _cells_of_loops(plan: Plan) -> dict[str, str]:
    """Return the row of a plan with several loops: the words of a step of each, and all steps."""
    cells = {"strategy": plan.strategy}
    for number, each in enumerate(plan.loops, 1):
        cells[f"loop {number}, a step"] = show_count(each.words_predicted)
    in_all = plan.cost_in_all
    cells["words, all steps"] = show_count(in_all.words)
    cells["bytes, all steps"] = show_bytes(in_all.nbytes)
    if in_all.seconds is not None:
        cells["seconds"] = show_seconds(in_all.seconds)
    cells["operations a rank"] = show_count(in_all.operations_busiest)
    cells["peak memory"] = show_bytes(plan.peak_in_all)
    return cells


def _winner(plans: Sequence[Plan]) -> list[Note]:
    """Return which strategy is best, which ones do as well, which one is next, and its summary."""
    if len(plans) < 2:
        return []
    order = sorted(plans, key=_objective)  # of equal ones the first stays first
    best = order[0]
    equal = [plan.strategy for plan in order if _objective(plan) == _objective(best)]
    verb = "moves least" if best.machine is None else "takes least"
    text = f"{best.strategy} {verb}, {_amount(best)}"
    if len(equal) > 1:
        does = "does" if len(equal) == 2 else "do"
        text += f", as {does} {', '.join(equal[1:])}"
    if len(equal) < len(order):
        next_plan = order[len(equal)]
        text += f"; {next_plan.strategy} is next with {_amount(next_plan)}"
    notes: list[Note] = [("", text)]
    notes += _repeated_work(best, plans)
    for title, each in loops_of(best):
        if title:
            notes.append(("", title))
        notes += in_words(each)
    return notes


def _repeated_work(best: Plan, plans: Sequence[Plan]) -> list[Note]:
    """Return a note if the best plan moves less because ranks repeat each other's work."""
    least = min(plans, key=lambda plan: plan.cost_in_all.operations_busiest)
    fewest = least.cost_in_all.operations_busiest
    ratio = best.cost_in_all.operations_busiest / max(1, fewest)
    if ratio < REPEATED_WORK:
        return []
    text = f"{best.strategy} repeats work: a rank does {ratio:.2g} times the operations of "
    return [("", f"{text}{least.strategy}")]


def _objective(plan: Plan) -> float:
    """Return what the plan minimises: seconds, or bytes with those between nodes weighted."""
    in_all = plan.cost_in_all
    if in_all.seconds is not None:
        return in_all.seconds
    return float(BYTES.bytes(in_all.nbytes, in_all.between))


def _amount(plan: Plan) -> str:
    in_all = plan.cost_in_all
    steps = "" if plan.loop is None else " in all steps"
    if in_all.seconds is not None:
        return show_seconds(in_all.seconds) + steps
    text = show_bytes(in_all.nbytes) + steps
    if plan.nodes > 1 and in_all.between:
        text += f", {show_bytes(in_all.between)} of it between nodes"
    return text


# ---- memory curve --------------------------------------------------------------------------------
#
# What plans move under each memory limit, from the lowest that works to as much as is of use.


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
