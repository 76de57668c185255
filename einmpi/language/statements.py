"""Statements and declarations → vertices."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from einmpi.errors import InputError
from einmpi.graph.scalar import labels_of
from einmpi.language.expressions import Expressions
from einmpi.language.scope import Scope, bound_inside, occurrences
from einmpi.language.symbols import Vertices
from einmpi.language.syntax import Declaration, Statement, integer
from einmpi.language.vocabulary import aggregation_named, called_name, is_reserved

Inputs: TypeAlias = Mapping[str, tuple[Sequence[int], str]]  # name → shape, dtype


def declare(vertices: Vertices, item: Declaration) -> None:
    """Add an input that the program itself declares; one that is given already must be the same."""
    place = vertices.source.at(item.node)
    shape = tuple(integer(vertices.source, node, vertices.sizes) for node in item.shape)
    if item.name in vertices.known:
        known = vertices.known[item.name]
        if (known.bound, known.dtype) != (shape, item.dtype):
            raise InputError(place, f"{item.name} is given as {known}", "the same shape and dtype")
        return
    vertices.taken.add(item.name)
    vertices.add_input(item.name, shape, item.dtype, place)


def check_names(vertices: Vertices, program: Sequence[Statement]) -> None:
    """Each statement has a name of its own. All inputs are known by now."""
    if not program:
        raise InputError(
            vertices.source.name, "the program has no statement", "NAME[labels] = expression"
        )
    seen: set[str] = set()
    for item in program:
        place = vertices.source.at(item.node)
        if item.name in seen or item.name in vertices.known:
            raise InputError(
                place, f"{item.name} is defined twice", "each name once; inputs are defined already"
            )
        if is_reserved(item.name) or item.name in vertices.sizes:
            kind = "a size" if item.name in vertices.sizes else "a word of the language"
            raise InputError(
                place, f"{item.name} is {kind} and cannot be a tensor", "any other name"
            )
        seen.add(item.name)


def build(vertices: Vertices, item: Statement) -> None:
    """Add the vertices of a statement. Those that it uses are known."""
    vertices.current = item
    labels = tuple(label for label, _ in item.labels)
    vertices.refuse_twice(labels, "the output", item.node)
    scope = vertices.open(None, labels, item.value)
    for label, extent in item.labels:
        vertices.fix_extent(scope, label, extent)
    occurring = {entry.label for entry in occurrences(item.value, vertices.known)}
    for label in labels:
        if label not in occurring and label in bound_inside(item.value):
            place = vertices.source.at(item.node)
            raise InputError(
                place, f"label {label} is aggregated and also in the output", "one of the two"
            )
    _build_root(vertices, item, scope, labels)


def _build_root(vertices: Vertices, item: Statement, scope: Scope, labels: tuple[str, ...]) -> None:
    """The statement's own vertex; an aggregation at the root needs no second one."""
    expressions, called = Expressions(vertices), called_name(item.value)
    aggregation = aggregation_named(called[0]) if called else None
    if isinstance(item.value, ast.Call) and aggregation is not None:
        body, bound, inner = expressions.aggregate(item.value, scope)
        vertices.refuse_loose(scope)
        if set(labels_of(body[0])) - set(bound) == set(labels):
            vertices.emit(item.name, labels, body, aggregation, bound, inner, item.value)
            return
        piece = vertices.emit_temporary(body, aggregation, bound, inner, item.value)
    else:
        piece = expressions.expression(item.value, scope)
        vertices.refuse_loose(scope)
    vertices.emit(item.name, labels, piece, None, (), scope, item.node)
