"""The ways to cut one vertex over a number of ranks, and the copies that each of them needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from math import comb, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from einmpi.graph.einsum import EinSum
from einmpi.planner.mesh import divided, prime_factors
from einmpi.planner.paper.viable import divisors

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
