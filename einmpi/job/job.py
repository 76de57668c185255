"""A job file in TOML becomes a Job: its graph, where tensors come from and go, how it runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from einmpi.errors import InputError, nearest_of, one_of
from einmpi.files.load import rows_of_chunks
from einmpi.files.specs import InputSpec, Number, OutputSpec
from einmpi.graph.eingraph import EinGraph
from einmpi.graph.labels import MAX_EXTENT, unique
from einmpi.job.backends import backend_names
from einmpi.job.history import HistorySpec, check_separate_histories
from einmpi.job.inputs import (
    check_dtype,
    check_name,
    check_parts,
    in_batches,
    read_dtype,
    read_inputs,
)
from einmpi.job.loop import Loop
from einmpi.job.loop_table import LoopTable
from einmpi.job.outputs import check_outputs, read_outputs
from einmpi.job.parameters import Settings, read_parameters
from einmpi.job.program_text import ProgramText, read_program_text
from einmpi.job.several_loops import maker_of, read_loop_texts, with_results
from einmpi.language.half_steps import HALF_MODES, round_every_step
from einmpi.language.parse import rewrite
from einmpi.language.syntax import Source
from einmpi.language.toml_document import (
    Document,
    choice,
    get,
    kind_of,
    lookup,
    read_document,
    relative_to_document,
    show,
    table,
    whole_number,
)
from einmpi.late import late
from einmpi.planner.strategies import DEFAULT_STRATEGY, ROLES, STRATEGIES
from einmpi.units import check_bytes, parse_bytes

_KEYS = (
    "title",
    "dtype",
    "program",
    "sizes",
    "parameters",
    "inputs",
    "outputs",
    "plan",
    "run",
    "roles",
    "loop",
)
_PLAN_KEYS = ("strategy", "memory", "machine")
_RUN_KEYS = ("backend", "fast_math", "strict", "half", "scratch")

# Looks up the shape and dtype of an input in its file.
Describe: TypeAlias = Callable[[InputSpec], tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class Job:
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
    strategy : str
        How the plan is chosen.
    memory : int or None
        The limit in bytes per rank.
    backend : str
        What computes: the name of a backend.
    fast_math : bool
        Whether faster, less exact arithmetic is allowed.
    roles : mapping of str to tuple of str
        The labels that have each role.
    graph : EinGraph
        The program as a graph of EinSums, rewritten to be cheap. It is what is planned and run.
    written : EinGraph
        The same program before it is rewritten. The reference evaluates it.
    machine : str or None
        The file with measured times of a machine.
    scratch : str or None
        The folder for tensors that do not fit into memory; None for the system's default.
    strict : bool
        Whether only rewrites are made that are exact for all values, inf and nan included.
    half : str
        "float32" if float16 and bfloat16 are computed in float32 and rounded once a statement,
        "steps" if they are rounded after every operation.
    loop : Loop or None
        How the program is repeated; None if it runs once.
    loops : tuple of Job
        If several loops follow one another, each as a job of its own. `source`, `graph`, `written`
        and `loop` are then those of the first one.

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
    strategy: str
    memory: int | None
    backend: str
    fast_math: bool
    roles: Mapping[str, tuple[str, ...]]
    graph: EinGraph
    written: EinGraph
    machine: str | None = None
    scratch: str | None = None
    strict: bool = False
    half: str = "float32"
    loop: Loop | None = None
    loops: tuple[Job, ...] = ()

    @property
    def as_computed(self) -> EinGraph:
        """The program as written, with the casts that `half` asks for."""
        if self.half == "steps":
            return round_every_step(self.written)
        return self.written

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
        found = []
        for job in self.loops:
            with_settings = replace(
                job,
                strategy=self.strategy,
                memory=self.memory,
                backend=self.backend,
                fast_math=self.fast_math,
                machine=self.machine,
                scratch=self.scratch,
            )
            found.append(with_settings)
        return tuple(found)

    def __post_init__(self) -> None:
        if self.strict and self.fast_math:
            raise InputError(
                self.path or self.source.name,
                "strict and fast_math are both true",
                "at most one of them",
            )

    def __repr__(self) -> str:
        inputs = ", ".join(vertex.name for vertex in self.graph.inputs)
        outputs = ", ".join(self.graph.outputs)
        return f"<Job {self.title or self.source.name}: {inputs} → {outputs}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        text: str = late("job_html")(self)
        return text


def read_job(
    path: str | os.PathLike[str],
    describe: Describe,
    settings: Settings | None = None,
    dtype: str | None = None,
    steps: int | None = None,
) -> Job:
    """Read a job file.

    `settings` replace sizes and parameters of the file, `dtype` its dtype, `steps` those of its
    loop.
    """
    document = read_document(os.fspath(path))
    table(document, (), _KEYS)
    table(document, ("plan",), _PLAN_KEYS)
    table(document, ("run",), _RUN_KEYS)
    own_dtype = read_dtype(document, ("dtype",)) or "float64"
    if dtype:
        check_dtype(document.name, dtype)
    chosen_dtype = dtype or own_dtype
    settings = settings or {}
    _check_settings(document, settings)
    chosen_sizes = _read_sizes(document, settings)
    parameters = read_parameters(document, chosen_sizes, settings)
    inputs = []
    for spec in read_inputs(document, chosen_sizes, chosen_dtype):
        if spec.file is not None:
            shape, stored_dtype = describe(spec)
            spec = replace(spec, shape=shape, dtype=stored_dtype)
        spec = in_batches(document, spec, chosen_sizes)
        if spec.rows is not None:
            spec = replace(spec, chunk_rows=rows_of_chunks(spec))
        check_parts(spec, len(spec.shape or ()))
        if any(spec.name == known.name for known in parameters):
            what = f"{spec.name} is a parameter and cannot name a tensor"
            raise InputError(spec.place, what, "another name")
        inputs.append(spec)
    inputs += parameters
    strict = get(document, ("run", "strict"), bool) or False
    half = choice(document, ("run", "half"), HALF_MODES, HALF_MODES[0])
    stem = os.path.splitext(os.path.basename(document.name))[0]
    machine = get(document, ("plan", "machine"), str)
    strategy = choice(document, ("plan", "strategy"), STRATEGIES, DEFAULT_STRATEGY)
    memory = _read_memory(document)
    backends = backend_names()
    backend = choice(document, ("run", "backend"), backends, backends[0])
    fast_math = get(document, ("run", "fast_math"), bool) or False
    roles = _read_roles(document)
    scratch = _read_scratch(document)

    def make_job(
        program: ProgramText,
        outputs: tuple[OutputSpec, ...],
        names: Sequence[str] | None,
        results: tuple[str, ...] | None = None,
    ) -> Job:
        """Return the job of a program that computes these tensors, by default its last ones."""
        graphs = program.graphs(names, strict)
        check_outputs(outputs, graphs.rewritten)
        loop = program.loop(graphs.written)
        return Job(
            title=get(document, ("title",), str) or stem,
            path=document.name,
            source=program.source,
            dtype=chosen_dtype,
            sizes=program.sizes,
            inputs=program.inputs,
            outputs=outputs,
            strategy=strategy,
            memory=memory,
            backend=backend,
            fast_math=fast_math,
            roles=roles,
            graph=graphs.rewritten,
            written=graphs.written,
            machine=None if machine is None else relative_to_document(document, machine),
            scratch=scratch,
            strict=strict,
            loop=None if loop is None else replace(loop, results=results),
        )

    if isinstance(document.data.get("loop"), list):
        programs = read_loop_texts(document, inputs, chosen_sizes, steps)
        job = _job_of_loops(document, inputs, programs, make_job)
    else:
        loop_table = _read_loop_table(document, steps)
        if loop_table is None:
            _check_no_batches(inputs)
        source = _read_program(document)
        program = read_program_text(source, inputs, chosen_sizes, loop_table, steps)
        outputs = read_outputs(document, (*program.computed, *program.carried))
        names = [spec.name for spec in outputs if spec.name not in program.carried]
        if outputs:
            names += [name for name in program.needed_by_loop() if name not in names]
        job = make_job(program, outputs, names or None)
    check_separate_histories(job.histories, job.inputs, job.outputs)
    return with_half(job, half)


def _job_of_loops(
    document: Document,
    inputs: Sequence[InputSpec],
    programs: Sequence[ProgramText],
    make_job: Callable[..., Job],
) -> Job:
    """Return the job whose loops have these programs."""
    made = [name for program in programs for name in (*program.computed, *program.carried)]
    outputs = read_outputs(document, tuple(made))
    loops: list[Job] = []
    for number, text in enumerate(with_results(programs, outputs)):
        own = []
        for spec in outputs:
            if maker_of(programs, spec.name) == number:
                own.append(spec)
        names = unique(text.results, text.program.needed_by_loop())
        loops.append(make_job(text.program, tuple(own), names, text.results))
    return replace(loops[0], inputs=tuple(inputs), outputs=outputs, loops=tuple(loops))


def with_strict(job: Job, strict: bool) -> Job:
    """Return the job with this setting of `strict`, and with the graph that it gives."""
    loops = tuple(with_strict(loop, strict) for loop in job.loops)
    graph = rewrite(job.source, job.as_computed, strict)
    return replace(job, strict=strict, graph=graph, loops=loops)


def with_half(job: Job, half: str) -> Job:
    """Return the job with this setting of `half`, and with the graph that it gives."""
    if half == job.half:
        return job
    if half not in HALF_MODES:
        raise InputError("half", f"half is {half!r:.60}", one_of(HALF_MODES, str(half)))
    loops = tuple(with_half(loop, half) for loop in job.loops)
    changed = replace(job, half=half, loops=loops)
    return replace(changed, graph=rewrite(job.source, changed.as_computed, job.strict))


def _read_loop_table(document: Document, steps: int | None) -> LoopTable | None:
    if "loop" in document.data:
        return LoopTable(document)
    if steps is not None:
        raise InputError(document.name, "there is no [loop] to run for --steps", "a [loop]")
    return None


def _check_no_batches(inputs: Iterable[InputSpec]) -> None:
    for spec in inputs:
        if spec.rows is not None:
            what = f"{spec.name} comes in batches, but no step is repeated"
            raise InputError(spec.place, what, "a [loop]")


def _read_program(document: Document) -> Source:
    if get(document, ("program",), str) is None:
        raise InputError(
            document.name, "there is no program", 'program = "NAME[labels] = expression"'
        )
    return document.source(("program",))


def _check_settings(document: Document, settings: Settings) -> None:
    known = [*table(document, ("sizes",)), *table(document, ("parameters",))]
    for name in settings:
        if name not in known:
            raise InputError(
                document.name,
                f"there is no size or parameter {show(name)} to set",
                nearest_of(known, name),
            )


def _read_sizes(document: Document, overrides: Settings) -> dict[str, int]:
    given = table(document, ("sizes",))
    sizes: dict[str, int] = {}
    for name, written in given.items():
        path = ("sizes", name)
        place = document.place(path)
        check_name(place, name, "a size", {})
        if name in overrides:
            value: Number | None = overrides[name]
            what = f"size {name} is set to {show(value)}"
        else:
            value = whole_number(document, path, sizes)
            what = f"size {name} is {show(written if value is None else value)}"
        if type(value) is not int or not 1 <= value <= MAX_EXTENT:
            raise InputError(place, what, f"an integer from 1 to 2**39 = {MAX_EXTENT}")
        sizes[name] = value
    return sizes


def _read_memory(document: Document) -> int | None:
    path = ("plan", "memory")
    place = document.place(path)
    given = lookup(document, path)
    if given is None:
        return None
    if isinstance(given, str):
        return parse_bytes(given, place)
    if type(given) is int:
        return check_bytes(given, place)
    raise InputError(place, f"memory is {kind_of(given)}", 'a string such as "4 GiB" or an integer')


def _read_scratch(document: Document) -> str | None:
    folder = get(document, ("run", "scratch"), str)
    if not folder:
        return folder
    return os.path.join(os.path.dirname(document.name), os.path.expanduser(folder))


def _read_roles(document: Document) -> dict[str, tuple[str, ...]]:
    roles: dict[str, tuple[str, ...]] = {}
    for role in table(document, ("roles",), ROLES):
        labels = get(document, ("roles", role), list) or []
        for number, label in enumerate(labels):
            if type(label) is not str or not label.isidentifier():
                raise InputError(
                    document.place(("roles", role, number)),
                    f"{show(label)} is not a label",
                    f'a list of labels such as {role} = ["b"]',
                )
        roles[role] = tuple(labels)
    return roles
