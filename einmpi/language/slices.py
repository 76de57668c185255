"""Slices of tensors, such as u[1:-1, ::2][i, j]: each becomes a tensor that reads another one."""

from __future__ import annotations

import ast
from dataclasses import replace

import numpy as np

from einmpi.errors import InputError
from einmpi.graph.arithmetic import call
from einmpi.graph.scalar import Const, Element, Index, Scalar
from einmpi.language.indices import index_from_start
from einmpi.language.scope import Scope
from einmpi.language.symbols import SymbolTable, TypedScalar
from einmpi.language.syntax import Statement, entries, integer

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
