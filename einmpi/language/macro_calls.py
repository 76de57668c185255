"""Gradients in programs: grad(loss, W[i,j]) is an element of the gradient of loss by W."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod

import numpy as np

from einmpi.errors import InputError, OperationError, one_of
from einmpi.gradients.differentiate import add_gradients, with_gradient
from einmpi.graph.arithmetic import call
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.scalar import Call, Const, Element, Index, Scalar, labels_of
from einmpi.graph.segments import without_guard
from einmpi.language.expression_reader import (
    Aggregated,
    ExpressionReader,
    MacroNames,
    check_occurs,
    constant,
    masked,
    read_aggregated,
    read_argument,
)
from einmpi.language.macros import GRADIENT, MACROS, Macro
from einmpi.language.scope import Scope
from einmpi.language.symbols import TypedScalar
from einmpi.language.syntax import (
    Declaration,
    Source,
    Statement,
    entries,
    labels_in_brackets,
    parse,
)

# ---- macro calls ---------------------------------------------------------------------------------
#
# Calls of macros, written out: their bodies are read with the names that they give to values.


def read_macro_call(
    reader: ExpressionReader,
    node: ast.Call,
    name: str,
    brackets: ast.expr | None,
    scope: Scope,
) -> TypedScalar:
    """Return a macro, written out."""
    symbols = reader.symbols
    record = MACROS[name]
    options = _options(reader, node, name)
    if record.reduces:
        found = read_aggregated(reader, node, scope)
    else:
        if record.needs_labels != (brackets is not None) or len(node.args) != 1:
            raise reader.wrong_call(node, name)
        labels: tuple[str, ...] = ()
        if brackets is not None:
            listed = labels_in_brackets(symbols.source, brackets)
            labels = tuple(label for label, _ in listed)
        argument = read_argument(reader, labels, node.args[0], scope)
        symbols.refuse_repeated(labels, f"this {name}", node)
        for label in labels:
            check_occurs(reader, label, argument.scalar, name, node)
        found = Aggregated(argument, labels, scope)
    # Errors inside of nested macros point at the outermost call, which the user has written.
    outer_site = symbols.site
    outer_macro = reader.macro
    symbols.site = outer_site or node
    result = _read_body(reader, record, found, options, node)
    symbols.site = outer_site
    reader.macro = outer_macro
    return result


def _options(reader: ExpressionReader, node: ast.Call, name: str) -> dict[str, TypedScalar]:
    """Return the options of a macro call: numbers."""
    options: dict[str, TypedScalar] = {}
    for key, default in MACROS[name].options.items():
        options[key] = constant(default)
    for keyword in node.keywords:
        value = reader.expression(keyword.value, Scope(None, ())).scalar
        if keyword.arg in options and isinstance(value, Const):
            options[keyword.arg] = constant(value.value)
            continue
        what = f"{name} has no option {keyword.arg}"
        if keyword.arg in options:
            what = f"the option {keyword.arg} of {name} is not a number"
        expected = "no options"
        if options:
            expected = one_of([f"{key}=number" for key in options])
        raise InputError(reader.where(keyword.value), what, expected)
    return options


# ---- bodies -------------------------------------------------------------------------------------


def _read_body(
    reader: ExpressionReader,
    macro: Macro,
    given: Aggregated,
    options: Mapping[str, TypedScalar],
    node: ast.Call,
) -> TypedScalar:
    """Return the value of a macro for an argument, which is x in its body."""
    scope = given.scope
    body = _parsed(macro.body)
    if reader.symbols.is_differentiated and macro.differentiable:
        body = _parsed(macro.differentiable)
    count = prod(reader.symbols.extent(scope, label, node) for label in given.labels)
    number = TypedScalar(Const(count), int)
    values: dict[str, TypedScalar] = {"n": number, "end": number, **options}
    if given.condition is not None and _count_uses(body, "n"):
        values["n"] = _segment_size(reader, given, node)
    values["p"] = _position(reader, given, node)
    reader.macro = MacroNames(values, given.labels, given.condition)
    values["x"] = given.argument
    if _count_uses(body, "x") > 1:
        values["x"] = _named_argument(reader, given, node)
    kind = values["x"].type
    if isinstance(kind, np.dtype) and kind.kind in "iub" and not macro.takes_integers:
        values["x"] = reader.apply("float64", [values["x"]], node)
    for line in body[:-1]:
        assert isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)
        value = reader.expression(line.value, scope)
        # A value for each place as well as each label would be too large a tensor.
        labels = labels_of(value.scalar)
        is_for_each_place = any(label in labels for label in reader.scattered)
        if not is_for_each_place or set(labels).isdisjoint(given.labels):
            value = reader.name_value(value, scope, node)
        values[line.targets[0].id] = value
    result = body[-1]
    assert isinstance(result, ast.Expr)
    return reader.expression(result.value, scope)


@cache
def _parsed(body: str) -> list[ast.stmt]:
    return parse(Source("macro", body))


def _count_uses(body: Sequence[ast.stmt], name: str) -> int:
    """Return how often a name occurs in the body of a macro."""
    uses = 0
    for line in body:
        for part in ast.walk(line):
            if isinstance(part, ast.Name) and part.id == name:
                uses += 1
    return uses


def _segment_size(reader: ExpressionReader, given: Aggregated, node: ast.Call) -> TypedScalar:
    """Return how many values belong to each result; like a constant it adapts its dtype."""
    ones = replace(given, argument=constant(1))
    value = masked(reader, ones, "sum", node)
    counted = reader.symbols.emit_temporary(
        value, "sum", given.labels, given.scope, node, tuple(reader.scattered)
    )
    return TypedScalar(counted.scalar, int)


def _position(reader: ExpressionReader, given: Aggregated, node: ast.Call) -> TypedScalar:
    """Return the number of a combination of labels; the last label runs fastest."""
    position: Scalar = Const(0)
    for number, label in enumerate(given.labels):
        if number == 0:
            position = Index(label)
            continue
        extent = reader.symbols.extent(given.scope, label, node)
        position = call("+", call("*", position, Const(extent)), Index(label))
    return TypedScalar(position, np.dtype(np.int64))


def _named_argument(reader: ExpressionReader, given: Aggregated, node: ast.Call) -> TypedScalar:
    """Return the argument of a macro as a tensor, which has a value for every place."""
    value = given.argument
    if given.condition is not None:
        value = TypedScalar(without_guard(value.scalar, given.condition.scalar), value.type)
    return reader.name_value(value, given.scope, node)


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


def gradients_by(program: Sequence[Statement | Declaration]) -> dict[str, str]:
    """Return the statements such as dA[i,j] = grad(loss, A[i,j]), and their tensors A."""
    found = {}
    for item in program:
        if isinstance(item, Statement):
            labels = [label for label, _ in item.labels]
            match item.value:
                case ast.Call(func=ast.Name(id=name), args=[_, ast.Subscript() as by]):
                    index = [getattr(entry, "id", None) for entry in entries(by.slice)]
                    if name == GRADIENT and isinstance(by.value, ast.Name) and index == labels:
                        found[item.name] = by.value.id
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
