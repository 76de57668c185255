"""Operands with index arithmetic, such as u[i+1]: what a rank fetches, and where it lies then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from einmpi.graph.arithmetic import call
from einmpi.graph.index_arithmetic import arithmetic_labels, interval_of
from einmpi.graph.scalar import Const, IndexEntries, Scalar
from einmpi.planner.mesh import Mesh
from einmpi.planner.moving.halo import (
    Needed,
    axes_of_labels,
    borders_of_blocks,
    cutting_axes,
    ends_of_middle,
    is_inside,
    reached_blocks,
    shares_of,
)
from einmpi.planner.moving.halo_words import most_needed
from einmpi.schedule.layout import Layout, ranks_along
from einmpi.schedule.moves import group_of, moves_of, runs_along, sent_and_received
from einmpi.schedule.regions import Region, Runs, intersect, locate, one_run
from einmpi.schedule.transfers import Moves


@dataclass(frozen=True)
class _NeededBlocks:
    """What each rank needs of a tensor, in place of a layout."""

    source: Layout
    needed: Needed
    state: tuple[str | None, ...]

    @property
    def mesh(self) -> Mesh:
        return self.source.mesh

    @property
    def bound(self) -> tuple[int, ...]:
        return self.needed.bound

    def runs(self, dimension: int, digits: Sequence[int]) -> Runs:
        """Return the indices of a dimension that the rank with these digits needs."""
        return self.needed.runs(dimension, self._shares(dimension, digits))

    def _shares(self, dimension: int, digits: Sequence[int]) -> Mapping[str, Runs]:
        axes = axes_of_labels(self.needed.labels(dimension), self.state)
        return shares_of(self.mesh, self.needed, dimension, axes, digits)

    def reached(self, dimension: int, digits: Sequence[int]) -> Runs:
        """Return the indices in blocks that the middle of a star reaches; all without a star."""
        ends = ends_of_middle(self.needed, dimension, self._shares(dimension, digits))
        side = self.needed.sides[dimension]
        borders = borders_of_blocks(self.mesh, side, self.source.axes_of(dimension))
        first, stop = reached_blocks(borders, *np.array(ends))
        return one_run(int(first), int(stop))

    def is_read(self, block: Region, digits: Sequence[int]) -> bool:
        """Return whether the rank with these digits reads of this block: it is at no corner."""
        outside = 0
        for dimension, runs in enumerate(block):
            outside += not intersect(runs, self.reached(dimension, digits))
        return outside <= 1

    def axes_of(self, dimension: int) -> tuple[int, ...]:
        """Return the axes on whose digits these indices depend."""
        return cutting_axes(axes_of_labels(self.needed.labels(dimension), self.state))


def halo_moves(
    source: Layout, needed: Needed, state: Sequence[str | None], rank: int
) -> tuple[Moves | None, Region]:
    """Return the moves that bring what a rank needs, and the region of the tensor it has then.

    There are no moves if every rank has all it needs in its block already.
    """
    mesh = source.mesh
    digits = mesh.digits(rank)
    stored = source.region(digits)
    if is_inside(mesh, needed, source.cuts, state):
        return None, stored
    wanted = _NeededBlocks(source, needed, tuple(state))
    own = tuple(wanted.runs(dimension, digits) for dimension in range(len(needed.bound)))
    axes = source.cutting_axes()
    group, me = group_of(mesh, axes, rank)
    sends, receives = sent_and_received(source, source, wanted, axes, rank)
    if needed.middle is not None:
        sends = sends.only(lambda number: wanted.is_read(stored, mesh.digits(group.rank(number))))
        receives = receives.only(
            lambda number: wanted.is_read(source.region(mesh.digits(group.rank(number))), digits)
        )
    most = most_needed(mesh, needed, state)
    max_elements = _most_moved(source, wanted, axes, digits)
    if max_elements is None:
        max_elements = max(source.max_elements() * mesh.ranks, most)
    moves = moves_of(group, me, sends, receives, False, max_elements)
    largest_block = max(source.max_elements(), most)
    return replace(moves, largest_block=largest_block, is_halo=True), own


def _most_moved(
    source: Layout, wanted: _NeededBlocks, axes: Sequence[int], digits: Sequence[int]
) -> int | None:
    """Return a bound on the elements that a member sends or receives, the same on all members.

    None if it is not known: it is where each member has, needs and keeps a box, and what it needs
    of a dimension depends on its place along the axes that cut this dimension.
    """
    sent = received = kept = 1
    for dimension in range(len(source.bound)):
        changing = [axis for axis in source.axes_of(dimension) if axis in axes]
        if changing != [axis for axis in wanted.axes_of(dimension) if axis in axes]:
            return None
        held = [runs for _, runs in runs_along(source, dimension, changing, digits)]
        needed = [runs for _, runs in runs_along(wanted, dimension, changing, digits)]
        if not len(held) == len(needed) == ranks_along(source.mesh, changing):
            return None
        if any(len(runs) != 1 for runs in (*held, *needed)):
            return None
        first, stop = np.array(held)[:, 0].T
        first_needed, stop_needed = np.array(needed)[:, 0].T
        both = np.minimum(stop, stop_needed) - np.maximum(first, first_needed)
        if both.min() <= 0:
            return None
        # What all members together need of each block.
        below_stop = _distances(first_needed, stop) - _distances(stop_needed, stop)
        below_first = _distances(first_needed, first) - _distances(stop_needed, first)
        sent *= int((below_stop - below_first).max())
        received *= int((stop_needed - first_needed).max())
        kept *= int(both.min())
    return max(sent, received) - kept


def _distances(
    starts: npt.NDArray[np.int64], places: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return for each place the sum of its distances from all starts before it."""
    starts = np.sort(starts)
    sums = np.concatenate(([0], np.cumsum(starts)))
    before = np.searchsorted(starts, places)
    return before * places - sums[before]


def index_in_region(
    entries: IndexEntries, region: Region, shares: Mapping[str, Runs]
) -> IndexEntries:
    """Return an index for a buffer that holds only this region, where it begins at 0.

    `shares` are the indices of the labels with which the rank computes.
    """
    found: list[str | Scalar] = []
    for entry, runs in zip(entries, region, strict=True):
        if isinstance(entry, str) or arithmetic_labels(entry) is None or not runs:
            found.append(entry)
        else:
            found.append(_index_in_runs(entry, runs, shares))
    return tuple(found)


def _index_in_runs(entry: Scalar, runs: Runs, shares: Mapping[str, Runs]) -> Scalar:
    """Return an index of a dimension for a buffer that holds one or two runs of it."""
    first_start, first_stop = runs[0]
    if len(runs) == 1:
        return _less(entry, first_start)
    second_start = runs[1][0]
    gap = second_start - first_stop
    bounds = {}
    for label in arithmetic_labels(entry) or ():
        if shares[label]:
            bounds[label] = shares[label][0][0], shares[label][-1][1] - 1
        else:
            return entry  # nothing is computed with it
    reached = interval_of(entry, bounds)
    if reached is not None and reached[1] < first_stop:
        return _less(entry, first_start)
    if reached is not None and reached[0] >= second_start:
        return _less(entry, first_start + gap)
    # Indices after the first run skip the gap.
    after_first_run = call("-", entry, Const(first_stop - 1))
    skipped = call("minimum", call("maximum", after_first_run, Const(0)), Const(gap))
    return _less(call("-", entry, skipped), first_start)


def _less(entry: Scalar, start: int) -> Scalar:
    return call("-", entry, Const(start)) if start else entry


def select_in_region(
    operand: int, entries: IndexEntries, region: Region, shares: Mapping[str, Runs]
) -> Iterator[tuple[int, int, Runs]]:
    """Yield what a kernel takes of the dimensions of a region that labels index, if not all."""
    for dimension, entry in enumerate(entries):
        if isinstance(entry, str) and shares[entry] != region[dimension]:
            yield operand, dimension, locate(shares[entry], region[dimension])
