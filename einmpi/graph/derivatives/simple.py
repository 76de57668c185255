"""Sums and products that are simple from the start: nothing is multiplied by 1 or added to 0."""

from __future__ import annotations

from einmpi.graph.scalar import Call, Const, Number, Scalar

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
