"""The layout of a tensor on the ranks: which elements each of them holds (docs/planner.md)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from einmpi.planner.memory import longest_share
from einmpi.planner.mesh import Mesh
from einmpi.schedule.regions import Region, Runs, share, split
from einmpi.units import counted

# For each axis of the mesh: the dimension that it cuts, None where its ranks all hold the same, or
# PARTIAL. On the mesh of 6 = 3·2 ranks, (0, None) cuts the rows of a matrix into three parts and
# gives each part to two ranks.
Cuts: TypeAlias = tuple[int | None, ...]
PARTIAL = -1  # in place of a dimension: the ranks of this axis hold partial results

LONG_PIECE = 32  # indices a rank; pieces that long may be unequal without much harm


@dataclass(frozen=True)
class Layout:
    """How a tensor is distributed over the ranks of a mesh.

    `splits` are (axis, dimension) pairs: axes that divide further what the cuts leave on a rank.
    """

    mesh: Mesh
    bound: tuple[int, ...]
    cuts: Cuts
    splits: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        """Return text such as [4,2] on 8 ranks."""
        parts = ",".join(map(str, self.mesh.parts(self.cuts, range(len(self.bound)))))
        return f"[{parts}] on {counted(self.mesh.ranks, 'rank')}"

    def runs(self, dimension: int, digits: Sequence[int]) -> Runs:
        """Return the indices of a dimension that the rank with these digits holds."""
        cuts = tuple((axis, digits[axis]) for axis, cut in enumerate(self.cuts) if cut == dimension)
        found = share(self.mesh, self.bound[dimension], cuts)
        pieces = 1
        which = 0
        for axis, split_dimension in self.splits:
            if split_dimension == dimension:
                pieces *= self.mesh.factors[axis]
                which = which * self.mesh.factors[axis] + digits[axis]
        return split(found, pieces, which) if pieces > 1 else found

    def region(self, digits: Sequence[int]) -> Region:
        """Return the elements that the rank with these digits holds."""
        return tuple(self.runs(dimension, digits) for dimension in range(len(self.bound)))

    def block(self, rank: int) -> Region | None:
        """Return the elements that a rank holds; None for a rank that is not in the mesh."""
        if rank >= self.mesh.ranks:
            return None
        return self.region(self.mesh.digits(rank))

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
        splitting = {axis for axis, _ in self.splits}
        axes = []
        for axis, cut in enumerate(self.cuts):
            if cut is not None or axis in splitting:
                axes.append(axis)
        return tuple(axes)

    def most(self) -> int:
        """Return a bound on the elements of a rank, equal for all ranks."""
        count = 1
        for dimension, extent in enumerate(self.bound):
            cuts = [axis for axis, cut in enumerate(self.cuts) if cut == dimension]
            pieces = prod(self.mesh.factors[axis] for axis, cut in self.splits if cut == dimension)
            count *= -(-longest_share(self.mesh, extent, cuts) // pieces)
        return count

    def axes_of(self, dimension: int) -> tuple[int, ...]:
        """Return the axes on whose digits a rank's runs of a dimension depend."""
        pairs = [*enumerate(self.cuts), *self.splits]
        return tuple(axis for axis, cut in pairs if cut == dimension)


def rank_strides(mesh: Mesh) -> list[int]:
    """Return how far apart the numbers of two ranks are that are neighbours along each axis."""
    factors = mesh.factors
    return [prod(factors[axis + 1 :]) for axis in range(len(factors))]


def split_further(
    mesh: Mesh,
    bound: tuple[int, ...],
    cuts: Cuts,
    axes: Sequence[int],
    recut: Collection[int] = (),
) -> Layout:
    """Return the layout `cuts` with its blocks divided over `axes` too, into equal pieces.

    Dimensions in `recut`, which another axis is about to cut, are the last choice: only some
    ranks could use their pieces. Axes between nodes divide last, so that the ranks of a node have
    neighbouring pieces.
    """
    left = []  # the indices of each dimension that remain on a rank
    for dimension, extent in enumerate(bound):
        cut_by = [mesh.factors[axis] for axis, cut in enumerate(cuts) if cut == dimension]
        left.append(extent // prod(cut_by))
    # The first dimension that suits is best: its pieces are contiguous in memory.
    candidates = sorted(range(len(bound)), key=lambda dimension: (dimension in recut, dimension))
    splits = []
    for axis in sorted(axes, key=lambda axis: axis < mesh.node_axes):
        factor = mesh.factors[axis]
        equal = [d for d in candidates if left[d] and left[d] % factor == 0]
        long = [d for d in candidates if left[d] >= LONG_PIECE * factor]
        if equal:
            chosen = equal[0]
        elif long:
            chosen = long[0]
        else:
            chosen = left.index(max(left))
        left[chosen] //= factor
        splits.append((axis, chosen))
    return Layout(mesh, bound, cuts, tuple(splits))


def even_layout(mesh: Mesh, bound: tuple[int, ...]) -> Layout:
    """Return a layout for a tensor of which nothing but the shape is known.

    Each axis cuts the first dimension that is long enough.
    """
    cuts: list[int | None] = []
    for axis in range(len(mesh.factors)):
        chosen = None
        for dimension, extent in enumerate(bound):
            axes = {other for other, cut in enumerate(cuts) if cut == dimension} | {axis}
            if any(axes <= set(window) for window in mesh.windows(extent)):
                chosen = dimension
                break
        cuts.append(chosen)
    return Layout(mesh, bound, tuple(cuts))


def on_one_rank(bound: tuple[int, ...]) -> Layout:
    """Return the layout of a tensor that is whole on a single rank."""
    return Layout(Mesh(1), bound, ())
