"""The most elements of a tensor that stay on their ranks, given into how many parts it is cut.

Which axis of the mesh cuts which dimension is not known, only how many of each length do.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np

from einmpi.planner.lower_bound.ways import Ints
from einmpi.planner.mesh import prime_factors
from einmpi.planner.paper.viable import divisors

MOST_ELEMENTS = 1 << 61  # that are computed with; they fit into 64 bits, with a sign


def most_kept(before: Ints, after: Ints, bound: tuple[int, ...], ranks: int) -> Ints:
    """Return, for each pair of layouts, the most elements that ranks have before and afterwards.

    A layout is a row: the parts of each dimension, then the copies. The best case: as many axes as
    possible stay without a dimension, and as many as possible stay on theirs. What an axis that
    must turn from a dimension to another leaves on its rank is a share of the tensor.
    """
    turning = _Turning(before, after, bound, ranks)
    repeated = np.ones((len(before), len(after)), np.int64)
    for exponents in turning.of_primes:
        both = np.minimum(exponents.copies_before, exponents.copies_after)
        repeated *= exponents.prime**both
    kept = repeated * turning.longest_shares(repeated_stay=True)
    even = turning.even_shares(repeated_stay=True)
    return kept if even is None else np.minimum(kept, even)


def most_kept_of_one_copy(before: Ints, after: Ints, bound: tuple[int, ...], ranks: int) -> Ints:
    """Return the same for a tensor whose partial results are added up: at most one copy is kept.

    The axes along which they are added up are not among the parts before.
    """
    turning = _Turning(before, after, bound, ranks)
    kept = turning.longest_shares(repeated_stay=False)
    even = turning.even_shares(repeated_stay=False)
    return kept if even is None else np.minimum(kept, even)


class _Exponents:
    """How many axes of one prime length do what, for each pair of layouts."""

    def __init__(self, before: Ints, after: Ints, prime: int, most: int, short: list[int]) -> None:
        self.prime = prime
        exponents_before = _exponents(before, prime, most)[:, None]
        exponents_after = _exponents(after, prime, most)[None]
        self.copies_before = exponents_before[..., -1]
        self.copies_after = exponents_after[..., -1]
        away = exponents_before[..., :-1] - exponents_after[..., :-1]
        self.leaving = np.maximum(0, away).sum(axis=-1)  # at least so many leave their dimension
        # At most so many turn from a short dimension to another one.
        self.among_short = np.minimum(
            exponents_before[..., short].sum(axis=-1), exponents_after[..., short].sum(axis=-1)
        )


class _Turning:
    """The axes that turn from a dimension to another, at least, for each pair of layouts."""

    def __init__(self, before: Ints, after: Ints, bound: tuple[int, ...], ranks: int) -> None:
        self.bound = bound
        self.ranks = ranks
        self.shape = len(before), len(after)
        short = [dimension for dimension, extent in enumerate(bound) if extent < ranks]
        primes = prime_factors(ranks)
        self.of_primes = []
        for prime in sorted(set(primes)):
            count = primes.count(prime)
            self.of_primes.append(_Exponents(before, after, prime, count, short))

    def longest_shares(self, repeated_stay: bool) -> Ints:
        """Return the elements that are left when one axis of each length turns that must.

        Those are all if none must turn. Otherwise a rank keeps no more than the longest share of a
        dimension along such an axis.
        """
        elements = np.full(self.shape, prod(self.bound))
        for exponents in self.of_primes:
            turns = exponents.leaving > exponents.copies_after
            if repeated_stay:
                staying = np.minimum(exponents.copies_before, exponents.copies_after)
                turns = exponents.leaving > exponents.copies_after - staying
            longest = _elements_of_longest_share(self.bound, exponents.prime, self.ranks)
            elements = np.where(turns, np.minimum(elements, longest), elements)
        return elements

    def even_shares(self, repeated_stay: bool) -> Ints | None:
        """Return the elements that are left when every axis that turns leaves an equal share.

        Extents are rounded up so that they divide evenly. None if the numbers become too large.
        """
        rounded = prod(_rounded_up(extent, self.ranks) for extent in self.bound)
        if rounded * self.ranks > MOST_ELEMENTS:
            return None
        times = np.ones(self.shape, np.int64)
        shares = np.ones(self.shape, np.int64)
        for exponents in self.of_primes:
            exponent = exponents.copies_after - exponents.leaving + exponents.among_short
            if not repeated_stay:
                exponent = np.minimum(exponent, 0)
            times *= exponents.prime ** np.maximum(exponent, 0)
            shares *= exponents.prime ** np.maximum(-exponent, 0)
        found: Ints = rounded * times // shares
        return found


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
