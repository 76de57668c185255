"""Read a tensor from a file to the ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from einmpi.arguments import optional_text, path_name
from einmpi.comm.agreement import together
from einmpi.errors import InputError
from einmpi.files.datasets import Dataset
from einmpi.files.formats import find, known_format
from einmpi.files.specs import InputSpec, SliceEntry

if TYPE_CHECKING:
    from einmpi.arrays.dist_array import DistArray


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
    from einmpi.comm.programs import comm_of_program

    def find_tensor() -> Dataset:
        return find(_input_spec(file, dataset, rows, follow, index))

    own_comm = comm_of_program(comm)
    found = together(own_comm, find_tensor, Dataset.as_read)
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
