"""HDF5 files, the only module that imports h5py. A file that is written to is replaced whole or not touched."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.graph.scalar import DTYPES
from einmpi.runtime.datasets import Dataset, check_file
from einmpi.schedule.regions import Box

if TYPE_CHECKING:
    import h5py

_LISTED = 8
_FOREIGN = {"O": "a string or of variable length", "S": "a string", "V": "opaque"}
# What HDF5 and h5py raise for files that are damaged, or use what this build cannot read.
_DAMAGE = (OSError, RuntimeError, ValueError, TypeError, KeyError, OverflowError)


def build() -> dict[str, Any]:
    """Versions of h5py and of HDF5, and whether they were built for parallel writing."""
    import h5py

    return {"h5py": h5py.__version__, "hdf5": h5py.version.hdf5_version, "parallel": bool(h5py.get_config().mpi)}


def find(file: str, dataset: str, place: str = "") -> Dataset:
    """Where a dataset is and how it is stored; no values are read."""
    with _opened(file, place) as handle:
        found = _dataset(handle, file, dataset, place)
        try:
            dtype = _dtype(found, file, dataset, place)
            _check_sources(found, file, dataset, place)
            # Of a dataset without values in the file, HDF5 knows what to fill in; a link may lead to another file.
            here = found.size and found.file.filename == handle.filename and _as_in_memory(found, dtype)
            offset = found.id.get_offset() if here else None
            return Dataset(file, dataset, place, found.shape, dtype.str, found.chunks, offset)
        except _DAMAGE as error:
            raise _unreadable(error, file, dataset, place) from None


class Hdf5Reader:
    """Any dataset, through the library: chunks, filters, values elsewhere."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.stack = contextlib.ExitStack()
        handle = self.stack.enter_context(_opened(dataset.file, dataset.place))
        self.found = _dataset(handle, dataset.file, dataset.name, dataset.place)

    def close(self) -> None:
        self.stack.close()

    def read(self, there: Box, target: np.ndarray, here: Box) -> None:
        if not target[here].size:
            return
        try:
            self.found.read_direct(target, there, here)
        except _DAMAGE as error:  # a damaged chunk, a filter this HDF5 does not have
            raise _unreadable(error, self.dataset.file, self.dataset.name, self.dataset.place) from None


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
    return found if found.shape == given.shape and found.dtype == given.dtype.newbyteorder("=") else None


@contextlib.contextmanager
def _opened(file: str, place: str) -> Iterator[h5py.File]:
    check_file(file, place, "an HDF5 file")
    try:
        handle = _open(file)
    except (OSError, RuntimeError, ValueError) as error:
        allowed = "an HDF5 file"
        if "lock" in str(error):
            # Where there are no locks, only this setting keeps HDF5 from trying after all.
            busy = isinstance(error, BlockingIOError)
            allowed = "a file that nobody writes to now" if busy else "HDF5_USE_FILE_LOCKING=FALSE"
        raise InputError(place or file, f"{file} cannot be opened as HDF5: {reason(error)}", allowed) from None
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
        raise InputError(where, f"{dataset} in {file} is a group", f"a dataset; {_listing(_datasets_in(found))}")
    link = handle.get(dataset, getlink=True)
    if isinstance(link, h5py.SoftLink | h5py.ExternalLink):
        target = f"{link.filename}:{link.path}" if isinstance(link, h5py.ExternalLink) else link.path
        raise InputError(where, f"{dataset} in {file} is a link to {target}, which is not there", "a dataset")
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
    """As stored, where it is one of ours."""
    import h5py

    stored: np.dtype = found.dtype
    native = np.dtype(stored.newbyteorder("=").str) if stored.kind in "fcibu" else stored
    enumeration = h5py.check_enum_dtype(stored) is not None
    if native.name in DTYPES and not enumeration:
        return np.dtype(stored.str)
    shown = _FOREIGN.get(native.kind, native.name)
    if enumeration:
        shown = "an enumeration"
    elif h5py.check_ref_dtype(stored) is not None:
        shown = "a reference"
    elif stored.fields or stored.subdtype:
        shown = "compound" if stored.fields else "of an array type"
    raise InputError(place or file, f"{dataset} in {file} is {shown}, which is not supported", one_of(DTYPES))


def _as_in_memory(found: h5py.Dataset, dtype: np.dtype) -> bool:
    """Whether values lie in the file byte by byte as numpy has them. HDF5 also has numbers of odd widths, which h5py
    turns into a dtype that can hold them."""
    import h5py

    return bool(found.id.get_type().equal(h5py.h5t.py_create(dtype, logical=True)))


def _check_sources(found: h5py.Dataset, file: str, dataset: str, place: str) -> None:
    """Values in other files. HDF5 would put in others where these are missing, and say nothing."""
    holder = found.file.filename  # another file than the one that was opened, behind an external link
    folder = os.path.dirname(os.path.abspath(holder))
    sources: list[tuple[str, str, int]] = []  # file, dataset in it, least size
    if found.is_virtual:
        sources = [(source.file_name, source.dset_name, 0) for source in found.virtual_sources()]
    elif found.external:
        # Their paths count from where the process runs.
        sources = [(os.path.abspath(name), "", start + size) for name, start, size in found.external
                   if size < 2**63]  # fmt: skip
    for name, inside, size in sources:
        path = holder if name == "." else os.path.join(folder, name)
        if "%" in name + inside:  # numbered files: the first that is missing is the end
            continue
        if not os.path.isfile(path) or os.path.getsize(path) < size:
            raise InputError(place or file, f"{dataset} in {file} needs {name}, which is not there or too short",
                             "a file that is whole")  # fmt: skip
        if inside:
            with _opened(path, place) as handle:
                _dataset(handle, path, inside, place)


# ---- writing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """What a dataset is to be."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...] | None = None
    compression: str | None = None


# Where the elements of a dataset go: its first byte in the file, or the shape of its chunks; neither: it has none.
Place: TypeAlias = tuple[int | None, tuple[int, ...] | None]
Chunk: TypeAlias = tuple[int, bytes]  # as it is stored: which filters were left out, and its bytes


def check_target(file: str, datasets: Mapping[str, str]) -> None:
    """Refuse datasets that an existing file cannot take, before anything is computed; each with its place."""
    import h5py

    taken: list[tuple[int, list[str]]] = []  # the last group that is there, and the path from it on
    with _opened(file, next(iter(datasets.values()))) as handle:
        for dataset, place in datasets.items():
            parts = dataset.strip("/").split("/")
            group, rest = handle["/"], parts
            if isinstance(handle.get(dataset), h5py.Group):
                raise InputError(place or file, f"{dataset} in {file} is a group", "a dataset")
            for above in ("/" + "/".join(parts[:end]) for end in range(1, len(parts))):
                found = handle.get(above)
                if found is not None and not isinstance(found, h5py.Group):
                    raise InputError(place or file, f"{above} in {file} is not a group", f"a group to hold {dataset}")
                if found is not None and found.file.filename != handle.filename:
                    raise InputError(place or file, f"{above} in {file} is a group of another file",
                                     f"a group of {file} to hold {dataset}")  # fmt: skip
                if found is None and handle.get(above, getlink=True) is not None:
                    raise InputError(place or file, f"{above} in {file} is a link to what is not there",
                                     f"a group to hold {dataset}")  # fmt: skip
                if found is not None:
                    group, rest = found, parts[above.count("/") :]
            address = h5py.h5o.get_info(group.id).addr
            for other, path in taken:
                if other == address and all(one == two for one, two in zip(path, rest, strict=False)):
                    raise InputError(place or file, f"{dataset} in {file} would be another output too, by a link",
                                     "a dataset of its own for each output")  # fmt: skip
            taken.append((address, rest))


def written_over(file: str, datasets: Mapping[str, Kind]) -> list[tuple[int, int]]:
    """The ranges of bytes of datasets in a file that will be used again for others of the same kind."""
    with _opened(file, "") as handle:
        reused = [handle[name] for name, kind in datasets.items() if _reusable(handle, name, kind)]
        places = [(found.id.get_offset(), found.nbytes) for found in reused]
        return [(offset, offset + nbytes) for offset, nbytes in places if offset is not None]


def lay_out(draft: str, datasets: Mapping[str, Kind], attributes: Mapping[str, str]) -> list[Place]:
    """Make the datasets in a file, without their elements; the rest of the file stays.

    One of the same kind is used again: it keeps its attributes, and the file does not grow.
    """
    import h5py

    places: list[Place] = []
    with h5py.File(draft, "r+" if os.path.getsize(draft) else "w", locking=False) as handle:
        for name, kind in datasets.items():
            if not _reusable(handle, name, kind) and handle.get(name, getlink=True) is not None:
                del handle[name]
        for name, kind in datasets.items():
            made = handle[name] if handle.get(name, getlink=True) is not None else _make(handle, name, kind)
            for key, value in attributes.items():
                made.attrs[key] = value
            places.append((None if made.chunks else made.id.get_offset(), made.chunks))
    return places


def _make(handle: h5py.File, name: str, kind: Kind) -> h5py.Dataset:
    import h5py

    if kind.chunks or kind.compression:
        return handle.create_dataset(name, kind.shape, kind.dtype, chunks=kind.chunks, compression=kind.compression)
    # The place is fixed at once and nothing is written there: the ranks do that, past HDF5. Nor is the time written:
    # the same run gives the same file.
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    properties.set_obj_track_times(False)
    above, _, last = name.strip("/").rpartition("/")
    group = handle.require_group(above) if above else handle
    dtype = h5py.h5t.py_create(np.dtype(kind.dtype), logical=True)
    space = h5py.h5s.create_simple(kind.shape) if kind.shape else h5py.h5s.create(h5py.h5s.SCALAR)
    return h5py.Dataset(h5py.h5d.create(group.id, last.encode(), dtype, space, properties))


def _reusable(handle: h5py.File, name: str, kind: Kind) -> bool:
    """Whether it is there, under this name alone, and stored as it would be if it were made anew."""
    import h5py

    if not isinstance(handle.get(name, getlink=True), h5py.HardLink):
        return False
    found = handle[name]
    if not isinstance(found, h5py.Dataset) or h5py.h5o.get_info(found.id).rc != 1 or found.maxshape != found.shape:
        return False
    properties = found.id.get_create_plist()
    filters = [properties.get_filter(k)[0] for k in range(properties.get_nfilters())]
    wanted = {"gzip": [h5py.h5z.FILTER_DEFLATE], "lzf": [h5py.h5z.FILTER_LZF], None: []}[kind.compression]
    if (found.shape, found.dtype) != (kind.shape, np.dtype(kind.dtype)) or filters != wanted:
        return False
    if not _as_in_memory(found, found.dtype):
        return False
    if kind.chunks or kind.compression:
        return found.chunks is not None and kind.chunks in (None, found.chunks)
    plain = properties.get_layout() == h5py.h5d.CONTIGUOUS and not properties.get_external_count()
    return plain and (found.id.get_offset() is not None or not found.nbytes)


def encode(array: np.ndarray, chunks: tuple[int, ...], compression: str | None) -> list[Chunk]:
    """An array cut into chunks, in order. HDF5 itself makes them, in memory, so every rank can do its own."""
    import h5py

    with h5py.File(f"{id(array)}", "w", driver="core", backing_store=False) as memory:
        growing = (None,) * array.ndim  # or a chunk could not be larger than the array
        made = memory.create_dataset("x", data=array, chunks=chunks, compression=compression, maxshape=growing)
        made.flush()
        return [made.id.read_direct_chunk(corner) for corner in _corners(array.shape, chunks)]


def _corners(shape: tuple[int, ...], chunks: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Where each chunk begins, in order."""
    return itertools.product(*(range(0, extent, chunk) for extent, chunk in zip(shape, chunks, strict=True)))


@contextlib.contextmanager
def chunk_writer(draft: str, dataset: str) -> Iterator[Callable[[tuple[int, ...], int, bytes], None]]:
    """Writes chunks that are ready: where each begins, and what `encode` gave."""
    import h5py

    with h5py.File(draft, "r+", locking=False) as handle:
        made = handle[dataset]
        # Chunks of a dataset that is used again seldom fit into their old places, and HDF5 forgets free space when the
        # file is closed. So all of it is freed first.
        for corner in _corners(made.shape, made.chunks) if made.compression and made.id.get_num_chunks() else ():
            made.id.write_direct_chunk(corner, b"\0")
        yield lambda corner, mask, data: made.id.write_direct_chunk(corner, data, mask)
