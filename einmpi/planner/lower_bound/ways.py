"""The ways to cut one vertex over a number of ranks, by the parts of its labels: what each of them
asks for, and what at most stays on its rank where a tensor goes from one to another."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import comb, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from einmpi.caches import bounded_cache
from einmpi.graph.einsum import EinSum
from einmpi.planner.mesh import divided, divisors, prime_factors

Ints = npt.NDArray[np.int64]

MOST_WAYS = 1 << 17  # with more, nothing is known of a vertex
MOST_WORDS = 1 << 62  # of a sum that fits into 64 bits, with a sign
ROOT_OF_FRACTIONS = 1 << 15
FRACTIONS = ROOT_OF_FRACTIONS**2  # of a copy


class Ways(NamedTuple):
    """What each way to cut a vertex asks for; one row or entry for each way."""

    copies: Ints  # of each operand, a column each: how many more than one the ranks need together
    words: Ints  # of partial results that are moved
    spare: Ints  # copies of the result, more than one, that ranks have computed themselves
    # Beside whole copies, these fractions of one, rounded down; None where there are only whole.
    fractions: Ints | None = None


class Work(NamedTuple):
    """How much of its work a vertex may repeat, and what that costs."""

    most: int  # times that it is repeated
    price: int  # words each time

    def allowed(self, grid: Ints) -> Ints:
        """Return the ways that repeat no more; the last column has who does the same."""
        return grid[grid[:, -1] - 1 <= self.most]


FREE_WORK = Work(MOST_WORDS, 0)  # may be repeated as often as one likes


class Role(NamedTuple):
    """What a label does in a vertex. Labels with the same role are cut as if they were one."""

    lacking: tuple[int, ...]  # the operands that are copied where the label is cut
    makes_partials: bool  # by parts of the label that are added up


def ways_to_cut(
    einsum: EinSum,
    elements: int,
    ranks: int,
    work: Work = FREE_WORK,
    partial_labels: Collection[str] | None = None,
) -> Ways:
    """Return the ways to cut a vertex whose result has so many elements.

    The parts of all labels, times the ranks that compute the same, make up the number of ranks.
    Of `partial_labels`, if not of all that are aggregated, parts make partial results.
    """
    extents: dict[Role, list[int]] = {}
    for label, extent in einsum.extents:
        extents.setdefault(role_of(einsum, label, partial_labels), []).append(extent)
    roles = [(role, tuple(sorted(found))) for role, found in extents.items()]
    return _ways(tuple(sorted(roles)), len(einsum.operands), elements, ranks, work)


def role_of(einsum: EinSum, label: str, partial_labels: Collection[str] | None = None) -> Role:
    """Return what a label does in a vertex."""
    operands = range(len(einsum.operands))
    lacking = tuple(at for at in operands if einsum.dimension_cut_by(at, label) is None)
    if partial_labels is None:
        partial_labels = einsum.aggregated
    return Role(lacking, label in partial_labels)


@bounded_cache(1024)  # layers repeat
def _ways(
    roles: tuple[tuple[Role, tuple[int, ...]], ...],
    operands: int,
    elements: int,
    ranks: int,
    work: Work,
) -> Ways:
    if count_of_ways(ranks, len(roles) + 1) > MOST_WAYS:
        return least_ways(operands, ranks)
    counts = tuple(part_counts(extents, ranks) for _, extents in roles)
    grid = work.allowed(grids(ranks, counts))
    if not len(grid):
        return least_ways(operands, ranks)
    ways = ways_of_grid(grid, [role for role, _ in roles], operands, elements, work)
    distinct = np.unique(np.column_stack(ways[:3]), axis=0)
    return Ways(distinct[:, :operands], distinct[:, operands], distinct[:, operands + 1])


def least_ways(operands: int, ranks: int) -> Ways:
    """Return a single way, which asks for no more than any other."""
    return Ways(np.zeros((1, operands), np.int64), np.zeros(1, np.int64), np.array([ranks - 1]))


def ways_of_grid(
    grid: Ints, roles: Sequence[Role], operands: int, elements: int, work: Work = FREE_WORK
) -> Ways:
    """Return what each way asks for, given the parts for each role and, last, the repetitions."""
    repeated = grid[:, -1]
    copies = np.repeat(repeated[:, None], operands, axis=1)
    partials = np.ones(len(grid), np.int64)
    for role, parts in zip(roles, grid.T, strict=False):
        copies[:, list(role.lacking)] *= parts[:, None]
        if role.makes_partials:
            partials *= parts
    # Where partial results are added up, ranks that compute the same share that work, and none of
    # them has a result of its own.
    spare = np.where(partials == 1, repeated - 1, 0)
    words = elements * (partials - 1) + work.price * (repeated - 1)
    return Ways(copies - 1, words, spare)


def part_counts(extents: Sequence[int], ranks: int) -> frozenset[int]:
    """Return into how many parts labels of these extents can be cut together."""
    found = {1}
    for extent in extents:
        fitting = [parts for parts in divisors(ranks) if parts <= extent]
        products = {known * parts for known in found for parts in fitting}
        found = {product for product in products if ranks % product == 0}
    return frozenset(found)


@bounded_cache(64)
def grids(ranks: int, allowed: tuple[frozenset[int], ...]) -> Ints:
    """Return all ways to write the ranks as a product: an allowed number for each role, and a rest.

    Each way is a row, with the rest last.
    """
    grid = _factorizations(ranks, len(allowed) + 1)
    fits = np.ones(len(grid), bool)
    for column, counts in enumerate(allowed):
        fits &= np.isin(grid[:, column], sorted(counts))
    return grid[fits]


@bounded_cache(64)
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


# ---- what stays on its rank ----------------------------------------------------------------------


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
    short = []  # and without digits that are independent and equal
    for dimension, extent in enumerate(bound):
        if extent < ranks and not _is_even(extent, ranks):
            short.append(dimension)
    elements = prod(bound)
    # Extents as they would be if all fine blocks of a dimension were alike. How many fine blocks
    # there are depends on the axes; the worst case is taken.
    rounded = 1
    for extent in bound:
        rounded *= extent if extent < ranks else -(-extent // ranks) * ranks
    shape = len(before), len(after)
    repeated = np.ones(shape, np.int64)  # ranks that have the same before and afterwards
    # Every axis that turns leaves an equal share of `rounded` elements.
    times = np.ones(shape, np.int64)
    shares = np.ones(shape, np.int64)
    # Where an axis of some length must turn, a rank keeps no more than the longest share of a
    # dimension along such an axis.
    longest = np.full(shape, elements)
    primes = prime_factors(ranks)
    for prime in sorted(set(primes)):
        powers = prime ** np.arange(primes.count(prime) + 1)
        exponents_before = _exponents(before.T, prime, ranks)[:, :, None]
        exponents_after = _exponents(after.T, prime, ranks)[:, None, :]
        copies_after = exponents_after[-1]
        leaving = np.zeros(shape, np.int8)  # at least so many axes leave their dimension
        for dimension in range(len(bound)):
            away = exponents_before[dimension] - exponents_after[dimension]
            leaving += np.maximum(away, 0)
        exponents = copies_after - leaving
        staying = np.minimum(exponents_before[-1], 0 if one_copy else copies_after)
        share = _elements_of_longest_share(bound, prime, ranks)
        longest = np.minimum(longest, np.where(exponents < staying, share, elements))
        repeated *= powers[staying]
        if short:  # at most so many turn from a short dimension to another one
            exponents += np.minimum(
                exponents_before[short].sum(axis=0, dtype=np.int8),
                exponents_after[short].sum(axis=0, dtype=np.int8),
            )
        if not one_copy:
            times *= powers[np.maximum(exponents, 0)]
        shares *= powers[np.maximum(-exponents, 0)]
    kept: Ints = repeated * longest
    if rounded * ranks <= MOST_ELEMENTS:
        kept = np.minimum(kept, rounded * times // shares)
    return kept


def shares(extent: int, parts: Ints, ranks: int) -> tuple[Ints, Ints]:
    """Return the indices of the shortest part of a label and of the longest one."""
    counts, places = np.unique(parts, return_inverse=True)
    found = np.array([_shares(extent, int(count), ranks) for count in counts])
    return found[places, 0], found[places, 1]


@bounded_cache(4096)
def _shares(extent: int, parts: int, ranks: int) -> tuple[int, int]:
    # Parts are some of the fine blocks, of which there may be fewer if there are few indices.
    all_blocks = [ranks] if extent >= ranks else divisors(ranks)
    lengths = []
    for blocks in all_blocks:
        if blocks % parts == 0 and blocks <= extent:
            alike = blocks // parts
            lengths += [alike * (extent // blocks), alike * -(-extent // blocks)]
    return min(lengths), max(lengths)


def _is_even(extent: int, ranks: int) -> bool:
    """Return whether a short dimension is cut into equal parts by digits of the same numbers.

    On several nodes, axes of different lengths may be in windows with digits of other numbers, such
    as 3·3 and 3·2, unless they fit together.
    """
    lengths = [length for length in prime_factors(ranks) if length <= extent]
    if len(set(lengths)) > 1 and prod(lengths) > extent:
        return False
    return not any(extent % parts for parts in divisors(ranks) if parts <= extent)


def _exponents(numbers: Ints, prime: int, ranks: int) -> npt.NDArray[np.int8]:
    """Return how often a prime divides each of the numbers, which divide the number of ranks."""
    known, exponents = _exponents_of_divisors(prime, ranks)
    return exponents[np.searchsorted(known, numbers)]


@bounded_cache(64)
def _exponents_of_divisors(prime: int, ranks: int) -> tuple[Ints, npt.NDArray[np.int8]]:
    """Return the divisors of a number of ranks, and how often a prime divides each of them."""
    known = divisors(ranks)
    exponents = [prime_factors(number).count(prime) for number in known]
    return np.array(known), np.array(exponents, np.int8)


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
