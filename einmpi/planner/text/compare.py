"""The plans of all strategies side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from einmpi.errors import InputError
from einmpi.planner.machine import BYTES
from einmpi.planner.plan import Plan
from einmpi.planner.plan_data import PlanData
from einmpi.planner.strategies import STRATEGIES
from einmpi.planner.text.explain import loops_of
from einmpi.planner.text.notes import gap
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


def _objective(plan: PlanData) -> float:
    """Return what the plan minimises: seconds, or bytes with those between nodes weighted."""
    in_all = plan.cost_in_all
    if in_all.seconds is not None:
        return in_all.seconds
    return float(BYTES.bytes(in_all.nbytes, in_all.between))


def _amount(plan: PlanData) -> str:
    in_all = plan.cost_in_all
    steps = "" if plan.loop is None else " in all steps"
    if in_all.seconds is not None:
        return show_seconds(in_all.seconds) + steps
    text = show_bytes(in_all.nbytes) + steps
    if plan.nodes > 1 and in_all.between:
        text += f", {show_bytes(in_all.between)} of it between nodes"
    return text
