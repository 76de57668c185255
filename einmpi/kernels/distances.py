"""Squared distances: sums of (x − y)², which are |x|² + |y|² − 2 x·y and so a matrix product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from einmpi.graph.einsum import EinSum, einsum_over
from einmpi.graph.scalar import Arg, Call, Const, Scalar

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


@lru_cache(maxsize=4096)
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
