"""HDF5 files as they are found: which datasets they have, how these are stored, their elements."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.errors import InputError, one_of
from einmpi.files.datasets import MOST_NAMES_LISTED, Dataset, RawReader, Reader, check_file
from einmpi.graph.dtypes import cpu_dtypes
from einmpi.schedule.regions import Box

if TYPE_CHECKING:
    import h5py

DType: TypeAlias = np.dtype[Any]

_UNSUPPORTED = {"O": "a string or of variable length", "S": "a string", "V": "opaque"}
# What HDF5 and h5py raise for files that are damaged or use features this build cannot read.
_DAMAGE = (OSError, RuntimeError, ValueError, TypeError, KeyError, OverflowError)


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


def find(file: str, dataset: str, place: str = "") -> Dataset:
    """Look up a dataset without reading its elements."""
    with opened(file, place) as handle, _damage_reported(file, dataset, place):
        found = _look_up(handle, file, dataset, place or file)
        dtype = _supported_dtype(found, file, dataset, place)
        _check_sources(found, file, dataset, place)
        offset = None
        # HDF5 itself has to supply the fill value of a dataset without allocated elements, and to
        # follow a link into another file.
        in_this_file = found.file.filename == handle.filename
        if found.size and in_this_file and as_in_memory(found, dtype):
            offset = found.id.get_offset()
        return Dataset(file, dataset, place, found.shape, dtype.str, found.chunks, offset)


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
        with _damage_reported(dataset.file, dataset.name, dataset.place):
            self.found = _look_up(handle, dataset.file, dataset.name, dataset.where)

    def close(self) -> None:
        self.stack.close()

    def read(self, there: Box, target: npt.NDArray[Any], here: Box) -> None:
        """Read a box of the dataset into a box of the target."""
        if not target[here].size:
            return
        # A chunk may be damaged, or a filter missing in this build of HDF5.
        with _damage_reported(self.dataset.file, self.dataset.name, self.dataset.place):
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
        found = find(file.filename, given.name)
    except InputError:
        return None
    if found.shape != given.shape or found.dtype != given.dtype.newbyteorder("="):
        return None
    return found


# ---- opening ------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(file: str, place: str) -> Iterator[h5py.File]:
    """Open a file for reading; raise InputError if there is none or it is not HDF5."""
    check_file(file, place, "an HDF5 file")
    try:
        handle = _open(file)
    except (OSError, RuntimeError, ValueError) as error:
        expected = "an HDF5 file"
        hint = ""
        if isinstance(error, BlockingIOError):
            expected = "a file that no other program is writing"
        elif "unable to lock" in str(error):
            # On a file system without locks, only this setting keeps HDF5 from trying.
            hint = "set HDF5_USE_FILE_LOCKING=FALSE in the environment"
        what = f"{file} cannot be opened as HDF5: {reason(error)}"
        raise InputError(place or file, what, expected, hint) from None
    with handle:
        yield handle


def _open(file: str) -> h5py.File:
    import h5py

    try:
        return h5py.File(file, "r")
    except BlockingIOError:  # another program is writing it
        raise
    except OSError as error:
        if "lock" not in str(error):
            raise
        return h5py.File(file, "r", locking=False)  # a file system without locks


@contextlib.contextmanager
def _damage_reported(file: str, dataset: str, place: str) -> Iterator[None]:
    """Turn what HDF5 raises for a damaged file into an InputError."""
    try:
        yield
    except InputError:
        raise
    except _DAMAGE as error:
        raise InputError(
            place or file, f"{dataset} in {file} cannot be read: {reason(error)}"
        ) from None


def reason(error: BaseException) -> str:
    """Return what HDF5 itself says, without the words of h5py around it and without addresses."""
    text = str(error)
    inner = text.partition("(")[2].rpartition(")")[0] or text
    return " ".join(inner.partition(": eof")[0].split())


# ---- looking up a dataset -----------------------------------------------------------------------


def _look_up(handle: h5py.File, file: str, dataset: str, where: str) -> h5py.Dataset:
    import h5py

    found = handle.get(dataset)
    if isinstance(found, h5py.Dataset):
        if found.shape is None:
            raise InputError(where, f"{dataset} in {file} has no values", "a dataset with a shape")
        return found
    if isinstance(found, h5py.Group):
        names = _datasets_in(found)
        expected = one_of(names, most=MOST_NAMES_LISTED) if names else "a dataset"
        raise InputError(where, f"{dataset} in {file} is a group", expected)
    link = handle.get(dataset, getlink=True)
    if isinstance(link, h5py.SoftLink | h5py.ExternalLink):
        target = link.path
        if isinstance(link, h5py.ExternalLink):
            target = f"{link.filename}:{link.path}"
        raise InputError(
            where, f"{dataset} in {file} is a link to {target}, which does not exist", "a dataset"
        )
    names = _datasets_in(handle)
    expected = "a file that has datasets"
    if names:
        expected = one_of(names, dataset, MOST_NAMES_LISTED)
    raise InputError(where, f"there is no dataset {dataset} in {file}", expected)


def _datasets_in(group: h5py.Group) -> list[str]:
    """Return the names of the first datasets of a group, one more than are listed."""
    import h5py

    names: list[str] = []

    def visit(_: str, item: object) -> bool | None:
        if isinstance(item, h5py.Dataset):
            names.append(str(item.name))
        return True if len(names) > MOST_NAMES_LISTED else None

    group.visititems(visit)
    return names


def _supported_dtype(found: h5py.Dataset, file: str, dataset: str, place: str) -> DType:
    """Return the dtype as stored; raise InputError if the language does not have it."""
    import h5py

    stored: DType = found.dtype
    native = np.dtype(stored.newbyteorder("=").str) if stored.kind in "fcibu" else stored
    enumeration = h5py.check_enum_dtype(stored) is not None
    if native.name in cpu_dtypes() and not enumeration:
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
        one_of(cpu_dtypes()),
    )


def as_in_memory(found: h5py.Dataset, dtype: DType) -> bool:
    """Return whether elements are stored byte by byte as numpy has them.

    HDF5 also has numbers of odd widths, for which h5py chooses a dtype that can hold them.
    """
    import h5py

    return bool(found.id.get_type().equal(h5py.h5t.py_create(dtype, logical=True)))


def _check_sources(found: h5py.Dataset, file: str, dataset: str, place: str) -> None:
    """Refuse a dataset whose elements are in other files that are missing.

    HDF5 would silently substitute fill values.
    """
    holder = found.file.filename  # another file than the opened one behind an external link
    folder = os.path.dirname(os.path.abspath(holder))
    sources: list[tuple[str, str, int]] = []  # file, dataset in it, smallest size in bytes
    if found.is_virtual:
        for source in found.virtual_sources():
            sources.append((source.file_name, source.dset_name, 0))
    elif found.external:
        for name, start, size in found.external:
            if size < 2**63:  # otherwise the size is unlimited
                # These paths are relative to the working folder of the process.
                sources.append((os.path.abspath(name), "", start + size))
    for name, inside, size in sources:
        if "%" in name + inside:  # numbered files: the first that is missing is the end
            continue
        path = holder if name == "." else os.path.join(folder, name)
        if not os.path.isfile(path) or os.path.getsize(path) < size:
            raise InputError(
                place or file,
                f"{dataset} in {file} needs {name}, which is missing or too short",
                "a complete file",
            )
        if inside:
            with opened(path, place) as handle, _damage_reported(path, inside, place):
                _look_up(handle, path, inside, place or path)
