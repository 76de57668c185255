"""Statements that read what they define, at other indices of a label: recurrences."""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from einmpi.errors import InputError, OperationError
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.eingraph import Vertex
from einmpi.graph.recurrences import arranged
from einmpi.graph.scalar import Names, unique
from einmpi.language.indices import affine_of_syntax
from einmpi.language.macros import GRADIENT, called_name
from einmpi.language.scope import indices_in
from einmpi.language.statements import add_statement
from einmpi.language.symbols import SymbolTable
from einmpi.language.syntax import Statement, entries

# Dtypes that are tried for tensors that read themselves, besides those of floating-point numbers
# that are read: 0.0 beside a float32 is a float32, but beside a bool a float64.
_NARROW_DTYPES = ("bool", "int64")
_MOST_ROUNDS = 8  # most of them give some tensor a wider dtype


def add_recurrence(symbols: SymbolTable, items: Sequence[Statement]) -> None:
    """Add the vertices of statements that read each other's results."""
    for item in items:
        _refuse_what_has_no_step(symbols, item)
    items, shapes = _with_shapes(symbols, items)
    symbols.recurring = frozenset(shapes)
    before, names = symbols.known, symbols.names
    found: list[tuple[list[tuple[int, int]], dict[str, Vertex], Names]] = []
    for first in _first_dtypes(symbols, items):
        symbols.known, symbols.names = before, names
        try:
            _add_with_dtypes(symbols, items, shapes, first)
        except InputError as error:
            problem = error
            continue
        widths = [_width(symbols.known[name].dtype) for name in shapes]
        found.append((widths, symbols.known, symbols.names))
    if not found:
        raise problem
    _, symbols.known, symbols.names = min(found, key=lambda each: each[0])
    symbols.recurring = frozenset()
    try:
        order = arranged(tuple(symbols.known.values()))
    except OperationError as error:
        raise error.at(symbols.source.at(items[0].node)) from None
    symbols.known = {vertex.name: vertex for vertex in order}


def _first_dtypes(symbols: SymbolTable, items: Sequence[Statement]) -> tuple[str, ...]:
    """Return the dtypes with which the search for those of the tensors begins."""
    read = []
    for item in items:
        for node in item.nodes:
            if isinstance(node, ast.Name) and node.id in symbols.known:
                read.append(symbols.known[node.id].dtype)
    return unique(_NARROW_DTYPES, [dtype for dtype in read if DTYPES[dtype].kind in "fc"])


def _width(dtype: str) -> tuple[int, int]:
    """Return a key that is greater for wider dtypes."""
    return "biufc".index(DTYPES[dtype].kind), np.dtype(dtype).itemsize


def _refuse_what_has_no_step(symbols: SymbolTable, item: Statement) -> None:
    if item.scattered:
        what = f"{item.name} depends on itself and has an index left of ="
        raise InputError(symbols.source.at(item.node), what, "labels alone")
    for node in item.nodes:
        called = called_name(node)
        if called is not None and called[0] == GRADIENT:
            what = f"{item.name} depends on itself and has a gradient"
            raise InputError(symbols.source.at(node), what, "a gradient in a statement of its own")


def _with_shapes(
    symbols: SymbolTable, items: Sequence[Statement]
) -> tuple[list[Statement], dict[str, tuple[int, ...]]]:
    """Return the statements, and the shapes of their tensors by what labels index.

    A label that indexes these tensors alone, as in h[t-1], gets an extent.
    """
    extents: dict[_Dimension, int] = {}
    problems: dict[_Dimension, InputError] = {}
    for item in items:
        symbols.current = item
        scope = symbols.open_scope(None, item.labels, item.value)
        for dimension, (label, _) in enumerate(item.labels):
            try:
                extents[item.name, dimension] = symbols.extent(scope, label, item.node)
            except InputError as error:
                problems[item.name, dimension] = error
    same = _same_extents(symbols, items)
    for _ in items:
        for one, other in same:
            if one in extents:
                extents.setdefault(other, extents[one])
            elif other in extents:
                extents[one] = extents[other]
    for place, problem in problems.items():
        if place not in extents:
            raise problem
    found = []
    shapes = {}
    for item in items:
        labels: list[tuple[str, ast.expr | None]] = []
        for dimension, (label, written) in enumerate(item.labels):
            if (item.name, dimension) in problems:
                constant = ast.Constant(extents[item.name, dimension])
                written = ast.copy_location(constant, item.node)
            labels.append((label, written))
        found.append(replace(item, labels=tuple(labels)))
        shapes[item.name] = tuple(extents[item.name, place] for place in range(len(labels)))
    return found, shapes


_Dimension = tuple[str, int]  # of the tensor of a statement


def _same_extents(
    symbols: SymbolTable, items: Sequence[Statement]
) -> list[tuple[_Dimension, _Dimension]]:
    """Return pairs of dimensions that a label indexes, or a label with a shift."""
    defined = {item.name: len(item.labels) for item in items}
    found = []
    for item in items:
        places = {label: place for place, (label, _) in enumerate(item.labels)}
        for tensor, dimension, index in indices_in(item.value):
            affine = affine_of_syntax(index, places.__contains__, symbols.sizes)
            if affine is None or dimension >= defined.get(tensor, 0):
                continue
            if len(affine.terms) == 1 and affine.terms[0][1] == 1:
                place = places[affine.terms[0][0]]
                found.append(((item.name, place), (tensor, dimension)))
    return found


def shifted_reads(item: Statement, names: Collection[str]) -> set[int]:
    """Return the ids of the names of tensors that a statement reads at an index with arithmetic."""
    found: set[int] = set()
    for node in item.nodes:
        match node:
            case ast.Subscript(value=ast.Name(id=name) as read, slice=index) if name in names:
                if not all(isinstance(entry, ast.Name) for entry in entries(index)):
                    found.add(id(read))
    return found


def _add_with_dtypes(
    symbols: SymbolTable,
    items: Sequence[Statement],
    shapes: dict[str, tuple[int, ...]],
    first: str,
) -> None:
    """Add the vertices, once the dtypes that statements read are those that they give."""
    before, names = symbols.known, symbols.names
    dtypes = dict.fromkeys(shapes, first)
    for _ in range(_MOST_ROUNDS):
        symbols.known, symbols.names = dict(before), names.copy()
        for name, dtype in dtypes.items():
            symbols.known[name] = Vertex(name, shapes[name], dtype)
        for item in items:
            add_statement(symbols, copy.deepcopy(item))
        found = {name: symbols.known[name].dtype for name in dtypes}
        for name, shape in shapes.items():
            assert symbols.known[name].bound == shape
        if found == dtypes:
            return
        dtypes = found
    # Where 0 beside a bool is an int64, and beside a float32 a float32, dtypes may take turns.
    what = f"{items[0].name} depends on itself, and its dtype is another one each time"
    raise InputError(symbols.source.at(items[0].node), what, "a cast around the expression")
