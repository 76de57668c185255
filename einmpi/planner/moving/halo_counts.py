"""Words that move where indices are arithmetic: of one plan, and for the tables of the search."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from einmpi.planner.mesh import Mesh
from einmpi.planner.moving.halo import (
    LabelAxes,
    Needed,
    Runs,
    axes_of_labels,
    equal_share_length,
    length,
    share,
    shares_of,
)

Ints = npt.NDArray[np.int64]
Axes = tuple[int, ...]
Item = TypeVar("Item", bound=Hashable)

MOST_RANKS_COUNTED = 32  # for the tables of the search; a plan itself is counted on all ranks
HALO_NEIGHBOURS = 3  # a rank and the two beside it, which exchange what is missing


@lru_cache(maxsize=4096)
def _needed_runs(
    mesh: Mesh, needed: Needed, dimension: int, axes: LabelAxes, ranks: tuple[int, ...]
) -> tuple[tuple[Runs, list[int]], ...]:
    """Return the indices of a dimension that ranks need, each time with the places of the ranks."""
    cutting = tuple(sorted({axis for _, label_axes in axes for axis in label_axes}))
    found = []
    for digits, places in _places_by_digits(mesh, ranks, cutting):
        runs = needed.runs(dimension, shares_of(mesh, needed, dimension, axes, digits))
        found.append((runs, places))
    return tuple(found)


@lru_cache(maxsize=4096)
def _needed_lengths(
    mesh: Mesh, needed: Needed, dimension: int, axes: LabelAxes, ranks: tuple[int, ...]
) -> Ints:
    """Return how many indices of a dimension each of some ranks needs."""
    if needed.is_plain(dimension):
        (label,) = needed.labels(dimension)
        return _share_lengths(mesh, dict(needed.extents)[label], dict(axes).get(label, ()), ranks)
    lengths = np.empty(len(ranks), np.int64)
    for runs, places in _needed_runs(mesh, needed, dimension, axes, ranks):
        lengths[places] = length(runs)
    return lengths


@lru_cache(maxsize=4096)
def _places_by_digits(
    mesh: Mesh, ranks: tuple[int, ...], axes: Axes
) -> tuple[tuple[tuple[int, ...], list[int]], ...]:
    """Return the places of ranks with the same digits on some axes, after one rank's digits."""
    groups: dict[Axes, tuple[tuple[int, ...], list[int]]] = {}
    for place, rank in enumerate(ranks):
        digits = mesh.digits(rank)
        key = tuple([digits[axis] for axis in axes])
        groups.setdefault(key, (digits, []))[1].append(place)
    return tuple(groups.values())


def _kept_counts(
    mesh: Mesh,
    needed: Needed,
    dimension: int,
    axes: Sequence[LabelAxes],
    sources: Sequence[Axes],
    ranks: tuple[int, ...],
) -> Ints:
    """Return how many indices ranks need and have in their blocks, as [source, axes, rank].

    `axes` cut the labels of the vertex, `sources` the dimension where the tensor is stored.
    """
    if needed.is_plain(dimension):
        return _kept_of_label(mesh, needed.bound[dimension], axes, sources, ranks)
    # The starts and the stops of the runs that are needed, as [0 or 1, run, axes, rank].
    ends = _ends_of_runs(
        [_needed_runs(mesh, needed, dimension, each, ranks) for each in axes], len(ranks)
    )
    table = np.empty((len(sources), len(axes), len(ranks)), np.int64)
    for row, source in enumerate(sources):
        for digits, places in _places_by_digits(mesh, ranks, source):
            cuts = tuple([(axis, digits[axis]) for axis in source])
            stored = share(mesh, needed.bound[dimension], cuts)
            below = _count_below(stored, ends[:, :, :, places])
            table[row][:, places] = (below[1] - below[0]).sum(axis=0)
    return table


def _ends_of_runs(needed_runs: Sequence[Sequence[tuple[Runs, list[int]]]], ranks: int) -> Ints:
    """Return starts and stops as an array [0 or 1, run, axes, rank]; missing runs are empty."""
    most_runs = 1
    for every_rank in needed_runs:
        most_runs = max(most_runs, *(len(runs) for runs, _ in every_rank))
    ends = np.zeros((2, most_runs, len(needed_runs), ranks), np.int64)
    for row, every_rank in enumerate(needed_runs):
        for runs, places in every_rank:
            for number, (start, stop) in enumerate(runs):
                ends[0, number, row, places] = start
                ends[1, number, row, places] = stop
    return ends


def _kept_of_label(
    mesh: Mesh,
    extent: int,
    axes: Sequence[LabelAxes],
    sources: Sequence[Axes],
    ranks: tuple[int, ...],
) -> Ints:
    """Return the counts of a dimension that one label indexes: both cuts together select them."""
    table = np.empty((len(sources), len(axes), len(ranks)), np.int64)
    for row, source in enumerate(sources):
        for column, label_axes in enumerate(axes):
            cutting = {axis for _, each in label_axes for axis in each}
            together = tuple(sorted(cutting.union(source)))
            table[row, column] = _share_lengths(mesh, extent, together, ranks)
    return table


@lru_cache(maxsize=4096)
def _share_lengths(mesh: Mesh, extent: int, axes: Axes, ranks: tuple[int, ...]) -> Ints:
    """Return how many indices of a label that these axes cut each of some ranks has."""
    equal_length = equal_share_length(mesh, extent, axes)
    if equal_length is not None:
        return np.full(len(ranks), equal_length, np.int64)
    lengths = np.empty(len(ranks), np.int64)
    for digits, places in _places_by_digits(mesh, ranks, axes):
        cuts = tuple([(axis, digits[axis]) for axis in axes])
        lengths[places] = length(share(mesh, extent, cuts))
    return lengths


def _count_below(runs: Runs, bounds: Ints) -> Ints:
    """Return how many of the indices are below each of the bounds."""
    if not runs:
        return np.zeros(bounds.shape, np.int64)
    starts, stops = np.array(runs, np.int64).T
    before = (stops - starts).cumsum()  # the last index of a run and all before it
    run = starts.searchsorted(bounds, side="right") - 1  # the last one that begins below
    missing = np.maximum(stops[run] - bounds, 0)
    count: Ints = (before[run] - missing) * (run >= 0)
    return count


def halo_words(
    mesh: Mesh, needed: Needed, cuts: Sequence[int | None], state: Sequence[str | None]
) -> tuple[int, int]:
    """Return (words that all ranks together receive, those of them that come from other nodes).

    `cuts` has the dimension that each axis cuts where the operand is stored, `state` the label
    that it cuts in the vertex.
    """
    found = _received(mesh, needed, [cuts], [state], tuple(range(mesh.ranks)))
    return int(found.total[0, 0]), int(found.between[0, 0])


@dataclass(frozen=True)
class HaloTable:
    """Words received for all pairs of layouts and states, as arrays [layout, state]."""

    total: Ints
    between: Ints


def halo_table(
    mesh: Mesh,
    needed: Needed,
    layouts: Sequence[Sequence[int | None]],
    states: Sequence[Sequence[str | None]],
) -> HaloTable:
    """Return the words that move for all pairs. On many ranks, some of them stand for all."""
    ranks = _counted_ranks(mesh.ranks)
    found = _received(mesh, needed, layouts, states, ranks)
    total = found.total * mesh.ranks // len(ranks)
    between = found.between * mesh.ranks // len(ranks)
    return HaloTable(total, between)


def _received(
    mesh: Mesh,
    needed: Needed,
    layouts: Sequence[Sequence[int | None]],
    states: Sequence[Sequence[str | None]],
    ranks: tuple[int, ...],
) -> HaloTable:
    """Return the words that these ranks receive, for all pairs of layouts and states.

    The sender of an element has the digits of the receiver on all axes that do not cut the
    operand, so it is on another node only if an axis between nodes cuts the operand.
    """
    shape = (len(layouts), len(states), len(ranks))
    wanted: Ints = np.ones((1, 1), np.int64)
    kept: Ints = np.ones((1, 1, 1), np.int64)
    kept_on_node = kept
    for dimension in range(len(needed.bound)):
        labels = needed.labels(dimension)
        axes_by_state = [axes_of_labels(labels, state) for state in states]
        cutting_by_layout = []
        between_by_layout = []
        for cuts in layouts:
            cutting = tuple(axis for axis, cut in enumerate(cuts) if cut == dimension)
            cutting_by_layout.append(cutting)
            between_by_layout.append(tuple(axis for axis in cutting if axis < mesh.node_axes))
        # Many states cut the labels of one dimension in the same way, and many layouts do so too.
        axes, state_numbers = _distinct(axes_by_state)
        counts = [_needed_lengths(mesh, needed, dimension, each, ranks) for each in axes]
        wanted = wanted * _once_if_equal(np.array(counts, np.int64))[state_numbers]
        sources, layout_numbers = _distinct(cutting_by_layout)
        table = _once_if_equal(_kept_counts(mesh, needed, dimension, axes, sources, ranks))
        kept = kept * table[np.ix_(layout_numbers, state_numbers)]
        if mesh.nodes > 1:  # else everything stays on the node
            sources, layout_numbers = _distinct(between_by_layout)
            table = _kept_counts(mesh, needed, dimension, axes, sources, ranks)
            kept_on_node = kept_on_node * table[np.ix_(layout_numbers, state_numbers)]
    needed_words = np.broadcast_to(wanted, shape[1:]).sum(axis=1)
    received = needed_words - np.broadcast_to(kept, shape).sum(axis=2)
    if mesh.nodes == 1:
        return HaloTable(received, np.zeros_like(received))
    return HaloTable(received, needed_words - kept_on_node.sum(axis=2))


def _once_if_equal(counts: Ints) -> Ints:
    """Return counts of ranks, on the last array axis, for one rank if they are equal for all."""
    first = counts[..., :1]
    return first if (counts == first).all() else counts


def _distinct(items: Sequence[Item]) -> tuple[list[Item], list[int]]:
    """Return the distinct items, and the number of each item among them."""
    numbers = {item: number for number, item in enumerate(dict.fromkeys(items))}
    return list(numbers), [numbers[item] for item in items]


@lru_cache(maxsize=64)
def _counted_ranks(ranks: int) -> tuple[int, ...]:
    """Return all ranks, or some of them that have all kinds of digits."""
    if ranks <= MOST_RANKS_COUNTED:
        return tuple(range(ranks))
    # Multiples of a number without a common factor come to all ranks, in a mixed order.
    step = ranks * 5 // 8
    while gcd(step, ranks) > 1:
        step += 1
    return tuple(sorted(k * step % ranks for k in range(MOST_RANKS_COUNTED)))


def most_needed(mesh: Mesh, needed: Needed, state: Sequence[str | None]) -> int:
    """Return a bound on the elements that a rank needs, the same for all ranks."""
    return prod(most_needed_bound(mesh, needed, state))


def most_needed_bound(mesh: Mesh, needed: Needed, state: Sequence[str | None]) -> tuple[int, ...]:
    """Return how many indices of each dimension a rank needs at most."""
    ranks = tuple(range(mesh.ranks))
    bound = []
    for dimension in range(len(needed.bound)):
        axes = axes_of_labels(needed.labels(dimension), state)
        bound.append(int(_needed_lengths(mesh, needed, dimension, axes, ranks).max()))
    return tuple(bound)
