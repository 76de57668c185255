"""Datasets in HDF5 files that are written: HDF5 makes them, and says where the ranks put the elements."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from einmpi.errors import InputError
from einmpi.files.hdf5 import as_in_memory, opened

if TYPE_CHECKING:
    import h5py


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
    with opened(file, next(iter(datasets.values()))) as handle:
        for dataset, place in datasets.items():
            parts = dataset.strip("/").split("/")
            group, rest = handle["/"], parts
            if isinstance(handle.get(dataset), h5py.Group):
                raise InputError(place or file, f"{dataset} in {file} is a group", "a dataset")
            for above in ("/" + "/".join(parts[:end]) for end in range(1, len(parts))):
                found = handle.get(above)
                if found is not None and not isinstance(found, h5py.Group):
                    raise InputError(
                        place or file,
                        f"{above} in {file} is not a group",
                        f"a group to hold {dataset}",
                    )
                if found is not None and found.file.filename != handle.filename:
                    raise InputError(
                        place or file,
                        f"{above} in {file} is a group of another file",
                        f"a group of {file} to hold {dataset}",
                    )
                if found is None and handle.get(above, getlink=True) is not None:
                    raise InputError(
                        place or file,
                        f"{above} in {file} is a link to what is not there",
                        f"a group to hold {dataset}",
                    )
                if found is not None:
                    group, rest = found, parts[above.count("/") :]
            address = h5py.h5o.get_info(group.id).addr
            for other, path in taken:
                if other == address and all(
                    one == two for one, two in zip(path, rest, strict=False)
                ):
                    raise InputError(
                        place or file,
                        f"{dataset} in {file} would be another output too, by a link",
                        "a dataset of its own for each output",
                    )
            taken.append((address, rest))


def written_over(file: str, datasets: Mapping[str, Kind]) -> list[tuple[int, int]]:
    """The ranges of bytes of datasets in a file that will be used again for others of the same kind."""
    with opened(file, "") as handle:
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
            made = (
                handle[name]
                if handle.get(name, getlink=True) is not None
                else _make(handle, name, kind)
            )
            for key, value in attributes.items():
                if (
                    key not in made.attrs or str(made.attrs[key]) != value
                ):  # or the file would grow with each run
                    made.attrs[key] = value
            places.append((None if made.chunks else made.id.get_offset(), made.chunks))
    return places


def _make(handle: h5py.File, name: str, kind: Kind) -> h5py.Dataset:
    import h5py

    if kind.chunks or kind.compression:
        return handle.create_dataset(
            name, kind.shape, kind.dtype, chunks=kind.chunks, compression=kind.compression
        )
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
    if (
        not isinstance(found, h5py.Dataset)
        or h5py.h5o.get_info(found.id).rc != 1
        or found.maxshape != found.shape
    ):
        return False
    properties = found.id.get_create_plist()
    filters = [properties.get_filter(k)[0] for k in range(properties.get_nfilters())]
    wanted = {"gzip": [h5py.h5z.FILTER_DEFLATE], "lzf": [h5py.h5z.FILTER_LZF], None: []}[
        kind.compression
    ]
    if (found.shape, found.dtype) != (kind.shape, np.dtype(kind.dtype)) or filters != wanted:
        return False
    if not as_in_memory(found, found.dtype):
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
        made = memory.create_dataset(
            "x", data=array, chunks=chunks, compression=compression, maxshape=growing
        )
        made.flush()
        return [made.id.read_direct_chunk(corner) for corner in _corners(array.shape, chunks)]


def _corners(shape: tuple[int, ...], chunks: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Where each chunk begins, in order."""
    return itertools.product(
        *(range(0, extent, chunk) for extent, chunk in zip(shape, chunks, strict=True))
    )


@contextlib.contextmanager
def chunk_writer(
    draft: str, dataset: str
) -> Iterator[Callable[[tuple[int, ...], int, bytes], None]]:
    """Writes chunks that are ready: where each begins, and what `encode` gave."""
    import h5py

    with h5py.File(draft, "r+", locking=False) as handle:
        made = handle[dataset]
        # Chunks of a dataset that is used again seldom fit into their old places, and HDF5 forgets free space when the
        # file is closed. So all of it is freed first.
        for corner in (
            _corners(made.shape, made.chunks)
            if made.compression and made.id.get_num_chunks()
            else ()
        ):
            made.id.write_direct_chunk(corner, b"\0")
        yield lambda corner, mask, data: made.id.write_direct_chunk(corner, data, mask)
