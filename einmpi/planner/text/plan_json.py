"""A plan as JSON, for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from einmpi.graph.eingraph import Vertex
from einmpi.planner.chains.record import FusedChain
from einmpi.planner.plan_data import LoopPlan, PlanData


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
