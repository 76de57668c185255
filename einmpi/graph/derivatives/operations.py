"""Derivatives of operations: what the adjoint of a result sends to each argument.

An adjoint of y is ∂loss/∂y; of complex numbers it is PyTorch's, so that x − rate · dx descends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from einmpi.graph.derivatives.simple import (
    ONE,
    ZERO,
    choose,
    is_number,
    minus,
    negative,
    over,
    plus,
    times,
)
from einmpi.graph.scalar import Call, Const, Element, Scalar


@dataclass(frozen=True)
class AdjointOfCall:
    """A call with the adjoint of its result.

    `value` is the result: the call itself, or the element of a tensor that holds it already.
    `kind` gives the kind of numbers of an expression, such as "f" or "c".
    """

    args: Sequence[Scalar]
    value: Scalar
    adjoint: Scalar
    kind: Callable[[Scalar], str]

    def conjugate(self, node: Scalar) -> Scalar:
        """Return the complex conjugate of an expression."""
        match node:
            case Call("conj", (inner,)):
                return inner
        return Call("conj", (node,)) if self.kind(node) == "c" else node

    def times(self, *factors: Scalar) -> Scalar:
        """Return the adjoint times the conjugates of factors."""
        product = self.adjoint
        for factor in factors:
            product = times(product, self.conjugate(factor))
        return product

    def over(self, divisor: Scalar) -> Scalar:
        """Return the adjoint over the conjugate of a divisor."""
        return over(self.adjoint, self.conjugate(divisor))


# What is sent to each argument, None for nothing.
Sent: TypeAlias = tuple[Scalar | None, ...]
Derivative: TypeAlias = Callable[[AdjointOfCall], Sent]


def _square(node: Scalar) -> Scalar:
    return Call("*", (node, node))


# ---- operators ----------------------------------------------------------------------------------


def of_sum(call: AdjointOfCall) -> Sent:
    return call.adjoint, call.adjoint


def of_difference(call: AdjointOfCall) -> Sent:
    return call.adjoint, negative(call.adjoint)


def of_product(call: AdjointOfCall) -> Sent:
    left, right = call.args
    return call.times(right), call.times(left)


def of_quotient(call: AdjointOfCall) -> Sent:
    divisor = call.args[1]
    to_divisor = negative(over(call.times(call.value), call.conjugate(divisor)))
    return call.over(divisor), to_divisor


def of_remainder(call: AdjointOfCall) -> Sent:
    quotient = Call("//", tuple(call.args))
    return call.adjoint, negative(times(call.adjoint, quotient))


def of_negative(call: AdjointOfCall) -> Sent:
    return (negative(call.adjoint),)


def of_power(call: AdjointOfCall) -> Sent:
    """n · x^(n−1), and x^n · log x, which is 0 at x = 0."""
    base, exponent = call.args
    if isinstance(exponent, Const):
        number = exponent.value
        if number == 0:
            return None, None
        power: Scalar = ONE
        if number == 2:
            power = base
        elif number != 1:
            power = Call("**", (base, Const(number - 1)))
        return times(exponent, call.times(power)), None
    below = Call("**", (base, minus(exponent, ONE)))
    to_base = call.times(exponent, below)
    is_constant = Call("==", (exponent, ZERO))
    to_exponent = call.times(call.value, Call("log", (base,)))
    is_zero = Call("==", (base, ZERO))
    return choose(is_constant, ZERO, to_base), choose(is_zero, ZERO, to_exponent)


# ---- functions of one argument ------------------------------------------------------------------


def _by_factor(factor: Callable[[Scalar, Scalar], Scalar]) -> Derivative:
    """Return the derivative of y = f(x) whose factor is given in terms of x and y."""
    return lambda call: (call.times(factor(call.args[0], call.value)),)


def _by_divisor(divisor: Callable[[Scalar, Scalar], Scalar]) -> Derivative:
    """Return the derivative of y = f(x) that is 1 over a divisor in terms of x and y."""
    return lambda call: (call.over(divisor(call.args[0], call.value)),)


def _scaled(number: float, derivative: Derivative) -> Derivative:
    """Return the derivative of a function that is a number times another one."""
    return lambda call: tuple(part and times(Const(number), part) for part in derivative(call))


of_exp = _by_factor(lambda x, y: y)
of_expm1 = _by_factor(lambda x, y: plus(y, ONE))
of_sinh = _by_factor(lambda x, y: Call("cosh", (x,)))
of_cosh = _by_factor(lambda x, y: Call("sinh", (x,)))
of_tanh = _by_factor(lambda x, y: minus(ONE, _square(y)))
of_sin = _by_factor(lambda x, y: Call("cos", (x,)))
of_tan = _by_factor(lambda x, y: plus(ONE, _square(y)))
of_log = _by_divisor(lambda x, y: x)
of_log1p = _by_divisor(lambda x, y: plus(ONE, x))
of_log2 = _scaled(1 / math.log(2), of_log)
of_log10 = _scaled(1 / math.log(10), of_log)
of_sqrt = _scaled(0.5, _by_divisor(lambda x, y: y))


def of_rsqrt(call: AdjointOfCall) -> Sent:
    """−½ y³, where y is at hand, else −½ y / x."""
    value = call.value
    if isinstance(value, Element):
        cube = times(times(value, value), value)
        return (times(Const(-0.5), call.times(cube)),)
    quotient = over(value, call.args[0])
    return (times(Const(-0.5), call.times(quotient)),)


def of_abs(call: AdjointOfCall) -> Sent:
    """The sign, which is 0 at 0; of a complex x it is x / |x|."""
    argument = call.args[0]
    if call.kind(argument) != "c":
        return (times(call.adjoint, Call("sign", (argument,))),)
    direction = over(times(call.adjoint, argument), call.value)
    return (choose(Call("==", (call.value, ZERO)), ZERO, direction),)


def of_erf(call: AdjointOfCall) -> Sent:
    argument = call.args[0]
    bell = Call("exp", (Call("neg", (_square(argument),)),))
    return (times(Const(2 / math.sqrt(math.pi)), times(call.adjoint, bell)),)


def of_cos(call: AdjointOfCall) -> Sent:
    return (negative(call.times(Call("sin", (call.args[0],)))),)


def of_sigmoid(call: AdjointOfCall) -> Sent:
    value = call.value
    return (call.times(value, minus(ONE, value)),)


# ---- functions of several arguments -------------------------------------------------------------


def of_arctan2(call: AdjointOfCall) -> Sent:
    y, x = call.args
    radius = plus(_square(x), _square(y))
    to_y = over(times(call.adjoint, x), radius)
    to_x = negative(over(times(call.adjoint, y), radius))
    return to_y, to_x


def _of_extreme(call: AdjointOfCall, comparison: str) -> Sent:
    """The adjoint goes to the argument that was chosen; equal ones get half of it each."""
    left, right = call.args
    # The adjoint occurs once for each: where it is another such choice, two would be four there.
    ties = plus(ONE, Call("int8", (Call("==", (left, right)),)))
    share = over(call.adjoint, ties)
    to_left = choose(Call(comparison, (left, right)), share, ZERO)
    to_right = choose(Call(comparison, (right, left)), share, ZERO)
    return to_left, to_right


def of_maximum(call: AdjointOfCall) -> Sent:
    return _of_extreme(call, ">=")


def of_minimum(call: AdjointOfCall) -> Sent:
    return _of_extreme(call, "<=")


def of_clip(call: AdjointOfCall) -> Sent:
    """Both limits belong to the range in which x itself is the result."""
    value, low, high = call.args
    is_inside = Call("&", (Call(">=", (value, low)), Call("<=", (value, high))))
    is_low = Call("&", (Call("<", (value, low)), Call("<=", (low, high))))
    is_high = Call(">", (Call("maximum", (value, low)), high))
    to_value = choose(is_inside, call.adjoint, ZERO)
    to_low = choose(is_low, call.adjoint, ZERO)
    to_high = choose(is_high, call.adjoint, ZERO)
    return to_value, to_low, to_high


def of_where(call: AdjointOfCall) -> Sent:
    condition, this, that = call.args
    match condition:
        case Call("<=", (x, limit)) if x == that and limit == this and is_number(limit, 0):
            # relu: its result is at most 0 where x is, and x need not be kept.
            condition = Call("<=", (call.value, limit))
    return None, choose(condition, call.adjoint, ZERO), choose(condition, ZERO, call.adjoint)


# ---- complex numbers and casts ------------------------------------------------------------------


def of_conj(call: AdjointOfCall) -> Sent:
    return (call.conjugate(call.adjoint),)


def of_imag(call: AdjointOfCall) -> Sent:
    if call.kind(call.args[0]) != "c":
        return (None,)
    return (times(Const(1j), call.adjoint),)


def of_cast(call: AdjointOfCall) -> Sent:
    """The adjoint itself, also of a real part."""
    return (call.adjoint,)
