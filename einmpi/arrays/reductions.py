"""Aggregations and running totals of DistArrays, as EinSum programs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple

from einmpi.arrays.dist_array import DistArray, call, takes_symbols
from einmpi.arrays.moving import along
from einmpi.arrays.products import evaluate_program
from einmpi.arrays.shapes import broadcast_to, concatenate, expand_dims, pad, with_one_axis
from einmpi.errors import InputError
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.einsum import element_text

Axis: TypeAlias = int | tuple[int, ...] | None


def labels(ndim: int) -> list[str]:
    """Return a label for each dimension."""
    return [f"i{dimension}" for dimension in range(ndim)]


def _axes(array: DistArray, axis: Axis) -> tuple[int, ...]:
    """Return the dimensions that an argument `axis` means, counted from 0; None means all."""
    if axis is None:
        return tuple(range(array.ndim))
    return normalize_axis_tuple(axis, array.ndim)


def with_known_dtype(array: DistArray, name: str) -> DistArray:
    """Convert an array, if necessary, to a dtype of the language that holds all its values."""
    if array.dtype.name in DTYPES:
        return array
    if name in ("any", "all"):
        return call(np.not_equal, array, 0)
    wider = np.result_type(array.dtype, np.int32)
    if wider.name not in DTYPES:
        known_dtypes = ", ".join(DTYPES)
        raise InputError(name, f"the dtype is {array.dtype}", f"one of {known_dtypes}")
    return array.astype(wider)


def aggregate(
    name: str,
    array: DistArray,
    /,
    axis: Axis = None,
    dtype: Any = None,
    keepdims: bool = False,
) -> DistArray:
    """Aggregate over some dimensions, by an aggregation or macro of the language."""
    axes = _axes(array, axis)
    count = prod(array.shape[number] for number in axes)
    if not count and name.endswith(("max", "min")):
        raise InputError(name, f"there are no elements along axis {axis}", "at least one")
    source = array
    if dtype is not None:
        source = array.astype(np.dtype(dtype))
    source = with_known_dtype(source, name)
    if not axes:
        return of_single_elements(name, source, dtype)

    all_labels = labels(array.ndim)
    aggregated_labels = [all_labels[number] for number in axes]
    remaining_labels = [label for label in all_labels if label not in aggregated_labels]
    operand = element_text("x", all_labels)
    call = f"{name}[{','.join(aggregated_labels)}]({operand})"
    text = f"{element_text('out', remaining_labels)} = {call}"
    result = evaluate_program(array.own_comm, text, {"x": source})

    if dtype is None and name in ("max", "min"):
        dtype = array.dtype
    if dtype is not None:
        result = result._in_dtype(dtype)
    if keepdims:
        return expand_dims(result, axes)
    return result


# What joins two aggregates, and the aggregate of nothing, if there is one.
JOINED: dict[str, tuple[np.ufunc, int | None]] = {
    "sum": (np.add, 0),
    "prod": (np.multiply, 1),
    "max": (np.maximum, None),
    "min": (np.minimum, None),
    "any": (np.logical_or, 0),
    "all": (np.logical_and, 1),
}


def aggregate_some(
    name: str,
    array: DistArray,
    /,
    axis: Axis = None,
    where: Any = True,
    initial: Any = None,
    **options: Any,
) -> DistArray:
    """Aggregate as numpy: elements at which `where` is true, and one more, `initial`."""
    operation, neutral = JOINED[name]
    source = array
    if where is not True:
        value = initial if neutral is None else neutral
        if value is None:
            what = "where is given without initial, which is the result of no elements"
            raise InputError(name, what, "both")
        source = call(np.where, where, array, array.dtype.type(value))
    if initial is None:
        return aggregate(name, source, axis, **options)
    if not source.size and neutral is None:
        return call(np.full_like, aggregate("sum", source, axis, **options), initial, array.dtype)
    found = aggregate(name, source, axis, **options)
    return call(operation, found, found.dtype.type(initial))


@takes_symbols
def of_single_elements(name: str, array: DistArray, dtype: Any) -> DistArray:
    """Aggregate every element alone, which may still convert it: numpy does it by blocks."""
    return array._with_block(np.asarray(getattr(np, name)(array.local, axis=()), dtype))


def mean(
    array: DistArray,
    /,
    axis: Axis = None,
    keepdims: bool = False,
    where: Any = True,
    dtype: Any = None,
) -> DistArray:
    """Return the mean along some dimensions. As numpy, compute that of float16 in float32."""
    if array.dtype == np.float16 and dtype is None:
        return mean(array, axis, keepdims, where, np.float32).astype(np.float16)
    if where is True:
        return aggregate("mean", array, axis, dtype, bool(keepdims))
    if dtype is None:
        dtype = np.mean(np.ones(1, array.dtype)).dtype
    total = aggregate_some("sum", array, axis, where, dtype=dtype, keepdims=bool(keepdims))
    counts = _count(array, axis, where, keepdims)
    return call(np.divide, total, counts)._in_dtype(total.dtype)


def _count(array: DistArray, axis: Axis, where: Any, keepdims: bool) -> DistArray:
    """Return how many elements count."""
    ones = call(np.ones_like, array, dtype=bool)
    return aggregate_some("sum", ones, axis, where, keepdims=bool(keepdims))


def var(
    array: DistArray,
    /,
    axis: Axis = None,
    ddof: float = 0,
    keepdims: bool = False,
    correction: float | None = None,
    where: Any = True,
    dtype: Any = None,
) -> DistArray:
    """Return the variance along some dimensions.

    The sum of squares is divided by the number of elements less `ddof`, which is also called
    `correction`.
    """
    if correction is not None:
        ddof = correction
    kinds = "c" if array.dtype.kind == "c" else "fc"
    if dtype is not None and np.dtype(dtype).kind not in kinds:
        raise TypeError(f"the variance of {array.dtype} is not computed in {np.dtype(dtype)}")
    if where is not True:
        if dtype is not None:
            array = array.astype(dtype)
        deviations: Any = abs(array - mean(array, axis, True, where))
        squares = aggregate_some("sum", deviations**2, axis, where, keepdims=bool(keepdims))
        divisor: Any = _count(array, axis, where, keepdims) - ddof
        return call(np.where, divisor > 0, squares / divisor, np.nan)._in_dtype(squares.dtype)
    variance = aggregate("var", array, axis, dtype, bool(keepdims))
    if not ddof:
        return variance
    count = prod(array.shape[number] for number in _axes(array, axis))
    factor = np.inf  # as in numpy, a quotient by 0
    if count > ddof:
        factor = count / (count - ddof)
    return call(np.multiply, variance, factor)


def std(array: DistArray, /, axis: Axis = None, **options: Any) -> DistArray:
    """Return the standard deviation along some dimensions; options as for `var`."""
    return call(np.sqrt, var(array, axis, **options))


def argument_of(
    name: str,
    array: DistArray,
    /,
    axis: int | None = None,
    *,
    keepdims: bool = False,
) -> DistArray:
    """Return the index of the first greatest ("max") or least ("min") element.

    If there is a nan, the index is that of the first nan.
    """
    if not _axes(array, axis):
        # A tensor without dimensions: its only element has the index 0.
        return call(np.zeros_like, array, np.int64)
    source = array._in_dtype(np.int32) if array.dtype.kind == "b" else array
    return aggregate(f"arg{name}", source, axis, keepdims=bool(keepdims))


def count_nonzero(array: DistArray, /, axis: Axis = None, *, keepdims: bool = False) -> DistArray:
    """Return how many elements are not zero, along some dimensions."""
    return aggregate("sum", call(np.not_equal, array, 0), axis, keepdims=keepdims)


def ptp(array: DistArray, /, axis: Axis = None, **options: Any) -> DistArray:
    """Return the greatest element minus the least."""
    greatest = aggregate("max", array, axis, **options)
    least = aggregate("min", array, axis, **options)
    return call(np.subtract, greatest, least)


def vector_norm(
    array: DistArray, /, *, axis: Axis = None, keepdims: bool = False, ord: Any = 2
) -> DistArray:
    """Return the norms of vectors, or of all elements as one, as `numpy.linalg.vector_norm`."""
    if isinstance(ord, str):
        raise ValueError(f"{ord!r} is not the order of a norm of vectors")
    if ord is None:
        ord = 2
    if array.dtype.kind in "iub":
        array = array.astype(np.float64)  # absolute values and powers would wrap around
    terms: Any = abs(array)
    if ord == -np.inf:
        return aggregate("min", terms, axis, keepdims=keepdims)
    if ord == np.inf and array.size:
        return aggregate("max", terms, axis, keepdims=keepdims)
    if ord == 0:
        terms = (terms != 0).astype(terms.dtype)
    elif ord not in (1, np.inf):
        terms = terms**ord
    total = aggregate("sum", terms, axis, keepdims=keepdims)
    if ord == 2:
        return call(np.sqrt, total)
    return total if ord in (0, 1, np.inf) else call(np.power, total, 1 / ord)


def norm(
    array: DistArray, /, ord: Any = None, axis: Axis = None, keepdims: bool = False
) -> DistArray:
    """Return a norm of vectors, or the Frobenius norm, as `numpy.linalg.norm`."""
    axes = _axes(array, axis)
    if axis is not None and len(axes) not in (1, 2):
        raise ValueError(f"norm: {len(axes)} axes; expected one or two, or None")
    if ord is None or (ord == "fro" and len(axes) == 2):
        ord = 2
    elif len(axes) == 2:
        matrices = call(np.moveaxis, array, axes, (-2, -1))
        found = call(np.linalg.matrix_norm, matrices, keepdims=keepdims, ord=ord)
        return call(np.moveaxis, found, (-2, -1), axes) if keepdims else found
    elif len(axes) != 1:
        raise ValueError(f"norm: ord={ord!r} over {len(axes)} axes; expected one or two")
    return vector_norm(array, axis=axes, keepdims=keepdims, ord=ord)


# ---- running totals and differences -------------------------------------------------------------


def scan(name: str, array: DistArray, /, axis: int | None = None, dtype: Any = None) -> DistArray:
    """Return the sums ("cumsum") or products ("cumprod") of all elements up to each one.

    Without an axis, elements are in row-major order.
    """
    array, dimension = with_one_axis(array, axis)
    if dtype is None:
        dtype = getattr(np, name)(np.empty(0, array.dtype)).dtype
    source = array._in_dtype(dtype)
    if not array.size:
        return source
    all_labels = labels(array.ndim)
    call = f"{name}[{all_labels[dimension]}]({element_text('x', all_labels)})"
    text = f"{element_text('out', all_labels)} = {call}"
    result = evaluate_program(array.own_comm, text, {"x": with_known_dtype(source, name)})
    return result._in_dtype(dtype)


def cumulative(
    name: str,
    array: DistArray,
    /,
    axis: int | None = None,
    dtype: Any = None,
    include_initial: bool = False,
) -> DistArray:
    """Return a scan, with a zero (of sums) or a one (of products) before it if wanted."""
    dimension = _axis_of_cumulative(array, axis)
    totals = scan(name, array, dimension, dtype)
    if not include_initial:
        return totals
    widths = [(int(axis == dimension), 0) for axis in range(array.ndim)]
    return pad(totals, widths, constant_values=0 if name == "cumsum" else 1)


def _axis_of_cumulative(array: DistArray, axis: int | None) -> int:
    if axis is not None:
        return normalize_axis_index(axis, array.ndim)
    if array.ndim != 1:
        raise ValueError(f"axis must be given for a tensor of {array.ndim} dimensions")
    return 0


def diff(
    array: DistArray, /, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None
) -> DistArray:
    """Return the differences of neighbouring elements along a dimension, `n` times."""
    if n < 0:
        raise ValueError(f"n is {n}; differences are taken 0 times or more")
    if array.ndim == 0:
        raise ValueError("diff takes a tensor of at least one dimension")
    dimension = normalize_axis_index(axis, array.ndim)
    row = (*array.shape[:dimension], 1, *array.shape[dimension + 1 :])
    parts: list[Any] = []
    for part in (prepend, array, append):
        if part is not None:
            parts.append(part if np.ndim(part) else np.broadcast_to(part, row))
    result = concatenate(parts, dimension) if len(parts) > 1 else array
    for _ in range(n):
        later = along(result, dimension, slice(1, None))
        earlier = along(result, dimension, slice(None, -1))
        differences: Any = np.not_equal if result.dtype == bool else np.subtract
        result = differences(later, earlier)
    return result


def triangle(comparison: str, array: DistArray, /, k: int = 0) -> DistArray:
    """Return the tensor with zeros on one side of the k-th diagonal of its last two dimensions.

    Elements stay where the comparison is true of their column and that of the diagonal.
    """
    if array.ndim == 0:
        raise ValueError("a triangle is part of a matrix, or of a stack of matrices")
    if array.ndim == 1:
        array = broadcast_to(array, array.shape * 2)  # as numpy, each row is the vector
    all_labels = labels(array.ndim)
    row, column = all_labels[-2:]
    kept = f"{column} {comparison} {row} + ({k})"
    element = element_text("x", all_labels)
    text = f"{element_text('out', all_labels)} = where({kept}, {element}, {array.dtype.name}(0))"
    return evaluate_program(array.own_comm, text, {"x": array})


# What the methods of ufuncs compute.
METHODS_OF_UFUNCS: dict[tuple[np.ufunc, str], Callable[..., DistArray]] = {
    **{(ufunc, "reduce"): partial(aggregate_some, name) for name, (ufunc, _) in JOINED.items()},
    (np.add, "accumulate"): partial(scan, "cumsum"),
    (np.multiply, "accumulate"): partial(scan, "cumprod"),
}
