"""A job file (TOML) → Job: the program's graph, where its tensors come from and go, how it is planned and run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from einmpi.errors import InputError, one_of
from einmpi.files.specs import InputSpec, OutputSpec
from einmpi.graph.eingraph import EinGraph
from einmpi.graph.labels import MAX_EXTENT
from einmpi.job.inputs import check_dtype, check_name, read_dtype, read_inputs
from einmpi.job.outputs import check_outputs, read_outputs
from einmpi.language.parse import build_graph
from einmpi.language.syntax import Source, Statement, statements
from einmpi.language.toml_document import (
    Document,
    beside,
    choice,
    get,
    kind_of,
    lookup,
    read_document,
    show,
    table,
    whole_number,
)
from einmpi.planner.strategies import DEFAULT_STRATEGY, ROLES, STRATEGIES
from einmpi.units import check_bytes, parse_bytes

BACKENDS = ("numpy", "cupy")
_KEYS = ("title", "dtype", "program", "sizes", "inputs", "outputs", "plan", "run", "roles")


@dataclass(frozen=True)
class Job:
    """What to compute, checked: a job file, or the program of a call. `load` and `program` make it.

    `graph` is the program as a graph of EinSums, `sizes` are whole numbers by now, `memory` is bytes a rank.
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
    machine: str | None = None  # the file with its measured times
    scratch: str | None = (
        None  # the folder for what does not fit into memory; None: that of temporary files
    )


def read_job(
    path: str | os.PathLike[str],
    describe: Callable[[InputSpec], tuple[tuple[int, ...], str]],
    sizes: Mapping[str, int] | None = None,
    dtype: str | None = None,
) -> Job:
    """Read a job file. `describe` looks up shape and dtype of an input in a file; `sizes` and `dtype` override."""
    document = read_document(os.fspath(path))
    table(document, (), _KEYS)
    for name in ("plan", "run"):
        keys = {
            "plan": ("strategy", "memory", "machine"),
            "run": ("backend", "fast_math", "scratch"),
        }[name]
        table(document, (name,), keys)
    source = _program(document)
    own_dtype = read_dtype(document, ("dtype",)) or "float64"
    chosen_dtype = check_dtype(document.name, dtype) if dtype else own_dtype
    values = _sizes(document, sizes or {})
    inputs = tuple(
        _described(spec, describe) for spec in read_inputs(document, values, chosen_dtype)
    )
    computed = tuple(item.name for item in statements(source) if isinstance(item, Statement))
    outputs = read_outputs(document, computed)
    settings, scratch = _settings(document), _scratch(document)
    tensors = {spec.name: (spec.shape or (), spec.dtype or "") for spec in inputs}
    graph = build_graph(source, tensors, values, [spec.name for spec in outputs] or None)
    check_outputs(outputs, graph)
    stem = os.path.splitext(os.path.basename(document.name))[0]
    machine = get(document, ("plan", "machine"), str)
    return Job(
        get(document, ("title",), str) or stem,
        document.name,
        source,
        chosen_dtype,
        values,
        inputs,
        outputs,
        *settings,
        graph,
        None if machine is None else beside(document, machine),
        scratch,
    )


def _program(document: Document) -> Source:
    text = get(document, ("program",), str)
    if text is None:
        raise InputError(
            document.name, "there is no program", 'program = "NAME[labels] = expression"'
        )
    return document.source(("program",))


def _described(
    spec: InputSpec, describe: Callable[[InputSpec], tuple[tuple[int, ...], str]]
) -> InputSpec:
    if spec.file is None:
        return spec
    shape, dtype = describe(spec)
    return replace(spec, shape=shape, dtype=dtype)


def _sizes(document: Document, overrides: Mapping[str, int]) -> dict[str, int]:
    given = table(document, ("sizes",))
    for name in overrides:
        if name not in given:
            raise InputError(
                document.name, f"there is no size {show(name)} to set", one_of(given, name)
            )
    sizes: dict[str, int] = {}
    for name, written in given.items():
        path = ("sizes", name)
        check_name(document.place(path), name, "a size", {})
        set_here = name in overrides
        value = overrides[name] if set_here else whole_number(document, path, sizes)
        if type(value) is not int or not 1 <= value <= MAX_EXTENT:
            shown = show(written if value is None else value)
            raise InputError(
                document.place(path),
                f"size {name} is {'set to ' if set_here else ''}{shown}",
                f"a whole number from 1 to 2**39 = {MAX_EXTENT}",
            )
        sizes[name] = value
    return sizes


def _settings(document: Document) -> tuple[str, int | None, str, bool, dict[str, tuple[str, ...]]]:
    """strategy, memory, backend, fast_math, roles."""
    return (
        choice(document, ("plan", "strategy"), STRATEGIES, DEFAULT_STRATEGY),
        _memory(document),
        choice(document, ("run", "backend"), BACKENDS, "numpy"),
        get(document, ("run", "fast_math"), bool) or False,
        _roles(document),
    )


def _memory(document: Document) -> int | None:
    path = ("plan", "memory")
    given, place = lookup(document, path), document.place(path)
    if given is None:
        return None
    if not isinstance(given, str) and type(given) is not int:
        raise InputError(
            place,
            f"memory is {kind_of(given)}",
            'a string such as "4 GiB" or a whole number is wanted',
        )
    return parse_bytes(given, place) if isinstance(given, str) else check_bytes(given, place)


def _scratch(document: Document) -> str | None:
    given = get(document, ("run", "scratch"), str)
    return given and os.path.join(os.path.dirname(document.name), os.path.expanduser(given))


def _roles(document: Document) -> dict[str, tuple[str, ...]]:
    roles: dict[str, tuple[str, ...]] = {}
    for role in table(document, ("roles",), ROLES):
        labels = get(document, ("roles", role), list) or []
        for number, label in enumerate(labels):
            if type(label) is not str or not label.isidentifier():
                place = document.place(("roles", role, number))
                raise InputError(place, f"{show(label)} is not a label", f'such as {role} = ["b"]')
        roles[role] = tuple(labels)
    return roles
