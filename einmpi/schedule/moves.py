"""From one layout of a tensor to another: who reduces which piece, who sends what to whom (docs/planner.md).

Every element has one sender for each receiver: the rank that holds it and agrees with the receiver on all other axes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Protocol

import numpy as np

from einmpi.planner.mesh import Mesh
from einmpi.planner.volume import held_factors, replicas_share
from einmpi.schedule.layout import PARTIAL, Cuts, Layout, dealt_out
from einmpi.schedule.regions import Region, Runs, intersect, locate
from einmpi.schedule.transfers import Moves, Reduction


class Blocks(Protocol):
    """Elements that each rank has: a layout, or a part of one."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def bound(self) -> tuple[int, ...]: ...

    def runs(self, dimension: int, digits: Sequence[int]) -> Runs:
        """The indices of a dimension that the rank with these digits has."""

    def axes_of(self, dimension: int) -> tuple[int, ...]:
        """The axes on whose digits that depends."""


def reduced(mesh: Mesh, bound: tuple[int, ...], source: Cuts, target: Cuts) -> Layout:
    """Where the elements are when partial results have been aggregated, on their way from `source` to `target`.

    What the target wants lies there already where that is free. Ranks that all want everything deal the work out; also
    those of a node deal out what has to come from other nodes.
    """
    pairs = list(zip(source, target, strict=True))
    cuts = tuple(t if s in (None, PARTIAL) else s for s, t in pairs)
    axes = [axis for axis, (s, t) in enumerate(pairs) if s == PARTIAL and t is None]
    shared = PARTIAL in source and _replicas_share(mesh, len(bound), source, target)
    crossing = any(s is not None and s != t for s, t in pairs[: mesh.node_axes])
    summing = PARTIAL in source[: mesh.node_axes]  # from node to node
    for axis in (axis for axis, pair in enumerate(pairs) if pair == (None, None)):
        if shared and summing if axis < mesh.node_axes else shared or crossing:
            axes.append(axis)
    turning = {t for m, t in zip(cuts, target, strict=True) if t is not None and m != t}
    return dealt_out(mesh, bound, cuts, axes, turning)


def _replicas_share(mesh: Mesh, ndim: int, source: Cuts, target: Cuts) -> bool:
    """As the planner's volume has it."""

    def symbol(cut: int | None) -> int:
        return ndim if cut is None else ndim + 1 if cut == PARTIAL else cut

    axes = tuple(
        (f, symbol(s), symbol(t)) for f, s, t in zip(mesh.factors, source, target, strict=True)
    )
    return replicas_share(held_factors(axes, ndim), mesh.ranks)


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


def changing_axes(middle: Layout, target: Layout) -> tuple[int, ...]:
    """The axes along which ranks exchange something on the way from one to the other."""
    dealt = {axis for axis, _ in middle.splits}
    pairs = enumerate(zip(middle.cuts, target.cuts, strict=True))
    return tuple(axis for axis, (m, t) in pairs if axis in dealt or (m is not None and m != t))


def exchange(
    source: Layout, middle: Layout, target: Layout, axes: tuple[int, ...], rank: int
) -> Moves:
    """From `middle`, stored at its places in the blocks of `source`, to `target`, among ranks that differ on `axes`."""
    group, me = group_of(target.mesh, axes, rank)
    digits = target.mesh.digits(rank)
    stored, held, wanted = (layout.region(digits) for layout in (source, middle, target))
    sends = _by_member(
        axes, target, digits, lambda d, runs: locate(intersect(held[d], runs), stored[d])
    )
    receives = _by_member(
        axes, middle, digits, lambda d, runs: locate(intersect(runs, wanted[d]), wanted[d])
    )
    # Members that all want the same get the same: nothing that changes on these axes is cut in the target.
    everybody = all(target.cuts[axis] is None for axis in axes)
    copies = prod(target.mesh.factors[axis] for axis in axes if target.cuts[axis] is None)
    most = max(middle.most() * copies, target.most())
    return _moves(group, me, sends, receives, everybody, most)


def pass_on(held: Blocks, target: Layout, axes: tuple[int, ...], rank: int) -> Moves:
    """What ranks that differ on `axes` hold goes to all of them, to its place in the blocks of `target`, where each
    rank has its own already."""
    group, me = group_of(target.mesh, axes, rank)
    digits = target.mesh.digits(rank)
    wanted = target.region(digits)
    receives = _by_member(axes, held, digits, lambda d, runs: locate(runs, wanted[d]))
    sends = [receives[me]] * len(group)
    return replace(_moves(group, me, sends, receives, True, target.most()), own=None)


def common(source: Layout, target: Layout, rank: int) -> tuple[Region, Region] | None:
    """Where what a rank has of both lies: in its block of the one, and of the other."""
    digits = source.mesh.digits(rank)
    one, two = source.region(digits), target.region(digits)
    there, here = _common(one, two, one), _common(one, two, two)
    return None if there is None or here is None else (there, here)


def _moves(
    group: tuple[int, ...],
    me: int,
    sends: list[Region | None],
    receives: list[Region | None],
    everybody: bool,
    most: int,
) -> Moves:
    """What a rank would send to itself it copies."""
    source, target = sends[me], receives[me]
    sends[me] = receives[me] = None
    own = None if source is None or target is None else (source, target)
    return Moves(group, me, tuple(sends), tuple(receives), own, everybody, most)


def reduction(source: Layout, middle: Blocks, axes: Sequence[int], rank: int) -> Reduction:
    """The pieces of `middle` in the blocks of `source`, for the ranks that hold partial results along `axes`."""
    group, me = group_of(source.mesh, axes, rank)
    digits = source.mesh.digits(rank)
    stored = source.region(digits)
    pieces = _by_member(tuple(axes), middle, digits, lambda d, runs: locate(runs, stored[d]))
    return Reduction(group, me, tuple(pieces))


def redistribution(source: Layout, target: Layout, ranks: int, rank: int) -> Moves:
    """Between layouts on any two meshes, among all ranks."""
    most = max(source.most() * target.mesh.ranks, target.most())
    return collection(source, [target.block(other) for other in range(ranks)], rank, most)


def collection(source: Layout, wanted: Sequence[Region | None], rank: int, most: int) -> Moves:
    """Every rank gets a region that it wants, from the ranks that hold it. Nobody looks at more than is needed.

    Of the ranks that hold the same, the one that agrees with the receiver on all axes that make copies sends.
    """
    stored, own = source.block(rank), wanted[rank]
    sends: list[Region | None] = [None] * len(wanted)
    receives: list[Region | None] = [None] * len(wanted)
    like = rank % source.mesh.ranks  # a rank that is not in the mesh receives like one that is
    axes = source.cutting_axes()
    group, _ = group_of(source.mesh, axes, like)
    if stored is not None:
        for first in range(0, len(wanted), source.mesh.ranks):
            for to in (first + member for member in group if first + member < len(wanted)):
                theirs = wanted[to]
                sends[to] = None if theirs is None else _common(stored, theirs, stored)
    if own is not None:
        found = _by_member(
            axes,
            source,
            source.mesh.digits(like),
            lambda d, runs: locate(intersect(runs, own[d]), own[d]),
        )
        for member, region in zip(group, found, strict=True):
            receives[member] = region
    return _moves(tuple(range(len(wanted))), rank, sends, receives, False, most)


def _common(one: Region, two: Region, stored: Region) -> Region | None:
    """Where the elements that two regions share lie in a third; None if there are none."""
    shared = []
    for mine, theirs in zip(one, two, strict=True):
        shared.append(intersect(mine, theirs))
        if not shared[-1]:
            return None
    return tuple(map(locate, shared, stored))


def _by_member(
    axes: tuple[int, ...],
    varying: Blocks,
    digits: Sequence[int],
    place: Callable[[int, Runs], Runs],
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
