"""The exact number of words an edge moves, for all pairs of layouts at once (docs/planner.md). Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.planner.mesh import Mesh

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


def replicas_share(products: Sequence[int], ranks: int) -> bool:
    """Whether aggregating moves more than it saves: then ranks that would all do the same share it."""
    _, held, partials, common, _ = products
    return ranks * (held - held // partials) > common


def sharing(products: Sequence[Any], between: Sequence[Any]) -> Sequence[Any]:
    """The products over all axes, made ready for `received`, given those over the axes between nodes.

    Idle replicas on other nodes share a reduction only if it goes from node to node anyway.
    """
    elsewhere = np.where(between[2] > 1, 1, between[-1])
    return (*products[:-1], products[-1] // elsewhere)


def received(products: Sequence[Any], amount: int, common: Any) -> Any:
    """What all ranks together receive of a tensor of this amount, from the products and what they have in `common`."""
    wanted, held, partials, _, copies = products
    surplus = (held - held // partials) * amount - common
    return wanted * amount + np.maximum(surplus, 0) // copies + np.minimum(surplus, 0)


def common_share(products: Sequence[Any], ranks: int, amount: int) -> Any:
    """What ranks have before and want after, all together: common · amount / ranks, in numbers that stay small.

    Where an axis turns from one dimension to another whose extents do not divide, `meeting` has the exact number.
    """
    whole, rest = divmod(amount, ranks)
    return products[3] * whole + products[3] * rest // ranks


@cache
def held_factors(axes: tuple[tuple[int, int, int], ...], ndim: int) -> tuple[int, ...]:
    """The five products over axes given as (factor, source symbol, target symbol)."""
    product: tuple[int, ...] = (1,) * 5
    for factor, source, target in axes:
        parts = axis_factors(factor, ndim).parts()
        product = tuple(
            have * int(part[source, target]) for have, part in zip(product, parts, strict=True)
        )
    return product


def moved_words(
    mesh: Mesh, bound: tuple[int, ...], sources: Sequence[int], targets: Sequence[int]
) -> tuple[int, int]:
    """(words that all ranks together receive, those of them that come from other nodes) for one pair of layouts."""
    ndim, elements = len(bound), prod(bound)
    axes = tuple(zip(mesh.factors, sources, targets, strict=True))
    turns = tuple(
        (axis, s, t) for axis, (_, s, t) in enumerate(axes) if s != t and max(s, t) < ndim
    )
    every, between = held_factors(axes, ndim), held_factors(axes[: mesh.node_axes], ndim)
    on_nodes = tuple(turn for turn in turns if turn[0] < mesh.node_axes)
    total = received(sharing(every, between), elements, every[-1] * meeting(mesh, bound, turns))
    return int(total), int(
        received(between, elements, between[-1] * meeting(mesh, bound, on_nodes))
    )


# ---- extents that do not divide -------------------------------------------------------------------------------------


@lru_cache(maxsize=65536)
def meeting(mesh: Mesh, bound: tuple[int, ...], turns: tuple[tuple[int, int, int], ...]) -> int:
    """Elements that stay on their rank when axes turn, each given with the dimensions that it cuts before and after.

    Axes that do not turn make no difference: what their ranks keep adds up to what one rank would.
    """
    together = np.ones([mesh.factors[axis] for axis, _, _ in turns], np.int64)
    for dimension, extent in enumerate(bound):
        cutting = tuple(axis for axis, *pair in turns if dimension in pair)
        shape = [mesh.factors[axis] if axis in cutting else 1 for axis, _, _ in turns]
        together = together * _counts(mesh, extent, cutting).reshape(shape)
    return int(together.sum())


def meetings(mesh: Mesh, bound: tuple[int, ...], axes: int, sources: Ints, targets: Ints) -> Ints:
    """The same for all pairs of layouts, given as rows of symbols, by the first axes alone."""
    ndim = len(bound)
    # Which way an axis turns makes no difference: few pairs of layouts differ.
    code = np.zeros((len(sources), len(targets)), np.int64)
    for axis in range(axes):
        one, two = sources[:, axis][:, None], targets[:, axis]
        low, high = np.minimum(one, two), np.maximum(one, two)
        code = code * ndim**2 + np.where((low < high) & (high < ndim), low * ndim + high, 0)
    different, which = np.unique(code, return_inverse=True)
    found = []
    for number in different.tolist():
        turns = []
        for axis in reversed(range(axes)):
            number, pair = divmod(number, ndim**2)
            turns += [(axis, *divmod(pair, ndim))] if pair else []
        found.append(meeting(mesh, bound, tuple(reversed(turns))))
    return np.array(found, np.int64)[which.reshape(code.shape)]


@lru_cache(maxsize=4096)
def _counts(mesh: Mesh, extent: int, axes: tuple[int, ...]) -> Ints:
    """How many indices of a dimension have each combination of digits on some axes."""
    window_of = {axis: window for window in mesh.windows(extent) for axis in window}
    blocks = {
        window_of[axis]: prod(mesh.factors[other] for other in window_of[axis]) for axis in axes
    }
    # From one border to the next all indices have the same digits.
    borders = [-(-np.arange(count + 1) * extent // count) for count in blocks.values()]
    starts = np.unique(np.concatenate([[0, extent], *borders]))
    which = np.zeros(len(starts) - 1, np.int64)
    for axis in axes:
        count, later = (
            blocks[window_of[axis]],
            prod(mesh.factors[other] for other in window_of[axis] if other > axis),
        )
        which = (
            which * mesh.factors[axis] + starts[:-1] * count // extent // later % mesh.factors[axis]
        )
    found = np.bincount(which, np.diff(starts), prod(mesh.factors[axis] for axis in axes))
    return found.astype(np.int64)
