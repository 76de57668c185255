"""A job file in TOML becomes a Job; the text of a job file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from einmpi.errors import InputError, nearest_of
from einmpi.files.formats import name_keys
from einmpi.files.reading import rows_of_chunks
from einmpi.files.specs import InputSpec, Number, OutputSpec
from einmpi.graph.scalar import MAX_EXTENT, unique
from einmpi.graph.sparse.desugar import check_formats
from einmpi.job.inputs import (
    GENERATED_KEYS,
    SEPARATE_KEYS,
    check_dtype,
    check_file,
    check_name,
    check_parts,
    in_batches,
    read_dtype,
    read_inputs,
    read_short_form,
)
from einmpi.job.job import Job, with_settings
from einmpi.job.loop_table import LoopTable, ReadInputs
from einmpi.job.outputs import (
    check_outputs,
    check_separate_histories,
    read_outputs,
    refuse_what_is_carried,
)
from einmpi.job.program_text import (
    ProgramText,
    maker_of,
    read_loop_texts,
    read_program_text,
    results_of_loops,
)
from einmpi.job.settings import SETTINGS, checked_recompute, read_settings, settings_in
from einmpi.language.syntax import Source
from einmpi.language.toml_document import Entry, read_document, show, toml_text
from einmpi.planner.strategies import ROLES

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
    "formats",
    "loop",
    "train",
)
MakeJob: TypeAlias = Callable[..., Job]


def read_job(
    path: str | os.PathLike[str],
    describe: Describe,
    settings: Mapping[str, Number | str] | None = None,
    dtype: str | None = None,
    steps: int | None = None,
) -> Job:
    """Read a job file.

    `settings` replace sizes, parameters and files of the job, `dtype` its dtype, `steps` those of
    its loop.
    """
    numbers: dict[str, Number] = {}
    files: dict[str, str] = {}
    for name, value in (settings or {}).items():
        if isinstance(value, str):
            files[name] = value
        else:
            numbers[name] = value
    document = _with_files(read_document(os.fspath(path)), files)
    document.table(_KEYS)
    for name in ("plan", "run"):
        document[name].table(settings_in(name))
    own_dtype = read_dtype(document["dtype"]) or "float64"
    if dtype:
        check_dtype(document.place, dtype)
    chosen_dtype = dtype or own_dtype
    _check_settings(document, numbers)
    sizes = _read_sizes(document, numbers)
    parameters = read_parameters(document, sizes, numbers)
    inputs = read_tensors(document, sizes, chosen_dtype, describe, parameters)
    inputs += parameters
    if dtype and not any(spec.random and spec.dtype == dtype for spec in inputs):
        what = f"dtype {dtype} would change nothing"
        expected = "a generated input without a dtype of its own"
        raise document.wrong(what, expected)

    def read_others(entry: Entry) -> list[InputSpec]:
        specs = read_inputs(entry, sizes, chosen_dtype)
        return [described(spec, describe) for spec in specs]

    make_job = _job_maker(document, chosen_dtype)
    if isinstance(document["loop"].value, list):
        if document["train"].value is not None:
            what = "there is a [train] besides several loops"
            raise document["train"].wrong(what, "[loop.train] after a [[loop]]")
        programs = read_loop_texts(document, inputs, sizes, steps, read_others)
        job = _job_of_loops(document, inputs, programs, make_job)
    else:
        loop_table = _read_loop_table(document, steps, read_others)
        if loop_table is None:
            check_no_batches(inputs)
        source = _read_program(document)
        program = read_program_text(source, inputs, sizes, loop_table, steps)
        outputs = read_outputs(document["outputs"], (*program.computed, *program.carried))
        names = [spec.name for spec in outputs if spec.name not in program.carried]
        results = None
        if not outputs and program.results is not None:
            results = program.results
            names += results
        if outputs or results is not None:
            names += [name for name in program.needed_by_loop() if name not in names]
        job = make_job(program, outputs, names or None, results)
    written = [each.written for each in job.one_after_another()]
    check_formats(document.place_of("formats"), job.formats, written)
    check_separate_histories(job.histories, job.inputs, job.outputs)
    for each in job.one_after_another():
        refuse_what_is_carried(job.outputs, {} if each.loop is None else each.loop.carry)
    return with_settings(job, {"half": SETTINGS["half"].read(document)})


def _job_of_loops(
    document: Entry,
    inputs: Sequence[InputSpec],
    programs: Sequence[ProgramText],
    make_job: MakeJob,
) -> Job:
    """Return the job whose loops have these programs."""
    made = [name for program in programs for name in (*program.computed, *program.carried)]
    outputs = read_outputs(document["outputs"], tuple(made))
    loops: list[Job] = []
    results_of_all = results_of_loops(programs, outputs)
    for number, (program, results) in enumerate(zip(programs, results_of_all, strict=True)):
        own = [spec for spec in outputs if maker_of(programs, spec.name) == number]
        names = unique(results, program.needed_by_loop())
        loops.append(make_job(program, tuple(own), names, results))
    return replace(loops[0], inputs=tuple(inputs), outputs=outputs, loops=tuple(loops))


def _job_maker(document: Entry, dtype: str) -> MakeJob:
    """Return a function that makes the job of a program, or of one of several.

    It takes the program, the outputs, the names of the tensors that it computes, by default its
    last ones, and those that are results of its loop, if it is trained or there are several loops.
    """
    settings = read_settings(document)
    del settings["half"]  # as it is by default, until the job is complete
    again = settings.pop("recompute")
    formats = document["formats"]
    common = {
        "title": document["title"].get(str) or Path(document.place).stem,
        "path": document.place,
        "dtype": dtype,
        "roles": read_roles(document),
        "formats": {name: formats[name].get(str) or "" for name in formats.table()},
        "blas_place": document.place_of("run", "blas"),
        **settings,
    }

    def make_job(
        program: ProgramText,
        outputs: tuple[OutputSpec, ...],
        names: Sequence[str] | None,
        results: tuple[str, ...] | None = None,
    ) -> Job:
        graphs = program.graphs(names, settings["strict"])
        check_outputs(outputs, graphs.rewritten)
        loop = program.loop(graphs.written)
        recompute = None
        if program.loop_table is not None:
            recompute = program.loop_table.read_recompute(graphs.written)
        if recompute is None:
            place = document.place_of("plan", "recompute")
            recompute = checked_recompute(place, again, graphs.written)
        job = Job(
            **common,
            source=program.source,
            sizes=program.sizes,
            inputs=program.inputs,
            outputs=outputs,
            graph=graphs.rewritten,
            written=graphs.written,
            loop=None if loop is None else replace(loop, results=results),
        )
        return with_settings(job, {"recompute": recompute})

    return make_job


def _read_loop_table(
    document: Entry, steps: int | None, read_others: ReadInputs
) -> LoopTable | None:
    if document["loop"].value is not None:
        return LoopTable(document["loop"], read_others)
    if document["train"].value is not None:
        what = "there is a [train], but no step is repeated"
        raise document["train"].wrong(what, "a [loop]")
    if steps is not None:
        raise document.wrong("there is no [loop] to run for --steps", "a [loop]")
    return None


def _read_program(document: Entry) -> Source:
    if document["program"].get(str) is None:
        raise document.wrong("there is no program", 'program = "NAME[labels] = expression"')
    return document["program"].source


def _check_settings(document: Entry, settings: Numbers) -> None:
    known = [*document["sizes"].table(), *document["parameters"].table()]
    for name in settings:
        if name not in known:
            what = f"there is no size or parameter {show(name)} to set"
            expected = nearest_of(known, name)
            if not known:
                expected = "a job with [sizes] or [parameters]; this one has neither"
            raise document.wrong(what, expected)


def _with_files(document: Entry, files: Mapping[str, str]) -> Entry:
    """Return the document with other files for some inputs and outputs.

    Paths start where the program runs. What else the document says of an input or output stays,
    but for how it is generated.
    """
    data = dict(document.document.data)
    for name, text in files.items():
        table = "outputs" if name in document["outputs"].table() else "inputs"
        if name not in document[table].table():
            known = [*document["inputs"].table(), *document["outputs"].table()]
            what = f"there is no input or output {show(name)} to set to a file"
            expected = nearest_of(known, name) if known else "a job with [inputs] or [outputs]"
            raise document.wrong(what, expected)
        entry = document[table][name]
        file, inside = read_short_form(entry.place, text, writable=table == "outputs")
        key = check_file(entry.place, file).key
        given = entry.value if isinstance(entry.value, dict) else {}
        replaced = {"file", *name_keys(), *SEPARATE_KEYS}
        if "random" in given:
            replaced.update(GENERATED_KEYS)
        kept = {each: value for each, value in given.items() if each not in replaced}
        named = {key: inside} if key else {}
        data[table] = {**data[table], name: {"file": os.path.abspath(file), **named, **kept}}
    return Entry(replace(document.document, data=data))


def _read_sizes(document: Entry, overrides: Numbers) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, written in document["sizes"].table().items():
        entry = document["sizes"][name]
        check_name(entry.place, name, "a size", {})
        if name in overrides:
            value: Number | None = overrides[name]
            what = f"size {name} is set to {show(value)}"
        else:
            value = entry.whole_number(sizes)
            what = f"size {name} is {show(written if value is None else value)}"
        if type(value) is not int or not 1 <= value <= MAX_EXTENT:
            raise entry.wrong(what, f"an integer from 1 to 2**39 = {MAX_EXTENT}")
        sizes[name] = value
    return sizes


# ---- inputs and roles ----------------------------------------------------------------------------


# Looks up in its file what else there is to know about an input: its shape, its dtype.
Describe: TypeAlias = Callable[[InputSpec], InputSpec]


def read_tensors(
    document: Entry,
    sizes: Mapping[str, int],
    dtype: str,
    describe: Describe,
    parameters: Sequence[InputSpec],
) -> list[InputSpec]:
    """Return the inputs with their shapes and dtypes, those in files as the files say."""
    inputs = []
    entries = document["inputs"]
    for spec in read_inputs(entries, sizes, dtype):
        spec = in_batches(entries[spec.name]["batch"], described(spec, describe), sizes)
        if spec.rows is not None:
            spec = replace(spec, chunk_rows=rows_of_chunks(spec))
        check_parts(spec, len(spec.shape or ()))
        if any(spec.name == known.name for known in parameters):
            what = f"{spec.name} is a parameter and cannot name a tensor"
            raise InputError(spec.place, what, "another name")
        inputs.append(spec)
    return inputs


def described(spec: InputSpec, describe: Describe) -> InputSpec:
    """Return an input with its shape and dtype."""
    return spec if spec.file is None else describe(spec)


def check_no_batches(inputs: Iterable[InputSpec]) -> None:
    """Refuse batches where no step is repeated."""
    for spec in inputs:
        if spec.rows is not None:
            what = f"{spec.name} comes in batches, but no step is repeated"
            raise InputError(spec.place, what, "a [loop]")


def read_roles(document: Entry) -> dict[str, tuple[str, ...]]:
    """Return the labels that have each role."""
    roles: dict[str, tuple[str, ...]] = {}
    for role in document["roles"].table(ROLES):
        entry = document["roles"][role]
        labels = entry.get(list) or []
        for number, label in enumerate(labels):
            if type(label) is not str or not label.isidentifier():
                expected = f'a list of labels such as {role} = ["b"]'
                raise entry[number].wrong(f"{show(label)} is not a label", expected)
        roles[role] = tuple(labels)
    return roles


# ---- parameters: numbers on which no plan depends ------------------------------------------------


# The kinds of parameters: (type in Python, what messages call it, dtype that stores it).
KINDS: tuple[tuple[type, str, str], ...] = (
    (bool, "true or false", "bool"),
    (int, "an integer", "int64"),
    (float, "a real number", "float64"),
    (complex, "a complex number", "complex128"),
)
Numbers: TypeAlias = Mapping[str, Number]

_INTEGER = r"[+-]?[0-9]{1,20}"
_REAL = r"[+-]?(?:[0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,4})?|[+-]?(?:inf|nan)"


def read_parameters(
    document: Entry, sizes: Mapping[str, int], settings: Numbers
) -> tuple[InputSpec, ...]:
    """Return the [parameters] of a job file as inputs without dimensions.

    `settings` replace values; the kind of a parameter stays, because the plan depends on it.
    """
    found = []
    for name in document["parameters"].table():
        entry = document["parameters"][name]
        place = entry.place
        check_name(place, name, "a parameter", sizes)
        written = entry.value
        value = parse_number(written) if isinstance(written, str) else written
        if not isinstance(value, bool | int | float | complex):
            what = f"parameter {name} is {show(written)}"
            raise InputError(place, what, 'a number, true, false, or a string such as "1+2j"')
        if name in settings:
            value = _as_kind_of(place, name, value, settings[name])
        found.append(parameter(name, value, place))
    return tuple(found)


def parameter(name: str, value: Number, place: str) -> InputSpec:
    """Return a parameter as an input."""
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise InputError(place, f"parameter {name} is too large", "an integer less than 2**63")
    for kind, _, dtype in KINDS:
        if type(value) is kind:
            # Every rank knows the value, so it need not be sent.
            return InputSpec(name, shape=(), dtype=dtype, resident=True, place=place, value=value)
    raise AssertionError(f"{name} is {value!r}")


def parse_number(text: str) -> Number | None:
    """Return the number that a text writes, None if it writes none."""
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(_INTEGER, text):
        return int(text)
    if re.fullmatch(_REAL, text):
        return float(text)
    if re.fullmatch(r"[0-9eE.+-]{1,80}j", text):
        try:
            return complex(text)
        except ValueError:
            return None
    return None


def _as_kind_of(place: str, name: str, declared: Number, given: Number) -> Number:
    """Return a value as the kind that the job file declares; InputError if it is none."""
    kinds = [kind for kind, _, _ in KINDS]
    declared_kind = kinds.index(type(declared))
    is_number = type(given) in kinds
    given_kind = kinds.index(type(given)) if is_number else -1
    is_bool = bool in (type(given), type(declared))
    is_possible = given_kind == declared_kind if is_bool else given_kind <= declared_kind
    if not is_number or not is_possible:
        what = f"parameter {name} is set to {show(given)}"
        raise InputError(place, what, KINDS[declared_kind][1])
    return kinds[declared_kind](given)  # type: ignore[no-any-return]  # one of four types


# ---- writing -------------------------------------------------------------------------------------


def job_text(
    entries: Mapping[str, str],
    program: str,
    tables: Mapping[str, Mapping[str, Any]],
    notes: Mapping[str, str] | None = None,
) -> str:
    """Return the text of a job file. `notes` are comments on tensors, by name.

    Tables without entries are left out.
    """
    lines = [f"{key:<7} = {toml_text(text)}" for key, text in entries.items()]
    is_plain = "\\" not in program and '"""' not in program
    if is_plain and all(line.isprintable() for line in program.split("\n")):
        lines.append(f'program = """\n{program}\n"""')
    else:
        lines.append(f"program = {toml_text(program)}")
    for heading, table in tables.items():
        if table:
            lines += ["", f"[{heading}]"]
        width = max(map(len, table), default=0)
        for name, value in table.items():
            note = f"  # {notes[name]}" if notes and name in notes else ""
            lines.append(f"{name:<{width}} = {toml_text(value)}{note}")
    return "\n".join([*lines, ""])
