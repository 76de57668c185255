"""Softmax attention among the kernels of a chain: its operands, labels, scale and mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from einmpi.graph.scalar import Element, Scalar
from einmpi.kernels.attention.expansion import Expansion, Factors, NoMatchError, factors_of
from einmpi.kernels.attention.mask import Band
from einmpi.kernels.attention.softmax import (
    COLUMN_LABEL,
    CONTRACTED_LABEL,
    Weights,
    weights_of,
)
from einmpi.schedule.step import Kernel


@dataclass(frozen=True)
class Attention:
    """O[…,row,value] ← Σ[column](softmax[column](scale · Σ(Q·K)) · V), with a mask.

    Tensors are elements: the name of a slot and, for each dimension, a label. Batch labels may be
    missing in Q, K and V. The labels of aggregations are CONTRACTED_LABEL and COLUMN_LABEL.
    `row` is None if there is but one row.
    """

    q: Element
    k: Element
    v: Element
    o: Element
    row: str | None
    value: str
    batches: tuple[str, ...]  # in the order of the output
    extents: tuple[tuple[str, int], ...]
    scale: float
    band: Band
    fill: float  # of scores that are not seen, after scaling


def find_attention(kernels: Sequence[Kernel], written: Sequence[str]) -> Attention | None:
    """Return the attention that a chain computes; None if it computes anything else.

    `written` are the names of the slots that the chain leaves.
    """
    try:
        return _match(kernels, written)
    except NoMatchError:
        return None


def _match(kernels: Sequence[Kernel], written: Sequence[str]) -> Attention:
    last = kernels[-1]
    if list(written) != [last.target.name]:
        raise NoMatchError
    expansion = Expansion(kernels)
    o = Element(last.target.name, last.einsum.output)
    product = weighted_sum(expansion, last)
    if product.number != 1 or len(product.numerators) != 2 or len(product.denominators) != 1:
        raise NoMatchError
    exponential, v = product.numerators
    if isinstance(exponential, Element):
        exponential, v = v, exponential
    if not isinstance(v, Element) or not expansion.is_given(v):
        raise NoMatchError
    weights = weights_of(expansion, exponential, product.denominators[0], COLUMN_LABEL)
    extents = dict(last.einsum.extents)
    score_kernel = expansion.producers[weights.scores.element.tensor]
    (contracted,) = score_kernel.einsum.aggregated
    extents[CONTRACTED_LABEL] = score_kernel.einsum.extent[contracted]
    total_kernel = expansion.producers[weights.total.tensor]
    (column,) = total_kernel.einsum.aggregated
    extents[COLUMN_LABEL] = total_kernel.einsum.extent[column]
    return labelled(weights, v, o, extents)


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


def labelled(weights: Weights, v: Element, o: Element, extents: dict[str, int]) -> Attention:
    """Sort the labels of attention into batches, rows, columns and heads."""
    q_labels = set(weights.q.index)
    k_labels = set(weights.k.index)
    v_labels = set(v.index)
    o_labels = [label for label in o.index if isinstance(label, str)]
    values = [label for label in o_labels if label in v_labels and label not in q_labels | k_labels]
    if len(values) != 1:
        raise NoMatchError
    (value,) = values
    if CONTRACTED_LABEL not in q_labels & k_labels or COLUMN_LABEL not in k_labels & v_labels:
        raise NoMatchError
    outside = set(o_labels) - {value}
    if q_labels - outside != {CONTRACTED_LABEL}:
        raise NoMatchError
    if k_labels - outside != {CONTRACTED_LABEL, COLUMN_LABEL}:
        raise NoMatchError
    if v_labels - outside != {value, COLUMN_LABEL}:
        raise NoMatchError
    row = _row_label(weights, o_labels, extents, q_labels - k_labels - v_labels)
    if row is not None and row in k_labels | v_labels:
        raise NoMatchError
    batches = tuple([label for label in o_labels if label not in (row, value)])
    return Attention(
        q=weights.q,
        k=weights.k,
        v=v,
        o=o,
        row=row,
        value=value,
        batches=batches,
        extents=tuple(extents.items()),
        scale=weights.scores.scale,
        band=weights.scores.band,
        fill=weights.scores.fill,
    )


def _row_label(
    weights: Weights, labels: Sequence[str], extents: dict[str, int], candidates: set[str | Scalar]
) -> str | None:
    """Return the label of rows: that of the mask, or the longest one that only Q and O have."""
    masked = weights.scores.band.row
    if masked is not None:
        return masked
    found = [label for label in labels if label in candidates]
    return max(found, key=lambda label: extents[label], default=None)
