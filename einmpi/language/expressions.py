"""Expressions of the language → expression trees and their dtypes. What needs a vertex of its own becomes one:
aggregations, and values that macros and comparisons use twice."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import isinf, prod

import numpy as np

from einmpi.errors import InputError, OperationError, one_of
from einmpi.graph.arithmetic import call, call_type
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Call, Const, Element, Index, Scalar, labels_of
from einmpi.language.macros import MACROS
from einmpi.language.scope import Scope, occurrences
from einmpi.language.symbols import Piece, Vertices
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
    ast.Mod: "%",
    ast.Pow: "**",
    ast.BitAnd: "&",
    ast.BitOr: "|",
}
_COMPARE = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_UNARY = {ast.USub: "neg", ast.Invert: "~"}
_INSTEAD: dict[type[ast.expr], str] = {
    ast.BoolOp: "write & and |, with brackets around comparisons",
    ast.IfExp: "write where(condition, this, that)",
}


@dataclass(frozen=True)
class Env:
    """The names in a macro's body: its values, and what its L stands for. Both are empty outside of macros."""

    values: Mapping[str, Piece] = field(default_factory=dict)
    labels: tuple[str, ...] | None = None


OUTSIDE = Env()


class Expressions:
    """Reads expressions over the vertices that are known."""

    def __init__(self, vertices: Vertices) -> None:
        self.vertices, self.known, self.where = vertices, vertices.known, vertices.where

    def expression(self, node: ast.expr, scope: Scope, env: Env = OUTSIDE) -> Piece:
        match node:
            case ast.Constant(value=bool() | int() | float() | complex() as value):
                if isinstance(value, complex) and isinf(value.imag):
                    raise InputError(
                        self.where(node), "this number is too large", "a finite number"
                    )
                if isinstance(value, int) and not -(2**63) <= value < 2**63:
                    raise InputError(
                        self.where(node), "this integer is too large", "less than 2**63"
                    )
                return Const(value), type(value)
            case ast.Name():
                return self.name(node, scope, env)
            case ast.Subscript(value=ast.Name()):
                return self.element(node, scope, env)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)) if (
                value == 2**63
            ):
                return Const(-value), int
            case ast.UnaryOp(op=ast.UAdd()):
                return self.expression(node.operand, scope, env)
            case ast.UnaryOp() if type(node.op) in _UNARY:
                return self.apply(
                    _UNARY[type(node.op)], [self.expression(node.operand, scope, env)], node
                )
            case ast.BinOp() if type(node.op) in _BINARY:
                sides = [self.expression(side, scope, env) for side in (node.left, node.right)]
                return self.apply(_BINARY[type(node.op)], sides, node)
            case ast.Compare() if all(type(op) in _COMPARE for op in node.ops):
                sides = [
                    self.expression(side, scope, env) for side in (node.left, *node.comparators)
                ]
                sides[1:-1] = [
                    self.name_value(side, scope, node) for side in sides[1:-1]
                ]  # each is used twice
                result = self.apply(_COMPARE[type(node.ops[0])], sides[:2], node)
                for k, op in enumerate(node.ops[1:], 1):
                    result = self.apply(
                        "&", [result, self.apply(_COMPARE[type(op)], sides[k : k + 2], node)], node
                    )
                return result
            case ast.Call():
                return self.call(node, scope, env)
        allowed = _INSTEAD.get(
            type(node), "numbers, NAME[labels], + - * / ** %, comparisons, & | ~, and functions"
        )
        raise InputError(
            self.where(node), f"{ast.unparse(node)[:60]!r} is not in the language", allowed
        )

    def apply(self, op: str, pieces: Sequence[Piece], node: ast.AST) -> Piece:
        args = tuple(scalar for scalar, _ in pieces)
        try:
            made = call(op, *args)
            if isinstance(made, Const):
                return made, type(made.value)
            return made, call_type(op, args, [kind for _, kind in pieces])
        except OperationError as error:
            raise error.at(self.where(node)) from None

    def name(self, node: ast.Name, scope: Scope, env: Env) -> Piece:
        name = node.id
        if name in env.values:
            return env.values[name]
        known = self.known.get(name)
        if scope.sees(name):
            if known is not None and not known.bound:
                raise InputError(
                    self.where(node), f"{name} is a label and a tensor here", "two different names"
                )
            return Index(name), np.dtype(np.int64)
        if known is not None:
            if known.bound:
                shown = f"{name}[{', '.join('ijklmnop'[: len(known.bound)])}]"
                raise InputError(
                    self.where(node), f"{name} stands without its labels", f"such as {shown}"
                )
            return Element(name, ()), np.dtype(known.dtype)
        if name in self.vertices.sizes:
            return Const(self.vertices.sizes[name]), int
        if name in CONSTANTS:
            return Const(CONSTANTS[name]), float
        if is_callable(name):
            raise InputError(self.where(node), f"{name} is a function", call_form(name))
        names = [
            *(v.name for v in self.known.values() if not v.bound),
            *self.vertices.sizes,
            *CONSTANTS,
        ]
        raise InputError(self.where(node), f"unknown name {name!r}", one_of(names, name))

    def element(self, node: ast.Subscript, scope: Scope, env: Env) -> Piece:
        assert isinstance(node.value, ast.Name)
        name, parts = node.value.id, entries(node.slice)
        if is_callable(name):
            raise InputError(self.where(node), f"{name} is a function", call_form(name))
        if name not in self.known:
            raise InputError(self.where(node), f"unknown tensor {name!r}", one_of(self.known, name))
        vertex = self.known[name]
        if len(parts) != len(vertex.bound):
            shown = f"{ast.unparse(node)} has the wrong number of indices"
            raise InputError(self.where(node), shown, f"{name} takes {len(vertex.bound)}")
        index: list[str | Scalar] = []
        for part, extent in zip(parts, vertex.bound, strict=True):
            index.append(
                part.id if isinstance(part, ast.Name) else self.gathered(part, extent, scope, env)
            )
        return Element(name, tuple(index)), np.dtype(vertex.dtype)

    def gathered(self, node: ast.expr, extent: int, scope: Scope, env: Env) -> Scalar:
        """An index that is computed: by a tensor, by arithmetic on labels, or a constant."""
        scalar, kind = self.expression(node, scope, env)
        if np.dtype(kind).kind != "i":
            raise InputError(
                self.where(node),
                f"the index {ast.unparse(node)} is {np.dtype(kind).name}",
                "an integer",
            )
        if isinstance(scalar, Const) and not 0 <= scalar.value.real < extent:
            allowed = f"0 to {extent - 1}" if extent else "this dimension has extent 0"
            raise InputError(self.where(node), f"index {scalar.value} is out of range", allowed)
        return scalar

    # ---- functions, aggregations, macros ----------------------------------------------------------------------------

    def call(self, node: ast.Call, scope: Scope, env: Env) -> Piece:
        called = called_name(node)
        if called is None or not (is_callable(called[0]) or aggregation_named(called[0])):
            shown = called[0] if called else ast.unparse(node.func)[:60]
            raise InputError(
                self.where(node), f"unknown function {shown!r}", one_of(callables(), shown)
            )
        name, labels = called
        aggregation = aggregation_named(name)
        if aggregation is not None:
            body, bound, inner = self.aggregate(node, scope, env)
            return self.vertices.emit_temporary(body, aggregation, bound, inner, node)
        if name in MACROS:
            return self.macro(node, name, labels, scope, env)
        if labels is not None or node.keywords or len(node.args) != OPERATIONS[name].arity:
            raise InputError(self.where(node), f"{name} is not called like this", call_form(name))
        return self.apply(name, [self.expression(arg, scope, env) for arg in node.args], node)

    def aggregate(
        self, node: ast.Call, scope: Scope, env: Env = OUTSIDE
    ) -> tuple[Piece, tuple[str, ...], Scope]:
        """(argument, labels it aggregates, scope of the argument) of an aggregation or a reducing macro."""
        called = called_name(node)
        assert called is not None
        name, brackets = called
        if len(node.args) != 1 or (node.keywords and name not in MACROS):
            raise InputError(
                self.where(node), f"{name} is not called like this", f"{name}(expression)"
            )
        argument = node.args[0]
        if brackets is None:
            inner = self.vertices.open(scope, (), argument)
            inner.bind_loose()
            bound = inner.bound
            if not bound:
                self.vertices.refuse_loose(scope)
                found = occurrences(argument, self.known)
                why = (
                    "no label stands in it"
                    if not found
                    else "every label in it is aggregated inside it"
                )
                if any(scope.sees(entry.label) for entry in found):
                    why = "every label in it also stands outside of it"
                raise InputError(
                    self.where(node),
                    f"{name}(...) has nothing to aggregate: {why}",
                    f"{name}[labels](...)",
                )
        elif env.labels is not None:  # a macro's body, where every aggregation is over L
            return self.expression(argument, scope, env), env.labels, scope
        else:
            listed = labels_in_brackets(self.vertices.source, brackets)
            bound = tuple(label for label, _ in listed)
            self.vertices.refuse_twice(bound, f"this {name}", node)
            inner = self.vertices.open(scope, bound, argument)
            for label, extent in listed:
                self.vertices.fix_extent(inner, label, extent)
        body = self.expression(argument, inner, env)
        for label in bound:
            if label not in labels_of(body[0]) and label not in inner.extents:
                raise InputError(
                    self.where(node),
                    f"label {label} does not occur in this {name}",
                    one_of(labels_of(body[0])),
                )
        return body, bound, inner

    def macro(
        self, node: ast.Call, name: str, brackets: ast.expr | None, scope: Scope, env: Env
    ) -> Piece:
        macro = MACROS[name]
        options = self.options(node, name)
        if macro.reduces:
            argument, labels, inner = self.aggregate(node, scope, env)
        else:
            if macro.needs_labels != (brackets is not None) or len(node.args) != 1:
                form = (
                    f"{name}[labels](expression)" if macro.needs_labels else f"{name}(expression)"
                )
                raise InputError(self.where(node), f"{name} is not called like this", form)
            argument, inner = self.expression(node.args[0], scope, env), scope
            labels = (
                ()
                if brackets is None
                else tuple(x for x, _ in labels_in_brackets(self.vertices.source, brackets))
            )
            self.vertices.refuse_twice(labels, f"this {name}", node)
            for label in labels:
                if label not in labels_of(argument[0]):
                    raise InputError(
                        self.where(node),
                        f"label {label} does not occur in this {name}",
                        one_of(labels_of(argument[0])),
                    )
        count = prod(self.vertices.extent(inner, label, node) for label in labels)
        outer_site, self.vertices.site = self.vertices.site, self.vertices.site or node
        body = _macro_body(name)
        values: dict[str, Piece] = {"n": (Const(count), int), **options}
        local = Env(values, labels)
        uses = sum(
            isinstance(part, ast.Name) and part.id == "x"
            for line in body
            for part in ast.walk(line)
        )
        values["x"] = argument if uses == 1 else self.name_value(argument, inner, node)
        for line in body[:-1]:
            assert isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)
            values[line.targets[0].id] = self.name_value(
                self.expression(line.value, inner, local), inner, node
            )
        assert isinstance(body[-1], ast.Expr)
        result = self.expression(body[-1].value, inner, local)
        self.vertices.site = outer_site
        return result

    def name_value(self, piece: Piece, scope: Scope, node: ast.AST) -> Piece:
        """A value used more than once becomes a tensor of its own, so that expressions do not double."""
        return (
            self.vertices.emit_temporary(piece, None, (), scope, node)
            if isinstance(piece[0], Call)
            else piece
        )

    def options(self, node: ast.Call, name: str) -> dict[str, Piece]:
        options = {key: Const(value) for key, value in MACROS[name].options.items()}
        for keyword in node.keywords:
            value = self.expression(keyword.value, Scope(None, ()))[0]
            if keyword.arg not in options or not isinstance(value, Const):
                raise InputError(
                    self.where(keyword.value),
                    f"{name} has no option {keyword.arg} of this kind",
                    one_of(f"{key}=number" for key in options),
                )
            options[keyword.arg] = value
        return {key: (const, type(const.value)) for key, const in options.items()}


@cache
def _macro_body(name: str) -> list[ast.stmt]:
    return parse(Source(name, MACROS[name].body))
