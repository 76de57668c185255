"""Elements of DistArrays by index: integers, slices, None, lists of integers, or a mask."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np

from einmpi.arrays.keys import (
    Key,
    Selection,
    fixed_key,
    gathered,
    is_basic,
    mask_of_all,
    merge_tables,
    parse_key,
    read_key,
)
from einmpi.arrays.moving import on_one_rank
from einmpi.arrays.places import elements_at_indices
from einmpi.arrays.reshaping import reshape
from einmpi.arrays.selected import select_elements
from einmpi.arrays.shapes import rearranged
from einmpi.compiled.dist_array import DistArray
from einmpi.compiled.views import Link, View
from einmpi.kernels.given import as_numpy


def select(array: DistArray, key: Any) -> DistArray:
    """Return the elements that a key selects: a view, or a copy as numpy's. All ranks call it."""
    if is_basic(key):
        return _view_of_part(array, fixed_key(key))
    mask = mask_of_all(array, key)
    if mask is not None:
        return _select_by_mask(array, mask)
    read = read_key(array, key)
    if read.is_by_element:
        return elements_at_indices(read.array, read.parts)
    if read.is_by_dimension:
        return _selected_by_dimension(read)
    merged = merge_tables(read)
    selected = select(merged.array, merged.table)
    return rearranged(selected, merged.order)


def _view_of_part(array: DistArray, key: tuple[Any, ...]) -> DistArray:
    def read(base: DistArray) -> DistArray:
        return _selected_by_dimension(read_key(base, key))

    def write(base: DistArray, values: DistArray) -> None:
        base[key] = values

    if len(key) == array.ndim and all(isinstance(part, int | np.integer) for part in key):
        return deepcopy(read(array))  # one element, which is no view in numpy either
    return View(array, Link(read, write, lambda block: block[key], array.is_alone()), key)


def _selected_by_dimension(key: Key) -> DistArray:
    array = key.array
    selection = parse_key(key)
    if array.is_alone():
        parts = [part if is_basic(part) else gathered(part) for part in key.parts]
        return on_one_rank(array, array.local[(*parts, ...)])  # an array, never a number
    return _with_result_shape(select_elements(array, selection.chosen), selection)


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
    return rearranged(selected, order)


def _select_by_mask(array: DistArray, mask: Any) -> DistArray:
    """Return the elements, in row-major order, where a mask of the same shape is True."""
    comm = array.own_comm
    if not isinstance(mask, DistArray):
        mask = DistArray.from_global(mask, comm)
    mask_vector = reshape(mask, (-1,))
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
    if not isinstance(indices, DistArray):
        indices = as_numpy("take", "indices", indices)
    if axis is None:
        return select(reshape(array, (-1,)), indices)
    dimension = range(array.ndim)[axis]
    key = (slice(None),) * dimension + (indices,)
    return select(array, key)
