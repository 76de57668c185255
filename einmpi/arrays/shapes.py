"""Changes of shape of DistArrays. Joins and shifts move elements; a transpose renames cuts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple

from einmpi.arrays.moving import (
    block_of_idle_rank,
    cuts_of_last_dimensions,
    empty_block,
    on_one_rank,
)
from einmpi.arrays.programs import common_comm
from einmpi.arrays.reshaping import reshape
from einmpi.arrays.selected import copy_selected, layout_of_selection
from einmpi.compiled.dist_array import DistArray
from einmpi.compiled.views import Link, View
from einmpi.kernels.given import as_numpy
from einmpi.schedule.layout import Layout
from einmpi.schedule.regions import shape as region_shape


def transpose(array: DistArray, /, axes: Sequence[int] | None = None) -> DistArray:
    """Return the tensor with its dimensions in another order; by default reversed."""
    if axes is None:
        order = tuple(reversed(range(array.ndim)))
    else:
        order = normalize_axis_tuple(axes, array.ndim)
        if len(order) != array.ndim:
            raise ValueError("axes do not match the dimensions of the tensor")
    return with_dimensions(array, order)


def with_dimensions(array: DistArray, order: Sequence[int | None]) -> DistArray:
    """Return a view with these of the old dimensions; None is a new one of extent 1."""
    # Where each of the old dimensions is in the view.
    old_order = [order.index(old) if old in order else None for old in range(array.ndim)]

    def write(base: DistArray, values: DistArray) -> None:
        base[...] = rearranged(values, old_order)

    stored = partial(_reordered, order)
    return View(array, Link(lambda base: rearranged(base, order), write, stored, shares=True))


def rearranged(array: DistArray, order: Sequence[int | None]) -> DistArray:
    """Return a tensor with these of the old dimensions; None is a new one of extent 1.

    Dimensions that are left out have extent 1. No elements move.
    """
    block = array.local  # read by all ranks, even if they have no elements
    bound = _extents(order, array.shape)
    cuts: list[int | None] = []
    for cut in array.layout.cuts:
        if cut is None:
            cuts.append(None)
        else:
            cuts.append(order.index(cut))
    layout = Layout(array.layout.mesh, bound, tuple(cuts))

    if layout.block(array.own_comm.rank) is None:
        block = block_of_idle_rank(layout, array.dtype)
    else:
        block = _reordered(order, block)
    return DistArray(block, layout, array.own_comm)


def _reordered(order: Sequence[int | None], block: Any) -> Any:
    """Return a block with its dimensions in another order; those that are left out come last."""
    kept = [old for old in order if old is not None]
    dropped = [old for old in range(block.ndim) if old not in kept]
    return block.transpose([*kept, *dropped]).reshape(_extents(order, block.shape))


def _extents(order: Sequence[int | None], shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(1 if old is None else shape[old] for old in order)


def swapaxes(array: DistArray, axis1: int, axis2: int, /) -> DistArray:
    """Return the tensor with two of its dimensions swapped."""
    first = normalize_axis_index(axis1, array.ndim)
    second = normalize_axis_index(axis2, array.ndim)
    order = list(range(array.ndim))
    order[first] = second
    order[second] = first
    return with_dimensions(array, order)


def moveaxis(array: DistArray, source: Any, destination: Any, /) -> DistArray:
    """Return the tensor with some dimensions at other positions."""
    old_positions = normalize_axis_tuple(source, array.ndim)
    new_positions = normalize_axis_tuple(destination, array.ndim)
    order = [axis for axis in range(array.ndim) if axis not in old_positions]
    moves = sorted(zip(new_positions, old_positions, strict=True))
    for new_position, old_position in moves:
        order.insert(new_position, old_position)
    return with_dimensions(array, order)


def expand_dims(array: DistArray, axis: int | Sequence[int], /) -> DistArray:
    """Return the tensor with new dimensions of extent 1 at these positions."""
    added = 1 if isinstance(axis, int) else len(axis)
    new_positions = normalize_axis_tuple(axis, array.ndim + added)
    order: list[int | None] = list(range(array.ndim))
    for position in sorted(new_positions):
        order.insert(position, None)
    return with_dimensions(array, order)


def squeeze(array: DistArray, /, axis: int | tuple[int, ...] | None = None) -> DistArray:
    """Return the tensor without all dimensions of extent 1, or without those that are named."""
    dropped: Sequence[int]
    if axis is None:
        dropped = [number for number, extent in enumerate(array.shape) if extent == 1]
    else:
        dropped = normalize_axis_tuple(axis, array.ndim)
    for number in dropped:
        if array.shape[number] != 1:
            raise ValueError("cannot squeeze a dimension whose extent is not 1")
    kept = [number for number in range(array.ndim) if number not in dropped]
    return with_dimensions(array, kept)


def broadcast_to(array: DistArray, shape: int | Sequence[int]) -> DistArray:
    """Return the tensor with its elements repeated along dimensions of extent 1."""
    bound = (shape,) if isinstance(shape, int) else tuple(shape)
    if np.broadcast_shapes(array.shape, bound) != bound:
        raise ValueError(f"a tensor of shape {array.shape} cannot be broadcast to {bound}")
    block = array.host  # read by all ranks, even if they have no elements
    cuts = cuts_of_last_dimensions(array.layout, len(bound))
    layout = Layout(array.layout.mesh, bound, cuts)
    region = layout.block(array.own_comm.rank)
    if region is None:
        local = block_of_idle_rank(layout, array.dtype)
    else:
        local = np.broadcast_to(block, region_shape(region)).copy()
    return DistArray(local, layout, array.own_comm)


def concatenate(
    arrays: Sequence[Any], /, axis: int | None = 0, dtype: Any = None, casting: Any = "same_kind"
) -> DistArray:
    """Join tensors along a dimension; without one, their elements as vectors."""
    tensors = distributed(arrays)
    if axis is None:
        tensors = [reshape(tensor, (-1,)) for tensor in tensors]
        axis = 0
    joined_dtype = np.result_type(*(tensor.dtype for tensor in tensors))
    if dtype is not None:
        if not np.can_cast(joined_dtype, dtype, casting):
            raise TypeError(f"cannot convert {joined_dtype} to {dtype} with casting={casting!r}")
        joined_dtype = np.dtype(dtype)
    joined = normalize_axis_index(axis, tensors[0].ndim)
    extents_before = tensors[0].shape[:joined]
    extents_after = tensors[0].shape[joined + 1 :]
    joined_extent = 0
    for tensor in tensors:
        if tensor.ndim != tensors[0].ndim:
            raise ValueError("the tensors differ in the number of dimensions")
        extent = tensor.shape[joined]
        if tensor.shape != (*extents_before, extent, *extents_after):
            raise ValueError("the tensors differ in other dimensions than the one that is joined")
        joined_extent += extent

    largest = max(tensors, key=lambda tensor: tensor.size)
    bound = (*extents_before, joined_extent, *extents_after)
    layout = layout_of_selection(largest.layout, bound)
    comm = largest.own_comm
    local = empty_block(layout, comm.rank, joined_dtype)
    first = [0] * len(bound)
    for tensor in tensors:
        whole_tensor = [range(extent) for extent in tensor.shape]
        copy_selected(tensor, whole_tensor, layout, local, first)
        first[joined] += tensor.shape[joined]
    return DistArray(local, layout, comm)


def stack(arrays: Sequence[Any], /, axis: int = 0) -> DistArray:
    """Join tensors of the same shape along a new dimension."""
    tensors = distributed(arrays)
    position = normalize_axis_index(axis, tensors[0].ndim + 1)
    expanded = [expand_dims(tensor, position) for tensor in tensors]
    return concatenate(expanded, position)


def distributed(arrays: Sequence[Any]) -> list[DistArray]:
    """Return DistArrays, and arrays distributed over the same ranks."""
    comm = common_comm("join", [array for array in arrays if isinstance(array, DistArray)])
    tensors: list[DistArray] = []
    for array in arrays:
        if isinstance(array, DistArray):
            tensors.append(array)
        else:
            whole = as_numpy("join", "an operand", array)
            tensors.append(DistArray.from_global(whole, comm))
    return tensors


def flip(array: DistArray, /, axis: int | tuple[int, ...] | None = None) -> DistArray:
    """Return the tensor with the order of elements reversed along some dimensions."""
    reversed_axes = tuple(range(array.ndim))
    if axis is not None:
        reversed_axes = normalize_axis_tuple(axis, array.ndim)
    key = [slice(None)] * array.ndim
    for number in reversed_axes:
        key[number] = slice(None, None, -1)
    return array[tuple(key)]


def roll(array: DistArray, shift: Any, /, axis: Any = None) -> DistArray:
    """Return the tensor with elements shifted along dimensions; the last become the first.

    Without an axis, the elements are shifted in row-major order.
    """
    if array.is_alone():
        return on_one_rank(array, np.roll(array.local, shift, axis))
    if axis is None:
        vector = reshape(array, (-1,))
        return reshape(roll(vector, shift, 0), array.shape)
    rolled = array
    # As numpy, one shift may be for several dimensions, or several for one.
    for one_shift, one_axis in np.broadcast(shift, axis):
        rolled = _rolled_along(rolled, int(one_shift), normalize_axis_index(one_axis, array.ndim))
    return array.copy() if rolled is array else rolled


def _rolled_along(array: DistArray, shift: int, dimension: int) -> DistArray:
    extent = array.shape[dimension]
    if not extent or shift % extent == 0:
        return array.copy()
    shifted = shift % extent
    chosen = [range(whole_extent) for whole_extent in array.shape]
    first = [0] * array.ndim
    local = np.empty_like(array.host)
    chosen[dimension] = range(extent - shifted, extent)
    copy_selected(array, chosen, array.layout, local, first)
    chosen[dimension] = range(extent - shifted)
    first[dimension] = shifted
    copy_selected(array, chosen, array.layout, local, first)
    return DistArray(local, array.layout, array.own_comm)
