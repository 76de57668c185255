"""The words that an edge moves, against sets of indices and against the table in fractions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from math import ceil, floor, prod
from typing import Any

import numpy as np
import pytest
from plan_oracle import Axes, P, R, axes_of, layouts, received, volume

from einmpi.planner.mesh import Mesh
from einmpi.planner.moving.volume import (
    Factors,
    axes_factors,
    kept_elements_table,
    layout_factors,
    overlap_share,
    traffic,
)
from einmpi.planner.moving.volume import received as words_received

RANKS = (2, 3, 4, 5, 6, 8, 9, 12, 16)


def number(symbol: int | str, ndim: int) -> int:
    """How einmpi numbers a symbol of a tensor: dimensions, R, P."""
    return {R: ndim, P: ndim + 1}.get(symbol, symbol)


def code(axes: Axes, ndim: int, base: int) -> int:
    total = 0
    for symbol in axes:
        total = total * base + number(symbol, ndim)
    return total


@cache
def every_pair(ranks: int, ndim: int) -> tuple[np.ndarray, ...]:
    """einmpi's products for all pairs of layouts."""
    factors = axes_of(ranks)
    sources, targets = (
        np.array(list(itertools.product(range(symbols), repeat=len(factors))), np.int64)
        for symbols in (ndim + 2, ndim + 1)
    )
    return layout_factors(factors, ndim, sources, targets)


def closed_form(products: Sequence[Any], ranks: int, elements: int) -> Any:
    products = Factors(*products)
    return words_received(products, elements, overlap_share(products, ranks, elements))


@cache
def table(ranks: int, ndim: int) -> np.ndarray:
    """Return einmpi's words for all pairs of layouts of a tensor with ranks² elements."""
    return closed_form(every_pair(ranks, ndim), ranks, ranks**2)


def words(ranks: int, ndim: int, source: Axes, target: Axes, elements: int) -> int:
    pair = code(source, ndim, ndim + 2), code(target, ndim, ndim + 1)
    return int(closed_form([product[pair] for product in every_pair(ranks, ndim)], ranks, elements))


def random_axes(rng: random.Random, ranks: int, symbols: list[int | str]) -> Axes:
    return tuple(rng.choice(symbols) for _ in axes_of(ranks))


# ---- against sets -----------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", RANKS)
def test_without_partial_sums_a_rank_receives_what_it_wants_and_does_not_hold(ranks):
    """Return extents for which all blocks are equal: multiples of the ranks, or of what fits."""
    rng = random.Random(ranks)
    factors = axes_of(ranks)
    for _ in range(250):
        even = [ranks, 2 * ranks, *(prod(factors[:k]) for k in range(len(factors)))]
        extents = tuple(rng.choice(even[:2]) for _ in range(rng.choice((1, 1, 2, 2, 3))))
        if len(extents) == 2 and rng.random() < 0.4:
            extents = (extents[0], rng.choice(even))
        source, target = (rng.choice(layouts(ranks, extents)) for _ in range(2))
        expected = received(factors, extents, source, target)
        assert words(ranks, len(extents), source, target, prod(extents)) == expected, (
            extents,
            source,
            target,
        )


def test_the_worked_example_of_a_transposition():
    """Two ranks, a 2 × 2 matrix, from rows to columns: each rank lacks one of its two elements."""
    assert received((2,), (2, 2), (0,), (1,)) == 2
    assert words(2, 2, (0,), (1,), 4) == 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", RANKS)
def test_extents_that_do_not_divide(ranks):
    """One pair of layouts and all at once; a label shorter than the ranks takes some axes only."""
    rng = random.Random(ranks)
    factors, mesh = axes_of(ranks), Mesh(ranks)
    for _ in range(60):
        extents = tuple(rng.randrange(1, 3 * ranks) for _ in range(rng.choice((1, 2, 2, 3))))
        source, target = (rng.choice(layouts(ranks, extents)) for _ in range(2))
        rows = [[number(symbol, len(extents)) for symbol in axes] for axes in (source, target)]
        expected = received(factors, extents, source, target)
        moved = traffic(mesh, extents, *map(tuple, rows))
        assert (moved.words.total, moved.between) == (expected, (0, 0)), (extents, source, target)
        sources, targets = (np.array([row], np.int64) for row in rows)
        products = layout_factors(factors, len(extents), sources, targets)
        common = products.replicas * kept_elements_table(
            mesh, extents, len(factors), sources, targets
        )
        assert words_received(products, prod(extents), common)[0, 0] == expected


def test_a_short_label_that_two_windows_cut():
    """Of four indices the first and the last axis of 2·2·2 take halves, not independently."""
    assert received((2, 2, 2), (4, 8), (0, 1, 1), (1, 1, 0)) == 24
    assert traffic(Mesh(8), (4, 8), (0, 1, 1), (1, 1, 0)).words.total == 24


# ---- against the table ------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [*RANKS, 7, 30])
@pytest.mark.parametrize("ndim", [0, 1, 2, 3])
def test_every_pair_of_layouts_costs_what_the_formula_says(ranks, ndim):
    rng = random.Random(100 * ranks + ndim)
    dims: list[int | str] = list(range(ndim))
    for _ in range(150):
        source = random_axes(rng, ranks, [*dims, R, P])
        target = random_axes(rng, ranks, [*dims, R])
        elements = rng.choice((1, 7, ranks, 12345, ranks**2))
        expected = elements * volume(axes_of(ranks), source, target)
        # What stays is rounded down where it is no whole number.
        assert words(ranks, ndim, source, target, elements) in (floor(expected), ceil(expected)), (
            source,
            target,
        )


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_collectives_over_some_axes_cost_their_minimum(ranks, count, last):
    """All-gather and reduce-scatter of n words on q ranks move (q − 1)·n, all-reduce twice that."""
    factors = axes_of(ranks)
    chosen = range(len(factors))[-count:] if last else range(len(factors))[:count]
    q = prod(factors[axis] for axis in chosen)
    n = 5 * ranks

    def cost(before: int | str, after: int | str) -> int:
        """The chosen axes change; the others cut dimension 1."""
        source, target = (
            tuple(s if a in chosen else 1 for a in range(len(factors))) for s in (before, after)
        )
        return words(ranks, 2, source, target, n)

    assert cost(0, R) == (q - 1) * n
    assert cost(P, 0) == (q - 1) * n
    assert cost(P, 1) == (q - 1) * n
    assert cost(P, R) == 2 * (q - 1) * n
    assert cost(R, 0) == cost(0, 0) == cost(R, R) == 0
    assert cost(0, 1) == Fraction(q - 1, q) * n


def test_idle_copies_share_the_work_of_a_reduction():
    """Eight ranks, two copies of four partial sums: sharing the reduction moves 10 n, not 12."""
    assert words(8, 1, (P, P, R), (R, R, R), 1) == 10
    assert words(8, 1, (P, P, R), (0, 0, R), 8) == 32
    assert words(8, 1, (P, P, R), (0, 0, 0), 8) == 24  # each copy reduces its half


@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 12])
@pytest.mark.parametrize("ndim", [0, 1, 2])
def test_one_pair_costs_what_the_table_of_all_pairs_has(ranks, ndim):
    factors = axes_of(ranks)
    whole = table(ranks, ndim)
    assert whole.shape == ((ndim + 2) ** len(factors), (ndim + 1) ** len(factors))
    rng = random.Random(ranks)
    for _ in range(200):
        source = tuple(rng.randrange(ndim + 2) for _ in factors)
        target = tuple(rng.randrange(ndim + 1) for _ in factors)
        entry = whole[code(source, ndim, ndim + 2), code(target, ndim, ndim + 1)]
        products = axes_factors(tuple(zip(factors, source, target, strict=True)), ndim)
        assert closed_form(products, ranks, ranks**2) == entry


# ---- in general -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "ndim"), [(8, 1), (8, 2), (12, 2), (6, 3), (16, 1), (30, 2), (9, 3)]
)
def test_no_detour_is_shorter(ranks, ndim):
    """w(S → D) ≤ w(S → M) + w(M → D) for all layouts S, M and D: 170,000 triples."""
    costs = table(ranks, ndim)
    every = np.ndindex(*(ndim + 2,) * len(axes_of(ranks)))
    whole = [index for index, symbols in enumerate(every) if max(symbols) <= ndim]
    between = costs[whole]  # sources without partial sums, in the order of the targets
    assert between.shape[0] == between.shape[1] == costs.shape[1]
    detour = (costs[:, :, None] + between[None, :, :]).min(axis=1)
    assert (costs <= detour).all()


@pytest.mark.parametrize("ranks", RANKS)
def test_nothing_is_free_but_what_is_there_already(ranks):
    costs = table(ranks, 2)
    assert (costs >= 0).all()
    for axes in layouts(ranks, (ranks, ranks)):
        row = costs[code(axes, 2, 4)]
        free = {other for other in layouts(ranks, (ranks, ranks)) if row[code(other, 2, 3)] == 0}
        assert free == {
            other
            for other in layouts(ranks, (ranks, ranks))
            if all(a in (R, b) for a, b in zip(axes, other, strict=True))
        }


@pytest.mark.parametrize("nbytes", [2**50, 2**50 - 1, 3 * 2**48 + 5])
def test_a_tensor_of_2_to_the_50_bytes_on_4096_ranks_does_not_overflow(nbytes):
    rng = random.Random(0)
    factors = axes_of(4096)
    extremes = [
        ((P,) * 12, (R,) * 12),
        ((0,) * 12, (R,) * 12),
        ((P,) * 12, (0,) * 12),
        ((P, *(R,) * 11), (R,) * 12),
    ]
    pairs = extremes + [
        (random_axes(rng, 4096, [0, 1, R, P]), random_axes(rng, 4096, [0, 1, R]))
        for _ in range(200)
    ]
    for source, target in pairs:
        numbered = [tuple(number(symbol, 2) for symbol in axes) for axes in (source, target)]
        products = axes_factors(tuple(zip(factors, *numbered, strict=True)), 2)
        found = int(
            closed_form([np.array(product, np.int64) for product in products], 4096, nbytes)
        )
        expected = nbytes * volume(factors, source, target)
        assert found in (floor(expected), ceil(expected))
