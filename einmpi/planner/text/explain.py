"""EXPLAIN: a plan as text for people (docs/reading_a_plan.md), and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from einmpi.graph.eingraph import Stored, Vertex
from einmpi.planner.lower_bound.pieces import (
    ALL_CUTS,
    CUTS_OF_MESH,
    REPEATING_NO_MORE,
    WITHIN_MEMORY,
)
from einmpi.planner.machine import BETWEEN
from einmpi.planner.memory import FusedChain
from einmpi.planner.moving.known_lists import has_known_lists
from einmpi.planner.moving.volume import total_bill
from einmpi.planner.peak_memory import why_not_in_place
from einmpi.planner.plan import (
    BatchPlan,
    Cost,
    FittedInputs,
    LoopPlan,
    Plan,
    Recomputed,
    SharedInputs,
)
from einmpi.planner.text.summary import (
    Fold,
    Note,
    Row,
    folded_vertices,
    ghosts,
    in_words,
    note_line,
    show_cuts,
    show_layout,
    table_lines,
    vertices_and_folds,
)
from einmpi.units import counted, plural, show_bytes, show_count, show_seconds

# ---- loop notes ----------------------------------------------------------------------------------
#
# The notes below a plan that are about its loop.


def loop_notes(plan: Plan) -> list[Note]:
    """Return what a loop carries, what it computes once, and what all its steps cost."""
    loop = plan.loop
    if loop is None:
        return []
    carried = [f"{output} becomes {name}" for name, output in loop.carry.items()]
    notes: list[Note] = []
    if carried:
        steps = f"at most {counted(loop.steps, 'step')}"
        notes.append(("loop", f"{steps}; {', '.join(carried)}"))
        notes.append(("in place", _in_place(plan, loop)))
    else:
        notes.append(("loop", "one step, which carries nothing"))
    if loop.batches is not None:
        notes.append(("batches", _batches(loop.batches)))
    if loop.once is not None:
        notes.append(("once", f"{', '.join(loop.hoisted)}: {_moves(loop.once.cost)}"))
    for name, arriving in loop.arriving.items():
        moved = _moves(arriving)
        notes.append(("arriving", f"{name}: {moved}, from where the loop before leaves it"))
    if loop.staying:
        names = ", ".join(loop.staying)
        notes.append(("staying", f"{names}, as the loop before has loaded it"))
    if loop.validation is not None:
        notes.append(("validation", _validation(loop, loop.validation)))
    if loop.bytes_kept:
        kept = f"{show_bytes(loop.bytes_kept)} a rank of earlier loops, needed later"
        notes.append(("kept", kept))
    all_steps = plan.all_steps
    in_all = _moves(all_steps)
    if all_steps.seconds is not None:
        in_all += f", {show_seconds(all_steps.seconds)} predicted"
    notes.append(("all steps", in_all))
    return notes


def _moves(cost: Cost) -> str:
    return f"{show_count(cost.words)} words, {show_bytes(cost.nbytes)}"


def _validation(loop: LoopPlan, plan: Plan) -> str:
    """Return what a validation moves: in each of its batches, and of parameters before them."""
    assert plan.loop is not None
    text = f"every {counted(loop.validated_every, 'step')}: "
    text += f"{counted(plan.loop.steps, 'batch', 'batches')}, each moves {_moves(plan.cost)}"
    before = []
    for name, arriving in plan.loop.arriving.items():
        before.append(f"{name} {show_bytes(arriving.nbytes)}")
    return f"{text}; before them {', '.join(before)}" if before else text


def _in_place(plan: Plan, loop: LoopPlan) -> str:
    """Return which carried tensors are updated in place, and why others are not."""
    others = []
    for name, output in loop.carry.items():
        if name in plan.in_place:
            continue
        why = "memory is short"
        if not plan.spilled:
            why = why_not_in_place(plan, name, output, plan.nan_checked)
        others.append(f"not {name}: {why}")
    updated = ", ".join(plan.in_place) or "nothing"
    in_blocks = []
    for name in plan.blocked:
        is_scattered = plan.graph[name].computed_einsum.segments is not None
        how = "for the rows that change" if is_scattered else "in blocks"
        in_blocks.append(f"{name} is computed {how}")
    return "; ".join([updated, *in_blocks, *others])


def _batches(batches: BatchPlan) -> str:
    """Return which rows a step takes, in which order, and when they are read."""
    names = ", ".join(batches.names)
    rows = f"{show_count(batches.batch)} of {show_count(batches.rows)}"
    steps = counted(batches.steps_an_epoch, "step")
    text = f"{names}: {rows} rows a step, {show_bytes(batches.nbytes)}; {steps} an epoch"
    after_last = batches.rows % batches.batch
    if after_last and batches.last == "pad":
        text += f", the last with {counted(after_last, 'row')} and zeros"
    elif after_last:
        text += f", {counted(after_last, 'row')} left out"
    if batches.seed is not None:
        text += f"; shuffled by seed {batches.seed}"
        if batches.block > 1:
            text += f" in blocks of {show_count(batches.block)} rows"
    return text + ("; read ahead" if batches.bytes_ahead else "; not read ahead: memory is short")


MOST_LAYOUTS = 12  # that are listed; more are counted
MOST_CHAINS = 4


def totals(plan: Plan, full: bool = False) -> list[Note]:
    """Return the notes below the table of vertices; of folded vertices only if `full`."""
    folded = frozenset() if full else folded_vertices(plan)
    notes: list[Note] = []
    for name, note in plan.notes.items():
        if name not in folded:
            notes.append(("", f"{name}: {note}"))
    for vertex in plan.graph.inputs:
        if vertex.stored is not None:
            notes.append(("stores", f"{vertex.name}: {_stored(plan, vertex.stored)}"))
    if plan.layouts:
        layouts = [f"{name} {show_layout(plan, name)}" for name in plan.layouts]
        notes.append(("layouts", _listed(layouts)))
    if plan.shared is not None:
        notes.append(("shared", _shared(plan.shared)))
    if plan.fitted is not None and (plan.fitted.kept or plan.fitted.loaded):
        notes.append(("resident", _fitted(plan, plan.fitted)))
    notes.append(("moved", _moved(plan)))
    if plan.passed_on:
        notes.append(("loading", _passed_on(plan)))
    notes += loop_notes(plan)
    if not plan.knows_nodes:
        notes.append(("nodes", one_level(plan)))
    if plan.machine is not None:
        notes.append(("seconds", _seconds(plan)))
        notes.append(("objective", f"these seconds, by a machine {plan.machine.source}"))
    notes += [("fused", _fused(chain)) for chain in plan.chains[:MOST_CHAINS]]
    if len(plan.chains) > MOST_CHAINS:
        notes.append(("fused", f"… {len(plan.chains)} chains in all"))
    if plan.recomputed is not None:
        notes.append(("recomputed", _recomputed(plan, plan.recomputed)))
    notes.append(("peak memory", _peak_memory(plan)))
    notes.append(("certificate", _certificate(plan)))
    if plan.reproducible:
        notes.append(("reproducible", _reproducible(plan)))
    if plan.machine is None and plan.mesh.nodes > 1:
        notes.append(("objective", f"bytes; one between nodes counts as {BETWEEN}"))
    notes.append(("digest", plan.digest))
    return notes + in_words(plan)


def _shared(shared: SharedInputs) -> str:
    """Return which inputs lie as an earlier plan has cut them, and what that costs."""
    text = f"{_listed(shared.names)}: loaded once, as an earlier plan has cut them"
    if shared.words_more:
        more = f"{show_count(shared.words_more)} {plural(shared.words_more, 'word')}"
        text += f"; with other layouts {more} less would move"
    return text


def _passed_on(plan: Plan) -> str:
    """Return what one rank reads for another, and which chunks would suit the plan."""
    found = []
    for name, nbytes in plan.passed_on.items():
        text = f"{show_bytes(nbytes)} of {name} are read by one rank for another"
        bound = plan.graph[name].bound
        parts = plan.mesh.parts(plan.loaded(name), range(len(bound)))
        if all(extent % count == 0 for extent, count in zip(bound, parts, strict=True)):
            blocks = [extent // count for extent, count in zip(bound, parts, strict=True)]
            text += f", nothing if its file had chunks of {'×'.join(map(str, blocks))}"
        found.append(text)
    return "; ".join(found)


def _fitted(plan: Plan, fitted: FittedInputs) -> str:
    """Return which inputs stay loaded because they fit, and which do not."""
    if not fitted.loaded:
        return f"{_listed(fitted.kept)} stay loaded: all that may"
    nbytes = sum(plan.graph[name].nbytes for name in fitted.loaded)
    loaded = f"{_listed(fitted.loaded)} ({show_bytes(nbytes)}) loaded in each call"
    if not fitted.kept:
        return f"none fits: {loaded}"
    return f"{_listed(fitted.kept)} stay loaded; {loaded}"


def _recomputed(plan: Plan, recomputed: Recomputed) -> str:
    """Return which tensors are computed again, what that costs, and what it saves."""
    operations = show_count(recomputed.operations)
    share = 100 * recomputed.operations / max(1, plan.graph.operations() - recomputed.operations)
    moved = show_bytes(recomputed.nbytes)
    before = show_bytes(recomputed.peak_before)
    names = _listed(recomputed.tensors)
    return (
        f"{names}: {operations} operations ({share:.2g}%) and {moved} moved more; "
        f"peak memory {before} without"
    )


def _reproducible(plan: Plan) -> str:
    """Return what it costs that bits do not depend on the plan."""
    most = 0
    additions = 0
    for vertex in plan.graph.computed:
        record = vertex.computed_einsum.reproducible
        if record is not None and record.blocks > 1:
            most = max(most, record.blocks)
            additions += vertex.steps * vertex.elements * (record.blocks - 1)
    text = "no sum is cut"
    if most:
        share = 100 * additions / plan.graph.operations()
        text = (
            f"sums in up to {most} blocks, {show_count(additions)} operations more ({share:.2g}%)"
        )
    if plan.freely is None:
        return text
    words = plan.cost_in_all.words
    return f"{text}; {show_count(words)} words, {show_count(plan.freely.words)} otherwise"


def _listed(names: Sequence[str]) -> str:
    """Return names in one line, counted if they are many."""
    listed = list(names[:MOST_LAYOUTS])
    if len(names) > MOST_LAYOUTS:
        listed.append(f"… {len(names)} in all")
    return ", ".join(listed)


def _moved(plan: Plan) -> str:
    words = show_count(plan.words_predicted)
    total = show_bytes(plan.bytes_predicted)
    busiest = show_bytes(plan.bytes_busiest)
    noun = plural(plan.words_predicted, "word")
    if plan.loop is not None:
        noun += " a step"
    text = f"{words} {noun}, {total}; {busiest} to the busiest rank"
    if plan.nodes > 1 and plan.bytes_between is not None:
        text += f"; {show_bytes(plan.bytes_between)} between nodes"
    return text


def one_level(plan: Plan) -> str:
    """Return why the mesh does not show the nodes, and what the plan assumes instead."""
    if not plan.uneven:
        why = "inputs are on a mesh that does not know them"
    elif plan.ranks % plan.nodes:
        why = "they have different numbers of ranks"
    else:
        why = "they have different numbers of ranks, or these are not in order"
    return f"{why}; planned as if all ranks were equally near"


def _seconds(plan: Plan) -> str:
    """Return the predicted seconds, and how much of them is computing and moving."""
    kinds = {
        "computing": plan.total.computing,
        "inside nodes": plan.total.moving_inside,
        "between nodes": plan.total.moving_between,
    }
    parts = []
    for kind, time in kinds.items():
        if time:
            parts.append(f"{kind} {show_seconds(plan.seconds_of(time))}")
    whole = plan.seconds_predicted
    assert whole is not None, "a plan with a machine predicts seconds"
    return f"{show_seconds(whole)} predicted: {', '.join(parts) or 'nothing to do'}"


def _fused(chain: FusedChain) -> str:
    """Return which vertices are computed together, how many rows at a time, and what it saves."""
    rows = []
    for labels, size in zip(chain.rows, chain.block, strict=True):
        rows.append(f"{labels[0]}:{show_count(size)}")
    blocks = show_bytes(chain.nbytes)
    whole = show_bytes(chain.saved)
    return (
        f"{', '.join(chain.inner)} → {', '.join(chain.outer)}: {' '.join(rows)} at a time, "
        f"{blocks} a rank instead of {whole}"
    )


def _peak_memory(plan: Plan) -> str:
    text = f"{show_bytes(plan.peak)} a rank"
    if plan.spilled:
        text += f"; up to {show_bytes(plan.spilled)} more are kept outside of it at times"
    if plan.ahead:
        text += f"; up to {show_bytes(plan.ahead)} of it for reading files ahead"
    if plan.overlap:
        text += f"; up to {show_bytes(plan.overlap)} of it to compute while tensors move"
    return text


# The plans that a certificate is about → what is proven if none of them moves less.
EXACTNESS = {
    CUTS_OF_MESH: "no cut of this graph on this mesh moves less",
    ALL_CUTS: "no cut of this graph moves less, on this mesh or another one",
    REPEATING_NO_MORE: "no plan that repeats no more operations moves less",
    WITHIN_MEMORY: "no plan within this memory that repeats no more operations moves less",
}


def _certificate(plan: Plan) -> str:
    """Return how good the plan is proven to be."""
    if plan.kind == "exact":
        return f"exact: {EXACTNESS[plan.among]}{gather_condition(plan)}"
    if not plan.lower_bound and has_known_lists(plan.graph):
        return f"{bound_text(plan)}: none is known where lists of indices say what moves"
    return f"{bound_text(plan)}, gap {gap(plan)}"


def bound_text(plan: Plan) -> str:
    """Return the lower bound, and among which plans if it is not that of all."""
    text = f"lower bound {show_count(plan.lower_bound)} {plural(plan.lower_bound, 'word')}"
    return text if plan.among == ALL_CUTS else f"{text} among {plan.among}"


def gap(plan: Plan) -> str:
    """Return how far the words moved are above the lower bound: "exact", "3.1%", or "–" for 0."""
    if plan.kind == "exact":
        return "exact"
    if plan.lower_bound == 0:
        return "–"
    tenths = (plan.words_predicted - plan.lower_bound) * 1000 // plan.lower_bound
    return f"{tenths / 10:.1f}%"


def gather_condition(plan: Plan) -> str:
    """Return under which conditions a plan is exact.

    Gathered dimensions are not cut; and what known lists name lies in the order that it has. In
    another one, of the rows and columns of a sparse matrix say, less may move.
    """
    conditions = []
    if plan.reproducible:
        conditions.append("that no cut divides a block of a sum")
    if plan.gathered:
        conditions.append(f"that gathered dimensions are not cut (of {', '.join(plan.gathered)})")
    if plan.words_predicted and has_known_lists(plan.graph):
        conditions.append("the order of what lists of indices name")
    if not conditions or plan.mesh.ranks == 1:
        return ""
    return f", given {' and '.join(conditions)}"


# ---- explain -------------------------------------------------------------------------------------
#
# EXPLAIN: a plan as text for people (docs/reading_a_plan.md).


def explain(plan: Plan, full: bool = False) -> str:
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


def loops_of(plan: Plan) -> list[tuple[str, Plan]]:
    """Return the plans of several loops with their titles; without loops, the plan alone."""
    plans = plan.loops
    if len(plans) < 2:
        return [("", plan)]
    return [(f"loop {number} of {len(plans)}", each) for number, each in enumerate(plans, 1)]


def heading(plan: Plan) -> str:
    """Return the first line: the ranks, their mesh, the strategy."""
    return f"{ranks_and_mesh(plan)}, strategy {plan.strategy}"


def ranks_and_mesh(plan: Plan) -> str:
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


def vertex_rows(plan: Plan, full: bool = False) -> list[Row]:
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


def _stored(plan: Plan, stored: Stored) -> str:
    """Return what is stored of a sparse tensor, and how evenly ranks share it."""
    text = f"{show_count(stored.elements)} of {show_count(stored.places)} elements"
    if stored.is_assumed:
        text += ", assumed at random places"
    if plan.ranks == 1 or not stored.elements:
        return text
    if stored.largest is None:
        return f"{text}, as many on each rank, because rows differ too much"
    uneven = stored.largest * plan.ranks / stored.elements
    return f"{text}, by rows; at most {uneven:.2f} × the mean on a rank"


# ---- plan json -----------------------------------------------------------------------------------
#
# A plan as JSON, for programs.


def as_json(plan: Plan) -> dict[str, Any]:
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
    stored = {}
    for vertex in plan.graph.inputs:
        if vertex.stored is not None:
            stored[vertex.name] = vertex.stored._asdict()
    if stored:
        data["stored"] = stored
    listed = ghosts(plan)
    if listed:
        keys = ("words", "words_unlisted")
        data["ghosts"] = {name: dict(zip(keys, each, strict=True)) for name, each in listed.items()}
    if plan.passed_on:
        data["bytes_shuffled_loading"] = dict(plan.passed_on)
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
    if plan.reproducible:
        data["reproducible"] = True
    if plan.freely is not None:
        data["words_otherwise"] = plan.freely.words
    if plan.loop is not None:
        data["loop"] = _loop_json(plan, plan.loop)
    return data


def _loop_json(plan: Plan, loop: LoopPlan) -> dict[str, Any]:
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


def _vertex_json(plan: Plan, vertex: Vertex) -> dict[str, Any]:
    bill = plan.bills[vertex.name]
    return {
        "name": vertex.name,
        "einsum": str(vertex),
        **({} if vertex.recurrence is None else {"steps": vertex.steps}),
        "partitioning": plan.parts(vertex.name),
        "words": asdict(bill.words),
        "bytes_between_predicted": bill.between if plan.knows_nodes else None,
        "seconds_predicted": None if plan.machine is None else plan.seconds_of(bill.time),
    }


def certificate_data(plan: Plan) -> dict[str, Any]:
    """Return the certificate as it stands in JSON."""
    data: dict[str, Any] = {
        "kind": plan.kind,
        "lower_bound_words": plan.lower_bound,
        "among": plan.among,
    }
    if plan.gathered:
        data["not_cut"] = list(plan.gathered)
    return data
