"""The elements of a tensor in the order in which a file has them, dealt to the ranks that write them.

Each rank gets one range, as large as the others', and writes it in pieces that are boxes of the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, zip_longest
from math import prod
from typing import TypeAlias

from einmpi.schedule.regions import Region, whole

Round: TypeAlias = tuple[Region | None, ...]  # for each rank the piece that it writes next
PAGE, STRIPE = 2**12, 2**20  # bytes
FINE = 8  # a rank's range has this many stripes at least, or smaller ones: else some would have much more than others


def rounds_of_bytes(
    bound: Sequence[int], itemsize: int, offset: int, ranks: int, most: int
) -> Iterator[Round]:
    """A tensor that lies at `offset` of a file: all ranks write at once, at most `most` bytes each in a round.

    Borders between ranks lie at multiples of a page, of a stripe for large tensors: on a network file system two
    machines that write to the same one would wait for each other. An element that reaches across belongs to the first.
    """
    nbytes = prod(bound) * itemsize
    unit = PAGE
    while unit < STRIPE and 2 * unit * ranks * FINE <= nbytes:
        unit *= 2
    borders = [
        (2 * (offset + nbytes * k // ranks) + unit) // (2 * unit) * unit - offset
        for k in range(1, ranks)
    ]
    edges = [
        0,
        *(-(-min(max(border, 0), nbytes) // itemsize) for border in borders),
        nbytes // itemsize,
    ]
    return _rounds(edges, bound, max(1, most // itemsize))


def rounds_of_chunks(
    bound: Sequence[int], chunks: Sequence[int], itemsize: int, ranks: int, most: int
) -> Iterator[Round]:
    """A tensor in chunks, at least one for a rank in a round, and as many as fit into `most` bytes."""
    grid = grid_of(bound, chunks)
    count = prod(grid)
    edges = [count * k // ranks for k in range(ranks + 1)]
    for pieces in _rounds(edges, grid, max(1, most // (prod(chunks) * itemsize))):
        yield tuple(
            None if piece is None else _elements_of(piece, chunks, bound) for piece in pieces
        )


def grid_of(bound: Sequence[int], chunks: Sequence[int]) -> tuple[int, ...]:
    """How many chunks there are in each dimension."""
    return tuple(-(-extent // chunk) for extent, chunk in zip(bound, chunks, strict=True))


def _elements_of(piece: Region, chunks: Sequence[int], bound: Sequence[int]) -> Region:
    """A box of chunks as a box of elements."""
    return tuple(
        ((start * chunk, min(stop * chunk, extent)),)
        for ((start, stop),), chunk, extent in zip(piece, chunks, bound, strict=True)
    )


def _rounds(edges: Sequence[int], extents: Sequence[int], limit: int) -> Iterator[Round]:
    """Lazily: nothing here grows with the size of the tensor."""
    return zip_longest(
        *(pieces_of_range(start, stop, extents, limit) for start, stop in pairwise(edges))
    )


def pieces_of_range(start: int, stop: int, extents: Sequence[int], limit: int) -> Iterator[Region]:
    """The elements [start, stop), counted in row-major order, as boxes of at most `limit` elements, in order.

    Each box is a run of elements too: one index in the first dimensions, some in one, all in the last ones.
    """
    while start < stop:
        most, inner = min(limit, stop - start), 1
        dimension = len(extents) - 1
        # Outwards, as long as whole slices begin here and fit.
        while (
            dimension > 0
            and start % (inner * extents[dimension]) == 0
            and inner * extents[dimension] <= most
        ):
            inner *= extents[dimension]
            dimension -= 1
        first = start // inner % extents[dimension]
        count = min(most // inner, extents[dimension] - first)
        outer, left = [], start // (inner * extents[dimension])
        for extent in reversed(extents[:dimension]):
            left, index = divmod(left, extent)
            outer.append(((index, index + 1),))
        yield (*reversed(outer), ((first, first + count),), *map(whole, extents[dimension + 1 :]))
        start += count * inner
