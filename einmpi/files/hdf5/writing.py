"""Datasets in HDF5 files that are written: HDF5 makes them and says where the elements go."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from einmpi.errors import InputError
from einmpi.files.atomic import check_room, make_draft
from einmpi.files.datasets import Array
from einmpi.files.hdf5.datasets import as_in_memory, follow_inside, offset_in_file
from einmpi.files.hdf5.opening import (
    damage_reported,
    hdf5_reason,
    make_way,
    name_dimensions,
    opened,
    release_parts,
)
from einmpi.files.specs import Place, StorageSpec
from einmpi.schedule.regions import Runs, whole

if TYPE_CHECKING:
    import h5py

# A chunk as it is stored: a mask of the filters that were skipped, and its bytes.
Chunk: TypeAlias = tuple[int, bytes]
CHUNKS_COMPRESSED_TOGETHER = 2**10  # HDF5 needs about 5 KiB for each, besides its bytes
WriteChunk: TypeAlias = Callable[[tuple[int, ...], int, bytes], None]

# ---- before the run -----------------------------------------------------------------------------


def check_target(file: str, datasets: Mapping[str, str]) -> None:
    """Refuse datasets that an existing file cannot take, before anything is computed.

    `datasets` has the place of each in the job file.
    """
    import h5py

    # The datasets so far: the address of the last group that exists, and the path from there.
    used: list[tuple[int, list[str]]] = []
    with opened(file, next(iter(datasets.values()))) as handle:
        for dataset, place in datasets.items():
            where = place or file
            with damage_reported(file, dataset, place):
                end = follow_inside(handle, dataset)
                # A link to another file is replaced; what it leads to is not even opened.
                if isinstance(end.found, h5py.h5g.GroupID):
                    raise InputError(where, f"{dataset} in {file} is a group", "a dataset")
                group, rest = _last_group(handle, file, dataset, where)
                address = h5py.h5o.get_info(group.id).addr
            for other_address, other_rest in used:
                shared = min(len(rest), len(other_rest))
                if other_address == address and rest[:shared] == other_rest[:shared]:
                    raise InputError(
                        where,
                        f"a link makes {dataset} in {file} the same as another output",
                        "a separate dataset for each output",
                    )
            used.append((address, rest))


def _last_group(
    handle: h5py.File, file: str, dataset: str, where: str
) -> tuple[h5py.Group, list[str]]:
    """Return the innermost existing group on the way to a dataset, and the path from there."""
    import h5py

    parts = dataset.strip("/").split("/")
    group = handle["/"]
    rest = parts
    for depth in range(1, len(parts)):
        above = "/" + "/".join(parts[:depth])
        if follow_inside(handle, above).other_file is not None:
            raise InputError(
                where,
                f"{above} in {file} leads to another file",
                f"a group of {file} to hold {dataset}",
            )
        found = handle.get(above)
        if found is None:
            if handle.get(above, getlink=True) is not None:
                raise InputError(
                    where,
                    f"{above} in {file} is a link whose target does not exist",
                    f"a group to hold {dataset}",
                )
            continue
        if not isinstance(found, h5py.Group):
            raise InputError(
                where, f"{above} in {file} is not a group", f"a group to hold {dataset}"
            )
        group = found
        rest = parts[depth:]
    return group, rest


# ---- making the datasets ------------------------------------------------------------------------


def lay_out_draft(
    draft: str, target: str, datasets: Mapping[str, StorageSpec], attributes: Mapping[str, str]
) -> list[Place]:
    """Make a draft with all of the target and with these datasets, without their elements."""
    overwritten: list[tuple[int, int]] = []
    try:
        if os.path.exists(target):
            overwritten = _overwritten_ranges(target, datasets)
        make_draft(draft, target, overwritten)
        # The HDF5 library may end the process where it finds a full disk.
        check_room(draft, _bytes_to_write(datasets))
        return lay_out(draft, datasets, attributes)
    except (KeyError, TypeError, OverflowError) as error:  # what h5py raises for a damaged target
        raise RuntimeError(f"it is damaged: {hdf5_reason(error)}") from error


METADATA_BYTES = 2**13  # of a file, and of each dataset besides its elements, or more


def _bytes_to_write(datasets: Mapping[str, StorageSpec]) -> int:
    """Return the bytes that datasets need in a file; of the elements, if they are as they are."""
    nbytes = METADATA_BYTES
    for spec in datasets.values():
        elements = 0 if spec.compression else prod(spec.shape)
        nbytes += elements * np.dtype(spec.dtype).itemsize + METADATA_BYTES
    return nbytes


def _overwritten_ranges(file: str, datasets: Mapping[str, StorageSpec]) -> list[tuple[int, int]]:
    """Return the ranges of bytes of datasets that are used again and need not be copied."""
    ranges = []
    with opened(file, "") as handle:
        for name, spec in datasets.items():
            if not _is_reusable(handle, name, spec):
                continue
            offset = offset_in_file(handle[name])
            if offset is not None:
                ranges.append((offset, offset + handle[name].nbytes))
    return ranges


def lay_out(
    draft: str, datasets: Mapping[str, StorageSpec], attributes: Mapping[str, str]
) -> list[Place]:
    """Make the datasets in a file, without their elements; the rest of the file stays.

    A dataset that is stored in the same way is used again: it keeps its attributes, and the file
    does not grow.
    """
    import h5py

    mode = "r+" if os.path.getsize(draft) else "w"
    places: list[Place] = []
    with h5py.File(draft, mode, locking=False) as handle:
        make_way(handle, datasets)
        # All are removed before any is made, so that freed space can be used again.
        replaced = []
        for name, spec in datasets.items():
            exists = handle.get(name, getlink=True) is not None
            if exists and not _is_reusable(handle, name, spec):
                replaced.append(name)
        release_parts(handle, replaced)
        for name in replaced:
            del handle[name]
        for name, spec in datasets.items():
            if handle.get(name, getlink=True) is None:
                dataset = _make(handle, name, spec)
            else:
                dataset = handle[name]
            _set_attributes(dataset, attributes, spec.tensor)
            for key, value in spec.group.items():
                dataset.parent.attrs[key] = value
        name_dimensions(handle, datasets)
        # Elements come last: at the end of the file there is room for another shape later.
        for name in datasets:
            dataset = handle[name]
            if dataset.chunks:
                places.append((None, dataset.chunks))
                continue
            if dataset.size and offset_in_file(dataset) is None:
                dataset[(0,) * dataset.ndim] = 0  # this allocates space for all elements
            places.append((offset_in_file(dataset), None))
    return places


def _set_attributes(dataset: h5py.Dataset, attributes: Mapping[str, str], tensor: str) -> None:
    """Set attributes; those that the dataset has are modified, so that the file does not grow."""
    wanted = dict(attributes)
    if tensor:
        wanted["einmpi_tensor"] = tensor
    for key, value in wanted.items():
        known = dataset.attrs.get(key)
        if not isinstance(known, str):
            dataset.attrs[key] = value
        elif known != value:
            dataset.attrs.modify(key, value)


def _make(handle: h5py.File, name: str, spec: StorageSpec) -> h5py.Dataset:
    import h5py

    if spec.chunks or spec.compression:
        return handle.create_dataset(
            name, spec.shape, spec.dtype, chunks=spec.chunks, compression=spec.compression
        )
    # Space is allocated later but not filled: the ranks write there without HDF5. No time stamp
    # is stored, so that the same run gives the same file.
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    properties.set_obj_track_times(False)
    above, _, last = name.strip("/").rpartition("/")
    group = handle.require_group(above) if above else handle
    dtype = h5py.h5t.py_create(np.dtype(spec.dtype), logical=True)
    space = h5py.h5s.create(h5py.h5s.SCALAR)
    if spec.shape:
        space = h5py.h5s.create_simple(spec.shape)
    return h5py.Dataset(h5py.h5d.create(group.id, last.encode(), dtype, space, properties))


def _is_reusable(handle: h5py.File, name: str, spec: StorageSpec) -> bool:
    """Return whether a dataset exists, under this name only, stored as a new one would be."""
    import h5py

    if not isinstance(handle.get(name, getlink=True), h5py.HardLink):
        return False
    found = handle[name]
    if not isinstance(found, h5py.Dataset) or found.is_virtual:
        return False  # HDF5 might open the sources of a virtual dataset to find out its shape
    has_other_names = h5py.h5o.get_info(found.id).rc != 1
    if has_other_names or found.maxshape != found.shape:
        return False
    if found.shape != spec.shape or found.dtype != np.dtype(spec.dtype):
        return False
    if not as_in_memory(found, found.dtype):
        return False
    properties = found.id.get_create_plist()
    filters = [properties.get_filter(number)[0] for number in range(properties.get_nfilters())]
    wanted_filters: dict[str | None, list[int]] = {
        "gzip": [h5py.h5z.FILTER_DEFLATE],
        "lzf": [h5py.h5z.FILTER_LZF],
        None: [],
    }
    if filters != wanted_filters[spec.compression]:
        return False
    if spec.chunks or spec.compression:
        return found.chunks is not None and spec.chunks in (None, found.chunks)
    if properties.get_layout() != h5py.h5d.CONTIGUOUS or properties.get_external_count():
        return False
    return offset_in_file(found) is not None or not found.nbytes


# ---- chunks -------------------------------------------------------------------------------------


def encode(array: Array, chunks: tuple[int, ...], compression: str | None) -> list[Chunk]:
    """Cut an array into chunks, in order. Chunks at the edges are filled up with zeros."""
    corners = list(corners_of(map(whole, array.shape), chunks))
    encoded: list[Chunk] = []
    for first in range(0, len(corners), CHUNKS_COMPRESSED_TOGETHER):
        blocks = []
        for corner in corners[first : first + CHUNKS_COMPRESSED_TOGETHER]:
            blocks.append(chunk_at(array, corner, chunks))
        if compression is None:
            encoded += [(0, block.tobytes()) for block in blocks]
        else:
            encoded += _compressed(np.concatenate(blocks), chunks, compression)
    return encoded


def chunk_at(array: Array, corner: tuple[int, ...], chunks: tuple[int, ...]) -> Array:
    """Return the chunk at a corner of an array, filled up with zeros at the edges."""
    box = tuple(slice(start, start + chunk) for start, chunk in zip(corner, chunks, strict=True))
    part = array[box]
    if part.shape == chunks:
        return part
    whole = np.zeros(chunks, array.dtype)
    whole[tuple(slice(extent) for extent in part.shape)] = part
    return whole


def _compressed(array: Array, chunks: tuple[int, ...], compression: str) -> list[Chunk]:
    """Compress chunks that lie one after another along the first dimension.

    HDF5 itself does it, in memory, so that every rank can encode its own. It needs several
    kilobytes for each chunk of a file, however small the chunk is.
    """
    import h5py

    with h5py.File(f"{id(array)}", "w", driver="core", backing_store=False) as memory:
        dataset = memory.create_dataset("x", data=array, chunks=chunks, compression=compression)
        dataset.flush()
        corners = corners_of(map(whole, array.shape), chunks)
        return [dataset.id.read_direct_chunk(corner) for corner in corners]


def corners_of(box: Iterable[Runs], chunks: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Return the first index of each chunk of a box, in order."""
    starts = []
    for ((first, last),), chunk in zip(box, chunks, strict=True):
        starts.append(range(first, last, chunk))
    return itertools.product(*starts)


@contextlib.contextmanager
def chunk_writer(draft: str, dataset: str) -> Iterator[WriteChunk]:
    """Open a dataset and give a function that writes a chunk: its first index, mask and bytes."""
    import h5py

    with h5py.File(draft, "r+", locking=False) as handle:
        found = handle[dataset]
        if found.compression and found.id.get_num_chunks():
            # New compressed chunks seldom fit into the places of the old ones, and HDF5 forgets
            # free space when the file is closed. So all of it is freed first.
            for corner in corners_of(map(whole, found.shape), found.chunks):
                found.id.write_direct_chunk(corner, b"\0")

        def write(corner: tuple[int, ...], mask: int, data: bytes) -> None:
            found.id.write_direct_chunk(corner, data, mask)

        yield write
