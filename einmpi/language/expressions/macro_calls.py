"""Calls of macros, written out: their bodies are read with the names that they give to values."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.graph.arithmetic import call
from einmpi.graph.scalar import Const, Index, Scalar, labels_of
from einmpi.graph.segments import without_guard
from einmpi.language.expressions.aggregates import read_aggregated
from einmpi.language.expressions.arguments import Aggregated, check_occurs, read_argument
from einmpi.language.expressions.reader import ExpressionReader, MacroNames, constant
from einmpi.language.expressions.scattered import masked
from einmpi.language.macros import MACROS, Macro
from einmpi.language.scope import Scope
from einmpi.language.symbols import TypedScalar
from einmpi.language.syntax import Source, labels_in_brackets, parse


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
