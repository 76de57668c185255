"""A job made in Python with the statements that train it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from einmpi.errors import InputError
from einmpi.files.specs import InputSpec
from einmpi.graph.labels import unique
from einmpi.job.batches import Batches
from einmpi.job.job import Job
from einmpi.job.loop import STEP, StepProgram, numbers_of_steps
from einmpi.job.loop_table import has_word
from einmpi.job.program import extended_job, inputs_of, parameter_types
from einmpi.job.train_table import check_rate
from einmpi.language.parse import parse_program
from einmpi.language.syntax import Source, Statement, statements
from einmpi.training.settings import Training
from einmpi.training.write_out import Program, WrittenOut, write_out


def trained_job(
    job: Job,
    training: Training,
    carry: Mapping[str, str],
    steps: int | None,
    batches: Batches | None,
) -> tuple[Job, WrittenOut]:
    """Return a job whose program has the statements of a training, and what these carry.

    `carry` is what the loop carries besides, `steps` the number of steps, if it is known.
    """
    if job.loop is not None and job.loop.written_out:
        raise InputError(training.place(), "the job has a [train]", "einmpi.loop, which runs it")
    text = job.source.text
    words = set(re.findall(r"[^\W\d]\w*", text))
    if STEP in job.sizes or any(vertex.name == STEP for vertex in job.written.computed):
        what = f"{STEP} is not the number of the step in this program, and training needs that"
        raise InputError(training.place(), what, f"another name than {STEP} in the program")
    items = []
    for item in statements(job.source):
        if item.name in job.written.by_name or not isinstance(item, Statement):
            items.append(item)

    def dtypes_of(changed_text: str) -> dict[str, str]:
        source = replace(job.source, text=changed_text)
        types = parameter_types(job)
        graph = parse_program(source, inputs_of(job), job.sizes, parameters=types)
        return {vertex.name: vertex.dtype for vertex in graph.vertices}

    written = write_out(
        training,
        Program(
            graph=job.written,
            items=items,
            taken={*words, *job.sizes, *(spec.name for spec in job.inputs)},
            dtypes_of=dtypes_of,
            carried=tuple(carry),
            batched=() if batches is None else batches.names,
            constants=tuple(parameter_types(job)),
        ),
    )
    changed = job
    if steps is not None and "steps" not in words and has_word(written.text, "steps"):
        changed = replace(changed, sizes={**job.sizes, "steps": steps})
    _check_rate(changed, training)
    if written.program is not None:
        changed = replace(changed, source=replace(job.source, text=written.program))
    inputs: dict[str, tuple[Sequence[int], str]] = {}
    specs = []
    for state in written.state:
        inputs[state.name] = state.shape, state.dtype
        specs.append(InputSpec(state.name, state.shape, state.dtype, random="zeros"))
    for name in numbers_of_steps(batches is not None):
        if name not in job.written.by_name and has_word(written.text, name):
            inputs[name] = (), "int64"
    becoming = [name for name in carry.values() if name in job.written.by_name]
    outputs = unique(job.written.outputs, becoming, written.carry.values())
    found = extended_job(changed, written.text, inputs, outputs)
    return replace(found, inputs=(*found.inputs, *specs)), written


def _check_rate(job: Job, training: Training) -> None:
    """Refuse a rate that is no expression of numbers."""
    if not isinstance(training.rate, str):
        return
    specs = {spec.name: spec for spec in job.inputs}
    for vertex in job.written.inputs:
        if vertex.name not in specs:
            specs[vertex.name] = InputSpec(vertex.name, vertex.bound, vertex.dtype)
    program = StepProgram(job.written, job.sizes, tuple(specs.values()))
    check_rate(program, training.place("optimizer", "rate"), Source("rate", training.rate))
