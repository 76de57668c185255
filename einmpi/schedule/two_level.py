"""Moving level by level, so that little crosses from node to node: sums are formed inside a node first, copies go to
each node once and are passed on there (docs/planner.md)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from einmpi.planner.mesh import Mesh
from einmpi.schedule.layout import PARTIAL, Layout
from einmpi.schedule.moves import changing_axes, common, exchange, pass_on, reduction
from einmpi.schedule.regions import Runs, elements, intersect, subtract, union
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.transfers import Moves, Reduction


def reductions(source: Layout, middle: Layout, rank: int) -> list[Reduction]:
    """How partial results become `middle`: one step, or one inside of nodes and one between them."""
    partial = [axis for axis, cut in enumerate(source.cuts) if cut == PARTIAL]
    between = tuple(axis for axis in partial if axis < source.mesh.node_axes)
    inside = partial[len(between) :]
    if not between or not inside:
        return [reduction(source, middle, partial, rank)] if partial else []
    return [
        reduction(source, _Together(middle, between), inside, rank),
        reduction(source, middle, between, rank),
    ]


def exchanges(
    source: Layout, middle: Layout, target: Layout, rank: int, stored: bool = False
) -> list[Moves]:
    """How `middle` becomes `target`: the first moves bring elements into the target's block, the others complete it.

    They move no more than one direct exchange would. What several ranks of a node want comes to one of them, if it has
    to come from another node. `stored`: a rank has its whole block of `source`, also what others have been dealt.
    """
    nodes, axes = target.mesh.node_axes, changing_axes(middle, target)
    inside = tuple(axis for axis in axes if axis >= nodes and target.cuts[axis] is None)
    first = tuple(axis for axis in axes if axis not in inside)
    if not inside or not any(axis < nodes for axis in first):
        return [exchange(source, middle, target, axes, rank)]
    moves = exchange(source, middle, target, first, rank)
    arrived = _Together(middle, first, target)
    idle = tuple(axis for axis in inside if source.cuts[axis] is None) if stored else ()
    if not idle:
        return [moves, pass_on(arrived, target, inside, rank)]
    # Ranks that held the same have dealt it out, but keep what they want of it: the others do not send that.
    found = [replace(moves, own=common(source, target, rank), everybody=False)]
    for dimension in sorted({cut for axis in first if (cut := source.cuts[axis]) is not None}):
        found.append(pass_on(_Missing(arrived, source, dimension), target, idle, rank))
    rest = tuple(axis for axis in inside if axis not in idle)
    if rest:
        found.append(
            pass_on(_Together(replace(middle, splits=()), first, target), target, rest, rank)
        )
    return found


def bytes_between(schedule: Schedule, nodes: Sequence[int]) -> int:
    """Return the bytes that a rank receives from other nodes, given the node of each rank.

    The mesh need not know these nodes.
    """
    here = nodes[schedule.rank]
    total = 0
    words: dict[int, int] = {}  # by the identity of a transfer: repeated layers share the object
    for step in schedule.steps:
        transfer = step.transfer
        if transfer is None:
            continue
        if id(transfer) not in words:
            received = 0
            for rank, region in transfer.incoming():
                if nodes[rank] != here:
                    received += elements(region)
            words[id(transfer)] = received
        (slot,) = step.writes
        total += words[id(transfer)] * np.dtype(slot.dtype).itemsize
    return total


@dataclass(frozen=True)
class _Together:
    """What the ranks that differ along `axes` have of a layout, together; of it what a rank wants `within` another."""

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
        # Ranks along an axis that deals out have neighbouring pieces: axes between nodes deal out last.
        whole = replace(
            self.layout,
            splits=tuple(pair for pair in self.layout.splits if pair[0] not in self.axes),
        )
        cutting = [axis for axis in self.axes if self.layout.cuts[axis] == dimension]
        if not any(
            cut == dimension for _, cut in whole.splits
        ):  # then the axes cut nothing any more, and that is all
            kept = tuple(None if axis in cutting else cut for axis, cut in enumerate(whole.cuts))
            found = replace(whole, cuts=kept).runs(dimension, digits)
        else:
            parts = []
            for values in itertools.product(*(range(self.mesh.factors[axis]) for axis in cutting)):
                other = dict(zip(cutting, values, strict=True))
                parts.append(
                    whole.runs(
                        dimension, [other.get(axis, digit) for axis, digit in enumerate(digits)]
                    )
                )
            found = union(parts)
        return (
            found if self.within is None else intersect(found, self.within.runs(dimension, digits))
        )

    def axes_of(self, dimension: int) -> tuple[int, ...]:
        own = {axis for axis in self.layout.axes_of(dimension) if axis not in self.axes}
        return tuple(
            sorted(own.union(self.within.axes_of(dimension) if self.within is not None else ()))
        )


@dataclass(frozen=True)
class _Missing:
    """Of what arrived, the part that a rank does not have already since it lacks these indices of one dimension.

    Dimensions before it are those parts that the rank has: so each missing element belongs to one dimension.
    """

    arrived: _Together
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
        if dimension > self.dimension:
            return found
        keep = subtract if dimension == self.dimension else intersect
        return keep(found, self.known.runs(dimension, digits))

    def axes_of(self, dimension: int) -> tuple[int, ...]:
        return tuple(sorted({*self.arrived.axes_of(dimension), *self.known.axes_of(dimension)}))
