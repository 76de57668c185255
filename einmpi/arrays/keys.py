"""Keys in the brackets of DistArrays: which elements they select."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arrays.reshaping import view_in_shape
from einmpi.arrays.selected import Chosen
from einmpi.arrays.shapes import with_dimensions
from einmpi.compiled.dist_array import DistArray
from einmpi.errors import InputError
from einmpi.kernels.given import as_numpy

Integers: TypeAlias = npt.NDArray[np.int64]
_KEYS = "integers, slices, None, ..., lists of integers, or masks"
_INTEGER = (int, np.integer)
_SLICE = (slice, EllipsisType, type(None))


@dataclass(frozen=True)
class Selection:
    """The indices that a key selects: a vector for each dimension of the tensor.

    `result_extents` has, for each dimension of the tensor, the extents that it contributes to the
    shape of the result: none for an integer, several for a table of integers. `new_positions` are
    the positions of new dimensions, of extent 1, among those of the result.
    """

    chosen: list[Chosen]
    result_extents: list[tuple[int, ...]]
    new_positions: list[int]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many indices are selected in each dimension of the tensor."""
        return tuple(len(indices) for indices in self.chosen)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result. It has as many elements as an array of shape `counts`."""
        extents: list[int] = []
        for extents_of_dimension in self.result_extents:
            extents.extend(extents_of_dimension)
        for position in self.new_positions:
            extents.insert(position, 1)
        return tuple(extents)


def is_basic(key: Any) -> bool:
    """Return whether a key has integers, slices, None and ... only: it selects a view."""
    return all(map(_is_basic, key if isinstance(key, tuple) else (key,)))


def fixed_key(key: Any) -> tuple[Any, ...]:
    """Return a basic key with numbers in its slices, where there may be tensors that change."""
    parts: list[Any] = []
    for part in key if isinstance(key, tuple) else (key,):
        if isinstance(part, slice):
            ends = (part.start, part.stop, part.step)
            part = slice(*(None if end is None else index(end) for end in ends))
        parts.append(part)
    return tuple(parts)


def _is_basic(part: Any) -> bool:
    return isinstance(part, _INTEGER + _SLICE) and not isinstance(part, bool)


def mask_of_all(array: DistArray, key: Any) -> Any:
    """Return the mask of the tensor's own shape that a key consists of, None for other keys."""
    mask = key[0] if isinstance(key, tuple) and len(key) == 1 else key
    return mask if _is_mask(mask) and mask.shape == array.shape else None


@dataclass(frozen=True)
class Key:
    """A key with an index for each dimension of a tensor, and None for each new dimension.

    An index is an integer, a slice, or a table of integers. `are_together` says whether nothing is
    written between the integers and tables.
    """

    array: DistArray
    parts: list[Any]
    are_together: bool

    @property
    def tables(self) -> list[Any]:
        """The tables of integers."""
        return [part for part in self.parts if not _is_basic(part)]

    @property
    def is_by_element(self) -> bool:
        """Whether several tables, or a DistArray, and integers have all indices of elements."""
        if any(isinstance(part, _SLICE) for part in self.parts):
            return False
        return len(self.tables) > 1 or any(isinstance(table, DistArray) for table in self.tables)

    @property
    def is_by_dimension(self) -> bool:
        """Whether what it selects in one dimension does not depend on the others."""
        has_integers = any(isinstance(part, _INTEGER) for part in self.parts)
        is_in_place = self.are_together or not has_integers
        return not self.tables or (len(self.tables) == 1 and is_in_place)


def read_key(array: DistArray, key: Any) -> Key:
    """Return what the parts of a key are; refuse those that DistArrays do not support.

    A mask becomes tables of the indices at which it is True, one for each of its dimensions. For a
    single truth value, the tensor gets a dimension of extent 1.
    """
    given: list[Any] = []
    places: list[int] = []  # of integers and tables
    for part in key if isinstance(key, tuple) else (key,):
        if not isinstance(part, _SLICE):
            places.append(len(given))
        if not _is_basic(part):
            is_distributed = isinstance(part, DistArray)
            table = part if is_distributed else as_numpy("index", "an index", part)
            if isinstance(part, list) and not table.size:
                table = table.astype(np.int64)  # numpy has no integers to tell the dtype by
            if table.dtype.kind not in "biu":
                raise InputError("index", f"{type(part).__name__} is not supported here", _KEYS)
            part = table
        given.append(part)
    are_together = not places or places[-1] - places[0] < len(places)
    parts: list[Any] = []
    dimension = 0
    for part in _without_ellipsis(given, array.ndim):
        if not _is_mask(part):
            parts.append(part)
            dimension += part is not None
            continue
        if not part.ndim:
            array = array[(slice(None),) * dimension + (None,)]
            part = part.reshape(1)
        _check_mask(array.shape[dimension:], part)
        parts.extend(np.nonzero(part))
        dimension += part.ndim
    return Key(array, parts, are_together)


def parse_key(key: Key) -> Selection:
    """Return what a key selects that has at most one table."""
    chosen: list[Chosen] = []
    result_extents: list[tuple[int, ...]] = []
    new_positions: list[int] = []
    result_ndim = 0
    for part in key.parts:
        if part is None:
            new_positions.append(result_ndim)
            result_ndim += 1
            continue
        extent = key.array.shape[len(chosen)]
        indices: Chosen
        extents: tuple[int, ...]
        if isinstance(part, slice):
            indices = range(extent)[part]
            extents = (len(indices),)
        elif isinstance(part, _INTEGER):
            place = _index_in_range(int(part), extent)
            indices = range(place, place + 1)
            extents = ()
        else:
            table = gathered(part)
            indices = indices_in_range(table.reshape(-1), extent)
            extents = table.shape
        chosen.append(indices)
        result_extents.append(extents)
        result_ndim += len(extents)
    return Selection(chosen, result_extents, new_positions)


def _is_mask(part: Any) -> bool:
    return isinstance(part, DistArray | np.ndarray) and part.dtype.kind == "b"


@dataclass(frozen=True)
class Merged:
    """A view of a tensor in which one table has the place of several, in the first dimension.

    `order` are the dimensions of what the table selects there, as the key has them.
    """

    array: DistArray
    table: Integers
    order: list[int]


def merge_tables(key: Key) -> Merged:
    """Return a view in which the dimensions of all tables and integers are one.

    As numpy, put their dimensions where they are in the key, or first if they are not together.
    """
    slices: list[slice | None] = []
    places: list[int] = []  # of the tables and integers, which numpy broadcasts
    for place, part in enumerate(key.parts):
        is_table = not isinstance(part, _SLICE)
        slices.append(slice(None) if is_table else part)
        if is_table:
            places.append(place)
    sliced = key.array[tuple(slices)]
    others = [place for place in range(sliced.ndim) if place not in places]
    ordered = with_dimensions(sliced, [*places, *others])
    table = np.zeros((), np.int64)
    length = 1
    for place in places:
        extent = sliced.shape[place]
        length *= extent
        table = table * extent + indices_in_range(gathered(key.parts[place]), extent)
    merged = view_in_shape(ordered, (length, *ordered.shape[len(places) :]))
    order = list(range(table.ndim, table.ndim + len(others)))
    first = places[0] if key.are_together else 0
    order[first:first] = range(table.ndim)
    return Merged(merged, table, order)


def gathered(table: Any) -> Any:
    """Return a table of integers that every rank has whole."""
    return table.gather() if isinstance(table, DistArray) else np.asarray(table)


def _without_ellipsis(keys: list[Any], ndim: int) -> list[Any]:
    """Return an index for each dimension of a tensor, and None for each new dimension.

    Slices of whole dimensions take the place of `...`, which is at the end if it is not written.
    """
    if sum(part is Ellipsis for part in keys) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    indexed = 0
    for part in keys:
        if _is_mask(part):
            indexed += part.ndim
        elif not isinstance(part, EllipsisType | None):
            indexed += 1
    if indexed > ndim:
        raise IndexError(f"{indexed} indices for a tensor of {ndim} dimensions")
    whole_dimensions = [slice(None)] * (ndim - indexed)
    complete: list[Any] = []
    for part in keys:
        if part is Ellipsis:
            complete.extend(whole_dimensions)
            whole_dimensions = []
        else:
            complete.append(part)
    return complete + whole_dimensions


def _index_in_range(index: int, extent: int) -> int:
    """Return an index counted from the start of a dimension; negative ones count from its end."""
    if not -extent <= index < extent:
        raise IndexError(f"index {index} is out of range for a dimension of extent {extent}")
    return index % extent


def indices_in_range(indices: Integers, extent: int) -> Integers:
    """Return indices counted from the start of a dimension."""
    if not indices.size:
        return indices.astype(np.int64)
    _index_in_range(int(indices.min()), extent)
    _index_in_range(int(indices.max()), extent)
    return indices.astype(np.int64) % extent


def _check_mask(shape: tuple[int, ...], mask: Any) -> None:
    """Refuse a mask of other extents than those of a tensor; as numpy's, they may be 0."""
    for mask_extent, extent in zip(mask.shape, shape, strict=False):
        if mask_extent not in (extent, 0):
            raise IndexError(
                f"the mask has shape {list(mask.shape)}; expected the first extents of "
                f"{list(shape)}"
            )
