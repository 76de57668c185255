"""The mesh of ranks: digits, windows, shares of a label, and shapes with fewer axes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import numpy.typing as npt
import pytest
from plan_oracle import owned_indices

from einmpi.planner.memory import longest_share
from einmpi.planner.mesh import Mesh, divisors, groupings, may_cut, prime_factors
from einmpi.planner.moving.halo import share

MANY_RANKS = (*range(1, 300), 1000, 4095, 4096)
RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 18, 30, 36, 64, 97, 100, 210)
EXTENTS = (1, 2, 3, 4, 5, 7, 8, 11, 12, 16, 17, 30, 50, 64)
SOME_RANKS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 30, 36)  # where the shares of all ranks are looked at


def fits_one_window(mesh: Mesh, extent: int, axes: Sequence[int]) -> bool:
    return any(set(axes) <= set(window) for window in mesh.windows(extent))


def subsets(items: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for count in range(len(items) + 1):
        yield from itertools.combinations(items, count)


def allowed_masks(
    factors: tuple[int, ...], extent: int, across_windows: bool = False
) -> npt.NDArray[np.bool_]:
    """Whether each set of axes, as a bit mask, may cut a label of this extent."""
    return may_cut(factors, extent, np.arange(1 << len(factors)), across_windows)


def test_prime_factors_multiply_to_the_ranks_largest_first():
    for ranks in MANY_RANKS:
        factors = prime_factors(ranks)
        assert prod(factors) == ranks
        assert all(f > 1 and all(f % d for d in range(2, f)) for f in factors)
        assert list(factors) == sorted(factors, reverse=True)


def test_divisors_of_many_numbers_and_of_a_million():
    for number in MANY_RANKS:
        assert divisors(number) == tuple(d for d in range(1, number + 1) if number % d == 0)
    assert divisors(2**20) == tuple(2**exponent for exponent in range(21))


def test_axes_are_the_prime_factors_taking_turns():
    for ranks in MANY_RANKS:
        primes = prime_factors(ranks)
        turns = itertools.zip_longest(
            *([p] * primes.count(p) for p in sorted(set(primes), reverse=True))
        )
        assert Mesh(ranks).factors == tuple(p for turn in turns for p in turn if p is not None)


@pytest.mark.parametrize("ranks", RANKS)
def test_digits_count_the_ranks_the_last_axis_fastest(ranks):
    mesh = Mesh(ranks)
    odometer = itertools.product(*(range(factor) for factor in mesh.factors))
    assert [mesh.digits(rank) for rank in range(ranks)] == list(odometer)


@pytest.mark.parametrize("ranks", RANKS)
def test_windows_are_runs_of_the_axes_that_fit(ranks):
    mesh = Mesh(ranks)
    for extent in EXTENTS:
        windows = mesh.windows(extent)
        assert [axis for window in windows for axis in sorted(window)] == [
            a for a, f in enumerate(mesh.factors) if f <= extent
        ]
        assert all(
            window and prod(mesh.factors[axis] for axis in window) <= extent for window in windows
        )


@pytest.mark.parametrize("ranks", RANKS)
def test_no_window_could_take_the_axis_after_it(ranks):
    mesh = Mesh(ranks)
    for extent in EXTENTS:
        for window, following in itertools.pairwise(mesh.windows(extent)):
            assert (
                prod(mesh.factors[axis] for axis in window) * mesh.factors[min(following)] > extent
            )


@pytest.mark.parametrize("ranks", RANKS)
def test_a_label_as_long_as_the_ranks_has_one_window(ranks):
    every = tuple(range(len(Mesh(ranks).factors)))
    for extent in (ranks, ranks + 1, 10 * ranks):
        assert Mesh(ranks).windows(extent) == ((every,) if every else ())


@pytest.mark.parametrize("ranks", RANKS)
def test_axes_may_cut_a_label_together_when_they_are_in_one_window(ranks):
    mesh = Mesh(ranks)
    for extent in EXTENTS:
        axes = range(len(mesh.factors))
        allowed = allowed_masks(mesh.factors, extent)
        assert len(allowed) == 2 ** len(axes)
        for chosen in subsets(axes):
            fits = not chosen or fits_one_window(mesh, extent, chosen)
            assert allowed[sum(1 << axis for axis in chosen)] == fits


@pytest.mark.parametrize("ranks", SOME_RANKS)
def test_axes_of_several_windows_cut_a_label_into_almost_equal_parts(ranks):
    """No rank is without indices, ranks share them out, and runs and longest shares agree."""
    mesh = Mesh(ranks)
    for extent in EXTENTS:
        across = False
        allowed = allowed_masks(mesh.factors, extent, True)
        assert (allowed >= allowed_masks(mesh.factors, extent)).all()
        for axes in subsets(range(len(mesh.factors))):
            if not axes or not allowed[sum(1 << axis for axis in axes)]:
                continue
            across = across or not fits_one_window(mesh, extent, axes)
            parts = prod(mesh.factors[axis] for axis in axes)
            shares = [owned_indices(mesh, extent, axes, rank) for rank in range(ranks)]
            assert all(shares)
            found = [index for owned in set(shares) for index in owned]
            assert len(set(shares)) == parts
            assert sorted(found) == list(range(extent))
            assert max(map(len, shares)) <= longest_share(mesh, extent, axes)
            for rank in range(0, ranks, 5):
                cuts = tuple((axis, mesh.digits(rank)[axis]) for axis in axes)
                runs = share(mesh, extent, cuts)
                assert [i for start, stop in runs for i in range(start, stop)] == [*shares[rank]]
        assert mesh.mixes_windows([extent]) == across


def test_a_window_that_begins_as_an_earlier_one_slices_the_same_digits():
    assert Mesh(8).windows(7) == ((0, 1), (2,))
    allowed = allowed_masks((2, 2, 2), 7, True)
    assert [mask for mask in range(8) if allowed[mask]] == [0, 1, 2, 3, 4, 6]  # 2 with 1, not 0
    # 2·5·5·2·5 and 2: the last axis slices the digit of axis 1, not that of axis 0.
    assert Mesh(1000).windows(960) == ((1, 0, 2, 3, 4), (5,))
    assert Mesh(1000).places(960)[5] == Mesh(1000).places(960)[1] == (2,)
    assert allowed_masks(Mesh(1000).factors, 960, True)[0b110000]
    # 5·2·5 and 5·2·2: what both have comes first.
    assert Mesh(1000).windows(64) == ((0, 1, 2), (4, 3, 5))
    assert Mesh(30).windows(10) == ((0,), (1, 2))  # 5, and 3·2: other digits
    allowed = allowed_masks((5, 3, 2), 10, True)
    assert [mask for mask in range(8) if allowed[mask]] == [0, 1, 2, 4, 6]


def every_cut(ranks: int, extent: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(window, axes of it that cut the label)."""
    for window in Mesh(ranks).windows(extent):
        for axes in subsets(window):
            yield window, axes


@pytest.mark.parametrize("ranks", SOME_RANKS)
def test_shares_partition_the_label_into_almost_equal_parts(ranks):
    mesh = Mesh(ranks)
    for extent in EXTENTS:
        for window, axes in every_cut(ranks, extent):
            copies = ranks // prod(mesh.factors[axis] for axis in axes)
            shares = [owned_indices(mesh, extent, axes, rank) for rank in range(ranks)]
            assert sorted(i for share in shares for i in share) == sorted(
                list(range(extent)) * copies
            )
            blocks = prod(
                mesh.factors[axis] for axis in window
            )  # fine ones, of ⌊extent / blocks⌋ indices or one more
            each = blocks // prod(mesh.factors[axis] for axis in axes)
            assert all(
                each * (extent // blocks) <= len(s) <= each * -(-extent // blocks) for s in shares
            )


@pytest.mark.parametrize("ranks", SOME_RANKS)
def test_ranks_with_equal_digits_own_the_same_and_others_nothing_in_common(ranks):
    mesh = Mesh(ranks)
    for extent in EXTENTS:
        for _, axes in every_cut(ranks, extent):
            owner: dict[int, tuple[int, ...]] = {}
            for rank in range(ranks):
                digits = tuple(mesh.digits(rank)[axis] for axis in axes)
                for index in owned_indices(mesh, extent, axes, rank):
                    assert owner.setdefault(index, digits) == digits


@pytest.mark.sampled(7)
@pytest.mark.parametrize("ranks", SOME_RANKS)
def test_an_axis_slices_the_same_indices_whatever_else_is_cut(ranks):
    mesh = Mesh(ranks)
    for extent in EXTENTS:
        for _, axes in every_cut(ranks, extent):
            for rank in range(0, ranks, max(1, ranks // 5)):
                alone = [set(owned_indices(mesh, extent, (axis,), rank)) for axis in axes]
                assert set(owned_indices(mesh, extent, axes, rank)) == set(
                    range(extent)
                ).intersection(*alone)


@pytest.mark.parametrize("ranks", SOME_RANKS)
def test_the_first_axes_of_a_window_give_contiguous_blocks_in_order_of_the_ranks(ranks):
    mesh = Mesh(ranks)
    for extent in EXTENTS:
        for window in mesh.windows(extent):
            for count in range(1, len(window) + 1):
                axes = window[:count]
                shares = {
                    tuple(mesh.digits(r)[a] for a in axes): owned_indices(mesh, extent, axes, r)
                    for r in range(ranks)
                }
                assert [index for digits in sorted(shares) for index in shares[digits]] == list(
                    range(extent)
                )


def test_a_later_axis_gives_pieces_one_fine_block_apart():
    assert owned_indices(Mesh(4), 8, (0,), 0) == (0, 1, 2, 3)
    assert owned_indices(Mesh(4), 8, (1,), 0) == (0, 1, 4, 5)
    assert owned_indices(Mesh(4), 8, (0, 1), 1) == (2, 3)
    assert Mesh(12).factors == (3, 2, 2)
    assert Mesh(12).windows(4) == ((0,), (1, 2))
    assert owned_indices(Mesh(12), 4, (2,), 1) == (1, 3)
    assert Mesh(36).factors == (3, 2, 3, 2)
    assert Mesh(36).windows(6) == ((0, 1), (2, 3))
    assert Mesh(100).windows(4) == ((1, 3),)


# ---- shapes with fewer axes -------------------------------------------------------------------


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to put items into unordered groups."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for k in range(len(rest)):
            yield [*rest[:k], [items[0], *rest[k]], *rest[k + 1 :]]


def products(factors: Sequence[int], groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sorted((prod(factors[axis] for axis in group) for group in groups), reverse=True))


@pytest.mark.parametrize(
    "ranks", [1, 2, 4, 6, 8, 12, 16, 24, 30, 36, 60, 64, 97, 120, 128, 180, 210]
)
@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_groupings_have_every_product_that_some_grouping_has_once(ranks, most):
    factors = Mesh(ranks).factors
    ways = groupings(factors, most)
    for groups in ways:
        assert sorted(axis for group in groups for axis in group) == list(range(len(factors)))
        assert all(groups) and len(groups) <= most
    every = {
        products(factors, way) for way in partitions(list(range(len(factors)))) if len(way) <= most
    }
    found = [products(factors, groups) for groups in ways]
    assert len(found) == len(set(found))
    assert set(found) == every


@pytest.mark.parametrize("ranks", [16, 36, 60, 64, 1024, 4095, 4096])
def test_groupings_come_balanced_first(ranks):
    factors = Mesh(ranks).factors
    longest = [products(factors, groups)[0] for groups in groupings(factors, 3)]
    assert longest == sorted(longest)
    assert longest[-1] == ranks
