"""Softmax attention among the kernels of a chain: its operands, labels, scale and mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from einmpi.graph.scalar import Element
from einmpi.kernels.attention.expansion import Expansion, Factors, NoMatchError, factors_of
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
    """O[…,row,value] ← Σ[column](softmax[column](scale · Σ(Q·K)) · V), with a mask.

    Tensors are elements: the name of a slot and, for each dimension, a label.
    """

    q: Element
    k: Element
    v: Element
    o: Element
    maximum: Element | None  # of the scores of each row, if it is wanted
    total: Element | None  # of the exponentials of each row, if it is wanted
    divides: bool  # whether O is divided by the total
    scores: Scores
    labels: Labels


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
    if product.number != 1 or len(product.numerators) != 2:
        raise NoMatchError
    exponential, v = product.numerators
    if isinstance(exponential, Element):
        exponential, v = v, exponential
    if not isinstance(v, Element) or not expansion.is_given(v):
        raise NoMatchError
    weights = weights_of(expansion, exponential, product.denominators)
    if expansion.is_given(weights.maximum):
        raise NoMatchError
    total = weights.total or _kept_total(expansion, weights, numbers)
    wanted = {element.tensor: element for element in (weights.maximum, total) if element}
    if not numbers <= set(wanted):
        raise NoMatchError
    extents = dict(kernel.einsum.extents)
    extents.update(aggregated_extents(expansion, weights))
    kept_maximum = None
    if weights.maximum.tensor in numbers:
        kept_maximum = weights.maximum
    kept_total = None
    if total is not None and total.tensor in numbers:
        kept_total = total
    return Attention(
        q=weights.q,
        k=weights.k,
        v=v,
        o=o,
        maximum=kept_maximum,
        total=kept_total,
        divides=weights.total is not None,
        scores=weights.scores,
        labels=sort_labels(weights, v, o, extents),
    )


def weighted_sum(expansion: Expansion, kernel: Kernel) -> Factors:
    """Return what a kernel sums over columns, as a product.

    Factors without the column may come after the sum, in an elementwise kernel.
    """
    einsum = kernel.einsum
    element = Element(kernel.target.name, einsum.output)
    if einsum.aggregated:
        return factors_of(expansion.aggregation(element, "sum", (COLUMN_LABEL,)))
    names = {label: label for label in einsum.output}
    outside = factors_of(expansion.body(kernel, names))
    if len(outside.numerators) != 1 or not isinstance(outside.numerators[0], Element):
        raise NoMatchError
    summed = expansion.aggregation(outside.numerators[0], "sum", (COLUMN_LABEL,))
    inside = factors_of(summed)
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
        if kernel.einsum.aggregation != "sum" or aggregated != [COLUMN_LABEL]:
            raise NoMatchError
        if body != weights.exponential:
            raise NoMatchError
        return Element(name, tuple([names[label] for label in kernel.einsum.output]))
    return None


def aggregated_extents(expansion: Expansion, weights: Weights) -> dict[str, int]:
    """Return the extents of the contracted label and of the columns."""
    kernel = expansion.producers[weights.scores.element.tensor]
    (contracted,) = kernel.einsum.aggregated
    column = kernel.einsum.output[weights.scores.element.index.index(COLUMN_LABEL)]
    return {
        CONTRACTED_LABEL: kernel.einsum.extent[contracted],
        COLUMN_LABEL: kernel.einsum.extent[column],
    }


def sort_labels(weights: Weights, v: Element, o: Element, extents: Mapping[str, int]) -> Labels:
    """Sort the labels of attention into batches, rows, columns and heads."""
    q_labels = set(weights.q.index)
    k_labels = set(weights.k.index)
    v_labels = set(v.index)
    score_labels = q_labels | k_labels
    o_labels = [label for label in o.index if isinstance(label, str)]
    values = []
    for label in o_labels:
        if label in v_labels and label not in score_labels:
            values.append(label)
    if len(values) != 1:
        raise NoMatchError
    (value,) = values
    outside = set(o_labels) - {value}
    if q_labels - outside != {CONTRACTED_LABEL}:
        raise NoMatchError
    if k_labels - outside != {CONTRACTED_LABEL, COLUMN_LABEL}:
        raise NoMatchError
    if v_labels - outside != {value, COLUMN_LABEL}:
        raise NoMatchError
    row = weights.scores.band.row
    if row is None:  # without a mask, the longest label that only Q and O have
        only_in_rows = [label for label in o_labels if label not in k_labels | v_labels]
        row = max(only_in_rows, key=lambda label: extents[label], default=None)
    if row in k_labels | v_labels or (row is not None and row not in o_labels):
        raise NoMatchError
    own = []
    shared = []
    for label in o_labels:
        if label in (row, value):
            continue
        if label in k_labels | v_labels:
            own.append(label)
        else:
            shared.append(label)
    return Labels(row, value, tuple(own), tuple(shared), tuple(extents.items()))
