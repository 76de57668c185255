"""The exact number of words an edge moves, for all pairs of layouts at once (docs/planner.md). Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.plan.mesh import Mesh

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Factors:
    """Products over axes of the table in docs/planner.md, each scaled to whole numbers.

    wanted f·BD, held f·BS, partials G, common f²·OV, copies 1/SG. Arrays are [source layout, target layout].
    """

    wanted: Ints
    held: Ints
    partials: Ints
    common: Ints
    copies: Ints

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


def layout_factors(factors: Sequence[int], ndim: int, sources: Ints, targets: Ints) -> Factors:
    """The products for all pairs of layouts, given as rows of symbols, one an axis."""
    parts: list[Ints] = [np.ones((len(sources), len(targets)), np.int64) for _ in range(5)]
    for column, factor in enumerate(factors):
        pair = sources[:, column][:, None], targets[:, column]
        for product, part in zip(parts, axis_factors(factor, ndim).parts(), strict=True):
            product *= part[pair]
    return Factors(*parts)


def peers(factors: Sequence[int], ndim: int, sources: Ints, targets: Ints) -> Ints:
    """For all pairs of layouts the product of the axes along which ranks exchange something."""
    product: Ints = np.ones((len(sources), len(targets)), np.int64)
    for column, factor in enumerate(factors):
        source, target = sources[:, column][:, None], targets[:, column]
        product *= np.where((source != target) & (source != ndim), factor, 1)
    return product


def reduction_surplus(products: Sequence[Any], ranks: int) -> Any:
    """ranks² times what aggregating costs more than it saves; where positive, replicas share it."""
    _, held, partials, common, _ = products
    return ranks * (held - held // partials) - common


def received(products: Sequence[Any], ranks: int) -> Any:
    """ranks² times the share of the tensor that each rank receives, from the five products."""
    wanted, copies, surplus = products[0], products[-1], reduction_surplus(products, ranks)
    return ranks * wanted + np.maximum(surplus, 0) // copies + np.minimum(surplus, 0)


def sharing(products: Sequence[Any], between: Sequence[Any]) -> Sequence[Any]:
    """The products over all axes, made ready for `received`, given those over the axes between nodes.

    Idle replicas on other nodes share a reduction only if it goes from node to node anyway.
    """
    elsewhere = np.where(between[2] > 1, 1, between[-1])
    return (*products[:-1], products[-1] // elsewhere)


def over_all_ranks(share: Any, ranks: int, amount: int) -> Any:
    """What all ranks together receive of a tensor of this size: amount · share / ranks, in numbers that stay small."""
    whole, rest = divmod(amount, ranks)
    return share * whole + share * rest // ranks


@cache
def held_factors(axes: tuple[tuple[int, int, int], ...], ndim: int) -> tuple[int, ...]:
    """The five products over axes given as (factor, source symbol, target symbol)."""
    product: tuple[int, ...] = (1,) * 5
    for factor, source, target in axes:
        parts = axis_factors(factor, ndim).parts()
        product = tuple(have * int(part[source, target]) for have, part in zip(product, parts, strict=True))
    return product


def moved_words(axes: tuple[tuple[int, int, int], ...], ndim: int, mesh: Mesh, elements: int) -> tuple[int, int]:
    """(words that all ranks together receive, those of them that come from other nodes) for one pair of layouts."""
    products, between = held_factors(axes, ndim), held_factors(axes[: mesh.node_axes], ndim)
    share, crossing = received(sharing(products, between), mesh.ranks), received(between, mesh.nodes)
    return int(share) * elements // mesh.ranks, int(crossing) * elements // mesh.nodes
