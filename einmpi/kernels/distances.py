"""Sums of squared differences: how they are recognised, and the product and norms they are made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Call, Const, Scalar

# float16 would overflow, and integers are exact.
DISTANCE_DTYPES = ("float32", "float64", "complex64", "complex128")
PRODUCT = Call("*", (Arg(0), Arg(1)))


@dataclass(frozen=True)
class Distance:
    """A sum of (x − y)², or of |x − y|² where it is `absolute`."""

    product: EinSum  # of x·y
    absolute: bool


def _squares() -> Iterator[tuple[Scalar, bool]]:
    """The ways to write a square of x − y, and whether it is that of the absolute value."""
    for x, y in ((0, 1), (1, 0)):
        difference = Call("-", (Arg(x), Arg(y)))
        size, conj = Call("abs", (difference,)), Call("conj", (difference,))
        for node in (difference, size):
            yield from ((Call("**", (node, Const(two))), node is size) for two in (2, 2.0))
        for pair in (
            (difference, difference),
            (size, size),
            (difference, conj),
            (conj, difference),
        ):
            yield Call("*", pair), pair != (difference, difference)


_SQUARES = dict(_squares())


@lru_cache(maxsize=4096)
def recognise_distance(einsum: EinSum) -> Distance | None:
    """The EinSum as a distance; None where it is none, or where no product of matrices would come of it."""
    if einsum.aggregation != "sum" or einsum.function not in _SQUARES:
        return None
    x, y, kept = *map(set, einsum.operands), set(einsum.output)
    is_plain = all(isinstance(entry, str) for index in einsum.operands for entry in index)
    if not is_plain or not x & kept - y or not y & kept - x or not x & y - kept:
        return None
    return Distance(replace(einsum, function=PRODUCT), _SQUARES[einsum.function])


def squared_norms(product: EinSum, k: int) -> EinSum:
    """The sums of squares of an operand; it is there twice, so that there need be no array of squares."""
    index = product.operands[k]
    kept = tuple(label for label in product.output if label in index)
    extents = tuple((label, product.extent[label]) for label in (*kept, *product.aggregated))
    return EinSum(kept, (index, index), PRODUCT, "sum", product.aggregated, extents)
