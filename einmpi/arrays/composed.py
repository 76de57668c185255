"""Functions of numpy that are written with others, which come back to DistArrays."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial, reduce
from string import ascii_lowercase
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
    has_nans,
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
    rows = np.reshape(left, [part for extent in extents[0] for part in (extent, 1)])
    columns = np.reshape(right, [part for extent in extents[1] for part in (1, extent)])
    return np.reshape(rows * columns, np.multiply(*extents).astype(int).tolist())


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


def multi_dot(arrays: Sequence[Any], /) -> Any:
    """Return the product of matrices, and of vectors at the ends, in the order that is cheapest."""
    labels = [ascii_lowercase[i : i + 2] for i in range(len(arrays))]
    if np.ndim(arrays[0]) == 1:
        labels[0] = labels[0][1]
    if np.ndim(arrays[-1]) == 1:
        labels[-1] = labels[-1][0]
    ends = "".join(side for side in (labels[0][:-1], labels[-1][1:]))
    return np.einsum(f"{','.join(labels)}->{ends}", *arrays)


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
    steps = np.full(extent - 1, spacing) if np.ndim(spacing) == 0 else np.diff(gathered(spacing))
    if len(steps) != extent - 1:
        raise ValueError(f"gradient: {len(steps) + 1} coordinates for {extent} elements")
    before, after = (_along_only(each, dimension, array.ndim) for each in (steps[:-1], steps[1:]))

    def part(start: int | None, stop: int | None) -> Any:
        return along(array, dimension, slice(start, stop))

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
    y = np.conj(y)
    if len(y) > len(x):
        return call(np.flip, _sums_of_windows(y, x, mode))
    return _sums_of_windows(x, y, mode)


def _vectors(name: str, *arrays: Any) -> list[Any]:
    vectors = all_distributed(arrays)
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
    array, dimension = with_one_axis(array, axis)
    extent = array.shape[dimension]
    places = gathered(places)
    added = values if isinstance(values, DistArray) else np.asarray(values)
    added = np.reshape(added, (1,) * (array.ndim - added.ndim) + added.shape)
    if isinstance(places, slice):
        places = range(extent)[places]
    if np.ndim(places) == 0:
        added = np.moveaxis(added, 0, dimension)
    count = added.shape[dimension] if np.size(places) == 1 else len(np.arange(extent)[places])
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
    if not isinstance(source, Number) and not np.can_cast(source.dtype, target.dtype, casting):
        raise TypeError(f"cannot convert to {target.dtype} with casting={casting!r}")
    target[...] = source if where is True else np.where(where, source, target)


def put(array: DistArray, places: Any, values: Any, /) -> None:
    """Set elements by their places in row-major order; values are repeated as needed."""
    flat = array.reshape(-1)
    flat[places] = np.resize(gathered(values), np.shape(places))
    if not flat.is_view:
        array[...] = np.reshape(flat, array.shape)


def place(array: DistArray, mask: Any, values: Any, /) -> None:
    """Set the elements where a mask is true to values in turn."""
    count = int(np.count_nonzero(mask))
    array[np.reshape(mask, array.shape).astype(bool)] = np.resize(gathered(values), count)


def putmask(array: DistArray, mask: Any, values: Any, /) -> None:
    """Set the elements where a mask is true to the values at the same places."""
    if np.shape(values) != array.shape:
        values = np.resize(values, array.shape)
    copyto(array, values, "unsafe", np.not_equal(mask, 0))


# The aggregation of the updates of an element, for ufuncs that apply them one after the other.
_UPDATES = {
    np.add: "sum",
    np.subtract: "sum",
    np.multiply: "prod",
    np.divide: "prod",
    np.maximum: "max",
    np.minimum: "min",
}


def update_at(ufunc: Any, array: Any, key: Any, values: Any) -> None:
    """Apply a ufunc at the elements that a key selects, to each as often as it is selected."""
    if not isinstance(array, DistArray) or ufunc not in _UPDATES:
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
    if not array.size:
        return np.nanmean(array, axis=axis, keepdims=keepdims)
    if not has_nans(array):
        return np.quantile(array, fractions, axis=axis, keepdims=keepdims)
    # As in numpy, a number of Python does not decide about the dtype.
    is_plain = type(fractions) in (int, float)
    dtype = array.dtype if is_plain else np.result_type(array, np.asarray(fractions))
    ordered: Any
    ordered, dimension = sorted_along(array, axis)
    last: Any = np.maximum(np.sum(~np.isnan(ordered), dimension, keepdims=True) - 1, 0)
    found = []
    for fraction in np.ravel(fractions):
        place = last * fraction
        below = np.floor(place).astype(np.int64)
        lower: Any = np.take_along_axis(ordered, below, dimension)
        upper: Any = np.take_along_axis(ordered, np.minimum(below + 1, last), dimension)
        with np.errstate(invalid="ignore"):
            value = between(lower, upper, place - below).astype(dtype)
        found.append(without_dimension(value, array, axis, dimension, keepdims))
    return np.stack(found) if np.ndim(fractions) else found[0]


def nanpercentile(array: DistArray, percentages: Any, /, **options: Any) -> Any:
    """Return percentiles of the elements that are not nan; options as for nanquantile."""
    if type(percentages) in (int, float):
        return nanquantile(array, percentages / 100, **options)
    return nanquantile(array, np.true_divide(percentages, 100), **options)


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


def histogramdd(
    sample: Any,
    /,
    bins: Any = 10,
    range: Any = None,
    density: bool | None = None,
    weights: Any = None,
) -> tuple[Any, tuple[Any, ...]]:
    """Return how many points are in each box, and the edges of the boxes along each dimension."""
    columns = sample.T if isinstance(sample, DistArray) else all_distributed(sample)
    ndim = len(columns)
    all_bins = bins if np.ndim(bins) or isinstance(bins, list | tuple) else [bins] * ndim
    ranges = [None] * ndim if range is None else range
    place: Any = 0
    is_inside: Any = True
    edges = []
    for column, own_bins, own_range in zip(columns, all_bins, ranges, strict=True):
        own_place, own_edges = bins_of(column, own_bins, own_range)
        count = len(own_edges) - 1
        is_inside = is_inside & (own_place >= 0) & (own_place < count)
        place = place * count + own_place
        edges.append(own_edges)
    shape = [len(each) - 1 for each in edges]
    place = np.where(is_inside, place, -1)
    counts = sums_at(place, weights, int(np.prod(shape)))
    found: Any = np.reshape(counts, shape).astype(np.float64)
    if density:
        volumes = reduce(np.multiply.outer, [np.diff(each) for each in edges])
        found = found / volumes / found.sum()
    return found, tuple(edges)


def histogram2d(x: Any, y: Any, /, bins: Any = 10, **options: Any) -> tuple[Any, Any, Any]:
    """Return how many points are in each rectangle, and the edges of the rectangles."""
    if np.ndim(bins) == 1 and len(bins) != 2:
        bins = [bins, bins]
    counts, edges = histogramdd([x, y], bins, **options)
    return counts, *edges


# ---- shapes and files ----------------------------------------------------------------------------


def sliding_window_view(array: Any, window_shape: Any, /, axis: Any = None) -> Any:
    """Return the windows of a tensor: a copy, with dimensions for the elements of a window."""
    extents = np.atleast_1d(window_shape).tolist()
    axes = normalize_axis_tuple(
        range(array.ndim) if axis is None else axis, array.ndim, allow_duplicate=True
    )
    for extent, dimension in zip(extents, axes, strict=True):
        count = array.shape[dimension] - extent + 1
        if count < 1:
            raise ValueError(f"a window of {extent} is longer than axis {dimension}")
        table = np.arange(count)[:, None] + np.arange(extent)
        array = np.moveaxis(np.take(array, table, dimension), dimension + 1, -1)
    return array


def block(arrays: Any, /) -> Any:
    """Join nested lists of tensors: the innermost along the last dimension."""

    def depth_of(parts: Any) -> int:
        return 1 + depth_of(parts[0]) if isinstance(parts, list) else 0

    def ndim_of(parts: Any) -> int:
        return max(map(ndim_of, parts)) if isinstance(parts, list) else np.ndim(parts)

    depth = depth_of(arrays)
    ndim = max(depth, ndim_of(arrays))

    def join(parts: Any, level: int) -> Any:
        if isinstance(parts, list):
            return np.concatenate([join(part, level - 1) for part in parts], -level)
        return np.reshape(parts, (1,) * (ndim - np.ndim(parts)) + np.shape(parts))

    return join(arrays, depth)


def save(file: Any, array: DistArray, /) -> None:
    """Write the tensor to a .npy file. All ranks call it, and all write."""
    name = os.fspath(file)
    array._save("save", NPY, name if name.endswith(".npy") else f"{name}.npy", "x", None, None)
