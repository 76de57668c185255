"""A tensor that many ranks write to one file: each gets one range of the elements in the order of
the file, as large as the others', and writes it in pieces that are boxes of the tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, zip_longest
from math import prod
from typing import TypeAlias

from einmpi.schedule.regions import Region, whole

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
