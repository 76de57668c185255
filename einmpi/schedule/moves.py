"""From one layout of a tensor to another: who aggregates which piece, who sends what to whom.

See docs/planner.md. Every element that a rank receives has exactly one sender.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Protocol

from einmpi.caches import bounded_cache
from einmpi.planner.mesh import Mesh
from einmpi.planner.moving.volume import axes_factors, replicas_share
from einmpi.schedule.layout import (
    PARTIAL,
    Cuts,
    Digits,
    Layout,
    digits_along,
    ranks_along,
    split_further,
)
from einmpi.schedule.regions import Region, Runs, elements, intersect, locate
from einmpi.schedule.transfers import Members, Moves, Regions, Unchanged

# A tensor gets from a `source` layout to a `target` layout by way of a `middle` layout, which has
# no partial results and no replicas that would send the same element twice:
#
#     source ── aggregate partial results ──▶ middle ── exchange ──▶ target
#
# Example: four ranks hold partial results of a vector of 8 elements, and all of them need all of
# it. In the middle layout rank r has the elements 2r and 2r + 1. Each rank aggregates those two
# over all ranks, in place in its source block, and then sends them to the three others.
#
# The sender of an element is the rank that holds it in `middle` and has the same digit as the
# receiver on every axis along which nothing changes. So a rank knows its messages by arithmetic.


class Blocks(Protocol):
    """The elements that each rank has: a layout, or a part of one."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def bound(self) -> tuple[int, ...]: ...

    def runs(self, dimension: int, digits: Sequence[int]) -> Runs:
        """Return the indices of a dimension that the rank with these digits has."""

    def axes_of(self, dimension: int) -> tuple[int, ...]:
        """Return the axes on whose digits these indices depend."""


@bounded_cache(1024)
def middle_layout(
    mesh: Mesh,
    bound: tuple[int, ...],
    source: Cuts,
    target: Cuts,
    orders: tuple[int, ...] = (),
    tree: tuple[int, ...] = (),
) -> Layout:
    """Return where the elements are once partial results are aggregated.

    If that is done in a tree, the axis at its leaves divides them first, as it is aggregated first.

    An axis that cuts nothing in the source, or has partial results, cuts what it cuts in the
    target: that costs nothing. Ranks that will all hold the same elements divide the work among
    them: those along an axis of partial results, and replicas if that moves less. The ranks of a
    node also divide what has to come from other nodes.
    """
    between_nodes = range(mesh.node_axes)
    partials_between = any(source[axis] == PARTIAL for axis in between_nodes)
    moves_between = any(source[axis] not in (None, target[axis]) for axis in between_nodes)
    replicas_help = PARTIAL in source and _replicas_share(mesh, len(bound), source, target)
    cuts = []
    recut = set()
    partial_axes = []
    replica_axes = []
    for axis, (have, want) in enumerate(zip(source, target, strict=True)):
        cut = want if have in (None, PARTIAL) else have
        cuts.append(cut)
        if want is not None:
            if cut != want:
                recut.add(want)
        elif have == PARTIAL:
            partial_axes.append(axis)
        elif have is None:
            if axis in between_nodes:
                useful = replicas_help and partials_between
            else:
                useful = replicas_help or moves_between
            if useful:
                replica_axes.append(axis)
    axes = partial_axes + replica_axes
    if tree:
        axes = replica_axes + [axis for axis in reversed(tree) if axis in partial_axes]
    return split_further(mesh, bound, tuple(cuts), axes, recut, orders)


def _replicas_share(mesh: Mesh, ndim: int, source: Cuts, target: Cuts) -> bool:
    """Return whether replicas share the work, as the planner assumes when it counts words."""

    def symbol(cut: int | None) -> int:
        if cut is None:
            return ndim
        return ndim + 1 if cut == PARTIAL else cut

    axes = []
    for factor, have, want in zip(mesh.factors, source, target, strict=True):
        axes.append((factor, symbol(have), symbol(want)))
    return replicas_share(axes_factors(tuple(axes), ndim), mesh.ranks)


def group_of(mesh: Mesh, axes: Sequence[int], rank: int) -> tuple[Members, int]:
    """Return the ranks that differ from `rank` on these axes only, and its position among them."""
    digits = mesh.digits(rank)
    first = rank  # the member with the digit 0 on all these axes
    place = 0
    distances = []
    for axis in axes:
        distance = prod(mesh.factors[axis + 1 :])
        distances.append((mesh.factors[axis], distance))
        first -= digits[axis] * distance
        place = place * mesh.factors[axis] + digits[axis]
    return Members(first, tuple(distances)), place


def changing_axes(middle: Layout, target: Layout) -> tuple[int, ...]:
    """Return the axes along which ranks exchange something between the two layouts."""
    axes = [axis for axis, _ in middle.splits]
    for axis, (have, want) in enumerate(zip(middle.cuts, target.cuts, strict=True)):
        if have is not None and have != want:
            axes.append(axis)
    return tuple(sorted(set(axes)))


def reduction(source: Layout, middle: Blocks, axes: tuple[int, ...], rank: int) -> Moves:
    """Return the moves by which ranks with partial results along `axes` get pieces of `middle`.

    They are places in the blocks of `source`.
    """
    group, me = group_of(source.mesh, axes, rank)
    digits = source.mesh.digits(rank)
    stored = source.region(digits)
    pieces = _by_member(axes, middle, digits, lambda d, runs: locate(runs, stored[d]))
    unchanged = _unchanged_dimensions((middle, source), axes, source)
    receives = Regions.same(group.count, pieces.of(me))
    moves = moves_of(group, me, pieces, receives, False, source.max_elements())
    return replace(moves, unchanged=unchanged)


def exchange(
    source: Layout, middle: Layout, target: Layout, axes: tuple[int, ...], rank: int
) -> Moves:
    """Return the moves from `middle` to `target` among ranks that differ on `axes`.

    The elements of `middle` are at their places in the blocks of `source`.
    """
    mesh = target.mesh
    group, me = group_of(mesh, axes, rank)
    sends, receives = sent_and_received(source, middle, target, axes, rank)
    # Where the target is not cut along these axes, all members need the same elements.
    gathering = [axis for axis in axes if target.cuts[axis] is None]
    same_to_all = len(gathering) == len(axes)
    copies = ranks_along(mesh, gathering)
    max_elements = max(middle.max_elements() * copies, target.max_elements())
    moves = moves_of(group, me, sends, receives, same_to_all, max_elements)
    largest_block = max(source.max_elements(), target.max_elements())
    unchanged = _unchanged_dimensions((source, middle, target), axes, target)
    return replace(moves, largest_block=largest_block, unchanged=unchanged)


def sent_and_received(
    source: Layout, middle: Blocks, target: Blocks, axes: tuple[int, ...], rank: int
) -> tuple[Regions, Regions]:
    """Return what a rank sends to each member of its group along some axes, and what it receives.

    A member has the elements of `middle`, at their places in its block of `source`, and needs those
    of `target`.
    """
    digits = source.mesh.digits(rank)
    stored = source.region(digits)
    dimensions = range(len(source.bound))
    held = [middle.runs(dimension, digits) for dimension in dimensions]
    wanted = [target.runs(dimension, digits) for dimension in dimensions]

    def place_to_send(dimension: int, theirs: Runs) -> Runs:
        return locate(intersect(held[dimension], theirs), stored[dimension])

    def place_to_receive(dimension: int, theirs: Runs) -> Runs:
        return locate(intersect(theirs, wanted[dimension]), wanted[dimension])

    sends = _by_member(axes, target, digits, place_to_send)
    return sends, _by_member(axes, middle, digits, place_to_receive)


def pass_on(held: Blocks, target: Layout, axes: tuple[int, ...], rank: int) -> Moves:
    """Return the moves by which ranks that differ on `axes` send what they hold to all others.

    Each rank has its own elements at their places in its block of `target` already.
    """
    group, me = group_of(target.mesh, axes, rank)
    digits = target.mesh.digits(rank)
    wanted = target.region(digits)
    receives = _by_member(axes, held, digits, lambda d, runs: locate(runs, wanted[d]))
    sends = Regions.same(group.count, receives.of(me))
    moves = moves_of(
        group, me, sends, receives, same_to_all=True, max_elements=target.max_elements()
    )
    unchanged = _unchanged_dimensions((held, target), axes, target)
    return replace(moves, own=None, unchanged=unchanged)


@bounded_cache(1024)
def _unchanged_dimensions(
    blocks: tuple[Blocks, ...], axes: tuple[int, ...], target: Layout
) -> tuple[Unchanged, ...]:
    """Return the dimensions in which ranks that differ on `axes` have the same indices.

    They have them in all of these blocks, the last of which is `target`. The answer is the same on
    all ranks: a process that lowers a plan for many of them looks once.
    """
    found = []
    for dimension in range(len(target.bound)):
        depends_on: set[int] = set()  # axes
        for each in blocks:
            depends_on.update(each.axes_of(dimension))
        if depends_on.isdisjoint(axes) and _are_equal(blocks, dimension, depends_on):
            found.append(Unchanged(dimension, target.max_extent(dimension)))
    return tuple(found)


def _are_equal(blocks: Sequence[Blocks], dimension: int, depends_on: set[int]) -> bool:
    """Return whether the indices of a dimension are the same in all of these blocks."""
    if all(isinstance(each, Layout) for each in blocks):
        # They are if the same axes cut the dimension, in the same order.
        return len({each.axes_of(dimension) for each in blocks}) == 1
    first = blocks[0]
    others = blocks[1:]
    digits = [0] * len(first.mesh.factors)
    for changed in digits_along(first.mesh, sorted(depends_on), digits):
        runs = first.runs(dimension, changed)
        if any(each.runs(dimension, changed) != runs for each in others):
            return False
    return True


def common(source: Layout, target: Layout, rank: int) -> tuple[Region, Region] | None:
    """Return the places, in a rank's source and target blocks, of the elements in both blocks."""
    digits = source.mesh.digits(rank)
    have = source.region(digits)
    want = target.region(digits)
    place_in_source = _common(have, want, have)
    place_in_target = _common(have, want, want)
    if place_in_source is None or place_in_target is None:
        return None
    return place_in_source, place_in_target


def redistribution(source: Layout, target: Layout, ranks: int, rank: int) -> Moves:
    """Return the moves between layouts on any two meshes, among all ranks."""
    max_elements = max(source.max_elements() * target.mesh.ranks, target.max_elements())
    return collection(source, [target.block(other) for other in range(ranks)], rank, max_elements)


def redistributed_elements(source: Layout, target: Layout) -> int:
    """Return how many elements all ranks receive when a tensor moves between two layouts."""
    count = 0
    for rank in range(target.mesh.ranks):
        wanted = target.block(rank)
        assert wanted is not None
        count += elements(wanted)
        stored = source.block(rank)
        if stored is not None:
            count -= elements(tuple(map(intersect, stored, wanted)))
    return count


def elements_between(source: Layout, target: Layout, nodes: Sequence[int]) -> int:
    """Return how many of these elements come from other nodes, given the node of each rank."""
    if len(set(nodes)) == 1:
        return 0
    if not source.bound:  # a number is moved as a vector of one element
        source, target = replace(source, bound=(1,)), replace(target, bound=(1,))
    count = 0
    for rank, node in enumerate(nodes):
        for sender, region in redistribution(source, target, len(nodes), rank).incoming():
            if nodes[sender] != node:
                count += elements(region)
    return count


def collection(
    source: Layout, wanted: Sequence[Region | None], rank: int, max_elements: int
) -> Moves:
    """Return the moves by which every rank gets the region that it needs: `wanted`.

    Of the ranks that hold the same elements, the one whose digits agree with the receiver's on
    all axes that make copies is the sender. A rank looks only at ranks it may exchange with.
    """
    stored = source.block(rank)
    own = wanted[rank]
    sends: list[Region | None] = [None] * len(wanted)
    receives: list[Region | None] = [None] * len(wanted)
    like = rank % source.mesh.ranks  # a rank outside the mesh receives like one that is in it
    axes = source.cutting_axes()
    group, _ = group_of(source.mesh, axes, like)
    if stored is not None:
        for first in range(0, len(wanted), source.mesh.ranks):
            for member in group:
                receiver = first + member
                theirs = wanted[receiver] if receiver < len(wanted) else None
                if theirs is not None:
                    sends[receiver] = _common(stored, theirs, stored)
    if own is not None:

        def place_to_receive(dimension: int, theirs: Runs) -> Runs:
            return locate(intersect(theirs, own[dimension]), own[dimension])

        found = _by_member(axes, source, source.mesh.digits(like), place_to_receive)
        for number, region in found.each():
            receives[group.rank(number)] = region
    return moves_of(
        Members(0, ((len(wanted), 1),)),
        rank,
        Regions.listed(sends),
        Regions.listed(receives),
        same_to_all=False,
        max_elements=max_elements,
    )


def moves_of(
    group: Members,
    me: int,
    sends: Regions,
    receives: Regions,
    same_to_all: bool,
    max_elements: int,
) -> Moves:
    """Turn the message of a rank to itself into a copy."""
    source = sends.of(me)
    target = receives.of(me)
    own = None
    if source is not None and target is not None:
        own = source, target
    sends = replace(sends, without=me)
    receives = replace(receives, without=me)
    return Moves(group, me, sends, receives, own, same_to_all, max_elements)


def _common(one: Region, two: Region, stored: Region) -> Region | None:
    """Return the places in a third region of the elements that two regions share, if any."""
    shared = []
    for runs, other_runs in zip(one, two, strict=True):
        both = intersect(runs, other_runs)
        if not both:
            return None
        shared.append(both)
    return tuple(map(locate, shared, stored))


def _by_member(
    axes: tuple[int, ...],
    blocks: Blocks,
    digits: Sequence[int],
    place: Callable[[int, Runs], Runs],
) -> Regions:
    """Return for each member of a group the places of its runs in every dimension.

    `place` gives the places of some runs of a dimension; a member without elements gets none.
    Members differ on `axes`, but the runs of a dimension depend on few of those: they are worked
    out once for each combination of digits, not for each member.
    """
    mesh = blocks.mesh
    assert blocks.bound, "a number is moved as a vector of one element"
    # How far apart the numbers of two members are that are neighbours along an axis.
    far = {axis: ranks_along(mesh, axes[k + 1 :]) for k, axis in enumerate(axes)}

    def part_of(number: int, some: Sequence[int]) -> int:
        """Return the number of the member with the same digits on some axes, and 0 on others."""
        return sum(number // far[axis] % mesh.factors[axis] * far[axis] for axis in some)

    found: dict[int, Region] = {0: ()}
    free = list(axes)  # those on which no dimension so far depends
    for dimension in range(len(blocks.bound)):
        changing = [axis for axis in blocks.axes_of(dimension) if axis in axes]
        known = [axis for axis in changing if axis not in free]
        places = defaultdict(list)  # by the part of a member's number that is known already
        for changed, runs in runs_along(blocks, dimension, changing, digits):
            placed = place(dimension, runs)
            if placed:
                number = sum(changed[axis] * far[axis] for axis in changing)
                same = part_of(number, known)
                places[same].append((number - same, placed))
        longer = {}
        for number, region in found.items():
            for distance, placed in places[part_of(number, known)]:
                longer[number + distance] = (*region, placed)
        found = longer
        free = [axis for axis in free if axis not in changing]
    return Regions(
        ranks_along(mesh, axes), found, tuple((mesh.factors[axis], far[axis]) for axis in free)
    )


def runs_along(
    blocks: Blocks, dimension: int, axes: Sequence[int], digits: Sequence[int]
) -> Iterator[tuple[Digits, Runs]]:
    """Yield the indices of a dimension on ranks that differ on these axes only, where it has any.

    The last axis is the fastest.
    """
    if isinstance(blocks, Layout):
        yield from blocks.runs_along(dimension, axes, digits)
        return
    for changed in digits_along(blocks.mesh, axes, digits):
        runs = blocks.runs(dimension, changed)
        if runs:
            yield changed, runs
