"""The most elements of a tensor that stay on their ranks, given into how many parts it is cut.

Which axis of the mesh cuts which dimension is not known, only how many of each length do.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from math import comb, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from einmpi.graph.einsum import EinSum
from einmpi.planner.mesh import divided, prime_factors
from einmpi.planner.paper import divisors

# ---- ways ----------------------------------------------------------------------------------------
#
# The ways to cut one vertex over a number of ranks, and the copies that each of them needs.


Ints = npt.NDArray[np.int64]

MOST_WAYS = 1 << 17  # with more, nothing is known of a vertex
MOST_WORDS = 1 << 62  # of a sum that fits into 64 bits, with a sign


class Ways(NamedTuple):
    """What each way to cut a vertex asks for; one row or entry for each way."""

    copies: Ints  # of each operand, a column each: how many more than one the ranks need together
    words: Ints  # of partial results that are moved
    spare: Ints  # copies of the result, more than one, that ranks have computed themselves


class Role(NamedTuple):
    """What a label does in a vertex. Labels with the same role are cut as if they were one."""

    lacking: tuple[int, ...]  # the operands that are copied where the label is cut
    is_aggregated: bool


def ways_to_cut(einsum: EinSum, elements: int, ranks: int) -> Ways:
    """Return the ways to cut a vertex whose result has so many elements.

    The parts of all labels, times the ranks that compute the same, make up the number of ranks.
    """
    extents: dict[Role, list[int]] = {}
    for label, extent in einsum.extents:
        extents.setdefault(role_of(einsum, label), []).append(extent)
    roles = [(role, tuple(sorted(found))) for role, found in extents.items()]
    return _ways(tuple(sorted(roles)), len(einsum.operands), elements, ranks)


def role_of(einsum: EinSum, label: str) -> Role:
    """Return what a label does in a vertex."""
    operands = range(len(einsum.operands))
    lacking = tuple(at for at in operands if einsum.dimension_cut_by(at, label) is None)
    return Role(lacking, label in einsum.aggregated)


@lru_cache(maxsize=1024)  # layers repeat
def _ways(
    roles: tuple[tuple[Role, tuple[int, ...]], ...], operands: int, elements: int, ranks: int
) -> Ways:
    if count_of_ways(ranks, len(roles) + 1) > MOST_WAYS:
        # No way asks for less than this one.
        return Ways(np.zeros((1, operands), np.int64), np.zeros(1, np.int64), np.array([ranks - 1]))
    grid = grids(ranks, [part_counts(extents, ranks) for _, extents in roles])
    ways = ways_of_grid(grid, [role for role, _ in roles], operands, elements)
    distinct = np.unique(np.column_stack(ways), axis=0)
    return Ways(distinct[:, :operands], distinct[:, operands], distinct[:, operands + 1])


def ways_of_grid(grid: Ints, roles: Sequence[Role], operands: int, elements: int) -> Ways:
    """Return what each way asks for, given the parts for each role and, last, the repetitions."""
    repeated = grid[:, -1]
    copies = np.repeat(repeated[:, None], operands, axis=1)
    partials = np.ones(len(grid), np.int64)
    for role, parts in zip(roles, grid.T, strict=False):
        copies[:, list(role.lacking)] *= parts[:, None]
        if role.is_aggregated:
            partials *= parts
    # Where partial results are added up, ranks that compute the same share that work, and none of
    # them has a result of its own.
    spare = np.where(partials == 1, repeated - 1, 0)
    return Ways(copies - 1, elements * (partials - 1), spare)


def part_counts(extents: Sequence[int], ranks: int) -> frozenset[int]:
    """Return into how many parts labels of these extents can be cut together."""
    found = {1}
    for extent in extents:
        fitting = [parts for parts in divisors(ranks) if parts <= extent]
        products = {known * parts for known in found for parts in fitting}
        found = {product for product in products if ranks % product == 0}
    return frozenset(found)


def grids(ranks: int, allowed: Sequence[Collection[int]]) -> Ints:
    """Return all ways to write the ranks as a product: an allowed number for each role, and a rest.

    Each way is a row, with the rest last.
    """
    grid = _factorizations(ranks, len(allowed) + 1)
    fits = np.ones(len(grid), bool)
    for column, counts in enumerate(allowed):
        fits &= np.isin(grid[:, column], sorted(counts))
    return grid[fits]


@lru_cache(maxsize=64)
def _factorizations(ranks: int, numbers: int) -> Ints:
    """Return all ways to write the ranks as an ordered product of so many numbers, as rows."""
    rows = np.ones((1, numbers), np.int64)
    primes = prime_factors(ranks)
    for prime in sorted(set(primes)):
        count = primes.count(prime)
        exponents = []
        for parts in divided(count, numbers):
            exponents.append([end - start for start, end in parts])
        powers = prime ** np.array(exponents, np.int64)
        rows = (rows[:, None] * powers).reshape(-1, numbers)
    return rows


def count_of_ways(ranks: int, numbers: int) -> int:
    """Return how many ways there are to write the ranks as a product of so many numbers."""
    primes = prime_factors(ranks)
    return prod(comb(primes.count(prime) + numbers - 1, numbers - 1) for prime in set(primes))


MOST_ELEMENTS = 1 << 61  # that are computed with; they fit into 64 bits, with a sign


def most_kept(
    before: Ints, after: Ints, bound: tuple[int, ...], ranks: int, one_copy: bool = False
) -> Ints:
    """Return, for each pair of layouts, the most elements that ranks have before and afterwards.

    A layout is a row: the parts of each dimension, then the copies. The best case: as many axes as
    possible stay without a dimension, and as many as possible stay on theirs. What an axis that
    must turn from a dimension to another leaves on its rank is a share of the tensor.

    Of a tensor whose partial results are added up, at most `one_copy` is kept. The axes along which
    they are added up are not among the parts before.
    """
    shape = len(before), len(after)
    short = [dimension for dimension, extent in enumerate(bound) if extent < ranks]
    repeated = np.ones(shape, np.int64)
    # Where an axis of some length must turn, a rank keeps no more than the longest share of a
    # dimension along such an axis.
    elements = np.full(shape, prod(bound))
    # Every axis that turns leaves an equal share, if extents are rounded up to divide evenly.
    times = np.ones(shape, np.int64)
    shares = np.ones(shape, np.int64)
    primes = prime_factors(ranks)
    for prime in sorted(set(primes)):
        exponents_before = _exponents(before, prime, primes.count(prime))[:, None]
        exponents_after = _exponents(after, prime, primes.count(prime))[None]
        copies_after = exponents_after[..., -1]
        away = exponents_before[..., :-1] - exponents_after[..., :-1]
        leaving = np.maximum(0, away).sum(axis=-1)  # at least so many leave their dimension
        # At most so many turn from a short dimension to another one.
        among_short = np.minimum(
            exponents_before[..., short].sum(axis=-1), exponents_after[..., short].sum(axis=-1)
        )
        exponent = copies_after - leaving + among_short
        if one_copy:
            turns = leaving > copies_after
            exponent = np.minimum(exponent, 0)
        else:
            staying = np.minimum(exponents_before[..., -1], copies_after)
            repeated *= prime**staying
            turns = leaving > copies_after - staying
        longest = _elements_of_longest_share(bound, prime, ranks)
        elements = np.where(turns, np.minimum(elements, longest), elements)
        times *= prime ** np.maximum(exponent, 0)
        shares *= prime ** np.maximum(-exponent, 0)
    kept: Ints = repeated * elements
    rounded = prod(_rounded_up(extent, ranks) for extent in bound)
    if rounded * ranks > MOST_ELEMENTS:
        return kept
    even: Ints = rounded * times // shares
    return np.minimum(kept, even)


def _exponents(numbers: Ints, prime: int, most: int) -> Ints:
    """Return how often a prime divides each of the numbers, which is at most `most` times."""
    found = np.zeros(numbers.shape, np.int64)
    for exponent in range(1, most + 1):
        found += numbers % prime**exponent == 0
    return found


@lru_cache(maxsize=1024)
def _rounded_up(extent: int, ranks: int) -> int:
    """Return the most indices that a dimension would have if all its fine blocks were alike.

    How many fine blocks there are depends on the axes; the worst case is taken.
    """
    if extent < ranks:
        return extent
    return -(-extent // ranks) * ranks


@lru_cache(maxsize=1024)
def _elements_of_longest_share(bound: tuple[int, ...], length: int, ranks: int) -> int:
    """Return the most elements of a tensor that have one digit on an axis of this length.

    The axis slices a digit of the number of a fine block. How many fine blocks there are depends on
    the axis; the worst case is taken.
    """
    most = 0
    for extent in bound:
        for blocks in divisors(ranks):
            if blocks % length == 0 and blocks <= extent:
                indices = min(extent, blocks // length * -(-extent // blocks))
                most = max(most, prod(bound) // extent * indices)
    return most
