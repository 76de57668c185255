"""The two jobs of a loop: what is computed once, before the first step, and the step itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

from einmpi.files.specs import InputSpec
from einmpi.graph.hoist import hoist
from einmpi.graph.labels import unique
from einmpi.graph.rewrite import prune
from einmpi.job.job import Job
from einmpi.job.loop import STEP, Loop
from einmpi.language.parse import rewrite


@dataclass(frozen=True)
class Stages:
    """A loop as jobs without loops."""

    once: Job | None
    step: Job
    hoisted: tuple[str, ...]  # what `once` computes for `step`


def kept_outputs(job: Job, loop: Loop) -> tuple[str, ...]:
    """Return the tensors of the last step that are results, besides those that are carried."""
    names = [spec.name for spec in job.outputs] or list(job.graph.outputs)
    carried = {*loop.carry, *loop.carry.values()}
    return tuple(name for name in names if name not in carried)


def stages_of(job: Job, loop: Loop) -> Stages:
    """Split the job of a loop."""
    outputs = kept_outputs(job, loop)
    computed = {vertex.name for vertex in job.written.computed}
    watched = [name for name in loop.watched if name in computed]
    of_step = unique(loop.carry.values(), watched)
    written = prune(replace(job.written, outputs=unique(of_step, outputs)))
    # What is carried or watched belongs to a step, even if it is always the same.
    parts = hoist(written, [*loop.carry, STEP, *of_step])
    specs = list(job.inputs)
    for name in parts.names:
        vertex = parts.step[name]
        specs.append(InputSpec(name, shape=vertex.bound, dtype=vertex.dtype, resident=True))
    step = replace(
        job,
        written=parts.step,
        graph=rewrite(job.source, parts.step, job.strict),
        inputs=tuple(specs),
        outputs=(),
    )
    once = None
    if parts.once is not None:
        graph = rewrite(job.source, parts.once, job.strict)
        once = replace(job, written=parts.once, graph=graph, outputs=())
    return Stages(once, step, parts.names)
