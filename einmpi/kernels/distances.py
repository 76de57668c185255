"""Squared distances: sums of (x − y)², which are |x|² + |y|² − 2 x·y and so a matrix product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from einmpi.caches import bounded_cache
from einmpi.graph.einsum import EinSum, einsum_over, einsum_type, make_einsum, reopen
from einmpi.graph.scalar import (
    Arg,
    Call,
    Const,
    Element,
    Index,
    IndexEntries,
    Scalar,
    rebuild,
    with_gathers,
)
from einmpi.kernels.prepared import PreparedCall

# float16 would overflow, and integers are to be exact.
DISTANCE_DTYPES = ("float32", "float64", "complex64", "complex128")
PRODUCT = Call("*", (Arg(0), Arg(1)))


@dataclass(frozen=True)
class Distance:
    """A sum of (x − y)², or of |x − y|² if it is `absolute`."""

    product: EinSum  # of x·y
    absolute: bool


def _squares() -> Iterator[tuple[Scalar, bool]]:
    """Yield every way to write the square of x − y, and whether it is that of |x − y|."""
    for x, y in ((0, 1), (1, 0)):
        difference = Call("-", (Arg(x), Arg(y)))
        magnitude = Call("abs", (difference,))
        conjugate = Call("conj", (difference,))
        for two in (2, 2.0):
            yield Call("**", (difference, Const(two))), False
            yield Call("**", (magnitude, Const(two))), True
        yield Call("*", (difference, difference)), False
        yield Call("*", (magnitude, magnitude)), True
        yield Call("*", (difference, conjugate)), True
        yield Call("*", (conjugate, difference)), True


_IS_ABSOLUTE = dict(_squares())


@bounded_cache(4096)
def recognise_distance(einsum: EinSum) -> Distance | None:
    """Return the EinSum as a squared distance, or None if it is not one.

    It must contain a matrix product to be worth it: rows that only x has, columns that only y has,
    and a label of both that is summed. Gathered operands do not qualify.
    """
    if einsum.aggregation != "sum" or einsum.function not in _IS_ABSOLUTE:
        return None
    x_entries, y_entries = einsum.operands
    if not einsum.is_indexed_by_labels:
        return None
    x = set(x_entries)
    y = set(y_entries)
    output = set(einsum.output)
    rows = (x & output) - y
    columns = (y & output) - x
    summed = (x & y) - output
    if not (rows and columns and summed):
        return None
    return Distance(replace(einsum, function=PRODUCT), _IS_ABSOLUTE[einsum.function])


def squared_norms(product: EinSum, position: int) -> EinSum:
    """Return the EinSum of an operand's sums of squares, one for each label of it in the output.

    The operand is its first and its second factor, so that no array of squares is needed.
    """
    index = product.operands[position]
    kept = tuple(label for label in product.output if label in index)
    aggregated = product.aggregated
    return einsum_over(kept, (index, index), PRODUCT, "sum", aggregated, product.extent)


# ---- weighted differences ------------------------------------------------------------------------
#
# Weighted sums of differences: Σ w·(x − y) is x·Σw − w·y, a matrix product if only y is summed.
#
# Gradients of squared distances are such sums.


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


@bounded_cache(4096)
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


# ---- picks ---------------------------------------------------------------------------------------
#
# Picked values, `Y[e,f] ← Σ[k](where(src[e] == k, X[k,f], 0))`, gathered from a rank's own
# part.
#
# Each index reads one value instead of comparing itself with all values of the label.


@bounded_cache(1024)
def as_gather(
    einsum: EinSum, first: int, dtypes: tuple[np.dtype[Any], ...]
) -> tuple[EinSum, tuple[int, ...]] | None:
    """Return the EinSum that reads only what is picked, and the numbers of its operands.

    Parameters
    ----------
    einsum
        What to compute; its extents are those of the arrays.
    first
        The global index of the first position of the picked label.
    dtypes
        Those of the operands.

    Returns
    -------
    None if nothing is picked, by an integer, or if the values would have to change their dtype.
    """
    pick = einsum.pick
    if pick is None or einsum.extent[pick.label] == 0:
        return None
    by_index = replace(einsum, function=pick.index, aggregation=None)
    if einsum_type(by_index, dtypes).kind not in "iu":
        return None  # a label may be compared with any number, as in where(k == y[b], …)
    names = [str(number) for number in range(len(einsum.operands))]
    index = reopen(by_index, names)
    body = reopen(replace(einsum, function=pick.body), names)
    last = first + einsum.extent[pick.label] - 1
    is_here = _is_between(index, first, last)
    position = Call("-", (index, Const(first)))
    reads = is_here
    if einsum.picked_extent is not None:
        # An index that no rank has is outside of this rank's part too, and found out of range.
        is_somewhere = _is_between(index, 0, einsum.picked_extent - 1)
        reads = Call("|", (is_here, Call("~", (is_somewhere,))))
    place = Call("where", (reads, position, Const(0)))
    value = _with_label(body, pick.label, index, place)
    expression = Call("where", (is_here, value, Const(pick.masked)))
    aggregated = [label for label in einsum.aggregated if label != pick.label]
    aggregation = einsum.aggregation if aggregated else None
    gather, used = make_einsum(einsum.output, expression, aggregation, aggregated, einsum.extent)
    gather = replace(gather, reproducible=einsum.reproducible)
    operands = tuple(int(name) for name in used)
    if einsum_type(gather, [dtypes[number] for number in operands]) != einsum_type(einsum, dtypes):
        return None
    return gather, operands


def _is_between(index: Scalar, first: int, last: int) -> Scalar:
    return Call("&", (Call(">=", (index, Const(first))), Call("<=", (index, Const(last)))))


def _with_label(body: Scalar, label: str, index: Scalar, place: Scalar) -> Scalar:
    """Return an expression with an index instead of a label, and its place in the tensors."""

    def leaf(node: Scalar) -> Scalar:
        if isinstance(node, Index):
            return index if node.label == label else node
        if isinstance(node, Element):
            return Element(node.tensor, with_gathers(node.index, inside, {label: place}))
        return node

    def inside(part: Scalar) -> Scalar:
        return rebuild(part, leaf)

    return inside(body)


def picking(einsum: EinSum, gather: PreparedCall, numbers: Sequence[int]) -> PreparedCall:
    """Return a pick as the gather that it is, of the operands with these numbers."""

    def pick(operands: Sequence[Any], out: Any) -> None:
        try:
            gather([operands[number] for number in numbers], out)
        except IndexError as error:
            extent = einsum.picked_extent
            if extent is None:
                raise
            what = f"an index is out of range; expected 0 to {extent - 1}"
            raise IndexError(what) from error

    return pick
