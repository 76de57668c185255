"""Traced functions: the programs that a function becomes, and the calls between them."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from einmpi.arrays.dist_array import TRACES, DistArray, is_sparse_array
from einmpi.arrays.moving import distributed
from einmpi.comm.agreement import require_same_arrays, together
from einmpi.comm.base import Comm
from einmpi.errors import InputError
from einmpi.files.atomic import replace_file
from einmpi.job.job import Job, options_of, program_job, with_settings
from einmpi.job.job_file import job_text, parameter
from einmpi.language.macros import is_reserved
from einmpi.late import late
from einmpi.tracing.functions import Call
from einmpi.tracing.statements import Node, Writer, in_order, named_nodes
from einmpi.tracing.symbols import Leaves, Symbol, Trace, TracingError, flatten, refuse
from einmpi.units import counted

_NAME = re.compile(r"[^\W\d]\w*")


# ---- arguments ---------------------------------------------------------------------------------


def is_tensor(value: Any) -> bool:
    """Return whether an argument is traced; other arguments are constants of the function."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def is_weak_number(value: Any) -> bool:
    """Return whether an argument is a number that may differ from call to call."""
    return isinstance(value, float | complex) and not isinstance(value, np.generic)


def kind_of(value: Any) -> Any:
    """Return what a traced function depends on of an argument."""
    if is_tensor(value):
        return tuple(value.shape), value.dtype
    return type(value) if is_weak_number(value) else (type(value), value)


# ---- tracing -------------------------------------------------------------------------------------


@contextmanager
def tracing(trace: Trace) -> Any:
    """Trace in this thread."""
    TRACES.stack.append(trace)
    try:
        yield trace
    finally:
        TRACES.stack.pop()


@dataclass
class Stage:
    """A program, and the calls that come before it."""

    calls: list[Call] = field(default_factory=list)
    job: Job | None = None
    compiled: Any = None
    inputs: tuple[str, ...] = ()


def trace_together(comm: Comm, make: Callable[[], Traced]) -> Traced:
    """Trace on all ranks: they raise an error alike, and have the same program and constants."""
    if TRACES.stack:
        return make()  # they agree on the function around it
    traced = together(comm, make, lambda found: found.program)
    if comm.size > 1:
        constants = traced.trace.constants.items()
        arrays = {name: array for name, array in constants if isinstance(array, np.ndarray)}
        require_same_arrays(comm, "jit", arrays)
    return traced


class Traced:
    """What a function computes of arguments of some shapes and dtypes.

    Parameters
    ----------
    function : callable
        What to trace: a function of a list, from which it takes the leaves of its arguments.
    arguments : sequence of (name, value)
        These leaves. Those that are tensors or numbers are symbols in the call.
    comm : Comm
        The ranks.
    settings : mapping
        Those of the programs.
    """

    def __init__(
        self,
        function: Callable[[Leaves], Any],
        arguments: Sequence[tuple[str, Any]],
        comm: Comm,
        settings: Mapping[str, Any],
        most_statements: int,
    ) -> None:
        self.comm = comm
        self.settings = settings
        self.trace = Trace(comm, most_statements)
        self.names = self.trace.names
        self.argument_names: list[str | None] = []
        self.parameters: dict[str, float | complex] = {}  # numbers, with their first values
        with tracing(self.trace):
            result = function([self._symbol(name, value) for name, value in arguments])
            found, self.rebuild_result = flatten(result)
            self.results: list[Any] = [value for _, value in found]
            symbols = [value for value in self.results if isinstance(value, Symbol)]
            for symbol in symbols:
                if symbol.own_trace is not self.trace:
                    what = "a symbol of another traced function is returned"
                    refuse(what, "tensors of this call")
            outputs = [symbol.node for symbol in symbols]  # views are read here
        self.stages = self._stages(outputs)

    def _symbol(self, name: str, value: Any) -> Any:
        """Return what the function gets for an argument."""
        if not is_tensor(value) and not is_weak_number(value):
            self.argument_names.append(None)
            return value
        stem = "".join(letter if letter.isalnum() else "_" for letter in name) or "x"
        if not stem.isidentifier() or is_reserved(stem):
            stem = f"x_{stem}"
        name = self.names.take_new(stem)
        self.argument_names.append(name)
        if is_tensor(value):
            dtype = np.dtype(value.dtype).newbyteorder("=")
            return Symbol(self.trace, Node(tuple(value.shape), dtype, name), name)
        self.parameters[name] = value
        dtype = np.dtype(complex if isinstance(value, complex) else float)
        return Symbol(self.trace, Node((), dtype, name), name, is_weak=True)

    def _stages(self, outputs: Sequence[Node]) -> list[Stage]:
        """Return the programs that compute some tensors, in order."""
        nodes = in_order(outputs)
        named = named_nodes(outputs)
        names: dict[Node, str] = {}
        for node in nodes:
            if node.definition is None:
                names[node] = node.name if node.call is None else self.names.take_new("result")
        for number, node in enumerate(dict.fromkeys(outputs)):
            if node.definition is not None:
                names[node] = self.names.take_new(f"out{number or ''}")
        for node in nodes:
            if node in named and node not in names:
                names[node] = self.names.take_new("t")
        self.node_names = names
        needed = {names[node] for node in outputs}
        for node in nodes:
            if node.call is not None:
                needed.update(names[operand] for operand in node.call.operands)
        last = max([node.level for node in nodes], default=0)
        stages = []
        for level in reversed(range(last + 1)):
            stages.append(self._stage(level, nodes, needed))
        return stages[::-1]

    def _stage(self, level: int, nodes: Sequence[Node], needed: set[str]) -> Stage:
        """Return the program of a level. `needed` names what comes after it reads, or returns."""
        names = self.node_names
        stage = Stage()
        for node in nodes:
            if node.call is not None and node.level == level and node.call not in stage.calls:
                stage.calls.append(node.call)
        own = [node for node in nodes if node in names and node.definition and node.level == level]
        if not own:
            return stage
        writer = Writer(names)
        lines = [writer.statement(node) for node in own]
        if len(lines) > self.trace.most_statements:
            most = self.trace.most_statements
            what = f"the function becomes a program of {len(lines)} statements"
            refuse(what, f"at most {most}", "einmpi.fori repeats a step without writing it out")
        words = set(_NAME.findall("\n".join(lines)))
        outputs = [names[node] for node in own if names[node] in needed]
        needed |= words
        inputs = {
            name: (node.shape, node.dtype.name)
            for node, name in names.items()
            if name in words and node not in own
        }
        specs = [
            parameter(name, value, "jit")
            for name, value in self.parameters.items()
            if inputs.pop(name, None) is not None
        ]
        try:
            job = program_job("\n".join(lines), inputs, {}, "float64", outputs, specs)
        except InputError as error:
            place = re.match(r"program:(\d+)", error.where)
            where = own[int(place[1]) - 1].line if place else error.where
            raise TracingError(where, error.what, error.expected, error.hint) from error
        stage.job = with_settings(job, self.settings)
        stage.inputs = tuple(vertex.name for vertex in stage.job.graph.inputs)
        return stage

    # ---- programs ----

    @property
    def jobs(self) -> list[Job]:
        """The programs, one after another."""
        return [stage.job for stage in self.stages if stage.job is not None]

    @property
    def job(self) -> Job:
        """The program, if there is only one."""
        if len(self.jobs) != 1 or any(stage.calls for stage in self.stages):
            what = (
                f"the function becomes {counted(len(self.jobs), 'program')}, and calls around them"
            )
            raise InputError("jit", what, "one program alone", "jobs has all of them")
        return self.jobs[0]

    @property
    def program(self) -> str:
        """The text of the programs; a comment says which calls are between them."""
        parts = []
        for stage in self.stages:
            for call in stage.calls:
                parts.append(f"# {self._call_text(call)}")
            if stage.job is not None:
                parts.append(stage.job.source.text)
        return "\n".join(parts)

    def _call_text(self, call: Call) -> str:
        results = ", ".join(self.node_names.get(node, "_") for node in call.results)
        operands = ", ".join(self.node_names[node] for node in call.operands)
        return f"{results} = {call.name}({operands})"

    # ---- runs ----

    def run(self, leaves: Iterable[Any]) -> Any:
        """Return the result for arguments of the same kinds."""
        values: dict[str, Any] = dict(self.trace.constants)
        for name, value in zip(self.argument_names, leaves, strict=True):
            if name is not None:
                values[name] = value
        for stage in self.stages:
            for call in stage.calls:
                self._make_call(call, values)
            if stage.job is not None:
                if stage.compiled is None:
                    stage.compiled = late("Compiled")(stage.job, self.comm, options_of(stage.job))
                values.update(stage.compiled({name: values[name] for name in stage.inputs}))
        results: Leaves = []
        for value in self.results:
            results.append(self._result(value, values) if is_tensor(value) else value)
        return self.rebuild_result(results)

    def _result(self, value: Any, values: Mapping[str, Any]) -> Any:
        """Return a tensor that the function returns: its own, unless it is an argument."""
        if not isinstance(value, Symbol):
            return value.copy()
        found = values[self.node_names[value.node]]
        if value.node.definition is not None or value.node.call is not None:
            return found
        if not isinstance(found, DistArray):
            return distributed(np.asarray(found), self.comm)
        return found if value.argument else found.copy()

    def _make_call(self, call: Call, values: dict[str, Any]) -> None:
        leaves: Leaves = []
        for leaf in call.leaves:
            if isinstance(leaf, Node):
                leaf = values[self.node_names[leaf]]
                if is_sparse_array(leaf):
                    raise TypeError(f"{call.name} takes no sparse arrays; expected one of numpy")
                if not isinstance(leaf, DistArray):
                    leaf = distributed(leaf, self.comm)
            leaves.append(leaf)
        arguments, options = call.rebuild(leaves)
        found, _ = flatten(call.function(*arguments, **options))
        for node, (_, value) in zip(call.results, found, strict=True):
            if node in self.node_names:
                values[self.node_names[node]] = value

    # ---- files ----

    def to_toml(self, path: str | os.PathLike[str]) -> None:
        """Save the program as a job file.

        Its inputs are random until the file names others; arrays that the function has from
        elsewhere are written to files beside it.
        """
        job = self.job
        stem = os.path.splitext(os.fspath(path))[0]
        written: dict[str, Any] = {}  # arrays by file
        inputs: dict[str, Any] = {}
        for vertex in job.graph.inputs:
            value = self.trace.constants.get(vertex.name)
            if value is not None:
                file = f"{stem}_{vertex.name}.npy"
                written[file] = value.gather() if isinstance(value, DistArray) else value
                inputs[vertex.name] = os.path.basename(file)
            elif vertex.name not in self.parameters:
                kind = "normal" if np.dtype(vertex.dtype).kind in "fc" else "zeros"
                given = {"shape": vertex.bound, "dtype": vertex.dtype, "random": kind}
                inputs[vertex.name] = given
        numbers = {}
        for name, number in self.parameters.items():
            numbers[name] = str(number).strip("()") if isinstance(number, complex) else number
        text = job_text({}, job.source.text, {"inputs": inputs, "parameters": numbers})

        def write() -> None:
            if self.comm.rank == 0:
                for file, array in written.items():
                    buffer = io.BytesIO()
                    np.save(buffer, array)
                    replace_file(file, [buffer.getvalue()])
                replace_file(path, [text.encode()])

        together(self.comm, write)
