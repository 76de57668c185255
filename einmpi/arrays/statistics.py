"""Statistics of DistArrays: values without nans, weighted means, quantiles, covariances, counts."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from einmpi.arrays.dist_array import DistArray, call
from einmpi.arrays.elementwise import on_blocks
from einmpi.arrays.moving import along, distributed, gathered
from einmpi.arrays.products import evaluate_program
from einmpi.arrays.reductions import Axis, aggregate, mean, var
from einmpi.arrays.shapes import concatenate, expand_dims, reshape, stack
from einmpi.arrays.sorting import searchsorted, sort
from einmpi.kernels.reference import as_numpy

Histogram: TypeAlias = tuple[DistArray, np.ndarray[Any, Any]]


def has_nans(array: DistArray) -> bool:
    """Return whether the dtype has nans: integers and bools have none."""
    return array.dtype.kind in "fcV"


def _without_nans(array: DistArray, value: float) -> DistArray:
    """Return the tensor with a value in place of nans."""
    filled: DistArray = on_blocks("where", _fill_nans, (array, array.dtype.type(value)))
    return filled


def _fill_nans(block: Any, value: Any) -> Any:
    return np.where(np.isnan(block), value, block)


def _count(array: DistArray, axis: Axis, keepdims: bool) -> DistArray:
    """Return how many elements are not nan."""
    is_number: Any = ~np.isnan(array)
    return aggregate("sum", is_number, axis, keepdims=keepdims)


def nan_total(
    name: str, neutral_value: int, array: DistArray, /, axis: Axis = None, **options: Any
) -> DistArray:
    """Return the "sum" or the "prod" of the elements that are not nan."""
    source = _without_nans(array, neutral_value) if has_nans(array) else array
    return aggregate(name, source, axis, **options)


def nan_extreme(
    name: str,
    neutral_value: float,
    array: DistArray,
    /,
    axis: Axis = None,
    keepdims: bool = False,
) -> DistArray:
    """Return the greatest ("max") or least ("min") element that is not nan; nan if all are."""
    if not has_nans(array):
        return aggregate(name, array, axis, keepdims=keepdims)
    found = aggregate(name, _without_nans(array, neutral_value), axis, keepdims=keepdims)
    has_numbers: Any = _count(array, axis, keepdims) > 0
    extreme = call(np.where, has_numbers, found, found.dtype.type(np.nan))
    return extreme._in_dtype(array.dtype)


def nanmean(array: DistArray, /, axis: Axis = None, keepdims: bool = False) -> DistArray:
    """Return the mean of the elements that are not nan; nan if there are none."""
    if not has_nans(array):
        return mean(array, axis, keepdims=keepdims)
    total = nan_total("sum", 0, array, axis, keepdims=keepdims)
    return call(np.divide, total, _count(array, axis, keepdims))._in_dtype(array.dtype)


def nanvar(
    array: DistArray, /, axis: Axis = None, ddof: float = 0, keepdims: bool = False
) -> DistArray:
    """Return the variance of the elements that are not nan."""
    if not has_nans(array):
        return var(array, axis, ddof=ddof, keepdims=keepdims)
    deviations: Any = abs(array - nanmean(array, axis, keepdims=True))
    # Only nans of the tensor itself are left out: the difference of infinite values is one too.
    deviations = np.where(np.isnan(array), deviations.dtype.type(0), deviations)
    squares = aggregate("sum", deviations**2, axis, keepdims=keepdims)
    divisor: Any = _count(array, axis, keepdims) - ddof
    variance = call(np.where, divisor > 0, squares / divisor, np.nan)
    return variance._in_dtype(squares.dtype)


def nanstd(array: DistArray, /, axis: Axis = None, **options: Any) -> DistArray:
    """Return the standard deviation of the elements that are not nan; options as for nanvar."""
    return call(np.sqrt, nanvar(array, axis, **options))


def average(
    array: Any, /, axis: int | None = None, weights: Any = None, keepdims: bool = False
) -> DistArray:
    """Return the mean along a dimension, with weights if there are any."""
    if weights is None:
        return mean(array, axis, keepdims=keepdims)
    if not isinstance(weights, DistArray):
        weights = as_numpy("average", "weights", weights)
    if np.shape(weights) != array.shape:
        if axis is None or np.shape(weights) != (array.shape[axis],):
            raise TypeError(
                f"weights of shape {np.shape(weights)} for an array of shape {array.shape}: they "
                "have the shape of the array, or of its dimension `axis`"
            )
        extents = [1] * array.ndim
        extents[axis] = array.shape[axis]
        weights = np.reshape(weights, extents)
    dtype = np.result_type(array, weights)
    if array.dtype.kind in "iub":
        dtype = np.result_type(dtype, np.float64)
    weighted: Any = np.multiply(array, weights, dtype=dtype)
    all_weights: Any = np.zeros_like(weighted) + weights
    divisor = all_weights.sum(axis, keepdims=keepdims)
    if np.any(divisor == 0):
        raise ZeroDivisionError("average: the weights sum to zero")
    return call(np.divide, weighted.sum(axis, keepdims=keepdims), divisor)


# ---- quantiles ----------------------------------------------------------------------------------


def median(array: DistArray, /, axis: int | None = None, keepdims: bool = False) -> DistArray:
    """Return the middle of the sorted elements, or the mean of the two in the middle."""
    vectors, dimension = _sorted_along(array, axis)
    extent = vectors.shape[dimension]
    middle = along(vectors, dimension, slice(max(extent - 1, 0) // 2, extent // 2 + 1))
    found = mean(middle, dimension, keepdims=True)
    found = _nan_if_last_is(found, vectors, dimension)
    return _without_dimension(found, array, axis, dimension, keepdims)


def quantile(
    array: DistArray,
    fractions: Any,
    /,
    axis: int | None = None,
    method: str = "linear",
    keepdims: bool = False,
) -> DistArray:
    """Return values below which these fractions of the elements are, interpolated linearly."""
    if method != "linear":
        raise TypeError(f"quantile of a DistArray does not take method={method!r}")
    if array.dtype.kind == "c":
        raise TypeError("complex numbers have no quantiles")
    wanted = as_numpy("quantile", "q", fractions)
    if not np.all((wanted >= 0) & (wanted <= 1)):
        raise ValueError("quantiles are fractions from 0 to 1, and percentiles from 0 to 100")
    vectors, dimension = _sorted_along(array, axis)
    extent = vectors.shape[dimension]
    if not extent:
        raise IndexError("quantile of no elements")
    found: list[DistArray] = []
    # As in numpy, a number of Python does not decide about the dtype.
    as_weight = float if type(fractions) in (int, float) else wanted.dtype.type
    for fraction in wanted.ravel().tolist() or [0.0]:  # for none, the shape of one
        place = fraction * (extent - 1)
        lower_index = int(place)
        upper_index = min(lower_index + 1, extent - 1)
        value = along(vectors, dimension, slice(lower_index, lower_index + 1))
        if wanted.dtype.kind == "f":
            upper = along(vectors, dimension, slice(upper_index, upper_index + 1))
            value = _between(value, upper, as_weight(place - lower_index))
        value = _nan_if_last_is(value, vectors, dimension)
        found.append(_without_dimension(value, array, axis, dimension, keepdims))
    if not wanted.ndim:
        return found[0]
    together = stack(found)[: wanted.size]
    return reshape(together, wanted.shape + together.shape[1:])


def _between(lower: Any, upper: Any, weight: Any) -> DistArray:
    """Return a value between two others, computed from the nearer one."""
    if lower.dtype.kind in "iu":  # their difference might wrap around
        dtype = np.result_type(lower.dtype, weight)
        lower, upper = lower.astype(dtype), upper.astype(dtype)
    difference = upper - lower
    if weight < 0.5:
        return call(np.add, lower, difference * weight)
    return call(np.subtract, upper, difference * (1 - weight))


def percentile(array: DistArray, percentages: Any, /, **options: Any) -> DistArray:
    """Return values below which these percentages of the elements are; options as for quantile."""
    if type(percentages) in (int, float):
        return quantile(array, percentages / 100, **options)
    return quantile(array, np.true_divide(percentages, 100), **options)


def _sorted_along(array: DistArray, axis: int | None) -> tuple[DistArray, int]:
    """Return the elements sorted along a dimension, and the dimension."""
    if axis is not None and not isinstance(axis, int | np.integer):
        raise TypeError("quantiles of a DistArray are along one axis, or of all elements")
    if axis is None:
        return sort(array, axis=None), 0
    dimension = normalize_axis_index(int(axis), array.ndim)
    return sort(array, axis=dimension), dimension


def _nan_if_last_is(found: DistArray, vectors: DistArray, dimension: int) -> DistArray:
    """Return nan where the sorted elements end with one, as nans do."""
    if not has_nans(vectors) or not vectors.shape[dimension]:
        return found
    last = along(vectors, dimension, slice(-1, None))
    return call(np.where, np.isnan(last), last, found)._in_dtype(found.dtype)


def _without_dimension(
    found: DistArray, array: DistArray, axis: int | None, dimension: int, keepdims: bool
) -> DistArray:
    """Return the result with the dimensions that numpy gives it."""
    result = found.squeeze(dimension)
    if not keepdims:
        return result
    every_dimension = tuple(range(array.ndim))
    return expand_dims(result, every_dimension if axis is None else dimension)


# ---- covariances --------------------------------------------------------------------------------


def cov(
    array: DistArray,
    /,
    y: Any = None,
    rowvar: bool = True,
    bias: bool = False,
    ddof: int | None = None,
) -> DistArray:
    """Return the covariances of variables, which are the rows, or the columns."""
    variables = _rows_of_variables(array, rowvar)
    if y is not None:
        others = _rows_of_variables(distributed(y, array.own_comm), rowvar)
        variables = concatenate([variables, others], 0)
    variables = variables._in_dtype(np.result_type(variables.dtype, np.float64))
    centred: Any = variables - mean(variables, 1, keepdims=True)
    if ddof is None:
        ddof = 0 if bias else 1
    count = variables.shape[1] - ddof
    scale = 1 / count if count > 0 else np.nan
    found: DistArray = (centred @ centred.conj().T) * scale
    return found.squeeze()


def _rows_of_variables(array: DistArray, rowvar: bool) -> DistArray:
    if array.ndim > 2:
        raise ValueError(f"a tensor of {array.ndim} dimensions has no rows of variables")
    if array.ndim < 2:
        return reshape(array, (1, -1))
    return array if rowvar else array.T


def corrcoef(array: DistArray, /, y: Any = None, rowvar: bool = True) -> DistArray:
    """Return the correlations of variables, which are the rows, or the columns."""
    covariances: Any = cov(array, y, rowvar)
    if not covariances.ndim:
        return call(np.divide, covariances, covariances)
    deviations: Any = np.sqrt(np.diagonal(covariances).real)
    correlations = call(np.divide, covariances / deviations[:, None], deviations[None, :])
    return correlations if correlations.dtype.kind == "c" else correlations.clip(-1, 1)


# ---- counts -------------------------------------------------------------------------------------


def bincount(array: DistArray, /, weights: Any = None, minlength: int = 0) -> DistArray:
    """Return how often each integer from 0 on occurs, or the sums of the weights of each."""
    if array.ndim != 1 or array.dtype.kind not in "iub" or np.iscomplexobj(weights):
        raise TypeError("bincount takes a vector of integers, and real weights")
    length = minlength
    if array.size:
        if int(aggregate("min", array)) < 0:
            raise ValueError("bincount takes integers that are not negative")
        length = max(length, int(aggregate("max", array)) + 1)
    return _sums_at(array.astype(np.int64), weights, length)


def _sums_at(places: DistArray, weights: Any, length: int) -> DistArray:
    """Return the number of elements, or the sum of their weights, at each place below a length."""
    comm = places.own_comm
    given = {"x": places}
    value = "1"
    if weights is not None:
        if np.shape(weights) != places.shape:
            raise ValueError(
                f"there are weights of shape {np.shape(weights)} for values of {places.shape}"
            )
        weights = distributed(weights, comm)
        given["w"] = weights.astype(np.result_type(weights.dtype, np.float64))
        value = "w[i]"
    if not length or not places.size:
        return DistArray.zeros(length, np.int64, comm)
    return evaluate_program(comm, f"out[x[i]:{length}] = sum({value})", given)


def histogram(
    array: DistArray,
    /,
    bins: Any = 10,
    range: tuple[float, float] | None = None,
    density: bool | None = None,
    weights: Any = None,
) -> Histogram:
    """Return how many elements are in each bin, and the edges of the bins, on every rank."""
    if isinstance(bins, str):
        raise TypeError("histogram of a DistArray takes a number of bins, or their edges")
    values = reshape(array, (-1,))
    sample = np.zeros(0, values.dtype)  # the edges have the dtype that numpy gives them
    if np.ndim(bins) == 0 and range is None and values.size:
        least = aggregate("min", values).item()
        greatest = aggregate("max", values).item()
        sample = np.array([least, greatest], values.dtype)
    edges = np.histogram_bin_edges(sample, gathered(bins), range)
    count = len(edges) - 1
    places: Any = searchsorted(edges, values, side="right") - 1
    is_last: Any = values == edges[-1]
    places = np.where(is_last, count - 1, places)
    own_weights: Any = None if weights is None else np.reshape(weights, (-1,))
    counts = _sums_at(places, own_weights, count)
    if own_weights is not None:
        counts = counts._in_dtype(own_weights.dtype)
    if density:
        counts = counts / (np.diff(edges).astype(np.float64) * counts.sum().item())
    return counts, edges


def digitize(array: DistArray, bins: Any, /, right: bool = False) -> DistArray:
    """Return the number of the bin of each element, between edges that increase or decrease."""
    edges = gathered(bins, "digitize", "bins")
    found: DistArray = on_blocks("digitize", lambda x: np.digitize(x, edges, right), (array,))
    return found
