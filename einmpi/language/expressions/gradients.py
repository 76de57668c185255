"""Gradients in programs: grad(loss, W[i,j]) is an element of the gradient of loss by W."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

import numpy as np

from einmpi.errors import InputError, OperationError
from einmpi.gradients.differentiate import add_gradients, with_gradient
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.scalar import Call, Element, labels_of
from einmpi.language.expressions.reader import ExpressionReader
from einmpi.language.scope import Scope
from einmpi.language.symbols import TypedScalar
from einmpi.language.syntax import Statement
from einmpi.language.vocabulary import GRADIENT


def gradients_in(program: Sequence[Statement]) -> dict[str, list[str]]:
    """Return the tensors by which each loss is differentiated, as far as both have names.

    A loss that is an expression is called "".
    """
    found: dict[str, list[str]] = {}
    for loss, by in _arguments_in(program):
        loss_name = loss.id if isinstance(loss, ast.Name) else ""
        tensor = by.value if isinstance(by, ast.Subscript) else by
        tensors = found.setdefault(loss_name, [])
        if isinstance(tensor, ast.Name) and tensor.id not in tensors:
            tensors.append(tensor.id)
    return found


def losses_in(program: Sequence[Statement]) -> set[int]:
    """Return the ids of the syntax trees of losses. A gradient does not use the loss itself."""
    return {id(loss) for loss, _ in _arguments_in(program)}


def _arguments_in(program: Sequence[Statement]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the loss and the tensor of every gradient in a program."""
    for item in program:
        for node in item.nodes:
            match node:
                case ast.Call(func=ast.Name(id=name), args=[loss, by]) if name == GRADIENT:
                    yield loss, by


def read_gradient(
    reader: ExpressionReader,
    node: ast.Call,
    brackets: ast.expr | None,
    scope: Scope,
) -> TypedScalar:
    """Return an element of a gradient, which has the shape of the tensor that it is by."""
    if brackets is not None or node.keywords or len(node.args) != 2:
        raise reader.wrong_call(node, GRADIENT)
    loss = _loss(reader, node.args[0], scope)
    by = reader.expression(node.args[1], scope).scalar
    if not isinstance(by, Element):
        what = f"grad is by {reader.symbols.written(node.args[1])[:60]}"
        raise InputError(reader.where(node.args[1]), what, "a tensor with labels, such as W[i,j]")
    gradient = _gradient(reader, loss, by.tensor, node)
    dtype = np.dtype(reader.known[gradient].dtype)
    return TypedScalar(Element(gradient, by.index), dtype)


def _loss(reader: ExpressionReader, node: ast.expr, scope: Scope) -> str:
    """Return the name of the tensor without dimensions that is differentiated."""
    place = reader.where(node)
    expected = "a real number without labels"
    hint = "add up its elements: grad(sum(Y[i]), X[i])"
    tensor = reader.known.get(node.id) if isinstance(node, ast.Name) else None
    if tensor is not None and tensor.bound:
        raise InputError(place, f"grad is of {tensor.name}, which has labels", expected, hint)
    loss = reader.expression(node, scope)
    if labels_of(loss.scalar):
        what = f"grad is of {reader.symbols.written(node)[:60]}, which has labels"
        raise InputError(place, what, expected, hint)
    dtype = np.dtype(loss.type).name
    if DTYPES[dtype].kind != "f":
        what = f"grad is of {reader.symbols.written(node)[:60]}, which is {dtype}"
        raise InputError(place, what, "a real number in floating point")
    if isinstance(loss.scalar, Element):
        return loss.scalar.tensor
    if not isinstance(loss.scalar, Call):
        what = f"grad is of {reader.symbols.written(node)[:60]}, which is a number"
        raise InputError(place, what, "a tensor without labels")
    named = reader.symbols.emit_temporary(loss, None, (), scope, node).scalar
    assert isinstance(named, Element)
    return named.tensor


def _gradient(reader: ExpressionReader, loss: str, tensor: str, node: ast.Call) -> str:
    """Return the gradient of a loss by a tensor; all that the program asks for are made at once."""
    symbols = reader.symbols
    if (loss, tensor) not in symbols.gradients:
        tensors = [tensor]
        possible = with_gradient(reader.known, loss)
        for other in symbols.differentiated.get(loss, ()):
            if other != tensor and other in possible:
                tensors.append(other)
        places = (symbols.source.at(symbols.current.node),)
        try:
            found = add_gradients(reader.known, loss, tensors, symbols.names, places)
        except OperationError as error:
            raise error.at(reader.where(node)) from None
        for name, gradient in found.items():
            symbols.gradients[loss, name] = gradient
    return symbols.gradients[loss, tensor]
