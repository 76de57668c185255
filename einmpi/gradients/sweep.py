"""From the adjoint of an expression to the adjoints of the elements in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from einmpi.errors import OperationError
from einmpi.graph.derivatives.operations import AdjointOfCall
from einmpi.graph.derivatives.simple import is_number, mapped, negative, plus, times
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Call, Element, Scalar


@dataclass
class Sweep:
    """Goes back through one expression.

    Attributes
    ----------
    kind
        Gives the kind of numbers of an expression: "f", "c", "i", "u" or "b".
    is_wanted
        Whether the adjoint of a tensor is needed.
    stored
        Expressions whose values a tensor has, with its element.
    found
        The adjoint of each wanted element.
    """

    kind: Callable[[Scalar], str]
    is_wanted: Callable[[str], bool]
    stored: dict[Scalar, Scalar] = field(default_factory=dict)
    found: dict[Element, Scalar] = field(default_factory=dict)

    def leads_to_wanted(self, node: Scalar) -> bool:
        """Return whether the adjoint of an expression is needed."""
        if isinstance(node, Element):
            return self.is_wanted(node.tensor)
        if not isinstance(node, Call) or OPERATIONS[node.op].is_flat:
            return False
        arguments = node.args[1:] if node.op == "where" else node.args
        return any(self.leads_to_wanted(argument) for argument in arguments)

    def send(self, node: Scalar, adjoint: Scalar) -> None:
        """Add what an expression with this adjoint sends to the elements in it."""
        if is_number(adjoint, 0) or not self.leads_to_wanted(node):
            return
        adjoint = self._of_same_kind(adjoint, node)
        if isinstance(node, Element):
            known = self.found.get(node)
            self.found[node] = adjoint if known is None else plus(known, adjoint)
            return
        assert isinstance(node, Call)
        value = self.stored.get(node, node)
        precise = _precise_factors(node, value) if self.kind(node) == "f" else ()
        if precise:
            for argument, factor in precise:
                self.send(argument, times(adjoint, factor))
            return
        derivative = OPERATIONS[node.op].derivative
        if derivative is None:
            what = f"the derivative of {node.op} is not known"
            raise OperationError(what, "an operation with a derivative", "use stop(…) around it")
        sent = derivative(AdjointOfCall(node.args, value, adjoint, self.kind))
        for argument, part in zip(node.args, sent, strict=True):
            if part is not None:
                self.send(argument, part)

    def _of_same_kind(self, adjoint: Scalar, node: Scalar) -> Scalar:
        """Return the real part of an adjoint if the expression is real."""
        if self.kind(adjoint) != "c" or self.kind(node) == "c":
            return adjoint
        inside = mapped(adjoint, "real")
        return Call("real", (adjoint,)) if inside is None else inside


def _precise_factors(node: Call, value: Scalar) -> tuple[tuple[Scalar, Scalar], ...]:
    """Return arguments and their factors for forms whose plain derivative is inf/inf far out.

    These are log(1 + exp(u)) and x / (1 + exp(u)), which are parts of softplus, sigmoid and silu.
    """
    match node:
        case Call("log1p", (Call("exp", (u,)),)):
            return ((u, Call("sigmoid", (u,))),)
        case Call("log", (inner,)):
            exponent = _exponent(inner)
            if exponent is not None:
                return ((exponent, Call("sigmoid", (exponent,))),)
        case Call("/", (dividend, divisor)):
            exponent = _exponent(divisor)
            if exponent is not None:
                falling = Call("sigmoid", (negative(exponent),))
                rising = Call("sigmoid", (exponent,))
                to_exponent = negative(times(value, rising))
                return (dividend, falling), (exponent, to_exponent)
    return ()


def _exponent(node: Scalar) -> Scalar | None:
    """Return u of 1 + exp(u), None for all else."""
    match node:
        case Call("+", (one, Call("exp", (u,)))) if is_number(one, 1):
            return u
        case Call("+", (Call("exp", (u,)), one)) if is_number(one, 1):
            return u
    return None
