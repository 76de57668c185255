"""Lexical scopes of labels, and where labels occur in a syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from einmpi.graph.eingraph import Vertex
from einmpi.language.indices import Reach
from einmpi.language.macros import binds_labels, called_name
from einmpi.language.syntax import (
    Declaration,
    Source,
    Statement,
    children,
    entries,
    statements,
)


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


# An aggregation around a part of a syntax tree: its brackets, if it has any, and the argument.
Binder: TypeAlias = tuple[ast.expr | None, ast.expr]


class _Entry(NamedTuple):
    """What is between two commas in the brackets of a tensor.

    `extent` is that of the dimension; None if the tensor is unknown or has another number of
    dimensions. `guarded` says that it is inside a branch of `where`.
    """

    node: ast.expr
    extent: int | None
    tensor: ast.Subscript
    guarded: bool
    binders: tuple[Binder, ...]


def _collect(
    node: ast.AST,
    known: Mapping[str, Vertex],
    found: list[_Entry],
    guarded: bool = False,
    binders: tuple[Binder, ...] = (),
) -> list[_Entry]:
    """Append all indices of tensors in `node`, and return the list."""
    below: Sequence[ast.AST] = children(node)
    if isinstance(node, ast.Call):
        name, brackets = called_name(node) or ("", None)
        if brackets is not None or name == "where" or binds_labels(name):
            below = ()
            for position, argument in enumerate(node.args):
                is_branch = name == "where" and position > 0
                around = (*binders, (brackets, argument)) if binds_labels(name) else binders
                _collect(argument, known, found, guarded or is_branch, around)
    elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        below = ()
        parts = entries(node.slice)
        bound = known[node.value.id].bound if node.value.id in known else ()
        for position, part in enumerate(parts):
            extent = bound[position] if len(bound) == len(parts) else None
            found.append(_Entry(part, extent, node, guarded, binders))
            if not isinstance(part, ast.Name):
                _collect(part, known, found, guarded, binders)
    for child in below:
        _collect(child, known, found, guarded, binders)
    return found


def occurrences(node: ast.AST, known: Mapping[str, Vertex]) -> list[Occurrence]:
    """Return every label that is an index in `node` and not bound by name inside it."""
    found = []
    for part, extent, tensor, guarded, binders in _collect(node, known, []):
        if not isinstance(part, ast.Name):
            continue
        listed = [_listed(brackets) for brackets, _ in binders if brackets is not None]
        if not any(part.id in labels for labels in listed):
            is_nested = len(listed) < len(binders)
            found.append(Occurrence(part.id, extent, part, tensor, is_nested, guarded))
    return found


def indices_in(node: ast.AST) -> Iterator[tuple[str, int, ast.expr]]:
    """Yield a tensor, a dimension and its index for every index in `node`.

    Those in which an aggregation binds a label by name are left out.
    """
    for part, _, tensor, _, binders in _collect(node, {}, []):
        bound = {label for brackets, _ in binders if brackets for label in _listed(brackets)}
        names = {name.id for name in ast.walk(part) if isinstance(name, ast.Name)}
        if isinstance(tensor.value, ast.Name) and names.isdisjoint(bound):
            yield tensor.value.id, entries(tensor.slice).index(part), part


def reaches_in(
    node: ast.AST,
    known: Mapping[str, Vertex],
    is_outer: Callable[[str], bool],
    integer_of: Callable[[ast.expr], int],
) -> list[Reach]:
    """Return every index in a syntax tree that is not a label alone.

    `is_outer` tells which labels belong to the scope of the tree or to one around it, and
    `integer_of` returns the extent that is written in brackets.
    """

    def bound_by(binder: Binder) -> dict[str, int | None]:
        """Return the labels that an aggregation binds, with their extents where these are clear."""
        brackets, argument = binder
        extents: dict[str, int | None] = {}
        for entry in occurrences(argument, known):
            if entry.extent is not None:
                extents[entry.label] = entry.extent
        if brackets is None:
            return {label: extents[label] for label in extents if not is_outer(label)}
        bound = {label: extents.get(label) for label in _listed(brackets)}
        for part in entries(brackets):
            if isinstance(part, ast.Slice) and isinstance(part.lower, ast.Name) and part.upper:
                bound[part.lower.id] = integer_of(part.upper)
        return bound

    found = []
    bound_labels = cache(bound_by)
    for part, extent, tensor, guarded, binders in _collect(node, known, []):
        if extent is None or isinstance(part, ast.Name):
            continue
        inner: dict[str, int | None] = {}
        for binder in binders:
            inner.update(bound_labels(binder))
        found.append(Reach(part, extent, tensor, guarded, inner))
    return found


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

    def __init__(self, name: Any = None) -> None:  # a copy gets it later
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


def values_in(items: Iterable[Statement | Declaration]) -> set[str]:
    """Return the names that cannot be labels, because a statement has no label of this name."""
    found: set[str] = set()
    for item in items:
        if not isinstance(item, Statement):
            continue
        labels = {label for label, _ in item.labels}
        for tree in item.trees:
            labels.update(bound_inside(tree))
            for entry in occurrences(tree, {}):
                # Outside of aggregations, a label of the value would be one of the result.
                if entry.nested or tree is not item.value:
                    labels.add(entry.label)
        names = {node.id for node in item.nodes if isinstance(node, ast.Name)}
        found.update(names - labels)
    return found


def _mark(node: ast.AST, numbers: set[str]) -> None:
    below: Sequence[ast.AST] = children(node)
    match node:
        case ast.Call(func=ast.Subscript(slice=labels), args=args):
            numbers = numbers.difference(_listed(labels))
            below = args
        case ast.Subscript(slice=ast.Tuple(elts=parts)):
            parts[:] = [_marked(part, numbers) for part in parts]
        case ast.Subscript(slice=part):
            node.slice = _marked(part, numbers)
    for child in below:
        _mark(child, numbers)


def _marked(part: ast.expr, numbers: set[str]) -> ast.expr:
    if isinstance(part, ast.Name) and part.id in numbers:
        return ast.copy_location(Value(part), part)
    return part


# ---- notes ---------------------------------------------------------------------------------------
#
# Remarks about programs that are right, but may not mean what their author had in mind.


def label_notes(source: Source, known: Mapping[str, Vertex], sizes: Mapping[str, int]) -> list[str]:
    """Return a note for each label that may be a misspelling of another one, or meant as a size.

    In Z[i,k] = sum(A[i,j] * B[jj,k]) the first are j and jj: each is used once, in another tensor
    than the other, with the same extent, and an aggregation binds them without naming them.
    """
    notes = []
    items = statements(source)
    mark_values(items, known)
    for item in items:
        if not isinstance(item, Statement):
            continue
        names = [node.id for node in item.nodes if isinstance(node, ast.Name)]
        for entry in _unlisted(item, known):
            label = entry.label
            other = _companion(entry, item, known) if names.count(label) == 1 else None
            if other is not None:
                notes.append(
                    f"{source.at(entry.node)}: label {label} is used only once; "
                    f"{other} has the same extent and is another label"
                )
            if label in sizes and _may_mean_size(label, item, names):
                notes.append(
                    f"{source.at(entry.node)}: {label} in {ast.unparse(entry.tensor)} is a label "
                    f"with {entry.extent} values; the size {label} = {sizes[label]} is {label}+0"
                )
    return notes


def _unlisted(item: Statement, known: Mapping[str, Vertex]) -> Iterator[Occurrence]:
    """Yield the labels of a statement, where each occurs first, that no brackets name."""
    listed = bound_inside(item.value).union(label for label, _ in item.labels)
    for entry in occurrences(item.value, known):
        if entry.label not in listed:
            listed.add(entry.label)
            yield entry


def _may_mean_size(label: str, item: Statement, names: list[str]) -> bool:
    """Return whether a label is used once, or its name stands for a number elsewhere.

    `names` are all names in the statement.
    """
    in_brackets = []
    for node in item.nodes:
        if isinstance(node, ast.Subscript):
            in_brackets += [part.id for part in entries(node.slice) if isinstance(part, ast.Name)]
    return names.count(label) == 1 or names.count(label) > in_brackets.count(label)


def _companion(entry: Occurrence, item: Statement, known: Mapping[str, Vertex]) -> str | None:
    """Return a label of the same extent in another tensor of the same aggregation."""
    if entry.extent is None:
        return None
    for bound in _labels_bound_without_brackets(item, known):
        nodes = [other.node for other in bound]
        if entry.node not in nodes:
            continue
        beside = {other.label for other in bound if other.tensor is entry.tensor}
        for other in bound:
            if other.label not in beside and other.extent == entry.extent:
                return other.label
    return None


def _labels_bound_without_brackets(
    item: Statement, known: Mapping[str, Vertex]
) -> Iterator[list[Occurrence]]:
    """Yield the labels directly inside each aggregation that does not name its labels."""
    for node in ast.walk(item.value):
        called = called_name(node)
        if called is None:
            continue
        name, brackets = called
        if brackets is not None or not binds_labels(name):
            continue
        assert isinstance(node, ast.Call)
        direct: list[Occurrence] = []
        for argument in node.args:
            for found in occurrences(argument, known):
                if not found.nested:
                    direct.append(found)
        yield direct
