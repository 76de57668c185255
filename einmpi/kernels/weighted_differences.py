"""Weighted sums of differences: Σ w·(x − y) is x·Σw − w·y, a matrix product if only y is summed.

Gradients of squared distances are such sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from einmpi.graph.einsum import EinSum, einsum_over
from einmpi.graph.scalar import Arg, Call, IndexEntries, Scalar
from einmpi.kernels.distances import PRODUCT


@dataclass(frozen=True)
class WeightedDifference:
    """A sum of w·(x − y), or of w·(y − x), where x has no label that is summed.

    Attributes
    ----------
    weights, kept, summed : int
        The positions of the operands w, x and y.
    product : EinSum
        The sums of w·y, of the operands w and y.
    sums : EinSum
        The sums of w, of the operand w.
    scaled : EinSum
        What is multiplied: x by the sums of w, of these two operands.
    is_positive : bool
        Whether the sums of w·y are added rather than subtracted.
    """

    weights: int
    kept: int
    summed: int
    product: EinSum
    sums: EinSum
    scaled: EinSum
    is_positive: bool


def _functions() -> Iterator[tuple[Scalar, tuple[int, int, int]]]:
    """Yield every way to write w·(u − v), with the positions of w, u and v."""
    for positions in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        weights, first, second = positions
        difference = Call("-", (Arg(first), Arg(second)))
        yield Call("*", (Arg(weights), difference)), positions
        yield Call("*", (difference, Arg(weights))), positions


_POSITIONS = dict(_functions())


@lru_cache(maxsize=4096)
def recognise_weighted_difference(einsum: EinSum) -> WeightedDifference | None:
    """Return the EinSum as a weighted sum of differences, or None if it is not one.

    It must contain a matrix product to be worth it: rows that only w has, columns that only y has,
    and labels of both that are summed. Gathered operands and diagonals do not qualify.
    """
    if einsum.aggregation != "sum" or einsum.function not in _POSITIONS:
        return None
    if einsum.reads_diagonals or not einsum.is_indexed_by_labels:
        return None
    weights, first, second = _POSITIONS[einsum.function]
    labels = [set(index) for index in einsum.operands]
    aggregated = set(einsum.aggregated)
    output = set(einsum.output)
    for kept, summed in ((first, second), (second, first)):
        rows = (labels[weights] & output) - labels[summed]
        columns = (labels[summed] & output) - labels[weights]
        is_summed = aggregated <= labels[weights] & labels[summed]
        if labels[kept] & aggregated or not is_summed or not (rows and columns and aggregated):
            continue
        has_product = output <= labels[weights] | labels[summed]
        if has_product and output <= labels[weights] | labels[kept]:
            return _weighted_difference(einsum, weights, kept, summed, summed == first)
    return None


def _weighted_difference(
    einsum: EinSum, weights: int, kept: int, summed: int, is_positive: bool
) -> WeightedDifference:
    indices = einsum.operands
    labels_of_sums = tuple(label for label in einsum.output if label in indices[weights])

    def make(
        output: tuple[str, ...], operands: tuple[IndexEntries, ...], function: Scalar, sums: bool
    ) -> EinSum:
        aggregated = einsum.aggregated if sums else ()
        aggregation = "sum" if sums else None
        return einsum_over(output, operands, function, aggregation, aggregated, einsum.extent)

    pair = (indices[weights], indices[summed])
    return WeightedDifference(
        weights,
        kept,
        summed,
        make(einsum.output, pair, PRODUCT, True),
        make(labels_of_sums, (indices[weights],), Arg(0), True),
        make(einsum.output, (indices[kept], labels_of_sums), PRODUCT, False),
        is_positive,
    )
