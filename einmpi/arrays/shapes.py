"""Other shapes of DistArrays. Only reshape and joins move elements; a transpose renames cuts."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple

from einmpi.arrays.moving import (
    block_indices,
    fetch,
    flat_indices,
    layout_for,
    on_one_rank,
    rearranged,
)
from einmpi.arrays.programs import common_comm
from einmpi.compiled.dist_array import DistArray
from einmpi.kernels.given import as_numpy
from einmpi.schedule.layout import Layout


def transpose(array: DistArray, axes: Sequence[int] | None = None) -> DistArray:
    """Return the tensor with its dimensions in another order."""
    order = tuple(reversed(range(array.ndim)))
    if axes is not None:
        order = normalize_axis_tuple(axes, array.ndim)
        if len(order) != array.ndim:
            raise ValueError("axes do not match the dimensions of the tensor")
    return _with_dimensions(array, order)


def _with_dimensions(array: DistArray, order: Sequence[int | None]) -> DistArray:
    """Return a tensor with these of the old dimensions; None is a new one of extent 1.

    Dimensions that are left out have extent 1.
    """
    layout = array.layout
    bound = tuple(1 if old is None else layout.bound[old] for old in order)
    cuts: list[int | None] = []
    for cut in layout.cuts:
        cuts.append(None if cut is None else order.index(cut))
    changed = Layout(layout.mesh, bound, tuple(cuts))
    block = changed.block(array.own_comm.rank)
    if block is None:
        local = np.empty((0,) * (len(bound) or 1), array.dtype)
        return DistArray(local, changed, array.own_comm)
    kept = [old for old in order if old is not None]
    dropped = [old for old in range(array.ndim) if old not in kept]
    local = array.local.transpose([*kept, *dropped])
    shape = [len(indices) for indices in block_indices(changed, array.own_comm.rank)]
    return DistArray(local.reshape(shape), changed, array.own_comm)


def swapaxes(array: DistArray, axis1: int, axis2: int) -> DistArray:
    """Return the tensor with two of its dimensions swapped."""
    order = list(range(array.ndim))
    one = normalize_axis_index(axis1, array.ndim)
    two = normalize_axis_index(axis2, array.ndim)
    order[one] = two
    order[two] = one
    return _with_dimensions(array, order)


def moveaxis(array: DistArray, source: Any, destination: Any) -> DistArray:
    """Return the tensor with some dimensions at other positions."""
    old_places = normalize_axis_tuple(source, array.ndim)
    new_places = normalize_axis_tuple(destination, array.ndim)
    order = [axis for axis in range(array.ndim) if axis not in old_places]
    for new, old in sorted(zip(new_places, old_places, strict=True)):
        order.insert(new, old)
    return _with_dimensions(array, order)


def expand_dims(array: DistArray, axis: int | Sequence[int]) -> DistArray:
    """Return the tensor with new dimensions of extent 1 at these positions."""
    count = 1 if isinstance(axis, int) else len(axis)
    places = normalize_axis_tuple(axis, array.ndim + count)
    remaining = iter(range(array.ndim))
    order = [None if place in places else next(remaining) for place in range(array.ndim + count)]
    return _with_dimensions(array, order)


def squeeze(array: DistArray, axis: int | tuple[int, ...] | None = None) -> DistArray:
    """Return the tensor without dimensions of extent 1, or without those that are named."""
    if axis is None:
        dropped = tuple(number for number, extent in enumerate(array.shape) if extent == 1)
    else:
        dropped = normalize_axis_tuple(axis, array.ndim)
    for number in dropped:
        if array.shape[number] != 1:
            raise ValueError("cannot squeeze a dimension whose extent is not 1")
    return _with_dimensions(array, [axis for axis in range(array.ndim) if axis not in dropped])


def broadcast_to(array: DistArray, shape: int | Sequence[int]) -> DistArray:
    """Return the tensor with its elements repeated along dimensions of extent 1."""
    extents = (shape,) if isinstance(shape, int) else tuple(shape)
    if np.broadcast_shapes(array.shape, extents) != extents:
        raise ValueError(f"a tensor of shape {array.shape} cannot be broadcast to {extents}")
    offset = len(extents) - array.ndim
    cuts = tuple(None if cut is None else cut + offset for cut in array.layout.cuts)
    layout = Layout(array.layout.mesh, extents, cuts)
    block = layout.block(array.own_comm.rank)
    if block is None:
        local = np.empty((0,) * (len(extents) or 1), array.dtype)
    else:
        held = [len(part) for part in block_indices(layout, array.own_comm.rank)]
        local = np.broadcast_to(array.host, held).copy()
    return DistArray(local, layout, array.own_comm)


def reshape(array: DistArray, shape: int | Sequence[int]) -> DistArray:
    """Return the elements, in row-major order, in another shape."""
    extents = [shape] if isinstance(shape, int) else [int(extent) for extent in shape]
    if extents.count(-1) == 1:
        others = prod(extent for extent in extents if extent != -1)
        extents[extents.index(-1)] = array.size // others if others else 0
    if prod(extents) != array.size or any(extent < 0 for extent in extents):
        raise ValueError(f"cannot reshape a tensor of shape {array.shape} to {shape}")
    new = tuple(extents)
    if array.is_alone():
        return on_one_rank(array, array.local.reshape(new).copy())
    rank = array.own_comm.rank

    def places(layout: Layout) -> Any:
        return flat_indices(block_indices(layout, rank), new)

    return rearranged(array, new, places)


def concatenate(arrays: Sequence[Any], axis: int | None = 0) -> DistArray:
    """Join tensors along a dimension; without one, their elements as vectors."""
    given = [_distributed(array, arrays) for array in arrays]
    if axis is None:
        given = [reshape(array, (-1,)) for array in given]
        axis = 0
    dtype = np.result_type(*(array.dtype for array in given))
    comm = given[0].own_comm
    joined = normalize_axis_index(axis, given[0].ndim)
    shape = list(given[0].shape)
    shape[joined] = sum(array.shape[joined] for array in given)
    layout = layout_for(comm, tuple(shape))
    wanted = block_indices(layout, comm.rank)
    local = np.empty([len(part) for part in wanted], dtype)
    first = 0
    for array in given:
        extent = array.shape[joined]
        others = [*array.shape[:joined], *array.shape[joined + 1 :]]
        if others != [*shape[:joined], *shape[joined + 1 :]]:
            raise ValueError("the tensors differ in other dimensions than the one that is joined")
        inside = (wanted[joined] >= first) & (wanted[joined] < first + extent)
        parts = list(wanted)
        parts[joined] = wanted[joined][inside] - first
        values = fetch(array, flat_indices(parts, array.shape))
        here = [slice(None)] * len(shape)
        target: list[Any] = here
        target[joined] = np.nonzero(inside)[0]
        local[tuple(target)] = values.reshape([len(part) for part in parts])
        first += extent
    if layout.block(comm.rank) is None:
        local = np.empty((0,) * len(shape), dtype)
    return DistArray(local, layout, comm)


def stack(arrays: Sequence[Any], axis: int = 0) -> DistArray:
    """Join tensors of the same shape along a new dimension."""
    given = [_distributed(array, arrays) for array in arrays]
    place = normalize_axis_index(axis, given[0].ndim + 1)
    return concatenate([expand_dims(array, place) for array in given], place)


def _distributed(array: Any, others: Sequence[Any]) -> DistArray:
    comm = common_comm("join", [other for other in others if isinstance(other, DistArray)])
    if isinstance(array, DistArray):
        return array
    return DistArray.from_global(as_numpy("join", "an operand", array), comm)


def flip(array: DistArray, axis: int | tuple[int, ...] | None = None) -> DistArray:
    """Return the tensor with the order of elements reversed along some dimensions."""
    axes = range(array.ndim) if axis is None else normalize_axis_tuple(axis, array.ndim)
    key = [slice(None, None, -1) if number in axes else slice(None) for number in range(array.ndim)]
    return array[tuple(key)]


def roll(array: DistArray, shift: int, axis: int | None = None) -> DistArray:
    """Return the tensor with elements shifted along a dimension; the last become the first."""
    if axis is None:
        return reshape(roll(reshape(array, (-1,)), shift, 0), array.shape)
    place = normalize_axis_index(axis, array.ndim)
    order = np.roll(np.arange(array.shape[place]), shift)
    return array[(slice(None),) * place + (order,)]
