"""HDF5 files as they are found: which datasets they have, how these are stored, their elements."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.errors import InputError, one_of
from einmpi.files.datasets import Dataset, RawReader, Reader, check_identity
from einmpi.files.hdf5.links import LinkedFiles, UnsafeLinkError
from einmpi.files.hdf5.opening import (
    check_hdf5,
    damage_reported,
    datasets_in,
    look_up,
    opened,
)
from einmpi.graph.dtypes import numpy_dtypes
from einmpi.schedule.regions import Box

if TYPE_CHECKING:
    import h5py

DType: TypeAlias = np.dtype[Any]

_UNSUPPORTED = {"O": "a string or of variable length", "S": "a string", "V": "opaque"}


def build() -> dict[str, Any]:
    """Return the versions of h5py and HDF5, and whether they were built for parallel writing."""
    import h5py

    return {
        "h5py": h5py.__version__,
        "hdf5": h5py.version.hdf5_version,
        "parallel": bool(h5py.get_config().mpi),
    }


def dataset_path(place: str, text: str) -> str:
    """Return the one spelling of a dataset's path that is used: /a/b."""
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if not parts or "\0" in text:
        raise InputError(
            place, f"{text!r:.60} is not the path of a dataset", "a path such as /Z or /group/Z"
        )
    return "/" + "/".join(parts)


def find(file: str, dataset: str, place: str = "", follow: Sequence[str] = ()) -> Dataset:
    """Look up a dataset without reading its elements.

    All files that it needs are in its folder, or in one of the folders `follow`.
    """
    check_hdf5(file, place)
    links = LinkedFiles(file, place, follow)
    links.add(file)
    with opened(file, place) as handle, damage_reported(file, dataset, place):
        links.visit(handle, file, dataset)
        found = look_up(handle, file, dataset, place or file)
        dtype = _supported_dtype(found, file, dataset, place)
        offset = None
        # HDF5 itself has to supply the fill value of a dataset without allocated elements, to
        # follow a link into another file, and to read elements that are in other files.
        in_this_file = found.file.filename == handle.filename and not found.external
        if found.size and in_this_file and as_in_memory(found, dtype):
            offset = offset_in_file(found)
        described = Dataset(
            file,
            dataset,
            place,
            found.shape,
            dtype.str,
            found.chunks,
            offset,
            sources=links.sources,
            decoded=links.decoded,
        )
        return described.with_header_of_facts()


def list_datasets(file: str, place: str, most: int) -> list[str]:
    """Return the paths of the first datasets in a file. Links are not followed."""
    with opened(file, place) as handle, damage_reported(file, "/", place):
        return datasets_in(handle, most)


def open_reader(dataset: Dataset) -> Reader:
    """Open a dataset: without the library if its elements are stored contiguously."""
    if dataset.offset is None:
        return Hdf5Reader(dataset)
    return RawReader(dataset)


class Hdf5Reader:
    """A dataset that is read through HDF5: with chunks, filters, or elements in other files."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.stack = contextlib.ExitStack()
        handle = self.stack.enter_context(opened(dataset.file, dataset.place))
        check_identity(dataset, os.fstat(handle.id.get_vfd_handle()))
        with damage_reported(dataset.file, dataset.name, dataset.place):
            self.found = look_up(handle, dataset.file, dataset.name, dataset.where)

    def close(self) -> None:
        self.stack.close()

    def read(self, there: Box, target: npt.NDArray[Any], here: Box) -> None:
        """Read a box of the dataset into a box of the target."""
        if not target[here].size:
            return
        # A chunk may be damaged, or a filter missing in this build of HDF5.
        with damage_reported(self.dataset.file, self.dataset.name, self.dataset.place):
            self.found.read_direct(target, there, here)


def find_given(given: Any) -> Dataset | None:
    """Return the h5py dataset that a caller gives, if other processes can open it too.

    This holds for a file on disk that is opened for reading. For all else return None.
    """
    if not type(given).__module__.startswith("h5py"):
        return None
    import h5py

    if not isinstance(given, h5py.Dataset) or not given.name:
        return None
    file = given.file
    if file.mode != "r" or file.driver != "sec2" or not os.path.isfile(file.filename):
        return None
    try:
        # The caller's program has opened it, and may follow a link to anywhere.
        found = find(file.filename, given.name, follow=["/"])
    except UnsafeLinkError:
        raise
    except InputError:
        return None
    if found.shape != given.shape or found.dtype != given.dtype.newbyteorder("="):
        return None
    return found


# ---- how a dataset is stored ---------------------------------------------------------------------


def _supported_dtype(found: h5py.Dataset, file: str, dataset: str, place: str) -> DType:
    """Return the dtype as stored; raise InputError if the language does not have it."""
    import h5py

    stored: DType = found.dtype
    native = np.dtype(stored.newbyteorder("=").str) if stored.kind in "fcibu" else stored
    enumeration = h5py.check_enum_dtype(stored) is not None
    if native.name in numpy_dtypes() and not enumeration:
        return np.dtype(stored.str)
    if enumeration:
        shown = "an enumeration"
    elif h5py.check_ref_dtype(stored) is not None:
        shown = "a reference"
    elif stored.fields:
        shown = "compound"
    elif stored.subdtype:
        shown = "of an array type"
    else:
        shown = _UNSUPPORTED.get(native.kind, native.name)
    raise InputError(
        place or file,
        f"{dataset} in {file} is {shown}, which is not supported",
        one_of(numpy_dtypes()),
    )


def as_in_memory(found: h5py.Dataset, dtype: DType) -> bool:
    """Return whether elements are stored byte by byte as numpy has them.

    HDF5 also has numbers of odd widths, for which h5py chooses a dtype that can hold them.
    """
    import h5py

    return bool(found.id.get_type().equal(h5py.h5t.py_create(dtype, logical=True)))


def offset_in_file(found: h5py.Dataset) -> int | None:
    """Return where contiguous elements begin in the file, None if they have no space yet.

    For elements without space, HDF5 gives a wrong offset in a file with a user block.
    """
    import h5py

    if found.id.get_space_status() == h5py.h5d.SPACE_STATUS_NOT_ALLOCATED:
        return None
    offset: int | None = found.id.get_offset()
    return offset
