"""Open HDF5 files, look datasets up in them, and report what HDF5 says of damaged ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from einmpi.errors import InputError, nearest_of
from einmpi.files.datasets import MOST_NAMES_COMPARED, check_file
from einmpi.files.hdf5.scales import is_dimension_only

if TYPE_CHECKING:
    import h5py

# What HDF5 and h5py raise for files that are damaged or use features this build cannot read.
_DAMAGE = (OSError, RuntimeError, ValueError, TypeError, KeyError, OverflowError)


def check_hdf5(file: str, place: str) -> None:
    """Refuse what is not a readable file, before HDF5 waits for it."""
    check_file(file, place, "an HDF5 file")


@contextlib.contextmanager
def opened(file: str, place: str) -> Iterator[h5py.File]:
    """Open a file for reading; raise InputError if there is none or it is not HDF5."""
    check_hdf5(file, place)
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
        what = f"{file} cannot be opened as HDF5: {hdf5_reason(error)}"
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
def damage_reported(file: str, dataset: str, place: str) -> Iterator[None]:
    """Turn what HDF5 raises for a damaged file into an InputError."""
    try:
        yield
    except InputError:
        raise
    except _DAMAGE as error:
        raise InputError(
            place or file, f"{dataset} in {file} cannot be read: {hdf5_reason(error)}"
        ) from None


def hdf5_reason(error: BaseException) -> str:
    """Return what HDF5 itself says, without the words of h5py around it and without addresses."""
    text = str(error)
    inner = text.partition("(")[2].rpartition(")")[0] or text
    return " ".join(inner.partition(": eof")[0].split())


# ---- looking up a dataset -----------------------------------------------------------------------


def look_up(handle: h5py.File, file: str, dataset: str, where: str) -> h5py.Dataset:
    """Return a dataset; raise InputError if there is none or it has no values."""
    import h5py

    found = handle.get(dataset)
    if isinstance(found, h5py.Dataset):
        if found.shape is None:
            raise InputError(where, f"{dataset} in {file} has no values", "a dataset with a shape")
        return found
    if isinstance(found, h5py.Group):
        names = datasets_in(found, MOST_NAMES_COMPARED)
        expected = nearest_of(names, "") if names else "a dataset"
        raise InputError(where, f"{dataset} in {file} is a group", expected)
    link = handle.get(dataset, getlink=True)
    if isinstance(link, h5py.SoftLink | h5py.ExternalLink):
        target = link.path
        if isinstance(link, h5py.ExternalLink):
            target = f"{link.filename}:{link.path}"
        raise InputError(
            where, f"{dataset} in {file} is a link to {target}, which does not exist", "a dataset"
        )
    names = datasets_in(handle, MOST_NAMES_COMPARED)
    expected = "a file that has datasets"
    if names:
        expected = nearest_of(names, dataset)
    raise InputError(where, f"there is no dataset {dataset} in {file}", expected)


def datasets_in(group: h5py.Group, most: int) -> list[str]:
    """Return the names of the first datasets of a group that have values.

    Links in it are not followed.
    """
    import h5py

    names: list[str] = []

    def visit(_: str, item: object) -> bool | None:
        if isinstance(item, h5py.Dataset) and not is_dimension_only(item):
            names.append(str(item.name))
        return True if len(names) >= most else None

    group.visititems(visit)
    return names
