"""Syntax trees of expressions to expression trees with dtypes.

Aggregations and values that are used more than once become vertices of their own.
"""

from __future__ import annotations

import ast
from math import isinf

import numpy as np

from einmpi.errors import InputError, nearest_of
from einmpi.graph.arithmetic import call
from einmpi.graph.eingraph import Vertex
from einmpi.graph.index_arithmetic import (
    arithmetic_labels,
    clamped,
    guarded_index,
    interval_of,
    is_remainder,
)
from einmpi.graph.matrices import MATRIX_FUNCTIONS
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.recurrences import unclamped
from einmpi.graph.scalar import Call, Const, Element, Index, Scalar, labels_of
from einmpi.language import matrices
from einmpi.language.expression_reader import (
    ExpressionReader,
    constant,
    read_aggregation,
    read_scan,
)
from einmpi.language.indices import index_from_start, reach_of_branch, stays_inside
from einmpi.language.macro_calls import read_gradient, read_macro_call
from einmpi.language.macros import (
    CONSTANTS,
    FUNCTIONS_OF_RESULTS,
    GRADIENT,
    MACROS,
    MADE_ELSEWHERE,
    SCANS,
    WRITTEN_INSTEAD,
    aggregation_named,
    call_form,
    callables,
    called_name,
    is_callable,
)
from einmpi.language.scope import Scope, Value
from einmpi.language.symbols import TypedScalar
from einmpi.language.syntax import entries

# ---- elements ------------------------------------------------------------------------------------
#
# Elements of tensors: their indices, and the checks that these stay inside of the tensor.


def read_element(reader: ExpressionReader, node: ast.Subscript, scope: Scope) -> TypedScalar:
    """Return TENSOR[indices], each index a label, a number or an expression."""
    tensor = _tensor_of(reader, node)
    parts = entries(node.slice)
    if len(parts) != len(tensor.bound):
        what = f"{reader.symbols.written(node)} has the wrong number of indices"
        written = reader.symbols.written_name(tensor.name)
        expected = f"{len(tensor.bound)}, one for each dimension of {written}"
        raise InputError(reader.where(node), what, expected)
    index: list[str | Scalar] = []
    is_recurring = tensor.name in reader.symbols.recurring
    for part, extent in zip(parts, tensor.bound, strict=True):
        if not isinstance(part, ast.Name):
            index.append(_computed_index(reader, part, extent, scope, is_recurring))
        elif _has_other_extent(part.id, extent, scope):
            at_label = Call("+", (Index(part.id), Const(0)))
            index.append(_checked_index(reader, at_label, extent, scope, part))
        else:
            index.append(part.id)
    if 0 in tensor.bound and _is_guarded_by_where(reader) and not is_recurring:
        return _element_of_empty(reader, tensor, index, scope, node)
    return TypedScalar(Element(tensor.name, tuple(index)), np.dtype(tensor.dtype))


def _tensor_of(reader: ExpressionReader, node: ast.Subscript) -> Vertex:
    assert isinstance(node.value, ast.Name)
    name = node.value.id
    if is_callable(name):
        raise reader.not_a_tensor(node, name)
    if name not in reader.known:
        expected = nearest_of(reader.known, name)
        raise InputError(reader.where(node), f"unknown tensor {name!r}", expected)
    return reader.known[name]


def _has_other_extent(label: str, extent: int, scope: Scope) -> bool:
    """Return whether a label is known to go through less, or more, than this dimension."""
    owner = scope.owner(label)
    if owner is None or label not in owner.extents:
        return False
    return owner.extents[label][0] != extent


# ---- indices that are computed ------------------------------------------------------------------


def _computed_index(
    reader: ExpressionReader, node: ast.expr, extent: int, scope: Scope, is_recurring: bool
) -> Scalar:
    """Return an index that is computed: by a tensor, by arithmetic on labels, or a constant.

    `is_recurring` says that the tensor is one that the statement, or one with it, defines: then
    only a condition can keep the index inside of the tensor, since h[max(t-1,0)] would be itself.
    """
    scalar, kind = reader.expression(node, scope)
    if is_recurring:
        scalar = unclamped(scalar)
    dtype = np.dtype(kind)
    if dtype.kind not in "iu":
        what = f"the index {reader.symbols.written(node)} is {dtype.name}"
        hint = "for a label, take a name that is no number" if isinstance(node, Value) else ""
        raise InputError(reader.where(node), what, "an integer", hint)
    if isinstance(scalar, Const):
        return Const(index_from_start(reader.where(node), int(scalar.value.real), extent))
    return _checked_index(reader, scalar, extent, scope, node)


def _checked_index(
    reader: ExpressionReader, scalar: Scalar, extent: int, scope: Scope, node: ast.expr
) -> Scalar:
    """Return an index that stays inside of its dimension where it is used, or raise."""
    labels = arithmetic_labels(scalar)
    if labels is None:
        if is_remainder(scalar, extent):
            return scalar
        return guarded_index(scalar, reader.guards)
    bounds = {}
    for label in labels:
        label_extent = reader.symbols.extent(scope, label, node)
        if label_extent == 0:
            return scalar  # nothing is read
        bounds[label] = 0, label_extent - 1
    reached = interval_of(scalar, bounds)
    if reached is None:  # it may wrap around
        return guarded_index(scalar, reader.guards)
    low, high = reached
    if low >= 0 and high < extent:
        return scalar
    if stays_inside(scalar, bounds, reader.guards, extent):
        return clamped(scalar, low, high, extent)
    hint = "give its labels extents, such as i:n-1, or use where(i > 0, ..., ...)"
    if reader.guards:
        reached_in_branch = reach_of_branch(scalar, bounds, reader.guards)
        if reached_in_branch is None or extent == 0:
            # It depends on values, and is checked in the run.
            return guarded_index(scalar, reader.guards)
        low, high = reached_in_branch
        hint = "the condition of where has to exclude the rest"
    what = f"the index {reader.symbols.written(node)} goes from {low} to {high}"
    raise InputError(reader.where(node), what, f"0 to {extent - 1}", hint)


# ---- tensors without elements -------------------------------------------------------------------


def _is_guarded_by_where(reader: ExpressionReader) -> bool:
    """Return whether a condition is around the element, other than that of an index left of =."""
    return any(condition is not reader.scattered_guard for condition, _ in reader.guards)


def _element_of_empty(
    reader: ExpressionReader,
    tensor: Vertex,
    index: list[str | Scalar],
    scope: Scope,
    node: ast.AST,
) -> TypedScalar:
    """Return an element of a tensor without elements, by an index that a condition guards.

    It is read from a tensor with one element instead, a sum of nothing. Where the condition
    holds after all, the index is 1 and out of range.
    """
    symbols = reader.symbols
    dtype = np.dtype(tensor.dtype)
    summed: list[str] = []  # the labels of dimensions with extent 0, which the sum is over
    kept: list[str] = []
    kept_index: list[str | Scalar] = []
    outside: Scalar = Const(1)
    sum_scope = Scope(None, [symbols.names.take_new("slice") for _ in index])
    labels = sum_scope.bound
    for label, entry, extent in zip(labels, index, tensor.bound, strict=True):
        sum_scope.register(label, extent, label)
        if extent > 0 or isinstance(entry, str) or _has_no_values(reader, entry, scope, node):
            kept.append(label)
            kept_index.append(entry)
            continue
        summed.append(label)
        if arithmetic_labels(entry) is None:  # values decide, and they remain in use
            outside = call("maximum", outside, entry)
    if not summed:
        return TypedScalar(Element(tensor.name, tuple(index)), dtype)
    single = symbols.names.take_new("slice")
    sum_scope.bound = (*labels, single)
    sum_scope.register(single, 1, single)
    name = symbols.names.take_new(symbols.current.name)
    symbols.slices[name] = symbols.written_name(tensor.name)
    values = TypedScalar(Element(tensor.name, labels), dtype)
    aggregation = "any" if tensor.dtype == "bool" else "sum"
    total = symbols.emit(name, (single, *kept), values, aggregation, summed, sum_scope, node)
    element = Element(name, (guarded_index(outside, reader.guards), *kept_index))
    if total.type == dtype:
        return TypedScalar(element, dtype)
    return TypedScalar(Call(tensor.dtype, (element,)), dtype)


def _has_no_values(reader: ExpressionReader, entry: Scalar, scope: Scope, node: ast.AST) -> bool:
    """Return whether an index has no values, because one of its labels has none."""
    return any(reader.symbols.extent(scope, label, node) == 0 for label in labels_of(entry))


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
    ast.BitXor: "^",
    ast.LShift: "<<",
    ast.RShift: ">>",
}
_COMPARE = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_UNARY = {ast.USub: "neg", ast.Invert: "~"}
_EXPRESSIONS = "numbers, NAME[labels], + - * / // % **, comparisons, & | ^ ~ << >>, and functions"
_INSTEAD: dict[type[ast.AST], str] = {
    ast.BoolOp: "& and |, with brackets around comparisons",
    ast.IfExp: "where(condition, this, that)",
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
        is_counted = OPERATIONS[name].accepts(len(node.args))
        if brackets is not None or node.keywords or not is_counted:
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
        if name in MATRIX_FUNCTIONS:
            what = f"{name} is no statement of its own here"
            return InputError(self.where(node), what, matrices.call_form(MATRIX_FUNCTIONS[name]))
        what = f"unknown function {name!r}"
        last_name = name.rpartition(".")[2]  # of np.exp or torch.nn.functional.relu
        instead = WRITTEN_INSTEAD.get(last_name) or MADE_ELSEWHERE.get(last_name)
        if instead is not None:
            return InputError(self.where(node), what, instead)
        if last_name in FUNCTIONS_OF_RESULTS:
            hint = f"numpy's {last_name} takes the DistArray that a program returns"
            return InputError(self.where(node), what, "a function of the language", hint)
        if is_callable(last_name):
            is_random = last_name in OPERATIONS and OPERATIONS[last_name].takes_more
            expected = call_form(last_name) if is_random else f"{last_name} alone"
            return InputError(self.where(node), what, expected)
        return InputError(self.where(node), what, nearest_of(callables(), name))
