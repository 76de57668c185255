"""The weights of attention: softmax over columns of scaled and masked scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeAlias

from einmpi.graph.scalar import Call, Element, Scalar
from einmpi.kernels.attention.expansion import (
    Expansion,
    Factors,
    NoMatchError,
    element_of,
    factors_of,
    number_of,
    only,
    require,
)
from einmpi.kernels.attention.mask import ALL_SEEN, Band, band_of

Mask: TypeAlias = tuple[Scalar, bool]  # a condition, and whether scores are seen where it is false
# Names of labels that are aggregated. No label of a program has a space.
CONTRACTED_LABEL = "contracted label"  # of the scores
COLUMN_LABEL = "column label"  # of the softmax


@dataclass(frozen=True)
class Scores:
    """What the softmax is taken of: `scale` times an element of Q·Kᵀ; `fill` outside of a band."""

    element: Element
    scale: float = 1.0
    band: Band = ALL_SEEN
    fill: float = -inf
    mask: Mask | None = None  # as the program has it


@dataclass(frozen=True)
class Weights:
    """exp(scores − maximum) over its sum, with labels of the kernel that it was found in."""

    scores: Scores
    exponential: Scalar
    maximum: Element  # of the scores, over the columns
    total: Element | None  # the sum of exponentials over the columns; None if it is not needed
    q: Element
    k: Element


def weights_of(
    expansion: Expansion, exponential: Scalar, denominators: Sequence[Scalar]
) -> Weights:
    """Recognise a softmax over COLUMN_LABEL by its numerator and its denominator.

    The maximum and the total may be given from outside of the chain.
    """
    match exponential:
        case Call("exp", (Call("-", (shown, Element() as maximum)),)):
            pass
        case _:
            raise NoMatchError
    is_given = expansion.is_given(maximum)
    require(is_given or expansion.aggregation(maximum, "max", COLUMN_LABEL) == shown)
    total = None
    if denominators:
        total = element_of(only(denominators))
        require(expansion.is_given(total) == is_given)
        # It is the sum of the exponentials.
        require(is_given or expansion.aggregation(total, "sum", COLUMN_LABEL) == exponential)
    scores = scores_of(shown)
    product = factors_of(expansion.aggregation(scores.element, "sum", CONTRACTED_LABEL))
    q, k = two_elements(expansion, product)
    scale = product.number * scores.scale
    require(scale > 0)
    return Weights(replace(scores, scale=scale), exponential, maximum, total, q, k)


def two_elements(expansion: Expansion, product: Factors) -> tuple[Element, Element]:
    """Return the two given tensors of a product; only the second of them has columns."""
    require(len(product.numerators) == 2 and not product.denominators)
    first, second = [element_of(part) for part in product.numerators]
    if COLUMN_LABEL in first.index:
        first, second = second, first
    require(COLUMN_LABEL not in first.index and COLUMN_LABEL in second.index)
    require(expansion.is_given(first) and expansion.is_given(second))
    return first, second


def scores_of(node: Scalar) -> Scores:
    """Recognise scaled and masked scores."""
    match node:
        case Element():
            return Scores(node)
        case Call("where", (condition, seen, other)):
            return _masked(condition, seen, other)
        case Call("+", (seen, Call("where", (condition, zero, other)))):
            require(number_of(zero) == 0 and number_of(other) == -inf)
            return _masked(condition, seen, other)
    product = factors_of(node)
    factor = only(product.numerators)
    require(not product.denominators and factor != node)
    inner = scores_of(factor)
    scale = product.number
    require(scale > 0)
    return replace(inner, scale=inner.scale * scale, fill=inner.fill * scale)


def _masked(condition: Scalar, seen: Scalar, other: Scalar) -> Scores:
    fill = number_of(other)
    is_negated = fill is None
    if is_negated:
        fill = number_of(seen)
        seen = other
    inner = scores_of(seen)
    if fill is None or not fill < inf or inner.mask is not None:
        raise NoMatchError
    band = band_of(condition, COLUMN_LABEL, is_negated)
    return replace(inner, band=band, fill=fill, mask=(condition, is_negated))
