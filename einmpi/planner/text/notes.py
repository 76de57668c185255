"""The notes below the table of a plan: what moves, memory, and how good the plan is."""

from __future__ import annotations

from collections.abc import Sequence

from einmpi.planner.donation import why_not_in_place
from einmpi.planner.machine import BETWEEN
from einmpi.planner.memory import FusedChain
from einmpi.planner.plan_data import (
    BatchPlan,
    Cost,
    FittedInputs,
    LoopPlan,
    PlanData,
    Recomputed,
    SharedInputs,
    cuts_of,
)
from einmpi.planner.text.summary import Note, folded_vertices, in_words, show_layout
from einmpi.units import counted, plural, show_bytes, show_count, show_seconds

# ---- loop notes ----------------------------------------------------------------------------------
#
# The notes below a plan that are about its loop.


def loop_notes(plan: PlanData) -> list[Note]:
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


def _validation(loop: LoopPlan, plan: PlanData) -> str:
    """Return what a validation moves: in each of its batches, and of parameters before them."""
    assert plan.loop is not None
    text = f"every {counted(loop.validated_every, 'step')}: "
    text += f"{counted(plan.loop.steps, 'batch', 'batches')}, each moves {_moves(plan.cost)}"
    before = []
    for name, arriving in plan.loop.arriving.items():
        before.append(f"{name} {show_bytes(arriving.nbytes)}")
    return f"{text}; before them {', '.join(before)}" if before else text


def _in_place(plan: PlanData, loop: LoopPlan) -> str:
    """Return which carried tensors are updated in place, and why others are not."""
    others = []
    for name, output in loop.carry.items():
        if name in plan.in_place:
            continue
        why = "memory is short"
        if not plan.spilled:
            why = why_not_in_place(cuts_of(plan), name, output, plan.nan_checked)
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


def totals(plan: PlanData, full: bool = False) -> list[Note]:
    """Return the notes below the table of vertices; of folded vertices only if `full`."""
    folded = frozenset() if full else folded_vertices(plan)
    notes: list[Note] = []
    for name, note in plan.notes.items():
        if name not in folded:
            notes.append(("", f"{name}: {note}"))
    if plan.layouts:
        notes.append(("layouts", _layouts(plan)))
    if plan.shared is not None:
        notes.append(("shared", _shared(plan.shared)))
    if plan.fitted is not None and (plan.fitted.kept or plan.fitted.loaded):
        notes.append(("resident", _fitted(plan, plan.fitted)))
    notes.append(("moved", _moved(plan)))
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
    if plan.machine is None and plan.mesh.nodes > 1:
        notes.append(("objective", f"bytes; one between nodes counts as {BETWEEN}"))
    notes.append(("digest", plan.digest))
    return notes + in_words(plan)


def _layouts(plan: PlanData) -> str:
    """Return the parts of each stored tensor's dimensions: "A [2,4], B [8,1]"."""
    return _listed([f"{name} {show_layout(plan, name)}" for name in plan.layouts])


def _shared(shared: SharedInputs) -> str:
    """Return which inputs lie as an earlier plan has cut them, and what that costs."""
    text = f"{_listed(shared.names)}: loaded once, as an earlier plan has cut them"
    if shared.words_more:
        more = f"{show_count(shared.words_more)} {plural(shared.words_more, 'word')}"
        text += f"; with other layouts {more} less would move"
    return text


def _fitted(plan: PlanData, fitted: FittedInputs) -> str:
    """Return which inputs stay loaded because they fit, and which do not."""
    if not fitted.loaded:
        return f"{_listed(fitted.kept)} stay loaded: all that may"
    nbytes = sum(plan.graph[name].nbytes for name in fitted.loaded)
    loaded = f"{_listed(fitted.loaded)} ({show_bytes(nbytes)}) loaded in each call"
    if not fitted.kept:
        return f"none fits: {loaded}"
    return f"{_listed(fitted.kept)} stay loaded; {loaded}"


def _recomputed(plan: PlanData, recomputed: Recomputed) -> str:
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


def _listed(names: Sequence[str]) -> str:
    """Return names in one line, counted if they are many."""
    listed = list(names[:MOST_LAYOUTS])
    if len(names) > MOST_LAYOUTS:
        listed.append(f"… {len(names)} in all")
    return ", ".join(listed)


def _moved(plan: PlanData) -> str:
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


def one_level(plan: PlanData) -> str:
    """Return why the mesh does not show the nodes, and what the plan assumes instead."""
    if not plan.uneven:
        why = "inputs are on a mesh that does not know them"
    elif plan.ranks % plan.nodes:
        why = "they have different numbers of ranks"
    else:
        why = "they have different numbers of ranks, or these are not in order"
    return f"{why}; planned as if all ranks were equally near"


def _seconds(plan: PlanData) -> str:
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


def _peak_memory(plan: PlanData) -> str:
    text = f"{show_bytes(plan.peak)} a rank"
    if plan.spilled:
        text += f"; up to {show_bytes(plan.spilled)} more are kept outside of it at times"
    if plan.ahead:
        text += f"; up to {show_bytes(plan.ahead)} of it for reading files ahead"
    if plan.overlap:
        text += f"; up to {show_bytes(plan.overlap)} of it to compute while tensors move"
    return text


def _certificate(plan: PlanData) -> str:
    """Return how good the plan is proven to be."""
    if plan.kind == "exact":
        return f"exact: no cut of this graph on this mesh moves less{gather_condition(plan)}"
    words = f"{show_count(plan.lower_bound)} {plural(plan.lower_bound, 'word')}"
    return f"lower bound {words}, gap {gap(plan)}"


def gap(plan: PlanData) -> str:
    """Return how far the words moved are above the lower bound: "exact", "3.1%", or "–" for 0."""
    if plan.kind == "exact":
        return "exact"
    if plan.lower_bound == 0:
        return "–"
    tenths = (plan.words_predicted - plan.lower_bound) * 1000 // plan.lower_bound
    return f"{tenths / 10:.1f}%"


def gather_condition(plan: PlanData) -> str:
    """Return under which condition a plan is exact: gathered dimensions are not cut."""
    if not plan.gathered or plan.mesh.ranks == 1:
        return ""
    return f", given that gathered dimensions are not cut (of {', '.join(plan.gathered)})"
