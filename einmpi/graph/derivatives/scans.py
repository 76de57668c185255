"""Derivatives of running aggregates: what their adjoints send to each value, by scans again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from einmpi.graph.derivatives.simple import ONE, ZERO, choose, minus, over, plus, times
from einmpi.graph.scalar import Call, Const, Index, Scalar


@dataclass(frozen=True)
class AdjointOfScan:
    """Running aggregates with their adjoints. All expressions are those at one index.

    Attributes
    ----------
    values : Scalar
        What is aggregated.
    results : Scalar
        The aggregates of the values up to the index.
    adjoint : Scalar
        Their adjoints.
    index : Index
        The label that is scanned along.
    extent : int
        How many values are scanned.
    dtype : str
        The dtype of the aggregates.
    running : callable
        From the name of an aggregation, an expression and its value for nothing at all: the
        aggregates up to the index, as the element of a new tensor.
    from_end : callable
        The same from the index to the end.
    at : callable
        From an expression and an index: the expression there.
    conjugate : callable
        The complex conjugate of an expression.
    """

    values: Scalar
    results: Scalar
    adjoint: Scalar
    index: Index
    extent: int
    dtype: str
    running: Callable[[str, Scalar, Const], Scalar]
    from_end: Callable[[str, Scalar, Const], Scalar]
    at: Callable[[Scalar, Scalar], Scalar]
    conjugate: Callable[[Scalar], Scalar]


ScanDerivative: TypeAlias = Callable[[AdjointOfScan], Scalar]


def of_running_sum(scan: AdjointOfScan) -> Scalar:
    return scan.from_end("sum", scan.adjoint, ZERO)


def of_running_product(scan: AdjointOfScan) -> Scalar:
    """The products of the other values, by dividing; the first 0 is left out instead.

    All products from the first 0 on are 0, whatever the values before and after it are.
    """
    is_zero = Call("==", (scan.values, ZERO))
    zeros = scan.running("sum", Call("int64", (is_zero,)), ZERO)
    is_first = Call("&", (is_zero, Call("==", (zeros, ONE))))
    one = Call(scan.dtype, (ONE,))
    without_first = scan.running("prod", choose(is_first, one, scan.values), ONE)
    products = times(scan.adjoint, scan.conjugate(scan.results))
    to_others = over(scan.from_end("sum", products, ZERO), scan.conjugate(scan.values))
    products_without = times(scan.adjoint, scan.conjugate(without_first))
    to_first = scan.from_end("sum", products_without, ZERO)
    comes_before = Call("==", (zeros, ZERO))
    return choose(is_first, to_first, choose(comes_before, to_others, ZERO))


def of_running_extreme(scan: AdjointOfScan) -> Scalar:
    """Values that equal the greatest so far, or the least, share its adjoint.

    The results are the same from one such value to the next that is greater. In each of these
    segments the adjoints, divided by the number of equal values so far, are summed from the end.
    """
    is_equal = Call("==", (scan.values, scan.results))
    before = scan.at(scan.results, minus(scan.index, ONE))
    is_new = Call("!=", (before, scan.results))
    is_start = Call("|", (Call("==", (scan.index, ZERO)), is_new))
    equal_so_far = scan.running("sum", Call("int64", (is_equal,)), ZERO)
    none = Const(-1)
    in_earlier = choose(is_start, minus(equal_so_far, ONE), none)
    equal_in_earlier_segments = scan.running("max", in_earlier, none)
    ties = Call(scan.dtype, (minus(equal_so_far, equal_in_earlier_segments),))
    is_number = Call("==", (scan.results, scan.results))
    share = choose(is_number, over(scan.adjoint, ties), ZERO)
    # The sum of a segment is a difference, which would be inexact in a shorter dtype.
    sums = scan.from_end("sum", Call("float64", (share,)), ZERO)
    end = Const(scan.extent)
    last = Const(scan.extent - 1)
    next_from_here = scan.from_end("min", choose(is_start, scan.index, end), end)
    next_start = scan.at(next_from_here, plus(scan.index, ONE))
    has_next = Call("<", (scan.index, last)), Call("<", (next_start, end))
    sum_after = scan.at(sums, Call("minimum", (next_start, last)))
    after = choose(Call("&", has_next), sum_after, Call("float64", (ZERO,)))
    return choose(is_equal, Call(scan.dtype, (minus(sums, after),)), ZERO)
