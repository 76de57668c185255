"""A sparse tensor in one process: the sorted keys of what is stored, and its values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.errors import InputError
from einmpi.graph.scalar import Number
from einmpi.graph.sparse.sorting import Column, Keys, are_sorted, is_first, key_dtype, sorting_order
from einmpi.kernels.cpu.key_loops import taken

# By how much the largest block of stored elements may be larger than their mean.
MOST_UNEVEN = 1.25


@dataclass(frozen=True)
class Coordinates:
    """A tensor whose first dimensions are keys and whose other dimensions are dense tiles.

    Attributes
    ----------
    keys : tuple of array
        For each key dimension the index of each stored element or tile. They are sorted as in a
        dictionary, and no two of them are the same.
    values : array
        The stored elements or tiles, in the order of the keys.
    shape : tuple of int
        The shape of the whole tensor.
    implicit : number
        The value of all elements that are not stored.
    """

    keys: Keys
    values: npt.NDArray[Any]
    shape: tuple[int, ...]
    implicit: Number = 0

    @classmethod
    def of(
        cls,
        keys: Sequence[Any],
        values: Any,
        shape: Sequence[int],
        implicit: Any = 0,
        where: str = "a sparse tensor",
        copy: bool = True,
    ) -> Coordinates:
        """Return the tensor of keys in any order. What is stored at the same place is added up.

        Without `copy` it may have the keys as they are given, as long as nobody writes to them.
        InputError, which begins with `where`, if keys, values, shape and implicit do not fit.
        """
        stored = _as_array(where, "the values", values)
        extents = _as_extents(where, shape)
        if not np.iterable(keys):
            raise InputError(where, f"keys is {keys!r:.60}", "a list for each key dimension")
        columns = [_checked_keys(where, column, n, extents, copy) for n, column in enumerate(keys)]
        _check_fit(where, columns, stored, extents)
        value = _as_implicit(where, implicit, stored.dtype)
        is_sorted, are_different = are_sorted(columns)
        if not is_sorted:
            order = sorting_order(columns)
            columns = [taken(column, order) for column in columns]
            stored = taken(stored, order)
            _, are_different = are_sorted(columns)
        if not are_different:
            firsts = is_first(columns, len(stored))
            if value != 0:
                second = int(np.argmin(firsts))
                twice = ", ".join(str(column[second]) for column in columns)
                what = f"[{twice}] is stored twice, and what is not stored is {value}"
                raise InputError(where, what, "each position once, or the implicit value 0")
            starts = np.flatnonzero(firsts)
            stored = np.add.reduceat(stored, starts, axis=0, dtype=stored.dtype)
            columns = [column[starts] for column in columns]
        return cls(tuple(columns), stored, extents, value)

    @property
    def stored(self) -> int:
        """The number of keys: stored elements, or tiles."""
        return len(self.values)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self.values.dtype

    def astype(self, dtype: np.dtype[Any]) -> Coordinates:
        """Return the same tensor in another dtype, to which numpy calls a cast safe."""
        return replace(self, values=self.values.astype(dtype))

    @property
    def pattern(self) -> Keys:
        """The keys, by the name that a SparseArray has for them."""
        return self.keys

    @cached_property
    def digest(self) -> str:
        """A text that tensors with the same keys have."""
        return digest_of(self.keys)

    @cached_property
    def tile(self) -> tuple[int, ...]:
        """The extents of the dimensions that are no keys."""
        return self.shape[len(self.keys) :]

    def in_blocks(self, blocks: Blocks) -> npt.NDArray[Any]:
        """Return the values at their places in blocks."""
        return blocks.spread(self.values, empty=0)

    def dense(self) -> npt.NDArray[Any]:
        """Return the whole tensor."""
        whole = np.full(self.shape, self.implicit, self.values.dtype)
        whole[self.keys] = self.values
        return whole


def digest_of(keys: Keys) -> str:
    """Return a text that is different for different keys."""
    digest = sha256()  # processors have instructions for it
    for column in keys:
        digest.update(np.ascontiguousarray(column).data)
    return digest.hexdigest()


def _as_array(where: str, name: str, given: Any) -> npt.NDArray[Any]:
    """Return a list as an array; refuse a list of lists of several lengths, and no numbers."""
    try:
        found = np.asarray(given)
    except ValueError:
        raise InputError(where, f"{name} have several lengths", "an array") from None
    if found.dtype.kind in "OSU":
        raise InputError(where, f"{name} are {found.dtype.name}", "numbers")
    return found


def _as_extents(where: str, shape: Any) -> tuple[int, ...]:
    """Return a shape; refuse what is no list of integers."""
    try:
        return tuple(index(extent) for extent in shape)
    except TypeError:
        what = f"the shape is {shape!r:.60}"
        raise InputError(where, what, "a list of integers") from None


def _checked_keys(
    where: str, given: Any, dimension: int, extents: Sequence[int], copy: bool
) -> npt.NDArray[np.integer[Any]]:
    """Return the keys of a dimension as they are kept; refuse what is no index of it."""
    column = _as_array(where, f"the keys of dimension {dimension}", given)
    if column.size == 0:
        column = column.astype(np.int64)
    if column.ndim != 1:
        what = f"the keys of dimension {dimension} have {column.ndim} dimensions"
        raise InputError(where, what, "a list of integers")
    if column.dtype.kind not in "iu":
        what = f"the keys of dimension {dimension} are {column.dtype.name}"
        raise InputError(where, what, "integers")
    if dimension >= len(extents):
        what = f"there are keys of dimension {dimension}, and shape has length {len(extents)}"
        raise InputError(where, what, "at most one list of keys for each dimension")
    extent = extents[dimension]
    if column.size:
        for wrong in (column.min(), column.max()):
            if not 0 <= int(wrong) < extent:
                what = f"key {wrong} of dimension {dimension} is out of range"
                raise InputError(where, what, f"0 to {extent - 1}" if extent else "no key at all")
    return column.astype(key_dtype(extent), copy=copy)


def _check_fit(
    where: str,
    columns: Sequence[npt.NDArray[np.integer[Any]]],
    values: npt.NDArray[Any],
    extents: Sequence[int],
) -> None:
    """Refuse values that are not one for each key, or whose tiles have another shape."""
    if not columns:
        raise InputError(where, "there are no keys", "a list of integers for each key dimension")
    if any(extent < 0 for extent in extents):
        raise InputError(where, f"the shape is {tuple(extents)}", "extents of 0 or more")
    wanted = (len(columns[0]), *extents[len(columns) :])
    for dimension, column in enumerate(columns):
        if len(column) != wanted[0]:
            what = f"dimension 0 has {wanted[0]} keys and dimension {dimension} {len(column)}"
            raise InputError(where, what, "as many of each")
    if values.shape != wanted:
        what = f"the values have shape {values.shape}"
        raise InputError(where, what, f"{wanted}: the number of keys, then the tile")


def _as_implicit(where: str, given: Any, dtype: np.dtype[Any]) -> Number:
    """Return the implicit value as a number of Python; refuse one that the dtype does not have."""
    if np.ndim(given) or np.asarray(given).dtype.kind not in "biufc":
        raise InputError(where, f"the implicit value is {given!r:.60}", "a number")
    wanted: Number = np.asarray(given).item()
    try:
        with np.errstate(all="ignore"):
            kept: Number = dtype.type(wanted).item()
    except (OverflowError, ValueError, TypeError):
        kept = not wanted
    is_kept = kept == wanted or (kept != kept and wanted != wanted)
    if not is_kept and dtype.kind in "biu":
        what = f"the implicit value {wanted} is no {dtype.name}"
        raise InputError(where, what, f"a value of {dtype.name}")
    return kept


# ---- blocks --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """Where elements are that ranks share: in equal blocks, the last places of which may be empty.

    Attributes
    ----------
    starts : tuple of int
        The number of the first element of each block, and the number of elements.
    length : int
        How many places a block has. If it is None, the elements follow one another, and the blocks
        are of any length.
    """

    starts: tuple[int, ...]
    length: int | None = None

    @property
    def count(self) -> int:
        """The number of blocks."""
        return len(self.starts) - 1

    @property
    def size(self) -> int:
        """The number of places."""
        return self.starts[-1] if self.length is None else self.count * self.length

    @cached_property
    def places(self) -> npt.NDArray[np.int64] | None:
        """The place of each element; None if that is its number."""
        if self.size == self.starts[-1]:
            return None
        assert self.length is not None
        starts = np.array(self.starts)
        shifts = np.arange(self.count) * self.length - starts[:-1]
        places: npt.NDArray[np.int64] = np.repeat(shifts, np.diff(starts))
        places += np.arange(len(places))
        return places

    def blocks_of_elements(self, ranks: int) -> npt.NDArray[np.int64]:
        """Return in which of so many blocks each element is."""
        if self.length is None:
            count = self.starts[-1]
            return np.arange(count) * ranks // max(1, count)
        return np.repeat(np.arange(self.count), np.diff(self.starts))

    def placed(self, elements: Column) -> Column:
        """Return the places of elements, given by their numbers."""
        return elements if self.places is None else self.places[elements]

    def spread(self, values: npt.NDArray[Any], empty: Any = None) -> npt.NDArray[Any]:
        """Return values at their places, and at the empty ones a number, or what is before them."""
        if self.places is None:
            return values
        if empty is None:
            is_taken = np.zeros(self.size, np.int64)
            is_taken[self.places] = 1
            found: npt.NDArray[Any] = values[np.maximum(np.cumsum(is_taken) - 1, 0)]
            return found
        found = np.full((self.size, *values.shape[1:]), empty, values.dtype)
        found[self.places] = values
        return found


def blocks_by(
    column: npt.NDArray[np.integer[Any]],
    extent: int,
    ranks: int,
    most_uneven: float = MOST_UNEVEN,
) -> Blocks:
    """Return the blocks of elements with these sorted keys, of which `extent` are possible.

    Those whose keys are in the same of as many equal blocks of keys are in the same block. If that
    is too uneven, they just follow one another.
    """
    plain = Blocks((0, len(column)))
    if ranks == 1 or extent < ranks or not len(column):
        return plain
    first_keys = -(-np.arange(ranks + 1) * extent // ranks)
    starts = np.searchsorted(column, first_keys)
    length = int(np.diff(starts).max())
    if length * ranks > most_uneven * len(column):
        return plain
    return Blocks(tuple(starts.tolist()), length)
