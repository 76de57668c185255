"""Statements and declarations to vertices."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from einmpi.errors import InputError
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.arithmetic import call, compute_types, infer
from einmpi.graph.dtypes import DTYPES, Type
from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Arg, Call, Const, Element, Index, Scalar, labels_of
from einmpi.language.expression_reader import masked, read_aggregated
from einmpi.language.expressions import Expressions
from einmpi.language.indices import index_from_start
from einmpi.language.macros import aggregation_named, called_name, is_reserved
from einmpi.language.matrices import add_matrix_statement, is_of_matrices
from einmpi.language.scope import Scope, bound_inside, occurrences
from einmpi.language.symbols import SymbolTable, TypedScalar
from einmpi.language.syntax import Declaration, Statement, entries, integer

# ---- slices --------------------------------------------------------------------------------------
#
# Slices of tensors, such as u[1:-1, ::2][i, j]: each becomes a tensor that reads another one.


_FORM = "integers and slices, such as 1:-1, ::2 or 3"


def without_slices(symbols: SymbolTable, item: Statement) -> Statement:
    """Return a statement in which names stand for slices; add the vertices of these names.

    A whole statement such as y = x[2:10] needs no labels.
    """
    if not any(isinstance(node, ast.Slice) for node in item.nodes):
        return item
    symbols.current = item
    slices = _Slices(symbols)
    value = slices.visit(item.value)
    scattered = tuple((position, slices.visit(index)) for position, index in item.scattered)
    if isinstance(value, ast.Name) and not item.labels:
        ndim = len(symbols.known[value.id].bound)
        names = _labels(symbols, ndim)
        labels: list[ast.expr] = []
        for name in names:
            labels.append(ast.copy_location(ast.Name(name, ast.Load()), item.value))
        index = ast.copy_location(ast.Tuple(labels, ast.Load()), item.value)
        value = ast.copy_location(ast.Subscript(value, index, ast.Load()), item.value)
        return replace(item, labels=tuple((name, None) for name in names), value=value)
    return replace(item, value=value, scattered=scattered)


def _labels(symbols: SymbolTable, count: int) -> list[str]:
    """Return names of labels that mean nothing else."""
    return [symbols.names.take_new("slice") for _ in range(count)]


class _Slices(ast.NodeTransformer):
    """Replaces each slice of a tensor by the name of a new vertex."""

    def __init__(self, symbols: SymbolTable) -> None:
        self.symbols = symbols

    def visit_Call(self, node: ast.Call) -> ast.AST:
        # The brackets of sum[k:4](…) are no slices.
        node.args = [self.visit(argument) for argument in node.args]
        for keyword in node.keywords:
            keyword.value = self.visit(keyword.value)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        node.value = self.visit(node.value)
        parts = entries(node.slice)
        if not any(isinstance(part, ast.Slice) for part in parts):
            node.slice = self.visit(node.slice)
            return node
        name = node.value.id if isinstance(node.value, ast.Name) else None
        if name is None or name not in self.symbols.known:
            what = f"{self.symbols.written(node.value)[:60]} is not a tensor that can be sliced"
            raise InputError(self.symbols.where(node), what, "the name of a tensor")
        vertex = self._sliced(name, parts, node)
        return ast.copy_location(ast.Name(vertex, ast.Load()), node)

    def _sliced(self, name: str, parts: list[ast.expr], node: ast.Subscript) -> str:
        """Add the vertex of a slice and return its name."""
        symbols = self.symbols
        tensor = symbols.known[name]
        if len(parts) != len(tensor.bound):
            what = f"{symbols.written(node)} has the wrong number of indices"
            expected = (
                f"{len(tensor.bound)}, one for each dimension of {symbols.written_name(name)}"
            )
            raise InputError(symbols.where(node), what, expected)
        labels = _labels(symbols, len(parts))
        scope = Scope(None, labels)
        index: list[str | Scalar] = []
        for label, part, extent in zip(labels, parts, tensor.bound, strict=True):
            if isinstance(part, ast.Slice):
                taken = self._range(part, extent, node)
                scope.extents[label] = len(taken), part
                place: Scalar = Index(label)
                if taken.step != 1:
                    place = call("*", Const(taken.step), place)
                index.append(call("+", place, Const(taken.start)))
            else:
                position = self._integer(part)
                index.append(Const(index_from_start(symbols.where(part), position, extent)))
        kept = [label for label in labels if label in scope.extents]
        value = TypedScalar(Element(name, tuple(index)), np.dtype(tensor.dtype))
        vertex = symbols.names.take_new(symbols.current.name)
        symbols.slices[vertex] = symbols.written(node)
        symbols.emit(vertex, kept, value, None, (), scope, node)
        return vertex

    def _range(self, part: ast.Slice, extent: int, node: ast.AST) -> range:
        """Return the indices of a slice, with numpy's meaning of what is left out or negative."""
        given: list[int | None] = []
        for bound in (part.lower, part.upper, part.step):
            given.append(None if bound is None else self._integer(bound))
        if given[2] == 0:
            raise InputError(self.symbols.where(node), "a slice has step 0", "another step")
        return range(extent)[slice(*given)]

    def _integer(self, node: ast.expr) -> int:
        try:
            return integer(self.symbols.source, node, self.symbols.sizes)
        except InputError as error:
            what = f"{ast.unparse(node)[:60]} is not allowed beside a slice"
            raise InputError(self.symbols.where(node), what, _FORM) from error


Inputs: TypeAlias = Mapping[str, tuple[Sequence[int], str]]  # name → shape, dtype


def add_declaration(symbols: SymbolTable, item: Declaration) -> None:
    """Add an input that the program declares; one that is given already must be the same."""
    place = symbols.source.at(item.node)
    shape = tuple(integer(symbols.source, node, symbols.sizes) for node in item.shape)
    if item.name not in symbols.known:
        symbols.names.add(item.name)
        symbols.add_input(item.name, shape, item.dtype, place)
        return
    known = symbols.known[item.name]
    if (known.bound, known.dtype) != (shape, item.dtype):
        what = f"{item.name} is declared differently from the given input"
        raise InputError(place, what, str(known))


def check_names(symbols: SymbolTable, program: Sequence[Statement]) -> None:
    """Check that each statement has a name of its own. All inputs must be known."""
    if not program:
        what = "the program has no statement"
        raise InputError(symbols.source.name, what, "NAME[labels] = expression")
    seen: set[str] = set()
    for item in program:
        expected = "another name"
        if item.name in symbols.known:
            what = f"{item.name} is an input and cannot be defined again"
        elif item.name in seen:
            what = f"{item.name} is defined twice"
            expected = "each name once"
        elif item.name in symbols.sizes:
            what = f"{item.name} is a size and cannot name a tensor"
        elif is_reserved(item.name):
            what = f"{item.name} is a word of the language and cannot name a tensor"
        else:
            seen.add(item.name)
            continue
        raise InputError(symbols.source.at(item.node), what, expected)


def add_statement(symbols: SymbolTable, item: Statement) -> None:
    """Add the vertices of a statement. The tensors that it uses must be known."""
    if is_of_matrices(item.value):
        add_matrix_statement(symbols, item)
        return
    item = without_slices(symbols, item)
    symbols.current = item
    scattered: dict[str, ast.expr] = {}
    listed = list(item.labels)
    for position, index in item.scattered:
        label = symbols.names.take_new(_stem(index))
        scattered[label] = index
        listed[position] = label, listed[position][1]
    labels = tuple(label for label, _ in listed)
    symbols.refuse_repeated(labels, "the output", item.node)
    scope = symbols.open_scope(None, listed, item.value)
    occurring = {entry.label for entry in occurrences(item.value, symbols.known)}
    aggregated_inside = bound_inside(item.value)
    for label in labels:
        if label not in occurring and label in aggregated_inside:
            place = symbols.source.at(item.node)
            what = f"label {label} is aggregated and also in the output"
            raise InputError(place, what, "only one of the two")
    expressions = Expressions(symbols, scattered)
    _add_root(expressions, item, scope, labels)
    if scattered and not expressions.has_scattered:
        index = next(iter(scattered.values()))
        what = f"nothing is aggregated over {ast.unparse(index)}, which is left of ="
        raise InputError(symbols.source.at(index), what, f"one of {', '.join(AGGREGATIONS)}")


def _stem(index: ast.expr) -> str:
    """Return a name for the label of an index left of =: that of the tensor which it reads."""
    for part in ast.walk(index):
        if isinstance(part, ast.Subscript) and isinstance(part.value, ast.Name):
            return part.value.id
    return "segment"


def _add_root(
    expressions: Expressions, item: Statement, scope: Scope, labels: tuple[str, ...]
) -> None:
    """Add the vertex of the statement itself; an aggregation at the root needs no second one."""
    symbols = expressions.symbols
    called = called_name(item.value)
    aggregation = aggregation_named(called[0]) if called else None
    if aggregation is None:
        value = expressions.expression(item.value, scope)
        symbols.refuse_loose(scope)
    else:
        assert isinstance(item.value, ast.Call)
        found = read_aggregated(expressions, item.value, scope)
        argument = masked(expressions, found, aggregation, item.value)
        symbols.refuse_loose(scope)
        if set(labels_of(argument.scalar)) - set(found.labels) == set(labels):
            symbols.emit(
                item.name, labels, argument, aggregation, found.labels, found.scope, item.value
            )
            return
        value = symbols.emit_temporary(argument, aggregation, found.labels, found.scope, item.value)
    symbols.emit(item.name, labels, value, None, (), scope, item.node)


# ---- half steps ----------------------------------------------------------------------------------
#
# Half precision rounded after every operation, as numpy does: casts written into a graph.


# Kernels compute half precision in float32 and round where a vertex ends ("float32"), or after
# every operation ("steps").
HALF_MODES = ("float32", "steps")
# Operations whose result is one of the arguments, or exact in every dtype that holds these.
_EXACT = frozenset(
    {"where", "neg", "abs", "sign", "floor", "ceil", "round", "maximum", "minimum", "clip"}
    | {"conj", "real", "imag"}
)


def round_every_step(graph: EinGraph) -> EinGraph:
    """Return the graph with a cast around every operation whose result is in half precision.

    Constants beside half precision are rounded first. An aggregate is still rounded once.
    """
    vertices = []
    for vertex in graph.vertices:
        if vertex.einsum is not None:
            types = [np.dtype(graph[name].dtype) for name in vertex.inputs]
            vertex = _rounded_vertex(vertex, types)
        vertices.append(vertex)
    return replace(graph, vertices=tuple(vertices))


def _rounded_vertex(vertex: Vertex, types: list[np.dtype[np.generic]]) -> Vertex:
    einsum = vertex.computed_einsum
    if einsum.matrix is not None:
        return vertex

    def leaf(node: Scalar) -> Type:
        assert isinstance(node, Arg)
        return types[node.position]

    return replace(vertex, einsum=replace(einsum, function=_rounded(einsum.function, leaf)))


def _rounded(node: Scalar, leaf: Callable[[Scalar], Type]) -> Scalar:
    """Return an expression with its casts; `leaf` gives the dtype of an operand."""
    if not isinstance(node, Call):
        return node
    kinds = [infer(argument, leaf) for argument in node.args]
    computed = compute_types(node.op, kinds)
    arguments = []
    for argument, dtype in zip(node.args, computed, strict=True):
        is_half = DTYPES[dtype].is_half
        if isinstance(argument, Const) and is_half and not _is_exact(argument, dtype):
            argument = Call(dtype, (argument,))
        arguments.append(_rounded(argument, leaf))
    result = np.dtype(infer(node, leaf)).name
    rounded = Call(node.op, tuple(arguments))
    if OPERATIONS[node.op].is_cast or node.op in _EXACT or not DTYPES[result].is_half:
        return rounded
    return Call(result, (rounded,))


def _is_exact(constant: Const, dtype: str) -> bool:
    value = constant.value
    with np.errstate(over="ignore"):
        stored = float(np.dtype(dtype).type(value.real))
    return stored == value.real or value != value
