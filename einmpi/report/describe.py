"""A job as text for people."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from einmpi.errors import printable
from einmpi.files.load import is_missing
from einmpi.files.specs import InputSpec
from einmpi.graph.eingraph import Vertex
from einmpi.job.job import Job
from einmpi.job.loop import Batches, Loop, Validation
from einmpi.language.notes import label_notes
from einmpi.loops.stages import final_names, stages_of
from einmpi.units import counted, show_bytes, show_shape


def describe_job(job: Job) -> str:
    """Return what `einmpi check` prints: sizes, inputs and their origins, the graph, outputs."""
    lines = [printable(job.title or job.source.name)]
    if job.sizes:
        sizes = "  ".join(f"{name}={value}" for name, value in job.sizes.items())
        lines.append(f"sizes    {sizes}")
    if job.strict:
        lines.append("strict   only rewrites that are exact for all values")
    if job.half == "steps":
        lines.append("half     float16 and bfloat16 rounded after every operation")
    parts = job.one_after_another()
    unused = {spec.name for spec in job.inputs}
    for part in parts:
        unused -= set(part.graph.by_name)
    made_earlier: set[str] = set()  # by earlier loops
    for number, part in enumerate(parts, 1):
        if job.loops:
            lines.append(f"loop {number} of {len(parts)}")
        lines += _program_lines(part, made_earlier, unused if number == 1 else ())
        made_earlier |= {vertex.name for vertex in part.written.computed}
        made_earlier |= set(() if part.loop is None else part.loop.carry)
    for part in parts:
        for note in label_notes(part.source, part.written.by_name, part.sizes):
            lines.append(f"note     {printable(note)}")
    lines.append("ok")
    return "\n".join(lines)


def _program_lines(job: Job, made_earlier: Collection[str], unused: Iterable[str]) -> list[str]:
    """Return the inputs, the graph, the outputs and the loop of a program.

    Inputs in `made_earlier` are results of earlier loops; those in `unused` no program reads.
    """
    lines = []
    origins = {spec.name: _origin(spec) for spec in job.inputs}
    for name in made_earlier:
        if name in origins:
            origins[name] = "of an earlier loop"
    graphs = {"": job.graph}
    if job.loop is not None:
        for name in job.loop.numbers(0):
            if name in origins:
                origins[name] = "of each step"
        stages = stages_of(job, job.loop)
        graphs = {"step": stages.step.graph}
        if stages.once is not None:
            graphs = {"once": stages.once.graph, **graphs}
    for vertex in job.graph.inputs:
        lines.append(f"input    {_signature(vertex)}  {origins.get(vertex.name, 'given')}")
    for name in sorted(unused):
        lines.append(f"unused   {name}")
    if job.loop is not None:
        for statement in job.loop.written_out:
            lines.append(f"train    {printable(statement)}")
    for when, graph in graphs.items():
        for vertex in graph.computed:
            fused = ""
            if len(vertex.origin) > 1:
                fused = f"   (fuses {', '.join(vertex.origin[:-1])})"
            lines.append(f"{when:8} {vertex}   {_shape(vertex)}{fused}")
    targets = {spec.name: f"  {printable(spec.target)}" for spec in job.outputs}
    # The results of a loop have the names of the inputs that are carried.
    outputs = job.graph.outputs if job.loop is None else final_names(job)
    for name in outputs:
        lines.append(f"output   {_signature(job.graph[name])}{targets.get(name, '')}")
    if job.loop is not None:
        lines += _loop_lines(job.loop)
    return lines


def _loop_lines(loop: Loop) -> list[str]:
    """Return what a loop carries, and when it ends."""
    carried = [f"{output} becomes {name}" for name, output in loop.carry.items()]
    lines = [f"loop     at most {counted(loop.steps, 'step')}; {', '.join(carried)}"]
    if not carried:
        lines = ["loop     one step, which carries nothing"]
    if loop.batches is not None:
        lines.append(f"batches  {_batches_text(loop.batches)}")
    if loop.validation is not None:
        lines.append(f"validate {_validation_text(loop.validation)}")
    if loop.until_text:
        lines.append(f"until    {printable(loop.until_text)}")
    if loop.record:
        target = "" if loop.history is None else f"  {printable(loop.history.target)}"
        lines.append(f"record   {', '.join(loop.record)}{target}")
    return lines


def _validation_text(validation: Validation) -> str:
    """Return what a validation computes, when, and from which inputs."""
    text = f"{', '.join(validation.record)} every {counted(validation.every, 'step')}"
    names = ", ".join(spec.name for spec in validation.inputs)
    text += f" with another {names}"
    if validation.batches is not None:
        text += f": {counted(validation.batches.rows, 'row')}"
        text += f", {counted(validation.steps, 'batch', 'batches')}"
    return text


def _batches_text(batches: Batches) -> str:
    """Return how many steps take all rows, and in which order."""
    text = f"{', '.join(batches.names)}: {counted(batches.steps_an_epoch, 'step')} an epoch"
    if batches.epochs is not None:
        text += f", {counted(batches.epochs, 'epoch')}"
    if batches.rows_after_last:
        what = "in a padded batch" if batches.pads_last else "left out"
        text += f"; {counted(batches.rows_after_last, 'row')} {what}"
    if batches.shuffle is not None:
        text += f"; shuffled by seed {batches.shuffle.seed}"
        if batches.shuffle.block > 1:
            text += f" in blocks of {batches.shuffle.block} rows"
    return text


def _origin(spec: InputSpec) -> str:
    if spec.value is not None:
        return f"parameter {spec.value}"
    origin = printable(spec.file or spec.random or "given")
    if spec.rows is not None and spec.shape:
        origin += f", {spec.shape[0]} of {counted(spec.rows, 'row')} a step"
    return f"{origin} (does not exist yet)" if is_missing(spec) else origin


def _signature(vertex: Vertex) -> str:
    return f"{vertex.name} {_shape(vertex)}"


def _shape(vertex: Vertex) -> str:
    return f"{vertex.dtype} {show_shape(vertex.bound)}, {show_bytes(vertex.nbytes)}"
