"""EXPLAIN: a plan as text for people, and as the JSON of the contract for programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from einmpi.errors import InputError
from einmpi.graph.job_file import STRATEGIES
from einmpi.plan.plan import Plan
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


def explain(plan: Plan) -> str:
    """One line a vertex, then the totals."""
    mesh = "·".join(map(str, plan.mesh.factors)) or "1"
    idle = f", {plan.ranks - plan.mesh.ranks} idle" if plan.mesh.ranks < plan.ranks else ""
    rows = [("vertex", "cuts", "join", "aggregate", "repartition", "bytes")]
    for vertex in plan.graph.computed:
        words = plan.words[vertex.name]
        rows.append((str(vertex), _cuts(plan, vertex.name), show_count(words.join), show_count(words.aggregate),
                     show_count(words.repartition), show_bytes(plan.bytes[vertex.name])))  # fmt: skip
    lines = [f"{plan.ranks} ranks (mesh {mesh}{idle}), strategy {plan.strategy}", *_table(rows, left=2)]
    lines += [f"{name}: {note}" for name, note in plan.notes.items()]
    stored = [f"{name} {_layout(plan, name)}" for name in plan.layouts]
    if stored:
        more = f", … {len(stored)} in all" if len(stored) > 12 else ""
        lines.append("layouts      " + ", ".join(stored[:12]) + more)
    each = -(-plan.bytes_predicted // plan.mesh.ranks)
    lines.append(f"moved        {show_count(plan.words_predicted)} words, {show_bytes(plan.bytes_predicted)}; "
                 f"{show_bytes(each)} to the busiest rank")  # fmt: skip
    lines.append(f"peak memory  {show_bytes(plan.peak)} a rank")
    lines.append(f"certificate  {_certificate(plan)}")
    lines.append(f"digest       {plan.digest}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Comparison:
    plans: tuple[Plan, ...]
    text: str


def compare(make: Callable[[str], Plan]) -> Comparison:
    """All strategies side by side; one that does not apply says why."""
    rows = [("strategy", "words", "bytes", "busiest rank", "peak memory", "lower bound", "gap", "paper's cost")]
    plans, refused = [], []
    for name in STRATEGIES:
        try:
            plan = make(name)
        except InputError as error:
            refused.append(f"{name}: {error}")
            continue
        plans.append(plan)
        each = -(-plan.bytes_predicted // plan.mesh.ranks)
        rows.append((name, show_count(plan.words_predicted), show_bytes(plan.bytes_predicted), show_bytes(each),
                     show_bytes(plan.peak), show_count(plan.lower_bound), _gap(plan),
                     show_count(plan.paper_cost)))  # fmt: skip
    return Comparison(tuple(plans), "\n".join([*_table(rows), *refused]))


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


def _table(rows: Sequence[tuple[str, ...]], left: int = 1) -> list[str]:
    """Columns side by side, the first `left` of them aligned to the left."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    aligned = [str.ljust if k < left else str.rjust for k in range(len(widths))]
    return ["  ".join(align(c, w) for align, c, w in zip(aligned, row, widths, strict=True)) for row in rows]
