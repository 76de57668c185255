"""Running totals and differences along a dimension of DistArrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from einmpi.arrays.programs import element, evaluate_program, labels
from einmpi.arrays.reductions import with_known_dtype
from einmpi.arrays.reshaping import with_one_axis
from einmpi.arrays.shapes import concatenate
from einmpi.compiled.dist_array import DistArray


def cumsum(array: DistArray, /, axis: int | None = None, dtype: Any = None) -> DistArray:
    """Return the sums of all elements up to each one; without an axis, in row-major order."""
    return _scan("cumsum", np.cumsum, array, axis, dtype)


def cumprod(array: DistArray, /, axis: int | None = None, dtype: Any = None) -> DistArray:
    """Return the products of all elements up to each one; without an axis, in row-major order."""
    return _scan("cumprod", np.cumprod, array, axis, dtype)


def _scan(
    name: str, numpy_function: Any, array: DistArray, axis: int | None, dtype: Any
) -> DistArray:
    array, dimension = with_one_axis(array, axis)
    wanted = (
        np.dtype(dtype) if dtype is not None else numpy_function(np.empty(0, array.dtype)).dtype
    )
    source = array if array.dtype == wanted else array.astype(wanted)
    if not array.size:
        return source
    all_labels = labels(array.ndim)
    call = f"{name}[{all_labels[dimension]}]({element('x', all_labels)})"
    text = f"{element('out', all_labels)} = {call}"
    result = evaluate_program(array.own_comm, text, {"x": with_known_dtype(source, name)})
    return result if result.dtype == wanted else result.astype(wanted)


def cumulative_sum(
    array: DistArray,
    /,
    axis: int | None = None,
    dtype: Any = None,
    include_initial: bool = False,
) -> DistArray:
    """Return the sums of all elements up to each one, with a zero before them if wanted."""
    dimension = _axis_of_cumulative(array, axis)
    totals = cumsum(array, dimension, dtype)
    return _with_initial(totals, dimension, 0) if include_initial else totals


def cumulative_prod(
    array: DistArray,
    /,
    axis: int | None = None,
    dtype: Any = None,
    include_initial: bool = False,
) -> DistArray:
    """Return the products of all elements up to each one, with a one before them if wanted."""
    dimension = _axis_of_cumulative(array, axis)
    totals = cumprod(array, dimension, dtype)
    return _with_initial(totals, dimension, 1) if include_initial else totals


def _axis_of_cumulative(array: DistArray, axis: int | None) -> int:
    if axis is not None:
        return normalize_axis_index(axis, array.ndim)
    if array.ndim != 1:
        raise ValueError(f"axis must be given for a tensor of {array.ndim} dimensions")
    return 0


def _with_initial(totals: DistArray, dimension: int, value: int) -> DistArray:
    extents = list(totals.shape)
    extents[dimension] = 1
    initial = DistArray.full(extents, value, totals.dtype, totals.own_comm)
    return concatenate([initial, totals], dimension)


def diff(
    array: DistArray, /, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None
) -> DistArray:
    """Return the differences of neighbouring elements along a dimension, `n` times."""
    if n < 0:
        raise ValueError(f"n is {n}; differences are taken 0 times or more")
    if array.ndim == 0:
        raise ValueError("diff takes a tensor of at least one dimension")
    dimension = normalize_axis_index(axis, array.ndim)
    parts = [part for part in (prepend, array, append) if part is not None]
    result = concatenate(parts, dimension) if len(parts) > 1 else array
    before = (slice(None),) * dimension
    for _ in range(n):
        later = result[(*before, slice(1, None))]
        earlier = result[(*before, slice(None, -1))]
        differences: Any = np.not_equal if result.dtype == bool else np.subtract
        result = differences(later, earlier)
    return result


# The scans that the `accumulate` method of a ufunc computes.
SCANS: dict[np.ufunc, Callable[..., DistArray]] = {np.add: cumsum, np.multiply: cumprod}
