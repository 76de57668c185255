"""Which label belongs to which aggregation: lexical scopes, and where labels occur in a syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from einmpi.graph.eingraph import Vertex
from einmpi.language.syntax import entries
from einmpi.language.vocabulary import binds_labels, called_name


@dataclass(frozen=True)
class Occurrence:
    """A label in an index position. `nested`: inside an aggregation that may bind it itself."""

    label: str
    extent: int | None  # None: the tensor is unknown, or has another number of dimensions
    node: ast.expr
    tensor: ast.Subscript
    nested: bool


class Scope:
    """The labels a statement or an aggregation binds, and their extents."""

    def __init__(self, parent: Scope | None, bound: Iterable[str]) -> None:
        self.parent = parent
        self.bound = tuple(bound)
        self.loose: dict[str, ast.expr] = {}
        self.extents: dict[str, tuple[int, ast.AST | str]] = {}

    def bind_loose(self) -> None:
        self.bound = (*self.bound, *self.loose)
        self.loose = {}

    def owner(self, label: str) -> Scope | None:
        if label in self.bound or label in self.loose:
            return self
        return self.parent.owner(label) if self.parent else None

    def top(self) -> Scope:
        return self.parent.top() if self.parent else self

    def sees(self, label: str) -> bool:
        return self.owner(label) is not None

    def register(self, label: str, extent: int, place: ast.AST | str) -> str:
        """Note an extent and where it stands; the complaint if the label has another one already, else ""."""
        known, first = self.extents.setdefault(label, (extent, place))
        if known == extent:
            return ""
        shown = [text if isinstance(text, str) else ast.unparse(text) for text in (first, place)]
        return f"label {label} has two extents: {known} in {shown[0]} and {extent} in {shown[1]}"


def occurrences(node: ast.AST, known: Mapping[str, Vertex]) -> list[Occurrence]:
    """Every label that stands as an index in `node` and is not bound by name inside it."""
    found: list[Occurrence] = []
    _collect(node, known, frozenset(), False, found)
    return found


def _collect(
    node: ast.AST,
    known: Mapping[str, Vertex],
    hidden: frozenset[str],
    nested: bool,
    found: list[Occurrence],
) -> None:
    match node:
        case ast.Call(func=ast.Name(id=name)) if binds_labels(name):
            nested = True
        case ast.Call(func=ast.Subscript(value=ast.Name(id=name), slice=labels), args=args):
            if binds_labels(name):
                hidden = hidden.union(_listed(labels))
            for arg in args:
                _collect(arg, known, hidden, nested, found)
            return
        case ast.Subscript(value=ast.Name(id=name), slice=index):
            parts = entries(index)
            bound = known[name].bound if name in known else ()
            for k, part in enumerate(parts):
                if not isinstance(part, ast.Name):
                    _collect(part, known, hidden, nested, found)
                elif part.id not in hidden:
                    extent = bound[k] if len(bound) == len(parts) else None
                    found.append(Occurrence(part.id, extent, part, node, nested))
            return
    for child in ast.iter_child_nodes(node):
        _collect(child, known, hidden, nested, found)


def bound_inside(node: ast.expr) -> set[str]:
    """Labels that explicit aggregations in `node` bind."""
    calls = filter(None, map(called_name, ast.walk(node)))
    return {
        label
        for name, brackets in calls
        if binds_labels(name) and brackets is not None
        for label in _listed(brackets)
    }


def _listed(brackets: ast.expr) -> list[str]:
    """The labels of label, label:extent, …"""
    named = (entry.lower if isinstance(entry, ast.Slice) else entry for entry in entries(brackets))
    return [entry.id for entry in named if isinstance(entry, ast.Name)]
