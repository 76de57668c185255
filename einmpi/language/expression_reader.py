"""Aggregations and scans, each of which becomes a vertex of its own."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from einmpi.errors import InputError, OperationError, nearest_of
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.arithmetic import call, call_type
from einmpi.graph.index_arithmetic import Guard
from einmpi.graph.scalar import (
    Call,
    Const,
    Index,
    Number,
    Scalar,
    is_plain,
    labels_of,
    relabel,
    unique,
)
from einmpi.graph.segments import without_guard
from einmpi.language.indices import has_computed_index
from einmpi.language.macros import MACROS, SCANS, call_form, called_name
from einmpi.language.scope import Scope, occurrences
from einmpi.language.symbols import SymbolTable, TypedScalar, adapting_type, with_cast_parameters
from einmpi.language.syntax import labels_in_brackets

# ---- reader --------------------------------------------------------------------------------------
#
# What all parts of an expression are read with: tensors, guards, names of macros, operations.


@dataclass(frozen=True)
class MacroNames:
    """The names in the body of a macro; empty outside of macros.

    `values` are its argument, options and intermediate values. `labels` is what L stands for.
    `condition` says which values belong to a scattered result.
    """

    values: Mapping[str, TypedScalar] = field(default_factory=dict)
    labels: tuple[str, ...] | None = None
    condition: TypedScalar | None = None


class ExpressionReader(ABC):
    """Reads the expressions of a statement; its state is what is around the one being read.

    `scattered` has the indices left of =, each with the label that stands for it.
    """

    def __init__(
        self, symbols: SymbolTable, scattered: Mapping[str, ast.expr] | None = None
    ) -> None:
        self.symbols = symbols
        self.scattered = scattered or {}
        self.has_scattered = False  # whether an aggregation has taken them into account
        self.is_inside_scattered = False  # such an aggregation is around what is being read
        self.scattered_guard: Scalar | None = None  # its condition, one of `guards`
        self.known = symbols.known
        self.where = symbols.where
        self.macro = MacroNames()  # of the macro whose body is being read
        self.guards: list[Guard] = []  # the conditions of `where` around what is being read

    @abstractmethod
    def expression(self, node: ast.expr, scope: Scope) -> TypedScalar:
        """Return the expression of a syntax tree, adding the vertices that it needs."""

    def apply(self, op: str, arguments: Sequence[TypedScalar], node: ast.AST) -> TypedScalar:
        """Return an operation on expressions; constants are folded."""
        try:
            arguments = with_cast_parameters(op, arguments)
            scalars = tuple(argument.scalar for argument in arguments)
            result = call(op, *scalars)
            if isinstance(result, Const):
                return TypedScalar(result, type(result.value))
            kinds = [argument.type for argument in arguments]
            found = call_type(op, scalars, kinds)
            return TypedScalar(result, adapting_type(op, kinds, found))
        except OperationError as error:
            raise error.at(self.where(node)) from None

    def name_value(self, value: TypedScalar, scope: Scope, node: ast.AST) -> TypedScalar:
        """Make a value that is used more than once a tensor, so that expressions do not double.

        Not if conditions of `where` around it have labels that it does not have itself: the tensor
        would be larger by these labels.
        """
        if not isinstance(value.scalar, Call):
            return value
        scalar: Scalar = value.scalar
        if self.scattered_guard is not None:
            scalar = without_guard(scalar, self.scattered_guard)
        unguarded = scalar
        for condition, _ in self.guards:
            unguarded = without_guard(unguarded, condition)
        if set(labels_of(unguarded)) != set(labels_of(scalar)):
            return value
        named = TypedScalar(scalar, value.type)
        return self.symbols.emit_temporary(named, None, (), scope, node)

    def wrong_call(self, node: ast.Call, name: str) -> InputError:
        """Return the error for a call with the wrong arguments or brackets."""
        hint = ""
        if any(keyword.arg in ("axis", "dim") for keyword in node.keywords):
            hint = f"labels take the place of an axis: {name}[j](X[i,j])"
        elif name in ("max", "min") and len(node.args) > 1:
            hint = f"{name}imum(x, y) is that of two values"
        what = f"{name} is not called like this"
        return InputError(self.where(node), what, call_form(name), hint)

    def not_a_tensor(self, node: ast.AST, name: str) -> InputError:
        """Return the error for a function that is used like a tensor."""
        return InputError(self.where(node), f"{name} is a function", f"a call: {call_form(name)}")


def constant(value: Number) -> TypedScalar:
    """Return a constant as an expression; its type is one of Python."""
    return TypedScalar(Const(value), type(value))


# ---- arguments -----------------------------------------------------------------------------------
#
# The arguments of aggregations, macros and scans, read for all values of the labels they bind.


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
    if not reader.guards:
        return
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


# ---- scattered -----------------------------------------------------------------------------------
#
# Aggregations in statements with an index left of =, which says where each value goes.


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
