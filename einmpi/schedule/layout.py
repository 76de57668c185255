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

Cuts: TypeAlias = tuple[
    int | None, ...
]  # for each axis of the mesh: the dimension it cuts, or None
PARTIAL = -1  # in place of a dimension: the ranks of this axis hold partial results


@dataclass(frozen=True)
class Layout:
    """How a tensor lies on the ranks of a mesh: each axis cuts a dimension, or its ranks all have the same.

    `splits` are axes that deal out further what the cuts leave on a rank: (axis, dimension) pairs.
    """

    mesh: Mesh
    bound: tuple[int, ...]
    cuts: Cuts
    splits: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        """[4,2] on 8 ranks."""
        parts = ",".join(map(str, self.mesh.parts(self.cuts, range(len(self.bound)))))
        return f"[{parts}] on {counted(self.mesh.ranks, 'rank')}"

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

    def block(self, rank: int) -> Region | None:
        """What a rank holds; None for a rank that is not in the mesh."""
        return self.region(self.mesh.digits(rank)) if rank < self.mesh.ranks else None

    def owns(self, rank: int) -> bool:
        """Whether the rank is the first of those that hold the same."""
        if rank >= self.mesh.ranks:
            return False
        return not any(
            d for d, cut in zip(self.mesh.digits(rank), self.cuts, strict=True) if cut is None
        )

    def cutting_axes(self) -> tuple[int, ...]:
        """The axes on whose digits a rank's block depends; ranks that differ on others hold the same."""
        dealing = {axis for axis, _ in self.splits}
        return tuple(
            axis for axis, cut in enumerate(self.cuts) if cut is not None or axis in dealing
        )

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
        return tuple(
            axis for axis, cut in [*enumerate(self.cuts), *self.splits] if cut == dimension
        )


def dealt_out(
    mesh: Mesh,
    bound: tuple[int, ...],
    cuts: Cuts,
    axes: Sequence[int],
    turning: Collection[int] = (),
) -> Layout:
    """The layout `cuts` with the blocks dealt out over `axes` too, along dimensions that give equal pieces.

    Dimensions that are `turning`, about to be cut by another axis, come last: their pieces would suit some ranks. Axes
    between nodes deal out last: then the ranks of a node have neighbouring pieces.
    """
    axes = sorted(axes, key=lambda axis: axis < mesh.node_axes)
    left = [
        extent // prod(mesh.factors[a] for a, cut in enumerate(cuts) if cut == d)
        for d, extent in enumerate(bound)
    ]
    splits = []
    for axis in axes:
        factor = mesh.factors[axis]
        # Else the first dimension that will do: its pieces lie in one piece in memory.
        ways = sorted(range(len(bound)), key=lambda d: (d in turning, d))
        even = [d for d in ways if left[d] and left[d] % factor == 0]
        long = [d for d in ways if left[d] >= 32 * factor]
        chosen = (even or long or [left.index(max(left))])[0]
        left[chosen] = left[chosen] // factor
        splits.append((axis, chosen))
    return Layout(mesh, bound, cuts, tuple(splits))


def even_layout(mesh: Mesh, bound: tuple[int, ...]) -> Layout:
    """A layout for a tensor of which nothing else is known: the first dimension that is long enough takes an axis."""
    cuts: list[int | None] = []
    for axis in range(len(mesh.factors)):
        together = [
            {a for a, cut in enumerate(cuts) if cut == d} | {axis} for d in range(len(bound))
        ]
        fitting = [
            d
            for d, extent in enumerate(bound)
            if any(together[d] <= set(w) for w in mesh.windows(extent))
        ]
        cuts.append(fitting[0] if fitting else None)
    return Layout(mesh, bound, tuple(cuts))


def on_one_rank(bound: tuple[int, ...]) -> Layout:
    """The layout of a tensor that lies whole on one rank."""
    return Layout(Mesh(1), bound, ())
