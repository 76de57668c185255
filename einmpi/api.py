"""The Python interface: load, program, plan, compile, run, open_dataset, reference, einsum."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from einmpi.comm.agreement import together
from einmpi.comm.local import ALONE
from einmpi.errors import InputError
from einmpi.files import load as storage
from einmpi.files.datasets import Dataset
from einmpi.files.formats import find, known_format
from einmpi.files.specs import InputSpec
from einmpi.graph.labels import MAX_EXTENT
from einmpi.job.job import Job, read_job
from einmpi.kernels.reference import evaluate, memory_needed
from einmpi.language.numpy_einsum import program_text, split_arguments
from einmpi.language.parse import build_graph
from einmpi.language.statements import Inputs
from einmpi.language.syntax import Source
from einmpi.planner.strategies import DEFAULT_STRATEGY
from einmpi.runtime.gpu.copies import on_host
from einmpi.units import parse_bytes

if TYPE_CHECKING:
    from einmpi.compiled.dist_array import DistArray
    from einmpi.compiled.program import Compiled
    from einmpi.planner.make_plan import Options, Plan


def load(path: str | os.PathLike[str], /, *, dtype: str | None = None, **sizes: int) -> Job:
    """Read a job file; keywords replace its sizes, `dtype` that of its generated inputs.

    Looks up the shapes of inputs in their files, and reads none of their values.

    >>> job = einmpi.load("jobs/chain.toml", s=100)
    >>> job.title, job.sizes["s"], job.graph.outputs
    ('Matrix chain', 100, ('Z',))
    """
    return read_job(path, storage.describe, sizes, dtype)


def program(
    text: str, /, *, dtype: str = "float64", outputs: Sequence[str] | None = None, **tensors: Any
) -> Job:
    """A job from a program's text.

    Each keyword is an input, given by its shape or by an array (whose shape and dtype it has), or a size, given by a
    whole number. `dtype` is that of inputs given by a shape. Outputs are the tensors that no statement uses, unless
    listed.

    >>> job = einmpi.program("Z[i,k] = scale * sum(A[i,j] * B[j,k])", A=(40, 4), B=np.ones((4, 30)), scale=2)
    >>> print(job.graph["Z"].bound, job.graph["Z"].dtype)
    (40, 30) float64
    """
    inputs: dict[str, tuple[Sequence[int], str]] = {}
    sizes: dict[str, int] = {}
    for name, given in tensors.items():
        if hasattr(given, "shape") and hasattr(given, "dtype"):
            inputs[name] = tuple(given.shape), np.dtype(given.dtype).name
        elif isinstance(given, int) and not isinstance(given, bool):
            if not 1 <= given <= MAX_EXTENT:
                raise InputError(
                    "program", f"size {name} is out of range", f"1 to 2**39 = {MAX_EXTENT}"
                )
            sizes[name] = given
        elif isinstance(given, (tuple, list)) and all(isinstance(extent, int) for extent in given):
            inputs[name] = given, dtype
        else:
            raise InputError(
                "program",
                f"{name} is {type(given).__name__}",
                "a shape, an array, or a whole number",
            )
    return _job(text, inputs, sizes, dtype, outputs)


def _job(
    text: str, inputs: Inputs, sizes: Mapping[str, int], dtype: str, outputs: Sequence[str] | None
) -> Job:
    source = Source("program", text)
    graph = build_graph(source, inputs, sizes, outputs)
    return Job(
        "", "", source, dtype, sizes, (), (), DEFAULT_STRATEGY, None, "numpy", False, {}, graph
    )


def options_of(
    job: Job,
    strategy: str | None = None,
    memory: int | str | None = None,
    pin: Mapping[str, Sequence[int]] | None = None,
    machine: str | os.PathLike[str] | None = None,
    nodes: int = 1,
) -> Options:
    """What a job and the caller ask of a plan; the caller's word counts more."""
    from einmpi.planner.machine import read_machine
    from einmpi.planner.make_plan import Options  # `import einmpi` stays fast without the planner

    limit = job.memory if memory is None else parse_bytes(str(memory), "memory")
    inputs = [spec for spec in job.inputs if spec.name in job.graph.by_name]  # others are not used
    pins = {spec.name: spec.parts for spec in inputs if spec.parts is not None}
    pins |= {spec.name: spec.parts for spec in job.outputs if spec.parts is not None}
    for name, parts in (pin or {}).items():
        pins[name] = tuple(parts) if isinstance(parts, Iterable) else (parts,)
    resident = tuple(spec.name for spec in inputs if spec.resident)
    files = tuple(spec.name for spec in inputs if spec.file is not None)
    file = job.machine if machine is None else os.fspath(machine)
    known = None if file is None else read_machine(file)
    return Options(
        strategy or job.strategy,
        limit,
        resident,
        pins,
        job.roles,
        nodes=nodes,
        machine=known,
        files=files,
    )


def plan(
    job: Job,
    ranks: int,
    *,
    strategy: str | None = None,
    memory: int | str | None = None,
    pin: Mapping[str, Sequence[int]] | None = None,
    nodes: int = 1,
    machine: str | os.PathLike[str] | None = None,
) -> Plan:
    """How a job is cut over `ranks` ranks: no MPI, no data. print(plan) is what `einmpi plan` prints.

    `strategy` and `memory`, bytes a rank or a text such as "4 GiB", are the job's own by default. `pin` prescribes into
    how many parts each dimension of an input or output is cut. The ranks lie on `nodes` nodes, equally many on each.
    `machine` is a file that `einmpi calibrate` has written: then the plan is made for the times in it, and has
    ``seconds_predicted``.

    >>> job = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=(400, 300), B=(300, 400))
    >>> einmpi.plan(job, ranks=4).parts("Z")
    {'i': 2, 'k': 2, 'j': 1}
    >>> einmpi.plan(job, ranks=4, pin={"A": (4, 1), "Z": (4, 1)}).words_predicted
    320000
    """
    from einmpi.planner.make_plan import make_plan

    return make_plan(job.graph, ranks, options_of(job, strategy, memory, pin, machine, nodes))


def compile(
    job: Job,
    comm: Any = None,
    *,
    strategy: str | None = None,
    memory: int | str | None = None,
    pin: Mapping[str, Sequence[int]] | None = None,
    machine: str | os.PathLike[str] | None = None,
    fast_math: bool | None = None,
) -> Compiled:
    """A job made ready for the ranks of a communicator of mpi4py: call it again and again, it plans once.

    A call gives a dict of DistArrays, which may be inputs of the next call. Without `comm` the ranks are all that
    mpirun started, or this process alone. `strategy`, `memory`, `pin` and `machine` are those of `plan`. `fast_math`
    allows faster arithmetic that rounds more.

    >>> step = einmpi.compile(einmpi.program("Y[i] = X[i] / 2", X=(3,)))
    >>> half = step({"X": np.array([4.0, 8.0, 16.0])})["Y"]
    >>> step({"X": half})["Y"].gather()
    array([1., 2., 4.])
    """
    from einmpi.comm.mpi import comm_of
    from einmpi.compiled.program import Compiled

    if fast_math is not None:
        if not isinstance(fast_math, bool):
            raise InputError("fast_math", f"{fast_math!r} is no truth value", "True or False")
        job = replace(job, fast_math=fast_math)
    return Compiled(job, comm_of(comm), options_of(job, strategy, memory, pin, machine))


def run(
    job: Job, inputs: Mapping[str, Any] | None = None, comm: Any = None, **options: Any
) -> dict[str, DistArray]:
    """Compute the outputs of a job on all ranks of a communicator; `options` are those of `compile`.

    Inputs are arrays that every rank has, DistArrays, or h5py datasets; those not given are generated or read as the
    job says. Outputs stay distributed, and no file is written.

    >>> job = einmpi.program("far[i] = max(abs(X[i,j] - Y[j]))", X=(2, 3), Y=(3,))
    >>> einmpi.run(job, {"X": [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], "Y": [1.0, 1.0, 1.0]})["far"].gather()
    array([2., 5.])
    """
    return compile(job, comm, **options)(inputs)


def open_dataset(
    file: str | os.PathLike[str],
    dataset: str | None = None,
    comm: Any = None,
    parts: Sequence[int] | None = None,
    rows: slice | None = None,
) -> DistArray:
    """Read a tensor from a file, cut over all ranks of a communicator. All ranks call it; each element is read once.

    `dataset` is the path of an HDF5 dataset or the name of a tensor of a safetensors file; an .npy file needs none.
    `parts` says into how many parts each dimension is cut, as for ``DistArray.from_global``; ``rows=slice(0, 1000)``
    takes only these of the first dimension.

    >>> np.save("steps.npy", np.arange(10.0))
    >>> einmpi.open_dataset("steps.npy", rows=slice(2, 5)).gather()
    array([2., 3., 4.])
    """
    from einmpi.comm.mpi import comm_of
    from einmpi.compiled.dist_array import DistArray

    ours, path = comm_of(comm), os.fspath(file)

    def look() -> Dataset:
        if rows is not None and (not isinstance(rows, slice) or rows.step not in (None, 1)):
            raise InputError("open_dataset", f"rows is {rows!r}", "such as slice(0, 1000)")
        file_format = known_format(path, path)
        if file_format.key and not dataset:
            raise InputError(
                "open_dataset",
                f"the {file_format.key} of {path} is missing",
                f'a second argument such as "{file_format.example_name}"',
            )
        chosen = None if rows is None else (rows.start, rows.stop)
        return find(InputSpec("", file=path, inside=dataset or "", rows=chosen))

    return DistArray.from_dataset(together(ours, look, Dataset.as_read), ours, parts)


def reference(job: Job, inputs: Mapping[str, Any] | None = None) -> dict[str, np.ndarray]:
    """The outputs of a job as numpy arrays, computed in this process by the plain reference evaluator.

    Inputs that are not given are generated or read as the job says. It is slow on purpose: what is simple can be
    trusted.

    >>> job = einmpi.program("n = sum(X[i]**2)", X=(2,))
    >>> float(einmpi.reference(job, {"X": [3.0, 4.0]})["n"])
    25.0
    """
    from einmpi.compiled.backends import check_memory
    from einmpi.compiled.program import check_inputs

    graph = job.graph
    given = {name: np.asarray(on_host(array)) for name, array in (inputs or {}).items()}
    check_memory(job.source.name, memory_needed(graph))
    check_inputs(job, given)
    specs = {spec.name: spec for spec in job.inputs}
    return evaluate(
        graph,
        {
            v.name: given[v.name]
            if v.name in given
            else storage.load(specs[v.name], v.bound, v.dtype)
            for v in graph.inputs
        },
    )


def einsum(
    *arguments: Any, dtype: Any = None, out: np.ndarray | None = None, optimize: Any = True
) -> Any:
    """numpy.einsum's grammar: ``einsum("ij,jk->ik", a, b)`` or ``einsum(a, [0, 1], b, [1, 2], [0, 2])``.

    Ellipsis, implicit output and repeated labels included. Arrays are computed with in this process and give an array;
    a DistArray among the operands makes all ranks work together, and the result a DistArray. `dtype` converts the
    operands first, `out` takes the result; `optimize` is accepted and ignored, the order of a product is always chosen.

    >>> a, b = np.ones((2, 3)), np.ones((3, 2))
    >>> einmpi.einsum("ij,jk->ik", einmpi.DistArray.from_global(a), b).gather()
    array([[3., 3.],
           [3., 3.]])
    """
    from einmpi.compiled.dist_array import DistArray

    subscripts, operands = split_arguments(arguments)
    spread = next((operand for operand in operands if isinstance(operand, DistArray)), None)
    arrays = [x if isinstance(x, DistArray) else np.asarray(x, dtype) for x in operands]
    if spread is not None and (dtype is not None or out is not None):
        raise InputError("einsum", "dtype and out do not go with a DistArray", "arrays only")
    if any(
        isinstance(x, DistArray) and spread is not None and x.comm is not spread.comm
        for x in operands
    ):
        raise InputError(
            "einsum", "the operands lie on different communicators", "DistArrays of the same ranks"
        )
    kinds = tuple((tuple(array.shape), array.dtype.name) for array in arrays)
    comm: Any = ALONE if spread is None else spread.comm
    compiled = together(comm, lambda: _compiled(subscripts, kinds, comm))
    result = compiled({f"x{k}": array for k, array in enumerate(arrays)})["out"]
    if spread is not None:
        return result
    if out is None:
        return result.local
    np.copyto(out, result.local, casting="safe")
    return out


@lru_cache(maxsize=256)
def _compiled(
    subscripts: str, operands: tuple[tuple[tuple[int, ...], str], ...], comm: Any
) -> Compiled:
    from einmpi.compiled.program import Compiled

    common = np.result_type(*(np.dtype(dtype) for _, dtype in operands)).name if operands else ""
    text = program_text(subscripts, [shape for shape, _ in operands], common)
    job = _job(text, {f"x{k}": operand for k, operand in enumerate(operands)}, {}, common, None)
    return Compiled(job, comm, options_of(job))
