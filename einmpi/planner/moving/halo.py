"""What a vertex needs of an operand with index arithmetic, such as u[i+1].

A rank needs more than its block, or another part of it: the difference comes from its neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.caches import bounded_cache
from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.index_arithmetic import Interval, arithmetic_labels, intervals_of
from einmpi.graph.scalar import IndexEntries, Scalar, unique
from einmpi.planner.mesh import Extent, Mesh, cycles_of, length_of, sides
from einmpi.planner.moving.known_lists import (
    KnownList,
    Listed,
    list_of,
    listed_inside,
    runs_of,
)
from einmpi.planner.orders import NO_ORDERS, Orders

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
    if isinstance(runs, Listed):
        return len(runs.indices)
    if len(runs) == 1:  # as a rule; asked so often that it has to be quick
        return runs[0][1] - runs[0][0]
    count = 0
    for start, stop in runs:
        count += stop - start
    return count


@bounded_cache(65536)
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
            cycles = cycles_of(side)
            blocks = cycles * prod(mesh.factors[axis] for axis in window)
            first, last = _runs_of_blocks(mesh, window, digits, cycles)
            starts = -(-first * extent // blocks)
            stops = -(-last * extent // blocks)
            selected = joined(zip(starts.tolist(), stops.tolist(), strict=True))
            found = selected if found is None else intersect(found, selected)
    return whole(extent) if found is None else found


@bounded_cache(65536)
def _runs_of_blocks(
    mesh: Mesh, window: tuple[int, ...], digits: tuple[tuple[int, int], ...], cycles: int
) -> tuple[Ints, Ints]:
    """Return the blocks with the given digits as runs: their starts and their stops."""
    digit = dict(digits)
    last = max(map(window.index, digit))  # all digits of the axes after it are selected
    unit = prod(mesh.factors[axis] for axis in window)  # blocks in a row with the digits so far
    starts = np.arange(cycles) * unit
    for axis in window[: last + 1]:
        unit //= mesh.factors[axis]
        selected = [digit[axis]] if axis in digit else range(mesh.factors[axis])
        starts = (starts[:, None] + unit * np.array(selected)).ravel()
    return starts, starts + unit


@bounded_cache(4096)
def indices_by_digits(mesh: Mesh, side: Extent, axes: tuple[int, ...]) -> Ints:
    """Return how many indices of a dimension have each combination of digits on some axes.

    On 4 = 2·2 ranks the 10 indices of a dimension lie in fine blocks of 3, 2, 3, 2. On the last
    axis, blocks 0 and 2 have digit 0: 6 indices; blocks 1 and 3 have digit 1: 4 indices.
    """
    starts, combination = stretches_by_digits(mesh, side, axes)
    combinations = prod(mesh.factors[axis] for axis in axes)
    found = np.bincount(combination, np.diff(starts), combinations)
    return found.astype(np.int64)


@bounded_cache(4096)
def stretches_by_digits(mesh: Mesh, side: Extent, axes: tuple[int, ...]) -> tuple[Ints, Ints]:
    """Return where stretches of indices with the same digits on some axes begin, and the extent.

    After them, return the combination of digits of each stretch.
    """
    extent = length_of(side)
    window_of = {}
    for window in mesh.windows(side):
        for axis in window:
            window_of[axis] = window
    blocks_of = {}  # axis → fine blocks that its window divides the dimension into
    borders = [np.array([0, extent])]
    for axis in axes:
        blocks = cycles_of(side) * prod(mesh.factors[other] for other in window_of[axis])
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
    return starts, combination


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


def intersect(one: Runs, two: Runs) -> Runs:
    """Return the indices that both have."""
    if isinstance(one, Listed):
        return listed_inside(one.indices, two)
    if isinstance(two, Listed):
        return listed_inside(two.indices, one)
    return _intersect(one, two)


@bounded_cache(16384)
def _intersect(one: Runs, two: Runs) -> Runs:
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

    # Index → its labels, or those of the list that it is; None for a gather from an unknown one.
    entries: Mapping[str | Scalar, tuple[str, ...] | None]
    labels: tuple[str, ...]  # of all indices
    is_plain: bool  # by one label and nothing else
    is_listed: bool  # some index is a known list, and all others are such lists or labels


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
    lists: tuple[tuple[Scalar, KnownList], ...] = ()  # the indices that are known lists

    # The search asks very often; expressions are slow to hash and to go through.

    @cached_property
    def _hash(self) -> int:
        of_labels = self.extents, self.orders, self.label_orders
        return hash((self.bound, self.indices, *of_labels, self.lists))

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
        lists = dict(self.lists)
        for dimension in range(len(self.bound)):
            entries: dict[str | Scalar, tuple[str, ...] | None] = {}
            has_list = False
            for index in self.indices:
                entry = index[dimension]
                if isinstance(entry, str):
                    entries[entry] = (entry,)
                else:
                    entries[entry] = arithmetic_labels(entry)
                has_list |= entry in lists
            is_listed = has_list and all(isinstance(e, str) or e in lists for e in entries)
            for entry, listed in lists.items() if is_listed else ():
                if entry in entries:
                    entries[entry] = listed.labels
            labels = unique(*(labels or () for labels in entries.values()))
            found.append(_Dimension(entries, labels, tuple(entries) == labels[:1], is_listed))
        return tuple(found)

    def labels(self, dimension: int) -> tuple[str, ...]:
        """Return the labels on which the needed indices of a dimension depend."""
        return self._dimensions[dimension].labels

    def is_plain(self, dimension: int) -> bool:
        """Return whether a dimension is indexed by one label and nothing else."""
        return self._dimensions[dimension].is_plain

    def is_listed(self, dimension: int) -> bool:
        """Return whether known lists say which indices of a dimension are needed."""
        return self._dimensions[dimension].is_listed

    @cached_property
    def middle(self) -> Needed | None:
        """What is needed for the middle of a star; None if the operands are not one.

        Each operand of a star differs from the middle in one dimension, or in none. So what is
        outside of the middle in two dimensions, at the corners, is not needed.
        """
        entries_by_dimension = []
        if self.lists:
            return None
        for each in self._dimensions:
            plain_first = sorted(each.entries, key=lambda entry: not isinstance(entry, str))
            entries_by_dimension.append(plain_first)
        if sum(len(entries) > 1 for entries in entries_by_dimension) < 2:
            return None  # there are no corners
        for middle in itertools.product(*entries_by_dimension):
            if all(_differing(index, middle) <= 1 for index in self.indices):
                return replace(self, indices=(middle,))
        return None

    def has_arms(self, dimension: int) -> bool:
        """Return whether operands of a star differ in this dimension."""
        return self.middle is not None and len(self._dimensions[dimension].entries) > 1

    def runs(self, dimension: int, shares: Mapping[str, Runs]) -> Runs:
        """Return the indices of a dimension that are needed, given the shares of its labels.

        Where indices are arithmetic, or differ, these are all indices between their bounds, in one
        run; in two runs where an index such as (i+1)%n reaches both ends of the dimension. A
        guarded index may be outside of the tensor, where nothing is needed.
        """
        extent = self.bound[dimension]
        if self.is_plain(dimension):
            return shares[self.labels(dimension)[0]]
        if self.is_listed(dimension):
            return runs_of(self.listed(dimension, shares))
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

    def listed(self, dimension: int, shares: Mapping[str, Runs]) -> Ints:
        """Return the indices that lists name, and those of labels beside them."""
        flags = np.zeros(self.bound[dimension], bool)
        lists = dict(self.lists)
        for entry in self._dimensions[dimension].entries:
            if not isinstance(entry, str):
                lists[entry].mark(flags, shares)
                continue
            for start, stop in shares[entry]:
                flags[start:stop] = True
        return np.flatnonzero(flags)


def _differing(one: IndexEntries, other: IndexEntries) -> int:
    """Return in how many dimensions two indices differ."""
    return sum(entry != other_entry for entry, other_entry in zip(one, other, strict=True))


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
    graph: EinGraph, vertex: Vertex, name: str, orders: Orders = NO_ORDERS
) -> Needed | None:
    """Return what a vertex needs of a tensor; None if that is a block for each operand.

    It is no block if an index is arithmetic, or a list that is known. Then all operands that read
    the tensor share what is fetched.
    """
    einsum = vertex.computed_einsum
    has_lists = einsum.is_gathering and vertex.recurrence is None
    if not einsum.has_any_arithmetic and not has_lists:
        return None
    bound = graph[name].bound
    operands = [operand for operand, tensor in enumerate(vertex.inputs) if tensor == name]
    indices = tuple(einsum.operands[operand] for operand in operands)
    smallest: dict[Scalar, int] = {}  # the dimension that an index is used for
    for index in indices if has_lists else ():
        for entry, extent in zip(index, bound, strict=True):
            if not isinstance(entry, str):
                smallest[entry] = min(extent, smallest.get(entry, extent))
    lists = {}
    for entry, extent in smallest.items():
        found = list_of(graph, vertex, entry, extent)
        if found is not None:
            lists[entry] = found
    if not lists and not any(einsum.has_arithmetic(operand) for operand in operands):
        return None
    of_tensor = orders.get(("tensor", name), ())
    of_labels = orders.get(("vertex", vertex.name), ())
    return Needed(bound, indices, einsum.extents, of_tensor, of_labels, tuple(lists.items()))


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


def cutting_axes(axes: LabelAxes) -> tuple[int, ...]:
    """Return the axes that cut some label, in order."""
    return tuple(sorted({axis for _, label_axes in axes for axis in label_axes}))


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


@bounded_cache(65536)
def _is_dimension_inside(
    mesh: Mesh, needed: Needed, dimension: int, axes: LabelAxes, cutting: tuple[int, ...]
) -> bool:
    """Return whether all ranks have what they need of a dimension.

    Where an index is arithmetic, their share of it must be one run.
    """
    if needed.is_listed(dimension):
        return not cutting
    for digits in _all_digits(mesh, (*cutting_axes(axes), *cutting)):
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


# ---- stars ---------------------------------------------------------------------------------------
#
# Blocks of the ranks that the middle of a star reaches, so that what a rank fetches from another is
# a block, too: nothing if the other's block is beside those that the middle reaches in two
# dimensions. Where blocks have gaps, or the middle has some, this says that it reaches all.


@bounded_cache(4096)
def borders_of_blocks(mesh: Mesh, side: Extent, axes: tuple[int, ...]) -> Ints:
    """Return where the blocks begin that these axes cut a dimension into, and the last one ends.

    If they have gaps, all of them count as one block.
    """
    extent = length_of(side)
    blocks = 1
    for window in mesh.windows(side):
        if axes and set(axes) == set(window[: len(axes)]) and cycles_of(side) == 1:
            blocks = prod(mesh.factors[axis] for axis in axes)
    return -(-np.arange(blocks + 1) * extent // blocks)


def reached_blocks(borders: Ints, first: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Return where the blocks that have indices from `first` up to `stop` begin and end."""
    reached_first = borders[np.searchsorted(borders, first, side="right") - 1]
    reached_stop = borders[np.searchsorted(borders, stop, side="left")]
    return reached_first, reached_stop


def ends_of_middle(needed: Needed, dimension: int, shares: Mapping[str, Runs]) -> tuple[int, int]:
    """Return the first index that the middle of a star needs, and the last one plus 1."""
    if needed.middle is not None and needed.has_arms(dimension):
        runs = needed.middle.runs(dimension, shares)
        if len(runs) == 1:
            return runs[0]
    return 0, needed.bound[dimension]
