"""Which partitionings are viable: the paper's counts, any number of ranks, labels of any length."""

from __future__ import annotations

import itertools
from math import comb, prod

import pytest
from calls import calls_of
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_helpers import elementwise, matmul

from einmpi.planner.mesh import prime_factors
from einmpi.planner.paper import MAX_VECTORS, fullest, viable


def test_paper_counts_3003_partitionings_of_six_labels_at_1024_ranks() -> None:
    found = viable(elementwise(*[10**6] * 6), 1024)
    assert len(found) == len(set(found)) == 3003
    assert {prod(parts) for parts in found} == {1024}


@pytest.mark.parametrize(("n", "d"), [(0, 3), (1, 1), (3, 1), (3, 3), (4, 5), (12, 5), (12, 6)])
def test_powers_of_two_have_as_many_partitionings_as_balls_in_buckets(n: int, d: int) -> None:
    assert len(viable(elementwise(*[2**20] * d), 2**n)) == comb(n + d - 1, n)


def test_matmul_at_8_ranks_has_ten_partitionings_in_the_order_of_the_papers_vectors() -> None:
    found = viable(matmul(), 8)
    as_printed = [(i, j, j, k) for i, k, j in found]
    assert as_printed == [
        (1, 1, 1, 8),
        (1, 2, 2, 4),
        (1, 4, 4, 2),
        (1, 8, 8, 1),
        (2, 1, 1, 4),
        (2, 2, 2, 2),
        (2, 4, 4, 1),
        (4, 1, 1, 2),
        (4, 2, 2, 1),
        (8, 1, 1, 1),
    ]
    outputs = {parts[:2] for parts in found}
    assert outputs == {
        (2, 4),
        (4, 2),
        (8, 1),
        (1, 8),
        (2, 2),
        (4, 1),
        (1, 4),
        (1, 1),
        (1, 2),
        (2, 1),
    }


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6, 7, 11, 12, 30, 31, 64, 97, 210])
def test_every_number_of_ranks_is_reached_by_its_prime_factors(ranks: int) -> None:
    found = viable(matmul(1000, 1000, 1000), ranks)
    counts = [prime_factors(ranks).count(f) for f in set(prime_factors(ranks))]
    assert len(found) == prod(comb(n + 2, n) for n in counts)
    assert all(prod(parts) == ranks for parts in found)


@given(st.lists(st.integers(0, 9), max_size=4), st.integers(1, 36))
@settings(max_examples=150)
def test_viable_is_every_vector_with_the_most_calls_that_fits(
    extents: list[int], ranks: int
) -> None:
    ranges = [range(1, max(extent, 1) + 1) for extent in extents]
    fitting = [parts for parts in itertools.product(*ranges) if ranks % prod(parts) == 0]
    most = max(map(prod, fitting))
    assert viable(elementwise(*extents), ranks) == sorted(
        parts for parts in fitting if prod(parts) == most
    )
    assert fullest(tuple(extents), ranks) == max(parts for parts in fitting if prod(parts) == most)


def test_labels_too_small_for_the_ranks_are_cut_as_far_as_they_go() -> None:
    assert viable(matmul(2, 1, 2), 64) == [(2, 2, 1)]
    assert viable(matmul(3, 3, 3), 7) == [(1, 1, 1)]
    assert viable(matmul(0, 1, 8), 4) == [(1, 4, 1)]
    assert viable(elementwise(), 8) == [()]
    assert viable(elementwise(0, 0), 8) == [(1, 1)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("extents", "ranks"),
    [([10**4] * 50, 4096), ([2] * 50, 4096), ([7] * 30, 210), ([3] * 20 + [100], 1024)],
)
def test_very_many_labels_keep_the_list_short(extents: list[int], ranks: int) -> None:
    found = viable(elementwise(*extents), ranks)
    assert 1 < len(found) <= MAX_VECTORS
    assert {prod(parts) for parts in found} == {ranks}
    cut = {k for parts in found for k, d in enumerate(parts) if d > 1}
    left = [extent for k, extent in enumerate(extents) if k not in cut]
    assert max(left, default=0) <= min(extents[k] for k in cut)


def test_enumeration_is_quick() -> None:
    found = []
    calls = calls_of(lambda: found.extend(viable(elementwise(*range(5000, 5005)), 4096)))
    assert len(found) == 1820
    assert calls < 50_000  # 13,000 were counted
