"""EXPLAIN: a plan as text for people (docs/reading_a_plan.md)."""

from __future__ import annotations

from einmpi.planner.moving.traffic import total_bill
from einmpi.planner.plan_data import PlanData
from einmpi.planner.text.folding import Fold, vertices_and_folds
from einmpi.planner.text.notes import totals
from einmpi.planner.text.tables import Row, note_line, show_cuts, table_lines
from einmpi.units import counted, show_bytes, show_count, show_seconds


def explain(plan: PlanData, full: bool = False) -> str:
    """Return one line per vertex, then the totals, then a summary of the plan in words.

    Repeated layers that are cut and move alike are one line, unless the text is to be `full`.
    """
    lines: list[str] = []
    for title, each in loops_of(plan):
        if title:
            lines += ["", title] if lines else [title]
        lines.append(heading(each))
        lines += table_lines(vertex_rows(each, full), left=2)
        lines += [note_line(note) for note in totals(each, full)]
    return "\n".join(lines)


def loops_of(plan: PlanData) -> list[tuple[str, PlanData]]:
    """Return the plans of several loops with their titles; without loops, the plan alone."""
    plans = plan.loops
    if len(plans) < 2:
        return [("", plan)]
    return [(f"loop {number} of {len(plans)}", each) for number, each in enumerate(plans, 1)]


def heading(plan: PlanData) -> str:
    """Return the first line: the ranks, their mesh, the strategy."""
    return f"{ranks_and_mesh(plan)}, strategy {plan.strategy}"


def ranks_and_mesh(plan: PlanData) -> str:
    """Return the ranks and their mesh: "64 ranks on 8 nodes (mesh 2·2·2 | 2·2·2)"."""
    between_nodes = plan.mesh.factors[: plan.mesh.node_axes]
    inside_nodes = plan.mesh.factors[plan.mesh.node_axes :]
    levels = []
    for factors in (between_nodes, inside_nodes):
        if factors:
            levels.append("·".join(map(str, factors)))
    mesh = " | ".join(levels) or "1"
    ranks = counted(plan.ranks, "rank")
    nodes = f" on {plan.nodes} nodes" if plan.nodes > 1 else ""
    unused = plan.ranks - plan.mesh.ranks
    idle = f", {unused} idle" if unused else ""
    return f"{ranks}{nodes} (mesh {mesh}{idle})"


def vertex_rows(plan: PlanData, full: bool = False) -> list[Row]:
    """Return the table of vertices, its head first; a fold has the sums of its vertices."""
    show_between = plan.nodes > 1 and plan.knows_nodes
    show_time = plan.machine is not None
    head = ["vertex", "cuts", "join", "aggregate", "repartition", "bytes"]
    if show_between:
        head.append("between nodes")
    if show_time:
        head.append("seconds")
    rows = [tuple(head)]
    for shown in vertices_and_folds(plan, full):
        if isinstance(shown, Fold):
            text = shown.text
            cuts = ""
            bill = total_bill([plan.bills[vertex.name] for vertex in shown.vertices])
        else:
            text = shown.summary
            cuts = show_cuts(plan, shown.name) or "–"
            bill = plan.bills[shown.name]
        row = [
            text,
            cuts,
            show_count(bill.words.join),
            show_count(bill.words.aggregate),
            show_count(bill.words.repartition),
            show_bytes(bill.nbytes),
        ]
        if show_between:
            row.append(show_bytes(bill.between))
        if show_time:
            row.append(show_seconds(plan.seconds_of(bill.time)))
        rows.append(tuple(row))
    return rows
