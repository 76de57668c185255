"""DistArrays whose elements occur several times: repeat, tile, grids of coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from einmpi.arrays.reshaping import reshape, with_one_axis
from einmpi.arrays.selected import Chosen, select_elements
from einmpi.arrays.shapes import broadcast_to, distributed
from einmpi.compiled.dist_array import DistArray


def repeat(array: DistArray, repeats: Any, /, axis: int | None = None) -> DistArray:
    """Return each element repeated along a dimension; without one, in row-major order."""
    array, dimension = with_one_axis(array, axis)
    if isinstance(repeats, DistArray):
        repeats = repeats.gather()
    return _with_indices(array, dimension, np.repeat(np.arange(array.shape[dimension]), repeats))


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


def unstack(array: DistArray, /, axis: int = 0) -> tuple[DistArray, ...]:
    """Return the parts of a tensor along a dimension, without that dimension."""
    dimension = normalize_axis_index(axis, array.ndim)
    before = (slice(None),) * dimension
    return tuple(array[(*before, index)] for index in range(array.shape[dimension]))


def broadcast_arrays(*arrays: Any) -> tuple[DistArray, ...]:
    """Return tensors with their elements repeated so that all have the same shape."""
    shape = np.broadcast_shapes(*(np.shape(array) for array in arrays))
    views: Any = [np.broadcast_to(array, shape) for array in distributed(arrays)]
    return tuple(views)


def meshgrid(*vectors: DistArray, indexing: str = "xy") -> tuple[DistArray, ...]:
    """Return, for each vector of coordinates, its values at all points of the grid."""
    if indexing not in ("xy", "ij"):
        raise ValueError(f"indexing is {indexing!r}; it is 'xy' or 'ij'")
    ndim = len(vectors)
    dimensions = list(range(ndim))
    if indexing == "xy" and ndim > 1:
        dimensions[0] = 1
        dimensions[1] = 0
    grid_shape = [1] * ndim
    for vector, dimension in zip(vectors, dimensions, strict=True):
        grid_shape[dimension] = vector.size
    grids: list[DistArray] = []
    for vector, dimension in zip(vectors, dimensions, strict=True):
        extents = [1] * ndim
        extents[dimension] = vector.size
        grids.append(broadcast_to(reshape(vector, extents), grid_shape))
    return tuple(grids)
