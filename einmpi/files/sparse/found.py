"""A sparse tensor that was found in a file, and what all formats need to get its keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, TypeAlias

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.files.datasets import Array, Dataset, DType, Reader, SourceFile, check_file, identity_at
from einmpi.files.specs import InputSpec, Number

# The keys, an array for each key dimension, and the values.
Stored: TypeAlias = tuple[Sequence[Array], Array]


@dataclass(frozen=True)
class SparseFile:
    """Where a sparse tensor is and how it is stored. None of its elements has been read.

    `arrays` are its parts by name, and `build` makes keys and values of what they hold. Of a text,
    the only part is its lines, as bytes, and `parse` makes arrays of some whole lines, given where
    these begin; `build` then takes the arrays of all lines. `stored` is the number of elements or
    tiles that are stored, at most; None if only reading it tells. `form` is what reports call
    the way it is stored.
    """

    spec: InputSpec
    form: str
    shape: tuple[int, ...]
    dtype: DType
    stored: int | None
    arrays: Mapping[str, Dataset]
    build: Callable[[SparseFile, Mapping[str, Array]], Stored]
    parse: Callable[[SparseFile, bytes, int], Mapping[str, Array]] | None = None
    implicit: Number = 0
    tile_dimensions: int = 0

    @property
    def key_dimensions(self) -> int:
        """Return the number of dimensions that have keys; the others are those of tiles."""
        return len(self.shape) - self.tile_dimensions

    def as_read(self) -> str:
        """Return what ranks must agree on to read it together; its path may differ."""
        parts = [(name, dataset.as_read()) for name, dataset in self.arrays.items()]
        return repr((self.form, self.shape, self.dtype.str, self.implicit, parts))


def sources_of(spec: InputSpec, expected: str) -> tuple[SourceFile, ...]:
    """Return the file of an input as it is now; refuse what is not a readable file."""
    file = spec.file or ""
    check_file(file, spec.place, expected)
    identity = identity_at(file)
    return () if identity is None else (SourceFile(file, identity),)


def rows_of(dataset: Dataset, reader: Reader, start: int, stop: int) -> Array:
    """Return some rows of a dataset that a reader has opened."""
    inside = tuple(slice(0, extent) for extent in dataset.shape[1:])
    rows = np.empty((stop - start, *dataset.shape[1:]), dataset.dtype)
    reader.read((slice(start, stop), *inside), rows, (slice(0, stop - start), *inside))
    return rows


def check_vector(dataset: Dataset, title: str, length: int | None = None) -> int:
    """Return the length of an array of a sparse tensor; refuse another shape than a list."""
    if len(dataset.shape) != 1:
        what = f"{dataset.title} has {len(dataset.shape)} dimensions"
        raise InputError(dataset.where, what, f"a list, as a part of {title}")
    found = dataset.shape[0]
    if length not in (None, found):
        what = f"{dataset.title} has {found} elements"
        raise InputError(dataset.where, what, f"{length}, as the other parts of {title}")
    return found


def check_shape(given: Any, spec: InputSpec, ndim: int | None = None) -> tuple[int, ...]:
    """Return the shape that a header gives; refuse what is none."""
    try:
        extents = np.asarray(given)
    except ValueError:  # lists of several lengths
        extents = np.array(None)
    is_list = extents.ndim == 1 and (not extents.size or extents.dtype.kind in "iu")
    if not is_list or ndim not in (None, extents.size) or (extents < 0).any():
        wanted = "extents" if ndim is None else f"{ndim} extents"
        what = f"the shape of {spec.title} is {given!s:.60}"
        raise InputError(spec.where, what, f"{wanted} of 0 or more")
    return tuple(extents.tolist())


def sparse_of_keys(
    spec: InputSpec,
    keys: Sequence[Dataset],
    values: Dataset,
    shape: tuple[int, ...],
    implicit: Number = 0,
) -> SparseFile:
    """Return the sparse tensor whose keys and values are in separate datasets."""
    stored = check_vector(replace(values, shape=values.shape[:1]), spec.title)
    for dataset in keys:
        check_vector(dataset, spec.title, stored)
    tile = shape[len(keys) :]
    if not keys or len(keys) > len(shape) or values.shape[1:] != tile:
        what = f"{values.title} has shape {list(values.shape)} for {len(keys)} lists of keys"
        expected = f"{[stored, *tile]}, as {spec.title} has shape {list(shape)}"
        raise InputError(spec.where, what, expected)
    return SparseFile(
        spec,
        "keys",
        shape,
        values.dtype,
        stored,
        {**{f"key_{number}": dataset for number, dataset in enumerate(keys)}, "values": values},
        _build_of_keys,
        implicit=implicit,
        tile_dimensions=len(tile),
    )


def _build_of_keys(found: SparseFile, parts: Mapping[str, Array]) -> Stored:
    *keys, values = parts.values()
    return keys, values


# ---- keys that are compressed --------------------------------------------------------------------


def sparse_of_rows(
    spec: InputSpec,
    form: str,
    shape: tuple[int, ...],
    arrays: Mapping[str, Dataset],
    axes: Sequence[int],
    implicit: Number = 0,
) -> SparseFile:
    """Return the sparse tensor that is stored row after row.

    The dimensions `axes` together are the rows, and `indptr` says where each of them begins. The
    others together are the columns, whose numbers are the `indices`; the values are the `data`.
    """
    data = arrays["data"]
    stored = check_vector(data, spec.title)
    check_vector(arrays["indices"], spec.title, stored)
    check_vector(arrays["indptr"], spec.title)
    build = partial(_build_of_rows, axes=axes)
    return SparseFile(spec, form, shape, data.dtype, stored, arrays, build, implicit=implicit)


def _build_of_rows(found: SparseFile, parts: Mapping[str, Array], axes: Sequence[int]) -> Stored:
    others = [dimension for dimension in range(len(found.shape)) if dimension not in axes]
    indices = parts["indices"]
    count = prod(found.shape[axis] for axis in axes)
    rows = numbered_rows(found, parts["indptr"], len(indices), count)
    keys: dict[int, Array] = {}
    for dimensions, numbers in ((axes, rows), (others, indices)):
        if len(dimensions) == 1:
            keys[dimensions[0]] = numbers
        elif dimensions:
            extents = [found.shape[dimension] for dimension in dimensions]
            columns = _taken_apart(found, numbers, extents)
            keys.update(zip(dimensions, columns, strict=True))
    return [keys[dimension] for dimension in range(len(found.shape))], parts["data"]


def numbered_rows(found: SparseFile, pointers: Array, count: int, rows: int) -> Array:
    """Return the row of each of `count` elements, given where each row begins."""
    starts = pointers.astype(np.int64) if pointers.dtype.kind in "iu" else np.zeros(0, np.int64)
    lengths = np.diff(starts)
    if len(starts) != rows + 1 or starts[0] != 0 or starts[-1] != count or (lengths < 0).any():
        what = f"the pointers of {found.spec.title} do not say where its {rows} rows begin"
        raise InputError(found.spec.where, what, f"{rows + 1} integers that rise from 0 to {count}")
    return np.repeat(np.arange(rows), lengths)


def _taken_apart(found: SparseFile, numbers: Array, extents: Sequence[int]) -> Sequence[Array]:
    """Return the indices in several dimensions of numbers that count through all of them."""
    try:
        return np.unravel_index(numbers, extents)
    except (ValueError, TypeError):
        what = f"an index in {found.spec.title} is out of range"
        raise InputError(
            found.spec.where, what, f"integers from 0 to {prod(extents) - 1}"
        ) from None


# ---- matrices of which one triangle is stored ----------------------------------------------------

SYMMETRIES: dict[str, Callable[[Array], Array]] = {
    "symmetric": lambda values: values,
    "skew-symmetric": np.negative,
    "hermitian": np.conj,
}
GENERAL = "general"


def check_symmetry(symmetry: str, shape: tuple[int, ...], dtype: Any, spec: InputSpec) -> None:
    """Refuse a symmetry that a matrix cannot have."""
    if symmetry == GENERAL:
        return
    expected = ""
    if symmetry not in SYMMETRIES:
        expected = one_of((GENERAL, *SYMMETRIES), symmetry)
    elif len(shape) != 2 or shape[0] != shape[1]:
        expected = "a square matrix"
    elif symmetry == "skew-symmetric" and np.dtype(dtype).kind in "bu":
        expected = "a dtype with signs"
    if expected:
        what = f"{spec.title} is {symmetry:.40}, {np.dtype(dtype).name}{list(shape)}"
        raise InputError(spec.where, what, expected)


def mirrored(found: SparseFile, keys: Sequence[Array], values: Array, symmetry: str) -> Stored:
    """Return both triangles of a matrix, given one, unless it is stored whole."""
    if symmetry == GENERAL:
        return keys, values
    row, column = keys
    if (row < column).any() and (row > column).any():
        what = f"{found.spec.title} is {symmetry}, and has elements on both sides of its diagonal"
        raise InputError(found.spec.where, what, "one of the two triangles")
    is_other = row != column
    both = [
        np.concatenate([row, column[is_other]]),
        np.concatenate([column, row[is_other]]),
    ]
    return both, np.concatenate([values, SYMMETRIES[symmetry](values[is_other])])
