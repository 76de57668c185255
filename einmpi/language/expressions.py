"""Syntax trees of expressions to expression trees with dtypes.

Aggregations and values that are used more than once become vertices of their own.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import isinf, prod

import numpy as np

from einmpi.errors import InputError, OperationError, nearest_of, one_of
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.arithmetic import call, call_type
from einmpi.graph.eingraph import Vertex
from einmpi.graph.index_arithmetic import arithmetic_labels, interval_of
from einmpi.graph.labels import unique
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import (
    Call,
    Const,
    Element,
    Index,
    Number,
    Scalar,
    is_plain,
    labels_of,
    relabel,
)
from einmpi.graph.segments import without_guard
from einmpi.language.indices import (
    Guard,
    clamped,
    has_computed_index,
    index_from_start,
    is_guarded,
    is_remainder,
    reach_of_branch,
    stays_inside,
)
from einmpi.language.macros import MACROS, SCANS, Macro
from einmpi.language.parameters import adapting_type, with_cast_parameters
from einmpi.language.scope import Scope, occurrences
from einmpi.language.symbols import SymbolTable, TypedScalar
from einmpi.language.syntax import Source, entries, labels_in_brackets, parse
from einmpi.language.vocabulary import (
    CONSTANTS,
    aggregation_named,
    call_form,
    callables,
    called_name,
    is_callable,
)

_BINARY = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.BitAnd: "&",
    ast.BitOr: "|",
}
_COMPARE = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_UNARY = {ast.USub: "neg", ast.Invert: "~"}
_EXPRESSIONS = "numbers, NAME[labels], + - * / // % **, comparisons, & | ~, and functions"
_INSTEAD: dict[type[ast.expr], str] = {
    ast.BoolOp: "& and |, with brackets around comparisons",
    ast.IfExp: "where(condition, this, that)",
}


@dataclass(frozen=True)
class MacroNames:
    """The names in the body of a macro; empty outside of macros.

    `values` are its argument, options and intermediate values. `labels` is what L stands for.
    `condition` says which values belong to a scattered result.
    """

    values: Mapping[str, TypedScalar] = field(default_factory=dict)
    labels: tuple[str, ...] | None = None
    condition: TypedScalar | None = None


OUTSIDE_MACROS = MacroNames()


@dataclass(frozen=True)
class Aggregated:
    """The argument of an aggregation, the labels that it binds, and the scope of the argument.

    `condition` says which values belong to a result, if there is an index left of =.
    """

    argument: TypedScalar
    labels: tuple[str, ...]
    scope: Scope
    condition: TypedScalar | None = None


class Expressions:
    """Reads expressions over the tensors of a symbol table.

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
        self.guards: list[Guard] = []  # the conditions of `where` around what is being read

    def expression(
        self, node: ast.expr, scope: Scope, macro: MacroNames = OUTSIDE_MACROS
    ) -> TypedScalar:
        """Return the expression of a syntax tree, adding the vertices that it needs."""
        match node:
            case ast.Constant(value=bool() | int() | float() | complex()):
                return self._constant(node)
            case ast.Name():
                return self._name(node, scope, macro)
            case ast.Subscript(value=ast.Name()):
                return self._element(node, scope, macro)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)) if (
                value == 2**63
            ):
                return TypedScalar(Const(-value), int)
            case ast.UnaryOp(op=ast.UAdd()):
                return self.expression(node.operand, scope, macro)
            case ast.UnaryOp() if type(node.op) in _UNARY:
                operand = self.expression(node.operand, scope, macro)
                return self._apply(_UNARY[type(node.op)], [operand], node)
            case ast.BinOp() if type(node.op) in _BINARY:
                left = self.expression(node.left, scope, macro)
                right = self.expression(node.right, scope, macro)
                return self._apply(_BINARY[type(node.op)], [left, right], node)
            case ast.Compare() if all(type(op) in _COMPARE for op in node.ops):
                return self._comparison(node, scope, macro)
            case ast.Call():
                return self._call(node, scope, macro)
        what = f"{self.symbols.written(node)[:60]!r} is not in the language"
        raise InputError(self.where(node), what, _INSTEAD.get(type(node), _EXPRESSIONS))

    # ---- numbers and names ----------------------------------------------------------------------

    def _constant(self, node: ast.Constant) -> TypedScalar:
        value = node.value
        assert isinstance(value, bool | int | float | complex)
        if isinstance(value, complex) and isinf(value.imag):
            raise InputError(self.where(node), "this number is too large", "a finite number")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            what = "this integer is too large"
            raise InputError(self.where(node), what, "an integer less than 2**63")
        return TypedScalar(Const(value), type(value))

    def _name(self, node: ast.Name, scope: Scope, macro: MacroNames) -> TypedScalar:
        """Return what a name without brackets means: a label, a tensor, a size or a constant."""
        name = node.id
        sizes = self.symbols.sizes
        if name in macro.values:
            return macro.values[name]
        tensor = self.known.get(name)
        if scope.sees(name):
            if tensor is not None and not tensor.bound:
                what = f"{name} is both a label and a tensor here"
                raise InputError(self.where(node), what, "two different names")
            return TypedScalar(Index(name), np.dtype(np.int64))
        if tensor is not None:
            if tensor.bound:
                labels = ", ".join("ijklmnop"[: len(tensor.bound)])
                written = self.symbols.written_name(name)
                what = f"{written} has no labels here"
                raise InputError(self.where(node), what, f"labels, such as {written}[{labels}]")
            if name in self.symbols.parameters:
                return TypedScalar(Element(name, ()), self.symbols.parameters[name])
            return TypedScalar(Element(name, ()), np.dtype(tensor.dtype))
        if name in sizes:
            return TypedScalar(Const(sizes[name]), int)
        if name in CONSTANTS:
            return TypedScalar(Const(CONSTANTS[name]), float)
        if is_callable(name):
            raise self._not_a_tensor(node, name)
        scalars = [vertex.name for vertex in self.known.values() if not vertex.bound]
        expected = nearest_of([*scalars, *sizes, *CONSTANTS], name)
        raise InputError(self.where(node), f"unknown name {name!r}", expected)

    def _not_a_tensor(self, node: ast.AST, name: str) -> InputError:
        return InputError(self.where(node), f"{name} is a function", f"a call: {call_form(name)}")

    def _element(self, node: ast.Subscript, scope: Scope, macro: MacroNames) -> TypedScalar:
        assert isinstance(node.value, ast.Name)
        name = node.value.id
        if is_callable(name):
            raise self._not_a_tensor(node, name)
        if name not in self.known:
            raise InputError(
                self.where(node), f"unknown tensor {name!r}", nearest_of(self.known, name)
            )
        tensor = self.known[name]
        parts = entries(node.slice)
        if len(parts) != len(tensor.bound):
            what = f"{self.symbols.written(node)} has the wrong number of indices"
            written = self.symbols.written_name(name)
            expected = f"{len(tensor.bound)}, one for each dimension of {written}"
            raise InputError(self.where(node), what, expected)
        index: list[str | Scalar] = []
        for part, extent in zip(parts, tensor.bound, strict=True):
            if not isinstance(part, ast.Name):
                index.append(self._computed_index(part, extent, scope, macro))
            elif self._has_other_extent(part.id, extent, scope):
                at_label = Call("+", (Index(part.id), Const(0)))
                index.append(self._checked_index(at_label, extent, scope, part))
            else:
                index.append(part.id)
        is_guarded_by_where = any(c is not self.scattered_guard for c, _ in self.guards)
        if 0 in tensor.bound and is_guarded_by_where:
            return self._element_of_empty(tensor, index, scope, node)
        return TypedScalar(Element(name, tuple(index)), np.dtype(tensor.dtype))

    def _element_of_empty(
        self, tensor: Vertex, index: list[str | Scalar], scope: Scope, node: ast.AST
    ) -> TypedScalar:
        """Return an element of a tensor without elements, by an index that a condition guards.

        It is read from a tensor with one element instead, a sum of nothing. Where the condition
        holds after all, the index is 1 and out of range.
        """
        symbols = self.symbols
        empty: list[str] = []
        kept: list[str] = []
        outside: Scalar = Const(1)
        own_index: list[str | Scalar] = []
        new_index: list[str | Scalar] = []
        own = Scope(None, [symbols.names.take_new("slice") for _ in index])
        for label, entry, extent in zip(own.bound, index, tensor.bound, strict=True):
            own.register(label, extent, label)
            own_index.append(label)
            if extent > 0 or isinstance(entry, str) or self._goes_through_none(entry, scope, node):
                kept.append(label)
                new_index.append(entry)
                continue
            empty.append(label)
            if arithmetic_labels(entry) is None:  # values decide, and they remain in use
                outside = call("maximum", outside, entry)
        if not empty:
            return TypedScalar(Element(tensor.name, tuple(index)), np.dtype(tensor.dtype))
        single = symbols.names.take_new("slice")
        own.bound = (*own.bound, single)
        own.register(single, 1, single)
        name = symbols.names.take_new(symbols.current.name)
        symbols.slices[name] = symbols.written_name(tensor.name)
        values = TypedScalar(Element(tensor.name, tuple(own_index)), np.dtype(tensor.dtype))
        aggregation = "any" if tensor.dtype == "bool" else "sum"
        made = symbols.emit(name, (single, *kept), values, aggregation, empty, own, node)
        element = Element(name, (self._guarded(outside), *new_index))
        if made.type == values.type:
            return TypedScalar(element, values.type)
        return TypedScalar(Call(tensor.dtype, (element,)), values.type)

    def _goes_through_none(self, entry: Scalar, scope: Scope, node: ast.AST) -> bool:
        """Return whether an index has no values, because one of its labels has none."""
        return any(self.symbols.extent(scope, label, node) == 0 for label in labels_of(entry))

    def _has_other_extent(self, label: str, extent: int, scope: Scope) -> bool:
        """Return whether a label is known to go through less, or more, than this dimension."""
        owner = scope.owner(label)
        if owner is None or label not in owner.extents:
            return False
        return owner.extents[label][0] != extent

    def _computed_index(
        self, node: ast.expr, extent: int, scope: Scope, macro: MacroNames
    ) -> Scalar:
        """Return an index that is computed: by a tensor, by arithmetic on labels, or a constant."""
        scalar, kind = self.expression(node, scope, macro)
        dtype = np.dtype(kind)
        if dtype.kind not in "iu":
            what = f"the index {self.symbols.written(node)} is {dtype.name}"
            raise InputError(self.where(node), what, "an integer")
        if isinstance(scalar, Const):
            return Const(index_from_start(self.where(node), int(scalar.value.real), extent))
        return self._checked_index(scalar, extent, scope, node)

    def _checked_index(self, scalar: Scalar, extent: int, scope: Scope, node: ast.expr) -> Scalar:
        """Return an index that stays inside of its dimension where it is used, or raise."""
        labels = arithmetic_labels(scalar)
        if labels is None:
            return scalar if is_remainder(scalar, extent) else self._guarded(scalar)
        bounds = {}
        for label in labels:
            label_extent = self.symbols.extent(scope, label, node)
            if label_extent == 0:
                return scalar  # nothing is read
            bounds[label] = 0, label_extent - 1
        reached = interval_of(scalar, bounds)
        if reached is None:  # it may wrap around
            return self._guarded(scalar)
        low, high = reached
        if low >= 0 and high < extent:
            return scalar
        if stays_inside(scalar, bounds, self.guards, extent):
            return clamped(scalar, low, high, extent)
        what = f"the index {self.symbols.written(node)} goes from {low} to {high}"
        hint = "give its labels extents, such as i:n-1, or use where(i > 0, ..., ...)"
        if self.guards:
            taken = reach_of_branch(scalar, bounds, self.guards)
            if taken is None or extent == 0:
                return self._guarded(scalar)  # it depends on values, and is checked in the run
            what = f"the index {self.symbols.written(node)} goes from {taken[0]} to {taken[1]}"
            hint = "the condition of where has to exclude the rest"
        raise InputError(self.where(node), what, f"0 to {extent - 1}", hint)

    def _guarded(self, index: Scalar) -> Scalar:
        """Return an index that is 0 where the conditions of `where` around it do not hold."""
        if is_guarded(index, self.guards):
            return index
        for condition, holds in self.guards:
            if holds:
                index = Call("where", (condition, index, Const(0)))
            else:
                index = Call("where", (condition, Const(0), index))
        return index

    # ---- operations -----------------------------------------------------------------------------

    def _apply(self, op: str, arguments: Sequence[TypedScalar], node: ast.AST) -> TypedScalar:
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

    def _comparison(self, node: ast.Compare, scope: Scope, macro: MacroNames) -> TypedScalar:
        """Return a comparison; a chain such as 0 < x < 1 becomes (0 < x) & (x < 1)."""
        sides = [self.expression(node.left, scope, macro)]
        for comparator in node.comparators:
            sides.append(self.expression(comparator, scope, macro))
        for k in range(1, len(sides) - 1):
            sides[k] = self.name_value(sides[k], scope, node)  # it is used twice
        result = self._apply(_COMPARE[type(node.ops[0])], sides[:2], node)
        for k, op in enumerate(node.ops[1:], 1):
            comparison = self._apply(_COMPARE[type(op)], sides[k : k + 2], node)
            result = self._apply("&", [result, comparison], node)
        return result

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

    # ---- functions, aggregations, macros --------------------------------------------------------

    def _call(self, node: ast.Call, scope: Scope, macro: MacroNames) -> TypedScalar:
        """Return a call: of an aggregation, of a macro, or of a function."""
        called = called_name(node)
        if called is None:
            raise self._unknown_function(node, self.symbols.written(node.func)[:60])
        name, brackets = called
        aggregation = aggregation_named(name)
        if aggregation is not None:
            found = self.aggregate(node, scope, macro)
            value = self.masked(found, aggregation, node)
            return self.symbols.emit_temporary(
                value, aggregation, found.labels, found.scope, node, tuple(self.scattered)
            )
        if name in SCANS:
            return self._scan(node, name, brackets, scope, macro)
        if name in MACROS:
            return self._macro_call(node, name, brackets, scope, macro)
        if not is_callable(name):
            raise self._unknown_function(node, name)
        if brackets is not None or node.keywords or len(node.args) != OPERATIONS[name].arity:
            raise self._wrong_call(node, name)
        if name == "where":
            return self._where(node, scope, macro)
        arguments = [self.expression(arg, scope, macro) for arg in node.args]
        return self._apply(name, arguments, node)

    def _where(self, node: ast.Call, scope: Scope, macro: MacroNames) -> TypedScalar:
        """Return where(condition, this, that); the condition guards the indices in both."""
        condition, this, that = node.args
        arguments = [self.expression(condition, scope, macro)]
        for branch, holds in ((this, True), (that, False)):
            self.guards.append((arguments[0].scalar, holds))
            arguments.append(self.expression(branch, scope, macro))
            self.guards.pop()
        return self._apply("where", arguments, node)

    def _unknown_function(self, node: ast.AST, name: str) -> InputError:
        return InputError(
            self.where(node), f"unknown function {name!r}", nearest_of(callables(), name)
        )

    def _wrong_call(self, node: ast.AST, name: str) -> InputError:
        return InputError(self.where(node), f"{name} is not called like this", call_form(name))

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

    # ---- indices left of = ----------------------------------------------------------------------

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
            if np.dtype(index.type).kind not in "iu":
                name = np.dtype(index.type).name
                what = f"the index {self.symbols.written(index_node)} is {name}"
                raise InputError(self.where(index_node), what, "an integer")
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
        return self._apply("where", [found.condition, found.argument, _constant(neutral)], node)

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

    def _nothing_to_aggregate(self, node: ast.Call, name: str, scope: Scope) -> InputError:
        found = occurrences(node.args[0], self.known)
        reason = "it has no labels"
        if found:
            reason = "every label in it is aggregated inside it"
        if any(scope.sees(entry.label) for entry in found):
            reason = "every label in it also occurs outside of it"
        what = f"{name}(...) has nothing to aggregate: {reason}"
        return InputError(self.where(node), what, f"{name}[labels](...)")

    def _check_occurs(self, label: str, expression: Scalar, name: str, node: ast.AST) -> None:
        labels = labels_of(expression)
        if label not in labels:
            what = f"label {label} does not occur in this {name}"
            expected = nearest_of(labels, label) if labels else "an argument with labels"
            raise InputError(self.where(node), what, expected)

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
        masked = self._apply("where", [is_before, value, _constant(neutral)], node)
        return self.symbols.emit_temporary(masked, record.name, (scanned,), inner, node)

    def _macro_call(
        self,
        node: ast.Call,
        name: str,
        brackets: ast.expr | None,
        scope: Scope,
        macro: MacroNames,
    ) -> TypedScalar:
        """Return a macro, written out."""
        record = MACROS[name]
        options = self._options(node, name)
        if record.reduces:
            found = self.aggregate(node, scope, macro)
        else:
            if record.needs_labels != (brackets is not None) or len(node.args) != 1:
                raise self._wrong_call(node, name)
            labels: tuple[str, ...] = ()
            if brackets is not None:
                listed = labels_in_brackets(self.symbols.source, brackets)
                labels = tuple(label for label, _ in listed)
            argument = self._inside(labels, node.args[0], scope, macro)
            self.symbols.refuse_repeated(labels, f"this {name}", node)
            for label in labels:
                self._check_occurs(label, argument.scalar, name, node)
            found = Aggregated(argument, labels, scope)
        # Errors inside of nested macros point at the outermost call, which the user has written.
        outer_site = self.symbols.site
        self.symbols.site = outer_site or node
        result = self._macro_body(record, found, options, node)
        self.symbols.site = outer_site
        return result

    def _macro_body(
        self, macro: Macro, given: Aggregated, options: Mapping[str, TypedScalar], node: ast.Call
    ) -> TypedScalar:
        scope = given.scope
        body = _parsed(macro.body)
        count = prod(self.symbols.extent(scope, label, node) for label in given.labels)
        number = TypedScalar(Const(count), int)
        values: dict[str, TypedScalar] = {"n": number, "end": number, **options}
        if given.condition is not None and _uses(body, "n"):
            values["n"] = self._segment_size(given, node)
        values["p"] = self._position(given, node)
        names = MacroNames(values, given.labels, given.condition)
        values["x"] = given.argument
        if _uses(body, "x") > 1:
            values["x"] = self._named_argument(given, node)
        for line in body[:-1]:
            assert isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)
            value = self.expression(line.value, scope, names)
            # A value for each place as well as each label would be too large a tensor.
            labels = labels_of(value.scalar)
            is_for_each_place = any(label in labels for label in self.scattered)
            if not is_for_each_place or set(labels).isdisjoint(given.labels):
                value = self.name_value(value, scope, node)
            values[line.targets[0].id] = value
        result = body[-1]
        assert isinstance(result, ast.Expr)
        return self.expression(result.value, scope, names)

    def _named_argument(self, given: Aggregated, node: ast.Call) -> TypedScalar:
        """Return the argument of a macro as a tensor, which has a value for every place."""
        value = given.argument
        if given.condition is not None:
            value = TypedScalar(without_guard(value.scalar, given.condition.scalar), value.type)
        return self.name_value(value, given.scope, node)

    def _segment_size(self, given: Aggregated, node: ast.Call) -> TypedScalar:
        """Return how many values belong to each result; like a constant it adapts its dtype."""
        ones = replace(given, argument=_constant(1))
        value = self.masked(ones, "sum", node)
        counted = self.symbols.emit_temporary(
            value, "sum", given.labels, given.scope, node, tuple(self.scattered)
        )
        return TypedScalar(counted.scalar, int)

    def _position(self, given: Aggregated, node: ast.Call) -> TypedScalar:
        """Return the number of a combination of labels; the last label runs fastest."""
        position: Scalar = Const(0)
        for number, label in enumerate(given.labels):
            if number == 0:
                position = Index(label)
                continue
            extent = self.symbols.extent(given.scope, label, node)
            position = call("+", call("*", position, Const(extent)), Index(label))
        return TypedScalar(position, np.dtype(np.int64))

    def _options(self, node: ast.Call, name: str) -> dict[str, TypedScalar]:
        """Return the options of a macro call: numbers."""
        options = {key: Const(value) for key, value in MACROS[name].options.items()}
        for keyword in node.keywords:
            value = self.expression(keyword.value, Scope(None, ())).scalar
            if keyword.arg not in options or not isinstance(value, Const):
                forms = [f"{key}=number" for key in options]
                what = f"{name} has no option {keyword.arg}"
                if keyword.arg in options:
                    what = f"the option {keyword.arg} of {name} is not a number"
                expected = one_of(forms) if forms else "no options"
                raise InputError(self.where(keyword.value), what, expected)
            options[keyword.arg] = value
        return {key: TypedScalar(const, type(const.value)) for key, const in options.items()}


def _constant(value: Number) -> TypedScalar:
    return TypedScalar(Const(value), type(value))


@cache
def _parsed(body: str) -> list[ast.stmt]:
    return parse(Source("macro", body))


def _uses(body: Sequence[ast.stmt], name: str) -> int:
    """Return how often a name occurs in the body of a macro."""
    uses = 0
    for line in body:
        for part in ast.walk(line):
            if isinstance(part, ast.Name) and part.id == name:
                uses += 1
    return uses
