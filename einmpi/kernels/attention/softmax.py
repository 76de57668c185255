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
    factors_of,
    number_of,
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
    column = COLUMN_LABEL
    is_given = expansion.is_given(maximum)
    if not is_given and expansion.aggregation(maximum, "max", (column,)) != shown:
        raise NoMatchError
    total = None
    if denominators:
        total = _total_of(expansion, exponential, denominators)
        if expansion.is_given(total) != is_given:
            raise NoMatchError
    scores = scores_of(shown, column)
    product = factors_of(expansion.aggregation(scores.element, "sum", (CONTRACTED_LABEL,)))
    q, k = two_elements(expansion, product, column)
    if product.number * scores.scale <= 0:
        raise NoMatchError
    scores = replace(scores, scale=product.number * scores.scale)
    return Weights(scores, exponential, maximum, total, q, k)


def _total_of(expansion: Expansion, exponential: Scalar, denominators: Sequence[Scalar]) -> Element:
    """Return the only denominator, which must be the sum of the exponentials unless it is given."""
    total = denominators[0]
    if len(denominators) > 1 or not isinstance(total, Element):
        raise NoMatchError
    if expansion.is_given(total):
        return total
    if expansion.aggregation(total, "sum", (COLUMN_LABEL,)) != exponential:
        raise NoMatchError
    return total


def two_elements(
    expansion: Expansion, product: Factors, second_label: str
) -> tuple[Element, Element]:
    """Return the two given tensors of a product; only the second of them has a label."""
    found = product.numerators
    if len(found) != 2 or product.denominators:
        raise NoMatchError
    first, second = found
    if isinstance(first, Element) and second_label in first.index:
        first, second = second, first
    if not isinstance(first, Element) or not isinstance(second, Element):
        raise NoMatchError
    if second_label in first.index or second_label not in second.index:
        raise NoMatchError
    if not expansion.is_given(first) or not expansion.is_given(second):
        raise NoMatchError
    return first, second


def scores_of(node: Scalar, column: str) -> Scores:
    """Recognise scaled and masked scores."""
    match node:
        case Element():
            return Scores(node)
        case Call("where", (condition, seen, other)):
            return _masked(condition, seen, other, column)
        case Call("+", (seen, Call("where", (condition, zero, other)))):
            is_infinite = number_of(other) == -inf
            if number_of(zero) != 0 or not is_infinite:
                raise NoMatchError
            return _masked(condition, seen, other, column)
    product = factors_of(node)
    if len(product.numerators) != 1 or product.denominators or product.numerators[0] == node:
        raise NoMatchError
    inner = scores_of(product.numerators[0], column)
    scale = product.number
    if not scale > 0:
        raise NoMatchError
    return replace(inner, scale=inner.scale * scale, fill=inner.fill * scale)


def _masked(condition: Scalar, seen: Scalar, other: Scalar, column: str) -> Scores:
    fill = number_of(other)
    is_negated = fill is None
    if is_negated:
        fill = number_of(seen)
        seen = other
    inner = scores_of(seen, column)
    if fill is None or not fill < inf or inner.mask is not None:
        raise NoMatchError
    band = band_of(condition, column, is_negated)
    return replace(inner, band=band, fill=fill, mask=(condition, is_negated))
