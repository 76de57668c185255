"""The Python interface: load, program, plan, compile, run, open_dataset, reference, einsum."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from einmpi.comm.agreement import together
from einmpi.comm.local import ALONE
from einmpi.errors import InputError
from einmpi.files.datasets import Dataset
from einmpi.files.formats import find, known_format
from einmpi.files.load import describe, load_array
from einmpi.files.specs import InputSpec
from einmpi.graph.labels import MAX_EXTENT
from einmpi.graph.rewrite import prune
from einmpi.job.backends import backend_names
from einmpi.job.job import Job, read_job, with_strict
from einmpi.kernels.masked import check_not_masked
from einmpi.kernels.reference import evaluate, memory_needed
from einmpi.language.numpy_einsum import program_text, split_arguments
from einmpi.language.parse import parse_program, rewrite
from einmpi.language.statements import Inputs
from einmpi.language.syntax import Source
from einmpi.planner.strategies import DEFAULT_STRATEGY
from einmpi.runtime.gpu.copies import on_host
from einmpi.units import parse_bytes

if TYPE_CHECKING:
    from einmpi.compiled.dist_array import DistArray
    from einmpi.compiled.program import Compiled
    from einmpi.planner.plan import Options, Plan


def load(path: str | os.PathLike[str], /, *, dtype: str | None = None, **sizes: int) -> Job:
    """Read a job file.

    The shapes of inputs are looked up in their files; none of their elements is read.

    Parameters
    ----------
    path : path
        The job file.
    dtype : str, optional
        Replaces the dtype of generated inputs.
    **sizes : int
        Replace sizes of the file.

    Returns
    -------
    Job
        The checked job.

    Raises
    ------
    InputError
        The job file, or a file that it names, is wrong. The message has the line and column.

    Examples
    --------
    >>> job = einmpi.load("jobs/chain.toml", s=100)
    >>> job.title, job.sizes["s"], job.graph.outputs
    ('Matrix chain', 100, ('Z',))
    """
    return read_job(path, describe, sizes, dtype)


def program(
    text: str, /, *, dtype: str = "float64", outputs: Sequence[str] | None = None, **tensors: Any
) -> Job:
    """Make a job from the text of a program.

    Parameters
    ----------
    text : str
        The statements of the program.
    dtype : str, optional
        The dtype of inputs that are given by a shape.
    outputs : sequence of str, optional
        The tensors to compute; by default those that no statement uses.
    **tensors : shape, array or int
        An input by its shape, or by an array, whose shape and dtype it has; or a size.

    Returns
    -------
    Job
        The checked job.

    Raises
    ------
    InputError
        The program or an argument is wrong.

    Examples
    --------
    >>> text = "Z[i,k] = scale * sum(A[i,j] * B[j,k])"
    >>> job = einmpi.program(text, A=(40, 4), B=np.ones((4, 30)), scale=2)
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
                expected = f"an integer from 1 to 2**39 = {MAX_EXTENT}"
                raise InputError("program", f"size {name} is out of range", expected)
            sizes[name] = given
        elif isinstance(given, (tuple, list)) and all(isinstance(extent, int) for extent in given):
            inputs[name] = given, dtype
        else:
            raise InputError(
                "program", f"{name} is {type(given).__name__}", "a shape, an array, or an integer"
            )
    return _program_job(text, inputs, sizes, dtype, outputs)


def _program_job(
    text: str, inputs: Inputs, sizes: Mapping[str, int], dtype: str, outputs: Sequence[str] | None
) -> Job:
    source = Source("program", text)
    written = prune(parse_program(source, inputs, sizes, outputs))
    return Job(
        title="",
        path="",
        source=source,
        dtype=dtype,
        sizes=sizes,
        inputs=(),
        outputs=(),
        strategy=DEFAULT_STRATEGY,
        memory=None,
        backend=backend_names()[0],
        fast_math=False,
        roles={},
        graph=rewrite(source, written),
        written=written,
    )


def options_of(
    job: Job,
    strategy: str | None = None,
    memory: int | str | None = None,
    pin: Mapping[str, Sequence[int]] | None = None,
    machine: str | os.PathLike[str] | None = None,
    nodes: int = 1,
) -> Options:
    """Return what a job asks of a plan; the other arguments take precedence over the job."""
    # Imported here so that `import einmpi` stays fast.
    from einmpi.planner.machine import read_machine
    from einmpi.planner.plan import Options

    limit = job.memory if memory is None else parse_bytes(str(memory), "memory")
    used_inputs = [spec for spec in job.inputs if spec.name in job.graph.by_name]
    pins: dict[str, tuple[int, ...]] = {}
    for spec in used_inputs:
        if spec.parts is not None:
            pins[spec.name] = spec.parts
    for output in job.outputs:
        if output.parts is not None:
            pins[output.name] = output.parts
    for name, parts in (pin or {}).items():
        pins[name] = tuple(parts) if isinstance(parts, Iterable) else (parts,)
    machine_file = job.machine if machine is None else os.fspath(machine)
    return Options(
        strategy or job.strategy,
        limit,
        tuple(spec.name for spec in used_inputs if spec.resident),
        pins,
        job.roles,
        nodes=nodes,
        machine=None if machine_file is None else read_machine(machine_file),
        files=tuple(spec.name for spec in used_inputs if spec.file is not None),
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
    strict: bool | None = None,
) -> Plan:
    """Plan how a job is cut over ranks. No MPI is started and no data is read.

    ``print(plan)`` shows what the command ``einmpi plan`` prints.

    Parameters
    ----------
    job : Job
        What to compute.
    ranks : int
        The number of ranks.
    strategy : str, optional
        How cuts are chosen; by default as the job says.
    memory : int or str, optional
        The limit per rank, in bytes or as a text such as ``"4 GiB"``; by default as the job says.
    pin : mapping of str to sequence of int, optional
        For inputs and outputs, into how many parts each dimension has to be cut.
    nodes : int, optional
        The number of nodes. Each has the same number of ranks.
    machine : path, optional
        A file that ``einmpi calibrate`` has written. The plan is then made for the times in it,
        and has ``seconds_predicted``.
    strict : bool, optional
        Whether to make only rewrites that are exact for all values, inf and nan included; by
        default as the job says.

    Returns
    -------
    Plan
        The plan.

    Raises
    ------
    InputError
        An argument is wrong, or no plan stays within the memory limit.

    Examples
    --------
    >>> job = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=(400, 300), B=(300, 400))
    >>> einmpi.plan(job, ranks=4).parts("Z")
    {'i': 2, 'k': 2, 'j': 1}
    >>> einmpi.plan(job, ranks=4, pin={"A": (4, 1), "Z": (4, 1)}).words_predicted
    320000
    """
    from einmpi.planner.make_plan import make_plan

    if strict is not None:
        job = with_strict(job, _truth_value("strict", strict))
    return make_plan(job.graph, ranks, options_of(job, strategy, memory, pin, machine, nodes))


def _truth_value(name: str, given: bool) -> bool:
    if not isinstance(given, bool):
        raise InputError(name, f"{given!r} is not a truth value", "True or False")
    return given


def compile(
    job: Job,
    comm: Any = None,
    *,
    strategy: str | None = None,
    memory: int | str | None = None,
    pin: Mapping[str, Sequence[int]] | None = None,
    machine: str | os.PathLike[str] | None = None,
    fast_math: bool | None = None,
    strict: bool | None = None,
) -> Compiled:
    """Make a job ready for the ranks of a communicator, to be called many times.

    Parameters
    ----------
    job : Job
        What to compute.
    comm : mpi4py communicator, optional
        The ranks; by default all that mpirun started, or this process alone.
    strategy, memory, pin, machine, strict : optional
        As for `plan`.
    fast_math : bool, optional
        Whether to allow faster arithmetic that rounds more; by default as the job says.

    Returns
    -------
    Compiled
        A function of the inputs that returns a dict of DistArrays. It plans once for each kind of
        inputs. Its outputs may be inputs of the next call.

    Raises
    ------
    InputError
        An argument is wrong.

    Examples
    --------
    >>> step = einmpi.compile(einmpi.program("Y[i] = X[i] / 2", X=(3,)))
    >>> half = step({"X": np.array([4.0, 8.0, 16.0])})["Y"]
    >>> step({"X": half})["Y"].gather()
    array([1., 2., 4.])
    """
    from einmpi.comm.programs import comm_of_program
    from einmpi.compiled.program import Compiled

    def check_options() -> tuple[Job, Options]:
        changed = job
        if fast_math is not None:
            changed = replace(changed, fast_math=_truth_value("fast_math", fast_math))
        if strict is not None:
            changed = with_strict(changed, _truth_value("strict", strict))
        return changed, options_of(changed, strategy, memory, pin, machine)

    own_comm = comm_of_program(comm)
    # The plans are compared later, but ranks with different backends set them up differently.
    checked, options = together(own_comm, check_options, lambda found: found[0].backend)
    return Compiled(checked, own_comm, options)


def run(
    job: Job, inputs: Mapping[str, Any] | None = None, comm: Any = None, **options: Any
) -> dict[str, DistArray]:
    """Compute the outputs of a job on all ranks of a communicator. No file is written.

    Parameters
    ----------
    job : Job
        What to compute.
    inputs : mapping of str to array, DistArray or h5py dataset, optional
        The inputs by name. An array is the same on every rank. Inputs that are missing are
        generated or read as the job says.
    comm : mpi4py communicator, optional
        The ranks; by default all that mpirun started, or this process alone.
    **options
        As for `compile`.

    Returns
    -------
    dict of str to DistArray
        The outputs by name. They stay distributed.

    Raises
    ------
    InputError
        An argument is wrong; the same error on all ranks.

    Examples
    --------
    >>> job = einmpi.program("far[i] = max(abs(X[i,j] - Y[j]))", X=(2, 3), Y=(3,))
    >>> X = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    >>> einmpi.run(job, {"X": X, "Y": [1.0, 1.0, 1.0]})["far"].gather()
    array([2., 5.])
    """
    return compile(job, comm, **options)(inputs)


def open_dataset(
    file: str | os.PathLike[str],
    dataset: str | None = None,
    comm: Any = None,
    parts: Sequence[int] | None = None,
    rows: slice | None = None,
    follow: Sequence[str | os.PathLike[str]] = (),
) -> DistArray:
    """Read a tensor from a file. All ranks call it; each element is read once.

    Parameters
    ----------
    file : path
        A file of any format that a job can read.
    dataset : str, optional
        The name of the tensor in the file: the path of an HDF5 dataset, or the name of a tensor in
        a safetensors file. An .npy file holds a single tensor and needs none.
    comm : mpi4py communicator, optional
        The ranks; by default all that mpirun started, or this process alone.
    parts : sequence of int, optional
        Into how many parts to cut each dimension, as for ``DistArray.from_global``.
    rows : slice, optional
        The part of the first dimension to read.
    follow : sequence of path, optional
        Folders to which links in an HDF5 file may lead, besides the folder of the file itself.

    Returns
    -------
    DistArray
        The tensor, cut over all ranks.

    Raises
    ------
    InputError
        The file cannot be read, or an argument is wrong.

    Examples
    --------
    >>> np.save("steps.npy", np.arange(10.0))
    >>> einmpi.open_dataset("steps.npy", rows=slice(2, 5)).gather()
    array([2., 3., 4.])
    """
    from einmpi.comm.programs import comm_of_program
    from einmpi.compiled.dist_array import DistArray

    own_comm = comm_of_program(comm)
    path = os.fspath(file)

    def find_tensor() -> Dataset:
        chosen = None
        if rows is not None:
            if not isinstance(rows, slice) or rows.step not in (None, 1):
                raise InputError(
                    "open_dataset", f"rows is {rows!r}", "a slice such as slice(0, 1000)"
                )
            chosen = (rows.start, rows.stop)
        file_format = known_format(path, path)
        if file_format.key and not dataset:
            raise InputError(
                "open_dataset",
                f"the {file_format.key} of {path} is missing",
                f'a second argument such as "{file_format.example_name}"',
            )
        if isinstance(follow, str | os.PathLike):
            raise InputError(
                "open_dataset", f"follow is {follow!r}", "a list of folders such as ['/data']"
            )
        folders = tuple(os.fspath(folder) for folder in follow)
        return find(InputSpec("", file=path, inside=dataset or "", rows=chosen, follow=folders))

    found = together(own_comm, find_tensor, Dataset.as_read)
    return DistArray.from_dataset(found, own_comm, parts)


def reference(job: Job, inputs: Mapping[str, Any] | None = None) -> dict[str, npt.NDArray[Any]]:
    """Compute the outputs of a job in this process with the reference evaluator.

    It evaluates the program as written, before any rewrite. It is slow on purpose: it is simple
    enough to be trusted.

    Parameters
    ----------
    job : Job
        What to compute.
    inputs : mapping of str to array, optional
        The inputs by name. Those that are missing are generated or read as the job says.

    Returns
    -------
    dict of str to array
        The outputs by name.

    Raises
    ------
    InputError
        An input is wrong, or the job needs more memory than the machine has.

    Examples
    --------
    >>> job = einmpi.program("n = sum(X[i]**2)", X=(2,))
    >>> float(einmpi.reference(job, {"X": [3.0, 4.0]})["n"])
    25.0
    """
    from einmpi.compiled.backends import check_memory
    from einmpi.compiled.program import check_inputs

    given = {}
    for name, array in (inputs or {}).items():
        check_not_masked("inputs", name, array)
        given[name] = np.asarray(on_host(array))
    check_memory(job.source.name, memory_needed(job.written))
    check_inputs(job, given)
    specs = {spec.name: spec for spec in job.inputs}
    arrays = {}
    for vertex in job.written.inputs:
        if vertex.name in given:
            arrays[vertex.name] = given[vertex.name]
        else:
            arrays[vertex.name] = load_array(specs[vertex.name], vertex.bound, vertex.dtype)
    return evaluate(job.written, arrays)


def einsum(
    *arguments: Any, dtype: Any = None, out: npt.NDArray[Any] | None = None, optimize: Any = True
) -> Any:
    """Evaluate an expression in the grammar of `numpy.einsum`.

    Ellipsis, implicit output and repeated labels are supported.

    Parameters
    ----------
    *arguments
        ``"ij,jk->ik", a, b`` or ``a, [0, 1], b, [1, 2], [0, 2]``. If one of the operands is a
        DistArray, all ranks call it.
    dtype : dtype, optional
        The dtype to which operands are converted first; not for DistArrays.
    out : array, optional
        Takes the result; not for DistArrays.
    optimize : optional
        Accepted and ignored: the order of a product is always chosen.

    Returns
    -------
    array or DistArray
        A DistArray if one of the operands is.

    Raises
    ------
    InputError
        The subscripts or operands are wrong.

    Examples
    --------
    >>> a, b = np.ones((2, 3)), np.ones((3, 2))
    >>> einmpi.einsum("ij,jk->ik", einmpi.DistArray.from_global(a), b).gather()
    array([[3., 3.],
           [3., 3.]])
    """
    from einmpi.compiled.dist_array import DistArray

    distributed = [given for given in arguments if isinstance(given, DistArray)]
    comm: Any = distributed[0].comm if distributed else ALONE
    compile_einsum = _distributed_einsum if distributed else _local_einsum

    def check_and_compile() -> tuple[Compiled, list[Any]]:
        subscripts, operands = split_arguments(arguments)
        if any(array.comm is not comm for array in distributed):
            raise InputError(
                "einsum",
                "the operands are on different communicators",
                "DistArrays on the same ranks",
            )
        if distributed and (dtype is not None or out is not None):
            raise InputError("einsum", "dtype or out is given with a DistArray", "arrays only")
        arrays: list[Any] = []
        for number, operand in enumerate(operands):
            if isinstance(operand, DistArray):
                arrays.append(operand)
            else:
                check_not_masked("einsum", f"operand {number}", operand)
                arrays.append(np.asarray(operand, dtype))
        kinds = tuple((tuple(array.shape), array.dtype.name) for array in arrays)
        return compile_einsum(subscripts, kinds, comm), arrays

    compiled, arrays = together(comm, check_and_compile)
    result = compiled({f"x{number}": array for number, array in enumerate(arrays)})["out"]
    if distributed:
        return result
    if out is None:
        return result.local
    np.copyto(out, result.local, casting="safe")
    return out


def _compile_einsum(
    subscripts: str, operands: tuple[tuple[tuple[int, ...], str], ...], comm: Any
) -> Compiled:
    from einmpi.compiled.program import Compiled

    common = ""
    if operands:
        common = np.result_type(*(np.dtype(dtype) for _, dtype in operands)).name
    text = program_text(subscripts, operands, common)
    inputs = {f"x{number}": operand for number, operand in enumerate(operands)}
    job = _program_job(text, inputs, {}, common, None)
    return Compiled(job, comm, options_of(job))


# What ranks keep of distributed calls must be the same on all of them, whatever else each computes.
_local_einsum = lru_cache(maxsize=256)(_compile_einsum)
_distributed_einsum = lru_cache(maxsize=256)(_compile_einsum)
