"""Words that move where indices are arithmetic: of one plan, and for the tables of the search."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from math import gcd, prod
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from einmpi.caches import bounded_cache
from einmpi.planner.mesh import Extent, Mesh, members_along
from einmpi.planner.moving.halo import (
    Ints,
    LabelAxes,
    Needed,
    Runs,
    axes_of_labels,
    borders_of_blocks,
    cutting_axes,
    ends_of_middle,
    indices_by_digits,
    length,
    reached_blocks,
    share,
    shares_of,
    stretches_by_digits,
)
from einmpi.planner.states import named

Axes = tuple[int, ...]
Item = TypeVar("Item", bound=Hashable)

MOST_RANKS_COUNTED = 32  # for the tables of the search
HALO_NEIGHBOURS = 3  # a rank and the two beside it, which exchange what is missing


@bounded_cache(4096)
def _needed_runs(
    mesh: Mesh, needed: Needed, dimension: int, axes: LabelAxes, ranks: tuple[int, ...]
) -> tuple[tuple[Runs, list[int]], ...]:
    """Return the indices of a dimension that ranks need, each time with the places of the ranks."""
    alike = _shares_by_digits(mesh, needed, dimension, axes, ranks)
    return tuple((needed.runs(dimension, shares), places) for shares, places in alike)


@bounded_cache(4096)
def _middle_ends(
    mesh: Mesh, needed: Needed, dimension: int, axes: LabelAxes, ranks: tuple[int, ...]
) -> tuple[tuple[tuple[int, int], list[int]], ...]:
    """Return where the middle of a star begins and ends on ranks, with the places of the ranks."""
    alike = _shares_by_digits(mesh, needed, dimension, axes, ranks)
    return tuple((ends_of_middle(needed, dimension, shares), places) for shares, places in alike)


def _shares_by_digits(
    mesh: Mesh, needed: Needed, dimension: int, axes: LabelAxes, ranks: tuple[int, ...]
) -> list[tuple[dict[str, Runs], list[int]]]:
    """Return the shares of labels that ranks have, each time with the places of the ranks."""
    found = []
    for digits, places in _places_by_digits(mesh, ranks, cutting_axes(axes)):
        found.append((shares_of(mesh, needed, dimension, axes, digits), places))
    return found


@bounded_cache(4096)
def _needed_lengths(
    mesh: Mesh, needed: Needed, dimension: int, axes: LabelAxes, ranks: tuple[int, ...]
) -> Ints:
    """Return how many indices of a dimension each of some ranks needs."""
    if needed.is_plain(dimension):
        (label,) = needed.labels(dimension)
        return _share_lengths(mesh, needed.side_of[label], dict(axes).get(label, ()), ranks)
    if needed.is_listed(dimension):
        counts, kind = _listed_counts(mesh, needed, dimension, axes, ranks)
        of_ranks: Ints = counts.sum(axis=1)[kind]
        return of_ranks
    lengths = np.empty(len(ranks), np.int64)
    for runs, places in _needed_runs(mesh, needed, dimension, axes, ranks):
        lengths[places] = length(runs)
    return lengths


class _Listed(NamedTuple):
    """How many indices that lists name are in each finest block of a dimension.

    Ranks of one kind have the same indices. An array [kind, block], and the kind of each rank.
    """

    counts: Ints
    kind: Ints


@bounded_cache(256)
def _listed_counts(
    mesh: Mesh, needed: Needed, dimension: int, axes: LabelAxes, ranks: tuple[int, ...]
) -> _Listed:
    """Return how many indices of a dimension lists name on ranks, where axes cut their labels."""
    starts = _finest_blocks(mesh, needed.sides[dimension])
    kind = np.empty(len(ranks), np.int64)
    groups = _shares_by_digits(mesh, needed, dimension, axes, ranks)
    counts = np.empty((len(groups), len(starts) - 1), np.int64)
    for number, (shares, places) in enumerate(groups):
        counts[number] = np.diff(np.searchsorted(needed.listed(dimension, shares), starts))
        kind[places] = number
    return _Listed(counts, kind)


def _finest_blocks(mesh: Mesh, side: Extent) -> Ints:
    """Return where the blocks begin that all axes together cut a dimension into, and the extent."""
    axes = sorted(axis for window in mesh.windows(side) for axis in window)
    return stretches_by_digits(mesh, side, tuple(axes))[0]


def _kept_of_lists(
    mesh: Mesh,
    needed: Needed,
    dimension: int,
    axes: Sequence[LabelAxes],
    sources: Sequence[Axes],
    ranks: tuple[int, ...],
) -> Ints:
    """Return the counts of a dimension that lists index, as those of a label."""
    table = np.empty((len(sources), len(axes), len(ranks)), np.int64)
    starts = _finest_blocks(mesh, needed.sides[dimension])
    for row, source in enumerate(sources):
        combinations = prod(mesh.factors[axis] for axis in source)
        borders, combination = stretches_by_digits(mesh, needed.sides[dimension], source)
        of_block = combination[np.searchsorted(borders, starts[:-1], side="right") - 1]
        own = _combinations(mesh, source, ranks)
        for column, label_axes in enumerate(axes):
            counts, kind = _listed_counts(mesh, needed, dimension, label_axes, ranks)
            cells = of_block * len(counts) + np.arange(len(counts))[:, None]
            by_cell = np.bincount(cells.ravel(), counts.ravel(), combinations * len(counts))
            table[row, column] = by_cell[own * len(counts) + kind]
    return table


@bounded_cache(4096)
def _combinations(mesh: Mesh, axes: Axes, ranks: tuple[int, ...]) -> Ints:
    """Return the combination of digits on some axes that each of some ranks has."""
    combination = np.zeros(len(ranks), np.int64)
    for axis in axes:
        digits = [mesh.digits(rank)[axis] for rank in ranks]
        combination = combination * mesh.factors[axis] + digits
    return combination


@bounded_cache(4096)
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


class _Counts(NamedTuple):
    """Indices of a dimension, and those of them in blocks that the middle of a star reaches.

    Arrays [cutting axes, axes of labels, rank]. They are the same array where there is no star.
    """

    whole: Ints
    middle: Ints


class _Stars(NamedTuple):
    """Products over dimensions: of the middles, and of what is outside of one of them at most."""

    middle: Ints
    whole: Ints

    def times(self, counts: _Counts, which: tuple[Ints, ...]) -> _Stars:
        """Return the products with one more dimension: with those of its counts."""
        middle = counts.middle[which]
        if counts.middle is counts.whole:
            return _Stars(self.middle * middle, self.whole * middle)
        outside = counts.whole[which] - middle
        return _Stars(self.middle * middle, self.whole * middle + self.middle * outside)

    def total(self, ranks: int) -> Ints:
        """Return the sum over the last axis, which has all ranks or one for all of them."""
        every_rank = np.broadcast_to(self.whole, (*self.whole.shape[:-1], ranks))
        total: Ints = every_rank.sum(axis=-1)
        return total


def _needed_counts(
    mesh: Mesh,
    needed: Needed,
    dimension: int,
    axes: Sequence[LabelAxes],
    cutting: Sequence[Axes],
    ranks: tuple[int, ...],
) -> _Counts:
    """Return how many indices of a dimension ranks need.

    `axes` cut the labels of the vertex, and `cutting` the dimension where the tensor is stored.
    Without a star these make no difference, and are not in the arrays.
    """
    lengths = [_needed_lengths(mesh, needed, dimension, each, ranks) for each in axes]
    whole = np.array([lengths], np.int64)
    if not needed.has_arms(dimension):
        return _Counts(whole, whole)
    ends, middle = _ends(mesh, needed, dimension, axes, ranks)
    in_middle = []
    for each in cutting:
        start, stop = _clipped(ends, middle, borders_of_blocks(mesh, needed.sides[dimension], each))
        in_middle.append((stop - start).sum(axis=0))
    return _Counts(np.repeat(whole, len(cutting), axis=0), np.array(in_middle, np.int64))


def _kept_counts(
    mesh: Mesh,
    needed: Needed,
    dimension: int,
    axes: Sequence[LabelAxes],
    cutting: Sequence[Axes],
    ranks: tuple[int, ...],
    most_axes: int,
) -> _Counts:
    """Return how many of these indices ranks have in their blocks.

    The blocks are those by the first `most_axes` axes of the mesh, where only these cut it.
    """
    side = needed.sides[dimension]
    sources = [tuple([axis for axis in each if axis < most_axes]) for each in cutting]
    if needed.is_plain(dimension) and needed.side_of[needed.labels(dimension)[0]] == side:
        whole = _kept_of_label(mesh, side, axes, sources, ranks)
        return _Counts(whole, whole)
    if needed.is_listed(dimension):
        whole = _kept_of_lists(mesh, needed, dimension, axes, sources, ranks)
        return _Counts(whole, whole)
    ends, middle = _ends(mesh, needed, dimension, axes, ranks)
    whole = np.empty((len(cutting), len(axes), len(ranks)), np.int64)
    in_middle = np.empty_like(whole) if needed.has_arms(dimension) else whole
    for row, (all_axes, source) in enumerate(zip(cutting, sources, strict=True)):
        clipped = _clipped(ends, middle, borders_of_blocks(mesh, side, all_axes))
        for digits, places in _places_by_digits(mesh, ranks, source):
            cuts = tuple([(axis, digits[axis]) for axis in source])
            stored = share(mesh, side, cuts)
            below = _count_below(stored, ends[:, :, :, places])
            whole[row][:, places] = (below[1] - below[0]).sum(axis=0)
            if in_middle is not whole:
                below = _count_below(stored, clipped[:, :, :, places])
                in_middle[row][:, places] = (below[1] - below[0]).sum(axis=0)
    return _Counts(whole, in_middle)


def _ends(
    mesh: Mesh,
    needed: Needed,
    dimension: int,
    axes: Sequence[LabelAxes],
    ranks: tuple[int, ...],
) -> tuple[Ints, Ints]:
    """Return where the runs that are needed start and stop, and where the middle of a star does.

    These are arrays [0 or 1, run, axes, rank] and [0 or 1, axes, rank].
    """
    ends = _ends_of_runs(
        [_needed_runs(mesh, needed, dimension, each, ranks) for each in axes], len(ranks)
    )
    middle = np.empty((2, len(axes), len(ranks)), np.int64)
    for row, each in enumerate(axes):
        for found, places in _middle_ends(mesh, needed, dimension, each, ranks):
            middle[0, row, places], middle[1, row, places] = found
    return ends, middle


def _clipped(ends: Ints, middle: Ints, borders: Ints) -> Ints:
    """Return the ends of runs that are cut off outside of the blocks that a middle reaches."""
    first, stop = reached_blocks(borders, middle[0], middle[1])
    return np.clip(ends, first, stop)


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
    extent: Extent,
    axes: Sequence[LabelAxes],
    sources: Sequence[Axes],
    ranks: tuple[int, ...],
) -> Ints:
    """Return the counts of a dimension that one label indexes: both cuts together select them."""
    table = np.empty((len(sources), len(axes), len(ranks)), np.int64)
    for row, source in enumerate(sources):
        for column, label_axes in enumerate(axes):
            together = tuple(sorted({*cutting_axes(label_axes), *source}))
            table[row, column] = _share_lengths(mesh, extent, together, ranks)
    return table


@bounded_cache(4096)
def _share_lengths(mesh: Mesh, extent: Extent, axes: Axes, ranks: tuple[int, ...]) -> Ints:
    """Return how many indices of a label that these axes cut each of some ranks has."""
    return indices_by_digits(mesh, extent, axes)[_combinations(mesh, axes, ranks)]


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
    mesh: Mesh,
    needed: Needed,
    layouts: Sequence[Sequence[int]],
    states: Sequence[Sequence[int]],
    most_ranks: int,
) -> tuple[Ints, Ints]:
    """Return (words that all ranks receive, those of them that come from other nodes).

    Both are arrays [layout, state], for all pairs of symbols that the axes cut where the operand is
    stored, and in the vertex. On many ranks, `most_ranks` of them stand for all.

    The sender of an element has the digits of the receiver on all axes that do not cut the
    operand, so it is on another node only if an axis between nodes cuts the operand.
    """
    ranks = _counted_ranks(mesh.ranks, most_ranks)
    label_names = [label for label, _ in needed.extents]
    label_states = [named(state, label_names) for state in states]
    one: Ints = np.ones((1, 1, 1), np.int64)
    wanted = kept = kept_on_node = _Stars(one, one)
    for dimension in range(len(needed.bound)):
        labels = needed.labels(dimension)
        axes_by_state = [axes_of_labels(labels, state) for state in label_states]
        cutting_by_layout = []
        for cuts in layouts:
            cutting_by_layout.append(_axes_that_cut(cuts, dimension))
        # Many states cut the labels of one dimension in the same way, and many layouts do so too.
        axes, state_numbers = _distinct(axes_by_state)
        cutting, layout_numbers = _distinct(cutting_by_layout)
        which = np.ix_(layout_numbers, state_numbers)
        counts = _needed_counts(mesh, needed, dimension, axes, cutting, ranks)
        of_all_layouts = which if needed.has_arms(dimension) else np.ix_([0], state_numbers)
        wanted = wanted.times(_once_if_equal(counts), of_all_layouts)
        counts = _kept_counts(mesh, needed, dimension, axes, cutting, ranks, len(mesh.factors))
        kept = kept.times(_once_if_equal(counts), which)
        if mesh.nodes > 1:  # else everything stays on the node
            counts = _kept_counts(mesh, needed, dimension, axes, cutting, ranks, mesh.node_axes)
            kept_on_node = kept_on_node.times(counts, which)
    needed_words = wanted.total(len(ranks))
    received = needed_words - kept.total(len(ranks))
    between = np.zeros_like(received)
    if mesh.nodes > 1:
        between = needed_words - kept_on_node.total(len(ranks))
    return received * mesh.ranks // len(ranks), between * mesh.ranks // len(ranks)


def _axes_that_cut(cuts: Sequence[int], dimension: int) -> Axes:
    return tuple(axis for axis, cut in enumerate(cuts) if cut == dimension)


def _once_if_equal(counts: _Counts) -> _Counts:
    """Return counts of ranks, on the last array axis, for one rank if they are equal for all."""
    whole, middle = counts
    if not (whole == whole[..., :1]).all() or not (middle == middle[..., :1]).all():
        return counts
    first = whole[..., :1]
    return _Counts(first, first if middle is whole else middle[..., :1])


def _distinct(items: Sequence[Item]) -> tuple[list[Item], list[int]]:
    """Return the distinct items, and the number of each item among them."""
    numbers = {item: number for number, item in enumerate(dict.fromkeys(items))}
    return list(numbers), [numbers[item] for item in items]


@bounded_cache(64)
def _counted_ranks(ranks: int, most: int) -> tuple[int, ...]:
    """Return all ranks, or of more than twice as many so many that have all kinds of digits."""
    if ranks <= 2 * most:
        return tuple(range(ranks))
    # Multiples of a number without a common factor come to all ranks, in a mixed order.
    step = ranks * 5 // 8
    while gcd(step, ranks) > 1:
        step += 1
    return tuple(sorted(k * step % ranks for k in range(most)))


# Counts that depend on the digits of a rank on some axes, as an array with an axis for each axis of
# the mesh: of length 1 where the digit makes no difference.
_ByDigits: TypeAlias = Ints


def halo_words_of_plan(
    mesh: Mesh, needed: Needed, cuts: Sequence[int], state: Sequence[int]
) -> tuple[int, int]:
    """Return the same as `halo_words` for one layout and one state, counted on all ranks."""
    label_state = named(state, [label for label, _ in needed.extents])
    wanted: list[tuple[_ByDigits, _ByDigits]] = []
    kept: list[tuple[_ByDigits, _ByDigits]] = []
    kept_on_node: list[tuple[_ByDigits, _ByDigits]] = []
    for dimension in range(len(needed.bound)):
        label_axes = axes_of_labels(needed.labels(dimension), label_state)
        reading = cutting_axes(label_axes)
        ranks = members_along(mesh, reading)
        cutting = _axes_that_cut(cuts, dimension)
        counts = _needed_counts(mesh, needed, dimension, [label_axes], [cutting], ranks)
        wanted.append(_by_digits(mesh, reading, counts))
        for most_axes, found in ((len(cuts), kept), (mesh.node_axes, kept_on_node)):
            source = {axis for axis in cutting if axis < most_axes}
            axes = tuple(sorted(source.union(reading)))
            ranks = members_along(mesh, axes)
            counts = _kept_counts(
                mesh, needed, dimension, [label_axes], [cutting], ranks, most_axes
            )
            found.append(_by_digits(mesh, axes, counts))
    needed_words = _sum_of_stars(mesh, wanted)
    received = needed_words - _sum_of_stars(mesh, kept)
    return received, needed_words - _sum_of_stars(mesh, kept_on_node)


def _by_digits(mesh: Mesh, axes: Axes, counts: _Counts) -> tuple[_ByDigits, _ByDigits]:
    """Return counts of the ranks along some axes as arrays by their digits."""
    shape = [factor if axis in axes else 1 for axis, factor in enumerate(mesh.factors)]
    return counts.whole[0, 0].reshape(shape), counts.middle[0, 0].reshape(shape)


def _sum_of_stars(mesh: Mesh, counts: Sequence[tuple[_ByDigits, _ByDigits]]) -> int:
    """Return the sum, over all ranks, of what is outside of one middle at most."""
    middles = [middle for _, middle in counts]
    total = _sum_over_ranks(mesh, middles)
    for dimension, (whole, middle) in enumerate(counts):
        if (whole != middle).any():
            others = middles[:dimension] + middles[dimension + 1 :]
            total += _sum_over_ranks(mesh, [whole - middle, *others])
    return total


def _sum_over_ranks(mesh: Mesh, counts: Iterable[_ByDigits]) -> int:
    """Return the sum, over all ranks, of the product of these counts.

    Counts are multiplied only if they depend on the same axes. The sum over an axis is taken as
    soon as one array depends on it, so that no array is larger than these axes make it.
    """
    total = 1
    arrays = list(counts)
    for axis, factor in enumerate(mesh.factors):
        depending = [array for array in arrays if array.shape[axis] > 1]
        if not depending:
            total *= factor
            continue
        arrays = [array for array in arrays if array.shape[axis] == 1]
        product = depending[0]
        for array in depending[1:]:
            product = product * array
        arrays.append(product.sum(axis=axis, keepdims=True))
    return total * prod(int(array.sum()) for array in arrays)


def most_needed(mesh: Mesh, needed: Needed, state: Sequence[str | None]) -> int:
    """Return a bound on the elements that a rank needs, the same for all ranks."""
    return prod(most_needed_bound(mesh, needed, state))


def most_needed_bound(mesh: Mesh, needed: Needed, state: Sequence[str | None]) -> tuple[int, ...]:
    """Return how many indices of each dimension a rank needs at most."""
    bound = []
    for dimension in range(len(needed.bound)):
        label_axes = axes_of_labels(needed.labels(dimension), state)
        ranks = members_along(mesh, cutting_axes(label_axes))
        bound.append(int(_needed_lengths(mesh, needed, dimension, label_axes, ranks).max()))
    return tuple(bound)
