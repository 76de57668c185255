"""Syntax trees of expressions to expression trees with dtypes.

Aggregations and values that are used more than once become vertices of their own.
"""

from __future__ import annotations

import ast
from math import isinf

import numpy as np

from einmpi.errors import InputError, nearest_of
from einmpi.graph.eingraph import Vertex
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Const, Element, Index
from einmpi.language.expressions.aggregates import read_aggregation, read_scan
from einmpi.language.expressions.elements import read_element
from einmpi.language.expressions.gradients import read_gradient
from einmpi.language.expressions.macro_calls import read_macro_call
from einmpi.language.expressions.reader import (
    ExpressionReader,
    constant,
)
from einmpi.language.macros import MACROS, SCANS
from einmpi.language.numpy_names import (
    FUNCTIONS_OF_RESULTS,
    MADE_ELSEWHERE,
    WRITTEN_INSTEAD,
)
from einmpi.language.scope import Scope, Value
from einmpi.language.symbols import TypedScalar
from einmpi.language.vocabulary import (
    CONSTANTS,
    GRADIENT,
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


class Expressions(ExpressionReader):
    """Reads expressions over the tensors of a symbol table."""

    def expression(self, node: ast.expr, scope: Scope) -> TypedScalar:
        """Return the expression of a syntax tree, adding the vertices that it needs."""
        match node:
            case ast.Constant(value=bool() | int() | float() | complex()):
                return self._number(node)
            case ast.Name():
                return self._name(node, scope)
            case Value():
                return self._name(node.name, scope)
            case ast.Subscript(value=ast.Name()):
                return read_element(self, node, scope)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)) if (
                value == 2**63
            ):
                return constant(-value)
            case ast.UnaryOp(op=ast.UAdd()):
                return self.expression(node.operand, scope)
            case ast.UnaryOp() if type(node.op) in _UNARY:
                operand = self.expression(node.operand, scope)
                return self.apply(_UNARY[type(node.op)], [operand], node)
            case ast.BinOp() if type(node.op) in _BINARY:
                left = self.expression(node.left, scope)
                right = self.expression(node.right, scope)
                return self.apply(_BINARY[type(node.op)], [left, right], node)
            case ast.Compare() if all(type(op) in _COMPARE for op in node.ops):
                return self._comparison(node, scope)
            case ast.Call():
                return self._call(node, scope)
        what = f"{self.symbols.written(node)[:60]!r} is not in the language"
        kind = type(node.op) if isinstance(node, ast.BinOp) else type(node)
        raise InputError(self.where(node), what, _INSTEAD.get(kind, _EXPRESSIONS))

    # ---- numbers and names ----------------------------------------------------------------------

    def _number(self, node: ast.Constant) -> TypedScalar:
        value = node.value
        assert isinstance(value, bool | int | float | complex)
        if isinstance(value, complex) and isinf(value.imag):
            raise InputError(self.where(node), "this number is too large", "a finite number")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            what = "this integer is too large"
            raise InputError(self.where(node), what, "an integer less than 2**63")
        return constant(value)

    def _name(self, node: ast.Name, scope: Scope) -> TypedScalar:
        """Return what a name without brackets means: a label, a tensor, a size or a constant."""
        name = node.id
        sizes = self.symbols.sizes
        if name in self.macro.values:
            return self.macro.values[name]
        tensor = self.known.get(name)
        if scope.sees(name):
            if tensor is not None and not tensor.bound:
                what = f"{name} is both a label and a tensor here"
                raise InputError(self.where(node), what, "two different names")
            return TypedScalar(Index(name), np.dtype(np.int64))
        if tensor is not None:
            return self._scalar_tensor(node, tensor)
        if name in sizes:
            return TypedScalar(Const(sizes[name]), int)
        if name in CONSTANTS:
            return constant(CONSTANTS[name])
        if is_callable(name):
            raise self.not_a_tensor(node, name)
        scalars = [vertex.name for vertex in self.known.values() if not vertex.bound]
        expected = nearest_of([*scalars, *sizes, *CONSTANTS], name)
        raise InputError(self.where(node), f"unknown name {name!r}", expected)

    def _scalar_tensor(self, node: ast.Name, tensor: Vertex) -> TypedScalar:
        """Return the element of a tensor without dimensions, which needs no brackets."""
        name = tensor.name
        if tensor.bound:
            labels = ", ".join("ijklmnop"[: len(tensor.bound)])
            written = self.symbols.written_name(name)
            what = f"{written} has no labels here"
            raise InputError(self.where(node), what, f"labels, such as {written}[{labels}]")
        if name in self.symbols.parameters:
            return TypedScalar(Element(name, ()), self.symbols.parameters[name])
        return TypedScalar(Element(name, ()), np.dtype(tensor.dtype))

    # ---- comparisons and calls ------------------------------------------------------------------

    def _comparison(self, node: ast.Compare, scope: Scope) -> TypedScalar:
        """Return a comparison; a chain such as 0 < x < 1 becomes (0 < x) & (x < 1)."""
        sides = [self.expression(node.left, scope)]
        for comparator in node.comparators:
            sides.append(self.expression(comparator, scope))
        for k in range(1, len(sides) - 1):
            sides[k] = self.name_value(sides[k], scope, node)  # it is used twice
        result = self.apply(_COMPARE[type(node.ops[0])], sides[:2], node)
        for k, op in enumerate(node.ops[1:], 1):
            comparison = self.apply(_COMPARE[type(op)], sides[k : k + 2], node)
            result = self.apply("&", [result, comparison], node)
        return result

    def _call(self, node: ast.Call, scope: Scope) -> TypedScalar:
        """Return a call: of an aggregation, a scan, a macro, a gradient, or a function."""
        called = called_name(node)
        if called is None:
            raise self._unknown_function(node, self.symbols.written(node.func)[:60])
        name, brackets = called
        aggregation = aggregation_named(name)
        if aggregation is not None:
            return read_aggregation(self, node, aggregation, scope)
        if name in SCANS:
            return read_scan(self, node, name, brackets, scope)
        if name in MACROS:
            return read_macro_call(self, node, name, brackets, scope)
        if name == GRADIENT:
            return read_gradient(self, node, brackets, scope)
        if not is_callable(name):
            raise self._unknown_function(node, name)
        if brackets is not None or node.keywords or len(node.args) != OPERATIONS[name].arity:
            raise self.wrong_call(node, name)
        if name == "where":
            return self._where(node, scope)
        arguments = [self.expression(argument, scope) for argument in node.args]
        return self.apply(name, arguments, node)

    def _where(self, node: ast.Call, scope: Scope) -> TypedScalar:
        """Return where(condition, this, that); the condition guards the indices in both."""
        condition_node, this_node, that_node = node.args
        condition = self.expression(condition_node, scope)
        self.guards.append((condition.scalar, True))
        this = self.expression(this_node, scope)
        self.guards.pop()
        self.guards.append((condition.scalar, False))
        that = self.expression(that_node, scope)
        self.guards.pop()
        return self.apply("where", [condition, this, that], node)

    def _unknown_function(self, node: ast.AST, name: str) -> InputError:
        """Return the error for a call of something else; it knows numpy's names."""
        if name in self.known:
            return InputError(self.where(node), f"{name} is a tensor", f"{name}[labels]")
        what = f"unknown function {name!r}"
        last_name = name.rpartition(".")[2]  # of np.exp or torch.nn.functional.relu
        instead = WRITTEN_INSTEAD.get(last_name) or MADE_ELSEWHERE.get(last_name)
        if instead is not None:
            return InputError(self.where(node), what, instead)
        if last_name in FUNCTIONS_OF_RESULTS:
            hint = f"numpy's {last_name} takes the DistArray that a program returns"
            return InputError(self.where(node), what, "a function of the language", hint)
        if is_callable(last_name):
            return InputError(self.where(node), what, f"{last_name} alone")
        return InputError(self.where(node), what, nearest_of(callables(), name))
