"""Aggregations and scans, each of which becomes a vertex of its own."""

from __future__ import annotations

import ast

import numpy as np

from einmpi.errors import InputError
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.scalar import Index, is_plain, relabel
from einmpi.language.expressions.arguments import Aggregated, check_occurs, read_argument
from einmpi.language.expressions.reader import (
    ExpressionReader,
    constant,
)
from einmpi.language.expressions.scattered import is_scattered, masked, read_scattered
from einmpi.language.macros import MACROS, SCANS
from einmpi.language.scope import Scope, occurrences
from einmpi.language.symbols import TypedScalar
from einmpi.language.syntax import labels_in_brackets
from einmpi.language.vocabulary import called_name


def read_aggregation(
    reader: ExpressionReader, node: ast.Call, aggregation: str, scope: Scope
) -> TypedScalar:
    """Return an aggregation inside of an expression: an element of a vertex of its own."""
    found = read_aggregated(reader, node, scope)
    value = masked(reader, found, aggregation, node)
    return reader.symbols.emit_temporary(
        value, aggregation, found.labels, found.scope, node, tuple(reader.scattered)
    )


def read_aggregated(reader: ExpressionReader, node: ast.Call, scope: Scope) -> Aggregated:
    """Return the argument and the labels of an aggregation or of a macro that reduces."""
    called = called_name(node)
    assert called is not None
    name, brackets = called
    if len(node.args) != 1 or (node.keywords and name not in MACROS):
        raise reader.wrong_call(node, name)
    argument = node.args[0]
    macro = reader.macro
    if brackets is not None and macro.labels is not None:
        # In the body of a macro every aggregation is over L.
        value = reader.expression(argument, scope)
        return Aggregated(value, macro.labels, scope, macro.condition)
    uses_left_indices = is_scattered(reader, argument, brackets, scope)
    body: ast.expr = argument
    if uses_left_indices:  # the labels of indices left of = are those of what is aggregated
        body = ast.Tuple([*reader.scattered.values(), argument], ast.Load())
    symbols = reader.symbols
    is_in_branch = len(reader.guards) > 0
    if brackets is None:
        inner = symbols.open_scope(scope, (), body, is_in_branch)
        inner.bind_loose()
        labels = inner.bound
        if not labels:
            symbols.refuse_loose(scope)
            raise _nothing_to_aggregate(reader, node, name, scope)
    else:
        listed = labels_in_brackets(symbols.source, brackets)
        labels = tuple(label for label, _ in listed)
        symbols.refuse_repeated(labels, f"this {name}", node)
        inner = symbols.open_scope(scope, listed, body, is_in_branch)
    if uses_left_indices:
        return read_scattered(reader, node, name, labels, inner)
    value = read_argument(reader, labels, argument, inner)
    for label in labels:
        if label not in inner.extents:
            check_occurs(reader, label, value.scalar, name, node)
    return Aggregated(value, labels, inner)


def _nothing_to_aggregate(
    reader: ExpressionReader, node: ast.Call, name: str, scope: Scope
) -> InputError:
    found = occurrences(node.args[0], reader.known)
    are_outside = [scope.sees(entry.label) for entry in found]
    if not found:
        reason = "it has no labels"
    elif all(are_outside):
        reason = "every label in it also occurs outside of it"
    elif any(are_outside):
        reason = "every label in it is aggregated inside it or also occurs outside of it"
    else:
        reason = "every label in it is aggregated inside it"
    what = f"{name}(...) has nothing to aggregate: {reason}"
    return InputError(reader.where(node), what, f"{name}[labels](...)")


def read_scan(
    reader: ExpressionReader,
    node: ast.Call,
    name: str,
    brackets: ast.expr | None,
    scope: Scope,
) -> TypedScalar:
    """Return a scan: ⊕[k](where(k <= i, x[k], neutral)), which kernels compute in one pass."""
    symbols = reader.symbols
    if brackets is None or node.keywords or len(node.args) != 1:
        raise reader.wrong_call(node, name)
    listed = labels_in_brackets(symbols.source, brackets)
    if len(listed) != 1 or listed[0][1] is not None:
        raise reader.wrong_call(node, name)
    label = listed[0][0]
    argument = read_argument(reader, (label,), node.args[0], scope)
    check_occurs(reader, label, argument.scalar, name, node)
    if not is_plain(argument.scalar):
        argument = symbols.emit_temporary(argument, None, (), scope, node)
    record = AGGREGATIONS[SCANS[name]]
    dtype = np.dtype(argument.type)
    if dtype.kind == "c" and not record.takes_complex:
        what = f"{name} does not take complex numbers"
        raise InputError(reader.where(node), what, "a real argument")
    # The text of a constant cannot show the sign of a complex zero.
    neutral = record.neutral(dtype) if dtype.kind != "c" else record.empty
    assert neutral is not None
    symbols.names.add(label)
    scanned = symbols.names.take_new(label)
    inner = Scope(scope, (scanned,))
    inner.register(scanned, symbols.extent(scope, label, node), scanned)
    position = TypedScalar(Index(scanned), np.dtype(np.int64))
    limit = TypedScalar(Index(label), np.dtype(np.int64))
    value = TypedScalar(relabel(argument.scalar, {label: scanned}), argument.type)
    is_before = reader.apply("<=", [position, limit], node)
    up_to_limit = reader.apply("where", [is_before, value, constant(neutral)], node)
    return symbols.emit_temporary(up_to_limit, record.name, (scanned,), inner, node)
