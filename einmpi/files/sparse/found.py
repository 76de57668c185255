"""A sparse tensor that was found in a file, and what all formats need to get its keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.errors import InputError
from einmpi.files.datasets import Dataset
from einmpi.files.specs import Number

Array: TypeAlias = npt.NDArray[Any]
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

    file: str
    name: str  # of the tensor in the file; empty if the file holds a single tensor
    place: str  # in the job file
    form: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    key_dimensions: int
    stored: int | None
    arrays: Mapping[str, Dataset]
    build: Callable[[SparseFile, Mapping[str, Array]], Stored]
    parse: Callable[[SparseFile, bytes, int], Mapping[str, Array]] | None = None
    implicit: Number = 0

    @property
    def title(self) -> str:
        """Return what messages call the tensor."""
        return title_of(self.file, self.name)

    @property
    def where(self) -> str:
        """Return the place that messages name."""
        return self.place or self.file

    def as_read(self) -> str:
        """Return what ranks must agree on to read it together; its path may differ."""
        parts = [(name, dataset.as_read()) for name, dataset in self.arrays.items()]
        return repr((self.form, self.shape, self.dtype.str, self.implicit, parts))


def title_of(file: str, name: str) -> str:
    """Return what messages call a tensor in a file."""
    return f"{name} in {file}" if name else file


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


def check_shape(given: Any, where: str, title: str, ndim: int | None = None) -> tuple[int, ...]:
    """Return the shape that a header gives; refuse what is none."""
    extents = np.asarray(given)
    is_list = extents.ndim == 1 and (not extents.size or extents.dtype.kind in "iu")
    if not is_list or ndim not in (None, extents.size) or (extents < 0).any():
        wanted = "extents" if ndim is None else f"{ndim} extents"
        raise InputError(where, f"the shape of {title} is {given!s:.60}", f"{wanted} of 0 or more")
    return tuple(extents.tolist())


def sparse_of_keys(
    file: str,
    name: str,
    place: str,
    keys: Sequence[Dataset],
    values: Dataset,
    shape: tuple[int, ...],
    implicit: Number,
) -> SparseFile:
    """Return the sparse tensor whose keys and values are in separate datasets."""
    title = title_of(file, name)
    stored = check_vector(replace(values, shape=values.shape[:1]), title)
    for dataset in keys:
        check_vector(dataset, title, stored)
    if not keys or len(keys) > len(shape) or values.shape[1:] != shape[len(keys) :]:
        what = f"{values.title} has shape {list(values.shape)} for {len(keys)} lists of keys"
        expected = f"{[stored, *shape[len(keys) :]]}, as {title} has shape {list(shape)}"
        raise InputError(place or file, what, expected)
    arrays = {f"key_{number}": dataset for number, dataset in enumerate(keys)}
    arrays["values"] = values
    return SparseFile(
        file,
        name,
        place,
        "keys",
        shape,
        values.dtype,
        len(keys),
        stored,
        arrays,
        _build_of_keys,
        implicit=implicit,
    )


def _build_of_keys(found: SparseFile, parts: Mapping[str, Array]) -> Stored:
    *keys, values = parts.values()
    return keys, values


# ---- keys that are compressed --------------------------------------------------------------------


def compressed_keys(
    found: SparseFile, pointers: Array, indices: Array, axes: Sequence[int]
) -> list[Array]:
    """Return the keys of what is stored row after row.

    The dimensions `axes` together are the rows, and `pointers` say where each of them begins. The
    others together are the columns, whose numbers are the `indices`.
    """
    others = [dimension for dimension in range(len(found.shape)) if dimension not in axes]
    rows = numbered_rows(found, pointers, len(indices), prod(found.shape[axis] for axis in axes))
    keys: dict[int, Array] = {}
    for dimensions, numbers in ((axes, rows), (others, indices)):
        if len(dimensions) == 1:
            keys[dimensions[0]] = numbers
        elif dimensions:
            extents = [found.shape[dimension] for dimension in dimensions]
            columns = _taken_apart(found, numbers, extents)
            keys.update(zip(dimensions, columns, strict=True))
    return [keys[dimension] for dimension in range(len(found.shape))]


def numbered_rows(found: SparseFile, pointers: Array, count: int, rows: int) -> Array:
    """Return the row of each of `count` elements, given where each row begins."""
    starts = pointers.astype(np.int64) if pointers.dtype.kind in "iu" else np.zeros(0, np.int64)
    lengths = np.diff(starts)
    if len(starts) != rows + 1 or starts[0] != 0 or starts[-1] != count or (lengths < 0).any():
        what = f"the pointers of {found.title} do not say where its {rows} rows begin"
        raise InputError(found.where, what, f"{rows + 1} integers that rise from 0 to {count}")
    return np.repeat(np.arange(rows), lengths)


def _taken_apart(found: SparseFile, numbers: Array, extents: Sequence[int]) -> Sequence[Array]:
    """Return the indices in several dimensions of numbers that count through all of them."""
    try:
        return np.unravel_index(numbers, extents)
    except (ValueError, TypeError):
        what = f"an index in {found.title} is out of range"
        raise InputError(found.where, what, f"integers from 0 to {prod(extents) - 1}") from None


# ---- matrices of which one triangle is stored ----------------------------------------------------

SYMMETRIES: dict[str, Callable[[Array], Array]] = {
    "symmetric": lambda values: values,
    "skew-symmetric": np.negative,
    "hermitian": np.conj,
}


def check_symmetry(symmetry: str, shape: tuple[int, ...], dtype: Any, where: str) -> None:
    """Refuse a symmetry that a matrix cannot have."""
    if symmetry not in SYMMETRIES:
        raise InputError(where, f"the symmetry is {symmetry!r:.40}", ", ".join(SYMMETRIES))
    if len(shape) != 2 or shape[0] != shape[1]:
        raise InputError(where, f"a {symmetry} matrix has shape {list(shape)}", "a square matrix")
    if symmetry == "skew-symmetric" and np.dtype(dtype).kind in "bu":
        raise InputError(where, f"a {symmetry} matrix is {dtype}", "a dtype with signs")


def mirrored(keys: Sequence[Array], values: Array, symmetry: str) -> Stored:
    """Return both triangles of a matrix, given one."""
    row, column = keys
    is_other = row != column
    both = [
        np.concatenate([row, column[is_other]]),
        np.concatenate([column, row[is_other]]),
    ]
    return both, np.concatenate([values, SYMMETRIES[symmetry](values[is_other])])
