"""The Job: what to compute, where tensors come from and go, how it runs; jobs made in Python."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np

from einmpi.arguments import named_values
from einmpi.errors import InputError
from einmpi.files.formats import find
from einmpi.files.reading import decoded_bytes, has_dataset, stored_form
from einmpi.files.specs import InputSpec, OutputSpec
from einmpi.graph.eingraph import EinGraph, StoredForm
from einmpi.graph.scalar import unique
from einmpi.job.batches import Batches
from einmpi.job.loop import NUMBERS_OF_STEPS, Loop, StepProgram, numbers_of_steps
from einmpi.job.loop_table import check_rate, has_word
from einmpi.job.outputs import HistorySpec
from einmpi.job.program_text import ProgramText, parameter_types, written_training
from einmpi.job.settings import (
    BACKENDS,
    SETTINGS,
    SHARED_MODES,
    Settings,
    checked_recompute,
    with_settings_listed,
)
from einmpi.language.macro_calls import gradients_by
from einmpi.language.parse import build_graphs, rewrite
from einmpi.language.scope import values_in
from einmpi.language.statements import Inputs, round_every_step
from einmpi.language.syntax import Source, Statement, statements
from einmpi.language.toml_document import Document, Entry, KeyPath, show
from einmpi.late import late
from einmpi.planner.moving.overlap import MODES
from einmpi.planner.plan import AUTO
from einmpi.training.settings import Training
from einmpi.training.write_out import WrittenOut

if TYPE_CHECKING:
    from einmpi.planner.machine import Machine
    from einmpi.planner.plan import Options

# What each of several loops has of its own: the graph of a step depends on it, or its names do.
_OF_EACH_LOOP = ("strict", "half", "recompute")


@with_settings_listed
@dataclass(frozen=True)
class Job(Settings):
    """A checked description of what to compute. `einmpi.load` and `einmpi.program` make it.

    Attributes
    ----------
    title : str
        What the job is called in output.
    path : str
        The job file; empty for a job made by `einmpi.program`.
    source : Source
        The text of the program.
    dtype : str
        The dtype of generated inputs that do not name their own.
    sizes : mapping of str to int
        The named sizes, evaluated.
    inputs : tuple of InputSpec
        Where tensors come from.
    outputs : tuple of OutputSpec
        Where results go.
    roles : mapping of str to tuple of str
        The labels that have each role.
    graph : EinGraph
        The program as a graph of EinSums, rewritten to be cheap. It is what is planned and run.
    written : EinGraph
        The same program before it is rewritten. The reference evaluates it.
    loop : Loop or None
        How the program is repeated; None if it runs once.
    loops : tuple of Job
        If several loops follow one another, each as a job of its own. `source`, `graph`, `written`
        and `loop` are then those of the first one.
    formats : mapping of str to str
        Tensors that are "dense", "sparse" or "like" another one, whatever follows from the program.
    expected : tuple of InputSpec
        The sparse tensors that the job was made with, which a plan assumes: how much they store.
    {settings}

    Raises
    ------
    InputError
        `strict` and `fast_math` are both set.

    Examples
    --------
    >>> job = einmpi.program("n = sum(X[i]**2)", X=(2,))
    >>> print(job.graph["n"])
    n ← Σ[i](X[i] ** 2)
    """

    title: str
    path: str
    source: Source
    dtype: str
    sizes: Mapping[str, int]
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    roles: Mapping[str, tuple[str, ...]]
    graph: EinGraph
    written: EinGraph
    blas_place: str = field(default="", compare=False, repr=False)  # in the job file
    loop: Loop | None = None
    loops: tuple[Job, ...] = ()
    formats: Mapping[str, str] = field(default_factory=dict)
    expected: tuple[InputSpec, ...] = ()

    @property
    def as_computed(self) -> EinGraph:
        """The program as written, with the casts that `half` asks for."""
        if self.half == "steps":
            return round_every_step(self.written)
        return self.written

    @property
    def gradients(self) -> dict[str, str]:
        """The statements that are a derivative by a tensor, and that tensor."""
        return gradients_by(statements(self.source))

    def rewritten(self, written: EinGraph) -> EinGraph:
        """Return the graph that is planned for this job, or for a part of it as written."""
        again = () if isinstance(self.recompute, str) else self.recompute
        return rewrite(self.source, written, self.strict, again)

    @property
    def histories(self) -> tuple[HistorySpec, ...]:
        """The files that get the values that loops record."""
        found = []
        for job in self.loops or (self,):
            if job.loop is not None and job.loop.history is not None:
                found.append(job.loop.history)
        return tuple(found)

    def one_after_another(self) -> tuple[Job, ...]:
        """Return the loops as jobs with the settings of this one; itself if it has only one."""
        if not self.loops:
            return (self,)
        settings = {}
        for name in SETTINGS:
            if name not in _OF_EACH_LOOP:
                settings[name] = getattr(self, name)
        return tuple(replace(job, **settings, blas_place=self.blas_place) for job in self.loops)

    def __post_init__(self) -> None:
        if self.strict and self.fast_math:
            raise InputError(
                self.path or self.source.name,
                "strict and fast_math are both true",
                "at most one of them",
            )
        if self.reproducible and not BACKENDS[self.backend].is_on_host:
            raise InputError(
                self.path or self.source.name,
                f"reproducible is true with the backend {self.backend}",
                "the backend numpy",
            )

    def __repr__(self) -> str:
        inputs = ", ".join(vertex.name for vertex in self.graph.inputs)
        outputs = ", ".join(self.graph.outputs)
        return f"<Job {self.title or self.source.name}: {inputs} → {outputs}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        text: str = late("job_html")(self)
        return text


def may_share_memory(job: Job) -> bool:
    """Return whether the ranks of a node may share memory, if the system lets them."""
    return job.shared == SHARED_MODES[0] and BACKENDS[job.backend].is_on_host


def with_settings(job: Job, given: Mapping[str, Any], as_flags: bool = False) -> Job:
    """Return the job with settings that keywords or flags give, and with the graph they make.

    All are checked. Those that are None stay as the job says.
    """
    values: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        where = SETTINGS[name].flag if as_flags else name
        values[name] = SETTINGS[name].check(where, value)
        if name == "recompute":
            values[name] = checked_recompute(where, value, job.written)
        elif name == "blas":
            values["blas_place"] = where
    if not values:
        return job
    loops = tuple(with_settings(loop, given, as_flags) for loop in job.loops)
    changed = replace(job, **values, loops=loops)
    if all(getattr(changed, name) == getattr(job, name) for name in _OF_EACH_LOOP):
        return changed
    return replace(changed, graph=changed.rewritten(changed.as_computed))


def options_of(job: Job, nodes: int = 1, **settings: Any) -> Options:
    """Return what a job asks of a plan; settings take precedence over those of the job."""
    # Imported here so that a job can be made without the planner.
    from einmpi.planner.plan import Options

    job = with_settings(job, settings)
    used_inputs = [spec for spec in job.inputs if spec.name in job.graph.by_name]
    pins: dict[str, tuple[int, ...]] = {}
    places: dict[str, str] = {}
    tensors: list[InputSpec | OutputSpec] = [*used_inputs, *job.outputs]
    for each in tensors:
        if each.parts is not None:
            pins[each.name] = each.parts
            places[each.name] = each.place
    for name, parts in (job.pin or {}).items():
        pins[name] = parts
        places.pop(name, None)
    backend = BACKENDS[job.backend]
    decoded = 0
    if job.memory is not None and backend.is_on_host:
        decoded = max(map(decoded_bytes, used_inputs), default=0)
    return Options(
        strategy=job.strategy,
        memory=job.memory,
        decoded=decoded,
        recompute=job.recompute,
        chain_bytes=backend.chain_bytes,
        operations_of_a_byte=backend.operations_of_a_byte,
        resident=tuple(spec.name for spec in used_inputs if spec.resident is True),
        fitting=tuple(spec.name for spec in used_inputs if spec.resident == "fit"),
        pins=pins,
        roles=job.roles,
        nodes=nodes,
        machine=machine_of(job),
        overlap=job.overlap == MODES[0],
        reproducible=job.reproducible,
        files=tuple(spec.name for spec in used_inputs if spec.file is not None),
        stored={} if job.loop is not None else _stored_forms(used_inputs),
        pin_places=places,
    )


def _stored_forms(inputs: Iterable[InputSpec]) -> dict[str, StoredForm]:
    """Return how inputs are stored that every run reads from their files."""
    found = {}
    for spec in inputs:
        if has_dataset(spec) and not spec.resident and spec.rows is None:
            found[spec.name] = stored_form(find(spec))
    return found


def machine_of(job: Job) -> Machine | None:
    """Return the machine whose times are minimised; None if bytes are."""
    from einmpi.planner.machine import read_machine

    machine = job.machine
    if isinstance(machine, str):
        machine = read_machine(machine)
    if machine is None or may_share_memory(job):
        return machine
    return replace(machine, shared=False)


def loop_of(job: Job) -> Loop:
    """Return the loop of a job that has one."""
    assert job.loop is not None, f"{job} has no loop"
    return job.loop


# ---- programs ------------------------------------------------------------------------------------
#
# Jobs that are made in Python: of the text of a program, with more statements, or trained.


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
    for spec in specs:
        tensors[spec.name] = spec.shape or (), spec.dtype or ""
    items = statements(source)
    known = {*tensors, *sizes, *(item.name for item in items)}
    if any(name in text for name in NUMBERS_OF_STEPS):
        for name in values_in(items).intersection(NUMBERS_OF_STEPS).difference(known):
            tensors[name] = (), "int64"  # a loop gives it, or a call
    types = parameter_types(specs)
    graphs = build_graphs(source, tensors, sizes, outputs, items=items, parameters=types)
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
    program = _program_text(job)
    source = replace(job.source, text=f"{job.source.text}\n{text}")
    added = statements(source)[len(statements(job.source)) :]
    new_inputs = [InputSpec(name, tuple(shape), dtype) for name, (shape, dtype) in inputs.items()]
    extended = replace(
        program,
        source=source,
        inputs=(*new_inputs, *program.inputs),
        items=[*program.items, *added],
    )
    graphs = extended.graphs(outputs, job.strict)
    changed = replace(
        job,
        source=source,
        outputs=(),
        half="float32",
        recompute=AUTO,
        graph=graphs.rewritten,
        written=graphs.written,
    )
    return with_settings(changed, {"half": job.half, "recompute": job.recompute})


def with_numbers_of_steps(job: Job, has_batches: bool) -> Job:
    """Return the job of a loop, in which `step`, and with batches `rows` and `epoch`, are numbers.

    A program that is written in Python is read before its loop is known: it may have taken such a
    name in brackets for a label.
    """
    known = {*job.sizes, *(spec.name for spec in job.inputs), *job.written.by_name}
    known.update(item.name for item in statements(job.source))
    inputs: dict[str, tuple[Sequence[int], str]] = {}
    for name in numbers_of_steps(has_batches):
        if name not in known and has_word(job.source.text, name):
            inputs[name] = (), "int64"
    return extended_job(job, "", inputs, job.written.outputs) if inputs else job


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
    for rule in training.rules:
        if isinstance(rule.rate, str):
            numbers = StepProgram(job.written, changed.sizes, program.inputs)
            check_rate(numbers, training.place(*rule.keys, "rate"), Source("rate", rule.rate))
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


def _program_text(job: Job, batches: Batches | None = None) -> ProgramText:
    """Return the program of a job, without statements that the job does not need."""
    specs = {spec.name: spec for spec in job.inputs}
    for vertex in job.written.inputs:
        specs.setdefault(vertex.name, InputSpec(vertex.name, vertex.bound, vertex.dtype))
    items = []
    for item in statements(job.source):
        if item.name in job.written.by_name or not isinstance(item, Statement):
            items.append(item)
    inputs = tuple(specs.values())
    types = parameter_types(inputs)
    return ProgramText(job.source, inputs, job.sizes, items, types, batches=batches)


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
