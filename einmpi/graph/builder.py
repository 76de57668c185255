"""Statements → vertices: expressions, aggregations, macros, dtypes and extents, errors with their position."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf, isinf, nan, pi, prod
from typing import TypeAlias

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.graph.arithmetic import call, call_type
from einmpi.graph.brain import check_bfloat16
from einmpi.graph.eingraph import Vertex, make_vertex
from einmpi.graph.einsum import AGGREGATIONS, SYMBOLS, make_einsum
from einmpi.graph.labels import MAX_EXTENT, fresh, unique
from einmpi.graph.macros import MACROS
from einmpi.graph.scalar import CASTS, DTYPES, FUNCTIONS, OPS, Call, Const, Element, Index, Scalar, Type, labels_of
from einmpi.graph.scope import Scope, occurrences
from einmpi.graph.syntax import Declaration, Source, Statement, entries, integer, labels_in_brackets, parse

CONSTANTS = {"inf": inf, "nan": nan, "pi": pi}
REDUCTIONS = {**{name: name for name in AGGREGATIONS}, **SYMBOLS, **{n: n for n, m in MACROS.items() if m.reduces}}
CALLABLES = (*AGGREGATIONS, *MACROS, *FUNCTIONS)
RESERVED = frozenset([*CALLABLES, *SYMBOLS, *CONSTANTS])
_BINARY = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Mod: "%", ast.Pow: "**", ast.BitAnd: "&",
           ast.BitOr: "|"}  # fmt: skip
_COMPARE = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_UNARY = {ast.USub: "neg", ast.Invert: "~"}
_INSTEAD: dict[type[ast.expr], str] = {
    ast.BoolOp: "write & and |, with brackets around comparisons",
    ast.IfExp: "write where(condition, this, that)",
}

Inputs: TypeAlias = Mapping[str, tuple[Sequence[int], str]]  # name → shape, dtype
Piece: TypeAlias = tuple[Scalar, Type]  # an expression and its dtype


@dataclass(frozen=True)
class Env:
    """The names in a macro's body: its values, and what its L stands for. Empty outside of macros."""

    values: Mapping[str, Piece] = field(default_factory=dict)
    labels: tuple[str, ...] | None = None


class Builder:
    """Turns statements into vertices, one after another."""

    def __init__(self, source: Source, sizes: Mapping[str, int], names: set[str]) -> None:
        self.source, self.sizes = source, sizes
        self.taken = set(names)
        self.known: dict[str, Vertex] = {}
        self.current: Statement  # the one being built: it names the temporaries
        self.site: ast.AST | None = None  # the macro call being expanded: errors point at it

    def where(self, node: ast.AST) -> str:
        return self.source.at(self.site or node)

    # ---- names and tensors ------------------------------------------------------------------------------------------

    def check_names(self, program: Sequence[Statement]) -> None:
        if not program:
            raise InputError(self.source.name, "the program has no statement", "NAME[labels] = expression")
        seen: set[str] = set()
        for item in program:
            place = self.source.at(item.node)
            if item.name in seen or item.name in self.known:
                raise InputError(place, f"{item.name} is defined twice", "each name once; inputs are defined already")
            if item.name in RESERVED or item.name in self.sizes:
                kind = "a size" if item.name in self.sizes else "a word of the language"
                raise InputError(place, f"{item.name} is {kind} and cannot be a tensor", "any other name")
            seen.add(item.name)

    def declare(self, item: Declaration) -> None:
        place = self.source.at(item.node)
        shape = tuple(integer(self.source, node, self.sizes) for node in item.shape)
        if item.name in self.known:
            known = self.known[item.name]
            if (known.bound, known.dtype) != (shape, item.dtype):
                raise InputError(place, f"{item.name} is given as {known}", "the same shape and dtype")
            return
        self.taken.add(item.name)
        self.add_input(item.name, shape, item.dtype, place)

    def add_input(self, name: str, shape: Sequence[int], dtype: str, place: str) -> None:
        check_bfloat16(place, dtype)
        if dtype not in CASTS:
            raise InputError(place, f"dtype {dtype!r} of {name} is not supported", one_of(DTYPES, dtype))
        if not name.isidentifier() or name in RESERVED or name in self.sizes:
            raise InputError(place, f"{name!r} cannot name a tensor", "a name that is no size and no function")
        self.add(Vertex(name, tuple(int(extent) for extent in shape), dtype), place)

    def add(self, vertex: Vertex, place: str) -> None:
        for extent in vertex.bound:
            if not 0 <= extent <= MAX_EXTENT:
                raise InputError(place, f"{vertex.name} has extent {extent}", "0 to 2**39 = 549755813888")
        if vertex.nbytes >= 2**63:
            raise InputError(place, f"{vertex.name} would have {vertex.elements} elements", "less than 2**63 bytes")
        self.known[vertex.name] = vertex

    # ---- statements -------------------------------------------------------------------------------------------------

    def statement(self, item: Statement) -> None:
        self.current = item
        labels = tuple(label for label, _ in item.labels)
        place = self.source.at(item.node)
        self.refuse_twice(labels, "the output", item.node)
        scope = self.open(None, labels, item.value)
        for label, extent in item.labels:
            self.fix_extent(scope, label, extent)
        occurring = {entry.label for entry in occurrences(item.value, self.known, REDUCTIONS)}
        for label in labels:
            if label not in occurring and label in _bound_inside(item.value):
                raise InputError(place, f"label {label} is aggregated and also in the output", "one of the two")
        self.root(item, scope, labels)

    def refuse_twice(self, labels: Sequence[str], where: str, node: ast.AST) -> None:
        for label in labels:
            if labels.count(label) > 1:
                raise InputError(self.where(node), f"label {label} stands twice in {where}", "each label once")

    def root(self, item: Statement, scope: Scope, labels: tuple[str, ...]) -> None:
        """Emit the statement's own vertex; an aggregation at the root needs no second one."""
        head = self.head(item.value)
        if isinstance(item.value, ast.Call) and head and REDUCTIONS.get(head[0]) in AGGREGATIONS:
            name, body, bound, inner = self.aggregate(item.value, scope, Env())
            self.refuse_loose(scope)
            if set(labels_of(body[0])) - set(bound) == set(labels):
                self.emit(item.name, labels, body, REDUCTIONS[name], bound, inner, item.value)
                return
            piece = self.emit_temporary(body, REDUCTIONS[name], bound, inner, item.value)
        else:
            piece = self.expression(item.value, scope, Env())
            self.refuse_loose(scope)
        self.emit(item.name, labels, piece, None, (), scope, item.node)

    def refuse_loose(self, scope: Scope) -> None:
        """A label left over that nobody aggregates is an error, never a silent sum."""
        top = scope.top()
        for label, node in top.loose.items():
            shown = f"{self.current.name}[{','.join(top.bound)}]" if top.bound else self.current.name
            raise InputError(self.source.at(node), f"label {label} is neither in the output {shown} nor aggregated",
                             f"add it to the output or aggregate it with {', '.join(AGGREGATIONS)}")  # fmt: skip

    def emit(self, name: str, output: Sequence[str], piece: Piece, aggregation: str | None,
             aggregated: Sequence[str], scope: Scope, node: ast.AST) -> Piece:  # fmt: skip
        extent = {label: self.extent(scope, label, node) for label in (*output, *aggregated)}
        einsum, tensors = make_einsum(output, piece[0], aggregation, aggregated, extent)
        empty = [label for label in aggregated if extent[label] == 0]
        if empty and aggregation and AGGREGATIONS[aggregation].neutral is None and 0 not in einsum.bound:
            raise InputError(self.where(node), f"{aggregation} over {empty[0]}, which has extent 0",
                             "sum, prod, any and all of nothing have a value; max and min have none")  # fmt: skip
        try:
            vertex = make_vertex(name, einsum, tensors, self.known)
        except TypeError as error:
            raise InputError(self.where(node), str(error)) from None
        self.add(vertex, self.where(node))
        return Element(name, tuple(output)), np.dtype(vertex.dtype)

    def emit_temporary(self, piece: Piece, aggregation: str | None, aggregated: Sequence[str], scope: Scope,
                       node: ast.AST) -> Piece:  # fmt: skip
        name = fresh(self.current.name, self.taken)
        self.taken.add(name)
        output = [label for label in labels_of(piece[0]) if label not in aggregated]
        return self.emit(name, output, piece, aggregation, aggregated, scope, node)

    # ---- labels -----------------------------------------------------------------------------------------------------

    def open(self, parent: Scope | None, bound: Iterable[str], body: ast.AST) -> Scope:
        """A new scope over `body`; labels that occur directly in it and that no scope binds are `loose`."""
        scope = Scope(parent, bound)
        found = occurrences(body, self.known, REDUCTIONS)
        for entry in found:
            if not entry.nested and scope.owner(entry.label) is None:
                scope.loose.setdefault(entry.label, entry.node)
        for entry in found:
            owner = scope.owner(entry.label)
            if owner is not None and entry.extent is not None:
                clash = owner.register(entry.label, entry.extent, entry.tensor)
                if clash:
                    raise InputError(self.where(entry.node), clash, "one extent a label")
        return scope

    def fix_extent(self, scope: Scope, label: str, node: ast.expr | None) -> None:
        """The extent written as label:extent."""
        if node is not None:
            extent = integer(self.source, node, self.sizes)
            if not 0 <= extent <= MAX_EXTENT:
                raise InputError(self.where(node), f"label {label} has extent {extent}", f"0 to 2**39 = {MAX_EXTENT}")
            clash = scope.register(label, extent, f"{label}:{ast.unparse(node)}")
            if clash:
                raise InputError(self.where(node), clash, "one extent a label")

    def extent(self, scope: Scope, label: str, node: ast.AST) -> int:
        owner = scope.owner(label)
        if owner is not None and label in owner.extents:
            return owner.extents[label][0]
        if label in self.sizes:
            return self.sizes[label]
        raise InputError(self.where(node), f"label {label} has no extent: no tensor here is indexed by it",
                         f"write {label}:EXTENT")  # fmt: skip

    # ---- expressions ------------------------------------------------------------------------------------------------

    def expression(self, node: ast.expr, scope: Scope, env: Env) -> Piece:
        match node:
            case ast.Constant(value=bool() | int() | float() | complex() as value):
                if isinstance(value, complex) and isinf(value.imag):
                    raise InputError(self.where(node), "this number is too large", "a finite number")
                if isinstance(value, int) and not -(2**63) <= value < 2**63:
                    raise InputError(self.where(node), "this integer is too large", "less than 2**63")
                return Const(value), type(value)
            case ast.Name():
                return self.name(node, scope, env)
            case ast.Subscript(value=ast.Name()):
                return self.element(node, scope, env)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)) if value == 2**63:
                return Const(-value), int
            case ast.UnaryOp(op=ast.UAdd()):
                return self.expression(node.operand, scope, env)
            case ast.UnaryOp() if type(node.op) in _UNARY:
                return self.apply(_UNARY[type(node.op)], [self.expression(node.operand, scope, env)], node)
            case ast.BinOp() if type(node.op) in _BINARY:
                sides = [self.expression(side, scope, env) for side in (node.left, node.right)]
                return self.apply(_BINARY[type(node.op)], sides, node)
            case ast.Compare() if all(type(op) in _COMPARE for op in node.ops):
                sides = [self.expression(side, scope, env) for side in (node.left, *node.comparators)]
                sides[1:-1] = [self.name_value(side, scope, node) for side in sides[1:-1]]  # each is used twice
                result = self.apply(_COMPARE[type(node.ops[0])], sides[:2], node)
                for k, op in enumerate(node.ops[1:], 1):
                    result = self.apply("&", [result, self.apply(_COMPARE[type(op)], sides[k : k + 2], node)], node)
                return result
            case ast.Call():
                return self.call(node, scope, env)
        allowed = _INSTEAD.get(type(node), "numbers, NAME[labels], + - * / ** %, comparisons, & | ~, and functions")
        raise InputError(self.where(node), f"{ast.unparse(node)[:60]!r} is not in the language", allowed)

    def apply(self, op: str, pieces: Sequence[Piece], node: ast.AST) -> Piece:
        args = tuple(scalar for scalar, _ in pieces)
        try:
            made = call(op, *args)
            if isinstance(made, Const):
                return made, type(made.value)
            return made, call_type(op, args, [kind for _, kind in pieces])
        except (TypeError, ValueError) as error:
            raise InputError(self.where(node), str(error)) from None

    def name(self, node: ast.Name, scope: Scope, env: Env) -> Piece:
        name = node.id
        if name in env.values:
            return env.values[name]
        known = self.known.get(name)
        if scope.sees(name):
            if known is not None and not known.bound:
                raise InputError(self.where(node), f"{name} is a label and a tensor here", "two different names")
            return Index(name), np.dtype(np.int64)
        if known is not None:
            if known.bound:
                shown = f"{name}[{', '.join('ijklmnop'[: len(known.bound)])}]"
                raise InputError(self.where(node), f"{name} stands without its labels", f"such as {shown}")
            return Element(name, ()), np.dtype(known.dtype)
        if name in self.sizes:
            return Const(self.sizes[name]), int
        if name in CONSTANTS:
            return Const(CONSTANTS[name]), float
        if name in CALLABLES:
            raise InputError(self.where(node), f"{name} is a function", _form(name))
        names = [*(v.name for v in self.known.values() if not v.bound), *self.sizes, *CONSTANTS]
        raise InputError(self.where(node), f"unknown name {name!r}", one_of(names, name))

    def element(self, node: ast.Subscript, scope: Scope, env: Env) -> Piece:
        assert isinstance(node.value, ast.Name)
        name, parts = node.value.id, entries(node.slice)
        if name in CALLABLES:
            raise InputError(self.where(node), f"{name} is a function", _form(name))
        if name not in self.known:
            raise InputError(self.where(node), f"unknown tensor {name!r}", one_of(self.known, name))
        vertex = self.known[name]
        if len(parts) != len(vertex.bound):
            shown = f"{ast.unparse(node)} has the wrong number of indices"
            raise InputError(self.where(node), shown, f"{name} takes {len(vertex.bound)}")
        index: list[str | Scalar] = []
        for part, extent in zip(parts, vertex.bound, strict=True):
            index.append(part.id if isinstance(part, ast.Name) else self.gathered(part, extent, scope, env))
        return Element(name, tuple(index)), np.dtype(vertex.dtype)

    def gathered(self, node: ast.expr, extent: int, scope: Scope, env: Env) -> Scalar:
        """An index that is computed: by a tensor, by arithmetic on labels, or a constant."""
        scalar, kind = self.expression(node, scope, env)
        if np.dtype(kind).kind != "i":
            raise InputError(self.where(node), f"the index {ast.unparse(node)} is {np.dtype(kind).name}", "an integer")
        if isinstance(scalar, Const) and not 0 <= scalar.value.real < extent:
            allowed = f"0 to {extent - 1}" if extent else "this dimension has extent 0"
            raise InputError(self.where(node), f"index {scalar.value} is out of range", allowed)
        return scalar

    # ---- functions, aggregations, macros ----------------------------------------------------------------------------

    @staticmethod
    def head(node: ast.AST) -> tuple[str, ast.expr | None] | None:
        """(name, labels in brackets) of name(...) or name[labels](...)."""
        match node:
            case ast.Call(func=ast.Name(id=name)):
                return name, None
            case ast.Call(func=ast.Subscript(value=ast.Name(id=name), slice=labels)):
                return name, labels
        return None

    def call(self, node: ast.Call, scope: Scope, env: Env) -> Piece:
        head = self.head(node)
        if head is None or (head[0] not in CALLABLES and head[0] not in SYMBOLS):
            shown = head[0] if head else ast.unparse(node.func)[:60]
            raise InputError(self.where(node), f"unknown function {shown!r}", one_of(CALLABLES, shown))
        name, labels = head
        if REDUCTIONS.get(name) in AGGREGATIONS:
            _, body, bound, inner = self.aggregate(node, scope, env)
            return self.emit_temporary(body, REDUCTIONS[name], bound, inner, node)
        if name in MACROS:
            return self.macro(node, name, labels, scope, env)
        if labels is not None or node.keywords or len(node.args) != OPS[name].arity:
            form = f"{name}({', '.join('xyz'[: OPS[name].arity])})"
            raise InputError(self.where(node), f"{name} is not called like this", form)
        return self.apply(name, [self.expression(arg, scope, env) for arg in node.args], node)

    def aggregate(self, node: ast.Call, scope: Scope, env: Env) -> tuple[
        str, Piece, tuple[str, ...], Scope]:  # fmt: skip
        """(name, argument, labels it aggregates, scope of the argument) of an aggregation or a reducing macro."""
        head = self.head(node)
        assert head is not None
        name, brackets = head
        if len(node.args) != 1 or (node.keywords and name not in MACROS):
            raise InputError(self.where(node), f"{name} is not called like this", f"{name}(expression)")
        argument = node.args[0]
        if brackets is None:
            inner = self.open(scope, (), argument)
            inner.bind_loose()
            bound = inner.bound
            if not bound:
                self.refuse_loose(scope)
                found = occurrences(argument, self.known, REDUCTIONS)
                why = "no label stands in it" if not found else "every label in it is aggregated inside it"
                if any(scope.sees(entry.label) for entry in found):
                    why = "every label in it also stands outside of it"
                raise InputError(self.where(node), f"{name}(...) has nothing to aggregate: {why}",
                                 f"{name}[labels](...)")  # fmt: skip
        elif env.labels is not None:  # a macro's body, where every aggregation is over L
            return name, self.expression(argument, scope, env), env.labels, scope
        else:
            listed = labels_in_brackets(self.source, brackets)
            bound = tuple(label for label, _ in listed)
            self.refuse_twice(bound, f"this {name}", node)
            inner = self.open(scope, bound, argument)
            for label, extent in listed:
                self.fix_extent(inner, label, extent)
        body = self.expression(argument, inner, env)
        for label in bound:
            if label not in labels_of(body[0]) and label not in inner.extents:
                raise InputError(self.where(node), f"label {label} does not occur in this {name}",
                                 one_of(labels_of(body[0])))  # fmt: skip
        return name, body, bound, inner

    def macro(self, node: ast.Call, name: str, brackets: ast.expr | None, scope: Scope,
              env: Env) -> Piece:  # fmt: skip
        macro = MACROS[name]
        options = self.options(node, name)
        if macro.reduces:
            _, argument, labels, inner = self.aggregate(node, scope, env)
        else:
            if macro.needs_labels != (brackets is not None) or len(node.args) != 1:
                form = f"{name}[labels](expression)" if macro.needs_labels else f"{name}(expression)"
                raise InputError(self.where(node), f"{name} is not called like this", form)
            argument, inner = self.expression(node.args[0], scope, env), scope
            labels = () if brackets is None else tuple(x for x, _ in labels_in_brackets(self.source, brackets))
            self.refuse_twice(labels, f"this {name}", node)
            for label in labels:
                if label not in labels_of(argument[0]):
                    raise InputError(self.where(node), f"label {label} does not occur in this {name}",
                                     one_of(labels_of(argument[0])))  # fmt: skip
        count = prod(self.extent(inner, label, node) for label in labels)
        outer_site, self.site = self.site, self.site or node
        body = _macro_body(name)
        values: dict[str, Piece] = {"n": (Const(count), int), **options}
        local = Env(values, labels)
        uses = sum(isinstance(part, ast.Name) and part.id == "x" for line in body for part in ast.walk(line))
        values["x"] = argument if uses == 1 else self.name_value(argument, inner, node)
        for line in body[:-1]:
            assert isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)
            values[line.targets[0].id] = self.name_value(self.expression(line.value, inner, local), inner, node)
        assert isinstance(body[-1], ast.Expr)
        result = self.expression(body[-1].value, inner, local)
        self.site = outer_site
        return result

    def name_value(self, piece: Piece, scope: Scope, node: ast.AST) -> Piece:
        """A value used more than once becomes a tensor of its own, so that expressions do not double."""
        return self.emit_temporary(piece, None, (), scope, node) if isinstance(piece[0], Call) else piece

    def options(self, node: ast.Call, name: str) -> dict[str, Piece]:
        options = {key: Const(value) for key, value in MACROS[name].options.items()}
        for keyword in node.keywords:
            value = self.expression(keyword.value, Scope(None, ()), Env())[0]
            if keyword.arg not in options or not isinstance(value, Const):
                raise InputError(self.where(keyword.value), f"{name} has no option {keyword.arg} of this kind",
                                 one_of(f"{key}=number" for key in options))  # fmt: skip
            options[keyword.arg] = value
        return {key: (const, type(const.value)) for key, const in options.items()}


def _form(name: str) -> str:
    """How a function is written."""
    labels = "[labels]" if name in MACROS and MACROS[name].needs_labels else ""
    return f"{name}{labels}(...)"


@cache
def _macro_body(name: str) -> list[ast.stmt]:
    return parse(Source(name, MACROS[name].body))


def _bound_inside(node: ast.expr) -> tuple[str, ...]:
    """Labels that explicit aggregations in `node` bind."""
    found: list[str] = []
    for part in ast.walk(node):
        head = Builder.head(part)
        if head is not None and head[0] in REDUCTIONS and head[1] is not None:
            named = [entry.lower if isinstance(entry, ast.Slice) else entry for entry in entries(head[1])]
            found += [entry.id for entry in named if isinstance(entry, ast.Name)]
    return unique(found)
