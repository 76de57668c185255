"""Statistics of DistArrays, and their elements in order: means, quantiles, counts, sorts, sets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib.array_utils import normalize_axis_index

from einmpi.arrays.creation import layout_for
from einmpi.arrays.dist_array import DistArray, call
from einmpi.arrays.elementwise import along_axes, on_blocks
from einmpi.arrays.exchange import counts_from_ranks, send_to_ranks
from einmpi.arrays.indexing import elements_at, nonzero
from einmpi.arrays.moving import along, block_indices, distributed, gathered
from einmpi.arrays.products import evaluate_program
from einmpi.arrays.reductions import Axis, aggregate, diff, mean, scan
from einmpi.arrays.shapes import concatenate, expand_dims, pad, reshape, stack, with_one_axis
from einmpi.comm.base import Comm
from einmpi.kernels.reference import as_numpy

Histogram: TypeAlias = tuple[DistArray, np.ndarray[Any, Any]]


def has_nans(array: DistArray) -> bool:
    """Return whether the dtype has nans: integers and bools have none."""
    return array.dtype.kind in "fcV"


def without_nans(array: DistArray, value: float) -> DistArray:
    """Return the tensor with a value in place of nans."""
    return call(np.where, np.isnan(array), array.dtype.type(value), array)


def of_numbers(
    function: Callable[..., DistArray],
    array: DistArray,
    /,
    axis: Axis = None,
    where: Any = True,
    **options: Any,
) -> DistArray:
    """Return an aggregate, such as `mean`, of the elements that are not nan."""
    if has_nans(array):
        where = np.logical_and(~np.isnan(array), where)
    return function(array, axis, where=where, **options)


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
    found = aggregate(name, without_nans(array, neutral_value), axis, keepdims=keepdims)
    is_number: Any = ~np.isnan(array)
    has_numbers = aggregate("any", is_number, axis, keepdims=keepdims)
    return call(np.where, has_numbers, found, found.dtype.type(np.nan))._in_dtype(array.dtype)


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
    vectors, dimension = sorted_along(array, axis)
    extent = vectors.shape[dimension]
    middle = along(vectors, dimension, slice(max(extent - 1, 0) // 2, extent // 2 + 1))
    found = mean(middle, dimension, keepdims=True)
    found = _nan_if_last_is(found, vectors, dimension)
    return without_dimension(found, array, axis, dimension, keepdims)


def fractions_of(fractions: Any) -> Array:
    """Return the fractions of quantiles, which every rank has whole."""
    wanted = as_numpy("quantile", "q", fractions)
    if not np.all((wanted >= 0) & (wanted <= 1)):
        raise ValueError("quantiles are fractions from 0 to 1, and percentiles from 0 to 100")
    return wanted


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
    wanted = fractions_of(fractions)
    vectors, dimension = sorted_along(array, axis)
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
        found.append(without_dimension(value, array, axis, dimension, keepdims))
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


def of_percentages(
    quantiles: Callable[..., Any], array: DistArray, percentages: Any, /, **options: Any
) -> Any:
    """Return the quantiles for fractions in percent."""
    if type(percentages) in (int, float):
        return quantiles(array, percentages / 100, **options)
    return quantiles(array, np.true_divide(percentages, 100), **options)


percentile = partial(of_percentages, quantile)


def sorted_along(array: DistArray, axis: int | None) -> tuple[DistArray, int]:
    """Return the elements sorted along a dimension, and the dimension.

    As in numpy, a tuple may name it, if there is no other in it.
    """
    if axis is not None and np.size(axis) == 1:
        axis = np.ravel(axis)[0]
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


def without_dimension(
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
    return sums_at(array.astype(np.int64), weights, length)


def sums_at(places: DistArray, weights: Any, length: int) -> DistArray:
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
    values = reshape(array, (-1,))
    places, edges = bins_of(values, bins, range)
    own_weights: Any = None if weights is None else np.reshape(weights, (-1,))
    counts = sums_at(places, own_weights, len(edges) - 1)
    if own_weights is not None:
        counts = counts._in_dtype(own_weights.dtype)
    if density:
        counts = counts / (np.diff(edges).astype(np.float64) * counts.sum().item())
    return counts, edges


def bins_of(values: DistArray, bins: Any, range: Any) -> tuple[Any, np.ndarray[Any, Any]]:
    """Return the number of the bin of each element of a vector, and the edges of the bins."""
    if isinstance(bins, str):
        raise TypeError("histogram of a DistArray takes a number of bins, or their edges")
    sample = np.zeros(0, values.dtype)  # the edges have the dtype that numpy gives them
    if np.ndim(bins) == 0 and range is None and values.size:
        least = aggregate("min", values).item()
        greatest = aggregate("max", values).item()
        sample = np.array([least, greatest], values.dtype)
    edges = np.histogram_bin_edges(sample, gathered(bins), range)
    count = len(edges) - 1
    places: Any = searchsorted(edges, values, side="right") - 1
    is_last: Any = values == edges[-1]
    return np.where(is_last, count - 1, places), edges


def digitize(array: DistArray, bins: Any, /, right: bool = False) -> DistArray:
    """Return the number of the bin of each element, between edges that increase or decrease."""
    edges = gathered(bins, "digitize", "bins")
    found: DistArray = on_blocks("digitize", lambda x: np.digitize(x, edges, right), (array,))
    return found


# ---- order and sets: rows that are whole on a rank, and vectors by a sort of all ranks -----------


Array: TypeAlias = npt.NDArray[Any]
Integers: TypeAlias = npt.NDArray[np.int64]


def _in_ascending_order(
    function: Callable[..., Array],
    of_all_ranks: Callable[[DistArray], DistArray],
    array: DistArray,
    /,
    axis: int | None = -1,
    kind: Any = None,
    stable: bool | None = None,
) -> Any:
    """Sort rows along a dimension, by `function`; without one, all elements as one row.

    A single row, which no rank could sort without the others, is left to `of_all_ranks`.
    """
    array, dimension = with_one_axis(array, axis)
    if not array.is_alone() and array.size == array.shape[dimension]:
        return reshape(of_all_ranks(array), array.shape)
    return along_axes(partial(function, axis=dimension, kind="stable"), array, dimension)


# ---- one row on all ranks -----------------------------------------------------------------------


def _sorted_vector(array: DistArray) -> DistArray:
    """Return all elements of a tensor in ascending order. All ranks call it."""
    comm = array.own_comm
    vector = _in_order_of_ranks(array)
    if vector.size < comm.size:
        return DistArray.from_global(np.sort(vector.gather()), comm)
    values = np.sort(vector.host)
    counts = _counts_for_ranks(values, comm)
    received = send_to_ranks(comm, values, counts, counts_from_ranks(comm, counts))
    # The elements of each rank are in order, which a stable sort makes use of.
    return DistArray.from_local(np.sort(received, kind="stable"), comm=comm)


def _order_of_vector(array: DistArray) -> DistArray:
    """Return the places of all elements in ascending order of these. All ranks call it."""
    comm = array.own_comm
    vector = _in_order_of_ranks(array)
    if vector.size < comm.size:
        return DistArray.from_global(np.argsort(vector.gather(), kind="stable"), comm)
    order = np.argsort(vector.host, kind="stable")
    values = vector.host[order]
    places = block_indices(vector.layout, comm.rank)[0][order]
    counts = _counts_for_ranks(values, comm)
    counts_received = counts_from_ranks(comm, counts)
    received_values = send_to_ranks(comm, values, counts, counts_received)
    received_places = send_to_ranks(comm, places, counts, counts_received)
    # They come in the order of the ranks, so equal elements are in the order of their places.
    order = np.argsort(received_values, kind="stable")
    return DistArray.from_local(received_places[order], comm=comm)


sort = partial(_in_ascending_order, np.sort, _sorted_vector)
argsort = partial(_in_ascending_order, np.argsort, _order_of_vector)


def _in_order_of_ranks(array: DistArray) -> DistArray:
    """Return the elements as a vector, of which each rank has a part, one after the other.

    If there are fewer elements than ranks, some have the same.
    """
    vector = reshape(array, (-1,))
    layout = layout_for(array.own_comm, vector.shape)
    return vector._in_layout(layout)


def _counts_for_ranks(values: Array, comm: Comm) -> Integers:
    """Return how many of its sorted elements this rank sends to each rank.

    Each rank offers a few of its elements, evenly spaced, as limits. Limits that divide the
    offered elements evenly divide all elements nearly so: elements between two limits go to one
    rank. Equal elements are ordered by their ranks, then by their positions there.
    """
    positions = (np.arange(comm.size) * len(values)) // comm.size
    offered_values = _gathered(values[positions], comm)
    offered_positions = _gathered(positions, comm)
    offering_ranks = np.repeat(np.arange(comm.size), comm.size)
    order = np.lexsort((offered_positions, offering_ranks, offered_values))
    starts = np.zeros(comm.size + 1, np.int64)
    starts[comm.size] = len(values)
    for rank in range(1, comm.size):
        limit = order[rank * comm.size]
        first_equal = int(np.searchsorted(values, offered_values[limit], side="left"))
        after_equal = int(np.searchsorted(values, offered_values[limit], side="right"))
        if comm.rank < offering_ranks[limit]:
            starts[rank] = after_equal
        elif comm.rank > offering_ranks[limit]:
            starts[rank] = first_equal
        else:
            starts[rank] = offered_positions[limit]
    return np.diff(starts)


def _gathered(own: Array, comm: Comm) -> Array:
    """Return the elements of all ranks, on every rank."""
    gathered: Array = DistArray.from_local(own, comm=comm).gather()
    return gathered


# ---- sets ---------------------------------------------------------------------------------------


class UniqueAll(NamedTuple):
    """What `unique_all` returns."""

    values: DistArray
    indices: DistArray
    inverse_indices: DistArray
    counts: DistArray


class UniqueCounts(NamedTuple):
    """What `unique_counts` returns."""

    values: DistArray
    counts: DistArray


class UniqueInverse(NamedTuple):
    """What `unique_inverse` returns."""

    values: DistArray
    inverse_indices: DistArray


def unique_values(array: DistArray, /) -> DistArray:
    """Return the different elements, in ascending order. A nan differs from every other one."""
    ascending: DistArray = sort(array, axis=None)
    return ascending[_is_first_of_equals(ascending)]


def unique_counts(array: DistArray, /) -> UniqueCounts:
    """Return the different elements and how often each occurs."""
    ascending = sort(array, axis=None)
    is_first = _is_first_of_equals(ascending)
    return UniqueCounts(ascending[is_first], _group_lengths(is_first))


def unique_inverse(array: DistArray, /) -> UniqueInverse:
    """Return the different elements, and for each element of the tensor its place among them."""
    found = unique_all(array)
    return UniqueInverse(found.values, found.inverse_indices)


def unique_all(array: DistArray, /) -> UniqueAll:
    """Return the different elements, where each occurs first, the inverse and the counts."""
    order = argsort(array, axis=None)
    ascending = elements_at(array, order)
    is_first = _is_first_of_equals(ascending)
    groups = scan("cumsum", is_first.astype(np.int64), axis=0) - 1
    # `groups` are in ascending order of the elements: bring them back to the places before.
    places_in_order = argsort(order, axis=0)
    inverse = reshape(elements_at(groups, places_in_order), array.shape)
    return UniqueAll(ascending[is_first], order[is_first], inverse, _group_lengths(is_first))


def _is_first_of_equals(ascending: DistArray) -> DistArray:
    """Return, for each element of a sorted vector, whether it differs from the one before."""
    if not ascending.size:
        return ascending.astype(bool)
    differs = call(np.not_equal, ascending[1:], ascending[:-1])
    return pad(differs, (1, 0), constant_values=True)


def _group_lengths(is_first: DistArray) -> DistArray:
    """Return how many elements each group of equal elements has."""
    (starts,) = nonzero(is_first)
    return diff(pad(starts, (0, 1), constant_values=is_first.size))


def searchsorted(
    sorted_values: Any, values: Any, /, side: str = "left", sorter: Any = None
) -> DistArray:
    """Return where elements would have to be inserted in a sorted vector to keep it sorted.

    Every rank gets the sorted vector whole, and searches for the elements of its own block.
    """
    own_sorter = gathered(sorter)
    whole = gathered(sorted_values, "searchsorted", "the sorted vector")
    if isinstance(sorted_values, DistArray):
        values = distributed(values, sorted_values.own_comm)

    def search(block: Array) -> Array:
        return np.asarray(np.searchsorted(whole, block, side=side, sorter=own_sorter))  # type: ignore[call-overload]

    found: DistArray = on_blocks("searchsorted", search, (values,))
    return found


def isin(
    elements: Any, test_elements: Any, /, assume_unique: bool = False, invert: bool = False
) -> Any:
    """Return whether each element is one of some others, which every rank gets whole."""
    tests = gathered(test_elements)

    def look_up(block: Any) -> Any:
        return np.isin(block, tests, invert=invert)

    if not isinstance(elements, DistArray):
        return look_up(elements)
    return on_blocks("isin", look_up, (elements,))


def unique(
    array: DistArray,
    /,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    equal_nan: bool = True,
) -> Any:
    """Return the different elements in ascending order; nans are equal to each other."""
    found = unique_all(array)
    values = found.values
    places = found.indices
    inverse = found.inverse_indices
    counts = found.counts
    nan_count = 0
    if array.dtype.kind in "fc":
        nan_count = int(np.isnan(values).sum())
    if equal_nan and nan_count > 1:
        length = len(values) - nan_count + 1
        nans = DistArray.full(1, nan_count, counts.dtype, array.own_comm)
        values = values[:length]
        places = places[:length]
        inverse = call(np.minimum, inverse, length - 1)
        counts = concatenate([counts[: length - 1], nans])
    results: list[DistArray] = [values]
    if return_index:
        results.append(places)
    if return_inverse:
        results.append(reshape(inverse, array.shape))
    if return_counts:
        results.append(counts)
    return results[0] if len(results) == 1 else tuple(results)
