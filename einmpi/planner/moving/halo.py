"""What a vertex needs of an operand with index arithmetic, such as u[i+1], and what that moves.

A rank needs more than its block, or another part of it: the difference comes from its neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd, prod
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from einmpi.graph.eingraph import Vertex
from einmpi.graph.index_arithmetic import Interval, arithmetic_labels, intervals_of
from einmpi.graph.scalar import IndexEntries, Scalar, unique
from einmpi.planner.mesh import Extent, Mesh, length_of, members_along, sides
from einmpi.planner.orders import NO_ORDERS, Orders
from einmpi.planner.states import named

# ---- runs ----------------------------------------------------------------------------------------
#
# Sets of indices as runs: the indices of a label that a rank has, and what two sets share.


# A run is a range of indices [start, stop). The indices {0, 1, 2, 3, 8, 9} of a dimension are the
# runs ((0, 4), (8, 10)): in ascending order, none of them empty, no two of them adjacent. So equal
# sets of indices are equal tuples.
Runs: TypeAlias = tuple[tuple[int, int], ...]
Ints = npt.NDArray[np.int64]


def one_run(start: int, stop: int) -> Runs:
    """Return the indices from `start` up to `stop`."""
    return ((start, stop),) if stop > start else ()


def whole(extent: int) -> Runs:
    """Return all indices of a dimension."""
    return one_run(0, extent)


def length(runs: Runs) -> int:
    """Return the number of indices."""
    if len(runs) == 1:  # as a rule; asked so often that it has to be quick
        return runs[0][1] - runs[0][0]
    count = 0
    for start, stop in runs:
        count += stop - start
    return count


@lru_cache(maxsize=65536)
def share(mesh: Mesh, side: Extent, cuts: tuple[tuple[int, int], ...]) -> Runs:
    """Return the indices of a label that belong to the given digits of a rank.

    `cuts` are the (axis, digit) pairs of the axes that cut the label. Example: on the mesh of
    6 = 3·2 ranks a label of extent 12 falls into 6 blocks of 2 indices, one for each pair of
    digits. The cut (0, 1) selects the blocks with the first digit 1: ((4, 8),). The cut (1, 1)
    selects the blocks with the second digit 1: ((2, 4), (6, 8), (10, 12)).
    """
    found: Runs | None = None
    extent = length_of(side)
    for window in mesh.windows(side):
        digits = tuple((axis, value) for axis, value in cuts if axis in window)
        if digits:
            # The axes of the window cut the label into m blocks: index i is in block ⌊i·m/extent⌋.
            blocks = prod(mesh.factors[axis] for axis in window)
            first, last = _runs_of_blocks(mesh, window, digits)
            starts = -(-first * extent // blocks)
            stops = -(-last * extent // blocks)
            selected = joined(zip(starts.tolist(), stops.tolist(), strict=True))
            found = selected if found is None else intersect(found, selected)
    return whole(extent) if found is None else found


@lru_cache(maxsize=65536)
def _runs_of_blocks(
    mesh: Mesh, window: tuple[int, ...], digits: tuple[tuple[int, int], ...]
) -> tuple[Ints, Ints]:
    """Return the blocks with the given digits as runs: their starts and their stops."""
    digit = dict(digits)
    last = max(map(window.index, digit))  # all digits of the axes after it are selected
    starts = np.zeros(1, np.int64)
    unit = prod(mesh.factors[axis] for axis in window)  # blocks in a row with the digits so far
    for axis in window[: last + 1]:
        unit //= mesh.factors[axis]
        selected = [digit[axis]] if axis in digit else range(mesh.factors[axis])
        starts = (starts[:, None] + unit * np.array(selected)).ravel()
    return starts, starts + unit


@lru_cache(maxsize=4096)
def indices_by_digits(mesh: Mesh, side: Extent, axes: tuple[int, ...]) -> Ints:
    """Return how many indices of a dimension have each combination of digits on some axes.

    On 4 = 2·2 ranks the 10 indices of a dimension lie in fine blocks of 3, 2, 3, 2. On the last
    axis, blocks 0 and 2 have digit 0: 6 indices; blocks 1 and 3 have digit 1: 4 indices.
    """
    extent = length_of(side)
    window_of = {}
    for window in mesh.windows(side):
        for axis in window:
            window_of[axis] = window
    blocks_of = {}  # axis → fine blocks that its window divides the dimension into
    borders = [np.array([0, extent])]
    for axis in axes:
        blocks = prod(mesh.factors[other] for other in window_of[axis])
        blocks_of[axis] = blocks
        borders.append(-(-np.arange(blocks + 1) * extent // blocks))
    # From one border to the next, all indices have the same digits.
    starts = np.unique(np.concatenate(borders))
    combination = np.zeros(len(starts) - 1, np.int64)
    for axis in axes:
        block = starts[:-1] * blocks_of[axis] // extent
        window = window_of[axis]
        later = prod(mesh.factors[other] for other in window[window.index(axis) + 1 :])
        digit = block // later % mesh.factors[axis]
        combination = combination * mesh.factors[axis] + digit
    combinations = prod(mesh.factors[axis] for axis in axes)
    found = np.bincount(combination, np.diff(starts), combinations)
    return found.astype(np.int64)


def joined(runs: Iterable[tuple[int, int]]) -> Runs:
    """Drop empty runs and join adjacent ones; the runs are in ascending order."""
    joined: list[tuple[int, int]] = []
    for start, stop in runs:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return tuple(joined)


@lru_cache(maxsize=16384)
def intersect(one: Runs, two: Runs) -> Runs:
    """Return the indices that both have."""
    found = []
    k = m = 0
    while k < len(one) and m < len(two):
        start = max(one[k][0], two[m][0])
        stop = min(one[k][1], two[m][1])
        if start < stop:
            found.append((start, stop))
        if one[k][1] < two[m][1]:
            k += 1
        else:
            m += 1
    return tuple(found)


# The axes that cut each label, for labels that are cut.
LabelAxes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]


class _Dimension(NamedTuple):
    """How a dimension is indexed."""

    entries: Mapping[str | Scalar, tuple[str, ...] | None]  # index → its labels; None for a gather
    labels: tuple[str, ...]  # of all indices
    is_plain: bool  # by one label and nothing else


@dataclass(frozen=True)
class Needed:
    """The part of a tensor that a rank needs for a vertex, as a function of its shares of labels.

    There is an index for each operand that reads the tensor.
    """

    bound: tuple[int, ...]  # of the tensor
    indices: tuple[IndexEntries, ...]
    extents: tuple[tuple[str, int], ...]  # of all labels of the vertex
    orders: tuple[int, ...] = ()  # of the dimensions
    label_orders: tuple[int, ...] = ()

    # The search asks very often; expressions are slow to hash and to go through.

    @cached_property
    def _hash(self) -> int:
        return hash((self.bound, self.indices, self.extents, self.orders, self.label_orders))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def sides(self) -> tuple[Extent, ...]:
        """The extents of the dimensions with the orders of their digits."""
        return sides(self.bound, self.orders)

    @cached_property
    def side_of(self) -> Mapping[str, Extent]:
        """The same of the labels."""
        extents = [extent for _, extent in self.extents]
        labels = [label for label, _ in self.extents]
        return dict(zip(labels, sides(extents, self.label_orders), strict=True))

    @cached_property
    def _dimensions(self) -> tuple[_Dimension, ...]:
        found = []
        for dimension in range(len(self.bound)):
            entries: dict[str | Scalar, tuple[str, ...] | None] = {}
            for index in self.indices:
                entry = index[dimension]
                entries[entry] = (entry,) if isinstance(entry, str) else arithmetic_labels(entry)
            labels = unique(*(labels or () for labels in entries.values()))
            found.append(_Dimension(entries, labels, tuple(entries) == labels[:1]))
        return tuple(found)

    def labels(self, dimension: int) -> tuple[str, ...]:
        """Return the labels on which the needed indices of a dimension depend."""
        return self._dimensions[dimension].labels

    def is_plain(self, dimension: int) -> bool:
        """Return whether a dimension is indexed by one label and nothing else."""
        return self._dimensions[dimension].is_plain

    def runs(self, dimension: int, shares: Mapping[str, Runs]) -> Runs:
        """Return the indices of a dimension that are needed, given the shares of its labels.

        Where indices are arithmetic, or differ, these are all indices between their bounds, in one
        run; in two runs where an index such as (i+1)%n reaches both ends of the dimension. A
        guarded index may be outside of the tensor, where nothing is needed.
        """
        extent = self.bound[dimension]
        if self.is_plain(dimension):
            return shares[self.labels(dimension)[0]]
        reached: list[Interval] = []
        wraps = False
        for entry, labels in self._dimensions[dimension].entries.items():
            if labels is None:
                return whole(extent)  # a gather may read any of it
            bounds: dict[str, Interval] = {}
            for label in labels:
                if shares[label]:
                    bounds[label] = shares[label][0][0], shares[label][-1][1] - 1
            if len(bounds) < len(labels):
                continue  # the rank has nothing to compute
            if isinstance(entry, str):
                reached.append(bounds[entry])
                continue
            found = intervals_of(entry, bounds)
            if found is None:
                return whole(extent)
            wraps = wraps or len(found) > 1
            reached.extend(found)
        inside: list[tuple[int, int]] = []
        for low, high in reached:
            inside.extend(one_run(max(low, 0), min(high + 1, extent)))
        return _first_to_last(sorted(inside), wraps)


def _first_to_last(runs: Sequence[tuple[int, int]], has_gap: bool) -> Runs:
    """Return all indices from the first one to the last one, perhaps without the largest gap."""
    if not runs:
        return ()
    first, end = runs[0]
    gap_start = gap_stop = 0
    for start, stop in runs:
        if has_gap and start - end > gap_stop - gap_start:
            gap_start, gap_stop = end, start
        end = max(end, stop)
    if gap_stop:
        return (first, gap_start), (gap_stop, end)
    return ((first, end),)


def needed_of(
    vertex: Vertex, name: str, bound: tuple[int, ...], orders: Orders = NO_ORDERS
) -> Needed | None:
    """Return what a vertex needs of a tensor; None if that is a block for each operand.

    It is no block if an index is arithmetic. Then all operands that read the tensor share what is
    fetched.
    """
    einsum = vertex.computed_einsum
    if not einsum.has_any_arithmetic:
        return None
    operands = [operand for operand, tensor in enumerate(vertex.inputs) if tensor == name]
    if not any(einsum.has_arithmetic(operand) for operand in operands):
        return None
    indices = tuple(einsum.operands[operand] for operand in operands)
    of_tensor = orders.get(("tensor", name), ())
    of_labels = orders.get(("vertex", vertex.name), ())
    return Needed(bound, indices, einsum.extents, of_tensor, of_labels)


def shares_of(
    mesh: Mesh, needed: Needed, dimension: int, axes: LabelAxes, digits: Sequence[int]
) -> dict[str, Runs]:
    """Return the share of each label of a dimension that the rank with these digits has."""
    cutting = dict(axes)
    shares = {}
    for label in needed.labels(dimension):
        cuts = tuple((axis, digits[axis]) for axis in cutting.get(label, ()))
        shares[label] = share(mesh, needed.side_of[label], cuts)
    return shares


def axes_of_labels(labels: Sequence[str], state: Sequence[str | None]) -> LabelAxes:
    """Return the axes that cut each of these labels, given the label that each axis cuts."""
    found = []
    for label in labels:
        axes = tuple(axis for axis, cut in enumerate(state) if cut == label)
        if axes:
            found.append((label, axes))
    return tuple(found)


def is_inside(
    mesh: Mesh, needed: Needed, cuts: Sequence[int | None], state: Sequence[str | None]
) -> bool:
    """Return whether every rank finds all it needs in its block, so that nothing is copied."""
    for dimension in range(len(needed.bound)):
        axes = axes_of_labels(needed.labels(dimension), state)
        cutting = tuple(axis for axis, cut in enumerate(cuts) if cut == dimension)
        if not _is_dimension_inside(mesh, needed, dimension, axes, cutting):
            return False
    return True


@lru_cache(maxsize=65536)
def _is_dimension_inside(
    mesh: Mesh, needed: Needed, dimension: int, axes: LabelAxes, cutting: tuple[int, ...]
) -> bool:
    """Return whether all ranks have what they need of a dimension.

    Where an index is arithmetic, their share of it must be one run.
    """
    relevant = {axis for _, label_axes in axes for axis in label_axes}
    relevant.update(cutting)
    for digits in _all_digits(mesh, relevant):
        wanted = needed.runs(dimension, shares_of(mesh, needed, dimension, axes, digits))
        cuts = tuple((axis, digits[axis]) for axis in cutting)
        stored = share(mesh, needed.sides[dimension], cuts)
        if intersect(wanted, stored) != wanted:
            return False
        if not needed.is_plain(dimension) and len(stored) != 1:
            return False
    return True


def _all_digits(mesh: Mesh, axes: Collection[int]) -> Iterator[tuple[int, ...]]:
    """Yield the digits of ranks that differ on these axes; all other digits are 0."""
    ranges = []
    for axis, factor in enumerate(mesh.factors):
        ranges.append(range(factor) if axis in axes else range(1))
    return itertools.product(*ranges)


# ---- words ---------------------------------------------------------------------------------------
#
# Words that move where indices are arithmetic: of one plan, and for the tables of the search.


Axes = tuple[int, ...]
Item = TypeVar("Item", bound=Hashable)

MOST_RANKS_COUNTED = 32  # for the tables of the search
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
        return _share_lengths(mesh, needed.side_of[label], dict(axes).get(label, ()), ranks)
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
        return _kept_of_label(mesh, needed.sides[dimension], axes, sources, ranks)
    # The starts and the stops of the runs that are needed, as [0 or 1, run, axes, rank].
    ends = _ends_of_runs(
        [_needed_runs(mesh, needed, dimension, each, ranks) for each in axes], len(ranks)
    )
    table = np.empty((len(sources), len(axes), len(ranks)), np.int64)
    for row, source in enumerate(sources):
        for digits, places in _places_by_digits(mesh, ranks, source):
            cuts = tuple([(axis, digits[axis]) for axis in source])
            stored = share(mesh, needed.sides[dimension], cuts)
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
    extent: Extent,
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
def _share_lengths(mesh: Mesh, extent: Extent, axes: Axes, ranks: tuple[int, ...]) -> Ints:
    """Return how many indices of a label that these axes cut each of some ranks has."""
    combination = np.zeros(len(ranks), np.int64)
    for axis in axes:
        digits = [mesh.digits(rank)[axis] for rank in ranks]
        combination = combination * mesh.factors[axis] + digits
    return indices_by_digits(mesh, extent, axes)[combination]


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
    shape = (len(layouts), len(states), len(ranks))
    label_names = [label for label, _ in needed.extents]
    label_states = [named(state, label_names) for state in states]
    wanted: Ints = np.ones((1, 1), np.int64)
    kept: Ints = np.ones((1, 1, 1), np.int64)
    kept_on_node = kept
    for dimension in range(len(needed.bound)):
        labels = needed.labels(dimension)
        axes_by_state = [axes_of_labels(labels, state) for state in label_states]
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
    between = np.zeros_like(received)
    if mesh.nodes > 1:
        between = needed_words - kept_on_node.sum(axis=2)
    return received * mesh.ranks // len(ranks), between * mesh.ranks // len(ranks)


def _once_if_equal(counts: Ints) -> Ints:
    """Return counts of ranks, on the last array axis, for one rank if they are equal for all."""
    first = counts[..., :1]
    return first if (counts == first).all() else counts


def _distinct(items: Sequence[Item]) -> tuple[list[Item], list[int]]:
    """Return the distinct items, and the number of each item among them."""
    numbers = {item: number for number, item in enumerate(dict.fromkeys(items))}
    return list(numbers), [numbers[item] for item in items]


@lru_cache(maxsize=64)
def _counted_ranks(ranks: int, most: int) -> tuple[int, ...]:
    """Return all ranks, or so many of them that have all kinds of digits."""
    if ranks <= most:
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
    wanted: list[_ByDigits] = []
    kept: list[_ByDigits] = []
    kept_on_node: list[_ByDigits] = []
    for dimension in range(len(needed.bound)):
        label_axes = axes_of_labels(needed.labels(dimension), label_state)
        reading = tuple(sorted({axis for _, axes in label_axes for axis in axes}))
        ranks = members_along(mesh, reading)
        lengths = _needed_lengths(mesh, needed, dimension, label_axes, ranks)
        wanted.append(_by_digits(mesh, reading, lengths))
        cutting = tuple(axis for axis, cut in enumerate(cuts) if cut == dimension)
        between = tuple(axis for axis in cutting if axis < mesh.node_axes)
        for source, counts in ((cutting, kept), (between, kept_on_node)):
            axes = tuple(sorted({*reading, *source}))
            ranks = members_along(mesh, axes)
            table = _kept_counts(mesh, needed, dimension, [label_axes], [source], ranks)
            counts.append(_by_digits(mesh, axes, table[0, 0]))
    needed_words = _sum_over_ranks(mesh, wanted)
    received = needed_words - _sum_over_ranks(mesh, kept)
    return received, needed_words - _sum_over_ranks(mesh, kept_on_node)


def _by_digits(mesh: Mesh, axes: Axes, counts: Ints) -> _ByDigits:
    """Return counts of the ranks along some axes as an array by their digits."""
    shape = [length if axis in axes else 1 for axis, length in enumerate(mesh.factors)]
    return counts.reshape(shape)


def _sum_over_ranks(mesh: Mesh, counts: Iterable[_ByDigits]) -> int:
    """Return the sum, over all ranks, of the product of these counts.

    Counts are multiplied only if they depend on the same axes. The sum over an axis is taken as
    soon as one array depends on it, so that no array is larger than these axes make it.
    """
    total = 1
    arrays = list(counts)
    for axis, length in enumerate(mesh.factors):
        depending = [array for array in arrays if array.shape[axis] > 1]
        if not depending:
            total *= length
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
        ranks = members_along(
            mesh, tuple(sorted({axis for _, axes in label_axes for axis in axes}))
        )
        bound.append(int(_needed_lengths(mesh, needed, dimension, label_axes, ranks).max()))
    return tuple(bound)
