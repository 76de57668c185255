"""The two jobs of a loop: what is computed once, before the first step, and the step itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from einmpi.files.specs import InputSpec
from einmpi.graph.eingraph import EinGraph
from einmpi.graph.hoist import hoist
from einmpi.graph.labels import unique
from einmpi.graph.rewrite import prune
from einmpi.job.job import Job, loop_of
from einmpi.job.loop import EPOCH, ROWS, STEP, Loop, StepProgram, Validation, make_loop
from einmpi.language.parse import rewrite
from einmpi.loops.batches import reads_into_memory_of_plan
from einmpi.loops.updates import with_updates_in_order
from einmpi.planner.plan import Options, Plan
from einmpi.planner.plan_data import BatchPlan, Cost, LoopPlan
from einmpi.planner.strategies import DEFAULT_STRATEGY, STRATEGIES
from einmpi.schedule.lower import loaded_cuts


@dataclass(frozen=True)
class Stages:
    """A loop as jobs without loops."""

    once: Job | None
    step: Job
    hoisted: tuple[str, ...]  # what `once` computes for `step`

    @property
    def inputs(self) -> set[str]:
        """The inputs of both jobs, with those that `once` computes for `step`."""
        names = {vertex.name for vertex in self.step.graph.inputs}
        if self.once is not None:
            names.update(vertex.name for vertex in self.once.graph.inputs)
        return names


def kept_outputs(job: Job, loop: Loop) -> tuple[str, ...]:
    """Return the tensors of the last step that are results, besides those that are carried."""
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
        names += kept_outputs(each, loop)
    return unique(names)


def written_step(job: Job, loop: Loop) -> EinGraph:
    """Return the program of a step as written, with all that the loop needs as outputs."""
    outputs = unique(_read_by_loop(job, loop), kept_outputs(job, loop))
    return prune(replace(job.as_computed, outputs=outputs))


def _read_by_loop(job: Job, loop: Loop) -> tuple[str, ...]:
    """Return the tensors of a step that are carried, recorded, or read by the condition."""
    computed = {vertex.name for vertex in job.written.computed}
    watched = [name for name in loop.watched if name in computed]
    return unique(loop.carry.values(), watched)


def stages_of(job: Job, loop: Loop, inputs_changing: Collection[str] = ()) -> Stages:
    """Split the job of a loop.

    Besides what it carries, `inputs_changing` are not always the same.
    """
    # What the loop reads belongs to a step, even if it is always the same.
    changing = [*loop.carry, STEP, *_read_by_loop(job, loop), *inputs_changing]
    if not loop.carry and not inputs_changing:  # the only step is all there is
        changing += [vertex.name for vertex in job.written.computed]
    batched: tuple[str, ...] = ()
    if loop.batches is not None:
        batched = loop.batches.names
        changing += [*batched, ROWS, EPOCH]
    parts = hoist(written_step(job, loop), changing)
    specs = [spec for spec in job.inputs if spec.name not in batched]
    for name in parts.names:
        vertex = parts.step[name]
        specs.append(InputSpec(name, shape=vertex.bound, dtype=vertex.dtype, resident=True))
    graph = rewrite(job.source, parts.step, job.strict)
    step = replace(
        job,
        written=parts.step,
        graph=with_updates_in_order(graph, loop.carry, nan_checked(loop)),
        inputs=tuple(specs),
        outputs=(),
    )
    once = None
    if parts.once is not None:
        graph = rewrite(job.source, parts.once, job.strict)
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
    graph = rewrite(job.source, changed.as_computed, job.strict)
    return replace(changed, graph=with_updates_in_order(graph, carry))


def validation_loop(job: Job, validation: Validation) -> tuple[Job, Loop]:
    """Return the loop over the batches of a validation, and its job."""
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
    return replace(job, inputs=(*inputs, *others.values()), outputs=(), loop=steps), steps


def step_options(options: Options, stages: Stages, loop: Loop) -> Options:
    """Return the options of a step's plan.

    All inputs are there before it begins, but for batches: each row arrives on one rank, and copies
    of it count.
    """
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
    for name in stages.hoisted:
        placed[name] = loaded_cuts(plan, name)
    can_be_pinned = inputs.union(graph.outputs).difference(placed)
    pins = {}
    for name, parts in options.pins.items():
        if name in can_be_pinned:
            pins[name] = parts
    return replace(
        options,
        strategy=strategy,
        roles=roles,
        placed=placed,
        mesh=plan.mesh if placed else None,
        resident=tuple(name for name in options.may_stay if name in inputs),
        fitting=(),
        files=tuple(name for name in options.files if name in inputs),
        pins=pins,
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
    loop: Loop,
    stages: Stages,
    once: Plan | None,
    batches: BatchPlan | None = None,
    arriving: Mapping[str, Cost] | None = None,
) -> Plan:
    """Return the plan of a step that knows its loop, and counts what batches take."""
    around = LoopPlan(loop.steps, loop.carry, once, stages.hoisted, batches, arriving or {})
    if batches is None or not reads_into_memory_of_plan(stages.step):
        return replace(plan, loop=around)
    peak = plan.peak + batches.bytes_arriving + batches.bytes_ahead
    return replace(plan, loop=around, peak=peak, ahead=plan.ahead + batches.bytes_ahead)
