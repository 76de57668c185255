"""Factors of products under a sum that are computed, and not just read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from einmpi.gradients.expressions import is_cheap
from einmpi.graph.scalar import Call, Element, Scalar, labels_of


def computed_factors(
    expression: Scalar, labels: Collection[str], is_wanted: Callable[[Scalar], bool]
) -> list[Scalar]:
    """Return the factors of a product that should become tensors before it is differentiated.

    These are wanted, are more than an element and a number, and have not all of the labels. In
    Σ[j](tanh(A[i,j]) × B[j,k]) the derivative of tanh would be computed for every k, inside of a
    sum that is no matrix product any more.
    """
    found: list[Scalar] = []
    for factor in _parts(expression, set(labels)):
        own = set(labels_of(factor))
        is_repeated = bool(own) and own < set(labels)
        if is_repeated and not is_cheap(factor) and is_wanted(factor) and factor not in found:
            found.append(factor)
    return found


def _parts(node: Scalar, labels: set[str]) -> list[Scalar]:
    """Return a product as few factors.

    Factors stay together if one of them has all of their labels, but not those of the whole:
    x[b,f] × tanh(x[b,f]) is one factor of a product with W[f,a].
    """
    own = set(labels_of(node))
    factors = _factors(node)
    if own < labels and any(set(labels_of(factor)) == own for factor in factors):
        return [node]
    match node:
        case Call("*", (left, right)):
            return _parts(left, labels) + _parts(right, labels)
        case Call("neg", (inner,)):
            return _parts(inner, labels)
        case Call("/", (dividend, divisor)) if not labels_of(divisor):
            return _parts(dividend, labels)
    return [node]


def _factors(node: Scalar) -> list[Scalar]:
    """Return all factors of a product; an expression that is none is its only factor."""
    match node:
        case Call("*", (left, right)):
            return _factors(left) + _factors(right)
        case Call("neg", (inner,)):
            return _factors(inner)
    return [node]


def with_elements(node: Scalar, elements: Mapping[Scalar, Element]) -> Scalar:
    """Return a product with elements in the place of factors."""
    if node in elements:
        return elements[node]
    if isinstance(node, Call) and node.op in ("*", "neg", "/"):
        return Call(node.op, tuple(with_elements(argument, elements) for argument in node.args))
    return node
