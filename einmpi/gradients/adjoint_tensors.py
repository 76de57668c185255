"""The adjoints of tensors, summed from what the vertices that read them have sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from einmpi.errors import OperationError
from einmpi.gradients.contributions import (
    Contribution,
    is_cheap,
    under_conditions,
    with_guarded_indices,
)
from einmpi.graph.derivatives.operations import AdjointOfCall
from einmpi.graph.derivatives.simple import ZERO, is_number, mapped, negative, plus, times
from einmpi.graph.dtypes import DTYPES, Type, kind_of
from einmpi.graph.eingraph import Vertex, make_vertex, type_over
from einmpi.graph.einsum import make_einsum
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Call, Const, Element, Names, Scalar, labels_of, relabel

PREFIX = "d"  # the adjoint of W is called dW, if that name is free


class AdjointTensors:
    """Adjoints as new vertices, which are added to `known` one after another.

    `names` are those in use, of tensors and labels. What tensors are sent is kept until their
    adjoints are asked for.
    """

    def __init__(self, known: dict[str, Vertex], names: Names, places: tuple[str, ...]) -> None:
        self.known = known
        self.names = names
        self.places = places
        self._sent: dict[str, list[Contribution]] = {}

    # ---- types ----------------------------------------------------------------------------------

    def type_of(self, node: Scalar) -> Type:
        return type_over(node, self.known)

    def kind(self, node: Scalar) -> str:
        """Return the kind of numbers of an expression."""
        return kind_of(np.dtype(self.type_of(node)))

    def conjugate(self, node: Scalar) -> Scalar:
        return Call("conj", (node,)) if self.kind(node) == "c" else node

    # ---- vertices -------------------------------------------------------------------------------

    def emit(
        self,
        name: str,
        output: Sequence[str],
        expression: Scalar,
        extent: Mapping[str, int],
        aggregation: str | None = None,
        aggregated: Sequence[str] = (),
    ) -> Element:
        """Add a vertex and return the element that reads it."""
        guarded = with_guarded_indices(expression, self.known)
        einsum, inputs = make_einsum(output, guarded, aggregation, aggregated, extent)
        self.known[name] = make_vertex(name, einsum, inputs, self.known, places=self.places)
        return Element(name, tuple(output))

    def send(self, tensor: str, contribution: Contribution) -> None:
        """Add a part to the adjoint of a tensor."""
        self._sent.setdefault(tensor, []).append(contribution)

    def declare(self, tensor: str) -> str:
        """Return the name of the adjoint of a tensor, which others read before it is defined."""
        name = self.names.take_new(PREFIX + tensor)
        self.known[name] = replace(self.known[tensor], name=name, einsum=None, inputs=())
        return name

    def define(self, tensor: str, name: str, labels: Sequence[str]) -> None:
        """Add the adjoint of a tensor that was declared by this name."""
        total = self.adjoint_of(tensor, labels)
        vertex = self.known[tensor]
        extent = dict(zip(labels, vertex.bound, strict=True))
        self.emit(name, labels, self._cast(ZERO if total is None else total, vertex.dtype), extent)

    def adjoint_of(self, tensor: str, labels: Sequence[str]) -> Scalar | None:
        """Return the adjoint of a tensor, over these labels of its dimensions.

        All vertices that read the tensor must have sent their parts. None if there are none.
        """
        parts = self._sent.pop(tensor, [])
        if not parts:
            return None
        stem = PREFIX + tensor
        dtype = self.known[tensor].dtype
        is_alone = len(parts) == 1 and self._is_plain_sum(parts[0], dtype)
        has_sums = any(part.aggregated for part in parts)
        # The adjoint itself gets the plain name, its parts get numbers.
        name = self.names.take_new(stem) if has_sums and not is_alone else ""
        total: Scalar = ZERO
        for part in parts:
            summed = self._without_sum(stem, part, dtype)
            total = plus(total, relabel(summed, dict(zip(part.output, labels, strict=True))))
        if is_cheap(total):
            return total
        extent = dict(zip(labels, self.known[tensor].bound, strict=True))
        return self.emit(name or self.names.take_new(stem), labels, total, extent)

    def _is_plain_sum(self, part: Contribution, dtype: str) -> bool:
        """Return whether a part is a sum and nothing else."""
        is_same = np.dtype(self.type_of(part.expression)) == np.dtype(dtype)
        return len(part.aggregated) > 0 and not part.places and is_same

    def as_tensor(self, tensor: str, labels: Sequence[str], adjoint: Scalar) -> str:
        """Return the name of the tensor that has an adjoint; one is added if there is none."""
        if isinstance(adjoint, Element) and adjoint.index == tuple(labels):
            return adjoint.tensor
        vertex = self.known[tensor]
        extent = dict(zip(labels, vertex.bound, strict=True))
        name = self.names.take_new(PREFIX + tensor)
        return self.emit(name, labels, self._cast(adjoint, vertex.dtype), extent).tensor

    def _cast(self, node: Scalar, dtype: str) -> Scalar:
        if isinstance(node, Const) or np.dtype(self.type_of(node)) != np.dtype(dtype):
            return Call(dtype, (node,))
        return node

    def _without_sum(self, stem: str, part: Contribution, dtype: str) -> Scalar:
        """Return a part as an expression without a sum, over the labels of its output."""
        expression = part.expression
        if part.aggregated:
            used = labels_of(expression)
            output = [label for label in part.output if label in used]
            name = self.names.take_new(stem)
            expression = self.emit(name, output, expression, part.extent, "sum", part.aggregated)
        if not isinstance(expression, Const):
            if self.kind(expression) == "c" and DTYPES[dtype].kind != "c":
                expression = Call("real", (expression,))
            expression = self._cast(expression, dtype)
        elif part.places and dtype not in ("float64", "complex128"):
            # A number in `where` no longer takes the dtype of what it is added to.
            expression = Call(dtype, (expression,))
        return under_conditions(part.places, expression)


# ---- sweep ---------------------------------------------------------------------------------------
#
# From the adjoint of an expression to the adjoints of the elements in it.


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
