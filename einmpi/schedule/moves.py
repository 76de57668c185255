"""From one layout of a tensor to another: who reduces which piece, who sends what to whom (docs/planner.md).

Every element has one sender for each receiver: the rank that holds it and agrees with the receiver on all other axes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import numpy as np

from einmpi.plan.memory import longest_share
from einmpi.plan.mesh import Mesh
from einmpi.plan.volume import held_factors, reduction_surplus
from einmpi.schedule.regions import Cuts, Region, Runs, intersect, locate, share, split
from einmpi.schedule.steps import Moves

Reduction: TypeAlias = tuple[tuple[int, ...], int, tuple[Region | None, ...]]  # group, own position, pieces
PARTIAL = -1  # in place of a dimension: the ranks of this axis hold partial results


@dataclass(frozen=True)
class Holding:
    """A layout, and axes that deal out further what it leaves on a rank: (axis, dimension) pairs."""

    mesh: Mesh
    bound: tuple[int, ...]
    cuts: Cuts
    splits: tuple[tuple[int, int], ...] = ()

    def runs(self, dimension: int, digits: Sequence[int]) -> Runs:
        cuts = tuple((axis, digits[axis]) for axis, cut in enumerate(self.cuts) if cut == dimension)
        found = share(self.mesh, self.bound[dimension], cuts)
        axes = [axis for axis, cut in self.splits if cut == dimension]
        if not axes:
            return found
        which = 0
        for axis in axes:
            which = which * self.mesh.factors[axis] + digits[axis]
        return split(found, prod(self.mesh.factors[axis] for axis in axes), which)

    def region(self, digits: Sequence[int]) -> Region:
        return tuple(self.runs(dimension, digits) for dimension in range(len(self.bound)))

    def most(self) -> int:
        """A bound on the elements of a rank, equal for all ranks."""
        count = 1
        for dimension, extent in enumerate(self.bound):
            cuts = [axis for axis, cut in enumerate(self.cuts) if cut == dimension]
            pieces = prod(self.mesh.factors[axis] for axis, cut in self.splits if cut == dimension)
            count *= -(-longest_share(self.mesh, extent, cuts) // pieces)
        return count

    def axes_of(self, dimension: int) -> tuple[int, ...]:
        """The axes on whose digits a rank's runs of a dimension depend."""
        return tuple(axis for axis, cut in [*enumerate(self.cuts), *self.splits] if cut == dimension)


def dealt_out(mesh: Mesh, bound: tuple[int, ...], cuts: Cuts, axes: Sequence[int]) -> Holding:
    """The layout `cuts` with the blocks dealt out over `axes` too, along dimensions that give equal pieces."""
    left = [extent // prod(mesh.factors[a] for a, cut in enumerate(cuts) if cut == d) for d, extent in enumerate(bound)]
    splits = []
    for axis in axes:
        factor = mesh.factors[axis]
        # The first dimension if it will do: its pieces lie in one piece in memory.
        even = [d for d, extent in enumerate(left) if extent and extent % factor == 0]
        long = [d for d, extent in enumerate(left) if extent >= 32 * factor]
        chosen = (even or long or [left.index(max(left))])[0]
        left[chosen] = left[chosen] // factor
        splits.append((axis, chosen))
    return Holding(mesh, bound, cuts, tuple(splits))


def reduced(mesh: Mesh, bound: tuple[int, ...], source: Cuts, target: Cuts) -> Holding:
    """Where the elements are when partial results have been aggregated, on their way from `source` to `target`.

    What the target wants lies there already where that is free. Ranks that all want everything deal the work out.
    """
    cuts = tuple(t if s in (None, PARTIAL) else s for s, t in zip(source, target, strict=True))
    axes = [axis for axis, cut in enumerate(source) if cut == PARTIAL and target[axis] is None]
    if PARTIAL in source and _replicas_share(mesh, len(bound), source, target):
        axes += [a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s is None and t is None]
    return dealt_out(mesh, bound, cuts, axes)


def _replicas_share(mesh: Mesh, ndim: int, source: Cuts, target: Cuts) -> bool:
    """As the planner's volume has it."""

    def symbol(cut: int | None) -> int:
        return ndim if cut is None else ndim + 1 if cut == PARTIAL else cut

    axes = tuple((f, symbol(s), symbol(t)) for f, s, t in zip(mesh.factors, source, target, strict=True))
    return bool(reduction_surplus(held_factors(axes, ndim), mesh.ranks) > 0)


def group_of(mesh: Mesh, axes: Sequence[int], rank: int) -> tuple[tuple[int, ...], int]:
    """(ranks that differ from `rank` on these axes at most, its own position among them)."""
    weights = [prod(mesh.factors[axis + 1 :]) for axis in range(len(mesh.factors))]
    digits = mesh.digits(rank)
    first = rank - sum(digits[axis] * weights[axis] for axis in axes)
    members = np.array([first])
    for axis in axes:
        members = (members[:, None] + np.arange(mesh.factors[axis]) * weights[axis]).ravel()
    group = tuple(members.tolist())
    return group, group.index(rank)


def exchange(source: Holding, middle: Holding, target: Holding, rank: int) -> Moves:
    """From `middle`, stored at its places in the blocks of `source`, to `target`."""
    dealt = {axis for axis, _ in middle.splits}
    pairs = enumerate(zip(middle.cuts, target.cuts, strict=True))
    axes = tuple(axis for axis, (m, t) in pairs if axis in dealt or (m is not None and m != t))
    group, me = group_of(target.mesh, axes, rank)
    digits = target.mesh.digits(rank)
    stored, held, wanted = (holding.region(digits) for holding in (source, middle, target))
    sends = _by_member(axes, target, digits, lambda d, runs: locate(intersect(held[d], runs), stored[d]))
    receives = _by_member(axes, middle, digits, lambda d, runs: locate(intersect(runs, wanted[d]), wanted[d]))
    own = sends[me], receives[me]
    sends[me] = receives[me] = None
    here = None if own[0] is None or own[1] is None else (own[0], own[1])
    # Members that all want the same get the same: nothing that changes on these axes is cut in the target.
    everybody = all(target.cuts[axis] is None for axis in axes)
    copies = prod(target.mesh.factors[axis] for axis in axes if target.cuts[axis] is None)
    most = max(middle.most() * copies, target.most())
    return Moves(group, me, tuple(sends), tuple(receives), here, everybody, most)


def reduction(source: Holding, middle: Holding, axes: Sequence[int], rank: int) -> Reduction:
    """The pieces of `middle` in the blocks of `source`, for the ranks that hold partial results along `axes`."""
    group, me = group_of(source.mesh, axes, rank)
    digits = source.mesh.digits(rank)
    stored = source.region(digits)
    pieces = _by_member(tuple(axes), middle, digits, lambda d, runs: locate(runs, stored[d]))
    return group, me, tuple(pieces)


def _by_member(
    axes: tuple[int, ...], varying: Holding, digits: Sequence[int], place: Callable[[int, Runs], Runs]
) -> list[Region | None]:
    """For each member of the group the places that `place` gives for its runs of every dimension; None for nothing."""
    mesh = varying.mesh
    count = prod(mesh.factors[axis] for axis in axes)
    columns = []
    for dimension in range(len(varying.bound)):
        changing = [axis for axis in varying.axes_of(dimension) if axis in axes]
        found: list[Runs] = []
        for values in itertools.product(*(range(mesh.factors[axis]) for axis in changing)):
            changed = list(digits)
            for axis, value in zip(changing, values, strict=True):
                changed[axis] = value
            found.append(place(dimension, varying.runs(dimension, changed)))
        which = np.zeros(count, int)
        for axis in changing:
            later = prod(mesh.factors[other] for other in axes[axes.index(axis) + 1 :])
            which = which * mesh.factors[axis] + np.arange(count) // later % mesh.factors[axis]
        columns.append([found[k] for k in which.tolist()])
    assert columns, "a number is moved as a vector of one element"
    return [region if all(region) else None for region in zip(*columns, strict=True)]
