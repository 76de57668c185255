"""Remarks about programs that are right, but may not mean what their author had in mind."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from einmpi.graph.eingraph import Vertex
from einmpi.language.scope import Occurrence, bound_inside, mark_values, occurrences
from einmpi.language.syntax import Source, Statement, entries, statements
from einmpi.language.vocabulary import binds_labels, called_name


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
