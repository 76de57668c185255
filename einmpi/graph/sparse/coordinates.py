"""A sparse tensor in one process: the sorted keys of what is stored, and its values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.errors import InputError
from einmpi.graph.scalar import Number

Keys: TypeAlias = tuple[npt.NDArray[np.int64], ...]
_MOST_NUMBERED = 2**62  # positions that have a number in int64


@dataclass(frozen=True)
class Coordinates:
    """A tensor whose first dimensions are keys and whose other dimensions are dense tiles.

    Attributes
    ----------
    keys : tuple of array of int64
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
    ) -> Coordinates:
        """Return the tensor of keys in any order. What is stored at the same place is added up.

        InputError, which begins with `where`, if keys, values, shape and implicit do not fit.
        """
        stored = np.asarray(values)
        extents = tuple(int(extent) for extent in shape)
        columns = [_checked_keys(where, column, n, extents) for n, column in enumerate(keys)]
        _check_fit(where, columns, stored, extents)
        value = _as_implicit(where, implicit, stored.dtype)
        order = _sorting(columns)
        if order is not None:
            columns = [column[order] for column in columns]
            stored = stored[order]
        is_first = np.zeros(len(stored), bool)
        is_first[:1] = True
        for column in columns:
            is_first[1:] |= column[1:] != column[:-1]
        if not is_first.all():
            if value != 0:
                second = int(np.argmin(is_first))
                twice = ", ".join(str(column[second]) for column in columns)
                what = f"[{twice}] is stored twice, and what is not stored is {value}"
                raise InputError(where, what, "each position once, or the implicit value 0")
            starts = np.flatnonzero(is_first)
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

    @cached_property
    def digest(self) -> str:
        """A text that tensors with the same keys have."""
        return digest_of(self.keys)

    @cached_property
    def tile(self) -> tuple[int, ...]:
        """The extents of the dimensions that are no keys."""
        return self.shape[len(self.keys) :]

    def dense(self) -> npt.NDArray[Any]:
        """Return the whole tensor."""
        whole = np.full(self.shape, self.implicit, self.values.dtype)
        whole[self.keys] = self.values
        return whole


def digest_of(keys: Keys) -> str:
    """Return a text that is different for different keys."""
    digest = blake2b(digest_size=16)
    for column in keys:
        digest.update(np.ascontiguousarray(column).data)
    return digest.hexdigest()


def positions(keys: Sequence[npt.NDArray[np.int64]], extents: Sequence[int]) -> Any:
    """Return a number for each position, in the order of the positions; None if it is too great."""
    if prod(extents) >= _MOST_NUMBERED:
        return None
    numbers = np.zeros(len(keys[0]) if keys else 0, np.int64)
    for column, extent in zip(keys, extents, strict=True):
        numbers *= extent
        numbers += column
    return numbers


def _checked_keys(
    where: str, given: Any, dimension: int, extents: Sequence[int]
) -> npt.NDArray[np.int64]:
    """Return the keys of a dimension as int64; refuse what is no index of it."""
    column = np.asarray(given)
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
    return column.astype(np.int64)


def _check_fit(
    where: str,
    columns: Sequence[npt.NDArray[np.int64]],
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


def _sorting(columns: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.intp] | None:
    """Return the order that sorts keys, equal ones as they are given; None if they are sorted."""
    decided = np.zeros(max(0, len(columns[0]) - 1), bool)  # that a key is less than the next one
    for column in columns:
        if (~decided & (column[1:] < column[:-1])).any():
            return np.lexsort(columns[::-1])
        decided |= column[1:] > column[:-1]
    return None
