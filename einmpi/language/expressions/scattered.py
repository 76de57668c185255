"""Aggregations in statements with an index left of =, which says where each value goes."""

from __future__ import annotations

import ast

import numpy as np

from einmpi.errors import InputError
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.labels import unique
from einmpi.graph.scalar import Index, labels_of
from einmpi.language.expressions.arguments import Aggregated, check_occurs, read_argument
from einmpi.language.expressions.reader import ExpressionReader, constant
from einmpi.language.scope import Scope, occurrences
from einmpi.language.symbols import TypedScalar
from einmpi.language.syntax import labels_in_brackets


def is_scattered(
    reader: ExpressionReader, argument: ast.expr, brackets: ast.expr | None, scope: Scope
) -> bool:
    """Return whether an aggregation is one over the values that an index left of = sends to it.

    It is if it binds a label of such an index. An argument without labels of its own, as in
    sum(1), belongs to the indices too.
    """
    if not reader.scattered or reader.is_inside_scattered:
        return False
    index_labels = _labels_of_indices(reader, scope)
    if brackets is not None:
        listed = labels_in_brackets(reader.symbols.source, brackets)
        return any(label in index_labels for label, _ in listed)
    found = [entry.label for entry in occurrences(argument, reader.known)]
    loose = [label for label in found if not scope.sees(label)]
    return not loose or any(label in index_labels for label in loose)


def _labels_of_indices(reader: ExpressionReader, scope: Scope) -> set[str]:
    """Return the labels of the indices left of = that no scope binds yet."""
    names: set[str] = set()
    for index in reader.scattered.values():
        names.update(entry.label for entry in occurrences(index, reader.known))
        # A label may also be a number in it, as in e // 4.
        names.update(part.id for part in ast.walk(index) if isinstance(part, ast.Name))
    return {name for name in names if not scope.sees(name)}


def read_scattered(
    reader: ExpressionReader,
    node: ast.Call,
    name: str,
    labels: tuple[str, ...],
    scope: Scope,
) -> Aggregated:
    """Return the argument of an aggregation over the values that belong to a result."""
    for label in scope.loose:
        what = f"label {label} is in an index left of =, but this {name} does not aggregate it"
        listed = ",".join([*labels, label])
        raise InputError(reader.where(node), what, f"{name}[{listed}](...)")
    condition = _condition(reader, labels, scope)
    reader.is_inside_scattered = True
    reader.has_scattered = True
    reader.scattered_guard = condition.scalar
    reader.guards.append((condition.scalar, True))
    value = reader.expression(node.args[0], scope)
    reader.guards.pop()
    reader.scattered_guard = None
    reader.is_inside_scattered = False
    occurring = unique(labels_of(value.scalar), labels_of(condition.scalar))
    for label in labels:
        if label not in scope.extents and label not in occurring:
            check_occurs(reader, label, value.scalar, name, node)
    return Aggregated(value, labels, scope, condition)


def _condition(reader: ExpressionReader, labels: tuple[str, ...], scope: Scope) -> TypedScalar:
    """Return which values belong to a result: those whose indices are its place."""
    condition: TypedScalar | None = None
    for label, index_node in reader.scattered.items():
        index = read_argument(reader, labels, index_node, scope)
        dtype = np.dtype(index.type)
        if dtype.kind not in "iu":
            what = f"the index {reader.symbols.written(index_node)} is {dtype.name}"
            raise InputError(reader.where(index_node), what, "an integer", "use int64(...)")
        place = TypedScalar(Index(label), np.dtype(np.int64))
        comparison = reader.apply("==", [index, place], index_node)
        if condition is None:
            condition = comparison
        else:
            condition = reader.apply("&", [condition, comparison], index_node)
    assert condition is not None
    return condition


def masked(
    reader: ExpressionReader, found: Aggregated, aggregation: str, node: ast.AST
) -> TypedScalar:
    """Return what is aggregated: the argument where it belongs to the result, else nothing."""
    if found.condition is None:
        return found.argument
    record = AGGREGATIONS[aggregation]
    dtype = np.dtype(found.argument.type)
    if dtype.kind == "c" and not record.takes_complex:
        return found.argument  # refused when the vertex is added
    neutral = record.empty
    if neutral is None:
        neutral = record.neutral(dtype)
    return reader.apply("where", [found.condition, found.argument, constant(neutral)], node)
