"""Derivatives of aggregations: what the adjoint of an aggregate sends to each of its values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from einmpi.graph.derivatives.simple import ONE, ZERO, choose, over, times
from einmpi.graph.scalar import Call, Const, Scalar


@dataclass(frozen=True)
class AdjointOfAggregate:
    """An aggregate with its adjoint.

    Attributes
    ----------
    values : Scalar
        What is aggregated.
    result : Scalar
        The aggregate.
    adjoint : Scalar
        Its adjoint.
    dtype : str
        The dtype of the aggregate.
    aggregate : callable
        From the name of an aggregation and an expression: its aggregate over the same labels, as
        the element of a new tensor.
    for_each_result : callable
        From an expression that is the same for all values: the element of a new tensor.
    conjugate : callable
        The complex conjugate of an expression.
    """

    values: Scalar
    result: Scalar
    adjoint: Scalar
    dtype: str
    aggregate: Callable[[str, Scalar], Scalar]
    for_each_result: Callable[[Scalar], Scalar]
    conjugate: Callable[[Scalar], Scalar]


AggregateDerivative: TypeAlias = Callable[[AdjointOfAggregate], Scalar]


def of_sum(total: AdjointOfAggregate) -> Scalar:
    return total.adjoint


def of_extreme(extreme: AdjointOfAggregate) -> Scalar:
    """Values that equal the greatest, or the least, share its adjoint."""
    is_extreme = Call("==", (extreme.values, extreme.result))
    ties = Call(extreme.dtype, (extreme.aggregate("sum", is_extreme),))
    share = extreme.for_each_result(over(extreme.adjoint, ties))
    return choose(is_extreme, share, ZERO)


def of_product(product: AdjointOfAggregate) -> Scalar:
    """The product of all other values; if one value is 0, only that one has such a product."""
    is_zero = Call("==", (product.values, ZERO))
    zeros = product.aggregate("sum", is_zero)
    one = Call(product.dtype, (ONE,))
    without_zeros = product.aggregate("prod", choose(is_zero, one, product.values))
    sent = times(product.adjoint, product.conjugate(without_zeros))
    to_zero = product.for_each_result(choose(Call("==", (zeros, Const(1))), sent, ZERO))
    to_others = product.for_each_result(choose(Call("==", (zeros, ZERO)), sent, ZERO))
    quotient = Call("/", (to_others, product.conjugate(product.values)))
    return choose(is_zero, to_zero, quotient)
