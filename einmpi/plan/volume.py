"""The exact number of words an edge moves, for all pairs of layouts at once (planner, section 3). Integers only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, reduce

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Factors:
    """Products over axes of the table in planner section 3, each scaled to whole numbers.

    wanted f·BD, held f·BS, partials G, common f²·OV, copies 1/SG. Arrays are [source layout, target layout].
    """

    wanted: Ints
    held: Ints
    partials: Ints
    common: Ints
    copies: Ints

    def times(self, other: Factors) -> Factors:
        """Both sets of axes together, layouts multiplied out (Kronecker)."""
        return Factors(*(np.kron(mine, theirs) for mine, theirs in zip(self.parts(), other.parts(), strict=True)))

    def parts(self) -> tuple[Ints, ...]:
        return self.wanted, self.held, self.partials, self.common, self.copies

    def scaled(self, other: tuple[int, ...]) -> Factors:
        """With axes whose layout is fixed, given by their five products."""
        return Factors(*(mine * theirs for mine, theirs in zip(self.parts(), other, strict=True)))


@cache
def axis_factors(factor: int, ndim: int) -> Factors:
    """One axis. Source symbols: dimensions 0 … ndim−1, R, P; target symbols: dimensions, R."""
    f, replicated, partial = factor, ndim, ndim + 1
    shape = (ndim + 2, ndim + 1)
    wanted, held, partials, common, copies = (np.ones(shape, np.int64) for _ in range(5))
    wanted[:, replicated] = f
    held[partial, :] = f
    held[replicated, replicated] = f
    partials[partial, :] = f
    common[:, :] = f
    common[:ndim, :ndim] = np.where(np.eye(ndim, dtype=bool), f, 1)
    common[replicated, replicated] = f * f
    copies[replicated, replicated] = f
    return Factors(wanted, held, partials, common, copies)


@cache
def mesh_factors(factors: tuple[int, ...], ndim: int) -> Factors:
    """All axes; a layout's number has its symbols as digits, the first axis the highest."""
    one = Factors(*(np.ones((1, 1), np.int64) for _ in range(5)))
    return reduce(Factors.times, (axis_factors(factor, ndim) for factor in factors), one)


def moved(table: Factors, ranks: int) -> Ints:
    """ranks² times the share of the tensor that each rank receives, for every pair of layouts."""
    delta = ranks * (table.held - table.held // table.partials) - table.common
    delta = np.where(delta > 0, delta // table.copies, delta)
    return ranks * table.wanted + delta


def in_bytes(share: Ints, ranks: int, nbytes: int) -> Ints:
    """Bytes over all ranks from `moved`, in whole numbers that stay small: nbytes · share / ranks."""
    whole, rest = divmod(nbytes, ranks)
    return share * whole + share * rest // ranks


@cache
def held_factors(axes: tuple[tuple[int, int, int], ...], ndim: int) -> tuple[int, ...]:
    """The five products over axes given as (factor, source symbol, target symbol)."""
    product: tuple[int, ...] = (1,) * 5
    for factor, source, target in axes:
        parts = axis_factors(factor, ndim).parts()
        product = tuple(have * int(part[source, target]) for have, part in zip(product, parts, strict=True))
    return product


def moved_between(axes: tuple[tuple[int, int, int], ...], ndim: int, ranks: int) -> int:
    """`moved` for one pair of layouts, in Python's integers."""
    wanted, held, partials, common, copies = held_factors(axes, ndim)
    delta = ranks * (held - held // partials) - common
    return ranks * wanted + (delta // copies if delta > 0 else delta)
