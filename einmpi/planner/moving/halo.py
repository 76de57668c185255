"""What a vertex needs of an operand with index arithmetic, such as u[i+1], and what that moves.

A rank needs more than its block, or another part of it: the difference comes from its neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.graph.eingraph import Vertex
from einmpi.graph.index_arithmetic import Interval, arithmetic_labels, intervals_of
from einmpi.graph.scalar import IndexEntries, Scalar, unique
from einmpi.planner.mesh import Mesh

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
def share(mesh: Mesh, extent: int, cuts: tuple[tuple[int, int], ...]) -> Runs:
    """Return the indices of a label that belong to the given digits of a rank.

    `cuts` are the (axis, digit) pairs of the axes that cut the label. Example: on the mesh of
    6 = 3·2 ranks a label of extent 12 falls into 6 blocks of 2 indices, one for each pair of
    digits. The cut (0, 1) selects the blocks with the first digit 1: ((4, 8),). The cut (1, 1)
    selects the blocks with the second digit 1: ((2, 4), (6, 8), (10, 12)).
    """
    found: Runs | None = None
    for window in mesh.windows(extent):
        digits = tuple((axis, value) for axis, value in cuts if axis in window)
        if digits:
            selected = _share_of_window(mesh, extent, window, digits)
            found = selected if found is None else intersect(found, selected)
    return whole(extent) if found is None else found


def equal_share_length(mesh: Mesh, extent: int, axes: Sequence[int]) -> int | None:
    """Return how many indices of a label every rank has; None if some may have more than others.

    All have equally many where the axes lie in one window whose blocks are equally long.
    """
    if not axes:
        return extent
    for window in mesh.windows(extent):
        if set(axes).issubset(window) and extent % prod(mesh.factors[axis] for axis in window) == 0:
            return extent // prod(mesh.factors[axis] for axis in axes)
    return None


def _share_of_window(
    mesh: Mesh, extent: int, window: tuple[int, ...], digits: tuple[tuple[int, int], ...]
) -> Runs:
    """Return the indices whose block has the given digits.

    The axes of the window cut the label into m blocks: index i is in block ⌊i·m/extent⌋.
    """
    blocks = prod(mesh.factors[axis] for axis in window)
    first, last = _runs_of_blocks(mesh, window, digits)
    starts = -(-first * extent // blocks)
    stops = -(-last * extent // blocks)
    return joined(zip(starts.tolist(), stops.tolist(), strict=True))


@lru_cache(maxsize=65536)
def _runs_of_blocks(
    mesh: Mesh, window: tuple[int, ...], digits: tuple[tuple[int, int], ...]
) -> tuple[Ints, Ints]:
    """Return the blocks with the given digits as runs: their starts and their stops."""
    blocks = prod(mesh.factors[axis] for axis in window)
    digit = dict(digits)
    selected = np.arange(blocks)
    unit = blocks  # how many blocks in a row have the same digit on the current axis
    for axis in window:
        unit //= mesh.factors[axis]
        if axis in digit:
            selected = selected[selected // unit % mesh.factors[axis] == digit[axis]]
    is_first = np.diff(selected, prepend=-2) > 1
    is_last = np.diff(selected, append=blocks + 2) > 1
    return selected[is_first], selected[is_last] + 1


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

    # The search asks very often; expressions are slow to hash and to go through.

    @cached_property
    def _hash(self) -> int:
        return hash((self.bound, self.indices, self.extents))

    def __hash__(self) -> int:
        return self._hash

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


def needed_of(vertex: Vertex, name: str, bound: tuple[int, ...]) -> Needed | None:
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
    return Needed(bound, indices, einsum.extents)


def shares_of(
    mesh: Mesh, needed: Needed, dimension: int, axes: LabelAxes, digits: Sequence[int]
) -> dict[str, Runs]:
    """Return the share of each label of a dimension that the rank with these digits has."""
    cutting = dict(axes)
    extent = dict(needed.extents)
    shares = {}
    for label in needed.labels(dimension):
        cuts = tuple((axis, digits[axis]) for axis in cutting.get(label, ()))
        shares[label] = share(mesh, extent[label], cuts)
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
        stored = share(mesh, needed.bound[dimension], cuts)
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
