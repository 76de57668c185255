"""Expressions as text in the paper's notation, which the language reads back."""

from __future__ import annotations

import math
from collections.abc import Sequence

from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Arg, Const, Element, Index, Number, Scalar

# How tightly a text binds: operators have the precedence of their record, these are around them.
_SUM_PRECEDENCE = OPERATIONS["+"].precedence
_SIGN_PRECEDENCE = OPERATIONS["neg"].precedence
_ATOM_PRECEDENCE = OPERATIONS["**"].precedence + 1


def text(node: Scalar, names: Sequence[str] = ()) -> str:
    """Return the expression as text; `names` are the texts of the operands."""
    return _text_and_precedence(node, names)[0]


def element_text(tensor: str, index: Sequence[str | Scalar], names: Sequence[str] = ()) -> str:
    """Return an element of a tensor as text."""
    if not index:
        return tensor
    entries = [entry if isinstance(entry, str) else text(entry, names) for entry in index]
    return f"{tensor}[{','.join(entries)}]"


def _text_and_precedence(node: Scalar, names: Sequence[str]) -> tuple[str, int]:
    """Return the text of an expression and how tightly it binds.

    A sum inside a product needs brackets, because it binds less tightly: (a + b) × c.
    """
    if isinstance(node, Const):
        return _number(node.value)
    if isinstance(node, Index):
        return node.label, _ATOM_PRECEDENCE
    if isinstance(node, Arg):
        name = names[node.position] if names else f"x{node.position}"
        return name, _ATOM_PRECEDENCE
    if isinstance(node, Element):
        return element_text(node.tensor, node.index, names), _ATOM_PRECEDENCE
    operation = OPERATIONS[node.op]
    if operation.is_function:
        arguments = ", ".join(text(arg, names) for arg in node.args)
        return f"{node.op}({arguments})", _ATOM_PRECEDENCE
    precedence = operation.precedence
    if operation.arity == 1:
        return operation.symbol + _bracketed(node.args[0], precedence, names), precedence
    # Comparisons would chain and ** binds to the right: brackets keep the tree as it is.
    left_precedence = precedence
    if operation.is_comparison or node.op == "**":
        left_precedence += 1
    left = _bracketed(node.args[0], left_precedence, names)
    right = _bracketed(node.args[1], precedence + 1, names)
    return f"{left} {operation.symbol} {right}", precedence


def _number(value: Number) -> tuple[str, int]:
    """Return the text of a constant and how tightly it binds, as −1 in (-1)**2."""
    if isinstance(value, complex) and not math.isfinite(value.imag):
        return f"{value.real!r} + {value.imag!r} × 1j", _SUM_PRECEDENCE
    shown = repr(value)
    return shown, _SIGN_PRECEDENCE if shown.startswith("-") else _ATOM_PRECEDENCE


def _bracketed(node: Scalar, needed: int, names: Sequence[str]) -> str:
    """Return the text of a node, in brackets if it binds less tightly than needed."""
    shown, precedence = _text_and_precedence(node, names)
    return shown if precedence >= needed else f"({shown})"
