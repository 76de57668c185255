"""HDF5 files as they are found: which datasets are there, how they are stored, their values."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.files.datasets import LISTED, Dataset, check_file
from einmpi.graph.dtypes import cpu_dtypes
from einmpi.schedule.regions import Box

if TYPE_CHECKING:
    import h5py

_FOREIGN = {"O": "a string or of variable length", "S": "a string", "V": "opaque"}
# What HDF5 and h5py raise for files that are damaged, or use what this build cannot read.
_DAMAGE = (OSError, RuntimeError, ValueError, TypeError, KeyError, OverflowError)


def build() -> dict[str, Any]:
    """Versions of h5py and of HDF5, and whether they were built for parallel writing."""
    import h5py

    return {
        "h5py": h5py.__version__,
        "hdf5": h5py.version.hdf5_version,
        "parallel": bool(h5py.get_config().mpi),
    }


def find(file: str, dataset: str, place: str = "") -> Dataset:
    """Where a dataset is and how it is stored; no values are read."""
    with opened(file, place) as handle:
        found = _dataset(handle, file, dataset, place)
        try:
            dtype = _dtype(found, file, dataset, place)
            _check_sources(found, file, dataset, place)
            # Of a dataset without values in the file, HDF5 knows what to fill in; a link may lead to another file.
            here = (
                found.size and found.file.filename == handle.filename and as_in_memory(found, dtype)
            )
            offset = found.id.get_offset() if here else None
            return Dataset(file, dataset, place, found.shape, dtype.str, found.chunks, offset)
        except _DAMAGE as error:
            raise _unreadable(error, file, dataset, place) from None


class Hdf5Reader:
    """Any dataset, through the library: chunks, filters, values elsewhere."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.stack = contextlib.ExitStack()
        handle = self.stack.enter_context(opened(dataset.file, dataset.place))
        self.found = _dataset(handle, dataset.file, dataset.name, dataset.place)

    def close(self) -> None:
        self.stack.close()

    def read(self, there: Box, target: np.ndarray, here: Box) -> None:
        if not target[here].size:
            return
        try:
            self.found.read_direct(target, there, here)
        except _DAMAGE as error:  # a damaged chunk, a filter this HDF5 does not have
            raise _unreadable(
                error, self.dataset.file, self.dataset.name, self.dataset.place
            ) from None


def reopened(given: Any) -> Dataset | None:
    """A dataset of h5py that other processes can open too: in a file on disk that nobody changes through it."""
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
    return (
        found
        if found.shape == given.shape and found.dtype == given.dtype.newbyteorder("=")
        else None
    )


@contextlib.contextmanager
def opened(file: str, place: str) -> Iterator[h5py.File]:
    """A file to read; InputError where there is none or it is not HDF5."""
    check_file(file, place, "an HDF5 file")
    try:
        handle = _open(file)
    except (OSError, RuntimeError, ValueError) as error:
        allowed = "an HDF5 file"
        if "unable to lock" in str(error):
            # Where there are no locks, only this setting keeps HDF5 from trying after all.
            busy = isinstance(error, BlockingIOError)
            allowed = "a file that nobody writes to now" if busy else "HDF5_USE_FILE_LOCKING=FALSE"
        raise InputError(
            place or file, f"{file} cannot be opened as HDF5: {reason(error)}", allowed
        ) from None
    with handle:
        yield handle


def _open(file: str) -> h5py.File:
    import h5py

    try:
        return h5py.File(file, "r")
    except BlockingIOError:  # somebody writes to it
        raise
    except OSError as error:
        if "lock" not in str(error):
            raise
        return h5py.File(file, "r", locking=False)  # a file system without locks


def _unreadable(error: Exception, file: str, dataset: str, place: str) -> InputError:
    return InputError(place or file, f"{dataset} in {file} cannot be read: {reason(error)}")


def reason(error: BaseException) -> str:
    """What HDF5 itself says, without h5py's words around it and without numbers nobody needs."""
    text = str(error)
    inner = text.partition("(")[2].rpartition(")")[0] or text
    return " ".join(inner.partition(": eof")[0].split())


def _dataset(handle: h5py.File, file: str, dataset: str, place: str) -> h5py.Dataset:
    try:
        return _looked_up(handle, file, dataset, place or file)
    except _DAMAGE as error:
        raise _unreadable(error, file, dataset, place) from None


def _looked_up(handle: h5py.File, file: str, dataset: str, where: str) -> h5py.Dataset:
    import h5py

    found = handle.get(dataset)
    if isinstance(found, h5py.Dataset):
        if found.shape is None:
            raise InputError(where, f"{dataset} in {file} has no values", "a dataset with a shape")
        return found
    if isinstance(found, h5py.Group):
        raise InputError(
            where, f"{dataset} in {file} is a group", f"a dataset; {_listing(_datasets_in(found))}"
        )
    link = handle.get(dataset, getlink=True)
    if isinstance(link, h5py.SoftLink | h5py.ExternalLink):
        target = (
            f"{link.filename}:{link.path}" if isinstance(link, h5py.ExternalLink) else link.path
        )
        raise InputError(
            where, f"{dataset} in {file} is a link to {target}, which is not there", "a dataset"
        )
    raise InputError(
        where, f"there is no dataset {dataset} in {file}", _listing(_datasets_in(handle), dataset)
    )


def _datasets_in(group: h5py.Group) -> list[str]:
    """The first datasets of a group, one more than are listed."""
    import h5py

    names: list[str] = []

    def visit(_: str, item: object) -> bool | None:
        if isinstance(item, h5py.Dataset):
            names.append(str(item.name))
        return True if len(names) > LISTED else None

    group.visititems(visit)
    return names


def _listing(names: list[str], wrong: str = "") -> str:
    if not names:
        return "it has no datasets"
    return one_of(names, wrong, LISTED)


def _dtype(found: h5py.Dataset, file: str, dataset: str, place: str) -> np.dtype:
    """As stored, where it is one of ours."""
    import h5py

    stored: np.dtype = found.dtype
    native = np.dtype(stored.newbyteorder("=").str) if stored.kind in "fcibu" else stored
    enumeration = h5py.check_enum_dtype(stored) is not None
    if native.name in cpu_dtypes() and not enumeration:
        return np.dtype(stored.str)
    shown = _FOREIGN.get(native.kind, native.name)
    if enumeration:
        shown = "an enumeration"
    elif h5py.check_ref_dtype(stored) is not None:
        shown = "a reference"
    elif stored.fields or stored.subdtype:
        shown = "compound" if stored.fields else "of an array type"
    raise InputError(
        place or file,
        f"{dataset} in {file} is {shown}, which is not supported",
        one_of(cpu_dtypes()),
    )


def as_in_memory(found: h5py.Dataset, dtype: np.dtype) -> bool:
    """Whether values lie in the file byte by byte as numpy has them. HDF5 also has numbers of odd widths, which h5py
    turns into a dtype that can hold them."""
    import h5py

    return bool(found.id.get_type().equal(h5py.h5t.py_create(dtype, logical=True)))


def _check_sources(found: h5py.Dataset, file: str, dataset: str, place: str) -> None:
    """Values in other files. HDF5 would put in others where these are missing, and say nothing."""
    holder = (
        found.file.filename
    )  # another file than the one that was opened, behind an external link
    folder = os.path.dirname(os.path.abspath(holder))
    sources: list[tuple[str, str, int]] = []  # file, dataset in it, least size
    if found.is_virtual:
        sources = [(source.file_name, source.dset_name, 0) for source in found.virtual_sources()]
    elif found.external:
        # Their paths count from where the process runs.
        sources = [
            (os.path.abspath(name), "", start + size)
            for name, start, size in found.external
            if size < 2**63
        ]
    for name, inside, size in sources:
        path = holder if name == "." else os.path.join(folder, name)
        if "%" in name + inside:  # numbered files: the first that is missing is the end
            continue
        if not os.path.isfile(path) or os.path.getsize(path) < size:
            raise InputError(
                place or file,
                f"{dataset} in {file} needs {name}, which is not there or too short",
                "a file that is whole",
            )
        if inside:
            with opened(path, place) as handle:
                _dataset(handle, path, inside, place)
