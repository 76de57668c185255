"""Aggregations and scans in expressions: what they aggregate, over which labels, and for an index
left of = the values that belong to a result.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from einmpi.errors import InputError, nearest_of
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.labels import unique
from einmpi.graph.scalar import (
    Call,
    Const,
    Index,
    Number,
    Scalar,
    is_plain,
    labels_of,
    relabel,
)
from einmpi.language.elements import OUTSIDE_MACROS, Elements, MacroNames
from einmpi.language.indices import (
    Guard,
    has_computed_index,
)
from einmpi.language.macros import MACROS, SCANS
from einmpi.language.scope import Scope, occurrences
from einmpi.language.symbols import SymbolTable, TypedScalar
from einmpi.language.syntax import labels_in_brackets
from einmpi.language.vocabulary import (
    call_form,
    called_name,
)


@dataclass(frozen=True)
class Aggregated:
    """The argument of an aggregation, the labels that it binds, and the scope of the argument.

    `condition` says which values belong to a result, if there is an index left of =.
    """

    argument: TypedScalar
    labels: tuple[str, ...]
    scope: Scope
    condition: TypedScalar | None = None


class Aggregates(Elements):
    """Reads the arguments of aggregations, and scans.

    `scattered` has the indices left of =, each with the label that stands for it.
    """

    def __init__(
        self, symbols: SymbolTable, scattered: Mapping[str, ast.expr] | None = None
    ) -> None:
        super().__init__(symbols)
        self.scattered = scattered or {}
        self.has_scattered = False  # whether an aggregation has taken them into account
        self.is_inside_scattered = False  # such an aggregation is around what is being read

    def aggregate(
        self, node: ast.Call, scope: Scope, macro: MacroNames = OUTSIDE_MACROS
    ) -> Aggregated:
        """Return the argument and the labels of an aggregation or of a macro that reduces."""
        called = called_name(node)
        assert called is not None
        name, brackets = called
        if len(node.args) != 1 or (node.keywords and name not in MACROS):
            raise self._wrong_call(node, name)
        argument = node.args[0]
        if brackets is not None and macro.labels is not None:
            # In the body of a macro every aggregation is over L.
            value = self.expression(argument, scope, macro)
            return Aggregated(value, macro.labels, scope, macro.condition)
        is_scattered = self._is_scattered(argument, brackets, scope)
        body: ast.expr = argument
        if is_scattered:  # the labels of indices left of = are those of what is aggregated
            body = ast.Tuple([*self.scattered.values(), argument], ast.Load())
        if brackets is None:
            inner = self.symbols.open_scope(scope, (), body, bool(self.guards))
            inner.bind_loose()
            labels = inner.bound
            if not labels:
                self.symbols.refuse_loose(scope)
                raise self._nothing_to_aggregate(node, name, scope)
        else:
            listed = labels_in_brackets(self.symbols.source, brackets)
            labels = tuple(label for label, _ in listed)
            self.symbols.refuse_repeated(labels, f"this {name}", node)
            inner = self.symbols.open_scope(scope, listed, body, bool(self.guards))
        if is_scattered:
            return self._scattered_aggregate(node, name, labels, inner, macro)
        value = self._inside(labels, argument, inner, macro)
        for label in labels:
            if label not in inner.extents:
                self._check_occurs(label, value.scalar, name, node)
        return Aggregated(value, labels, inner)

    def _inside(
        self, labels: Sequence[str], argument: ast.expr, scope: Scope, macro: MacroNames
    ) -> TypedScalar:
        """Return what is aggregated or scanned over some labels, for all of their values.

        Conditions of `where` around it say nothing about these values.
        """
        outer_guards = self.guards
        scattered_guard = self.scattered_guard
        self.guards = []
        for condition, holds in outer_guards:
            # What is aggregated inside of a scattered aggregation does not depend on the place.
            is_scattered = condition is scattered_guard and len(labels) > 0
            if set(labels).isdisjoint(labels_of(condition)) and not is_scattered:
                self.guards.append((condition, holds))
        if labels:
            self.scattered_guard = None
            self._aggregate_guards(argument, scope)
        value = self.expression(argument, scope, macro)
        self.guards = outer_guards
        self.scattered_guard = scattered_guard
        return value

    def _aggregate_guards(self, argument: ast.expr, scope: Scope) -> None:
        """Make guards of what is aggregated independent of labels that it does not have.

        An index in it counts if a condition holds for any of their values: so there is one sum in
        where(x[i] > 0, sum[j](y[k[j]]), 0), and not one for each i.
        """
        names = {part.id for part in ast.walk(argument) if isinstance(part, ast.Name)}
        kept: list[Guard] = []
        foreign: list[str] = []
        conjunction: Scalar | None = None
        for condition, holds in self.guards:
            others = [label for label in labels_of(condition) if label not in names]
            if not others:
                kept.append((condition, holds))
                continue
            foreign.extend(others)
            holding: Scalar = Call("!=" if holds else "==", (condition, Const(0)))
            conjunction = Call("&", (conjunction, holding)) if conjunction else holding
        if conjunction is None or not has_computed_index(argument):
            return
        value = TypedScalar(conjunction, np.dtype(bool))
        anywhere = self.symbols.emit_temporary(value, "any", unique(foreign), scope, argument)
        self.guards = [*kept, (anywhere.scalar, True)]

    def _wrong_call(self, node: ast.Call, name: str) -> InputError:
        hint = ""
        if any(keyword.arg in ("axis", "dim") for keyword in node.keywords):
            hint = f"labels take the place of an axis: {name}[j](X[i,j])"
        what = f"{name} is not called like this"
        return InputError(self.where(node), what, call_form(name), hint)

    def _nothing_to_aggregate(self, node: ast.Call, name: str, scope: Scope) -> InputError:
        found = occurrences(node.args[0], self.known)
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
        return InputError(self.where(node), what, f"{name}[labels](...)")

    def _check_occurs(self, label: str, expression: Scalar, name: str, node: ast.AST) -> None:
        labels = labels_of(expression)
        if label not in labels:
            what = f"label {label} does not occur in this {name}"
            expected = nearest_of(labels, label) if labels else "an argument with labels"
            raise InputError(self.where(node), what, expected)

    # ---- indices left of = -----------------------------------------------------------------------

    def _is_scattered(self, argument: ast.expr, brackets: ast.expr | None, scope: Scope) -> bool:
        """Return whether an aggregation is one over the values that an index left of = sends to it.

        It is if it binds a label of such an index. An argument without labels of its own, as in
        sum(1), belongs to the indices too.
        """
        if not self.scattered or self.is_inside_scattered:
            return False
        own: set[str] = set()
        for index in self.scattered.values():
            own.update(entry.label for entry in occurrences(index, self.known))
            # A label may also be a number in it, as in e // 4.
            own.update(part.id for part in ast.walk(index) if isinstance(part, ast.Name))
        own = {name for name in own if not scope.sees(name)}
        if brackets is not None:
            listed = labels_in_brackets(self.symbols.source, brackets)
            return any(label in own for label, _ in listed)
        found = [entry.label for entry in occurrences(argument, self.known)]
        loose = [label for label in found if not scope.sees(label)]
        return not loose or any(label in own for label in loose)

    def _scattered_aggregate(
        self,
        node: ast.Call,
        name: str,
        labels: tuple[str, ...],
        scope: Scope,
        macro: MacroNames,
    ) -> Aggregated:
        """Return the argument of an aggregation over the values that belong to a result."""
        for label in scope.loose:
            what = f"label {label} is in an index left of =, but this {name} does not aggregate it"
            listed = ",".join([*labels, label])
            raise InputError(self.where(node), what, f"{name}[{listed}](...)")
        condition: TypedScalar | None = None
        for label, index_node in self.scattered.items():
            index = self._inside(labels, index_node, scope, macro)
            dtype = np.dtype(index.type)
            if dtype.kind not in "iu":
                what = f"the index {self.symbols.written(index_node)} is {dtype.name}"
                raise InputError(self.where(index_node), what, "an integer", "use int64(...)")
            place = TypedScalar(Index(label), np.dtype(np.int64))
            comparison = self._apply("==", [index, place], index_node)
            if condition is None:
                condition = comparison
            else:
                condition = self._apply("&", [condition, comparison], index_node)
        assert condition is not None
        self.is_inside_scattered = True
        self.has_scattered = True
        self.scattered_guard = condition.scalar
        self.guards.append((condition.scalar, True))
        value = self.expression(node.args[0], scope, macro)
        self.guards.pop()
        self.scattered_guard = None
        self.is_inside_scattered = False
        occurring = unique(labels_of(value.scalar), labels_of(condition.scalar))
        for label in labels:
            if label not in scope.extents and label not in occurring:
                self._check_occurs(label, value.scalar, name, node)
        return Aggregated(value, labels, scope, condition)

    def masked(self, found: Aggregated, aggregation: str, node: ast.AST) -> TypedScalar:
        """Return what is aggregated: the argument where it belongs to the result, else nothing."""
        if found.condition is None:
            return found.argument
        record = AGGREGATIONS[aggregation]
        dtype = np.dtype(found.argument.type)
        if dtype.kind == "c" and not record.takes_complex:
            return found.argument  # refused when the vertex is added
        neutral = record.empty if record.empty is not None else record.neutral(dtype)
        return self._apply("where", [found.condition, found.argument, constant(neutral)], node)

    # ---- scans -----------------------------------------------------------------------------------

    def _scan(
        self,
        node: ast.Call,
        name: str,
        brackets: ast.expr | None,
        scope: Scope,
        macro: MacroNames,
    ) -> TypedScalar:
        """Return a scan: ⊕[k](where(k <= i, x[k], neutral)), which kernels compute in one pass."""
        if brackets is None or node.keywords or len(node.args) != 1:
            raise self._wrong_call(node, name)
        listed = labels_in_brackets(self.symbols.source, brackets)
        if len(listed) != 1 or listed[0][1] is not None:
            raise self._wrong_call(node, name)
        label = listed[0][0]
        argument = self._inside((label,), node.args[0], scope, macro)
        self._check_occurs(label, argument.scalar, name, node)
        if not is_plain(argument.scalar):
            argument = self.symbols.emit_temporary(argument, None, (), scope, node)
        record = AGGREGATIONS[SCANS[name]]
        dtype = np.dtype(argument.type)
        if dtype.kind == "c" and not record.takes_complex:
            what = f"{name} does not take complex numbers"
            raise InputError(self.where(node), what, "a real argument")
        # The text of a constant cannot show the sign of a complex zero.
        neutral = record.neutral(dtype) if dtype.kind != "c" else record.empty
        assert neutral is not None
        self.symbols.names.add(label)
        scanned = self.symbols.names.take_new(label)
        inner = Scope(scope, (scanned,))
        inner.register(scanned, self.symbols.extent(scope, label, node), scanned)
        position = TypedScalar(Index(scanned), np.dtype(np.int64))
        limit = TypedScalar(Index(label), np.dtype(np.int64))
        value = TypedScalar(relabel(argument.scalar, {label: scanned}), argument.type)
        is_before = self._apply("<=", [position, limit], node)
        masked = self._apply("where", [is_before, value, constant(neutral)], node)
        return self.symbols.emit_temporary(masked, record.name, (scanned,), inner, node)


def constant(value: Number) -> TypedScalar:
    return TypedScalar(Const(value), type(value))
