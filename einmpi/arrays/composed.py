"""Functions of numpy that are written with others, which come back to DistArrays."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from einmpi.arrays.dist_array import DistArray, call
from einmpi.arrays.elementwise import Number, on_blocks
from einmpi.arrays.moving import along, common_comm, distributed, gathered
from einmpi.arrays.products import evaluate_program
from einmpi.arrays.reductions import argument_of, scan
from einmpi.arrays.shapes import all_distributed, with_one_axis
from einmpi.arrays.statistics import (
    bins_of,
    fractions_of,
    has_nans,
    of_percentages,
    sorted_along,
    sums_at,
    without_dimension,
    without_nans,
)
from einmpi.comm.base import Comm
from einmpi.files.formats import NPY

# ---- values by conditions ------------------------------------------------------------------------


def select(conditions: Sequence[Any], choices: Sequence[Any], /, default: Any = 0) -> Any:
    """Return elements of the choice whose condition is the first to be true."""
    if not conditions or len(conditions) != len(choices):
        raise ValueError("select takes as many conditions as choices, at least one")
    found = default
    for condition, choice in zip(conditions[::-1], choices[::-1], strict=True):
        found = np.where(condition, choice, found)
    return found.astype(np.result_type(*choices, default))


def piecewise(array: Any, conditions: Any, functions: Any, *arguments: Any, **options: Any) -> Any:
    """Return values of the functions of the elements for which a condition is true."""
    masks = list(conditions) if isinstance(conditions, list | tuple) else [conditions]
    if len(functions) == len(masks) + 1:
        masks.append(~reduce(np.logical_or, masks))
    found = np.zeros_like(array)
    for mask, value in zip(masks, functions, strict=True):
        if callable(value):
            chosen = array[mask]
            value = value(chosen, *arguments, **options) if chosen.size else 0
        found[mask] = value
    return found


def interp(x: Any, places: Any, values: Any, /, **options: Any) -> Any:
    """Interpolate linearly between points, which every rank gets whole."""
    comm = _comm_of("interp", x, places, values)
    points = (gathered(places), gathered(values))
    return on_blocks(
        "interp", lambda block: np.interp(block, *points, **options), (distributed(x, comm),)
    )


def _comm_of(where: str, *values: Any) -> Comm:
    return common_comm(where, [value for value in values if isinstance(value, DistArray)])


# ---- matrices ------------------------------------------------------------------------------------


def diag(array: DistArray, /, k: int = 0) -> DistArray:
    """Return a diagonal of a matrix, or a matrix whose k-th diagonal is a vector."""
    if array.ndim == 2:
        return call(np.diagonal, array, k)
    if array.ndim != 1:
        raise ValueError("diag takes a vector or a matrix")
    size = len(array) + abs(k)
    columns = np.pad(array, (max(k, 0), max(-k, 0)))
    return call(np.tril, np.triu(np.broadcast_to(columns, (size, size)), k), k)


def diagflat(array: DistArray, /, k: int = 0) -> DistArray:
    """Return a matrix whose k-th diagonal has the elements."""
    return diag(np.ravel(array), k)  # type: ignore[arg-type]  # it returns a DistArray


def fill_diagonal(array: DistArray, value: Any, /) -> None:
    """Set the elements whose indices are equal."""
    if array.ndim < 2 or (array.ndim > 2 and len(set(array.shape)) > 1):
        raise ValueError("fill_diagonal takes a matrix, or a tensor of equal extents")
    places = np.arange(min(array.shape))
    if np.ndim(value):
        value = np.resize(gathered(value), len(places))
    array[(places,) * array.ndim] = value


def kron(left: Any, right: Any, /) -> Any:
    """Return the Kronecker product."""
    ndim = max(np.ndim(left), np.ndim(right))
    extents = [(1,) * (ndim - np.ndim(each)) + np.shape(each) for each in (left, right)]
    blocks = np.expand_dims(np.reshape(left, extents[0]), tuple(range(1, 2 * ndim, 2)))
    inside = np.expand_dims(np.reshape(right, extents[1]), tuple(range(0, 2 * ndim, 2)))
    return np.reshape(blocks * inside, np.multiply(*extents).astype(int).tolist())


def cross(
    left: Any,
    right: Any,
    /,
    axisa: int = -1,
    axisb: int = -1,
    axisc: int = -1,
    axis: int | None = None,
) -> Any:
    """Return the cross products of vectors of three elements."""
    if axis is not None:
        axisa = axisb = axisc = axis
    x = np.moveaxis(left, axisa, 0)
    y = np.moveaxis(right, axisb, 0)
    if len(x) != 3 or len(y) != 3:
        raise ValueError("cross of a DistArray takes vectors of three elements")
    return np.stack([x[i] * y[j] - x[j] * y[i] for i, j in ((1, 2), (2, 0), (0, 1))], axisc)


def on_every_rank(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of numpy that every rank computes alike, with tensors that it has whole."""

    def apply(*arguments: Any, **options: Any) -> Any:
        comm = _comm_of(function.__name__, *arguments, *options.values())
        given = {name: gathered(value) for name, value in options.items()}
        found = function(*map(gathered, arguments), **given)
        if not isinstance(found, tuple):
            return distributed(found, comm)
        return tuple(
            distributed(each, comm) if isinstance(each, np.ndarray) else each for each in found
        )

    return apply


# ---- differences, integrals and sums of products -------------------------------------------------


def trapezoid(y: Any, /, x: Any = None, dx: Any = 1.0, axis: int = -1) -> Any:
    """Integrate along a dimension by the trapezoidal rule."""
    (dimension,) = normalize_axis_tuple(axis, np.ndim(y))
    steps = dx
    if x is not None and np.ndim(x) == 1:
        steps = _along_only(np.diff(x), dimension, np.ndim(y))
    elif x is not None:
        steps = np.diff(x, axis=axis)
    heights = along(y, dimension, slice(1, None)) + along(y, dimension, slice(-1))
    return np.sum(steps * heights / 2.0, axis=dimension)


def _along_only(vector: Any, dimension: int, ndim: int) -> Any:
    """Return a vector as a tensor whose other dimensions have extent 1."""
    return np.reshape(vector, [-1 if each == dimension else 1 for each in range(ndim)])


def gradient(array: DistArray, /, *spacing: Any, axis: Any = None, edge_order: int = 1) -> Any:
    """Return the slopes along dimensions, whose points have equal distances or coordinates."""
    axes = normalize_axis_tuple(range(array.ndim) if axis is None else axis, array.ndim)
    steps = list(spacing) or [1.0]
    if len(steps) == 1:
        steps *= len(axes)
    if len(steps) != len(axes):
        raise TypeError(f"gradient takes one spacing, or one for each of {len(axes)} axes")
    values = array if array.dtype.kind in "fc" else array.astype(np.float64)
    slopes = [
        _slope(values, dimension, step, edge_order)
        for dimension, step in zip(axes, steps, strict=True)
    ]
    return slopes[0] if len(slopes) == 1 else tuple(slopes)


def _slope(array: DistArray, dimension: int, spacing: Any, edge_order: int) -> DistArray:
    extent = array.shape[dimension]
    if extent <= edge_order or edge_order not in (1, 2):
        raise ValueError("gradient takes edge_order 1 or 2, and more elements along each axis")
    steps: Any = [spacing, spacing]  # those at the ends
    is_even = np.ndim(spacing) == 0
    if not is_even:
        coordinates = np.asarray(gathered(spacing))
        if len(coordinates) != extent:
            raise ValueError(f"gradient: {len(coordinates)} coordinates for {extent} elements")
        # Differences of unsigned integers would wrap around.
        is_integer = coordinates.dtype.kind in "iu"
        steps = np.diff(coordinates.astype(np.float64) if is_integer else coordinates)
        is_even = bool(np.all(steps == steps[0]))

    def part(start: int | None, stop: int | None) -> Any:
        return along(array, dimension, slice(start, stop))

    if is_even:  # as in numpy, an element has no influence on its own slope, even if it is nan
        inner = (part(2, None) - part(None, -2)) / (2.0 * steps[0])
    else:
        sides = (steps[:-1], steps[1:])
        before, after = (_along_only(each, dimension, array.ndim) for each in sides)
        both = before + after
        inner = (
            part(2, None) * (before / (after * both))
            + part(1, -1) * ((after - before) / (before * after))
            - part(None, -2) * (after / (before * both))
        )
    first = (part(1, 2) - part(0, 1)) / steps[0]
    last = (part(-1, None) - part(-2, -1)) / steps[-1]
    if edge_order == 2:  # the slopes of parabolas through three points
        bend = 2 * (first - (part(2, 3) - part(1, 2)) / steps[1]) / (steps[0] + steps[1])
        first = first + bend * steps[0] / 2
        bend = 2 * (last - (part(-2, -1) - part(-3, -2)) / steps[-2]) / (steps[-1] + steps[-2])
        last = last + bend * steps[-1] / 2
    return call(np.concatenate, [first, inner, last], dimension).astype(array.dtype)


def convolve(left: Any, right: Any, /, mode: str = "full") -> DistArray:
    """Return the convolution of two vectors."""
    longer, shorter = sorted(_vectors("convolve", left, right), key=len, reverse=True)
    return _sums_of_windows(longer, np.flip(shorter), mode)


def correlate(left: Any, right: Any, /, mode: str = "valid") -> DistArray:
    """Return the correlation of two vectors."""
    x, y = _vectors("correlate", left, right)
    y = np.conj(y) if y.dtype.kind == "c" else y
    if len(y) > len(x):
        return call(np.flip, _sums_of_windows(y, x, mode))
    return _sums_of_windows(x, y, mode)


def _vectors(name: str, *arrays: Any) -> list[Any]:
    vectors: list[Any] = [each if each.ndim else each[None] for each in all_distributed(arrays)]
    for vector in vectors:
        if vector.ndim != 1 or not vector.size:
            raise ValueError(f"{name} takes vectors that are not empty")
    return vectors


def _sums_of_windows(vector: Any, weights: Any, mode: str) -> DistArray:
    """Return the weighted sums of neighbours, with zeros around the vector."""
    count = len(weights)
    borders = {"valid": 0, "same": count // 2, "full": count - 1}
    if mode not in borders:
        raise ValueError(f"the mode is {mode!r}; there are {', '.join(borders)}")
    before = borders[mode]
    after = count - 1 - before if mode == "same" else before
    given = {"x": np.pad(vector, (before, after)), "w": weights}
    found = evaluate_program(vector.own_comm, "out[i] = sum[k](x[i+k] * w[k])", given)
    return found._in_dtype(np.result_type(vector, weights))


# ---- elements that are left out, put in or changed -----------------------------------------------


def delete(array: DistArray, places: Any, /, axis: int | None = None) -> Any:
    """Return the tensor without some indices of a dimension."""
    array, dimension = with_one_axis(array, axis)
    kept = np.delete(np.arange(array.shape[dimension]), gathered(places))
    return np.take(array, kept, dimension)


def insert(array: Any, places: Any, values: Any, /, axis: int | None = None) -> Any:
    """Return the tensor with values before some indices of a dimension."""
    comm = _comm_of("insert", array, places, values)
    array, dimension = with_one_axis(distributed(array, comm, "insert"), axis)
    extent = array.shape[dimension]
    places = gathered(places)
    added = values if isinstance(values, DistArray) else np.asarray(values)
    added = np.reshape(added, (1,) * (array.ndim - added.ndim) + added.shape)
    if isinstance(places, slice):
        places = range(extent)[places]
    places = np.asarray(places) if np.size(places) else np.zeros(0, np.int64)
    if places.dtype == bool:
        places = np.flatnonzero(places)
    if places.ndim == 0:
        added = np.moveaxis(added, 0, dimension)
    count = added.shape[dimension] if places.size == 1 else len(places)
    shape = (*array.shape[:dimension], count, *array.shape[dimension + 1 :])
    added = np.broadcast_to(added, shape).astype(array.dtype)
    order = np.insert(np.arange(extent), places, extent + np.arange(count))
    return np.take(np.concatenate([array, added], dimension), order, dimension)


def compress(condition: Any, array: DistArray, /, axis: int | None = None) -> Any:
    """Return the indices of a dimension for which a condition is true."""
    array, dimension = with_one_axis(array, axis)
    return np.take(array, np.flatnonzero(gathered(condition)), dimension)


def copyto(target: Any, source: Any, /, casting: Any = "same_kind", where: Any = True) -> None:
    """Write elements, broadcast, into another tensor, where a condition is true."""
    if not isinstance(target, DistArray):
        raise TypeError("copyto of a DistArray copies to a DistArray")
    if not isinstance(source, DistArray | Number):
        source = np.asarray(source)
    # A number of Python has no dtype of its own.
    dtype = np.result_type(target, source) if isinstance(source, Number) else source.dtype
    if not np.can_cast(dtype, target.dtype, casting):
        raise TypeError(f"cannot convert to {target.dtype} with casting={casting!r}")
    if isinstance(source, Number):
        source = np.asarray(source).astype(target.dtype)
    target[...] = source if where is True else np.where(where, source, target)


def put(array: DistArray, places: Any, values: Any, /) -> None:
    """Set elements by their places in row-major order; values are repeated as needed."""
    flat = array.reshape(-1)
    flat[places] = np.resize(gathered(values), np.shape(places))
    if not flat.is_view:
        array[...] = np.reshape(flat, array.shape)


# The aggregation of the updates of an element, for ufuncs that apply them one after the other.
_UPDATES = {
    np.add: "sum",
    np.subtract: "sum",
    np.multiply: "prod",
    np.divide: "prod",
    np.maximum: "max",
    np.minimum: "min",
}


def update_at(ufunc: Any, array: Any, key: Any, values: Any = None) -> None:
    """Apply a ufunc at the elements that a key selects, to each as often as it is selected."""
    if not isinstance(array, DistArray) or ufunc not in _UPDATES or values is None:
        known = ", ".join(each.__name__ for each in _UPDATES)
        raise TypeError(f"{ufunc.__name__}.at does not take a DistArray; at is for {known}")
    comm = array.own_comm
    values = values if isinstance(values, DistArray | Number) else np.asarray(values)
    all_places = DistArray.from_function(lambda i: i, (array.size,), np.int64, comm)
    places = np.reshape(all_places, array.shape)[key]
    if not places.size:
        return
    dtype = np.result_type(array, values)
    updates = np.broadcast_to(distributed(values, comm).astype(dtype), places.shape)
    given: dict[str, Any] = {"x": np.ravel(places), "w": np.ravel(updates)}
    text = f"out[x[i]:{array.size}] = {_UPDATES[ufunc]}(w[i])"
    totals = evaluate_program(comm, text, given)._in_dtype(dtype)
    ufunc(array, np.reshape(totals, array.shape), out=array)


# ---- order, sets and counts ----------------------------------------------------------------------


def lexsort(keys: Any, /, axis: int = -1) -> Any:
    """Return the indices that sort by several keys, of which the last decides first."""
    first, *others = all_distributed(list(keys))
    order = np.argsort(first, axis=axis, kind="stable")
    for key in others:
        of_key = np.argsort(np.take_along_axis(key, order, axis), axis=axis, kind="stable")
        order = np.take_along_axis(order, of_key, axis)
    return order


def _partitioned(
    function: Callable[..., Any], array: DistArray, kth: Any, /, axis: Any = -1
) -> Any:
    extent = array.size if axis is None else array.shape[axis]
    if np.any((np.asarray(kth) >= extent) | (np.asarray(kth) < -extent)):
        raise ValueError(f"kth is {kth}; there are {extent} elements along the axis")
    return function(array, axis=axis)


partition = partial(_partitioned, np.sort)  # sorted elements are partitioned everywhere
argpartition = partial(_partitioned, np.argsort)


def intersect1d(
    left: Any, right: Any, /, assume_unique: bool = False, return_indices: bool = False
) -> Any:
    """Return the elements that two tensors have, in ascending order, and where if wanted."""
    arrays = all_distributed([left, right])
    arrays = [array._in_dtype(np.result_type(*arrays)) for array in arrays]
    (first, places), (second, other_places) = (
        np.unique(array, return_index=True) for array in arrays
    )
    is_common = np.isin(first, second)
    if not return_indices:
        return first[is_common]
    return first[is_common], places[is_common], other_places[np.isin(second, first)]


def setdiff1d(left: Any, right: Any, /, assume_unique: bool = False) -> Any:
    """Return the elements that only the first of two tensors has."""
    values: Any
    values, others = all_distributed([left, right])
    values = np.ravel(values) if assume_unique else np.unique(values)
    return values[np.isin(values, others, invert=True)]


def _interpolated(lower: Any, upper: Any, weight: Any) -> Any:
    difference = upper - lower
    from_above = upper - difference * (1 - weight)
    return np.where(weight < 0.5, lower + difference * weight, from_above)


def nanquantile(
    array: Any,
    fractions: Any,
    /,
    axis: int | None = None,
    keepdims: bool = False,
    between: Callable[..., Any] = _interpolated,
) -> Any:
    """Return quantiles of the elements that are not nan, which are the first in order.

    `between` has the two elements nearest to the place of a quantile, and how far from the first.
    """
    wanted = fractions_of(fractions)
    if not array.size:
        return np.nanmean(array, axis=axis, keepdims=keepdims)
    if not has_nans(array):
        return np.quantile(array, fractions, axis=axis, keepdims=keepdims)
    # As in numpy, a number of Python does not decide about the dtype.
    is_plain = type(fractions) in (int, float)
    dtype = array.dtype if is_plain else np.result_type(array, wanted)
    ordered: Any
    ordered, dimension = sorted_along(array, axis)
    last: Any = np.maximum(np.sum(~np.isnan(ordered), dimension, keepdims=True) - 1, 0)
    found = []
    for fraction in np.ravel(wanted):
        place = last * fraction
        below = np.floor(place).astype(np.int64)
        lower: Any = np.take_along_axis(ordered, below, dimension)
        upper: Any = np.take_along_axis(ordered, np.minimum(below + 1, last), dimension)
        with np.errstate(invalid="ignore"):
            # As in numpy, the least and the greatest element are what they are for 0 and 1.
            value = between(lower, upper, place - below) if wanted.dtype.kind == "f" else lower
        value = value.astype(dtype)
        found.append(without_dimension(value, array, axis, dimension, keepdims))
    if not wanted.ndim:
        return found[0]
    return np.reshape(np.stack(found), wanted.shape + found[0].shape)


nanpercentile = partial(of_percentages, nanquantile)


def nanmedian(array: DistArray, /, **options: Any) -> Any:
    """Return the median of the elements that are not nan; options as for nanquantile."""

    def mean(lower: Any, upper: Any, weight: Any) -> Any:
        return np.where(weight == 0, lower, (lower + upper) / 2)

    return nanquantile(array, 0.5, between=mean, **options)


def nan_argument(
    name: str, neutral_value: float, array: Any, /, axis: int | None = None, **options: Any
) -> Any:
    """Return the index of the greatest ("max") or least ("min") element that is not nan."""
    if has_nans(array):
        if np.any(np.all(np.isnan(array), axis)):
            raise ValueError("All-NaN slice encountered")
        array = without_nans(array, neutral_value)
    return argument_of(name, array, axis, **options)


def nan_scan(name: str, neutral_value: int, array: DistArray, /, **options: Any) -> DistArray:
    """Return running totals of the elements that are not nan."""
    source = without_nans(array, neutral_value) if has_nans(array) else array
    return scan(name, source, **options)


def histogram2d(
    x: Any, y: Any, /, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None
) -> tuple[Any, Any, Any]:
    """Return how many points are in each rectangle, and the edges of the rectangles."""
    has_both_bins = np.iterable(bins) and len([*bins]) == 2
    (rows, x_edges), (columns, y_edges) = map(
        bins_of,
        all_distributed([x, y]),
        bins if has_both_bins else [bins, bins],
        [None, None] if range is None else range,
    )
    shape = len(x_edges) - 1, len(y_edges) - 1
    is_inside = (rows >= 0) & (rows < shape[0]) & (columns >= 0) & (columns < shape[1])
    places: Any = np.where(is_inside, rows * shape[1] + columns, -1)
    counts = sums_at(places, weights, shape[0] * shape[1])
    found: Any = np.reshape(counts, shape).astype(np.float64)
    if density:
        found = found / np.outer(np.diff(x_edges), np.diff(y_edges)) / found.sum()
    return found, x_edges, y_edges


# ---- shapes and files ----------------------------------------------------------------------------


def sliding_window_view(array: Any, window_shape: Any, /, axis: Any = None) -> Any:
    """Return the windows of a tensor: a copy, with dimensions for the elements of a window."""
    extents = np.atleast_1d(window_shape).tolist()
    axes = normalize_axis_tuple(
        range(array.ndim) if axis is None else axis, array.ndim, allow_duplicate=True
    )
    for extent, dimension in zip(extents, axes, strict=True):
        count = array.shape[dimension] - extent + 1
        if count < 1 or extent < 0:
            raise ValueError(f"a window of {extent} for {array.shape[dimension]} elements")
        table = np.arange(count)[:, None] + np.arange(extent)
        array = np.moveaxis(np.take(array, table, dimension), dimension + 1, -1)
    return array


def save(file: Any, array: DistArray, /) -> None:
    """Write the tensor to a .npy file. All ranks call it, and all write."""
    name = os.fspath(file)
    array._save("save", NPY, name if name.endswith(".npy") else f"{name}.npy", "x", None, None)
