"""Moves in two levels, so that little crosses from node to node (docs/planner.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np

from einmpi.caches import bounded_cache
from einmpi.planner.mesh import Mesh
from einmpi.schedule.layout import PARTIAL, Layout, axes_that_cut, digits_along
from einmpi.schedule.moves import changing_axes, common, exchange, pass_on, reduction
from einmpi.schedule.regions import Runs, elements, intersect, subtract, union
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.transfers import Moves

# Partial results are first aggregated inside each node, then between nodes. Copies go to each node
# once and are passed on there.
#
# Example: two nodes of two ranks each. The ranks 0 and 1 hold one half each of a vector, the ranks
# 2 and 3 hold the same halves, and all four need all of it: nothing must cross between nodes, and
# one exchange inside each node does it. If only node 0 has the vector, the ranks 2 and 3 get one
# half each from there and exchange the halves: each element crosses once, not twice.


def reductions(
    source: Layout, middle: Layout, rank: int, tree: tuple[int, ...] = ()
) -> list[Moves]:
    """Return the steps from partial results to `middle`.

    Where both ranks of a node and different nodes have partial results, there are two steps: one
    inside nodes, then one between them. In a tree there is a step for each axis, that of its root
    last, so that the order of a sum does not depend on the number of ranks.
    """
    if tree:
        found = []
        for count in range(len(tree) - 1, -1, -1):
            pieces = _combined(middle, tree[:count])
            found.append(reduction(source, pieces, tree[count : count + 1], rank))
        return found
    partial = tuple(axes_that_cut(source.cuts, PARTIAL))
    if not partial:
        return []
    between = tuple(axis for axis in partial if axis < source.mesh.node_axes)
    inside = partial[len(between) :]
    if not between or not inside:
        return [reduction(source, middle, partial, rank)]
    return [
        reduction(source, _combined(middle, between), inside, rank),
        reduction(source, middle, between, rank),
    ]


def exchanges(
    source: Layout, middle: Layout, target: Layout, rank: int, stored: bool = False
) -> list[Moves]:
    """Return the moves from `middle` to `target`.

    The first moves bring elements into the target's block, the others complete it. Together they
    move no more than one direct exchange would. What several ranks of a node need from another
    node goes to one of them, which passes it on. `stored` says that a rank still has its whole
    block of `source`, not only its part in `middle`.
    """
    node_axes = target.mesh.node_axes
    axes = changing_axes(middle, target)
    inside_axes = []
    first_axes = []
    for axis in axes:
        if axis >= node_axes and target.cuts[axis] is None:
            inside_axes.append(axis)
        else:
            first_axes.append(axis)
    inside = tuple(inside_axes)
    first = tuple(first_axes)
    crosses_nodes = any(axis < node_axes for axis in first)
    if not inside or not crosses_nodes:
        return [exchange(source, middle, target, axes, rank)]
    moves = exchange(source, middle, target, first, rank)
    arrived = _combined(middle, first, target)
    replicated: tuple[int, ...] = ()
    if stored:
        replicated = tuple(axis for axis in inside if source.cuts[axis] is None)
    if not replicated:
        return [moves, pass_on(arrived, target, inside, rank)]
    # The ranks along these axes held the same in the source. They fetch different parts of what
    # is missing, but each keeps all that it has: the others need not send that.
    found = [replace(moves, own=common(source, target, rank), same_to_all=False)]
    recut = {source.cuts[axis] for axis in first}
    for dimension in range(len(source.bound)):
        if dimension in recut:
            missing = _Missing(arrived, source, dimension)
            found.append(pass_on(missing, target, replicated, rank))
    others = tuple(axis for axis in inside if axis not in replicated)
    if others:
        complete = _combined(replace(middle, splits=()), first, target)
        found.append(pass_on(complete, target, others, rank))
    return found


def bytes_between(schedule: Schedule, nodes: Sequence[int]) -> int:
    """Return the bytes that a rank receives from other nodes, given the node of each rank.

    The mesh need not know these nodes.
    """
    here = nodes[schedule.rank]
    total = 0
    # Elements received, by the identity of a transfer: repeated layers share the object.
    received_of: dict[int, int] = {}
    for step, times in chain.from_iterable(step.innermost() for step in schedule.steps):
        transfer = step.transfer
        if transfer is None:
            continue
        if id(transfer) not in received_of:
            received = 0
            for rank, region in transfer.incoming():
                if nodes[rank] != here:
                    received += elements(region)
            received_of[id(transfer)] = received
        (slot,) = step.reads  # a halo beside its block arrives in several
        total += times * received_of[id(transfer)] * np.dtype(slot.dtype).itemsize
    return total


@dataclass(frozen=True)
class _Combined:
    """What the ranks that differ along `axes` have of a layout, taken together.

    With `within`, only what a rank's block of that layout contains.
    """

    layout: Layout
    axes: tuple[int, ...]
    within: Layout | None = None

    @property
    def mesh(self) -> Mesh:
        return self.layout.mesh

    @property
    def bound(self) -> tuple[int, ...]:
        return self.layout.bound

    def runs(self, dimension: int, digits: Sequence[int]) -> Runs:
        found = self._combined_runs(dimension, digits)
        if self.within is not None:
            found = intersect(found, self.within.runs(dimension, digits))
        return found

    def _combined_runs(self, dimension: int, digits: Sequence[int]) -> Runs:
        # Axes between nodes split last: the pieces of the ranks along such an axis are adjacent,
        # and together they are what remains without that split.
        if all(split_dimension != dimension for _, split_dimension in self._unsplit.splits):
            # Without these axes the dimension is simply cut less.
            return self._uncut.runs(dimension, digits)
        cutting = [axis for axis in self.axes if self.layout.cuts[axis] == dimension]
        ranks = digits_along(self.mesh, cutting, digits)
        return union(self._unsplit.runs(dimension, others) for others in ranks)

    @cached_property
    def _unsplit(self) -> Layout:
        """The layout without the splits along the axes."""
        splits = tuple(pair for pair in self.layout.splits if pair[0] not in self.axes)
        return replace(self.layout, splits=splits)

    @cached_property
    def _uncut(self) -> Layout:
        """The layout without splits and cuts along the axes."""
        cuts = []
        for axis, cut in enumerate(self.layout.cuts):
            cuts.append(None if axis in self.axes else cut)
        return replace(self._unsplit, cuts=tuple(cuts))

    def axes_of(self, dimension: int) -> tuple[int, ...]:
        axes = set(self.layout.axes_of(dimension)) - set(self.axes)
        if self.within is not None:
            axes.update(self.within.axes_of(dimension))
        return tuple(sorted(axes))


# All ranks have the same ones. A process that lowers a plan for many ranks makes them once.
_combined = bounded_cache(1024)(_Combined)


@dataclass(frozen=True)
class _Missing:
    """The elements that arrived and that a rank lacks because of their index in one dimension.

    In the dimensions before that one the rank has the indices, so each missing element belongs to
    exactly one dimension: the first in which the rank lacks its index.
    """

    arrived: _Combined
    known: Layout
    dimension: int

    @property
    def mesh(self) -> Mesh:
        return self.arrived.mesh

    @property
    def bound(self) -> tuple[int, ...]:
        return self.arrived.bound

    def runs(self, dimension: int, digits: Sequence[int]) -> Runs:
        found = self.arrived.runs(dimension, digits)
        if dimension < self.dimension:
            return intersect(found, self.known.runs(dimension, digits))
        if dimension == self.dimension:
            return subtract(found, self.known.runs(dimension, digits))
        return found

    def axes_of(self, dimension: int) -> tuple[int, ...]:
        return tuple(sorted({*self.arrived.axes_of(dimension), *self.known.axes_of(dimension)}))
