"""Softmax attention among the kernels of a chain: its operands, labels, scale and mask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TypeAlias

from einmpi.graph.scalar import Call, Const, Element, Index, Scalar, labels_in
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
from einmpi.schedule.compute import Kernel

# ---- mask ----------------------------------------------------------------------------------------
#
# Masks that compare a row with a column: where(t <= s + 3, …) keeps a band of a matrix.


OPPOSITE = {"<=": ">", "<": ">=", ">=": "<", ">": "<="}
NO_BOUND = 2**62  # larger than any difference of indices


@dataclass(frozen=True)
class Band:
    """The scores that are seen: lower ≤ column − row ≤ upper. `row` is None if all are."""

    row: str | None = None
    lower: int = -NO_BOUND
    upper: int = NO_BOUND


ALL_SEEN = Band()


def band_of(condition: Scalar, column: str, is_negated: bool = False) -> Band:
    """Return the band in which a condition holds, or does not hold if `is_negated`."""
    if not isinstance(condition, Call):
        raise NoMatchError
    joined_by = "|" if is_negated else "&"
    if condition.op == joined_by:
        left, right = [band_of(part, column, is_negated) for part in condition.args]
        require(left.row == right.row)
        return Band(left.row, max(left.lower, right.lower), min(left.upper, right.upper))
    require(condition.op in OPPOSITE)
    operator = OPPOSITE[condition.op] if is_negated else condition.op
    terms = _terms(Call("-", condition.args))
    constant = terms.pop("", 0)
    row = only([label for label, count in terms.items() if count and label != column])
    require(terms[column] * terms[row] == -1)
    # column - row + constant, or its negative, is compared with 0.
    distance = -constant * terms[column]
    is_upper = (operator in ("<=", "<")) == (terms[column] > 0)
    strictness = 1 if operator in ("<", ">") else 0
    if is_upper:
        return Band(row, upper=distance - strictness)
    return Band(row, lower=distance + strictness)


def _terms(node: Scalar) -> Counter[str]:
    """Return how often each label is added in a sum; the constant is that of the name ""."""
    match node:
        case Index(label):
            return Counter({label: 1})
        case Const(int(value)):
            return Counter({"": int(value)})
        case Call("+" | "-" as op, (left, right)):
            terms = _terms(left)
            if op == "+":
                terms.update(_terms(right))
            else:
                terms.subtract(_terms(right))
            return terms
    raise NoMatchError


# ---- softmax -------------------------------------------------------------------------------------
#
# The weights of attention: softmax over columns of scaled and masked scores.


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


@dataclass(frozen=True)
class Labels:
    """What the labels of attention are. Others are CONTRACTED_LABEL and COLUMN_LABEL.

    Batch labels may be missing in Q, K and V. `row` is None if there is but one row.
    """

    row: str | None
    value: str  # of V and O
    own_batches: tuple[str, ...]  # that K or V has
    shared_batches: tuple[str, ...]  # whose members share K and V
    extents: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Attention:
    """O[…,row,value] ← Σ[column](softmax[column](scale · Σ(Q·K)) · V) with a mask; or gradients.

    Tensors are elements: the name of a slot and, for each dimension, a label. Attention has q, k,
    v, o and, if they are wanted, the maxima and totals of rows: of their scores and exponentials.
    Gradients have q, k, v, d_o, d_q and, if they are wanted, d_k and d_v; maxima, totals and the
    sums of weight · slope, which are named given, may be given.
    """

    elements: Mapping[str, Element]
    scores: Scores
    labels: Labels
    divides: bool = True  # whether O is divided by the total
    # The chain's result is so many times the gradient.
    factors: Mapping[str, float] = field(default_factory=dict)


def find_attention(kernels: Sequence[Kernel], written: Sequence[str]) -> Attention | None:
    """Return the attention that a chain computes; None if it computes anything else.

    `written` are the names of the slots that the chain leaves.
    """
    expansion = Expansion(kernels)
    for kernel in reversed(kernels):
        if kernel.target.name not in written:
            continue
        try:
            return _match(expansion, kernel, set(written) - {kernel.target.name})
        except NoMatchError:
            continue
    return None


def _match(expansion: Expansion, kernel: Kernel, numbers: set[str]) -> Attention:
    """Return a kernel as attention that also leaves some numbers of each row."""
    o = Element(kernel.target.name, kernel.einsum.output)
    product = weighted_sum(expansion, kernel)
    require(product.number == 1 and len(product.numerators) == 2)
    exponential, value = product.numerators
    if isinstance(exponential, Element):
        exponential, value = value, exponential
    v = element_of(value)
    weights = weights_of(expansion, exponential, product.denominators)
    require(expansion.is_given(v) and not expansion.is_given(weights.maximum))
    total = weights.total or _kept_total(expansion, weights, numbers)
    kept = {}
    for name, element in (("maxima", weights.maximum), ("totals", total)):
        if element is not None and element.tensor in numbers:
            kept[name] = element
    require(numbers == {element.tensor for element in kept.values()})
    extents = {**kernel.einsum.extent, **aggregated_extents(expansion, weights)}
    return Attention(
        {"q": weights.q, "k": weights.k, "v": v, "o": o, **kept},
        weights.scores,
        sort_labels(weights, v, o, extents),
        divides=weights.total is not None,
    )


def weighted_sum(expansion: Expansion, kernel: Kernel) -> Factors:
    """Return what a kernel sums over columns, as a product.

    Factors without the column may come after the sum, in an elementwise kernel.
    """
    outside, element = expansion.split_sum(kernel)
    inside = factors_of(expansion.aggregation(element, "sum", COLUMN_LABEL))
    return Factors(
        outside.number * inside.number,
        inside.numerators,
        outside.denominators + inside.denominators,
    )


def _kept_total(expansion: Expansion, weights: Weights, numbers: set[str]) -> Element | None:
    """Return the total among the numbers that a chain leaves, which O is not divided by."""
    for name in sorted(numbers - {weights.maximum.tensor}):
        kernel = expansion.producers[name]
        body, names = expansion.anchored(kernel, [weights.scores.element])
        aggregated = [names[label] for label in kernel.einsum.aggregated]
        require(kernel.einsum.aggregation == "sum" and aggregated == [COLUMN_LABEL])
        require(body == weights.exponential)
        return Element(name, tuple([names[label] for label in kernel.einsum.output]))
    return None


def aggregated_extents(expansion: Expansion, weights: Weights) -> dict[str, int]:
    """Return the extents of the contracted label and of the columns."""
    einsum = expansion.producers[weights.scores.element.tensor].einsum
    column = einsum.output[weights.scores.element.index.index(COLUMN_LABEL)]
    return {
        CONTRACTED_LABEL: einsum.extent[only(einsum.aggregated)],
        COLUMN_LABEL: einsum.extent[column],
    }


def sort_labels(weights: Weights, v: Element, o: Element, extents: Mapping[str, int]) -> Labels:
    """Sort the labels of attention into batches, rows, columns and heads."""
    q_labels = set(weights.q.index)
    k_labels = set(weights.k.index)
    v_labels = set(v.index)
    o_labels = labels_in(o.index)
    value = only([x for x in o_labels if x in v_labels and x not in q_labels | k_labels])
    outside = set(o_labels) - {value}
    require(q_labels - outside == {CONTRACTED_LABEL})
    require(k_labels - outside == {CONTRACTED_LABEL, COLUMN_LABEL})
    require(v_labels - outside == {value, COLUMN_LABEL})
    others = [label for label in o_labels if label not in k_labels | v_labels]
    row = weights.scores.band.row
    if row is None:  # without a mask, the longest label that only Q and O have
        row = max(others, key=lambda label: extents[label], default=None)
    require(row is None or row in others)
    own = tuple([label for label in o_labels if label in k_labels | v_labels and label != value])
    shared = tuple([label for label in others if label != row])
    return Labels(row, value, own, shared, tuple(extents.items()))
