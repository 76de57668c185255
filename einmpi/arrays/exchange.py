"""Elements that ranks request from each other, or send to each other by what all ranks know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.comm.agreement import abort_on_divergence, agree_on_calls
from einmpi.comm.base import Comm
from einmpi.schedule.layout import Layout
from einmpi.schedule.regions import indices

Array: TypeAlias = npt.NDArray[Any]
Integers: TypeAlias = npt.NDArray[np.int64]
Places: TypeAlias = slice | Integers  # in one dimension of a block
# Elements that move: their places in the block that they come to, and in that they come from.
Piece: TypeAlias = tuple[tuple[Places, ...], tuple[Places, ...]]


def request_elements(
    comm: Comm,
    dtype: np.dtype[Any],
    places: Integers,
    owners: Integers,
    answer: Callable[[Integers], Array],
) -> Array:
    """Return the elements at some places, each of which a rank owns. All ranks call it.

    `answer` returns the elements of this rank at places that it owns.
    """
    if comm.size == 1:
        return answer(places)
    # Numbers of 16 bits are sorted much faster.
    short_owners = owners.astype(np.uint16) if comm.size < 2**16 else owners
    order = np.argsort(short_owners, kind="stable")
    counts = np.bincount(owners, minlength=comm.size)
    asked = counts_from_ranks(comm, counts)
    wanted = send_to_ranks(comm, places[order], counts, asked)
    values = np.empty(places.size, dtype)
    values[order] = send_to_ranks(comm, answer(wanted), asked, counts)
    return values


def counts_from_ranks(comm: Comm, counts: Integers) -> Integers:
    """Return how many elements each rank sends here, given how many this one sends to each."""
    is_other = np.arange(comm.size) != comm.rank
    one_each = is_other.astype(int).tolist()
    received = counts.copy()
    received[is_other] = exchange_elements(comm, counts[is_other], one_each, one_each)
    return received


def send_to_ranks(comm: Comm, own: Array, counts: Integers, counts_received: Integers) -> Array:
    """Send consecutive elements to ranks, so many to each. All ranks call it.

    Return what this rank gets, in the order of the ranks that it comes from.
    """
    stop = int(counts[: comm.rank + 1].sum())
    kept = slice(stop - int(counts[comm.rank]), stop)
    is_other = np.arange(comm.size) != comm.rank
    received = exchange_elements(
        comm,
        np.delete(own, kept),
        (counts * is_other).tolist(),
        (counts_received * is_other).tolist(),
    )
    return np.insert(received, counts_received[: comm.rank].sum(), own[kept])


def exchange_elements(
    comm: Comm, to_send: Array, send_counts: Sequence[int], receive_counts: Sequence[int]
) -> Array:
    """Send elements to other ranks; return those that they send here. All ranks call it.

    The elements are in the order of the ranks. The counts have a number for each rank, 0 for this
    one.
    """
    received = np.empty(sum(receive_counts), to_send.dtype)
    agree_on_calls(comm)
    with abort_on_divergence(comm):
        everyone = tuple(range(comm.size))
        comm.alltoallv(everyone, to_send, send_counts, received, receive_counts)
    return received


def move_pieces(
    comm: Comm, block: Array, target: Array, pieces_between: Callable[[int, int], Iterable[Piece]]
) -> None:
    """Send every rank the elements that it needs and this one has. All ranks call it.

    Parameters
    ----------
    comm : Comm
        The ranks.
    block : array
        The elements that this rank has.
    target : array
        Where the elements that this rank needs come.
    pieces_between : callable
        Takes the rank that sends and the one that receives, and returns what moves between them.
    """
    for in_target, in_block in pieces_between(comm.rank, comm.rank):
        # An array also of a single element: numpy casts arrays, but refuses some numbers.
        target[in_target] = np.asarray(block[in_block])
    if comm.size == 1:
        return

    sent = [np.empty(0, block.dtype)]
    send_counts = [0] * comm.size
    targets_of_received: list[tuple[Places, ...]] = []
    receive_counts = [0] * comm.size
    for other in range(comm.size):
        if other == comm.rank:
            continue
        for _, in_block in pieces_between(comm.rank, other):
            elements = block[in_block].reshape(-1)
            sent.append(elements)
            send_counts[other] += elements.size
        for in_target, _ in pieces_between(other, comm.rank):
            targets_of_received.append(in_target)
            receive_counts[other] += prod(_extents_of_box(in_target))

    received = exchange_elements(comm, np.concatenate(sent), send_counts, receive_counts)
    start = 0
    for in_target in targets_of_received:
        extents = _extents_of_box(in_target)
        stop = start + prod(extents)
        target[in_target] = received[start:stop].reshape(extents)
        start = stop


def _extents_of_box(in_target: Sequence[Places]) -> list[int]:
    """Return the shape of a box, given its places in the block of the receiver."""
    extents: list[int] = []
    for places in in_target:
        if isinstance(places, slice):
            extents.append(places.stop - places.start)
        else:
            extents.append(len(places))
    return extents


# ---- places in row-major order, as intervals ----------------------------------------------------


@dataclass(frozen=True)
class Intervals:
    """Places in row-major order, as ascending intervals that do not overlap.

    `places` are where the elements of the starts are in a rank's block.
    """

    starts: Integers
    stops: Integers
    places: Integers


def one_interval(start: int, stop: int) -> Intervals:
    """Return the places from `start` to `stop`, which are in a block one after the other."""
    return Intervals(np.array([start]), np.array([stop]), np.array([0]))


def move_between_intervals(
    comm: Comm,
    block: Array,
    target: Array,
    source_of: Callable[[int], Intervals],
    target_of: Callable[[int], Intervals],
    is_provider: Callable[[int, int], bool],
) -> None:
    """Send every rank the elements that it needs and this one has. All ranks call it.

    Parameters
    ----------
    comm : Comm
        The ranks.
    block : array
        The elements that this rank has, in one dimension.
    target : array
        Where the elements that this rank needs come, in one dimension.
    source_of, target_of : callable
        Take a rank, and return the places of its elements before and after.
    is_provider : callable
        Takes two ranks, and returns whether the first one provides its elements to the second.
    """
    # This rank's own intervals are needed again and again, those of another rank twice.
    source_intervals = lru_cache(2)(source_of)
    target_intervals = lru_cache(2)(target_of)

    def pieces_between(sender: int, receiver: int) -> list[Piece]:
        if not is_provider(sender, receiver):
            return []
        in_block, in_target = _common_places(source_intervals(sender), target_intervals(receiver))
        return [((in_target,), (in_block,))]

    move_pieces(comm, block, target, pieces_between)


def flat_indices(parts: Sequence[Integers], bound: tuple[int, ...]) -> Integers:
    """Return the places, in row-major order, of all combinations of indices."""
    flat = np.zeros((), np.int64)
    for part, extent in zip(parts, bound, strict=True):
        flat = flat[..., np.newaxis] * extent + part
    return flat.reshape(-1)


def intervals_of_block(layout: Layout, rank: int) -> Intervals:
    """Return the places in row-major order of the elements that a rank holds."""
    region = layout.block(rank)
    nothing = np.zeros(0, np.int64)
    if region is None:
        return Intervals(nothing, nothing, nothing)
    bound = layout.bound
    # Dimensions after the last one that is cut are whole: their elements follow one another.
    last_cut = 0
    for dimension, runs in enumerate(region):
        is_whole = runs == ((0, bound[dimension]),)
        if not is_whole:
            last_cut = dimension
    if not bound:
        return Intervals(np.array([0]), np.array([1]), np.array([0]))
    elements_inside = prod(bound[last_cut + 1 :])
    outer_indices = [indices(runs) for runs in region[:last_cut]]
    outer_places = flat_indices(outer_indices, bound[:last_cut]) * bound[last_cut]
    run_starts = np.array([start for start, _ in region[last_cut]], np.int64)
    run_stops = np.array([stop for _, stop in region[last_cut]], np.int64)
    starts = (outer_places[:, np.newaxis] + run_starts).reshape(-1) * elements_inside
    stops = (outer_places[:, np.newaxis] + run_stops).reshape(-1) * elements_inside
    ends = np.cumsum(stops - starts)
    return Intervals(starts, stops, ends - (stops - starts))


def _common_places(one: Intervals, two: Intervals) -> tuple[slice | Integers, slice | Integers]:
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
