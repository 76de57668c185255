"""Sorted DistArrays and sets: rows that are whole on a rank, and vectors by a sort of all ranks."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arrays.creation import layout_for
from einmpi.arrays.dist_array import DistArray, call
from einmpi.arrays.elementwise import on_blocks
from einmpi.arrays.exchange import counts_from_ranks, send_to_ranks
from einmpi.arrays.indexing import elements_at, nonzero
from einmpi.arrays.moving import block_indices, distributed, gathered
from einmpi.arrays.reductions import diff, scan
from einmpi.arrays.shapes import concatenate, pad, reshape, with_one_axis
from einmpi.arrays.whole_axes import along_axes
from einmpi.comm.base import Comm

Array: TypeAlias = npt.NDArray[Any]
Integers: TypeAlias = npt.NDArray[np.int64]


def sort(
    array: DistArray, /, axis: int | None = -1, kind: Any = None, stable: bool | None = None
) -> Any:
    """Return the elements in ascending order along a dimension; without one, all of them."""
    array, dimension = with_one_axis(array, axis)
    if _is_sorted_by_all_ranks(array, dimension):
        return reshape(_sorted_vector(array), array.shape)
    return along_axes(lambda block: np.sort(block, axis=dimension, kind="stable"), array, dimension)


def argsort(
    array: DistArray, /, axis: int | None = -1, kind: Any = None, stable: bool | None = None
) -> Any:
    """Return the indices that sort the elements; equal elements keep their order."""
    array, dimension = with_one_axis(array, axis)
    if _is_sorted_by_all_ranks(array, dimension):
        return reshape(_order_of_vector(array), array.shape)

    def sort_block(block: Array) -> Array:
        return np.argsort(block, axis=dimension, kind="stable")

    return along_axes(sort_block, array, dimension)


def _is_sorted_by_all_ranks(array: DistArray, dimension: int) -> bool:
    """Return whether there is a single row, which no rank could sort without the others."""
    return not array.is_alone() and array.size == array.shape[dimension]


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
