"""A job that is made in Python: of the text of a program, with more statements, or trained."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import numpy as np

from einmpi.arguments import named_values
from einmpi.errors import InputError
from einmpi.files.specs import InputSpec
from einmpi.graph.scalar import unique
from einmpi.job.job import Job, with_settings
from einmpi.job.loop import Batches, StepProgram, numbers_of_steps
from einmpi.job.loop_table import check_rate, has_word
from einmpi.job.program_text import ProgramText, written_training
from einmpi.language.parse import build_graphs
from einmpi.language.statements import Inputs
from einmpi.language.syntax import Source, Statement, statements
from einmpi.language.toml_document import Document, Entry, KeyPath, show
from einmpi.training.settings import Training
from einmpi.training.write_out import WrittenOut


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


# ---- training ------------------------------------------------------------------------------------


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
    program = _program_text(job, batches)
    written = written_training(program, program, training, carry)
    changed = job
    if steps is not None and "steps" not in program.words and has_word(written.text, "steps"):
        changed = replace(changed, sizes={**job.sizes, "steps": steps})
    if isinstance(training.rate, str):
        numbers = StepProgram(job.written, changed.sizes, program.inputs)
        check_rate(numbers, training.place("optimizer", "rate"), Source("rate", training.rate))
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


def _program_text(job: Job, batches: Batches | None) -> ProgramText:
    """Return the program of a job, without statements that the job does not need."""
    specs = {spec.name: spec for spec in job.inputs}
    for vertex in job.written.inputs:
        specs.setdefault(vertex.name, InputSpec(vertex.name, vertex.bound, vertex.dtype))
    items = []
    for item in statements(job.source):
        if item.name in job.written.by_name or not isinstance(item, Statement):
            items.append(item)
    inputs = tuple(specs.values())
    return ProgramText(job.source, inputs, job.sizes, items, parameter_types(job), batches=batches)


# ---- arguments as the tables of a job file -------------------------------------------------------


@dataclass(frozen=True)
class PythonValues(Document):
    """Arguments of a call in place of a TOML file. It has no name: paths start where Python runs.

    A place is what Python would write: `inputs["w"]["shape"][0]`.
    """

    def place(self, path: KeyPath) -> str:
        """Return the argument and the keys that lead to a value."""
        argument, *keys = path
        return str(argument) + "".join(_show_key(key) for key in keys)

    def source(self, path: KeyPath) -> Source:
        """Return a string value as a Source that knows which argument it is in."""
        return Source(self.place(path), str(self.lookup(path)))


def python_values(**arguments: Mapping[str, Any] | None) -> Entry:
    """Return arguments that are mappings as a document with a table for each."""
    data = {}
    for argument, given in arguments.items():
        data[argument] = _as_toml(argument, named_values(argument, given))
    return Entry(PythonValues(name="", text="", data=data, positions={}))


def _show_key(key: str | int) -> str:
    return f"[{key}]" if isinstance(key, int) else f'["{key}"]'


def _as_toml(where: str, value: Any) -> Any:
    """Return a value as tomllib would: only dicts, lists, strings, numbers and truth values.

    Entries that are None are left out. A value of another kind stays: who reads it refuses it.
    """
    if isinstance(value, Mapping):
        entries = {}
        for key, entry in named_values(where, value).items():
            if entry is not None:
                entries[key] = _as_toml(f"{where}{_show_key(key)}", entry)
        return entries
    if isinstance(value, list | tuple):
        return [_as_toml(f"{where}[{number}]", entry) for number, entry in enumerate(value)]
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return np.dtype(value).name
    return value if isinstance(value, str) else _Other(value)


class _Other:
    """A value of a kind that no job file has; messages show its type."""

    def __init__(self, value: object) -> None:
        self.type_name = type(value).__name__

    def __str__(self) -> str:
        return show(self.type_name).strip("'")
