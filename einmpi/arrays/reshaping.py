"""Reshape of DistArrays: elements keep their places in row-major order, and some change ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from operator import index
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib.array_utils import normalize_axis_index

from einmpi.arrays.moving import empty_block, layout_for, on_one_rank
from einmpi.arrays.selected import is_provider
from einmpi.compiled.dist_array import DistArray
from einmpi.compiled.intervals import intervals_of_block, move_between_intervals
from einmpi.compiled.views import Link, View, stored_as_numpy
from einmpi.schedule.layout import Layout

Array: TypeAlias = npt.NDArray[Any]


def reshape(array: DistArray, shape: int | Sequence[int]) -> DistArray:
    """Return the elements, in row-major order, in another shape.

    One extent may be -1: it follows from the number of elements.
    """
    bound = _bound(array, shape)
    if array.is_alone():
        return on_one_rank(array, array.local.reshape(bound).copy())
    if bound == array.shape:
        return DistArray(array.local.copy(), array.layout, array.own_comm)
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
    return View(array, Link(read, write, partial(_stored_in_shape, bound), shares))


def as_numpy_reshapes(array: DistArray, shape: Any, copy: bool | None = None) -> DistArray:
    """Return the elements in another shape: a view where numpy has one, else a copy."""
    bound = _bound(array, shape)
    is_view = not copy
    if is_view and isinstance(array, View):
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
    extents = [shape] if isinstance(shape, int) else list(map(index, shape))
    if extents.count(-1) == 1 and 0 not in extents:
        unknown = extents.index(-1)
        known_elements = prod(extents[:unknown]) * prod(extents[unknown + 1 :])
        extents[unknown] = array.size // known_elements
    bound = tuple(extents)
    if prod(bound) != array.size or min(bound, default=0) < 0:
        raise ValueError(f"cannot reshape a tensor of shape {array.shape} to {shape}")
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
    local = empty_block(layout, comm.rank, array.dtype)
    move_between_intervals(
        comm,
        np.ascontiguousarray(array.host).reshape(-1),
        local.reshape(-1),
        partial(intervals_of_block, array.layout),
        partial(intervals_of_block, layout),
        partial(is_provider, array.layout),
    )
    return DistArray(local, layout, comm)


def _layout_of_reshape(array: DistArray, bound: tuple[int, ...]) -> Layout:
    """Return the layout of the result; a tensor that every rank has whole stays so."""
    source = array.layout
    is_cut = any(cut is not None for cut in source.cuts)
    if is_cut or not source.cuts:
        return layout_for(array.own_comm, bound)
    return Layout(source.mesh, bound, source.cuts)
