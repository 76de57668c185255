"""The text of a program becomes a Job, without a job file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from einmpi.files.specs import InputSpec
from einmpi.job.job import Job, with_settings
from einmpi.language.parse import build_graphs
from einmpi.language.statements import Inputs
from einmpi.language.syntax import Source, Statement, statements


def program_job(
    text: str,
    inputs: Inputs,
    sizes: Mapping[str, int],
    dtype: str,
    outputs: Sequence[str] | None,
    specs: Sequence[InputSpec] = (),
    roles: Mapping[str, tuple[str, ...]] | None = None,
) -> Job:
    """Return the job of a program with these inputs, by shape and dtype, and sizes.

    `specs` are its parameters, and the inputs that are generated or read from files.
    """
    source = Source("program", text)
    tensors = dict(inputs)
    types = {}
    for spec in specs:
        tensors[spec.name] = spec.shape or (), spec.dtype or ""
        if spec.value is not None:
            types[spec.name] = type(spec.value)
    graphs = build_graphs(source, tensors, sizes, outputs, parameters=types)
    return Job(
        title="",
        path="",
        source=source,
        dtype=dtype,
        sizes=sizes,
        inputs=tuple(specs),
        outputs=(),
        roles=roles or {},
        graph=graphs.rewritten,
        written=graphs.written,
    )


def extended_job(job: Job, text: str, inputs: Inputs, outputs: Sequence[str]) -> Job:
    """Return a job whose program has more statements and inputs, and these outputs.

    Results are not written to files. Statements that the job does not need are left out.
    """
    source = replace(job.source, text=f"{job.source.text}\n{text}")
    own_statements = len(statements(job.source))
    items = []
    for number, item in enumerate(statements(source)):
        is_needed = item.name in job.written.by_name or number >= own_statements
        if is_needed or not isinstance(item, Statement):
            items.append(item)
    tensors = {**inputs, **inputs_of(job)}
    types = parameter_types(job)
    graphs = build_graphs(source, tensors, job.sizes, outputs, job.strict, items, types)
    changed = replace(
        job,
        source=source,
        outputs=(),
        half="float32",
        graph=graphs.rewritten,
        written=graphs.written,
    )
    return with_settings(changed, {"half": job.half})


def inputs_of(job: Job) -> dict[str, tuple[Sequence[int], str]]:
    """Return the inputs of a job by name, with their shapes and dtypes."""
    tensors: dict[str, tuple[Sequence[int], str]] = {}
    for spec in job.inputs:
        tensors[spec.name] = spec.shape or (), spec.dtype or ""
    for vertex in job.written.inputs:
        tensors[vertex.name] = vertex.bound, vertex.dtype
    return tensors


def parameter_types(job: Job) -> dict[str, type]:
    """Return the inputs of a job that are numbers, with their types in Python."""
    return {spec.name: type(spec.value) for spec in job.inputs if spec.value is not None}
