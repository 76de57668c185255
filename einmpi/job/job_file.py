"""A job file in TOML becomes a Job."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from einmpi.errors import InputError, nearest_of
from einmpi.files.specs import InputSpec, Number, OutputSpec
from einmpi.graph.labels import MAX_EXTENT, unique
from einmpi.job.backends import backend_names
from einmpi.job.history import check_separate_histories
from einmpi.job.inputs import (
    check_dtype,
    check_name,
    read_dtype,
    read_inputs,
)
from einmpi.job.job import SHARED_MODES, Job, with_half
from einmpi.job.loop_table import LoopTable
from einmpi.job.outputs import check_outputs, read_outputs
from einmpi.job.parameters import Settings, read_parameters
from einmpi.job.program_text import ProgramText, read_program_text
from einmpi.job.recompute import checked_recompute
from einmpi.job.several_loops import maker_of, read_loop_texts, with_results
from einmpi.job.tensors import Describe, check_no_batches, described, read_roles, read_tensors
from einmpi.job.train_table import ReadInputs
from einmpi.kernels.cpu.blas_library.records import AUTO_BLAS, BLAS_NAMES
from einmpi.language.half_steps import HALF_MODES
from einmpi.language.syntax import Source
from einmpi.language.toml_document import (
    Document,
    KeyPath,
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
from einmpi.planner.moving.overlap import MODES
from einmpi.planner.saving_memory.recompute import AUTO
from einmpi.planner.strategies import DEFAULT_STRATEGY, STRATEGIES
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
    "train",
)
_PLAN_KEYS = ("strategy", "memory", "machine", "recompute")
_RUN_KEYS = ("backend", "fast_math", "strict", "half", "scratch", "blas", "overlap", "shared")


@dataclass(frozen=True)
class JobSettings:
    """What a job file says of its program, or of the programs of all its loops."""

    title: str
    path: str
    dtype: str
    strategy: str
    memory: int | None
    recompute: object  # as it is written
    recompute_place: str
    machine: str | None
    backend: str
    fast_math: bool
    strict: bool
    scratch: str | None
    blas: str
    blas_place: str
    overlap: str
    shared: str
    roles: Mapping[str, tuple[str, ...]]

    def make_job(
        self,
        program: ProgramText,
        outputs: tuple[OutputSpec, ...],
        names: Sequence[str] | None,
        results: tuple[str, ...] | None = None,
    ) -> Job:
        """Return the job of a program that computes these tensors, by default its last ones.

        `results` are those of its loop, if it is trained or there are several loops.
        """
        graphs = program.graphs(names, self.strict)
        check_outputs(outputs, graphs.rewritten)
        loop = program.loop(graphs.written)
        recompute = None
        if program.loop_table is not None:
            recompute = program.loop_table.read_recompute(graphs.written)
        if recompute is None:
            recompute = checked_recompute(self.recompute_place, self.recompute, graphs.written)
        return Job(
            title=self.title,
            path=self.path,
            source=program.source,
            dtype=self.dtype,
            sizes=program.sizes,
            inputs=program.inputs,
            outputs=outputs,
            strategy=self.strategy,
            memory=self.memory,
            recompute=recompute,
            backend=self.backend,
            fast_math=self.fast_math,
            roles=self.roles,
            graph=graphs.rewritten,
            written=graphs.written,
            machine=self.machine,
            scratch=self.scratch,
            blas=self.blas,
            blas_place=self.blas_place,
            overlap=self.overlap,
            shared=self.shared,
            strict=self.strict,
            loop=None if loop is None else replace(loop, results=results),
        )


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
    sizes = _read_sizes(document, settings)
    parameters = read_parameters(document, sizes, settings)
    inputs = read_tensors(document, sizes, chosen_dtype, describe, parameters)
    inputs += parameters
    if dtype and not any(spec.random and spec.dtype == dtype for spec in inputs):
        what = f"dtype {dtype} would change nothing"
        expected = "a generated input without a dtype of its own"
        raise InputError(document.name, what, expected)

    def read_others(path: KeyPath) -> list[InputSpec]:
        specs = read_inputs(document, path, sizes, chosen_dtype)
        return [described(spec, describe) for spec in specs]

    job_settings = _read_job_settings(document, chosen_dtype)
    half = choice(document, ("run", "half"), HALF_MODES, HALF_MODES[0])
    if isinstance(document.data.get("loop"), list):
        if "train" in document.data:
            what = "there is a [train] besides several loops"
            raise InputError(document.place(("train",)), what, "[loop.train] after a [[loop]]")
        programs = read_loop_texts(document, inputs, sizes, steps, read_others)
        job = _job_of_loops(document, inputs, programs, job_settings)
    else:
        loop_table = _read_loop_table(document, steps, read_others)
        if loop_table is None:
            check_no_batches(inputs)
        source = _read_program(document)
        program = read_program_text(source, inputs, sizes, loop_table, steps)
        outputs = read_outputs(document, (*program.computed, *program.carried))
        names = [spec.name for spec in outputs if spec.name not in program.carried]
        results = None
        if not outputs and program.results is not None:
            results = program.results
            names += results
        if outputs or results is not None:
            names += [name for name in program.needed_by_loop() if name not in names]
        job = job_settings.make_job(program, outputs, names or None, results)
    check_separate_histories(job.histories, job.inputs, job.outputs)
    return with_half(job, half)


def _job_of_loops(
    document: Document,
    inputs: Sequence[InputSpec],
    programs: Sequence[ProgramText],
    job_settings: JobSettings,
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
        loops.append(job_settings.make_job(text.program, tuple(own), names, text.results))
    return replace(loops[0], inputs=tuple(inputs), outputs=outputs, loops=tuple(loops))


def _read_job_settings(document: Document, dtype: str) -> JobSettings:
    stem = os.path.splitext(os.path.basename(document.name))[0]
    machine = get(document, ("plan", "machine"), str)
    if machine is not None:
        machine = relative_to_document(document, machine)
    backends = backend_names()
    given = lookup(document, ("plan", "recompute"))
    return JobSettings(
        title=get(document, ("title",), str) or stem,
        path=document.name,
        dtype=dtype,
        strategy=choice(document, ("plan", "strategy"), STRATEGIES, DEFAULT_STRATEGY),
        memory=_read_memory(document),
        recompute=AUTO if given is None else given,
        recompute_place=document.place(("plan", "recompute")),
        machine=machine,
        backend=choice(document, ("run", "backend"), backends, backends[0]),
        fast_math=get(document, ("run", "fast_math"), bool) or False,
        strict=get(document, ("run", "strict"), bool) or False,
        scratch=_read_scratch(document),
        blas=choice(document, ("run", "blas"), BLAS_NAMES, AUTO_BLAS),
        blas_place=document.place(("run", "blas")),
        overlap=choice(document, ("run", "overlap"), MODES, MODES[0]),
        shared=choice(document, ("run", "shared"), SHARED_MODES, SHARED_MODES[0]),
        roles=read_roles(document),
    )


def _read_loop_table(
    document: Document, steps: int | None, read_others: ReadInputs
) -> LoopTable | None:
    if "loop" in document.data:
        return LoopTable(document, ("loop",), read_others)
    if "train" in document.data:
        what = "there is a [train], but no step is repeated"
        raise InputError(document.place(("train",)), what, "a [loop]")
    if steps is not None:
        raise InputError(document.name, "there is no [loop] to run for --steps", "a [loop]")
    return None


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
            what = f"there is no size or parameter {show(name)} to set"
            expected = nearest_of(known, name)
            if not known:
                expected = "a job with [sizes] or [parameters]; this one has neither"
            raise InputError(document.name, what, expected)


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
