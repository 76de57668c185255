"""Softmax attention among the kernels of a chain: its operands, labels, scale and mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from einmpi.graph.scalar import Element, labels_in
from einmpi.kernels.attention.expansion import (
    Expansion,
    Factors,
    NoMatchError,
    element_of,
    factors_of,
    only,
    require,
)
from einmpi.kernels.attention.softmax import (
    COLUMN_LABEL,
    CONTRACTED_LABEL,
    Scores,
    Weights,
    weights_of,
)
from einmpi.schedule.step import Kernel


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
