"""Elements of DistArrays by indices that are elements of DistArrays themselves."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arrays.elementwise import on_blocks
from einmpi.arrays.keys import indices_in_range
from einmpi.arrays.moving import block_indices, fetch
from einmpi.arrays.reshaping import reshape, with_one_axis
from einmpi.comm.agreement import together
from einmpi.compiled.dist_array import DistArray
from einmpi.compiled.intervals import flat_indices
from einmpi.kernels.given import as_numpy

Array: TypeAlias = npt.NDArray[Any]
Integers: TypeAlias = npt.NDArray[np.int64]


def elements_at(array: DistArray, places: DistArray) -> DistArray:
    """Return the elements at some places in row-major order. All ranks call it.

    Each rank asks the others for the elements that belong to its block of places.
    """
    own_places = places.host.reshape(-1).astype(np.int64)
    values = fetch(array, own_places)
    return DistArray(values.reshape(places.local.shape), places.layout, array.own_comm)


def elements_at_indices(array: DistArray, keys: Sequence[Any]) -> DistArray:
    """Return the elements at tables of indices, one for each dimension, which are broadcast."""
    comm = array.own_comm
    tables: list[DistArray] = []
    for key in keys:
        if isinstance(key, DistArray):
            tables.append(key)
        else:
            tables.append(DistArray.from_global(as_numpy("index", "an index", key), comm))

    def find_places(*blocks: Array) -> Array:
        places = np.zeros(np.broadcast_shapes(*(block.shape for block in blocks)), np.int64)
        for block, extent in zip(blocks, array.shape, strict=True):
            places = places * extent + indices_in_range(block, extent)
        return places

    def check_indices() -> None:
        for table, extent in zip(tables, array.shape, strict=True):
            indices_in_range(table.host, extent)

    together(comm, check_indices)
    places: DistArray = on_blocks("index", find_places, tables)
    return elements_at(array, places)


def take_along_axis(array: DistArray, indices: Any, /, axis: int | None = -1) -> DistArray:
    """Return elements by indices along one dimension, as `numpy.take_along_axis`."""
    array, dimension = with_one_axis(array, axis)
    comm = array.own_comm
    if not isinstance(indices, DistArray):
        indices = DistArray.from_global(as_numpy("take_along_axis", "indices", indices), comm)
    if indices.ndim != array.ndim:
        raise ValueError(f"indices have {indices.ndim} dimensions, the tensor {array.ndim}")
    keys: list[Any] = []
    for number, extent in enumerate(array.shape):
        if number == dimension:
            keys.append(indices)
        else:
            shape = [1] * array.ndim
            shape[number] = extent
            keys.append(np.arange(extent).reshape(shape))
    return elements_at_indices(array, keys)


def nonzero(array: DistArray, /) -> tuple[DistArray, ...]:
    """Return the indices of the elements that are not zero, in row-major order."""
    if not array.ndim:
        raise ValueError("nonzero of a tensor without dimensions")
    comm = array.own_comm
    is_nonzero: Any = np.not_equal(array, 0)
    vector = reshape(is_nonzero, (-1,))
    # Of ranks that hold the same elements, only one contributes them.
    own_places = np.empty(0, np.int64)
    if vector.region is not None and vector.layout.owns(comm.rank):
        own_indices = block_indices(vector.layout, comm.rank)
        own_places = flat_indices(own_indices, vector.shape)[vector.host]
    places = DistArray.from_local(own_places, comm=comm)
    strides = [prod(array.shape[number + 1 :]) for number in range(array.ndim)]
    found: list[DistArray] = []
    for stride, extent in zip(strides, array.shape, strict=True):
        indices = places if stride <= 1 else places // stride
        found.append(indices if array.ndim == 1 else indices % max(extent, 1))
    return tuple(found)
