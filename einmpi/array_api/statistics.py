"""Aggregations and running totals, by the names of the array API standard."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from einmpi.array_api.calls import call
from einmpi.compiled.dist_array import DistArray

Axis: TypeAlias = int | tuple[int, ...] | None


def all(x: DistArray, /, *, axis: Axis = None, keepdims: bool = False) -> DistArray:
    """Return whether all elements along some dimensions are not zero."""
    return call(np.all, x, axis=axis, keepdims=keepdims)


def any(x: DistArray, /, *, axis: Axis = None, keepdims: bool = False) -> DistArray:
    """Return whether any element along some dimensions is not zero."""
    return call(np.any, x, axis=axis, keepdims=keepdims)


def max(x: DistArray, /, *, axis: Axis = None, keepdims: bool = False) -> DistArray:
    """Return the greatest element along some dimensions."""
    return call(np.max, x, axis=axis, keepdims=keepdims)


def min(x: DistArray, /, *, axis: Axis = None, keepdims: bool = False) -> DistArray:
    """Return the least element along some dimensions."""
    return call(np.min, x, axis=axis, keepdims=keepdims)


def mean(x: DistArray, /, *, axis: Axis = None, keepdims: bool = False) -> DistArray:
    """Return the mean along some dimensions."""
    return call(np.mean, x, axis=axis, keepdims=keepdims)


def sum(
    x: DistArray, /, *, axis: Axis = None, dtype: Any = None, keepdims: bool = False
) -> DistArray:
    """Return the sum along some dimensions."""
    return call(np.sum, x, axis=axis, dtype=dtype, keepdims=keepdims)


def prod(
    x: DistArray, /, *, axis: Axis = None, dtype: Any = None, keepdims: bool = False
) -> DistArray:
    """Return the product along some dimensions."""
    return call(np.prod, x, axis=axis, dtype=dtype, keepdims=keepdims)


def var(
    x: DistArray, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False
) -> DistArray:
    """Return the variance along some dimensions: squares by the number less `correction`."""
    return call(np.var, x, axis=axis, correction=correction, keepdims=keepdims)


def std(
    x: DistArray, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False
) -> DistArray:
    """Return the standard deviation along some dimensions."""
    return call(np.std, x, axis=axis, correction=correction, keepdims=keepdims)


def cumulative_sum(
    x: DistArray,
    /,
    *,
    axis: int | None = None,
    dtype: Any = None,
    include_initial: bool = False,
) -> DistArray:
    """Return the sums of all elements up to each one, with a zero before them if wanted."""
    options = {"axis": axis, "dtype": dtype, "include_initial": include_initial}
    return call(np.cumulative_sum, x, **options)


def cumulative_prod(
    x: DistArray,
    /,
    *,
    axis: int | None = None,
    dtype: Any = None,
    include_initial: bool = False,
) -> DistArray:
    """Return the products of all elements up to each one, with a one before them if wanted."""
    options = {"axis": axis, "dtype": dtype, "include_initial": include_initial}
    return call(np.cumulative_prod, x, **options)


def diff(
    x: DistArray,
    /,
    *,
    axis: int = -1,
    n: int = 1,
    prepend: DistArray | None = None,
    append: DistArray | None = None,
) -> DistArray:
    """Return the differences of neighbouring elements along a dimension, `n` times."""
    options: dict[str, Any] = {"n": n, "axis": axis}
    if prepend is not None:
        options["prepend"] = prepend
    if append is not None:
        options["append"] = append
    return call(np.diff, x, **options)
