"""Elements of DistArrays by index: integers, slices, None, lists of integers, or a mask."""

from __future__ import annotations

from typing import Any

import numpy as np

from einmpi.arrays.keys import (
    Selection,
    check_mask,
    is_mask,
    is_table_for_each_dimension,
    parse_key,
    with_gathered_tables,
)
from einmpi.arrays.moving import on_one_rank
from einmpi.arrays.places import elements_at_indices, nonzero
from einmpi.arrays.reshaping import reshape
from einmpi.arrays.selected import select_elements
from einmpi.arrays.shapes import with_dimensions
from einmpi.compiled.dist_array import DistArray


def select(array: DistArray, key: Any) -> DistArray:
    """Return the elements that a key selects. All ranks call it."""
    if is_mask(key):
        return _select_by_mask(array, key)
    if is_table_for_each_dimension(array, key):
        return elements_at_indices(array, key if isinstance(key, tuple) else (key,))
    key = with_gathered_tables(key)
    selection = parse_key(array, key)
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


def _with_result_shape(selected: DistArray, selection: Selection) -> DistArray:
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


def _select_by_mask(array: DistArray, mask: Any) -> DistArray:
    """Return the elements, in row-major order, where a mask is True.

    The mask has the shape of the tensor, or of its first dimensions.
    """
    check_mask(array, mask)
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


def take(array: DistArray, indices: Any, /, axis: int | None = None) -> DistArray:
    """Return the elements at some indices along a dimension.

    Without an axis, the indices count all elements in row-major order.
    """
    if axis is None:
        return select(reshape(array, (-1,)), indices)
    dimension = range(array.ndim)[axis]
    key = (slice(None),) * dimension + (indices,)
    return select(array, key)
