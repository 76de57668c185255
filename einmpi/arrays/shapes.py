"""Shapes of DistArrays: reshapes, reordered dimensions, joins, parts, shifts, repeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple
from numpy.lib.stride_tricks import as_strided

from einmpi.arrays.creation import layout_for
from einmpi.arrays.dist_array import DistArray, Link, call, stored_as_numpy, takes_symbols
from einmpi.arrays.exchange import intervals_of_block, move_between_intervals
from einmpi.arrays.moving import (
    Chosen,
    broadcast_layout,
    common_comm,
    distributed,
    gathered,
    is_provider,
    layout_cutting,
    on_one_rank,
    select_elements,
    with_other_dimensions,
)
from einmpi.arrays.record import block_extents
from einmpi.schedule.layout import Layout

Array: TypeAlias = npt.NDArray[Any]


# ---- reshapes: elements keep their places in row-major order ------------------------------------


@takes_symbols
def reshape(array: DistArray, shape: int | Sequence[int]) -> DistArray:
    """Return the elements, in row-major order, in another shape.

    One extent may be -1: it follows from the number of elements.
    """
    bound = _bound(array, shape)
    if array.is_alone():
        return on_one_rank(array, array.local.reshape(bound).copy())
    if bound == array.shape:
        return array._with_block(array.local.copy())
    return _moved_to_shape(array, bound)


def view_in_shape(array: DistArray, shape: int | Sequence[int]) -> DistArray:
    """Return a view of the elements, in row-major order, in another shape."""
    bound = _bound(array, shape)

    def read(base: DistArray) -> DistArray:
        if base.is_alone():
            return on_one_rank(base, base.local.reshape(bound))
        return reshape(base, bound)

    def write(base: DistArray, values: DistArray) -> None:
        base[...] = reshape(values, base.shape)

    shares = array.is_alone() and array.local.flags.c_contiguous
    return array._view(Link(read, write, partial(_stored_in_shape, bound), shares))


def as_numpy_reshapes(array: DistArray, shape: Any, copy: bool | None = None) -> DistArray:
    """Return the elements in another shape: a view where numpy has one, else a copy."""
    bound = _bound(array, shape)
    is_view = not copy
    if is_view and array.links:
        try:
            _stored_in_shape(bound, stored_as_numpy(array))
        except ValueError:
            is_view = False
    if copy is False and not is_view:
        raise ValueError(f"reshape of a tensor of shape {array.shape} to {bound} is a copy")
    return view_in_shape(array, bound) if is_view else reshape(array, bound)


def _stored_in_shape(bound: tuple[int, ...], block: Array) -> Array:
    """Return a block in another shape; raise a ValueError if its elements had to move."""
    return np.reshape(block, bound, copy=False)


def _bound(array: DistArray, shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return a shape that has as many elements as a tensor."""
    try:
        bound: tuple[int, ...] = np.reshape(
            np.broadcast_to(0, array.shape), shape, copy=False
        ).shape
    except ValueError:
        message = f"cannot reshape a tensor of shape {array.shape} to {shape}"
        raise ValueError(message) from None
    return bound


def with_one_axis(array: DistArray, axis: int | None) -> tuple[DistArray, int]:
    """Return the tensor and one of its dimensions, counted from 0.

    Without an axis, return the elements as a vector, as most functions of numpy do.
    """
    if axis is None:
        return reshape(array, (-1,)), 0
    return array, normalize_axis_index(axis, array.ndim)


def _moved_to_shape(array: DistArray, bound: tuple[int, ...]) -> DistArray:
    """Return the tensor in another shape. Each rank sends the others what they lack."""
    comm = array.own_comm
    layout = _layout_of_reshape(array, bound)
    local = np.empty(block_extents(layout, comm.rank), array.dtype)
    move_between_intervals(
        comm,
        np.ascontiguousarray(array.host).reshape(-1),
        local.reshape(-1),
        partial(intervals_of_block, array.layout),
        partial(intervals_of_block, layout),
        partial(is_provider, array.layout),
    )
    return array._with_block(local, layout)


def _layout_of_reshape(array: DistArray, bound: tuple[int, ...]) -> Layout:
    """Return the layout of the result; a tensor that every rank has whole stays so."""
    source = array.layout
    if source.cutting_axes() or not source.cuts:
        return layout_for(array.own_comm, bound)
    return Layout(source.mesh, bound, source.cuts)  # which cut nothing


# ---- dimensions: none of these moves elements ---------------------------------------------------


def by_dimensions(function: Callable[..., Any]) -> Callable[..., DistArray]:
    """Return a function of numpy that leaves out dimensions or changes their order."""

    def apply(array: DistArray, /, *arguments: Any, **options: Any) -> DistArray:
        # numpy does it to an array that has the number of each dimension as its stride.
        numbered = as_strided(np.empty((), np.int8), array.shape, range(array.ndim))
        return with_dimensions(array, function(numbered, *arguments, **options).strides)

    return apply


def with_dimensions(array: DistArray, order: Sequence[int | None]) -> DistArray:
    """Return a view with these of the old dimensions; None is a new one of extent 1."""
    # Where each of the old dimensions is in the view.
    old_order = [order.index(old) if old in order else None for old in range(array.ndim)]

    def write(base: DistArray, values: DistArray) -> None:
        base[...] = rearranged(values, old_order)

    stored = partial(_reordered, order)
    return array._view(Link(lambda base: rearranged(base, order), write, stored, shares=True))


@takes_symbols
def rearranged(array: DistArray, order: Sequence[int | None]) -> DistArray:
    """Return a tensor with these of the old dimensions; None is a new one of extent 1.

    Dimensions that are left out have extent 1. No elements move.
    """
    block = array.local  # read by all ranks, even if they have no elements
    layout = with_other_dimensions(array.layout, _extents(order, array.shape), order.index)
    if array.region is not None:
        block = _reordered(order, block)
    return array._with_block(block, layout)


def _reordered(order: Sequence[int | None], block: Any) -> Any:
    """Return a block with its dimensions in another order; those that are left out come last."""
    kept = [old for old in order if old is not None]
    dropped = [old for old in range(block.ndim) if old not in kept]
    return block.transpose([*kept, *dropped]).reshape(_extents(order, block.shape))


def _extents(order: Sequence[int | None], shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(1 if old is None else shape[old] for old in order)


def expand_dims(array: DistArray, axis: int | Sequence[int], /) -> DistArray:
    """Return the tensor with new dimensions of extent 1 at these positions."""
    added = 1 if isinstance(axis, int) else len(axis)
    new_positions = normalize_axis_tuple(axis, array.ndim + added)
    order: list[int | None] = list(range(array.ndim))
    for position in sorted(new_positions):
        order.insert(position, None)
    return with_dimensions(array, order)


@takes_symbols
def broadcast_to(array: DistArray, shape: int | Sequence[int]) -> DistArray:
    """Return the tensor with its elements repeated along dimensions of extent 1."""
    bound = (shape,) if isinstance(shape, int) else tuple(shape)
    if np.broadcast_shapes(array.shape, bound) != bound:
        raise ValueError(f"a tensor of shape {array.shape} cannot be broadcast to {bound}")
    block = array.host  # read by all ranks, even if they have no elements
    layout = broadcast_layout(array.layout, bound)
    if array.region is not None:
        block = np.broadcast_to(block, block_extents(layout, array.own_comm.rank)).copy()
    return array._with_block(block, layout)


# ---- shifts and turns ---------------------------------------------------------------------------


def roll(array: DistArray, shift: Any, /, axis: Any = None) -> DistArray:
    """Return the tensor with elements shifted along dimensions; the last become the first.

    Without an axis, the elements are shifted in row-major order.
    """
    if array.is_alone():
        return on_one_rank(array, np.roll(array.local, shift, axis))
    if axis is None:
        vector = reshape(array, (-1,))
        return reshape(roll(vector, shift, 0), array.shape)
    rolled = array.copy()
    # As numpy, one shift may be for several dimensions, or several for one.
    for one_shift, one_axis in np.broadcast(shift, axis):
        dimension = normalize_axis_index(one_axis, array.ndim)
        extent = array.shape[dimension]
        if extent and one_shift % extent:
            rolled = _with_indices(rolled, dimension, np.roll(np.arange(extent), one_shift))
    return rolled


def rot90(array: DistArray, /, k: int = 1, axes: tuple[int, int] = (0, 1)) -> DistArray:
    """Return the tensor turned by right angles in the plane of two dimensions."""
    first, second = (normalize_axis_index(axis, array.ndim) for axis in axes)
    if first == second:
        raise ValueError("axes must be two different dimensions")
    turns = k % 4
    if turns == 2:
        return call(np.flip, array, (first, second))
    if turns == 1:
        return call(np.flip, array, second).swapaxes(first, second)
    if turns == 3:
        return call(np.flip, array.swapaxes(first, second), second)
    return array[...]


# ---- elements that occur several times ----------------------------------------------------------


def repeat(array: DistArray, repeats: Any, /, axis: int | None = None) -> DistArray:
    """Return each element repeated along a dimension; without one, in row-major order."""
    array, dimension = with_one_axis(array, axis)
    indices = np.repeat(np.arange(array.shape[dimension]), gathered(repeats))
    return _with_indices(array, dimension, indices)


def tile(array: DistArray, repetitions: int | Sequence[int], /) -> DistArray:
    """Return the whole tensor repeated along its dimensions, as `numpy.tile`."""
    counts = [repetitions] if isinstance(repetitions, int) else list(repetitions)
    ndim = max(array.ndim, len(counts))
    counts = [1] * (ndim - len(counts)) + counts
    tiled = reshape(array, (1,) * (ndim - array.ndim) + array.shape)
    for dimension, count in enumerate(counts):
        if count != 1:
            indices = np.tile(np.arange(tiled.shape[dimension]), count)
            tiled = _with_indices(tiled, dimension, indices)
    return tiled


def _with_indices(array: DistArray, dimension: int, indices: Any) -> DistArray:
    """Return the elements at some indices of one dimension."""
    chosen: list[Chosen] = [range(extent) for extent in array.shape]
    chosen[dimension] = indices
    return select_elements(array, chosen)


def broadcast_arrays(*arrays: Any) -> tuple[DistArray, ...]:
    """Return tensors with their elements repeated so that all have the same shape."""
    shape = np.broadcast_shapes(*(np.shape(array) for array in arrays))
    views: Any = [np.broadcast_to(array, shape) for array in all_distributed(arrays)]
    return tuple(views)


def meshgrid(*vectors: DistArray, indexing: str = "xy") -> tuple[DistArray, ...]:
    """Return, for each vector of coordinates, its values at all points of the grid."""
    if indexing not in ("xy", "ij"):
        raise ValueError(f"indexing is {indexing!r}; it is 'xy' or 'ij'")
    ndim = len(vectors)
    dimensions = list(range(ndim))
    if indexing == "xy" and ndim > 1:
        dimensions[:2] = (1, 0)
    columns: list[DistArray] = []
    for vector, dimension in zip(vectors, dimensions, strict=True):
        extents = [1] * ndim
        extents[dimension] = vector.size
        columns.append(reshape(vector, extents))
    grid_shape = np.broadcast_shapes(*(column.shape for column in columns))
    return tuple(broadcast_to(column, grid_shape) for column in columns)


# ---- joining ------------------------------------------------------------------------------------


def concatenate(
    arrays: Sequence[Any], /, axis: int | None = 0, dtype: Any = None, casting: Any = "same_kind"
) -> DistArray:
    """Join tensors along a dimension; without one, their elements as vectors."""
    tensors = all_distributed(arrays)
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

    largest = max(tensors, key=lambda tensor: (tensor.is_symbol, tensor.size))
    bound = (*extents_before, joined_extent, *extents_after)
    if largest.is_alone():
        blocks = [tensor.host for tensor in tensors]
        local = np.concatenate(blocks, joined, dtype=joined_dtype, casting="unsafe")
        return on_one_rank(largest, local)
    result = filled(largest, bound, np.zeros((), joined_dtype))
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.shape[joined]
        result[(slice(None),) * joined + (slice(start, end),)] = tensor
    return result


@takes_symbols
def filled(source: DistArray, bound: Sequence[int], value: Any) -> DistArray:
    """Return a tensor of equal elements, cut as another one."""
    layout = source.layout
    if bound != source.shape:
        layout = layout_cutting(layout, bound, range(len(bound)))
    return source._with_block(np.full(block_extents(layout, source.own_comm.rank), value), layout)


def stack(arrays: Sequence[Any], /, axis: int = 0) -> DistArray:
    """Join tensors of the same shape along a new dimension."""
    tensors = all_distributed(arrays)
    position = normalize_axis_index(axis, tensors[0].ndim + 1)
    expanded = [expand_dims(tensor, position) for tensor in tensors]
    return concatenate(expanded, position)


@takes_symbols
def all_distributed(arrays: Sequence[Any]) -> list[DistArray]:
    """Return DistArrays, and arrays distributed over the same ranks."""
    comm = common_comm("join", [array for array in arrays if isinstance(array, DistArray)])
    return [distributed(array, comm, "join") for array in arrays]


def column_stack(arrays: Sequence[Any], /) -> DistArray:
    """Join tensors along the second dimension; a vector is a column."""
    columns: list[Any] = []
    for array in arrays:
        columns.append(array if np.ndim(array) > 1 else np.reshape(array, (-1, 1)))
    return concatenate(columns, 1)


def append(array: Any, values: Any, /, axis: int | None = None) -> DistArray:
    """Join a tensor and values along a dimension; without one, both as vectors."""
    if axis is None:
        return concatenate([np.reshape(array, (-1,)), np.reshape(values, (-1,))])
    return concatenate([array, values], axis)


def at_least(ndim: int, numpy_function: Callable[..., Any]) -> Callable[..., Any]:
    """Return numpy's function atleast_1d, atleast_2d or atleast_3d for DistArrays."""

    def give_dimensions(*arrays: Any) -> Any:
        found: list[Any] = []
        for array in arrays:
            if np.ndim(array) < ndim:
                without_elements = np.broadcast_to(0, np.shape(array))
                array = np.reshape(array, numpy_function(without_elements).shape)
            found.append(array)
        return found[0] if len(found) == 1 else tuple(found)

    return give_dimensions


def pad(
    array: DistArray, pad_width: Any, /, mode: str = "constant", constant_values: Any = 0
) -> DistArray:
    """Return the tensor with a border: of a constant, or of elements as `mode` says."""
    if mode not in ("constant", "edge", "reflect", "symmetric", "wrap"):
        raise TypeError(f"pad of a DistArray does not take mode={mode!r}")
    if np.ndim(constant_values):
        raise TypeError("pad of a DistArray takes one constant value")
    widths = np.broadcast_to(np.asarray(pad_width), (array.ndim, 2)).tolist()
    if np.min(widths, initial=0) < 0:
        raise ValueError("a border is not negative")
    if mode == "constant":
        bound: list[int] = []
        inside: list[slice] = []
        for (before, after), extent in zip(widths, array.shape, strict=True):
            bound.append(before + extent + after)
            inside.append(slice(before, before + extent))
        padded = filled(array, bound, np.full((), constant_values, array.dtype))
        padded[tuple(inside)] = array
        return padded
    padded = array
    for dimension, border in enumerate(widths):
        indices = _pad_vector(np.arange(padded.shape[dimension]), border, mode=mode)
        padded = _with_indices(padded, dimension, indices)
    return array.copy() if padded is array else padded


_pad_vector: Any = np.pad  # numpy declares only literal names of modes
