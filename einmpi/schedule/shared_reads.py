"""A stored tensor read by many ranks together: in cells, dealt out in the order of the file. Who reads which, who wants
what of them: arithmetic, so nobody has to ask."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import TypeAlias

from einmpi.schedule.layout import Layout
from einmpi.schedule.regions import Region, Runs

Bounds: TypeAlias = tuple[tuple[int, int], ...]  # [start, stop) of each dimension

# Shorter runs are left to reading together. From the page cache, single reads of 4 KiB are as fast as reading large
# pieces and exchanging them; file systems of many machines want more.
LONG_RUN = 16 * 2**10
LEAST_CELL, MOST_CELL, CELLS_A_RANK = 64 * 2**10, 4 * 2**20, 8
ROUND = 16 * 2**20  # bytes that a rank reads at a time


@dataclass(frozen=True)
class Grid:
    """A tensor in cells of whole chunks. `shift` says where in its first chunk the tensor begins."""

    shape: tuple[int, ...]
    cell: tuple[int, ...]
    shift: tuple[int, ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        return tuple(
            -(-(n + s) // c) for n, c, s in zip(self.shape, self.cell, self.shift, strict=True)
        )

    @property
    def cells(self) -> int:
        return prod(self.counts)

    def bounds(self, number: int) -> Bounds:
        """What a cell has of the tensor."""
        found = []
        for count, extent, cell, shift in zip(
            *map(reversed, (self.counts, self.shape, self.cell, self.shift)), strict=True
        ):
            number, k = divmod(number, count)
            found.append((max(0, k * cell - shift), min(extent, (k + 1) * cell - shift)))
        return tuple(reversed(found))

    def touching(self, region: Region) -> list[int]:
        """The cells that have elements of a region, in order."""
        sides = []
        for runs, cell, shift in zip(region, self.cell, self.shift, strict=True):
            hit = {
                k
                for start, stop in runs
                for k in range((start + shift) // cell, (stop - 1 + shift) // cell + 1)
            }
            sides.append(sorted(hit))
        numbers = [0]
        for side, count in zip(sides, self.counts, strict=True):
            numbers = [number * count + k for number in numbers for k in side]
        return numbers


def grid_of(
    shape: tuple[int, ...],
    itemsize: int,
    chunks: Sequence[int] | None,
    first: Sequence[int],
    ranks: int,
) -> Grid:
    """Cells large enough to be read fast, and several for each rank. The tensor begins at `first` in the file's."""
    base = tuple(chunks) if chunks is not None else (1,) * len(shape)
    shift = tuple(start % extent for start, extent in zip(first, base, strict=True))
    wanted = min(max(prod(shape) * itemsize // (CELLS_A_RANK * ranks), LEAST_CELL), MOST_CELL)
    cell, size = list(base), prod(base) * itemsize
    for d in reversed(range(len(shape))):  # the last dimension is the fast one in the file
        times = min(-(-(shape[d] + shift[d]) // base[d]), max(1, wanted // size))
        cell[d], size = base[d] * times, size * times
        if cell[d] < shape[d] + shift[d]:
            break
    return Grid(shape, tuple(cell), shift)


@dataclass(frozen=True)
class Dealing:
    """The cells of a grid in rounds: rank r reads the r-th part of them, `at_once` cells in each round."""

    grid: Grid
    layout: Layout
    at_once: int

    @property
    def ranks(self) -> int:
        return self.layout.mesh.ranks

    @property
    def rounds(self) -> int:
        most = -(-self.grid.cells // self.ranks)
        return -(-most // self.at_once)

    def own(self, rank: int, turn: int) -> range:
        """The cells that a rank reads in a round."""
        first, last = (self.grid.cells * k // self.ranks for k in (rank, rank + 1))
        return range(
            min(first + turn * self.at_once, last), min(first + (turn + 1) * self.at_once, last)
        )

    def coming(self, rank: int) -> list[dict[int, list[int]]]:
        """For each round: the cells of which a rank wants something, by the rank that reads them."""
        found: list[dict[int, list[int]]] = [{} for _ in range(self.rounds)]
        for cell in self.grid.touching(self.layout.region(self.layout.mesh.digits(rank))):
            reader = ((cell + 1) * self.ranks - 1) // self.grid.cells
            turn = (cell - self.grid.cells * reader // self.ranks) // self.at_once
            found[turn].setdefault(reader, []).append(cell)
        return found

    def going(self, rank: int, turn: int) -> dict[int, list[tuple[int, Region]]]:
        """(cell, what of it) that each rank wants of those that a rank reads in a round."""
        found: dict[int, list[tuple[int, Region]]] = {}
        for cell in self.own(rank, turn):
            for user, region in wanted(self.layout, self.grid.bounds(cell)):
                found.setdefault(user, []).append((cell, region))
        return found


def deal(
    layout: Layout, itemsize: int, chunks: Sequence[int] | None, first: Sequence[int]
) -> Dealing:
    grid = grid_of(layout.bound, itemsize, chunks, first, layout.mesh.ranks)
    return Dealing(grid, layout, max(1, ROUND // (prod(grid.cell) * itemsize)))


def wanted(layout: Layout, bounds: Bounds) -> Iterator[tuple[int, Region]]:
    """The ranks that hold elements within these bounds, each with what it holds of them."""
    sides = [_within(layout, dimension, *ends) for dimension, ends in enumerate(bounds)]
    for copy in _copies(layout):
        for combination in itertools.product(*sides):
            yield (
                copy + sum(part for part, _ in combination),
                tuple(runs for _, runs in combination),
            )


def suits_single_ranks(
    layout: Layout, itemsize: int, chunks: Sequence[int] | None, first: Sequence[int]
) -> bool:
    """Whether each rank may read its own block: nobody else wants it, and it is whole chunks, or long runs."""
    if len(_copies(layout)) > 1:
        return False
    if chunks is None:
        cut = [d for d, extent in enumerate(layout.bound) if layout.axes_of(d) and extent > 1]
        if not cut:
            return True
        shortest = min(stop - start for start, stop, _ in _owners(layout, cut[-1]))
        return shortest * prod(layout.bound[cut[-1] + 1 :]) * itemsize >= LONG_RUN
    ends = (
        (start, first[d], chunks[d])
        for d in range(len(layout.bound))
        for start, _, _ in _owners(layout, d)
    )
    return all(start == 0 or (start + begin) % chunk == 0 for start, begin, chunk in ends)


def _weights(layout: Layout) -> list[int]:
    factors = layout.mesh.factors
    return [prod(factors[axis + 1 :]) for axis in range(len(factors))]


@lru_cache(maxsize=256)
def _copies(layout: Layout) -> tuple[int, ...]:
    """The ranks with digit 0 on all axes that cut: each combination of digits on the others holds a copy."""
    dealt = {axis for axis, _ in layout.splits}
    weights, ranks = _weights(layout), [0]
    for axis, cut in enumerate(layout.cuts):
        if cut is None and axis not in dealt:
            ranks = [
                rank + k * weights[axis] for rank in ranks for k in range(layout.mesh.factors[axis])
            ]
    return tuple(ranks)


@lru_cache(maxsize=256)
def _owners(layout: Layout, dimension: int) -> list[tuple[int, int, int]]:
    """All runs of a dimension in order, with the part of a rank's number that its digits there give."""
    axes, weights = layout.axes_of(dimension), _weights(layout)
    found = []
    for values in itertools.product(*(range(layout.mesh.factors[axis]) for axis in axes)):
        digits = [0] * len(layout.mesh.factors)
        for axis, value in zip(axes, values, strict=True):
            digits[axis] = value
        part = sum(weights[axis] * value for axis, value in zip(axes, values, strict=True))
        found += [(start, stop, part) for start, stop in layout.runs(dimension, digits)]
    return sorted(found)


@lru_cache(maxsize=4096)
def _within(layout: Layout, dimension: int, first: int, last: int) -> tuple[tuple[int, Runs], ...]:
    """(part of a rank's number, its runs) between two indices of a dimension."""
    owners = _owners(layout, dimension)
    found: dict[int, list[tuple[int, int]]] = {}
    k = max(0, bisect_right(owners, first, key=lambda owner: owner[0]) - 1)
    while k < len(owners) and owners[k][0] < last:
        start, stop, part = owners[k]
        if stop > first:
            found.setdefault(part, []).append((max(start, first), min(stop, last)))
        k += 1
    return tuple((part, tuple(runs)) for part, runs in found.items())
