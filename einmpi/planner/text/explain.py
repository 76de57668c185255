"""EXPLAIN: a plan as text for people, and as the JSON of the contract for programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from einmpi.errors import InputError
from einmpi.graph.eingraph import Vertex
from einmpi.planner.make_plan import Plan
from einmpi.planner.plan import STRATEGIES
from einmpi.planner.prices import BETWEEN, BYTES
from einmpi.planner.text.summary import Note, in_words
from einmpi.units import show_bytes, show_count, show_seconds


def as_json(plan: Plan) -> dict[str, Any]:
    """The contract's JSON of a plan."""
    return {
        "ranks": plan.ranks,
        "ranks_used": plan.mesh.ranks,
        "nodes": plan.nodes,
        "strategy": plan.strategy,
        "certificate": {"kind": plan.kind, "lower_bound_words": plan.lower_bound},
        "digest": plan.digest,
        "words_predicted": plan.words_predicted,
        "bytes_predicted": plan.bytes_predicted,
        "bytes_between_predicted": plan.bytes_between,
        "seconds_predicted": plan.seconds_predicted,
        "bytes_peak_predicted": plan.peak,
        "paper_cost": plan.paper_cost,
        "seconds_planning": plan.seconds,
        "vertices": [_vertex_json(plan, vertex) for vertex in plan.graph.computed],
    }


def _vertex_json(plan: Plan, vertex: Vertex) -> dict[str, Any]:
    bill = plan.bills[vertex.name]
    words = {
        "join": bill.words.join,
        "aggregate": bill.words.aggregate,
        "repartition": bill.words.repartition,
    }
    return {
        "name": vertex.name,
        "einsum": str(vertex),
        "partitioning": plan.parts(vertex.name),
        "words": words,
        "bytes_between_predicted": bill.between if plan.knows_nodes else None,
        "seconds_predicted": None if plan.machine is None else plan.seconds_of(bill.time),
    }


Row = tuple[str, ...]
WORD = 13  # columns of the word that begins a note


def explain(plan: Plan) -> str:
    """One line a vertex, then the totals, then the plan in words."""
    return "\n".join(
        [heading(plan), *table_lines(vertex_rows(plan), left=2), *map(note_line, totals(plan))]
    )


def heading(plan: Plan) -> str:
    return f"{where(plan)}, strategy {plan.strategy}"


def where(plan: Plan) -> str:
    """64 ranks on 8 nodes (mesh 2·2·2 | 2·2·2)."""
    levels = plan.mesh.factors[: plan.mesh.node_axes], plan.mesh.factors[plan.mesh.node_axes :]
    mesh = " | ".join("·".join(map(str, level)) for level in levels if level) or "1"
    idle = f", {plan.ranks - plan.mesh.ranks} idle" if plan.mesh.ranks < plan.ranks else ""
    nodes = f" on {plan.nodes} nodes" if plan.nodes > 1 else ""
    return f"{plan.ranks} rank{'s' * (plan.ranks > 1)}{nodes} (mesh {mesh}{idle})"


def vertex_rows(plan: Plan) -> list[Row]:
    """The table of vertices, its head first."""
    between, timed = plan.nodes > 1 and plan.knows_nodes, plan.machine is not None
    more = ("between nodes",) * between + ("seconds",) * timed
    rows: list[Row] = [("vertex", "cuts", "join", "aggregate", "repartition", "bytes", *more)]
    for vertex in plan.graph.computed:
        bill = plan.bills[vertex.name]
        more = (show_bytes(bill.between),) * between + (
            show_seconds(plan.seconds_of(bill.time)),
        ) * timed
        rows.append(
            (
                str(vertex),
                _cuts(plan, vertex.name),
                show_count(bill.words.join),
                show_count(bill.words.aggregate),
                show_count(bill.words.repartition),
                show_bytes(bill.nbytes),
                *more,
            )
        )
    return rows


def totals(plan: Plan) -> list[Note]:
    """What stands below the table."""
    notes: list[Note] = [("", f"{name}: {note}") for name, note in plan.notes.items()]
    stored = [f"{name} {_layout(plan, name)}" for name in plan.layouts]
    if stored:
        more = f", … {len(stored)} in all" if len(stored) > 12 else ""
        notes.append(("layouts", ", ".join(stored[:12]) + more))
    notes.append(
        (
            "moved",
            f"{show_count(plan.words_predicted)} words, {show_bytes(plan.bytes_predicted)}; "
            f"{show_bytes(plan.bytes_busiest)} to the busiest rank{_between(plan)}",
        )
    )
    if not plan.knows_nodes:
        notes.append(("nodes", one_level(plan)))
    if plan.seconds_predicted is not None:
        notes += _seconds(plan, plan.seconds_predicted)
    outside = (
        f"; up to {show_bytes(plan.spilled)} more are kept outside of it at times"
        if plan.spilled
        else ""
    )
    ahead = f"; up to {show_bytes(plan.ahead)} of it for reading files ahead" if plan.ahead else ""
    notes.append(("peak memory", f"{show_bytes(plan.peak)} a rank{outside}{ahead}"))
    notes.append(("certificate", _certificate(plan)))
    if plan.machine is None and plan.mesh.nodes > 1:
        notes.append(("made small", f"bytes; one between nodes counts as {BETWEEN}"))
    notes.append(("digest", plan.digest))
    return notes + in_words(plan)


def _between(plan: Plan) -> str:
    if plan.nodes == 1 or plan.bytes_between is None:
        return ""
    return f"; {show_bytes(plan.bytes_between)} between nodes"


def one_level(plan: Plan) -> str:
    """What a plan does not know about nodes, and why."""
    why = "inputs lie on a mesh that does not know them"
    if plan.uneven:
        why = f"they have different numbers of ranks{'' if plan.ranks % plan.nodes else ', or these are not in order'}"
    return f"{why}; planned as if all ranks were equally near"


def _seconds(plan: Plan, whole: float) -> list[Note]:
    bills = plan.bills.values()
    kinds = {
        "computing": sum(bill.computing for bill in bills),
        "inside nodes": sum(b.moving_inside for b in bills),
        "between nodes": sum(bill.moving_between for bill in bills),
    }
    parts = ", ".join(
        f"{kind} {show_seconds(plan.seconds_of(time))}" for kind, time in kinds.items() if time
    )
    assert plan.machine is not None
    return [
        ("seconds", f"{show_seconds(whole)} predicted: {parts or 'nothing to do'}"),
        ("made small", f"these seconds, by a machine {plan.machine.source}"),
    ]


@dataclass(frozen=True)
class Comparison:
    plans: tuple[Plan, ...]
    rows: tuple[Row, ...]  # the table, its head first
    notes: tuple[Note, ...]  # what stands below it

    @property
    def text(self) -> str:
        return "\n".join([*table_lines(self.rows), *map(note_line, self.notes)])


def compare(make: Callable[[str], Plan]) -> Comparison:
    """All strategies side by side; one that does not apply says why. Then what the one does that moves least."""
    rows: list[Row] = []
    plans: list[Plan] = []
    refused: list[Note] = []
    for name in STRATEGIES:
        try:
            plan = make(name)
        except InputError as error:
            refused.append(("", f"{name}: {error}"))
            continue
        plans.append(plan)
        cells = {
            "strategy": name,
            "words": show_count(plan.words_predicted),
            "bytes": show_bytes(plan.bytes_predicted),
        }
        if plan.nodes > 1 and plan.bytes_between is not None:
            cells["between nodes"] = show_bytes(plan.bytes_between)
        if plan.seconds_predicted is not None:
            cells["seconds"] = show_seconds(plan.seconds_predicted)
        cells |= {
            "busiest rank": show_bytes(plan.bytes_busiest),
            "peak memory": show_bytes(plan.peak),
            "lower bound": show_count(plan.lower_bound),
            "gap": _gap(plan),
            "paper's cost": show_count(plan.paper_cost),
        }
        rows += [tuple(cells)] * (not rows) + [tuple(cells.values())]
    return Comparison(tuple(plans), tuple(rows) or (("strategy",),), (*refused, *_winner(plans)))


def _winner(plans: Sequence[Plan]) -> list[Note]:
    if len(plans) < 2:
        return []
    order = sorted(plans, key=_measure)  # of equal ones the first stays so
    least = [plan.strategy for plan in order if _measure(plan) == _measure(order[0])]
    others = (
        f", as {'do' if len(least) > 2 else 'does'} {', '.join(least[1:])}"
        if len(least) > 1
        else ""
    )
    next_one = order[len(least)] if len(least) < len(order) else None
    against = f"; {next_one.strategy} is next with {_amount(next_one)}" if next_one else ""
    does = "moves least" if order[0].machine is None else "takes least"
    first = f"{least[0]} {does}, {_amount(order[0])}{others}{against}"
    return [("", first), *in_words(order[0])]


def _measure(plan: Plan) -> float:
    """What was made small."""
    if plan.seconds_predicted is not None:
        return plan.seconds_predicted
    return float(BYTES.bytes(plan.bytes_predicted, plan.bytes_between or 0))


def _amount(plan: Plan) -> str:
    if plan.seconds_predicted is not None:
        return show_seconds(plan.seconds_predicted)
    between = (
        f", {show_bytes(plan.bytes_between)} of it between nodes"
        if plan.nodes > 1 and plan.bytes_between
        else ""
    )
    return f"{show_bytes(plan.bytes_predicted)}{between}"


def _gap(plan: Plan) -> str:
    if plan.kind == "exact":
        return "exact"
    if plan.lower_bound == 0:
        return "–"
    tenths = (plan.words_predicted - plan.lower_bound) * 1000 // plan.lower_bound
    return f"{tenths / 10:.1f}%"


def _certificate(plan: Plan) -> str:
    if plan.kind == "exact":
        return "exact: no cut of this graph on this mesh moves less"
    bound = f"lower bound {show_count(plan.lower_bound)} words"
    return f"{bound}, gap {_gap(plan)}"


def _cuts(plan: Plan, name: str) -> str:
    cut = [f"{label}:{parts}" for label, parts in plan.parts(name).items() if parts > 1]
    return " ".join(cut) or "–"


def _layout(plan: Plan, name: str) -> str:
    parts = plan.mesh.parts(plan.layouts[name], range(len(plan.graph[name].bound)))
    return f"[{','.join(map(str, parts))}]"


def note_line(note: Note) -> str:
    word, text = note
    return f"{word:<{WORD}}{text}" if word else text


def table_lines(rows: Sequence[Row], left: int = 1) -> list[str]:
    """Columns side by side, the first `left` of them aligned to the left."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    aligned = [str.ljust if k < left else str.rjust for k in range(len(widths))]
    return [
        "  ".join(align(c, w) for align, c, w in zip(aligned, row, widths, strict=True))
        for row in rows
    ]
