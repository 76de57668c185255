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
