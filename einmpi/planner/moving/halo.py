"""What a vertex needs of an operand with index arithmetic, such as u[i+1], and what that moves.

A rank needs more than its block, or another part of it: the difference comes from its neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd, prod
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from einmpi.graph.eingraph import Vertex
from einmpi.graph.einsum import OperandIndex
from einmpi.graph.index_arithmetic import Interval, arithmetic_labels, interval_of
from einmpi.graph.scalar import Scalar
from einmpi.planner.mesh import Mesh
from einmpi.planner.moving.runs import Runs, intersect, length, one_run, share, whole

Ints = npt.NDArray[np.int64]
# The axes that cut each label, for labels that are cut.
LabelAxes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
Item = TypeVar("Item", bound=Hashable)

MOST_RANKS_COUNTED = 32  # for the tables of the search; a plan itself is counted on all ranks
HALO_NEIGHBOURS = 3  # a rank and the two beside it, which exchange what is missing


@dataclass(frozen=True)
class Needed:
    """The part of a tensor that a rank needs for a vertex, as a function of its shares of labels.

    There is an index for each operand that reads the tensor.
    """

    bound: tuple[int, ...]  # of the tensor
    indices: tuple[OperandIndex, ...]
    extents: tuple[tuple[str, int], ...]  # of all labels of the vertex

    # The search asks very often; expressions are slow to hash and to go through.

    @cached_property
    def _hash(self) -> int:
        return hash((self.bound, self.indices, self.extents))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _labels(self) -> tuple[tuple[str, ...], ...]:
        every_dimension = []
        for dimension in range(len(self.bound)):
            found: dict[str, None] = {}
            for index in self.indices:
                found.update(dict.fromkeys(_labels_of(index[dimension])))
            every_dimension.append(tuple(found))
        return tuple(every_dimension)

    @cached_property
    def _plain_dimensions(self) -> tuple[bool, ...]:
        every_dimension = []
        for dimension in range(len(self.bound)):
            entries = {index[dimension] for index in self.indices}
            are_labels = all(isinstance(entry, str) for entry in entries)
            every_dimension.append(len(entries) == 1 and are_labels)
        return tuple(every_dimension)

    def labels(self, dimension: int) -> tuple[str, ...]:
        """Return the labels on which the needed indices of a dimension depend."""
        return self._labels[dimension]

    def is_plain(self, dimension: int) -> bool:
        """Return whether a dimension is indexed by one label and nothing else."""
        return self._plain_dimensions[dimension]

    def runs(self, dimension: int, shares: Mapping[str, Runs]) -> Runs:
        """Return the indices of a dimension that are needed, given the shares of its labels.

        Where indices are arithmetic, or differ, these are all indices between their bounds. A
        guarded index may be outside of the tensor, where nothing is needed.
        """
        extent = self.bound[dimension]
        if self.is_plain(dimension):
            return shares[self.labels(dimension)[0]]
        low = extent
        high = -1
        for index in self.indices:
            entry = index[dimension]
            if not isinstance(entry, str) and arithmetic_labels(entry) is None:
                return whole(extent)  # a gather may read any of it
            labels = _labels_of(entry)
            if not all(shares[label] for label in labels):
                continue
            bounds: dict[str, Interval] = {}
            for label in labels:
                bounds[label] = shares[label][0][0], shares[label][-1][1] - 1
            found = bounds[entry] if isinstance(entry, str) else interval_of(entry, bounds)
            if found is None:
                return whole(extent)
            low = min(low, found[0])
            high = max(high, found[1])
        return one_run(max(low, 0), min(high + 1, extent))


def _labels_of(entry: str | Scalar) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else arithmetic_labels(entry) or ()


def needed_of(vertex: Vertex, name: str, bound: tuple[int, ...]) -> Needed | None:
    """Return what a vertex needs of a tensor; None if that is a block for each operand.

    It is no block if an index is arithmetic. Then all operands that read the tensor share what is
    fetched.
    """
    einsum = vertex.computed_einsum
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


@lru_cache(maxsize=65536)
def needed_counts(
    mesh: Mesh,
    needed: Needed,
    dimension: int,
    axes: LabelAxes,
    source_axes: tuple[int, ...] | None,
    ranks: tuple[int, ...],
) -> Ints:
    """Return how many indices of a dimension each of some ranks needs.

    With `source_axes`, count only those in its block of a layout that these axes cut.
    """
    relevant = {axis for _, cutting in axes for axis in cutting}
    relevant.update(source_axes or ())
    known: dict[tuple[int, ...], int] = {}
    counts = np.empty(len(ranks), np.int64)
    for place, rank in enumerate(ranks):
        digits = mesh.digits(rank)
        key = tuple(digits[axis] for axis in sorted(relevant))
        if key not in known:
            runs = needed.runs(dimension, shares_of(mesh, needed, dimension, axes, digits))
            if source_axes is not None:
                cuts = tuple((axis, digits[axis]) for axis in source_axes)
                runs = intersect(runs, share(mesh, needed.bound[dimension], cuts))
            known[key] = length(runs)
        counts[place] = known[key]
    return counts


def halo_words(
    mesh: Mesh, needed: Needed, cuts: Sequence[int | None], state: Sequence[str | None]
) -> tuple[int, int]:
    """Return (words that all ranks together receive, those of them that come from other nodes).

    `cuts` has the dimension that each axis cuts where the operand is stored, `state` the label
    that it cuts in the vertex.
    """
    found = _received(mesh, needed, [cuts], [state], tuple(range(mesh.ranks)))
    return int(found.total[0, 0]), int(found.between[0, 0])


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
    wanted = np.ones(shape[1:], np.int64)
    kept = np.ones(shape, np.int64)
    kept_on_node = np.ones(shape, np.int64)
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
        counts = [needed_counts(mesh, needed, dimension, a, None, ranks) for a in axes]
        wanted *= np.array(counts)[state_numbers]
        for sources, product in ((cutting_by_layout, kept), (between_by_layout, kept_on_node)):
            source_axes, layout_numbers = _distinct(sources)
            table = np.empty((len(source_axes), len(axes), len(ranks)), np.int64)
            for row, source in enumerate(source_axes):
                for column, label_axes in enumerate(axes):
                    table[row, column] = needed_counts(
                        mesh, needed, dimension, label_axes, source, ranks
                    )
            product *= table[np.ix_(layout_numbers, state_numbers)]
    needed_words = wanted.sum(axis=1)
    return HaloTable(needed_words - kept.sum(axis=2), needed_words - kept_on_node.sum(axis=2))


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
        counts = needed_counts(mesh, needed, dimension, axes, None, ranks)
        bound.append(int(counts.max(initial=0)))
    return tuple(bound)
