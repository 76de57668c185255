"""Reshape of DistArrays: elements keep their places in row-major order, and some change ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from einmpi.arrays.moving import empty_block, layout_for, on_one_rank
from einmpi.arrays.selected import is_provider
from einmpi.compiled.dist_array import DistArray
from einmpi.compiled.intervals import intervals_of_block, move_between_intervals
from einmpi.schedule.layout import Layout


def reshape(array: DistArray, shape: int | Sequence[int]) -> DistArray:
    """Return the elements, in row-major order, in another shape.

    One extent may be -1: it follows from the number of elements.
    """
    extents = [shape] if isinstance(shape, int) else [int(extent) for extent in shape]
    if extents.count(-1) == 1:
        unknown = extents.index(-1)
        known_elements = prod(extents[:unknown]) * prod(extents[unknown + 1 :])
        extents[unknown] = array.size // known_elements if known_elements else 0
    bound = tuple(extents)
    if prod(bound) != array.size or min(bound, default=0) < 0:
        raise ValueError(f"cannot reshape a tensor of shape {array.shape} to {shape}")
    if array.is_alone():
        return on_one_rank(array, array.local.reshape(bound).copy())
    if bound == array.shape:
        return DistArray(array.local.copy(), array.layout, array.own_comm)
    return _moved_to_shape(array, bound)


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
