"""Aggregations of DistArrays over some of their dimensions, as EinSum programs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from einmpi.arrays.programs import compute, element, labels
from einmpi.arrays.shapes import expand_dims
from einmpi.compiled.dist_array import DistArray
from einmpi.errors import InputError
from einmpi.graph.dtypes import cpu_dtypes

Axis: TypeAlias = int | tuple[int, ...] | None


def as_dist_array(found: Any) -> DistArray:
    """Return what a function of numpy has made of DistArrays; numpy's types do not know it."""
    assert isinstance(found, DistArray)
    return found


def _axes(array: DistArray, axis: Axis) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(array.ndim))
    return normalize_axis_tuple(axis, array.ndim)


def _with_known_dtype(array: DistArray, name: str) -> DistArray:
    """Return an array in a dtype that the language has and that holds all its values."""
    if array.dtype.name in cpu_dtypes():
        return array
    if name in ("any", "all"):
        is_true: Any = np.not_equal(array, 0)
        return as_dist_array(is_true)
    wider = np.result_type(array.dtype, np.int32)
    if wider.name not in cpu_dtypes():
        raise InputError(name, f"the dtype is {array.dtype}", f"one of {', '.join(cpu_dtypes())}")
    return array.astype(wider)


def _finish(found: DistArray, axes: tuple[int, ...], keepdims: bool) -> DistArray:
    return expand_dims(found, axes) if keepdims and axes else found


def aggregate(
    name: str,
    array: DistArray,
    axis: Axis = None,
    dtype: Any = None,
    out: Any = None,
    keepdims: bool = False,
    **options: Any,
) -> DistArray:
    """Aggregate over some dimensions, by an aggregation or macro of the language.

    Other options of numpy, such as `where`, are refused.
    """
    _refuse(name, out=out, **options)
    axes = _axes(array, axis)
    wanted_dtype = None if dtype is None else np.dtype(dtype)
    source = array if wanted_dtype is None else array.astype(wanted_dtype)
    source = _with_known_dtype(source, name)
    if not axes:
        # A single value each: numpy's conversions, block by block.
        local = np.asarray(getattr(np, name)(source.local, axis=()))
        return DistArray(local, source.layout, source.own_comm)
    all_labels = labels(array.ndim)
    left = [label for number, label in enumerate(all_labels) if number not in axes]
    aggregated = ",".join(all_labels[number] for number in axes)
    call = f"{name}[{aggregated}]({element('x', all_labels)})"
    found = compute(array.own_comm, f"{element('out', left)} = {call}", {"x": source})
    if wanted_dtype is not None and found.dtype != wanted_dtype:
        found = found.astype(wanted_dtype)
    elif name in ("max", "min") and found.dtype != array.dtype:
        found = found.astype(array.dtype)
    return _finish(found, axes, keepdims)


def _refuse(name: str, **options: Any) -> None:
    """Refuse options of numpy that DistArrays do not have, unless they have no effect."""
    for option, value in options.items():
        is_default = value is None or value is np._NoValue
        if not is_default:
            raise TypeError(f"{name} of a DistArray does not take {option}")


def mean(array: DistArray, axis: Axis = None, keepdims: bool = False, **options: Any) -> DistArray:
    """Return the mean along some dimensions."""
    return aggregate("mean", array, axis, keepdims=bool(keepdims), **options)


def var(
    array: DistArray, axis: Axis = None, ddof: float = 0, keepdims: bool = False, **options: Any
) -> DistArray:
    """Return the variance along some dimensions, with `ddof` degrees of freedom less."""
    found = aggregate("var", array, axis, keepdims=bool(keepdims), **options)
    if not ddof:
        return found
    count = prod(array.shape[number] for number in _axes(array, axis))
    scaled: DistArray = found * (count / max(count - ddof, 0) if count > ddof else np.nan)
    return scaled


def std(array: DistArray, axis: Axis = None, ddof: float = 0, **options: Any) -> DistArray:
    """Return the standard deviation along some dimensions."""
    found: Any = np.sqrt(var(array, axis, ddof, **options))
    return as_dist_array(found)


def argument_of(
    name: str,
    array: DistArray,
    axis: int | None = None,
    out: Any = None,
    *,
    keepdims: bool = False,
) -> DistArray:
    """Return the index of the first greatest ("max") or least ("min") element; nan comes first."""
    _refuse(f"arg{name}", out=out)
    if not array.size:
        raise ValueError(f"arg{name} of a tensor without elements")
    if not _axes(array, axis):
        return DistArray(np.zeros(array.local.shape, np.int64), array.layout, array.own_comm)
    source = array
    if array.dtype.kind == "b":
        source = array.astype(np.int32)
    return aggregate(f"arg{name}", source, axis, keepdims=bool(keepdims))


def count_nonzero(array: DistArray, axis: Axis = None, *, keepdims: bool = False) -> DistArray:
    """Return how many elements are not zero, along some dimensions."""
    is_other: Any = np.not_equal(array, 0)
    return aggregate("sum", is_other, axis, keepdims=keepdims)


def peak_to_peak(array: DistArray, axis: Axis = None, **options: Any) -> DistArray:
    """Return the greatest element minus the least."""
    greatest = aggregate("max", array, axis, **options)
    difference: DistArray = greatest - aggregate("min", array, axis, **options)
    return difference


def norm(array: DistArray, ord: Any = None, axis: Axis = None, keepdims: bool = False) -> DistArray:
    """Return a norm of vectors, or the Frobenius norm, as `numpy.linalg.norm`."""
    axes = _axes(array, axis)
    sizes = abs(array)
    found: Any
    if ord is None or (ord == "fro" and len(axes) == 2) or (ord == 2 and len(axes) == 1):
        found = np.sqrt(aggregate("sum", sizes**2, axis, keepdims=keepdims))
    elif ord == 1 and len(axes) == 1:
        found = aggregate("sum", sizes, axis, keepdims=keepdims)
    elif ord == np.inf and len(axes) == 1:
        found = aggregate("max", sizes, axis, keepdims=keepdims)
    else:
        raise TypeError(f"norm of a DistArray does not take ord={ord!r} over {len(axes)} axes")
    return as_dist_array(found)


# The aggregations that ufuncs make by `reduce`.
REDUCTIONS: dict[np.ufunc, Callable[..., DistArray]] = {
    np.add: partial(aggregate, "sum"),
    np.multiply: partial(aggregate, "prod"),
    np.maximum: partial(aggregate, "max"),
    np.minimum: partial(aggregate, "min"),
    np.logical_or: partial(aggregate, "any"),
    np.logical_and: partial(aggregate, "all"),
}
