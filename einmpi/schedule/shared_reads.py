"""A stored tensor that many ranks read together: which rank reads which part of the file, and which
ranks need it. Every rank works this out for itself."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, zip_longest
from math import prod
from typing import TypeAlias

from einmpi.caches import bounded_cache
from einmpi.graph.eingraph import StoredForm
from einmpi.schedule.layout import Layout, digits_along, rank_of, ranks_along
from einmpi.schedule.regions import Region, Runs, whole

# The file is cut into cells, which are contiguous there or consist of whole chunks. The ranks get
# equal numbers of cells in the order of the file, read them in rounds, and send each other what
# they need of them.
#
# Example: two ranks need the left and the right half of a matrix that is stored by rows. Reading
# its own half, each rank would jump from row to row. Instead rank 0 reads the upper half of the
# file, rank 1 the lower half, and each sends the other the part of its rows that it needs.

Bounds: TypeAlias = tuple[tuple[int, int], ...]  # [start, stop) of each dimension

# Blocks with shorter runs are read together. From the page cache, single reads of 4 KiB are as fast
# as reading large cells and exchanging them; file systems of clusters need longer ones.
LONG_RUN_BYTES = 16 * 2**10
MIN_CELL_BYTES = 64 * 2**10
MAX_CELL_BYTES = 4 * 2**20
CELLS_PER_RANK = 8
ROUND_BYTES = 16 * 2**20  # what a rank reads at a time
MOST_CELLS_COUNTED = 2**15  # to predict what ranks read for each other


@dataclass(frozen=True)
class Grid:
    """A tensor in cells of whole chunks, numbered in row-major order.

    `shift` says where in its first chunk the tensor begins.
    """

    shape: tuple[int, ...]
    cell: tuple[int, ...]
    shift: tuple[int, ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of cells along each dimension."""
        counts = []
        for extent, cell, shift in zip(self.shape, self.cell, self.shift, strict=True):
            counts.append(-(-(extent + shift) // cell))
        return tuple(counts)

    @property
    def cells(self) -> int:
        return prod(self.counts)

    def bounds(self, number: int) -> Bounds:
        """Return the part of the tensor that a cell contains."""
        found = []
        for dimension in reversed(range(len(self.shape))):
            number, position = divmod(number, self.counts[dimension])
            cell = self.cell[dimension]
            start = position * cell - self.shift[dimension]
            found.append((max(0, start), min(self.shape[dimension], start + cell)))
        return tuple(reversed(found))

    def touching(self, region: Region) -> list[int]:
        """Return the cells that contain elements of a region, in order."""
        numbers = [0]
        for dimension, runs in enumerate(region):
            cell = self.cell[dimension]
            shift = self.shift[dimension]
            positions: set[int] = set()
            for start, stop in runs:
                first = (start + shift) // cell
                last = (stop - 1 + shift) // cell
                positions.update(range(first, last + 1))
            count = self.counts[dimension]
            ordered = sorted(positions)
            longer = []
            for number in numbers:
                for position in ordered:
                    longer.append(number * count + position)
            numbers = longer
        return numbers


def grid_of(
    shape: tuple[int, ...],
    itemsize: int,
    chunks: Sequence[int] | None,
    first: Sequence[int],
    ranks: int,
) -> Grid:
    """Return a grid with cells that are large enough to be read fast, and several for each rank.

    The tensor begins at the index `first` of the dataset.
    """
    base = tuple(chunks) if chunks is not None else (1,) * len(shape)
    shift = tuple(start % extent for start, extent in zip(first, base, strict=True))
    wanted = prod(shape) * itemsize // (CELLS_PER_RANK * ranks)
    wanted = min(max(wanted, MIN_CELL_BYTES), MAX_CELL_BYTES)
    cell = list(base)
    nbytes = prod(base) * itemsize
    for dimension in reversed(range(len(shape))):  # the last dimension is contiguous in the file
        extent = shape[dimension] + shift[dimension]
        times = min(-(-extent // base[dimension]), max(1, wanted // nbytes))
        cell[dimension] *= times
        nbytes *= times
        if cell[dimension] < extent:
            break
    return Grid(shape, tuple(cell), shift)


@dataclass(frozen=True)
class SharedRead:
    """The cells of a grid, divided among the ranks and read in rounds.

    Rank r reads the r-th part of the cells, `cells_per_round` of them in each round.
    """

    grid: Grid
    layout: Layout
    cells_per_round: int

    @property
    def ranks(self) -> int:
        return self.layout.mesh.ranks

    @property
    def rounds(self) -> int:
        most = -(-self.grid.cells // self.ranks)
        return -(-most // self.cells_per_round)

    def cells_read(self, rank: int, turn: int) -> range:
        """Return the cells that a rank reads in a round."""
        first = self.grid.cells * rank // self.ranks
        last = self.grid.cells * (rank + 1) // self.ranks
        start = first + turn * self.cells_per_round
        return range(min(start, last), min(start + self.cells_per_round, last))

    def reader(self, cell: int) -> int:
        """Return the rank that reads a cell."""
        return ((cell + 1) * self.ranks - 1) // self.grid.cells

    def cells_needed(self, rank: int) -> list[dict[int, list[int]]]:
        """Return, for each round, the cells of which a rank needs a part, by their reader."""
        found: list[dict[int, list[int]]] = [{} for _ in range(self.rounds)]
        for cell in self.grid.touching(self.layout.region(self.layout.mesh.digits(rank))):
            reader = self.reader(cell)
            first = self.grid.cells * reader // self.ranks
            turn = (cell - first) // self.cells_per_round
            found[turn].setdefault(reader, []).append(cell)
        return found

    def cells_to_send(self, rank: int, turn: int) -> dict[int, list[tuple[int, Region]]]:
        """Return what others need of the cells that a rank reads in a round.

        The keys are the ranks that need it, the values are pairs of a cell and the part of it.
        """
        found: dict[int, list[tuple[int, Region]]] = {}
        for cell in self.cells_read(rank, turn):
            for user, region in holders(self.layout, self.grid.bounds(cell)):
                found.setdefault(user, []).append((cell, region))
        return found


def shared_read(layout: Layout, stored: StoredForm) -> SharedRead | None:
    """Divide a stored tensor among the ranks of a layout; None if each reads its own block."""
    if stored.is_reversed:  # with its dimensions reversed it is stored like any other
        layout = _reversed(layout)
        stored = stored._replace(first=stored.first[::-1], is_reversed=False)
    if 0 in layout.bound or suits_single_ranks(layout, stored):
        return None
    grid = grid_of(layout.bound, *stored[:3], layout.mesh.ranks)
    return SharedRead(grid, layout, max(1, ROUND_BYTES // (prod(grid.cell) * stored.itemsize)))


def _reversed(layout: Layout) -> Layout:
    """Return the layout of the tensor with its dimensions in the opposite order."""
    last = len(layout.bound) - 1
    cuts: list[int | None] = []
    for cut in layout.cuts:
        if cut is None:
            cuts.append(None)
        else:
            cuts.append(last - cut)
    splits = tuple((axis, last - dimension) for axis, dimension in layout.splits)
    return replace(
        layout,
        bound=layout.bound[::-1],
        cuts=tuple(cuts),
        splits=splits,
        orders=layout.orders[::-1],
    )


def bytes_passed_on(layout: Layout, stored: StoredForm) -> int:
    """Return how many bytes of a stored tensor are read by one rank for another.

    Of very many cells, every rank is taken to need an average part of those that it reads.
    """
    read = shared_read(layout, stored)
    if read is None:
        return 0
    elements = prod(layout.bound)
    received = elements * _copies(layout)
    if read.grid.cells > MOST_CELLS_COUNTED:
        return (received - received // layout.mesh.ranks) * stored.itemsize
    for reader, cells in itertools.groupby(range(read.grid.cells), read.reader):
        own = read.layout.region(layout.mesh.digits(reader))
        for cell in cells:
            received -= _elements_within(own, read.grid.bounds(cell))
    return received * stored.itemsize


def _elements_within(region: Region, bounds: Bounds) -> int:
    """Return how many elements of a region lie within these bounds."""
    elements = 1
    for runs, (first, last) in zip(region, bounds, strict=True):
        elements *= sum(max(0, min(stop, last) - max(start, first)) for start, stop in runs)
    return elements


def holders(layout: Layout, bounds: Bounds) -> Iterator[tuple[int, Region]]:
    """Yield the ranks that hold elements within these bounds, each with the elements."""
    for first in _first_ranks(layout):
        yield from holders_of_copy(layout, bounds, first)


def holders_of_copy(layout: Layout, bounds: Bounds, first: int) -> Iterator[tuple[int, Region]]:
    """Yield what `holders` does, for one copy of the tensor; `first` is its first rank."""
    sides = [_within(layout, dimension, *ends) for dimension, ends in enumerate(bounds)]
    for combination in itertools.product(*sides):
        rank = first + sum(part for part, _ in combination)
        yield rank, tuple(runs for _, runs in combination)


def suits_single_ranks(layout: Layout, stored: StoredForm) -> bool:
    """Return whether each rank may read its own block.

    It may if no two ranks need the same elements, and blocks are whole chunks or long runs.
    """
    if _copies(layout) > 1:
        return False
    if stored.chunks is None:
        return _shortest_run(layout) * stored.itemsize >= LONG_RUN_BYTES
    for dimension, chunk in enumerate(stored.chunks):
        extent = layout.bound[dimension]
        parts = ranks_along(layout.mesh, layout.axes_of(dimension))
        if min(parts, extent) > extent // chunk + 2:  # more parts than chunks that they begin in
            return False
        for start, _, _ in _owners(layout, dimension):
            if start > 0 and (start + stored.first[dimension]) % chunk != 0:
                return False
    return True


def _shortest_run(layout: Layout) -> float:
    """Return the fewest contiguous elements of a block; infinity where nothing is cut."""
    cut = []
    for dimension, extent in enumerate(layout.bound):
        if extent > 1 and layout.axes_of(dimension):
            cut.append(dimension)
    if not cut:
        return float("inf")
    last = cut[-1]
    shortest = min(stop - start for start, stop, _ in _owners(layout, last))
    return shortest * prod(layout.bound[last + 1 :])


# A rank's number is the sum of its digits times the strides of their axes. Each dimension depends
# on the digits of some axes, so it determines a part of the number; `_first_ranks` has the part of
# the axes on which no dimension depends. The number of a rank is the sum of all parts.


def _copies(layout: Layout) -> int:
    """Return how many ranks have each element."""
    return layout.mesh.ranks // ranks_along(layout.mesh, layout.cutting_axes())


@bounded_cache(256)
def _first_ranks(layout: Layout) -> tuple[int, ...]:
    """Return the ranks with digit 0 on all axes that cut: one for each copy of the tensor."""
    mesh = layout.mesh
    cutting = layout.cutting_axes()
    others = [axis for axis in range(len(mesh.factors)) if axis not in cutting]
    return tuple(rank_of(mesh, digits) for digits in digits_along(mesh, others, mesh.digits(0)))


@bounded_cache(256)
def _owners(layout: Layout, dimension: int) -> list[tuple[int, int, int]]:
    """Return all runs of a dimension as (start, stop, part of the owner's number), in order."""
    mesh = layout.mesh
    zeros = mesh.digits(0)
    found = []
    for digits in digits_along(mesh, layout.axes_of(dimension), zeros):
        part = rank_of(mesh, digits)
        for start, stop in layout.runs(dimension, digits):
            found.append((start, stop, part))
    return sorted(found)


@bounded_cache(4096)
def _within(layout: Layout, dimension: int, first: int, last: int) -> tuple[tuple[int, Runs], ...]:
    """Return (part of a rank's number, its runs) between two indices of a dimension."""
    owners = _owners(layout, dimension)
    found: dict[int, list[tuple[int, int]]] = {}
    k = max(0, bisect_right(owners, first, key=lambda owner: owner[0]) - 1)
    while k < len(owners) and owners[k][0] < last:
        start, stop, part = owners[k]
        if stop > first:
            found.setdefault(part, []).append((max(start, first), min(stop, last)))
        k += 1
    return tuple((part, tuple(runs)) for part, runs in found.items())


# ---- shared writes -------------------------------------------------------------------------------
#
# A tensor that many ranks write to one file: each gets one range of the elements in the order
# of the file, as large as the others', and writes it in pieces that are boxes of the tensor.


# Example: two ranks write a tensor of 3 × 4 elements. Rank 0 gets the first six, and its pieces are
# the row 0 and the first half of row 1. Rank 1 gets the second half of row 1, and row 2.

Round: TypeAlias = tuple[Region | None, ...]  # for each rank, the piece that it writes next
PAGE_BYTES = 2**12
STRIPE_BYTES = 2**20
MOST_CHUNKS_IN_A_ROUND = 2**14  # a few hundred bytes of memory each, besides their elements
MIN_UNITS_A_RANK = 8  # pages or stripes: with fewer, some ranks would write much more than others


def rounds_of_bytes(
    bound: Sequence[int], itemsize: int, offset: int, ranks: int, most: int
) -> Iterator[Round]:
    """Yield the rounds for a tensor at `offset` of a file, at most `most` bytes a rank in each.

    The borders between ranks are multiples of a page, or of a stripe for large tensors: on a
    network file system two machines that write to the same one would wait for each other. An
    element that crosses a border belongs to the rank before it.
    """
    nbytes = prod(bound) * itemsize
    unit = PAGE_BYTES
    while unit < STRIPE_BYTES and 2 * unit * ranks * MIN_UNITS_A_RANK <= nbytes:
        unit *= 2
    edges = [0]
    for rank in range(1, ranks):
        equal = offset + nbytes * rank // ranks
        nearest = (2 * equal + unit) // (2 * unit) * unit
        border = min(max(nearest - offset, 0), nbytes)
        edges.append(-(-border // itemsize))
    edges.append(nbytes // itemsize)
    return _rounds(edges, bound, max(1, most // itemsize))


def rounds_of_chunks(
    bound: Sequence[int], chunks: Sequence[int], itemsize: int, ranks: int, most: int
) -> Iterator[Round]:
    """Yield the rounds for a tensor in chunks.

    In each of them a rank writes as many chunks as fit into `most` bytes, but at least one, and
    not so many that lists of them would need more memory than their elements.
    """
    counts = chunk_counts(bound, chunks)
    total = prod(counts)
    edges = [total * rank // ranks for rank in range(ranks + 1)]
    fitting = most // (prod(chunks) * itemsize)
    at_a_time = min(max(1, fitting), MOST_CHUNKS_IN_A_ROUND)
    for pieces in _rounds(edges, counts, at_a_time):
        regions = []
        for piece in pieces:
            regions.append(None if piece is None else _elements_of(piece, chunks, bound))
        yield tuple(regions)


def chunk_counts(bound: Sequence[int], chunks: Sequence[int]) -> tuple[int, ...]:
    """Return how many chunks there are along each dimension."""
    return tuple(-(-extent // chunk) for extent, chunk in zip(bound, chunks, strict=True))


def _elements_of(piece: Region, chunks: Sequence[int], bound: Sequence[int]) -> Region:
    """Return the box of elements that a box of chunks contains."""
    region = []
    for ((start, stop),), chunk, extent in zip(piece, chunks, bound, strict=True):
        region.append(((start * chunk, min(stop * chunk, extent)),))
    return tuple(region)


def _rounds(edges: Sequence[int], extents: Sequence[int], limit: int) -> Iterator[Round]:
    """Yield rounds one by one, so that memory does not grow with the size of the tensor."""
    pieces = [pieces_of_range(start, stop, extents, limit) for start, stop in pairwise(edges)]
    return zip_longest(*pieces)


def pieces_of_range(start: int, stop: int, extents: Sequence[int], limit: int) -> Iterator[Region]:
    """Yield the elements [start, stop) in row-major order as boxes of at most `limit` elements.

    The elements of a box are contiguous: it has one index in the outer dimensions, some indices
    in one dimension, and all indices in the inner ones.
    """
    while start < stop:
        most = min(limit, stop - start)
        dimension = len(extents) - 1  # the one of which the box has some indices
        inner = 1  # elements for each index of it
        # Go outwards as long as whole slices begin here and fit.
        while dimension > 0:
            slice_size = inner * extents[dimension]
            if start % slice_size != 0 or slice_size > most:
                break
            inner = slice_size
            dimension -= 1
        first = start // inner % extents[dimension]
        count = min(most // inner, extents[dimension] - first)
        outer = []
        left = start // (inner * extents[dimension])
        for extent in reversed(extents[:dimension]):
            left, index = divmod(left, extent)
            outer.append(((index, index + 1),))
        inner_runs = map(whole, extents[dimension + 1 :])
        yield (*reversed(outer), ((first, first + count),), *inner_runs)
        start += count * inner
