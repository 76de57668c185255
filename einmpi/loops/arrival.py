"""Tensors that lie on the ranks before a loop: whether its steps use them there or move them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from einmpi.arrays.dist_array import DistArray
from einmpi.comm.base import spread_over_nodes
from einmpi.compiled.given_inputs import with_inputs
from einmpi.errors import InputError
from einmpi.graph.eingraph import EinGraph
from einmpi.job.job import Job, loop_of
from einmpi.job.settings import DEFAULT_BACKEND
from einmpi.loops.batches import plan_batches
from einmpi.loops.stages import (
    Stages,
    bytes_kept,
    kept_outputs,
    kept_tensors,
    once_options,
    stages_of,
    step_options,
    validation_job,
    with_kept,
    with_less_memory,
    with_loop,
)
from einmpi.planner.make_plan import make_plan
from einmpi.planner.orders import fixed_orders, orders_agree
from einmpi.planner.plan import Cost, Options, Plan, loop_plan_of
from einmpi.schedule.layout import Layout, even_layout
from einmpi.schedule.lower import result_layout
from einmpi.schedule.moves import elements_between, redistributed_elements

Planned = TypeVar("Planned")


def layouts_of(given: Mapping[str, Any]) -> dict[str, Layout]:
    """Return the layouts of those inputs that are given as DistArrays."""
    found = {}
    for name, array in given.items():
        if isinstance(array, DistArray):
            found[name] = array.layout
    return found


def step_layout(graph: EinGraph, plan: Plan, name: str) -> Layout:
    """Return the layout in which steps need one of their inputs."""
    return Layout(plan.mesh, graph[name].bound, plan.loaded(name), (), plan.orders_of(name))


def hoisted_layouts(stages: Stages, once: Plan | None) -> dict[str, Layout]:
    """Return where what is computed once lies before it is moved to where steps need it.

    Nothing moves, unless the digits of tensors that go together have other orders in the steps.
    """
    if once is None:
        return {}
    return {name: result_layout(once, name) for name in stages.hoisted}


def read_by_stages(stages: Stages, layouts_before: Mapping[str, Layout]) -> dict[str, Layout]:
    """Return the layouts of those tensors that are inputs of a loop."""
    names = stages.inputs.difference(stages.hoisted)
    return {name: layout for name, layout in layouts_before.items() if name in names}


def arrivals(
    stages: Stages,
    plan: Plan,
    layouts_before: Mapping[str, Layout],
    nodes: Sequence[int] = (0,),
) -> dict[str, Cost]:
    """Return what moves of each tensor before the first step, given where they lie.

    `nodes` are those of the ranks.
    """
    found = {}
    for name, layout in layouts_before.items():
        dtype = ""
        targets = []
        if name in stages.step.graph.by_name:
            dtype = stages.step.graph[name].dtype
            targets.append(step_layout(stages.step.graph, plan, name))
        if stages.once is not None and name in {each.name for each in stages.once.graph.inputs}:
            dtype = stages.once.graph[name].dtype
            targets.append(layout_for_once(layout, plan))
        words = sum(redistributed_elements(layout, target) for target in targets)
        if words:
            between = sum(elements_between(layout, target, nodes) for target in targets)
            itemsize = np.dtype(dtype).itemsize
            found[name] = Cost(words, words * itemsize, between * itemsize)
    return found


def inputs_that_stay(
    before: Stages, plan_before: Plan, after: Stages, plan_after: Plan
) -> tuple[str, ...]:
    """Return the inputs that the steps of a loop need just as those of the loop before it.

    They are loaded once. Tensors that a loop carries, or that a loop computes, are not among them.
    """
    if after.step.backend != DEFAULT_BACKEND:
        return ()
    if plan_before.spilled or plan_after.spilled:
        return ()
    changing = {*before.loop.carry, *after.loop.carry}
    graph_before = before.step.graph
    graph_after = after.step.graph
    found = []
    for spec in after.step.inputs:
        name = spec.name
        is_loaded = spec.file is not None or spec.random is not None
        if name in changing or not is_loaded:
            continue
        if spec not in before.step.inputs:
            continue
        if name not in graph_before.by_name or name not in graph_after.by_name:
            continue
        layout_before = step_layout(graph_before, plan_before, name)
        layout_after = step_layout(graph_after, plan_after, name)
        if layout_before == layout_after:
            found.append(name)
    return tuple(found)


def with_staying(plan: Plan, names: tuple[str, ...]) -> Plan:
    """Return the plan of a loop that does not load these inputs anew."""
    return replace(plan, loop=replace(loop_plan_of(plan), staying=names))


def _bytes_moved(stages: Stages, plan: Plan, layouts_before: Mapping[str, Layout]) -> int:
    return sum(each.nbytes for each in arrivals(stages, plan, layouts_before).values())


def layout_for_once(layout: Layout, plan: Plan) -> Layout:
    """Return the layout in which what is computed once gets a tensor: on the mesh of the steps."""
    if layout.mesh == plan.mesh and not layout.orders:
        return layout
    return even_layout(plan.mesh, layout.bound)


def placed_for_step(graph: EinGraph, plan: Plan, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a step, with DistArrays moved to where it needs them."""
    placed = {}
    for name, array in given.items():
        if name not in graph.by_name:
            continue
        if isinstance(array, DistArray):
            layout = step_layout(graph, plan, name)
            if array.layout != layout:
                array = array.redistribute(layout)
        placed[name] = array
    return placed


def placed_for_once(stages: Stages, plan: Plan, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of what is computed once, with DistArrays on the mesh of the steps."""
    placed: dict[str, Any] = {}
    if stages.once is None:
        return placed
    for vertex in stages.once.graph.inputs:
        array = given.get(vertex.name)
        if isinstance(array, DistArray):
            layout = layout_for_once(array.layout, plan)
            if array.layout != layout:
                array = array.redistribute(layout)
        if array is not None:
            placed[vertex.name] = array
    return placed


def best_planned(
    stages: Stages,
    options: Options,
    layouts_before: Mapping[str, Layout],
    make: Callable[[Mapping[str, Layout]], Planned],
    plan_of: Callable[[Planned], Plan],
) -> Planned:
    """Return the better of two plans for the steps, over all of them.

    One moves tensors before the first step to where steps need them, the other one uses them where
    they lie. `make` makes a plan for tensors that stay where they lie.
    """
    free = make({})
    bytes_moved = _bytes_moved(stages, plan_of(free), layouts_before)
    staying = _tensors_that_can_stay(stages, options, layouts_before)
    if not bytes_moved or not staying:
        return free
    try:
        kept = make(staying)
    except InputError:  # it does not fit into memory
        return free
    bytes_moved_kept = _bytes_moved(stages, plan_of(kept), layouts_before)
    cost_free = _cost(plan_of(free), stages.loop.steps, bytes_moved)
    cost_kept = _cost(plan_of(kept), stages.loop.steps, bytes_moved_kept)
    return kept if cost_kept <= cost_free else free


def _tensors_that_can_stay(
    stages: Stages, options: Options, layouts_before: Mapping[str, Layout]
) -> dict[str, Layout]:
    """Return the inputs of steps that lie on one mesh and whose cuts are not prescribed.

    Where the orders of their digits do not go together, those in the order of the mesh.
    """
    found: dict[str, Layout] = {}
    mesh = None  # that of the first tensor that can stay
    for name, layout in layouts_before.items():
        if name not in stages.step.graph.by_name:
            continue
        next_value = stages.loop.carry.get(name)
        is_pinned = name in options.pins or next_value in options.pins
        if is_pinned or layout.splits:
            continue
        if mesh is None:
            mesh = layout.mesh
        if layout.mesh == mesh:
            found[name] = layout
    cuts = {name: layout.cuts for name, layout in found.items()}
    fixed = fixed_orders(cuts, {name: layout.orders for name, layout in found.items()})
    if orders_agree(stages.step.graph, stages.loop.carry, fixed):
        return found
    return {name: layout for name, layout in found.items() if not layout.orders}


def _cost(plan: Plan, steps: int, bytes_before: int) -> float:
    """Return what all steps cost: seconds on a machine that was measured, bytes otherwise."""
    if plan.machine is None or plan.seconds_predicted is None:
        return steps * plan.bytes_predicted + bytes_before
    picoseconds = bytes_before * plan.machine.inside
    return steps * plan.seconds_predicted + plan.seconds_of(picoseconds)


def result_layouts(job: Job, plan: Plan) -> dict[str, Layout]:
    """Return where the last step of a loop leaves its results, under all their names."""
    found = {}
    for name, output in loop_of(job).carry.items():
        layout = result_layout(plan, output)
        found[name] = layout
        found[output] = layout
    for name in kept_outputs(job):
        if name in plan.graph.outputs:
            found[name] = result_layout(plan, name)
    return found


def once_result_layouts(job: Job, plan: Plan) -> dict[str, Layout]:
    """Return where the results are that a loop computes before its first step."""
    found: dict[str, Layout] = {}
    once = loop_plan_of(plan).once
    if once is None:
        return found
    for name in kept_outputs(job):
        if name not in plan.graph.outputs:
            found[name] = result_layout(once, name)
    return found


# ---- planning ------------------------------------------------------------------------------------
#
# The plans of loops: of one, and of several that follow one another.


def plan_loops(job: Job, ranks: int, options_of: Callable[[Job], Options]) -> Plan:
    """Return the plan of the first loop; with it, those of the loops that follow.

    Each is made for tensors that lie where earlier loops leave them.
    """
    layouts_before: dict[str, Layout] = {}
    computed_once: set[str] = set()  # of these tensors
    plans: list[Plan] = []
    stages_before: Stages | None = None
    for each, kept in zip(job.one_after_another(), kept_tensors(job), strict=True):
        stages = stages_of(each)
        of_steps = {}
        for name, layout in layouts_before.items():
            if name not in computed_once:
                of_steps[name] = layout
        bytes_to_leave = bytes_kept(kept, of_steps, stages.inputs)
        options = with_less_memory(options_of(each), bytes_to_leave)
        plan = plan_loop(each, ranks, options, layouts_before, computed_once, stages)
        in_use = _used_where_they_lie(stages, plan)
        plan = with_kept(plan, bytes_kept(kept, layouts_before, in_use))
        if stages_before is not None:
            plan = with_staying(plan, inputs_that_stay(stages_before, plans[-1], stages, plan))
        plans.append(plan)
        stages_before = stages
        of_steps = result_layouts(each, plan)
        once = once_result_layouts(each, plan)
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
        stages = stages_of(job)
    known = read_by_stages(stages, layouts_before)
    movable = {}
    for name, layout in known.items():
        if name not in computed_once:
            movable[name] = layout
    of_step = step_options(options, stages)

    def make(staying: Mapping[str, Layout]) -> Plan:
        of_given = with_inputs(of_step, tuple(staying.items()), job.backend)
        return make_plan(stages.step.graph, ranks, of_given)

    plan = best_planned(stages, options, movable, make, lambda found: found)
    once = None
    if stages.once is not None:
        kinds = []
        for name, layout in known.items():
            if name in stages.once.graph.by_name:
                kinds.append((name, layout_for_once(layout, plan)))
        of_once = with_inputs(once_options(options, stages, plan), tuple(kinds), job.backend)
        once = make_plan(stages.once.graph, ranks, of_once)
    batches = plan_batches(job, plan)
    lying = {**known, **hoisted_layouts(stages, once)}
    arriving = arrivals(stages, plan, lying, spread_over_nodes(ranks, plan.nodes))
    found = with_loop(plan, stages, once, batches, arriving)
    loop = stages.loop
    if loop.validation is None:
        return found
    layouts = {}
    for name in loop.carry:
        layouts[name] = step_layout(stages.step.graph, plan, name)
    other_job = validation_job(job, loop.validation)
    other_stages = stages_of(other_job, loop.carry)
    validation = plan_loop(other_job, ranks, options, layouts, (), other_stages)
    around = replace(
        loop_plan_of(found), validation=validation, validated_every=loop.validation.every
    )
    return replace(found, loop=around)
