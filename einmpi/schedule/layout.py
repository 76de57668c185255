"""The layout of a tensor on the ranks: which elements each of them holds (docs/planner.md)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from math import prod
from typing import TypeAlias

from einmpi.planner.memory import longest_share
from einmpi.planner.mesh import Extent, Mesh, sides
from einmpi.schedule.regions import Region, Runs, length, shape, share, split
from einmpi.units import counted

# For each axis of the mesh: the dimension that it cuts, None where its ranks all hold the same, or
# PARTIAL. On the mesh of 6 = 3·2 ranks, (0, None) cuts the rows of a matrix into three parts and
# gives each part to two ranks.
Cuts: TypeAlias = tuple[int | None, ...]
Digits: TypeAlias = tuple[int, ...]  # of a rank
PARTIAL = -1  # in place of a dimension: the ranks of this axis hold partial results

LONG_PIECE = 32  # indices a rank; pieces that long may be unequal without much harm


@dataclass(frozen=True)
class Layout:
    """How a tensor is distributed over the ranks of a mesh.

    `splits` are (axis, dimension) pairs: axes that divide further what the cuts leave on a rank.
    `orders` are those of the digits of dimensions, where they are not all that of the mesh.
    """

    mesh: Mesh
    bound: tuple[int, ...]
    cuts: Cuts
    splits: tuple[tuple[int, int], ...] = ()
    orders: tuple[int, ...] = ()

    @cached_property
    def sides(self) -> tuple[Extent, ...]:
        """The extents with the orders of their digits."""
        return sides(self.bound, self.orders)

    def __str__(self) -> str:
        """Return text such as [4,2] on 8 ranks."""
        parts = ",".join(map(str, self.mesh.parts(self.cuts, range(len(self.bound)))))
        return f"[{parts}] on {counted(self.mesh.ranks, 'rank')}"

    def runs(self, dimension: int, digits: Sequence[int]) -> Runs:
        """Return the indices of a dimension that the rank with these digits holds."""
        cutting, splitting = self._axes[dimension]
        found = share(
            self.mesh, self.sides[dimension], tuple([(axis, digits[axis]) for axis in cutting])
        )
        if not splitting:
            return found
        which = 0
        for axis in splitting:
            which = which * self.mesh.factors[axis] + digits[axis]
        return split(found, ranks_along(self.mesh, splitting), which)

    def runs_along(
        self, dimension: int, axes: Sequence[int], digits: Sequence[int]
    ) -> Iterator[tuple[Digits, Runs]]:
        """Yield the indices of a dimension on ranks that differ on these axes only.

        Ranks without any are left out. Where thousands of ranks divide a few indices among them,
        only those that get one are looked at.
        """
        _, splitting = self._axes[dimension]
        dividing = [axis for axis in axes if axis in splitting]
        others = [axis for axis in axes if axis not in splitting]
        ranks = digits_along(self.mesh, others, digits)
        if dividing:
            ranks = chain.from_iterable(
                self._with_an_index(dimension, dividing, changed) for changed in ranks
            )
        for changed in ranks:
            runs = self.runs(dimension, changed)
            if runs:
                yield changed, runs

    def _with_an_index(
        self, dimension: int, axes: Sequence[int], digits: Digits
    ) -> Iterator[Digits]:
        """Yield the ranks along some of the axes that split a dimension: those with an index of it.

        Others may be among them only if there are not many ranks for each index.
        """
        cutting, splitting = self._axes[dimension]
        cuts = tuple([(axis, digits[axis]) for axis in cutting])
        count = length(share(self.mesh, self.sides[dimension], cuts))
        if count >= ranks_along(self.mesh, axes):
            yield from digits_along(self.mesh, axes, digits)
            return
        pieces = ranks_along(self.mesh, splitting)
        fixed = [axis for axis in splitting if axis not in axes]
        for place in range(count):
            which = ((place + 1) * pieces - 1) // count
            changed = list(digits)
            for axis in reversed(splitting):
                which, changed[axis] = divmod(which, self.mesh.factors[axis])
            if all(changed[axis] == digits[axis] for axis in fixed):
                yield tuple(changed)

    def region(self, digits: Sequence[int]) -> Region:
        """Return the elements that the rank with these digits holds."""
        return tuple(self.runs(dimension, digits) for dimension in range(len(self.bound)))

    def block(self, rank: int) -> Region | None:
        """Return the elements that a rank holds; None for a rank that is not in the mesh."""
        if rank not in self._blocks:
            is_idle = rank >= self.mesh.ranks
            self._blocks[rank] = None if is_idle else self.region(self.mesh.digits(rank))
        return self._blocks[rank]

    def block_shape(self, rank: int) -> tuple[int, ...] | None:
        """Return the extents of a rank's block; None for a rank that is not in the mesh."""
        if rank not in self._block_shapes:
            block = self.block(rank)
            self._block_shapes[rank] = None if block is None else shape(block)
        return self._block_shapes[rank]

    @cached_property
    def _block_shapes(self) -> dict[int, tuple[int, ...] | None]:
        """The extents of blocks that were asked for, by rank."""
        return {}

    @cached_property
    def _blocks(self) -> dict[int, Region | None]:
        """The blocks that were asked for, by rank."""
        return {}

    def owns(self, rank: int) -> bool:
        """Return whether the rank is the first of those that hold the same elements."""
        if rank >= self.mesh.ranks:
            return False
        for digit, cut in zip(self.mesh.digits(rank), self.cuts, strict=True):
            if cut is None and digit > 0:
                return False
        return True

    def cutting_axes(self) -> tuple[int, ...]:
        """Return the axes on whose digits a rank's block depends."""
        copying = set(axes_that_cut(self.cuts, None)) - {axis for axis, _ in self.splits}
        return tuple(axis for axis in range(len(self.cuts)) if axis not in copying)

    def max_elements(self) -> int:
        """Return a bound on the elements of a rank, equal for all ranks."""
        return self._max_elements

    @cached_property
    def _max_elements(self) -> int:
        return prod(self.max_extent(dimension) for dimension in range(len(self.bound)))

    def max_extent(self, dimension: int) -> int:
        """Return a bound on the indices of a dimension on a rank, equal for all ranks."""
        cutting, splitting = self._axes[dimension]
        longest = longest_share(self.mesh, self.sides[dimension], cutting)
        return -(-longest // ranks_along(self.mesh, splitting))

    def axes_of(self, dimension: int) -> tuple[int, ...]:
        """Return the axes on whose digits a rank's runs of a dimension depend."""
        cutting, splitting = self._axes[dimension]
        return cutting + splitting

    @cached_property
    def _axes(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """For each dimension, the axes that cut it and those that split what the cuts leave."""
        found = []
        for dimension in range(len(self.bound)):
            splitting = tuple(axis for axis, which in self.splits if which == dimension)
            found.append((tuple(axes_that_cut(self.cuts, dimension)), splitting))
        return tuple(found)


def axes_that_cut(cuts: Cuts, dimension: int | None) -> list[int]:
    """Return the axes that cut a dimension; with None, those that cut nothing."""
    return [axis for axis, cut in enumerate(cuts) if cut == dimension]


def ranks_along(mesh: Mesh, axes: Iterable[int]) -> int:
    """Return the number of ranks that differ on these axes only."""
    return prod(mesh.factors[axis] for axis in axes)


def digits_along(mesh: Mesh, axes: Sequence[int], digits: Sequence[int]) -> Iterator[Digits]:
    """Yield the digits of the ranks that differ on these axes only, the last axis fastest."""
    for values in product(*(range(mesh.factors[axis]) for axis in axes)):
        changed = list(digits)
        for axis, value in zip(axes, values, strict=True):
            changed[axis] = value
        yield tuple(changed)


def rank_of(mesh: Mesh, digits: Sequence[int]) -> int:
    """Return the rank with these digits."""
    rank = 0
    for factor, digit in zip(mesh.factors, digits, strict=True):
        rank = rank * factor + digit
    return rank


def split_further(
    mesh: Mesh,
    bound: tuple[int, ...],
    cuts: Cuts,
    axes: Sequence[int],
    recut: Collection[int] = (),
    orders: tuple[int, ...] = (),
) -> Layout:
    """Return the layout `cuts` with its blocks divided over `axes` too, into equal pieces.

    Dimensions in `recut`, which another axis is about to cut, are the last choice: only some
    ranks could use their pieces. Axes between nodes divide last, so that the ranks of a node have
    neighbouring pieces.
    """
    left = []  # the indices of each dimension that remain on a rank
    for dimension, extent in enumerate(bound):
        left.append(extent // ranks_along(mesh, axes_that_cut(cuts, dimension)))
    # The first dimension that suits is best: its pieces are contiguous in memory.
    candidates = sorted(range(len(bound)), key=lambda dimension: (dimension in recut, dimension))
    splits = []
    for axis in sorted(axes, key=lambda axis: axis < mesh.node_axes):
        factor = mesh.factors[axis]
        equal = []
        long = []
        for dimension in candidates:
            if left[dimension] and left[dimension] % factor == 0:
                equal.append(dimension)
            if left[dimension] >= LONG_PIECE * factor:
                long.append(dimension)
        if equal:
            chosen = equal[0]
        elif long:
            chosen = long[0]
        else:
            chosen = left.index(max(left))
        left[chosen] //= factor
        splits.append((axis, chosen))
    return Layout(mesh, bound, cuts, tuple(splits), orders)


def even_layout(mesh: Mesh, bound: tuple[int, ...]) -> Layout:
    """Return a layout for a tensor of which nothing but the shape is known.

    Each axis cuts the first dimension that is long enough.
    """
    cuts: list[int | None] = []
    for axis in range(len(mesh.factors)):
        chosen = None
        for dimension, extent in enumerate(bound):
            axes = {*axes_that_cut(tuple(cuts), dimension), axis}
            if any(axes <= set(window) for window in mesh.windows(extent)):
                chosen = dimension
                break
        cuts.append(chosen)
    return Layout(mesh, bound, tuple(cuts))


def on_one_rank(bound: tuple[int, ...]) -> Layout:
    """Return the layout of a tensor that is whole on a single rank."""
    return Layout(Mesh(1), bound, ())
