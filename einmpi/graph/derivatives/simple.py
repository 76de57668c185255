"""Sums and products that are simple from the start: nothing is multiplied by 1 or added to 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from einmpi.graph.scalar import Call, Const, Index, Number, Scalar

ZERO = Const(0)
ONE = Const(1)


def is_number(node: Scalar, value: Number) -> bool:
    """Return whether an expression is this number. True and False are no numbers here."""
    if not isinstance(node, Const) or isinstance(node.value, bool):
        return False
    return node.value == value


def choose(condition: Scalar, this: Scalar, that: Scalar) -> Scalar:
    """Return where(condition, this, that), or what both are."""
    if this == that:
        return this
    return Call("where", (condition, this, that))


def mapped(node: Scalar, op: str, *others: Scalar) -> Scalar | None:
    """Apply an operation that keeps 0 inside of a `where` with a zero; None for all else.

    So conditions stay outside of factors, which may be infinite where a condition does not hold.
    """
    match node:
        case Call("where", (condition, this, Const() as that)) if is_number(that, 0):
            return Call("where", (condition, _applied(op, this, others), ZERO))
        case Call("where", (condition, Const() as this, that)) if is_number(this, 0):
            return Call("where", (condition, ZERO, _applied(op, that, others)))
    return None


def _applied(op: str, node: Scalar, others: tuple[Scalar, ...]) -> Scalar:
    if op == "*":
        return times(node, others[0])
    if op == "/":
        return over(node, others[0])
    if op == "neg":
        return negative(node)
    return Call(op, (node, *others))


def _split_factor(node: Scalar) -> tuple[Number, Scalar]:
    """Return the number and the rest of a product; the number is 1 if there is none."""
    match node:
        case Const(value) if not isinstance(value, bool):
            return value, ONE
        case Call("neg", (inner,)):
            number, rest = _split_factor(inner)
            return -number, rest
        case Call("*", (Const(value), rest)) if not isinstance(value, bool):
            return value, rest
    return 1, node


def _with_factor(number: Number, rest: Scalar) -> Scalar:
    if number == 0 or is_number(rest, 1):
        return Const(number)
    if number == 1:
        return rest
    if number == -1:
        return Call("neg", (rest,))
    return Call("*", (Const(number), rest))


def times(left: Scalar, right: Scalar) -> Scalar:
    """Return a product. Numbers come first, so that they meet: 2 × (−3 × x) is −6 × x."""
    inside = mapped(left, "*", right)
    if inside is None:
        inside = mapped(right, "*", left)
    if inside is not None:
        return inside
    left_number, left_rest = _split_factor(left)
    right_number, right_rest = _split_factor(right)
    if is_number(left_rest, 1):
        rest = right_rest
    elif is_number(right_rest, 1):
        rest = left_rest
    else:
        rest = _product(left_rest, right_rest)
    return _with_factor(left_number * right_number, rest)


def _product(left: Scalar, right: Scalar) -> Scalar:
    """Return a product of two expressions that are no numbers."""
    match left, right:
        case (Call("abs", (x,)), Call("sign", (y,))) | (Call("sign", (y,)), Call("abs", (x,))):
            if x == y:
                return x
    return Call("*", (left, right))


def negative(node: Scalar) -> Scalar:
    """Return −x."""
    match node:
        case Call("-", (left, right)):
            return Call("-", (right, left))
    return times(Const(-1), node)


def over(left: Scalar, right: Scalar) -> Scalar:
    """Return a quotient."""
    inside = mapped(left, "/", right)
    if inside is not None:
        return inside
    number, rest = _split_factor(left)
    if number == 0 or is_number(right, 1):
        return left
    divisor = right.value if isinstance(right, Const) else 0
    if is_number(rest, 1) and divisor != 0 and not isinstance(divisor, bool):
        return Const(number / divisor)
    if is_number(rest, 1):
        return Call("/", (Const(number), right))
    return _with_factor(number, Call("/", (rest, right)))


def plus(left: Scalar, right: Scalar) -> Scalar:
    """Return a sum."""
    if is_number(left, 0):
        return right
    if is_number(right, 0):
        return left
    if left == right:
        return times(Const(2), left)
    match left, right:
        case Const(a), Const(b) if not isinstance(a, bool) and not isinstance(b, bool):
            return Const(a + b)
        case Call("where", (condition, this, that)), Call("where", (same, other, rest)):
            # The parts that the two branches of a condition send.
            if condition == same and is_number(that, 0) and is_number(other, 0):
                return Call("where", (condition, this, rest))
            if condition == same and is_number(this, 0) and is_number(rest, 0):
                return Call("where", (condition, other, that))
        case Call("where"), Call(op) if op != "where":
            left, right = right, left
    number, rest = _split_factor(right)
    if isinstance(number, int | float) and number < 0:
        return Call("-", (left, _with_factor(-number, rest)))
    number, rest = _split_factor(left)
    if isinstance(number, int | float) and number < 0 and not isinstance(right, Const):
        return Call("-", (right, _with_factor(-number, rest)))
    return Call("+", (left, right))


def minus(left: Scalar, right: Scalar) -> Scalar:
    """Return a difference."""
    return plus(left, negative(right))


# ---- scans ---------------------------------------------------------------------------------------
#
# Derivatives of running aggregates: what their adjoints send to each value, by scans again.


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
