"""The plans of loops: of one, and of several that follow one another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from einmpi.comm.base import spread_over_nodes
from einmpi.job.job import Job, loop_of
from einmpi.job.loop import Loop
from einmpi.loops.arrival import (
    arrivals,
    best_planned,
    inputs_that_stay,
    layout_for_once,
    once_result_layouts,
    read_by_stages,
    result_layouts,
    step_layout,
    with_staying,
)
from einmpi.loops.batches import plan_batches
from einmpi.loops.passed_on import (
    bytes_kept,
    kept_tensors,
    with_kept,
    with_less_memory,
)
from einmpi.loops.stages import (
    Stages,
    once_options,
    stages_of,
    step_options,
    validation_loop,
    with_loop,
)
from einmpi.planner.make_plan import make_plan
from einmpi.planner.plan import Options, Plan
from einmpi.planner.plan_data import loop_plan_of
from einmpi.schedule.layout import Layout


def plan_loops(job: Job, ranks: int, options_of: Callable[[Job], Options]) -> Plan:
    """Return the plan of the first loop; with it, those of the loops that follow.

    Each is made for tensors that lie where earlier loops leave them.
    """
    layouts_before: dict[str, Layout] = {}
    computed_once: set[str] = set()  # of these tensors
    plans: list[Plan] = []
    stages_before: Stages | None = None
    for each, kept in zip(job.one_after_another(), kept_tensors(job), strict=True):
        loop = loop_of(each)
        stages = stages_of(each, loop)
        of_steps = {}
        for name, layout in layouts_before.items():
            if name not in computed_once:
                of_steps[name] = layout
        bytes_to_leave = bytes_kept(kept, of_steps, stages.inputs)
        options = with_less_memory(options_of(each), bytes_to_leave)
        plan = plan_loop(each, loop, ranks, options, layouts_before, computed_once, stages)
        in_use = _used_where_they_lie(stages, plan)
        plan = with_kept(plan, bytes_kept(kept, layouts_before, in_use))
        if stages_before is not None:
            plan = with_staying(plan, inputs_that_stay(stages_before, plans[-1], stages, plan))
        plans.append(plan)
        stages_before = stages
        of_steps = result_layouts(each, loop, plan)
        once = once_result_layouts(each, loop, plan)
        computed_once = (computed_once - set(of_steps)) | set(once)
        layouts_before |= of_steps | once
    return joined_plans(plans)


def _used_where_they_lie(stages: Stages, plan: Plan) -> list[str]:
    """Return the inputs of steps that are not moved before the first step."""
    found = []
    for vertex in stages.step.graph.inputs:
        if vertex.name not in loop_plan_of(plan).arriving:
            found.append(vertex.name)
    return found


def joined_plans(plans: Sequence[Plan]) -> Plan:
    """Return the plan of the first loop, with those of the loops that follow."""
    first = plans[0]
    return replace(first, loop=replace(loop_plan_of(first), later=tuple(plans[1:])))


def plan_loop(
    job: Job,
    loop: Loop,
    ranks: int,
    options: Options,
    layouts_before: Mapping[str, Layout],
    computed_once: Collection[str] = (),
    stages: Stages | None = None,
) -> Plan:
    """Return the plan of a step; with it, that of what is computed once.

    `layouts_before` are those of tensors that are on the ranks already. Tensors in `computed_once`
    are moved in any case: ranks learn their layouts only in the run. `stages` are those of the
    loop, if the caller has them.
    """
    if stages is None:
        stages = stages_of(job, loop)
    known = read_by_stages(stages, layouts_before)
    movable = {name: layout for name, layout in known.items() if name not in computed_once}
    of_step = step_options(options, stages, loop)

    def make(staying: Mapping[str, Layout]) -> Plan:
        given = {name: layout.cuts for name, layout in staying.items()}
        mesh = next((layout.mesh for layout in staying.values()), None)
        return make_plan(stages.step.graph, ranks, replace(of_step, given=given, mesh=mesh))

    plan = best_planned(stages, loop, options, movable, make, lambda found: found)
    once = None
    if stages.once is not None:
        of_once = once_options(options, stages, plan)
        given = {}
        for name, layout in known.items():
            if name in stages.once.graph.by_name:
                given[name] = layout_for_once(layout, plan).cuts
        of_once = replace(of_once, given=given)
        once = make_plan(stages.once.graph, ranks, of_once)
    batches = plan_batches(job, loop, plan)
    arriving = arrivals(stages, plan, known, spread_over_nodes(ranks, plan.nodes))
    found = with_loop(plan, loop, stages, once, batches, arriving)
    if loop.validation is None:
        return found
    layouts = {}
    for name in loop.carry:
        layouts[name] = step_layout(stages.step.graph, plan, name)
    other_job, other_loop = validation_loop(job, loop.validation)
    other_stages = stages_of(other_job, other_loop, loop.carry)
    validation = plan_loop(other_job, other_loop, ranks, options, layouts, (), other_stages)
    around = replace(
        loop_plan_of(found), validation=validation, validated_every=loop.validation.every
    )
    return replace(found, loop=around)
