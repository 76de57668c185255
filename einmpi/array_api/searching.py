"""Searches, sorted tensors and sets, by the names of the array API standard."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from einmpi.array_api.calls import call
from einmpi.arrays.sorting import UniqueAll, UniqueCounts, UniqueInverse
from einmpi.compiled.dist_array import DistArray

Axis: TypeAlias = int | tuple[int, ...] | None


def argmax(x: DistArray, /, *, axis: int | None = None, keepdims: bool = False) -> DistArray:
    """Return the index of the first greatest element; in row-major order without `axis`."""
    return _with_all_dimensions(call(np.argmax, x, axis=axis, keepdims=keepdims), x, axis, keepdims)


def argmin(x: DistArray, /, *, axis: int | None = None, keepdims: bool = False) -> DistArray:
    """Return the index of the first least element; in row-major order without `axis`."""
    return _with_all_dimensions(call(np.argmin, x, axis=axis, keepdims=keepdims), x, axis, keepdims)


def _with_all_dimensions(
    found: DistArray, x: DistArray, axis: int | None, keepdims: bool
) -> DistArray:
    if axis is None and keepdims:
        return found.reshape((1,) * x.ndim)
    return found


def count_nonzero(x: DistArray, /, *, axis: Axis = None, keepdims: bool = False) -> DistArray:
    """Return how many elements are not zero, along some dimensions."""
    return call(np.count_nonzero, x, axis=axis, keepdims=keepdims)


def nonzero(x: DistArray, /) -> tuple[DistArray, ...]:
    """Return the indices of the elements that are not zero, in row-major order."""
    found: Any = np.nonzero(x)
    return tuple(found)


def searchsorted(
    x1: DistArray, x2: Any, /, *, side: str = "left", sorter: DistArray | None = None
) -> DistArray:
    """Return where elements would have to be inserted in a sorted vector to keep it sorted."""
    return call(np.searchsorted, x1, x2, side=side, sorter=sorter)


def sort(
    x: DistArray, /, *, axis: int = -1, descending: bool = False, stable: bool = True
) -> DistArray:
    """Return the elements in order along a dimension."""
    ascending = call(np.sort, x, axis=axis)
    if descending:
        return call(np.flip, ascending, axis)
    return ascending


def argsort(
    x: DistArray, /, *, axis: int = -1, descending: bool = False, stable: bool = True
) -> DistArray:
    """Return the indices that sort the elements; equal elements keep their order."""
    if not descending:
        return call(np.argsort, x, axis=axis)
    # The ascending order of the reversed elements, read backwards: equal ones keep their order.
    backwards = call(np.argsort, call(np.flip, x, axis), axis=axis)
    last_index = x.shape[axis] - 1
    descending_order: DistArray = last_index - call(np.flip, backwards, axis)
    return descending_order


def unique_all(x: DistArray, /) -> UniqueAll:
    """Return the different elements, where each occurs first, the inverse and the counts."""
    found: Any = np.unique_all(x)
    return UniqueAll(*found)


def unique_counts(x: DistArray, /) -> UniqueCounts:
    """Return the different elements and how often each occurs."""
    found: Any = np.unique_counts(x)
    return UniqueCounts(*found)


def unique_inverse(x: DistArray, /) -> UniqueInverse:
    """Return the different elements, and for each element of the tensor its place among them."""
    found: Any = np.unique_inverse(x)
    return UniqueInverse(*found)


def unique_values(x: DistArray, /) -> DistArray:
    """Return the different elements, in ascending order."""
    return call(np.unique_values, x)
