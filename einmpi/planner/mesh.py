"""The mesh of ranks: prime axes, digits of ranks and of indices, which axes may cut a label (docs/planner.md)."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod

import numpy as np
import numpy.typing as npt


@cache
def prime_factors(number: int) -> tuple[int, ...]:
    """The primes of a number, largest first."""
    factors, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    if number > 1:
        factors.append(number)
    return tuple(reversed(factors))


@dataclass(frozen=True)
class Mesh:
    """`ranks` as a product of prime axes, the slow one first. Rank r has one digit an axis, in that mixed radix.

    The ranks lie on `nodes` nodes, equally many on each and one node after the other: the first axes are between nodes.
    """

    ranks: int
    nodes: int = 1

    @cached_property
    def factors(self) -> tuple[int, ...]:
        """Different primes take turns: neighbouring axes then make many different products."""
        levels = self.nodes, self.ranks // self.nodes
        return tuple(factor for level in levels for factor in _take_turns(prime_factors(level)))

    @cached_property
    def node_axes(self) -> int:
        """How many of the axes, the first ones, are between nodes."""
        return len(prime_factors(self.nodes))

    def parts(self, cuts: Sequence[Hashable], symbols: Iterable[Hashable]) -> tuple[int, ...]:
        """Into how many parts each symbol is cut, given the symbol that each axis cuts."""
        return tuple(
            prod(f for f, cut in zip(self.factors, cuts, strict=True) if cut == s) for s in symbols
        )

    def digits(self, rank: int) -> tuple[int, ...]:
        return _digits(rank, self.factors)

    def windows(self, extent: int) -> tuple[tuple[int, ...], ...]:
        """Groups of neighbouring axes whose product fits into `extent`: one group may cut a label at a time.

        Inside a group an axis always slices the same digit of the index, whatever else is cut; the groups are
        disjoint. So an axis on a label means the same data for every tensor. A label with extent ≥ ranks has one group.
        """
        return _windows(self.factors, extent)

    def digit_of_index(self, index: int, extent: int, axis: int) -> int:
        """Which digit on `axis` owns this index of a label."""
        window = next(group for group in self.windows(extent) if axis in group)
        factors = [self.factors[a] for a in window]
        return _digits(index * prod(factors) // extent, factors)[window.index(axis)]

    def share(self, extent: int, axes: Sequence[int], rank: int) -> tuple[int, ...]:
        """The indices of a label that `rank` owns when `axes` cut it."""
        digits = self.digits(rank)
        return tuple(
            i
            for i in range(extent)
            if all(self.digit_of_index(i, extent, a) == digits[a] for a in axes)
        )


def _take_turns(primes: tuple[int, ...]) -> list[int]:
    """(5, 5, 5, 2, 2, 2) → 5, 2, 5, 2, 5, 2."""
    turn = [primes[:k].count(prime) for k, prime in enumerate(primes)]
    return [primes[k] for k in sorted(range(len(primes)), key=lambda k: turn[k])]


def _digits(number: int, factors: Sequence[int]) -> tuple[int, ...]:
    digits = []
    for factor in reversed(factors):
        digits.append(number % factor)
        number //= factor
    return tuple(reversed(digits))


@cache
def _windows(factors: tuple[int, ...], extent: int) -> tuple[tuple[int, ...], ...]:
    groups: list[tuple[int, ...]] = []
    current: tuple[int, ...] = ()
    for axis, factor in enumerate(factors):
        if factor > extent:
            continue
        if prod(factors[a] for a in current) * factor > extent:
            groups.append(current)
            current = ()
        current = (*current, axis)
    return (*groups, current) if current else tuple(groups)


@cache
def allowed_masks(factors: tuple[int, ...], extent: int) -> npt.NDArray[np.bool_]:
    """For every set of axes, as a bit mask, whether it may cut a label of this extent."""
    masks = np.arange(1 << len(factors))
    groups = [sum(1 << axis for axis in group) for group in _windows(factors, extent)]
    allowed: npt.NDArray[np.bool_] = masks == 0
    for group in groups:
        allowed |= masks & ~group == 0
    return allowed


@cache
def groupings(factors: tuple[int, ...], most: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """All ways to put the axes into at most `most` groups with different products, the most balanced first."""
    ways: list[tuple[tuple[int, ...], ...]] = [((),) * most]
    for prime in sorted(set(factors), reverse=True):
        axes = [axis for axis, factor in enumerate(factors) if factor == prime]
        cuts = itertools.combinations_with_replacement(range(len(axes) + 1), most - 1)
        pieces = [[axes[i:j] for i, j in itertools.pairwise((0, *cut, len(axes)))] for cut in cuts]
        ways = [
            tuple((*g, *p) for g, p in zip(way, piece, strict=True))
            for way in ways
            for piece in pieces
        ]
    found: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
    for way in ways:
        groups = tuple(group for group in way if group)
        products = tuple(
            sorted((prod(factors[axis] for axis in group) for group in groups), reverse=True)
        )
        found.setdefault(products, groups)
    return tuple(found[products] for products in sorted(found))
