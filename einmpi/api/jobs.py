"""Make a job: from a job file, or from the text of a program; read a tensor from a file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from einmpi.arguments import named_values, optional_names, optional_text, path_name
from einmpi.comm.agreement import comm_of_program, together
from einmpi.errors import InputError, nearest_of
from einmpi.files.datasets import PATHS_OF_JOB_FILES, Dataset
from einmpi.files.formats import find, known_format
from einmpi.files.reading import describe
from einmpi.files.specs import InputSpec, Number, Resident, SliceEntry
from einmpi.graph.dtypes import dtype_name
from einmpi.graph.scalar import MAX_EXTENT
from einmpi.graph.sparse.desugar import check_formats
from einmpi.job.inputs import FIT, check_dtype
from einmpi.job.job import Job, program_job, python_values, with_settings
from einmpi.job.job_file import check_no_batches, parameter, read_job, read_roles, read_tensors
from einmpi.job.loop_table import has_word
from einmpi.job.settings import split_settings, takes_settings
from einmpi.language.statements import Inputs

if TYPE_CHECKING:
    from einmpi.arrays.dist_array import DistArray


def load(
    path: str | os.PathLike[str], /, *, dtype: str | None = None, **settings: Number | str
) -> Job:
    """Read a job file.

    The shapes of inputs are looked up in their files; none of their elements is read.

    Parameters
    ----------
    path : path
        The job file.
    dtype : str, optional
        Replaces the dtype of generated inputs.
    **settings : int, float, complex, bool or str
        Replace sizes and parameters of the file; a string such as "X.h5:/X" replaces the file of an
        input or output.

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
    name = path_name("load", path)
    return read_job(name, describe, settings, optional_text("load", "dtype", dtype, "float32"))


@takes_settings
def program(
    text: str,
    /,
    *,
    dtype: str = "float64",
    outputs: Sequence[str] | None = None,
    inputs: Mapping[str, Mapping[str, Any] | str] | None = None,
    resident: Resident | Sequence[str] = False,
    roles: Mapping[str, Sequence[str]] | None = None,
    formats: Mapping[str, str] | None = None,
    **tensors: Any,
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
    inputs : mapping of str to mapping or str, optional
        Inputs that are read from files or generated, by name; each as a job file describes it:
        ``{"file": "model.safetensors", "tensor": "w", "shape": (8, 64), "dtype": "float32"}``.
        Paths start where Python runs.
    resident : bool, "fit" or sequence of str, optional
        Which of `inputs` stay loaded between the calls of a compiled job: all of them, as many as
        the memory limit allows, or those with these names. An input that says so itself stays.
    roles : mapping of str to sequence of str, optional
        The labels that have each role, for the strategies that need roles.
    formats : mapping of str to str, optional
        Tensors that are "dense", "sparse", or "like A" (where the sparse input A is stored),
        whatever follows from the program if an input is sparse.
    {settings} : optional
        As for `plan`. A name that the program uses is a tensor, a size or a parameter.
    **tensors : shape, array, int, float, complex or bool
        An input by its shape, or by an array, whose shape and dtype it has; a size, if it is an
        int; or a parameter, which has this value unless a call gives another.

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
    >>> np.save("B.npy", np.ones((4, 30)))
    >>> job = einmpi.program(text, A=(40, 4), scale=2, inputs={"B": {"file": "B.npy"}})
    >>> einmpi.run(job, A=np.ones((40, 4)))["Z"].gather()[0, :3]
    array([8., 8., 8.])
    """
    if dtype is None:
        dtype = "float64"
    shapes: dict[str, tuple[Sequence[int], str]] = {}
    sizes: dict[str, int] = {}
    parameters: list[InputSpec] = []
    expected: list[InputSpec] = []
    settings, arrays = split_settings(tensors)
    for name in [*settings]:
        if has_word(str(text), name):
            arrays[name] = settings.pop(name)
    for name, given in arrays.items():
        if hasattr(given, "shape") and hasattr(given, "dtype"):
            from einmpi.compiled.given_inputs import as_array
            from einmpi.sparse_array import is_sparse, outline_spec

            array = given
            if is_sparse(given):
                expected.append(outline_spec(name, given))
            else:
                array = as_array(name, given)
            shapes[name] = tuple(array.shape), dtype_name(array.dtype)
        elif isinstance(given, int) and not isinstance(given, bool):
            sizes[name] = given
        elif isinstance(given, bool | float | complex):
            parameters.append(parameter(name, given, "program"))
        elif isinstance(given, (tuple, list)) and all(isinstance(extent, int) for extent in given):
            shapes[name] = given, dtype
        else:
            raise InputError(
                "program", f"{name} is {type(given).__name__}", "a shape, an array, or a number"
            )
    document = python_values(inputs=inputs, roles=roles)
    optional_text("program", "dtype", dtype, "float32")
    check_dtype("program", dtype)
    sources = read_tensors(document, sizes, dtype, _describe_here, parameters)
    check_no_batches(sources)
    for spec in sources:
        if spec.name in shapes:
            raise InputError(spec.place, f"{spec.name} is given twice", "each input once")
    specs = [*parameters, *_with_resident(sources, resident)]
    read = read_roles(document)
    job = job_of_program("program", text, shapes, sizes, dtype, outputs, specs, read)
    chosen = named_values("formats", formats)
    check_formats("formats", chosen, [job.written])
    return with_settings(replace(job, formats=chosen, expected=tuple(expected)), settings)


def _describe_here(spec: InputSpec) -> InputSpec:
    """Return an input whose path starts where Python runs with its shape and dtype."""
    try:
        return describe(spec)
    except InputError as error:
        if error.hint != PATHS_OF_JOB_FILES:
            raise
        hint = "paths start where Python runs"
        raise InputError(error.where, error.what, error.expected, hint) from None


def _with_resident(
    specs: Sequence[InputSpec], resident: Resident | Sequence[str]
) -> list[InputSpec]:
    """Return inputs of which those that are named, or all, stay loaded between calls."""
    names = [spec.name for spec in specs]
    mode: Resident = True
    if resident == FIT:
        mode = "fit"
        chosen: Sequence[str] = names
    elif isinstance(resident, bool):
        chosen = names if resident else ()
    else:
        chosen = optional_names("program", "resident", resident) or ()
    for name in chosen:
        if name not in names:
            what = f"{name!r:.60} in resident is not one of the inputs"
            raise InputError("program", what, nearest_of(names, name))
    found = []
    for spec in specs:
        if spec.name in chosen and not spec.resident:
            spec = replace(spec, resident=mode)
        found.append(spec)
    return found


def job_of_program(
    where: str,
    text: str,
    inputs: Inputs,
    sizes: Mapping[str, int],
    dtype: str,
    outputs: Sequence[str] | None,
    specs: Sequence[InputSpec] = (),
    roles: Mapping[str, tuple[str, ...]] | None = None,
) -> Job:
    """Return the job of a program; refuse arguments of a wrong kind."""
    if not isinstance(text, str):
        raise InputError(where, f"the program is {type(text).__name__}", "its text")
    optional_text(where, "dtype", dtype, "float32")
    optional_names(where, "outputs", outputs)
    for name, size in sizes.items():
        if not 1 <= size <= MAX_EXTENT:
            expected = f"an integer from 1 to 2**39 = {MAX_EXTENT}"
            raise InputError(where, f"size {name} is out of range", expected)
    return program_job(text, inputs, sizes, dtype, outputs, specs, roles)


def check_job(where: str, job: Job) -> Job:
    """Return a job that a caller gave; refuse anything else."""
    if not isinstance(job, Job):
        raise InputError(
            where,
            f"job is {type(job).__name__}",
            "a Job",
            "einmpi.load and einmpi.program make one",
        )
    return job


def open_dataset(
    file: str | os.PathLike[str],
    dataset: str | None = None,
    comm: Any = None,
    parts: Sequence[int] | None = None,
    rows: slice | None = None,
    follow: Sequence[str | os.PathLike[str]] = (),
    index: Sequence[int | slice] | None = None,
) -> DistArray:
    """Read a tensor from a file. All ranks call it; each element is read once.

    Parameters
    ----------
    file : path
        A file of any format that a job can read.
    dataset : str, optional
        The name of the tensor in the file: the path of an HDF5 dataset or of an array in a zarr
        store, or the name of a tensor in a safetensors file or in the index of several. An .npy
        file holds a single tensor and needs none; without one, a zarr store is itself an array.
    comm : mpi4py communicator, optional
        The ranks; by default all that mpirun started, or this process alone.
    parts : sequence of int, optional
        Into how many parts to cut each dimension, as for ``DistArray.from_global``.
    rows : slice, optional
        The part of the first dimension to read.
    follow : sequence of path, optional
        Folders to which links in an HDF5 file may lead, besides the folder of the file itself.
    index : sequence of int and slice, optional
        The part to read, dimension by dimension, as numpy would index it; instead of `rows`.

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
    >>> np.save("table.npy", np.arange(12.0).reshape(3, 4))
    >>> einmpi.open_dataset("table.npy", index=np.s_[1:, 2]).gather()
    array([ 6., 10.])
    """
    from einmpi.arrays.dist_array import DistArray

    own_comm = comm_of_program(comm)
    found = together(
        own_comm,
        lambda: find(_input_spec(file, dataset, rows, follow, index)),
        Dataset.as_read,
    )
    return DistArray.from_dataset(found, own_comm, parts)


def _input_spec(
    file: str | os.PathLike[str],
    dataset: str | None,
    rows: slice | None,
    follow: Sequence[str | os.PathLike[str]],
    index: Sequence[int | slice] | None,
) -> InputSpec:
    """Return which part of which tensor to read; refuse wrong arguments of `open_dataset`."""
    path = path_name("open_dataset", file)
    optional_text("open_dataset", "dataset", dataset, "/X")
    if not isinstance(rows, slice | None):
        raise InputError("open_dataset", f"rows is {rows!r}", "a slice such as slice(0, 1000)")
    if rows is not None and index is not None:
        raise InputError("open_dataset", "rows and index are both given", "one of the two")
    slices: tuple[SliceEntry, ...] = ()
    if rows is not None:
        slices = (_slice_entry("rows", rows),)
    elif index is not None:
        entries = index if isinstance(index, tuple | list) else (index,)
        slices = tuple(_slice_entry("index", entry) for entry in entries)
    file_format = known_format(path, path)
    if not dataset:
        dataset = file_format.default_name
    if file_format.key and not dataset:
        raise InputError(
            "open_dataset",
            f"the {file_format.key} of {path} is missing",
            f'a second argument such as "{file_format.example_name}"',
        )
    if not isinstance(follow, list | tuple):
        raise InputError(
            "open_dataset", f"follow is {follow!r}", "a list of folders such as ['/data']"
        )
    folders = tuple(path_name("follow", folder) for folder in follow)
    return InputSpec("", file=path, inside=dataset or "", slices=slices, follow=folders)


def _slice_entry(name: str, given: Any) -> SliceEntry:
    """Return what is selected along a dimension: an index, or (start, stop, step) of a slice."""
    if type(given) is int:
        return given
    if isinstance(given, slice):
        step = 1 if given.step is None else given.step
        has_ends = _is_optional_integer(given.start) and _is_optional_integer(given.stop)
        if has_ends and type(step) is int and step >= 1:
            return given.start, given.stop, step
    expected = "integers and slices with steps of 1 or more, such as slice(0, 1000)"
    raise InputError("open_dataset", f"{name} is {given!r:.60}", expected)


def _is_optional_integer(value: Any) -> bool:
    return value is None or type(value) is int
