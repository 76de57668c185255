"""Statements and declarations to vertices."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from einmpi.errors import InputError
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.scalar import labels_of
from einmpi.language.expressions.aggregates import read_aggregated
from einmpi.language.expressions.expression import Expressions
from einmpi.language.expressions.scattered import masked
from einmpi.language.scope import Scope, bound_inside, occurrences
from einmpi.language.slices import without_slices
from einmpi.language.symbols import SymbolTable
from einmpi.language.syntax import Declaration, Statement, integer
from einmpi.language.vocabulary import aggregation_named, called_name, is_reserved

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
