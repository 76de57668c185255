"""The two jobs of a loop, what is computed once and the step itself; the loop by the reference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.errors import InputError
from einmpi.files.specs import InputSpec
from einmpi.graph.eingraph import EinGraph, Recurrence, Vertex
from einmpi.graph.rewrite import hoist, prune
from einmpi.graph.scalar import unique
from einmpi.job.batches import EPOCH, ROWS, Validation
from einmpi.job.job import Job, loop_of
from einmpi.job.loop import STEP, Loop, StepProgram, make_loop
from einmpi.kernels.reference import evaluate
from einmpi.kernels.updates import find_partial_update
from einmpi.loops.batches import batch_of_whole_array, reads_into_memory_of_plan
from einmpi.planner.memory import places_filled, scattered_label
from einmpi.planner.peak_memory import is_sparse_update
from einmpi.planner.plan import BatchPlan, Cost, LoopPlan, Options, Plan, loop_plan_of
from einmpi.planner.strategies import DEFAULT_STRATEGY, STRATEGIES
from einmpi.schedule.layout import Layout
from einmpi.schedule.lower import result_layout

# ---- updates -------------------------------------------------------------------------------------
#
# The updates of a loop's step: in an order in which they can be made in place, and how much of
# a carried tensor each of them changes.


def with_updates_in_order(
    graph: EinGraph, carry: Mapping[str, str], nan_checked: Collection[str] = ()
) -> EinGraph:
    """Return the graph with the next values of carried tensors after all uses of the old ones.

    Then the next value can be written over the old one. `carry` has the output that each input
    becomes. The tensors in `nan_checked` are computed before, too, where that is possible.
    """
    order = list(graph.vertices)
    for name, output in carry.items():
        order = _with_late_update(graph, order, name, output, nan_checked)
    for name, output in carry.items():
        order = _with_update_after_its_sum(graph, order, name, output, nan_checked)
    inputs_of_outputs = {output: name for name, output in carry.items()}
    vertices = []
    for vertex in order:
        if vertex.name in inputs_of_outputs:
            vertex = replace(vertex, changed=_elements_changed(graph, vertex, inputs_of_outputs))
        vertices.append(vertex)
    return replace(graph, vertices=_with_steps_together(vertices))


def _with_steps_together(order: Sequence[Vertex]) -> tuple[Vertex, ...]:
    """Return an order in which updates that came between vertices of a recurrence come after."""
    members: dict[Recurrence, list[Vertex]] = {}
    for vertex in order:
        if vertex.recurrence is not None:
            members.setdefault(vertex.recurrence, []).append(vertex)
    found: list[Vertex] = []
    for vertex in order:
        found += [vertex] if vertex.recurrence is None else members.pop(vertex.recurrence, [])
    return tuple(found)


def _elements_changed(
    graph: EinGraph, vertex: Vertex, inputs_of_outputs: Mapping[str, str]
) -> int | None:
    """Return how many elements of a carried tensor an update changes; None if it may be all."""
    einsum = vertex.computed_einsum
    extents = dict(einsum.extents)
    carried = inputs_of_outputs[vertex.name]
    update = find_partial_update(einsum)
    if update is not None and vertex.inputs[update.operand] == carried:
        for condition in update.conditions:
            if condition.comparison == "==":
                extents[condition.label] = 1
        return prod(extents[label] for label in einsum.output)
    for name in vertex.inputs:
        scattered = graph[name]
        if scattered.is_input or graph.consumers[name] != (vertex.name,):
            continue
        if is_sparse_update(scattered, vertex):
            label = scattered_label(scattered.computed_einsum)
            assert label is not None
            label = einsum.output[scattered.computed_einsum.output.index(label)]
            extents[label] = min(extents[label], places_filled(scattered.computed_einsum))
            return prod(extents[label] for label in einsum.output)
    return None


def _with_late_update(
    graph: EinGraph,
    order: list[Vertex],
    name: str,
    output: str,
    nan_checked: Collection[str],
) -> list[Vertex]:
    """Return the order in which the output comes after the last vertex that reads the input."""
    start = [vertex.name for vertex in order].index(output)
    dependent = {output}  # the output and what is computed from it
    end = start
    for position in range(start + 1, len(order)):
        vertex = order[position]
        needs_output = not dependent.isdisjoint(vertex.inputs)
        if needs_output:
            dependent.add(vertex.name)
        comes_first = name in vertex.inputs or vertex.name in nan_checked
        if comes_first and needs_output:
            return order  # it needs both values
        if comes_first:
            end = position
    if end == start:
        return order
    if _bytes_kept_longer(order, start) > graph[output].nbytes:
        return order
    first = []
    later = []
    for vertex in order[start : end + 1]:
        if vertex.name in dependent:
            later.append(vertex)
        else:
            first.append(vertex)
    return [*order[:start], *first, *later, *order[end + 1 :]]


def _with_update_after_its_sum(
    graph: EinGraph,
    order: list[Vertex],
    name: str,
    output: str,
    nan_checked: Collection[str],
) -> list[Vertex]:
    """Return the order in which the output comes right after a sum that nothing else needs.

    So the sum, a gradient say, need not be kept. Nothing that comes between them now may read the
    input, nor compute what the output needs or what must be known before the input is lost.
    """
    position = [vertex.name for vertex in order].index(output)
    update = order[position]
    start = position - 1
    while start >= 0:
        vertex = order[start]
        is_last_read_here = graph.consumers[vertex.name] == (output,)
        if vertex.einsum is not None and vertex.einsum.aggregated and is_last_read_here:
            passed = order[start + 1 : position]
            return [*order[: start + 1], update, *passed, *order[position + 1 :]]
        if vertex.name in update.inputs or vertex.name in nan_checked or name in vertex.inputs:
            return order
        start -= 1
    return order


def _bytes_kept_longer(order: Sequence[Vertex], position: int) -> int:
    """Return the bytes of the computed operands that a vertex is the last to read."""
    read_later: set[str] = set()
    for vertex in order[position + 1 :]:
        read_later.update(vertex.inputs)
    read_last_here = set(order[position].inputs) - read_later
    total = 0
    for vertex in order[:position]:
        if vertex.name in read_last_here and not vertex.is_input:
            total += vertex.nbytes
    return total


@dataclass(frozen=True)
class Stages:
    """A loop as jobs without loops."""

    once: Job | None
    step: Job
    hoisted: tuple[str, ...]  # what `once` computes for `step`

    @property
    def loop(self) -> Loop:
        """The loop whose step it is."""
        return loop_of(self.step)

    @property
    def inputs(self) -> set[str]:
        """The inputs of both jobs, with those that `once` computes for `step`."""
        names = {vertex.name for vertex in self.step.graph.inputs}
        if self.once is not None:
            names.update(vertex.name for vertex in self.once.graph.inputs)
        return names


def kept_outputs(job: Job) -> tuple[str, ...]:
    """Return the tensors of the last step that are results, besides those that are carried."""
    loop = loop_of(job)
    if loop.results is not None:
        names = list(loop.results)
    elif job.outputs:
        names = [spec.name for spec in job.outputs]
    else:
        names = list(job.graph.outputs)
    carried = {*loop.carry, *loop.carry.values()}
    return tuple(name for name in names if name not in carried)


def final_names(job: Job) -> tuple[str, ...]:
    """Return the names of the results of all loops of a job.

    The state of an optimiser is one only if it is stored.
    """
    stored = [spec.name for spec in job.outputs]
    if job.loops and stored:
        return tuple(stored)
    names: list[str] = []
    for each in job.one_after_another():
        loop = loop_of(each)
        for name in loop.carry:
            is_state = name in loop.state
            if not is_state or name in stored:
                names.append(name)
        names += kept_outputs(each)
    return unique(names)


def written_step(job: Job) -> EinGraph:
    """Return the program of a step as written, with all that the loop needs as outputs."""
    outputs = unique(_read_by_loop(job), kept_outputs(job))
    return prune(replace(job.as_computed, outputs=outputs))


def _read_by_loop(job: Job) -> tuple[str, ...]:
    """Return the tensors of a step that are carried, recorded, or read by the condition."""
    loop = loop_of(job)
    computed = {vertex.name for vertex in job.written.computed}
    watched = [name for name in loop.watched if name in computed]
    return unique(loop.carry.values(), watched)


def stages_of(job: Job, inputs_changing: Collection[str] = ()) -> Stages:
    """Split the job of a loop.

    Besides what it carries, `inputs_changing` are not always the same.
    """
    loop = loop_of(job)
    # What the loop reads belongs to a step, even if it is always the same.
    changing = [*loop.carry, STEP, *_read_by_loop(job), *inputs_changing]
    if not loop.carry and not inputs_changing:  # the only step is all there is
        changing += [vertex.name for vertex in job.written.computed]
    batched: tuple[str, ...] = ()
    if loop.batches is not None:
        batched = loop.batches.names
        changing += [*batched, ROWS, EPOCH]
    parts = hoist(written_step(job), changing)
    specs = [spec for spec in job.inputs if spec.name not in batched]
    for name in parts.names:
        vertex = parts.step[name]
        specs.append(InputSpec(name, shape=vertex.bound, dtype=vertex.dtype, resident=True))
    graph = job.rewritten(parts.step)
    step = replace(
        job,
        written=parts.step,
        graph=with_updates_in_order(graph, loop.carry, nan_checked(loop)),
        inputs=tuple(specs),
        outputs=(),
    )
    once = None
    if parts.once is not None:
        graph = job.rewritten(parts.once)
        once = replace(job, written=parts.once, graph=graph, outputs=())
    return Stages(once, step, parts.names)


def numbers_read(graph: EinGraph, loop: Loop) -> dict[str, str]:
    """Return the numbers of a step that its graph reads, with their dtypes."""
    found = {}
    for vertex in graph.inputs:
        if vertex.name in loop.numbers(0):
            found[vertex.name] = vertex.dtype
    return found


def nan_checked(loop: Loop) -> tuple[str, ...]:
    """Return the tensors that end the run if they are nan: the step is then run again."""
    return loop.record if loop.stop_at_nan else ()


def with_carried_outputs(job: Job, carry: Mapping[str, str]) -> Job:
    """Return a job whose outputs include what its inputs become; refuse what they cannot become."""
    program = StepProgram(job.written, job.sizes, job.inputs)
    make_loop(program, lambda *_: "carry", 1, carry)
    outputs = unique(job.written.outputs, carry.values())
    changed = replace(job, written=replace(job.written, outputs=outputs))
    graph = job.rewritten(changed.as_computed)
    return replace(changed, graph=with_updates_in_order(graph, carry))


def validation_job(job: Job, validation: Validation) -> Job:
    """Return the job of the loop over the batches of a validation."""
    others = {spec.name: spec for spec in validation.inputs}
    inputs = []
    for spec in job.inputs:
        inputs.append(others.pop(spec.name, spec))
    steps = Loop(
        validation.steps,
        {},
        record=validation.record,
        stop_at_nan=False,
        batches=validation.batches,
        results=(),
    )
    written = job.written if validation.written is None else validation.written
    inputs += others.values()
    return replace(job, written=written, inputs=tuple(inputs), outputs=(), loop=steps)


def step_options(options: Options, stages: Stages) -> Options:
    """Return the options of a step's plan.

    All inputs are there before it begins, but for batches: each row arrives on one rank, and copies
    of it count.
    """
    loop = stages.loop
    inputs = tuple(vertex.name for vertex in stages.step.graph.inputs)
    batched = () if loop.batches is None else loop.batches.names
    names = {*inputs, *stages.step.graph.outputs}
    pins = {name: parts for name, parts in options.pins.items() if name in names}
    return replace(
        options,
        carry=loop.carry,
        donate=True,
        nan_checked=nan_checked(loop),
        resident=tuple(name for name in inputs if name not in batched),
        fitting=(),
        batched=batched if reads_into_memory_of_plan(stages.step) else (),
        files=(),
        pins=pins,
        unread=False,
    )


def once_options(options: Options, stages: Stages, plan: Plan) -> Options:
    """Return the options for what is computed once, given the plan of a step.

    Its results have the layouts in which the step needs them.
    """
    assert stages.once is not None
    graph = stages.once.graph
    inputs = {vertex.name for vertex in graph.inputs}
    roles = _roles_in(graph, options.roles)
    strategy = options.strategy
    roles_needed = set(STRATEGIES[strategy].roles)
    roles_found = {role for role, labels in roles.items() if labels}
    if roles_needed and roles_needed.isdisjoint(roles_found):
        strategy = DEFAULT_STRATEGY  # there is nothing here that this strategy is about
    placed = {}
    orders = dict(options.orders)
    for name in stages.hoisted:
        placed[name] = plan.loaded(name)
        orders[name] = plan.orders_of(name)
    can_be_pinned = inputs.union(graph.outputs).difference(placed)
    pins = {name: parts for name, parts in options.pins.items() if name in can_be_pinned}
    return replace(
        options,
        strategy=strategy,
        roles=roles,
        placed=placed,
        orders=orders,
        mesh=plan.mesh if placed else None,
        resident=tuple(name for name in options.may_stay if name in inputs),
        fitting=(),
        files=tuple(name for name in options.files if name in inputs),
        pins=pins,
        unread=False,
    )


def _roles_in(graph: EinGraph, roles: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the roles of those labels that a graph has."""
    known: set[str] = set()
    for vertex in graph.computed:
        known.update(vertex.computed_einsum.labels)
    found = {}
    for role, labels in roles.items():
        found[role] = tuple(label for label in labels if label in known)
    return found


def with_loop(
    plan: Plan,
    stages: Stages,
    once: Plan | None,
    batches: BatchPlan | None = None,
    arriving: Mapping[str, Cost] | None = None,
) -> Plan:
    """Return the plan of a step that knows its loop, and counts what batches take."""
    loop = stages.loop
    around = LoopPlan(loop.steps, loop.carry, once, stages.hoisted, batches, arriving or {})
    for name in loop.kept_best:  # a copy of it
        vertex = plan.graph[name]
        layout = result_layout(plan, loop.carry[name])
        bytes_best = layout.max_elements() * np.dtype(vertex.dtype).itemsize
        plan = replace(plan, peak=plan.peak + bytes_best)
    if batches is None or not reads_into_memory_of_plan(stages.step):
        return replace(plan, loop=around)
    peak = plan.peak + batches.bytes_arriving + batches.bytes_ahead
    return replace(plan, loop=around, peak=peak, ahead=plan.ahead + batches.bytes_ahead)


# ---- passed on -----------------------------------------------------------------------------------
#
# The tensors that loops one after another pass on, and the memory that these take meanwhile.


@dataclass(frozen=True)
class NamesPassedOn:
    """The tensors that loops of a job pass on."""

    final: tuple[str, ...]  # results of the job
    kept: tuple[frozenset[str], ...]  # for each loop, the results of earlier ones still needed


def names_passed_on(job: Job) -> NamesPassedOn:
    """Return which tensors are results of a job, and which loops have to keep for later ones."""
    loops = job.one_after_another()
    final = final_names(job)
    kept: list[frozenset[str]] = []
    needed = set(final)  # after the loop, going backwards
    for each in reversed(loops):
        made = set(names_made(each))
        read = {vertex.name for vertex in each.written.inputs}
        # What it carries is saved as such; what it makes anew is not needed from before.
        carried = set(loop_of(each).carry)
        before = (needed - made) | (read - carried)
        kept.append(frozenset(before))
        needed = before | carried
    return NamesPassedOn(final, tuple(reversed(kept)))


def names_made(job: Job) -> list[str]:
    """Return the tensors that a loop carries or computes."""
    return [*loop_of(job).carry, *(vertex.name for vertex in job.written.computed)]


def kept_tensors(job: Job) -> list[dict[str, Vertex]]:
    """Return, for each loop, the tensors of earlier loops that are there while it runs."""
    names = names_passed_on(job)
    made: dict[str, Vertex] = {}
    found = []
    for each, kept in zip(job.one_after_another(), names.kept, strict=True):
        found.append({name: vertex for name, vertex in made.items() if name in kept})
        for name in names_made(each):
            made[name] = each.written[name]
    return found


def bytes_kept(
    kept: Mapping[str, Vertex], layouts: Mapping[str, Layout], in_use: Collection[str] = ()
) -> int:
    """Return the memory of a rank for tensors of earlier loops, without those that are in use.

    A tensor whose layout is not known counts as if each rank had all of it.
    """
    total = 0
    for name, vertex in kept.items():
        if name in in_use:
            continue
        layout = layouts.get(name)
        elements = vertex.elements if layout is None else layout.max_elements()
        total += elements * np.dtype(vertex.dtype).itemsize
    return total


def with_less_memory(options: Options, nbytes: int) -> Options:
    """Return the options of a loop that has to leave so much memory to other tensors."""
    if options.memory is None:
        return options
    return replace(options, memory=max(1, options.memory - nbytes))


def with_kept(plan: Plan, nbytes: int) -> Plan:
    """Return the plan of a loop with so much more memory, for tensors of earlier loops."""
    loop = loop_plan_of(plan)
    once = loop.once
    if once is not None:
        once = replace(once, peak=once.peak + nbytes)
    return replace(plan, peak=plan.peak + nbytes, loop=replace(loop, once=once, bytes_kept=nbytes))


# ---- reference -----------------------------------------------------------------------------------
#
# A loop in one process, step by step, by the reference evaluator.


Array: TypeAlias = npt.NDArray[Any]


def evaluate_loops(
    job: Job,
    inputs: Mapping[str, Any],
    arrays_of: Callable[[Job, Mapping[str, Any]], dict[str, Array]],
    kept: Mapping[str, Array],
) -> dict[str, Array]:
    """Evaluate the loops of a job one after another; there may be only one.

    `arrays_of` returns the inputs of a loop, given those of the caller and of earlier loops.
    Tensors in `kept` are 0 but where that says.
    """
    found: dict[str, Array] = {}  # by earlier loops
    for each in job.one_after_another():
        given = dict(inputs)
        if job.loops:
            given = _inputs_of(each, inputs, found)
        arrays = arrays_of(each, given)
        for spec in each.inputs:
            if spec.value is not None:
                arrays.setdefault(spec.name, np.asarray(spec.value, spec.dtype))
        results = evaluate_loop(each, arrays, kept)
        if job.loops:
            for name, output in loop_of(each).carry.items():
                found[output] = results[name]
        found |= results
    return {name: found[name] for name in final_names(job)}


def _inputs_of(
    job: Job, inputs: Mapping[str, Any], computed: Mapping[str, Array]
) -> dict[str, Any]:
    """Return the inputs of one of several loops: from earlier loops, or else from the caller."""
    found: dict[str, Any] = {}
    for spec in job.inputs:
        name = spec.name
        if name in computed:
            found[name] = computed[name]
        elif name in inputs:
            found[name] = inputs[name]
    return found


def evaluate_loop(
    job: Job, inputs: Mapping[str, Array], kept: Mapping[str, Array] | None = None
) -> dict[str, Array]:
    """Return the last values of what is carried, and the outputs of the last step.

    Each step evaluates the whole program as written; nothing is computed only once. Of inputs that
    come in batches, all rows are given.
    """
    loop = loop_of(job)
    if loop.needs_validation:
        what = "the results depend on a validation, which the reference does not compute"
        raise InputError(job.source.name, what, "a loop without patience and keep")
    step = written_step(job)
    dtypes = numbers_read(step, loop)
    values = dict(inputs)
    outputs: dict[str, Array] = {}
    for number in range(loop.steps):
        for name, value in loop.numbers(number).items():
            values[name] = np.array(value, dtypes.get(name))
        if loop.batches is not None:
            for name in loop.batches.names:
                if name in step.by_name:
                    values[name] = batch_of_whole_array(loop.batches, inputs[name], number)
        outputs = evaluate(step, values, kept)
        for name, output in loop.carry.items():
            values[name] = outputs[output]
        if loop.until is not None and condition_holds(loop.until, {**values, **outputs}):
            break
    found = {name: outputs[output] for name, output in loop.carry.items()}
    for name in kept_outputs(job):
        found[name] = outputs[name]
    return found


def condition_holds(condition: EinGraph, values: Mapping[str, Array]) -> bool:
    """Return whether the condition of a loop holds, given the values that it reads."""
    inputs = {vertex.name: values[vertex.name] for vertex in condition.inputs}
    (value,) = evaluate(condition, inputs).values()
    return bool(value)
