"""Files that ranks write together: every element is written once, and ranks share no page."""

from itertools import pairwise, product
from math import prod

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from einmpi.schedule.regions import elements, flat_range
from einmpi.schedule.shared_reads import (
    PAGE_BYTES,
    STRIPE_BYTES,
    chunk_counts,
    pieces_of_range,
    rounds_of_bytes,
    rounds_of_chunks,
)

bounds = st.lists(st.integers(0, 9), min_size=1, max_size=4)


@given(bounds, st.integers(1, 50), st.data())
def test_pieces_cover_a_range_once(extents, limit, data):
    count = prod(extents)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    pieces = list(pieces_of_range(start, stop, extents, limit))
    runs = [flat_range(piece, extents) for piece in pieces]
    assert all(0 < elements(piece) <= limit for piece in pieces)
    assert [start, *(run[1] for run in runs)] == [
        *(run[0] for run in runs),
        stop,
    ]  # one after another
    # Not cut needlessly: whole rows, and ends of rows at both sides in each dimension.
    if limit >= count:
        assert len(pieces) <= 2 * len(extents) - 1


@given(
    bounds,
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(0, 9000),
    st.integers(1, 11),
    st.integers(16, 99),
)
@example([1], 8, 2048, 1, 16)
def test_ranks_write_all_bytes_once(bound, itemsize, offset, ranks, most):
    rounds = list(rounds_of_bytes(bound, itemsize, offset, ranks, most))
    assert all(len(pieces) == ranks for pieces in rounds)
    ends = [0]
    for own in zip(*rounds, strict=True):
        runs = [flat_range(piece, bound) for piece in own if piece is not None]
        assert all((run[1] - run[0]) * itemsize <= most for run in runs)
        ends += [end for run in runs for end in run]
    assert ends[1::2] == ends[:-1:2] and ends[-1] == prod(bound)


@pytest.mark.parametrize(
    "bound, ranks, unit",
    [
        ((4096, 1024), 4, STRIPE_BYTES),
        ((4096, 1024), 5, 2**19),
        ((512, 999), 4, 2**16),
        ((3, 999), 5, PAGE_BYTES),
        ((5,), 3, PAGE_BYTES),
    ],
)
@pytest.mark.parametrize("offset", [0, 2048, 1000 * 8])
def test_borders_between_ranks_are_aligned(bound, ranks, unit, offset):
    """Two ranks never write to the same page, nor to the same stripe of a large tensor."""
    borders, sizes = set(), []
    for own in zip(*rounds_of_bytes(bound, 8, offset, ranks, 2**30), strict=True):
        runs = [flat_range(piece, bound) for piece in own if piece is not None]
        if runs:
            borders |= {offset + runs[0][0] * 8, offset + runs[-1][1] * 8}
            sizes.append((runs[-1][1] - runs[0][0]) * 8)
    inner = sorted(borders)[1:-1]
    assert all(border % unit == 0 for border in inner)
    assert max(sizes) <= prod(bound) * 8 / ranks + unit


@given(bounds, st.data(), st.integers(1, 7), st.integers(1, 200))
def test_ranks_write_all_chunks_once(bound, data, ranks, most):
    chunks = [data.draw(st.integers(1, 5)) for _ in bound]
    seen, counts = [], [0] * ranks
    for pieces in rounds_of_chunks(bound, chunks, 2, ranks, most):
        for rank, piece in enumerate(pieces):
            if piece is not None:
                corners = list(
                    product(
                        *(range(*runs[0], chunk) for runs, chunk in zip(piece, chunks, strict=True))
                    )
                )
                assert len(corners) == 1 or len(corners) * prod(chunks) * 2 <= most
                for ((start, stop),), chunk, extent in zip(piece, chunks, bound, strict=True):
                    assert start % chunk == 0 and (stop % chunk == 0 or stop == extent)
                seen += corners
                counts[rank] += len(corners)
    starts = [range(0, extent, chunk) for extent, chunk in zip(bound, chunks, strict=True)]
    expected = list(product(*starts))
    assert sorted(seen) == expected and len(expected) == prod(chunk_counts(bound, chunks))
    assert max(counts) - min(counts) <= 1


def test_rounds_are_made_one_by_one():
    """The first rounds of a tensor of 16 TiB on 4,096 ranks take no time and no memory."""
    rounds = rounds_of_bytes((2**20, 2**21), 8, 2048, 4096, 2**23)
    for one, two in pairwise(pair for pair, _ in zip(rounds, range(3), strict=False)):
        assert len(one) == 4096 and one[7] != two[7]
