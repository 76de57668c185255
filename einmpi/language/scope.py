"""Lexical scopes of labels, and where labels occur in a syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from einmpi.graph.eingraph import Vertex
from einmpi.language.indices import Reach
from einmpi.language.syntax import Declaration, Statement, entries
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
        self.written: set[str] = set()  # labels with an extent written as label:extent
        # Of these, labels that may go through less than all of a dimension that they index.
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

    def register(
        self,
        label: str,
        extent: int,
        place: ast.AST | str,
        written: Callable[[ast.AST], str] = ast.unparse,
    ) -> str:
        """Note the extent of a label. Return what is wrong if it has another one, else "".

        `written` gives the text of a place.
        """
        known, first_place = self.extents.setdefault(label, (extent, place))
        if known == extent:
            return ""
        first = first_place if isinstance(first_place, str) else written(first_place)
        second = place if isinstance(place, str) else written(place)
        return f"label {label} has two extents: {known} in {first} and {extent} in {second}"


def occurrences(node: ast.AST, known: Mapping[str, Vertex]) -> list[Occurrence]:
    """Return every label that is an index in `node` and not bound by name inside it."""
    found: list[Occurrence] = []
    _collect(node, known, frozenset(), False, False, found)
    return found


class ReachFinder:
    """Finds every index in a syntax tree that is not a label alone.

    `is_outer` tells which labels belong to the scope of the tree or to one around it, and
    `integer_of` returns the extent that is written in brackets.
    """

    def __init__(
        self,
        known: Mapping[str, Vertex],
        is_outer: Callable[[str], bool],
        integer_of: Callable[[ast.expr], int],
    ) -> None:
        self.known = known
        self.is_outer = is_outer
        self.integer_of = integer_of
        self.found: list[Reach] = []

    def visit(self, node: ast.AST, guarded: bool, inner: Mapping[str, int | None]) -> None:
        """Append what is found; `inner` are labels of aggregations around the node."""
        called = called_name(node)
        if isinstance(node, ast.Call) and called is not None:
            name, brackets = called
            if name == "where":
                self.visit(node.args[0], guarded, inner)
                for branch in node.args[1:]:
                    self.visit(branch, True, inner)
                return
            if binds_labels(name):
                for argument in node.args:
                    own = self._labels_bound_by(brackets, argument)
                    self.visit(argument, guarded, {**inner, **own})
                return
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            self._add(node, node.value.id, guarded, inner)
        for child in ast.iter_child_nodes(node):
            self.visit(child, guarded, inner)

    def _add(
        self, node: ast.Subscript, name: str, guarded: bool, inner: Mapping[str, int | None]
    ) -> None:
        parts = entries(node.slice)
        bound = self.known[name].bound if name in self.known else ()
        if len(parts) != len(bound):
            return
        for part, extent in zip(parts, bound, strict=True):
            if not isinstance(part, ast.Name):
                self.found.append(Reach(part, extent, node, guarded, inner))

    def _labels_bound_by(
        self, brackets: ast.expr | None, argument: ast.expr
    ) -> dict[str, int | None]:
        """Return the labels that an aggregation binds, with their extents where these are clear."""
        extents: dict[str, int | None] = {}
        for entry in occurrences(argument, self.known):
            if entry.extent is not None:
                extents[entry.label] = entry.extent
        if brackets is None:
            return {label: extents[label] for label in extents if not self.is_outer(label)}
        bound: dict[str, int | None] = {}
        for label in _listed(brackets):
            bound[label] = extents.get(label)
        for part in entries(brackets):
            if isinstance(part, ast.Slice) and isinstance(part.lower, ast.Name) and part.upper:
                bound[part.lower.id] = self.integer_of(part.upper)
        return bound


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


class Value(ast.expr):
    """A name in the brackets of a tensor that is no label, but the value of a number."""

    _fields = ("name",)

    def __init__(self, name: ast.Name) -> None:
        self.name = name


def mark_values(items: Iterable[Statement | Declaration], known: Mapping[str, Vertex]) -> None:
    """Mark in statements the names in brackets that are values, as in x[step,i].

    These are tensors without dimensions, except where they are listed as labels: left of =, or in
    the brackets of an aggregation around them.
    """
    statements = [item for item in items if isinstance(item, Statement)]
    numbers = {name for name, vertex in known.items() if not vertex.bound}
    numbers.update(item.name for item in statements if not item.labels)
    for item in statements:
        free = numbers.difference(label for label, _ in item.labels)
        if free.isdisjoint(node.id for node in item.nodes if isinstance(node, ast.Name)):
            continue  # as in most statements
        _mark(item.value, free)
        for _, index in item.scattered:
            _mark(index, free - bound_inside(item.value))


def _mark(node: ast.AST, numbers: set[str]) -> None:
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    match node:
        case ast.Call(func=ast.Subscript(slice=labels), args=args):
            numbers = numbers.difference(_listed(labels))
            children = args
        case ast.Subscript(slice=ast.Tuple(elts=parts)):
            parts[:] = [_marked(part, numbers) for part in parts]
        case ast.Subscript(slice=part):
            node.slice = _marked(part, numbers)
    for child in children:
        _mark(child, numbers)


def _marked(part: ast.expr, numbers: set[str]) -> ast.expr:
    if isinstance(part, ast.Name) and part.id in numbers:
        return ast.copy_location(Value(part), part)
    return part
