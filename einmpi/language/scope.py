"""Lexical scopes of labels, and where labels occur in a syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from einmpi.graph.eingraph import Vertex
from einmpi.language.indices import Reach
from einmpi.language.syntax import entries
from einmpi.language.vocabulary import binds_labels, called_name


@dataclass(frozen=True)
class Occurrence:
    """A label in an index position.

    `extent` is None if the tensor is unknown or has another number of dimensions. `nested` says
    that the label is inside an aggregation that may bind it, `guarded` that it is inside a branch
    of `where`.
    """

    label: str
    extent: int | None
    node: ast.expr
    tensor: ast.Subscript
    nested: bool
    guarded: bool


class Scope:
    """The labels that a statement or an aggregation binds, and their extents.

    `loose` has the labels that occur directly in it and that no scope binds yet. `extents` has
    the extent of a label and where it was found.
    """

    def __init__(self, parent: Scope | None, bound: Iterable[str]) -> None:
        self.parent = parent
        self.bound = tuple(bound)
        self.loose: dict[str, ast.expr] = {}
        self.extents: dict[str, tuple[int, ast.AST | str]] = {}
        self.reaches: list[Reach] = []  # indices with arithmetic in it
        # Labels that have a smaller extent than a dimension they index: it is written so.
        self.narrowed: set[str] = set()

    def bind_loose(self) -> None:
        """Bind all loose labels, as an aggregation without brackets does."""
        self.bound = (*self.bound, *self.loose)
        self.loose = {}

    def owner(self, label: str) -> Scope | None:
        """Return the innermost scope that has the label."""
        if label in self.bound or label in self.loose:
            return self
        return self.parent.owner(label) if self.parent else None

    def top(self) -> Scope:
        """Return the scope of the whole statement."""
        return self.parent.top() if self.parent else self

    def sees(self, label: str) -> bool:
        return self.owner(label) is not None

    def register(self, label: str, extent: int, place: ast.AST | str) -> str:
        """Note the extent of a label. Return what is wrong if it has another one, else ""."""
        known, first_place = self.extents.setdefault(label, (extent, place))
        if known == extent:
            return ""
        first = _place_text(first_place)
        second = _place_text(place)
        return f"label {label} has two extents: {known} in {first} and {extent} in {second}"


def _place_text(place: ast.AST | str) -> str:
    return place if isinstance(place, str) else ast.unparse(place)


def occurrences(node: ast.AST, known: Mapping[str, Vertex]) -> list[Occurrence]:
    """Return every label that is an index in `node` and not bound by name inside it."""
    found: list[Occurrence] = []
    _collect(node, known, frozenset(), False, False, found)
    return found


def reaches(node: ast.AST, known: Mapping[str, Vertex], guarded: bool = False) -> list[Reach]:
    """Return every index in `node` that is not a label alone."""
    match node:
        case ast.Call(func=ast.Name(id="where"), args=[condition, *branches]):
            found = reaches(condition, known, guarded)
            for branch in branches:
                found += reaches(branch, known, guarded=True)
            return found
    found = []
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        parts = entries(node.slice)
        bound = known[node.value.id].bound if node.value.id in known else ()
        if len(parts) == len(bound):
            for part, extent in zip(parts, bound, strict=True):
                if not isinstance(part, ast.Name):
                    found.append(Reach(part, extent, node, guarded))
    for child in ast.iter_child_nodes(node):
        found += reaches(child, known, guarded)
    return found


def _collect(
    node: ast.AST,
    known: Mapping[str, Vertex],
    hidden: frozenset[str],
    nested: bool,
    guarded: bool,
    found: list[Occurrence],
) -> None:
    """Append the occurrences in `node`, except of the hidden labels."""
    match node:
        case ast.Call(func=ast.Name(id="where"), args=[condition, *branches]):
            _collect(condition, known, hidden, nested, guarded, found)
            for branch in branches:
                _collect(branch, known, hidden, nested, True, found)
            return
        case ast.Call(func=ast.Name(id=name)) if binds_labels(name):
            nested = True
        case ast.Call(func=ast.Subscript(value=ast.Name(id=name), slice=labels), args=args):
            if binds_labels(name):
                hidden = hidden.union(_listed(labels))
            for arg in args:
                _collect(arg, known, hidden, nested, guarded, found)
            return
        case ast.Subscript(value=ast.Name(id=name), slice=index):
            parts = entries(index)
            bound = known[name].bound if name in known else ()
            for k, part in enumerate(parts):
                if not isinstance(part, ast.Name):
                    _collect(part, known, hidden, nested, guarded, found)
                elif part.id not in hidden:
                    extent = bound[k] if len(bound) == len(parts) else None
                    found.append(Occurrence(part.id, extent, part, node, nested, guarded))
            return
    for child in ast.iter_child_nodes(node):
        _collect(child, known, hidden, nested, guarded, found)


def bound_inside(node: ast.expr) -> set[str]:
    """Return the labels that aggregations with brackets bind in `node`."""
    labels: set[str] = set()
    for part in ast.walk(node):
        called = called_name(part)
        if called is None:
            continue
        name, brackets = called
        if brackets is not None and binds_labels(name):
            labels.update(_listed(brackets))
    return labels


def _listed(brackets: ast.expr) -> list[str]:
    """Return the labels of "label, label:extent, …"."""
    labels = []
    for entry in entries(brackets):
        named = entry.lower if isinstance(entry, ast.Slice) else entry
        if isinstance(named, ast.Name):
            labels.append(named.id)
    return labels
