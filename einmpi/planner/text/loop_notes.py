"""The notes below a plan that are about its loop."""

from __future__ import annotations

from einmpi.planner.donation import why_not_in_place
from einmpi.planner.plan_data import BatchPlan, Cost, LoopPlan, PlanData, cuts_of
from einmpi.planner.text.tables import Note
from einmpi.units import counted, show_bytes, show_count, show_seconds


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
        notes.append(("once", f"{', '.join(loop.hoisted)}: {_moved(loop.once.cost)}"))
    for name, arriving in loop.arriving.items():
        moved = _moved(arriving)
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
    in_all = _moved(all_steps)
    if all_steps.seconds is not None:
        in_all += f", {show_seconds(all_steps.seconds)} predicted"
    notes.append(("all steps", in_all))
    return notes


def _moved(cost: Cost) -> str:
    return f"{show_count(cost.words)} words, {show_bytes(cost.nbytes)}"


def _validation(loop: LoopPlan, plan: PlanData) -> str:
    """Return what a validation moves: in each of its batches, and of parameters before them."""
    assert plan.loop is not None
    text = f"every {counted(loop.validated_every, 'step')}: "
    text += f"{counted(plan.loop.steps, 'batch', 'batches')}, each moves {_moved(plan.cost)}"
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
