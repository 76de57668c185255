"""EXPLAIN: a plan as text for people, and as the JSON of the contract for programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from einmpi.errors import InputError
from einmpi.graph.job_file import STRATEGIES
from einmpi.plan.plan import Plan
from einmpi.plan.words import Note, in_words
from einmpi.units import show_bytes, show_count


def as_json(plan: Plan) -> dict[str, Any]:
    """The contract's JSON of a plan."""
    return {
        "ranks": plan.ranks,
        "ranks_used": plan.mesh.ranks,
        "strategy": plan.strategy,
        "certificate": {"kind": plan.kind, "lower_bound_words": plan.lower_bound},
        "digest": plan.digest,
        "words_predicted": plan.words_predicted,
        "bytes_predicted": plan.bytes_predicted,
        "bytes_peak_predicted": plan.peak,
        "paper_cost": plan.paper_cost,
        "seconds_planning": plan.seconds,
        "vertices": [
            {
                "name": vertex.name,
                "einsum": str(vertex),
                "partitioning": plan.parts(vertex.name),
                "words": {
                    "join": plan.words[vertex.name].join,
                    "aggregate": plan.words[vertex.name].aggregate,
                    "repartition": plan.words[vertex.name].repartition,
                },
            }
            for vertex in plan.graph.computed
        ],
    }


Row = tuple[str, ...]
WORD = 13  # columns of the word that begins a note


def explain(plan: Plan) -> str:
    """One line a vertex, then the totals, then the plan in words."""
    return "\n".join([heading(plan), *table_lines(vertex_rows(plan), left=2), *map(note_line, totals(plan))])


def heading(plan: Plan) -> str:
    mesh = "·".join(map(str, plan.mesh.factors)) or "1"
    idle = f", {plan.ranks - plan.mesh.ranks} idle" if plan.mesh.ranks < plan.ranks else ""
    ranks = f"{plan.ranks} rank{'s' * (plan.ranks > 1)}"
    return f"{ranks} (mesh {mesh}{idle}), strategy {plan.strategy}"


def vertex_rows(plan: Plan) -> list[Row]:
    """The table of vertices, its head first."""
    rows: list[Row] = [("vertex", "cuts", "join", "aggregate", "repartition", "bytes")]
    for vertex in plan.graph.computed:
        words = plan.words[vertex.name]
        rows.append((str(vertex), _cuts(plan, vertex.name), show_count(words.join), show_count(words.aggregate),
                     show_count(words.repartition), show_bytes(plan.bytes[vertex.name])))  # fmt: skip
    return rows


def totals(plan: Plan) -> list[Note]:
    """What stands below the table."""
    notes: list[Note] = [("", f"{name}: {note}") for name, note in plan.notes.items()]
    stored = [f"{name} {_layout(plan, name)}" for name in plan.layouts]
    if stored:
        more = f", … {len(stored)} in all" if len(stored) > 12 else ""
        notes.append(("layouts", ", ".join(stored[:12]) + more))
    each = -(-plan.bytes_predicted // plan.mesh.ranks)
    notes.append(("moved", f"{show_count(plan.words_predicted)} words, {show_bytes(plan.bytes_predicted)}; "
                           f"{show_bytes(each)} to the busiest rank"))  # fmt: skip
    outside = f"; up to {show_bytes(plan.spilled)} more are kept outside of it at times" if plan.spilled else ""
    notes.append(("peak memory", f"{show_bytes(plan.peak)} a rank{outside}"))
    notes.append(("certificate", _certificate(plan)))
    notes.append(("digest", plan.digest))
    return notes + in_words(plan)


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
    rows: list[Row] = [
        ("strategy", "words", "bytes", "busiest rank", "peak memory", "lower bound", "gap", "paper's cost")
    ]
    plans: list[Plan] = []
    refused: list[Note] = []
    for name in STRATEGIES:
        try:
            plan = make(name)
        except InputError as error:
            refused.append(("", f"{name}: {error}"))
            continue
        plans.append(plan)
        each = -(-plan.bytes_predicted // plan.mesh.ranks)
        rows.append((name, show_count(plan.words_predicted), show_bytes(plan.bytes_predicted), show_bytes(each),
                     show_bytes(plan.peak), show_count(plan.lower_bound), _gap(plan),
                     show_count(plan.paper_cost)))  # fmt: skip
    return Comparison(tuple(plans), tuple(rows), (*refused, *_winner(plans)))


def _winner(plans: Sequence[Plan]) -> list[Note]:
    if len(plans) < 2:
        return []
    order = sorted(plans, key=lambda plan: plan.bytes_predicted)  # of equal ones the first stays so
    least = [plan.strategy for plan in order if plan.bytes_predicted == order[0].bytes_predicted]
    others = f", as {'do' if len(least) > 2 else 'does'} {', '.join(least[1:])}" if len(least) > 1 else ""
    next_one = order[len(least)] if len(least) < len(order) else None
    against = f"; {next_one.strategy} is next with {show_bytes(next_one.bytes_predicted)}" if next_one else ""
    first = f"{least[0]} moves least, {show_bytes(order[0].bytes_predicted)}{others}{against}"
    return [("", first), *in_words(order[0])]


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
    return ["  ".join(align(c, w) for align, c, w in zip(aligned, row, widths, strict=True)) for row in rows]
