"""Keys in the brackets of DistArrays: which elements they select."""

from __future__ import annotations

from dataclasses import dataclass
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arrays.selected import Chosen
from einmpi.compiled.dist_array import DistArray
from einmpi.errors import InputError
from einmpi.kernels.given import as_numpy

Integers: TypeAlias = npt.NDArray[np.int64]
_KEYS = "integers, slices, None, ..., one list of integers, lists for all dimensions, or a mask"


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


def parse_key(array: DistArray, key: Any) -> Selection:
    """Return what a key selects; refuse keys that DistArrays do not support."""
    keys = list(key) if isinstance(key, tuple) else [key]
    chosen: list[Chosen] = []
    result_extents: list[tuple[int, ...]] = []
    new_positions: list[int] = []
    result_ndim = 0
    has_list = False
    for part in _without_ellipsis(keys, array.ndim):
        if part is None:
            new_positions.append(result_ndim)
            result_ndim += 1
            continue
        extent = array.shape[len(chosen)]
        indices: Chosen
        extents: tuple[int, ...]
        if isinstance(part, slice):
            indices = range(extent)[part]
            extents = (len(indices),)
        elif isinstance(part, int | np.integer) and not isinstance(part, bool):
            index = _index_in_range(int(part), extent)
            indices = range(index, index + 1)
            extents = ()
        else:
            table = as_numpy("index", "an index", part)
            is_table_of_integers = table.dtype.kind in "iu" or table.size == 0
            if has_list or not is_table_of_integers:
                raise InputError("index", f"{type(part).__name__} is not supported here", _KEYS)
            has_list = True
            indices = indices_in_range(table.reshape(-1), extent)
            extents = table.shape
        chosen.append(indices)
        result_extents.append(extents)
        result_ndim += len(extents)
    _refuse_list_apart_from_integer(keys)
    return Selection(chosen, result_extents, new_positions)


def _without_ellipsis(keys: list[Any], ndim: int) -> list[Any]:
    """Return an index for each dimension of a tensor, and None for each new dimension.

    Slices of whole dimensions take the place of `...`, which is at the end if it is not written.
    """
    if sum(part is Ellipsis for part in keys) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    indexing = [part for part in keys if not isinstance(part, EllipsisType | None)]
    if len(indexing) > ndim:
        raise IndexError(f"{len(indexing)} indices for a tensor of {ndim} dimensions")
    whole_dimensions = [slice(None)] * (ndim - len(indexing))
    complete: list[Any] = []
    for part in keys:
        if part is Ellipsis:
            complete.extend(whole_dimensions)
            whole_dimensions = []
        else:
            complete.append(part)
    return complete + whole_dimensions


def _refuse_list_apart_from_integer(keys: list[Any]) -> None:
    """Refuse x[0, :, [1, 2]]: numpy would move the dimension of the list to the front."""
    positions_of_integers: list[int] = []
    positions_of_lists: list[int] = []
    for position, part in enumerate(keys):
        if isinstance(part, int | np.integer):
            positions_of_integers.append(position)
        elif not isinstance(part, slice | EllipsisType | None):
            positions_of_lists.append(position)
    if not positions_of_integers or not positions_of_lists:
        return
    positions = positions_of_integers + positions_of_lists
    distance = max(positions) - min(positions)
    are_adjacent = distance + 1 == len(positions)
    if not are_adjacent:
        problem = "an integer and a list are not next to each other"
        raise InputError("index", problem, _KEYS)


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


def is_mask(key: Any) -> bool:
    return isinstance(key, DistArray | np.ndarray) and key.dtype.kind == "b"


def is_table_for_each_dimension(array: DistArray, key: Any) -> bool:
    """Return whether a key has an integer or a table of integers for every dimension.

    One of the tables is a DistArray, or there are several of them.
    """
    parts = key if isinstance(key, tuple) else (key,)
    tables = 0
    has_dist_array = False
    for part in parts:
        if isinstance(part, slice | EllipsisType | None):
            return False
        if isinstance(part, DistArray):
            has_dist_array = True
            if part.dtype.kind not in "iu":
                raise InputError("index", f"a DistArray has dtype {part.dtype}", _KEYS)
        if isinstance(part, DistArray | np.ndarray | list):
            tables += 1
    return len(parts) == array.ndim and (has_dist_array or tables > 1)


def with_gathered_tables(key: Any) -> Any:
    """Return a key in which every rank has the DistArrays of integers whole."""
    if isinstance(key, DistArray):
        return key.gather()
    if isinstance(key, tuple):
        return tuple(with_gathered_tables(part) for part in key)
    return key


def check_mask(array: DistArray, mask: Any) -> None:
    """Refuse a mask of other extents than the tensor; as numpy's, they may be 0."""
    fits = mask.ndim <= array.ndim
    for mask_extent, extent in zip(mask.shape, array.shape, strict=False):
        fits = fits and mask_extent in (extent, 0)
    if not fits:
        raise IndexError(
            f"the mask has shape {list(mask.shape)}; expected the first extents of "
            f"{list(array.shape)}"
        )
