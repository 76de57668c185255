"""Words that move where indices are arithmetic: of one plan, and for the tables of the search."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from einmpi.caches import bounded_cache
from einmpi.planner.mesh import Extent, Mesh, length_of, members_along
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
    reached_blocks,
    share,
    shares_of,
    stretches_by_digits,
    whole,
)
from einmpi.planner.states import named

Axes = tuple[int, ...]
Item = TypeVar("Item", bound=Hashable)
# How many indices ranks need or have: first all, then those in blocks that the middle of a star
# reaches. The last array axes are ranks, or the digits of ranks.
Counts = npt.NDArray[Any]

MOST_RANKS_COUNTED = 32  # for the tables of the search
HALO_NEIGHBOURS = 3  # a rank and the two beside it, which exchange what is missing


@dataclass(eq=False)
class _Reading:
    """A dimension of a tensor as a vertex reads it, with its labels cut by some axes."""

    mesh: Mesh
    needed: Needed
    dimension: int
    label_axes: LabelAxes
    known_counts: dict[object, Counts] = field(default_factory=dict)
    known_needs: dict[tuple[int, ...], tuple[Ints, Ints]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.axes = cutting_axes(self.label_axes)
        self.side = self.needed.sides[self.dimension]
        self.is_listed = self.needed.is_listed(self.dimension)
        self.has_arms = self.needed.has_arms(self.dimension)
        # Whether it has the digits of the only label that indexes it.
        self.is_label = False
        if self.needed.is_plain(self.dimension):
            self.is_label = self.needed.side_of[self.needed.labels(self.dimension)[0]] == self.side

    def counts(
        self, ranks: tuple[int, ...], cutting: Axes = (), source: Axes | None = None
    ) -> Counts:
        """Return how many indices of the dimension each of some ranks needs.

        With a `source`, return how many of them it has in its block, which these axes cut.
        `cutting` are all that cut the dimension where it is stored: into the blocks that a star
        reaches.
        """
        key = ranks, source, cutting if self.has_arms else ()
        if key not in self.known_counts:
            stored = _ends_of_blocks(self.mesh, self.side, source, ranks)
            found = reached = self._common(ranks, stored, source)
            if self.has_arms:
                borders = borders_of_blocks(self.mesh, self.side, cutting)
                _, middle = self._needs(ranks)
                inside = np.clip(stored, *reached_blocks(borders, *middle))
                reached = self._common(ranks, inside, source)
            self.known_counts[key] = np.stack([found, reached])
        return self.known_counts[key]

    def _common(self, ranks: tuple[int, ...], stored: Ints, source: Axes | None) -> Ints:
        """Return how many of the indices that ranks need are in the runs that are stored."""
        if self.is_label:  # both cuts together select them
            axes = tuple(sorted({*self.axes, *(source or ())}))
            of_ranks = _combinations(self.mesh, axes, ranks)
            return indices_by_digits(self.mesh, self.side, axes)[of_ranks]
        needed, _ = self._needs(ranks)
        if self.is_listed:
            borders = _finest_blocks(self.mesh, self.side)
            first, stop = needed[np.arange(len(ranks)), np.searchsorted(borders, stored)]
            return np.asarray((stop - first).sum(axis=0))
        first = np.maximum(needed[0][:, None], stored[0])
        stop = np.minimum(needed[1][:, None], stored[1])
        return np.asarray(np.maximum(stop - first, 0).sum(axis=(0, 1)))

    def _needs(self, ranks: tuple[int, ...]) -> tuple[Ints, Ints]:
        """Return what ranks need, and where the middle of a star begins and stops on them.

        Of runs, these are the ends, as an array [0 or 1, run, rank]; of indices that lists name,
        how many are below each border of the finest blocks, as an array [rank, border].
        """
        if ranks not in self.known_needs:
            found: list[Any] = [()] * len(ranks)
            middle = np.zeros((2, len(ranks)), np.int64)
            for digits, places in _places_by_digits(self.mesh, ranks, self.axes):
                needed, dimension = self.needed, self.dimension
                shares = shares_of(self.mesh, needed, dimension, self.label_axes, digits)
                middle[:, places] = np.array([ends_of_middle(needed, dimension, shares)]).T
                if self.is_listed:
                    listed = needed.listed(dimension, shares)
                    own: Any = np.searchsorted(listed, _finest_blocks(self.mesh, self.side))
                else:
                    own = needed.runs(dimension, shares)
                for place in places:
                    found[place] = own
            needs = np.array(found) if self.is_listed else _ends_of_runs(found)
            self.known_needs[ranks] = needs, middle
        return self.known_needs[ranks]


_reading = bounded_cache(4096)(_Reading)  # layers repeat


@bounded_cache(4096)
def _ends_of_blocks(mesh: Mesh, side: Extent, source: Axes | None, ranks: tuple[int, ...]) -> Ints:
    """Return the ends of the runs that ranks have if these axes cut a dimension; else of all."""
    blocks: list[Runs] = [whole(length_of(side))] * len(ranks)
    if source is not None:
        for digits, places in _places_by_digits(mesh, ranks, source):
            block = share(mesh, side, tuple([(axis, digits[axis]) for axis in source]))
            for place in places:
                blocks[place] = block
    return _ends_of_runs(blocks)


def _ends_of_runs(runs_of_ranks: Sequence[Runs]) -> Ints:
    """Return starts and stops as an array [0 or 1, run, rank]; missing runs are empty."""
    ends = np.zeros((2, max(1, *map(len, runs_of_ranks)), len(runs_of_ranks)), np.int64)
    for rank, runs in enumerate(runs_of_ranks):
        for number, (start, stop) in enumerate(runs):
            ends[:, number, rank] = start, stop
    return ends


@bounded_cache(256)
def _finest_blocks(mesh: Mesh, side: Extent) -> Ints:
    """Return where the blocks begin that all axes together cut a dimension into, and the extent."""
    axes = sorted(axis for window in mesh.windows(side) for axis in window)
    return stretches_by_digits(mesh, side, tuple(axes))[0]


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


def halo_words(
    mesh: Mesh,
    needed: Needed,
    layouts: Sequence[Sequence[int]],
    states: Sequence[Sequence[int]],
    most_ranks: int = MOST_RANKS_COUNTED,
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
    counts: list[list[Counts]] = []
    for dimension in range(len(needed.bound)):
        labels = needed.labels(dimension)
        # Many states cut the labels of one dimension in the same way, and many layouts do so too.
        axes, state_numbers = _distinct([axes_of_labels(labels, state) for state in label_states])
        cutting, layout_numbers = _distinct([_axes_that_cut(cuts, dimension) for cuts in layouts])
        readings = [_reading(mesh, needed, dimension, each) for each in axes]
        tables = []
        for sources in zip(*(_sources(mesh, each) for each in cutting), strict=True):
            rows = []
            for each, source in zip(cutting, sources, strict=True):
                rows.append([reading.counts(ranks, each, source) for reading in readings])
            table: Counts = np.moveaxis(np.array(rows), 2, 0)
            if (table == table[..., :1]).all():
                table = table[..., :1]  # one rank stands for all
            tables.append(table[:, layout_numbers][:, :, state_numbers])
        counts.append(tables)
    received, between = _received([len(ranks)], counts)
    return received * mesh.ranks // len(ranks), between * mesh.ranks // len(ranks)


def halo_words_of_plan(
    mesh: Mesh, needed: Needed, cuts: Sequence[int], state: Sequence[int]
) -> tuple[int, int]:
    """Return the same as `halo_words` for one layout and one state, counted on all ranks."""
    label_state = named(state, [label for label, _ in needed.extents])
    counts: list[list[Counts]] = []
    for dimension in range(len(needed.bound)):
        label_axes = axes_of_labels(needed.labels(dimension), label_state)
        reading = _reading(mesh, needed, dimension, label_axes)
        cutting = _axes_that_cut(cuts, dimension)
        by_digits = []
        for source in _sources(mesh, cutting):
            axes = tuple(sorted({*reading.axes, *(source or ())}))
            found = reading.counts(members_along(mesh, axes), cutting, source)
            shape = [factor if axis in axes else 1 for axis, factor in enumerate(mesh.factors)]
            by_digits.append(found.astype(object).reshape(2, *shape))  # sums may be large
        counts.append(by_digits)
    received, between = _received(mesh.factors, counts)
    return int(received), int(between)


def _sources(mesh: Mesh, cutting: Axes) -> list[Axes | None]:
    """Return the axes that cut what counts: nothing, the block of a rank, what its node has.

    With one node, it has everything.
    """
    found: list[Axes | None] = [None, cutting]
    if mesh.nodes > 1:
        found.append(tuple([axis for axis in cutting if axis < mesh.node_axes]))
    return found


def _axes_that_cut(cuts: Sequence[int], dimension: int) -> Axes:
    return tuple(axis for axis, cut in enumerate(cuts) if cut == dimension)


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


def _received(lengths: Sequence[int], counts: Sequence[Sequence[Counts]]) -> tuple[Any, Any]:
    """Return what ranks receive, and what of it comes from other nodes.

    `counts` has for each dimension what ranks need, what of it is there, and what is on the node.
    """
    needed, there, *on_node = (_sum_of_stars(lengths, each) for each in zip(*counts, strict=True))
    between = [needed - each for each in on_node]
    return needed - there, between[0] if between else 0 * needed


def _sum_of_stars(lengths: Sequence[int], counts: Sequence[Counts]) -> Any:
    """Return the sum, over all ranks, of what is outside of one middle at most."""
    middles = [middle for _, middle in counts]
    total = _sum_over_ranks(lengths, middles)
    for dimension, (every, middle) in enumerate(counts):
        if np.any(every != middle):
            others = middles[:dimension] + middles[dimension + 1 :]
            total = total + _sum_over_ranks(lengths, [every - middle, *others])
    return total


def _sum_over_ranks(lengths: Sequence[int], counts: Sequence[Counts]) -> Any:
    """Return the sum, over all ranks, of the product of these counts.

    The last array axes are so long, or of length 1 where they make no difference. Counts are
    multiplied only if they depend on the same axes. The sum over an axis is taken as soon as one
    array depends on it, so that no array is larger than these axes make it.
    """
    total: Any = 1
    arrays = list(counts)
    for axis, length_of_axis in enumerate(lengths, -len(lengths)):
        depending = [array for array in arrays if array.shape[axis] > 1]
        if not depending:
            total = total * length_of_axis
            continue
        arrays = [array for array in arrays if array.shape[axis] == 1]
        arrays.append(np.asarray(prod(depending)).sum(axis=axis, keepdims=True))
    total = np.asarray(total * prod(arrays))
    return total.reshape(total.shape[: total.ndim - len(lengths)])


def most_needed(mesh: Mesh, needed: Needed, state: Sequence[str | None]) -> int:
    """Return a bound on the elements that a rank needs, the same for all ranks."""
    return prod(most_needed_bound(mesh, needed, state))


def most_needed_bound(mesh: Mesh, needed: Needed, state: Sequence[str | None]) -> tuple[int, ...]:
    """Return how many indices of each dimension a rank needs at most."""
    bound = []
    for dimension in range(len(needed.bound)):
        label_axes = axes_of_labels(needed.labels(dimension), state)
        reading = _reading(mesh, needed, dimension, label_axes)
        bound.append(int(reading.counts(members_along(mesh, reading.axes)).max()))
    return tuple(bound)
