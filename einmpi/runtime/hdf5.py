"""HDF5 files, the only module that imports h5py. A file that is written to is replaced whole or not touched."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from einmpi.errors import EinmpiError, InputError, one_of
from einmpi.graph.scalar import DTYPES
from einmpi.schedule.regions import Box

if TYPE_CHECKING:
    import h5py

Datasets: TypeAlias = Mapping[str, tuple[np.ndarray, Mapping[str, Any]]]  # path → array, options of create_dataset
_LISTED = 8
_FOREIGN = {"O": "a string or of variable length", "S": "a string", "V": "compound"}


def build() -> dict[str, Any]:
    """Versions of h5py and of HDF5, and whether they were built for parallel writing."""
    import h5py

    return {"h5py": h5py.__version__, "hdf5": h5py.version.hdf5_version, "parallel": bool(h5py.get_config().mpi)}


def describe(file: str, dataset: str, place: str = "") -> tuple[tuple[int, ...], str]:
    """Shape and dtype of a dataset; nothing else of it is read."""
    with _opened(file, place) as handle:
        found = _dataset(handle, file, dataset, place)
        return found.shape, _dtype(found, file, dataset, place).name


def read(file: str, dataset: str, place: str, target: np.ndarray, boxes: Iterable[tuple[Box, Box]]) -> None:
    """Boxes of a dataset into boxes of an array, in this machine's byte order. The shape and dtype are as expected."""
    with _opened(file, place) as handle:
        found = _dataset(handle, file, dataset, place)
        for there, here in boxes:
            if target[here].size:
                try:
                    found.read_direct(target, there, here)
                except (OSError, RuntimeError) as error:  # a damaged chunk, a filter this HDF5 does not have
                    raise InputError(place or file, f"{dataset} in {file} cannot be read: {_reason(error)}") from None


@contextlib.contextmanager
def _opened(file: str, place: str) -> Iterator[h5py.File]:
    import h5py

    _check_readable(file, place)
    try:
        handle = h5py.File(file, "r")
    except OSError as error:
        raise InputError(place or file, f"{file} cannot be opened as HDF5: {_reason(error)}", "an HDF5 file") from None
    with handle:
        yield handle


def _check_readable(file: str, place: str) -> None:
    where = place or file
    if not os.path.exists(file):
        raise InputError(where, f"there is no file {file}", "paths are relative to the job file")
    if not os.path.isfile(file):
        raise InputError(where, f"{file} is not a file", "an HDF5 file")
    if not os.access(file, os.R_OK):
        raise InputError(where, f"{file} may not be read", "a file with read permission")


def _reason(error: Exception) -> str:
    """What HDF5 itself says, without h5py's words around it and without numbers nobody needs."""
    text = str(error)
    inner = text.partition("(")[2].rpartition(")")[0] or text
    return " ".join(inner.partition(": eof")[0].split())


def _dataset(handle: h5py.File, file: str, dataset: str, place: str) -> h5py.Dataset:
    import h5py

    found, where = handle.get(dataset), place or file
    if isinstance(found, h5py.Dataset):
        if found.shape is None:
            raise InputError(where, f"{dataset} in {file} has no values", "a dataset with a shape")
        return found
    if isinstance(found, h5py.Group):
        raise InputError(where, f"{dataset} in {file} is a group", f"a dataset; {_listing(_datasets_in(found))}")
    raise InputError(where, f"there is no dataset {dataset} in {file}", _listing(_datasets_in(handle), dataset))


def _datasets_in(group: h5py.Group) -> list[str]:
    """The first datasets of a group, one more than are listed."""
    import h5py

    names: list[str] = []

    def visit(_: str, item: object) -> bool | None:
        if isinstance(item, h5py.Dataset):
            names.append(str(item.name))
        return True if len(names) > _LISTED else None

    group.visititems(visit)
    return names


def _listing(names: list[str], wrong: str = "") -> str:
    if not names:
        return "it has no datasets"
    return one_of(names[:_LISTED], wrong) + (", …" if len(names) > _LISTED else "")


def _dtype(found: h5py.Dataset, file: str, dataset: str, place: str) -> np.dtype:
    stored: np.dtype = found.dtype
    native = np.dtype(stored.newbyteorder("=").str) if stored.kind in "fcibu" else stored
    if native.name not in DTYPES:
        shown = _FOREIGN.get(native.kind, native.name)
        raise InputError(place or file, f"{dataset} in {file} is {shown}, which is not supported", one_of(DTYPES))
    return native


# ---- writing --------------------------------------------------------------------------------------------------------


def check_target(file: str, datasets: Mapping[str, str]) -> None:
    """Refuse what could not be written, before anything is computed; `datasets` gives the place of each."""
    target = os.path.realpath(file)
    folder, where = os.path.dirname(target), next(iter(datasets.values()), "") or file
    if not os.path.isdir(folder):
        raise InputError(where, f"there is no folder for {file}", "a folder that exists")
    # A file is replaced, for which its folder's permission would do. But who made it read-only wants to keep it.
    kept = os.path.exists(target) and not os.stat(target).st_mode & 0o222
    if kept or not os.access(folder, os.W_OK):
        raise InputError(where, f"{file} may not be written", "a file and a folder with write permission")
    if not os.path.exists(target):
        return
    import h5py

    with _opened(file, where) as handle:
        for dataset, place in datasets.items():
            parts = dataset.strip("/").split("/")
            if isinstance(handle.get(dataset), h5py.Group):
                raise InputError(place or file, f"{dataset} in {file} is a group", "a dataset")
            for above in ("/" + "/".join(parts[:end]) for end in range(1, len(parts))):
                if handle.get(above) is not None and not isinstance(handle.get(above), h5py.Group):
                    raise InputError(place or file, f"{above} in {file} is not a group", f"a group to hold {dataset}")


def write(file: str, datasets: Datasets, attributes: Mapping[str, str] | None = None, place: str = "") -> None:
    """Write or replace datasets, each with these attributes; the rest of an existing file is kept."""
    check_target(file, dict.fromkeys(datasets, place))
    target = os.path.realpath(file)  # a link stays a link
    draft = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.{secrets.token_hex(8)}.part")
    try:
        with open(draft, "xb"):
            pass  # made with the user's own permissions
        if os.path.exists(target):
            shutil.copyfile(target, draft)
            shutil.copymode(target, draft)
        _fill(draft, datasets, attributes or {}, append=os.path.exists(target))
        _sync(draft, os.O_RDWR)
        os.replace(draft, target)
        _sync(os.path.dirname(target), os.O_RDONLY)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.remove(draft)
        if isinstance(error, OSError | RuntimeError | ValueError):  # what h5py and a full disk raise
            number = getattr(error, "errno", None)
            reason = os.strerror(number) if number else _reason(error)
            raise EinmpiError(f"{place or file}: {file} cannot be written: {reason}") from error
        raise


def _fill(draft: str, datasets: Datasets, attributes: Mapping[str, str], append: bool) -> None:
    import h5py

    with h5py.File(draft, "r+" if append else "w") as handle:
        for name, (array, options) in datasets.items():
            if handle.get(name, getlink=True) is not None:
                del handle[name]
            made = handle.create_dataset(name, data=array, **options)
            for key, value in attributes.items():
                made.attrs[key] = value
        handle.flush()


def _sync(path: str, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
