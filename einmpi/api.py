"""The Python interface: load, program, plan, reference, einsum."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.graph.builder import Inputs
from einmpi.graph.job_file import STRATEGIES, Job, read_job
from einmpi.graph.labels import MAX_EXTENT
from einmpi.graph.language import build_graph
from einmpi.graph.subscripts import program_text, split_arguments
from einmpi.graph.syntax import Source
from einmpi.runtime import storage
from einmpi.runtime.reference import evaluate, memory_needed
from einmpi.units import parse_bytes

if TYPE_CHECKING:
    from einmpi.plan.plan import Plan


def load(path: str | os.PathLike[str], /, *, dtype: str | None = None, **sizes: int) -> Job:
    """Read a job file; keywords replace its sizes, `dtype` that of its generated inputs."""
    return read_job(path, storage.describe, sizes, dtype)


def program(text: str, /, *, dtype: str = "float64", outputs: Sequence[str] | None = None, **tensors: Any) -> Job:
    """A job from a program's text.

    Each keyword is an input, given by its shape or by an array (whose shape and dtype it has), or a size, given by a
    whole number: ``program("Z[i,k] = sum(A[i,j] * B[j,k])", A=(40, 4), B=b)``. Outputs are the tensors that no
    statement uses, unless listed.
    """
    inputs: dict[str, tuple[Sequence[int], str]] = {}
    sizes: dict[str, int] = {}
    for name, given in tensors.items():
        if hasattr(given, "shape") and hasattr(given, "dtype"):
            inputs[name] = tuple(given.shape), np.dtype(given.dtype).name
        elif isinstance(given, int) and not isinstance(given, bool):
            if not 1 <= given <= MAX_EXTENT:
                raise InputError("program", f"size {name} is out of range", f"1 to 2**39 = {MAX_EXTENT}")
            sizes[name] = given
        elif isinstance(given, (tuple, list)) and all(isinstance(extent, int) for extent in given):
            inputs[name] = given, dtype
        else:
            raise InputError("program", f"{name} is {type(given).__name__}", "a shape, an array, or a whole number")
    return _job(text, inputs, sizes, dtype, outputs)


def _job(text: str, inputs: Inputs, sizes: Mapping[str, int], dtype: str, outputs: Sequence[str] | None) -> Job:
    source = Source("program", text)
    graph = build_graph(source, inputs, sizes, outputs)
    return Job("", "", source, dtype, sizes, (), (), STRATEGIES[0], None, "numpy", False, {}, graph)


def plan(
    job: Job,
    ranks: int,
    *,
    strategy: str | None = None,
    memory: int | str | None = None,
    pin: Mapping[str, Sequence[int]] | None = None,
) -> Plan:
    """How a job is cut over `ranks` ranks: pure, no MPI, no data. print(plan) is the EXPLAIN text.

    Strategy and memory a rank default to the job's own. `pin` prescribes into how many parts each dimension of an
    input or output is cut: ``pin={"A": (4, 1)}``.
    """
    from einmpi.plan.plan import Options, make_plan  # `import einmpi` stays fast without the planner

    try:
        limit = job.memory if memory is None else parse_bytes(str(memory))
    except ValueError as error:
        raise InputError("memory", *str(error).split("; ", 1)) from None
    inputs = [spec for spec in job.inputs if spec.name in job.graph.by_name]  # others are not used
    pins = {spec.name: spec.parts for spec in inputs if spec.parts is not None}
    pins |= {spec.name: spec.parts for spec in job.outputs if spec.parts is not None}
    for name, parts in (pin or {}).items():
        pins[name] = tuple(parts) if isinstance(parts, Iterable) else (parts,)
    resident = tuple(spec.name for spec in inputs if spec.resident)
    options = Options(strategy or job.strategy, limit, resident, pins, job.roles)
    return make_plan(job.graph, ranks, options)


def reference(job: Job, inputs: Mapping[str, Any] | None = None) -> dict[str, np.ndarray]:
    """The outputs of a job, computed in this process by the plain reference evaluator.

    Inputs that are not given are generated or read as the job says.
    """
    given = dict(inputs or {})
    graph = job.graph
    needed = memory_needed(graph)
    if needed > (available := _memory()):
        raise InputError(job.source.name, f"this needs {needed / 2**30:.1f} GiB in one process",
                         f"at most the {available / 2**30:.1f} GiB of this machine; use smaller sizes")  # fmt: skip
    specs = {spec.name: spec for spec in job.inputs}
    for name in given:
        if name not in graph.by_name and name not in specs:
            raise InputError("inputs", f"unknown input {name!r}", one_of(vertex.name for vertex in graph.inputs))
    arrays = {}
    for vertex in graph.inputs:
        if vertex.name in given:
            array = np.asarray(given[vertex.name])
        elif vertex.name in specs:
            array = storage.load(specs[vertex.name], vertex.bound, vertex.dtype)
        else:
            raise InputError("inputs", f"input {vertex.name} is not given", str(vertex))
        if array.shape != vertex.bound or array.dtype.name != vertex.dtype:
            found = f"{array.dtype.name}[{', '.join(map(str, array.shape))}]"
            raise InputError("inputs", f"{vertex.name} is {found}", str(vertex))
        arrays[vertex.name] = array
    return evaluate(graph, arrays)


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def einsum(*arguments: Any, dtype: Any = None, out: np.ndarray | None = None, optimize: Any = True) -> np.ndarray:
    """numpy.einsum's grammar: ``einsum("ij,jk->ik", a, b)`` or ``einsum(a, [0, 1], b, [1, 2], [0, 2])``.

    Ellipsis, implicit output and repeated labels included. `dtype` converts the operands first; `optimize` is accepted
    and ignored, the order of a product is always chosen.
    """
    subscripts, operands = split_arguments(arguments)
    arrays = [np.asarray(operand) if dtype is None else np.asarray(operand, dtype) for operand in operands]
    names = [f"x{k}" for k in range(len(arrays))]
    job = _compiled(subscripts, tuple((array.shape, array.dtype.name) for array in arrays))
    result = reference(job, dict(zip(names, arrays, strict=True)))["out"]
    if out is None:
        return result
    np.copyto(out, result, casting="safe")
    return out


@lru_cache(maxsize=256)
def _compiled(subscripts: str, operands: tuple[tuple[tuple[int, ...], str], ...]) -> Job:
    common = np.result_type(*(np.dtype(dtype) for _, dtype in operands)).name if operands else ""
    text = program_text(subscripts, [shape for shape, _ in operands], common)
    return _job(text, {f"x{k}": operand for k, operand in enumerate(operands)}, {}, common, None)
