"""EXPLAIN: a plan as text for people (docs/reading_a_plan.md)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from einmpi.graph.eingraph import Vertex
from einmpi.planner.memory import FusedChain
from einmpi.planner.moving.volume import total_bill
from einmpi.planner.plan_data import LoopPlan, PlanData
from einmpi.planner.text.notes import totals
from einmpi.planner.text.summary import (
    Fold,
    Row,
    note_line,
    show_cuts,
    table_lines,
    vertices_and_folds,
)
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


# ---- plan json -----------------------------------------------------------------------------------
#
# A plan as JSON, for programs.


def as_json(plan: PlanData) -> dict[str, Any]:
    """Return a plan as JSON. Its keys are documented and do not change."""
    data: dict[str, Any] = {
        "ranks": plan.ranks,
        "ranks_used": plan.mesh.ranks,
        "nodes": plan.nodes,
        "strategy": plan.strategy,
        "certificate": certificate_data(plan),
        "digest": plan.digest,
        "words_predicted": plan.words_predicted,
        "bytes_predicted": plan.bytes_predicted,
        "bytes_between_predicted": plan.bytes_between,
        "seconds_predicted": plan.seconds_predicted,
        "operations_max_rank": plan.operations_busiest,
        "bytes_peak_predicted": plan.peak,
        "paper_cost": plan.paper_cost,
        "seconds_planning": plan.seconds,
        "vertices": [_vertex_json(plan, vertex) for vertex in plan.graph.computed],
    }
    if plan.shared is not None:
        data["shared"] = {
            "inputs": list(plan.shared.names),
            "words_more": plan.shared.words_more,
        }
    if plan.fitted is not None:
        data["resident"] = {
            "kept": list(plan.fitted.kept),
            "loaded_each_call": list(plan.fitted.loaded),
        }
    if plan.chains:
        data["fused"] = [_chain_json(chain) for chain in plan.chains]
    if plan.recomputed is not None:
        data["recomputed"] = {
            "tensors": list(plan.recomputed.tensors),
            "vertices": list(plan.recomputed.copies),
            "operations_added": plan.recomputed.operations,
            "bytes_added": plan.recomputed.nbytes,
            "bytes_peak_without": plan.recomputed.peak_before,
        }
    if plan.loop is not None:
        data["loop"] = _loop_json(plan, plan.loop)
    return data


def _loop_json(plan: PlanData, loop: LoopPlan) -> dict[str, Any]:
    """Return what the plan of a step says about its loop."""
    once = loop.once
    data: dict[str, Any] = {
        "steps": loop.steps,
        "carry": dict(loop.carry),
        "in_place": list(plan.in_place),
        "once": None if once is None else as_json(once),
        "bytes_kept": loop.bytes_kept,
        "bytes_arriving": {name: each.nbytes for name, each in loop.arriving.items()},
        "staying": list(loop.staying),
        "words_all_steps": plan.all_steps.words,
        "bytes_all_steps": plan.all_steps.nbytes,
    }
    if loop.batches is not None:
        data["batches"] = asdict(loop.batches)
    if loop.validation is not None:
        data["validated_every"] = loop.validated_every
        data["validation"] = as_json(loop.validation)
    if loop.later:
        data["later"] = [as_json(later) for later in loop.later]
    return data


def _chain_json(chain: FusedChain) -> dict[str, Any]:
    rows = {}
    for labels, size in zip(chain.rows, chain.block, strict=True):
        rows[labels[0]] = size
    return {
        "vertices": list(chain.vertices),
        "inner": list(chain.inner),
        "rows_at_a_time": rows,
        "bytes_of_blocks": chain.nbytes,
        "bytes_without": chain.saved,
    }


def _vertex_json(plan: PlanData, vertex: Vertex) -> dict[str, Any]:
    bill = plan.bills[vertex.name]
    return {
        "name": vertex.name,
        "einsum": str(vertex),
        "partitioning": plan.parts(vertex.name),
        "words": asdict(bill.words),
        "bytes_between_predicted": bill.between if plan.knows_nodes else None,
        "seconds_predicted": None if plan.machine is None else plan.seconds_of(bill.time),
    }


def certificate_data(plan: PlanData) -> dict[str, Any]:
    """Return the certificate as it stands in JSON."""
    data: dict[str, Any] = {"kind": plan.kind, "lower_bound_words": plan.lower_bound}
    if plan.gathered:
        data["not_cut"] = list(plan.gathered)
    return data
