"""Syntax trees of expressions to expression trees with dtypes.

Aggregations and values that are used more than once become vertices of their own.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod

import numpy as np

from einmpi.errors import InputError, nearest_of, one_of
from einmpi.graph.arithmetic import call
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import (
    Call,
    Const,
    Index,
    Scalar,
    labels_of,
)
from einmpi.graph.segments import without_guard
from einmpi.language.aggregates import Aggregated, Aggregates, constant
from einmpi.language.elements import OUTSIDE_MACROS, MacroNames
from einmpi.language.macros import MACROS, SCANS, Macro
from einmpi.language.numpy_names import FUNCTIONS_OF_RESULTS, WRITTEN_INSTEAD
from einmpi.language.scope import Scope
from einmpi.language.symbols import TypedScalar
from einmpi.language.syntax import Source, labels_in_brackets, parse
from einmpi.language.vocabulary import (
    aggregation_named,
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
_INSTEAD: dict[type[ast.AST], str] = {
    ast.BoolOp: "& and |, with brackets around comparisons",
    ast.IfExp: "where(condition, this, that)",
    ast.BitXor: "**, which is the power",
    ast.MatMult: "a sum of products, such as sum(A[i,j] * B[j,k])",
}


class Expressions(Aggregates):
    """Reads expressions over the tensors of a symbol table."""

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
        kind = type(node.op) if isinstance(node, ast.BinOp) else type(node)
        raise InputError(self.where(node), what, _INSTEAD.get(kind, _EXPRESSIONS))

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
        if name in self.known:
            return InputError(self.where(node), f"{name} is a tensor", f"{name}[labels]")
        what = f"unknown function {name!r}"
        last_name = name.rpartition(".")[2]  # of np.exp or torch.nn.functional.relu
        if last_name in WRITTEN_INSTEAD:
            return InputError(self.where(node), what, WRITTEN_INSTEAD[last_name])
        if last_name in FUNCTIONS_OF_RESULTS:
            hint = f"numpy's {last_name} takes the DistArray that a program returns"
            return InputError(self.where(node), what, "a function of the language", hint)
        if is_callable(last_name):
            return InputError(self.where(node), what, f"{last_name} alone")
        return InputError(self.where(node), what, nearest_of(callables(), name))

    # ---- macros ----------------------------------------------------------------------------------

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
        ones = replace(given, argument=constant(1))
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
