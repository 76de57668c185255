"""Reshape of DistArrays: elements keep their places in row-major order, and some change ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arrays.moving import block_of_idle_rank, flat_indices, layout_for, on_one_rank
from einmpi.arrays.selected import is_provider
from einmpi.comm.programs import abort_on_divergence
from einmpi.compiled.dist_array import DistArray
from einmpi.schedule.layout import Layout
from einmpi.schedule.regions import indices, shape

Array: TypeAlias = npt.NDArray[Any]
Integers: TypeAlias = npt.NDArray[np.int64]


def reshape(array: DistArray, shape: int | Sequence[int]) -> DistArray:
    """Return the elements, in row-major order, in another shape.

    One extent may be -1: it follows from the number of elements.
    """
    extents = [shape] if isinstance(shape, int) else [int(extent) for extent in shape]
    if extents.count(-1) == 1:
        unknown = extents.index(-1)
        known_elements = prod(extents[:unknown]) * prod(extents[unknown + 1 :])
        extents[unknown] = array.size // known_elements if known_elements else 0
    bound = tuple(extents)
    if prod(bound) != array.size or min(bound, default=0) < 0:
        raise ValueError(f"cannot reshape a tensor of shape {array.shape} to {shape}")
    if array.is_alone():
        return on_one_rank(array, array.local.reshape(bound).copy())
    if bound == array.shape:
        return DistArray(array.local.copy(), array.layout, array.own_comm)
    return _moved_to_shape(array, bound)


@dataclass(frozen=True)
class _Intervals:
    """Places in row-major order, as ascending intervals that do not overlap.

    `places` are where the elements of the starts are in a rank's block.
    """

    starts: Integers
    stops: Integers
    places: Integers


def _moved_to_shape(array: DistArray, bound: tuple[int, ...]) -> DistArray:
    """Return the tensor in another shape. Each rank sends the others what they lack."""
    comm = array.own_comm
    layout = _layout_of_reshape(array, bound)
    block = np.ascontiguousarray(array.host).reshape(-1)
    region = layout.block(comm.rank)
    if region is None:
        local = block_of_idle_rank(layout, array.dtype)
    else:
        local = np.empty(shape(region), array.dtype)
    flat = local.reshape(-1)
    own_source = _intervals(array.layout, comm.rank)
    own_target = _intervals(layout, comm.rank)

    sent: list[Array] = []
    send_counts = [0] * comm.size
    targets_of_received: list[slice | Integers] = []
    receive_counts = [0] * comm.size
    for other in range(comm.size):
        if is_provider(array.layout, comm.rank, other):
            source_places, _ = _common_places(own_source, _intervals(layout, other))
            if other == comm.rank:
                _, target_places = _common_places(own_source, own_target)
                flat[target_places] = block[source_places]
            else:
                elements = block[source_places]
                sent.append(elements)
                send_counts[other] = elements.size
        if other != comm.rank and is_provider(array.layout, other, comm.rank):
            _, target_places = _common_places(_intervals(array.layout, other), own_target)
            targets_of_received.append(target_places)
            receive_counts[other] = _length(target_places)

    to_send = np.concatenate([np.empty(0, array.dtype), *sent])
    received = np.empty(sum(receive_counts), array.dtype)
    with abort_on_divergence(comm):
        everyone = tuple(range(comm.size))
        comm.alltoallv(everyone, to_send, send_counts, received, receive_counts)
    start = 0
    for target_places in targets_of_received:
        stop = start + _length(target_places)
        flat[target_places] = received[start:stop]
        start = stop
    return DistArray(local, layout, comm)


def _layout_of_reshape(array: DistArray, bound: tuple[int, ...]) -> Layout:
    """Return the layout of the result; a tensor that every rank has whole stays so."""
    source = array.layout
    is_cut = any(cut is not None for cut in source.cuts)
    if is_cut or not source.cuts:
        return layout_for(array.own_comm, bound)
    return Layout(source.mesh, bound, source.cuts)


def _intervals(layout: Layout, rank: int) -> _Intervals:
    """Return the places in row-major order of the elements that a rank holds."""
    region = layout.block(rank)
    nothing = np.zeros(0, np.int64)
    if region is None:
        return _Intervals(nothing, nothing, nothing)
    bound = layout.bound
    # Dimensions after the last one that is cut are whole: their elements follow one another.
    last_cut = 0
    for dimension, runs in enumerate(region):
        is_whole = runs == ((0, bound[dimension]),)
        if not is_whole:
            last_cut = dimension
    if not bound:
        return _Intervals(np.array([0]), np.array([1]), np.array([0]))
    elements_inside = prod(bound[last_cut + 1 :])
    outer_indices = [indices(runs) for runs in region[:last_cut]]
    outer_places = flat_indices(outer_indices, bound[:last_cut]) * bound[last_cut]
    run_starts = np.array([start for start, _ in region[last_cut]], np.int64)
    run_stops = np.array([stop for _, stop in region[last_cut]], np.int64)
    starts = (outer_places[:, np.newaxis] + run_starts).reshape(-1) * elements_inside
    stops = (outer_places[:, np.newaxis] + run_stops).reshape(-1) * elements_inside
    ends = np.cumsum(stops - starts)
    return _Intervals(starts, stops, ends - (stops - starts))


def _common_places(one: _Intervals, two: _Intervals) -> tuple[slice | Integers, slice | Integers]:
    """Return where the elements that two ranks share are in the block of each."""
    first = np.searchsorted(two.stops, one.starts, side="right")
    last = np.searchsorted(two.starts, one.stops, side="left")
    counts = np.maximum(last - first, 0)
    # For each pair of intervals that overlap, their numbers in both lists.
    of_one = np.repeat(np.arange(len(counts)), counts)
    number_in_group = np.arange(len(of_one)) - np.repeat(np.cumsum(counts) - counts, counts)
    of_two = first[of_one] + number_in_group
    starts = np.maximum(one.starts[of_one], two.starts[of_two])
    lengths = np.minimum(one.stops[of_one], two.stops[of_two]) - starts
    places_in_one = one.places[of_one] + starts - one.starts[of_one]
    places_in_two = two.places[of_two] + starts - two.starts[of_two]
    return _all_places(places_in_one, lengths), _all_places(places_in_two, lengths)


def _all_places(starts: Integers, lengths: Integers) -> slice | Integers:
    """Return the places in intervals of these lengths, as a slice if there is one interval."""
    if len(starts) == 1:
        return slice(int(starts[0]), int(starts[0] + lengths[0]))
    ends = np.cumsum(lengths)
    place_in_interval = np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)
    return np.repeat(starts, lengths) + place_in_interval


def _length(places: slice | Integers) -> int:
    if isinstance(places, slice):
        return int(places.stop - places.start)
    return len(places)
