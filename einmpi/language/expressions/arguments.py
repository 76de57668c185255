"""The arguments of aggregations, macros and scans, read for all values of the labels they bind."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from einmpi.errors import InputError, nearest_of
from einmpi.graph.index_arithmetic import Guard
from einmpi.graph.labels import unique
from einmpi.graph.scalar import Call, Const, Scalar, labels_of
from einmpi.language.expressions.reader import ExpressionReader
from einmpi.language.indices import has_computed_index
from einmpi.language.scope import Scope
from einmpi.language.symbols import TypedScalar


@dataclass(frozen=True)
class Aggregated:
    """The argument of an aggregation, the labels that it binds, and the scope of the argument.

    `condition` says which values belong to a result, if there is an index left of =.
    """

    argument: TypedScalar
    labels: tuple[str, ...]
    scope: Scope
    condition: TypedScalar | None = None


def read_argument(
    reader: ExpressionReader,
    labels: Sequence[str],
    argument: ast.expr,
    scope: Scope,
) -> TypedScalar:
    """Return what is aggregated or scanned over some labels, for all of their values.

    Conditions of `where` around it say nothing about these values.
    """
    outer_guards = reader.guards
    scattered_guard = reader.scattered_guard
    reader.guards = []
    for condition, holds in outer_guards:
        # What is aggregated inside of a scattered aggregation does not depend on the place.
        is_scattered = condition is scattered_guard and len(labels) > 0
        if set(labels).isdisjoint(labels_of(condition)) and not is_scattered:
            reader.guards.append((condition, holds))
    if labels:
        reader.scattered_guard = None
        _aggregate_guards(reader, argument, scope)
    value = reader.expression(argument, scope)
    reader.guards = outer_guards
    reader.scattered_guard = scattered_guard
    return value


def _aggregate_guards(reader: ExpressionReader, argument: ast.expr, scope: Scope) -> None:
    """Make guards of what is aggregated independent of labels that it does not have.

    An index in it counts if a condition holds for any of their values: so there is one sum in
    where(x[i] > 0, sum[j](y[k[j]]), 0), and not one for each i.
    """
    names = {part.id for part in ast.walk(argument) if isinstance(part, ast.Name)}
    kept: list[Guard] = []
    foreign: list[str] = []
    conjunction: Scalar | None = None
    for condition, holds in reader.guards:
        others = [label for label in labels_of(condition) if label not in names]
        if not others:
            kept.append((condition, holds))
            continue
        foreign.extend(others)
        comparison = "!=" if holds else "=="
        holding: Scalar = Call(comparison, (condition, Const(0)))
        conjunction = Call("&", (conjunction, holding)) if conjunction else holding
    if conjunction is None or not has_computed_index(argument):
        return
    value = TypedScalar(conjunction, np.dtype(bool))
    anywhere = reader.symbols.emit_temporary(value, "any", unique(foreign), scope, argument)
    reader.guards = [*kept, (anywhere.scalar, True)]


def check_occurs(
    reader: ExpressionReader, label: str, expression: Scalar, name: str, node: ast.AST
) -> None:
    """Refuse a label in the brackets of a call that does not occur in its argument."""
    labels = labels_of(expression)
    if label in labels:
        return
    expected = "an argument with labels"
    if labels:
        expected = nearest_of(labels, label)
    what = f"label {label} does not occur in this {name}"
    raise InputError(reader.where(node), what, expected)
