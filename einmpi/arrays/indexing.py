"""Elements of DistArrays by index: integers, slices, None, one list of integers, or a mask."""

from __future__ import annotations

from dataclasses import dataclass
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arrays.elementwise import store
from einmpi.arrays.moving import (
    block_indices,
    fetch,
    on_one_rank,
)
from einmpi.arrays.places import elements_at_indices, nonzero
from einmpi.arrays.reshaping import reshape
from einmpi.arrays.selected import Chosen, copy_selected, select_elements
from einmpi.arrays.shapes import broadcast_to, with_dimensions
from einmpi.compiled.dist_array import DistArray
from einmpi.compiled.intervals import flat_indices
from einmpi.errors import InputError
from einmpi.kernels.given import as_numpy

Integers: TypeAlias = npt.NDArray[np.int64]
_KEYS = "integers, slices, None, ..., one list of integers, lists for all dimensions, or a mask"


@dataclass(frozen=True)
class _Selection:
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


def _selection(array: DistArray, key: Any) -> _Selection:
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
            indices = _indices_in_range(table.reshape(-1), extent)
            extents = table.shape
        chosen.append(indices)
        result_extents.append(extents)
        result_ndim += len(extents)
    _refuse_list_apart_from_integer(keys)
    return _Selection(chosen, result_extents, new_positions)


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


def _indices_in_range(indices: Integers, extent: int) -> Integers:
    """Return indices counted from the start of a dimension."""
    if not indices.size:
        return indices.astype(np.int64)
    _index_in_range(int(indices.min()), extent)
    _index_in_range(int(indices.max()), extent)
    return indices.astype(np.int64) % extent


def select(array: DistArray, key: Any) -> DistArray:
    """Return the elements that a key selects. All ranks call it."""
    if _is_mask(key):
        return _select_by_mask(array, key)
    if _is_table_for_each_dimension(array, key):
        return elements_at_indices(array, key if isinstance(key, tuple) else (key,))
    key = _with_gathered_tables(key)
    selection = _selection(array, key)
    if array.is_alone():
        selected: Any = array.local[key]
        # A copy, as on several ranks, where the elements move.
        if isinstance(selected, np.ndarray | np.generic):
            copied = np.array(selected)
        else:
            copied = selected.copy()
        return on_one_rank(array, copied)

    selected = select_elements(array, selection.chosen)
    return _with_result_shape(selected, selection)


def _with_result_shape(selected: DistArray, selection: _Selection) -> DistArray:
    """Return selected elements without the dimensions of integers, and with new dimensions."""
    order: list[int | None] = []
    has_table = False
    for dimension, extents in enumerate(selection.result_extents):
        if extents:
            order.append(dimension)
        has_table = has_table or len(extents) > 1
    if has_table:
        return reshape(selected, selection.shape)
    for position in selection.new_positions:
        order.insert(position, None)
    return with_dimensions(selected, order)


def _is_mask(key: Any) -> bool:
    return isinstance(key, DistArray | np.ndarray) and key.dtype.kind == "b"


def _is_table_for_each_dimension(array: DistArray, key: Any) -> bool:
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


def _with_gathered_tables(key: Any) -> Any:
    """Return a key in which every rank has the DistArrays of integers whole."""
    if isinstance(key, DistArray):
        return key.gather()
    if isinstance(key, tuple):
        return tuple(_with_gathered_tables(part) for part in key)
    return key


def _check_mask(array: DistArray, mask: Any) -> None:
    """Refuse a mask of other extents than the tensor; as numpy's, they may be 0."""
    fits = mask.ndim <= array.ndim
    for mask_extent, extent in zip(mask.shape, array.shape, strict=False):
        fits = fits and mask_extent in (extent, 0)
    if not fits:
        raise IndexError(
            f"the mask has shape {list(mask.shape)}; expected the first extents of "
            f"{list(array.shape)}"
        )


def _select_by_mask(array: DistArray, mask: Any) -> DistArray:
    """Return the elements, in row-major order, where a mask is True.

    The mask has the shape of the tensor, or of its first dimensions.
    """
    _check_mask(array, mask)
    comm = array.own_comm
    if not isinstance(mask, DistArray):
        mask = DistArray.from_global(mask, comm)
    mask_vector = reshape(mask, (-1,))
    if not mask.size:
        return DistArray.zeros((0, *array.shape[mask.ndim :]), array.dtype, comm)
    if mask.ndim < array.ndim:
        (selected_rows,) = nonzero(mask_vector)
        rows = reshape(array, (mask.size, *array.shape[mask.ndim :]))
        return select(rows, selected_rows.gather())

    values = reshape(array, (-1,))
    if mask_vector.layout != values.layout:
        mask_vector = mask_vector.redistribute(values.layout)
    is_selected = mask_vector.host
    # Of ranks that hold the same elements, only one contributes them.
    if values.local.size and values.layout.owns(comm.rank):
        own_values = values.host[is_selected]
    else:
        own_values = np.empty(0, array.dtype)
    return DistArray.from_local(own_values, comm=comm)


def assign(array: DistArray, key: Any, value: Any) -> None:
    """Replace the elements that a key selects, in place. All ranks call it."""
    if _is_mask(key):
        _check_mask(array, key)
        if key.ndim < array.ndim:
            new_dimensions = (1,) * (array.ndim - key.ndim)
            key = key.reshape((*key.shape, *new_dimensions))
        changed: Any = np.where(key, value, array)
        store(array, changed.astype(array.dtype))
        return
    selection = _selection(array, _with_gathered_tables(key))
    if not isinstance(value, DistArray):
        value = as_numpy("index", "the value", value)
    # As numpy, drop dimensions of extent 1 that come before those of the selection.
    while value.ndim > len(selection.shape) and value.shape[0] == 1:
        value = value.reshape(value.shape[1:])
    if isinstance(value, DistArray) and _is_box(selection):
        _assign_box(array, selection, value)
        return
    own_block = block_indices(array.layout, array.own_comm.rank)
    places_in_block: list[Integers] = []
    places_in_selection: list[Integers] = []  # of the same elements, in the chosen indices
    for own_indices, chosen_indices in zip(own_block, selection.chosen, strict=True):
        chosen = np.asarray(chosen_indices)
        positions = np.nonzero(np.isin(chosen, own_indices))[0]
        places_in_block.append(np.searchsorted(own_indices, chosen[positions]))
        places_in_selection.append(positions)

    flat_places = flat_indices(places_in_selection, selection.counts)
    if isinstance(value, DistArray):
        values = fetch(broadcast_to(value, selection.shape), flat_places)
    else:
        all_values = np.broadcast_to(value, selection.shape)
        values = all_values.reshape(-1)[flat_places]
    if array.local.size:
        shape_in_block = [len(places) for places in places_in_block]
        array.local[np.ix_(*places_in_block)] = values.reshape(shape_in_block)


def _is_box(selection: _Selection) -> bool:
    """Return whether consecutive indices of every dimension are selected."""
    for chosen in selection.chosen:
        if not isinstance(chosen, range) or chosen.step != 1:
            return False
    return True


def _assign_box(array: DistArray, selection: _Selection, value: DistArray) -> None:
    """Replace the elements of a box by those of a tensor, which is broadcast."""
    if np.may_share_memory(value.host, array.host):
        value = value.copy()  # x[...] = x.T
    repeated = broadcast_to(value, selection.shape)
    # The dimensions of the value, one for each dimension of the tensor; None for an integer.
    kept = [number for number in range(repeated.ndim) if number not in selection.new_positions]
    order: list[int | None] = []
    for extents in selection.result_extents:
        order.append(kept.pop(0) if extents else None)
    values = with_dimensions(repeated, order)
    first = [chosen[0] if len(chosen) else 0 for chosen in selection.chosen]
    whole_value = [range(extent) for extent in values.shape]
    copy_selected(values, whole_value, array.layout, array.local, first)


def take(array: DistArray, indices: Any, /, axis: int | None = None) -> DistArray:
    """Return the elements at some indices along a dimension.

    Without an axis, the indices count all elements in row-major order.
    """
    if axis is None:
        return select(reshape(array, (-1,)), indices)
    dimension = range(array.ndim)[axis]
    key = (slice(None),) * dimension + (indices,)
    return select(array, key)
