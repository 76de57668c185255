"""Remarks about programs that are right, but may not mean what their author had in mind."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from einmpi.graph.eingraph import Vertex
from einmpi.language.scope import Occurrence, occurrences
from einmpi.language.syntax import Source, Statement, statements
from einmpi.language.vocabulary import binds_labels, called_name


def label_notes(source: Source, known: Mapping[str, Vertex]) -> list[str]:
    """Return a note for each label that may be a misspelling of another one.

    In Z[i,k] = sum(A[i,j] * B[jj,k]) these are j and jj: each is used once, in another tensor than
    the other, with the same extent, and an aggregation binds them without naming them.
    """
    notes = []
    for item in statements(source):
        if not isinstance(item, Statement):
            continue
        for entry in _used_once(item, known):
            other = _companion(entry, item, known)
            if other is not None:
                notes.append(
                    f"{source.at(entry.node)}: label {entry.label} is used only once; "
                    f"{other} has the same extent and is another label"
                )
    return notes


def _used_once(item: Statement, known: Mapping[str, Vertex]) -> Iterator[Occurrence]:
    """Yield the labels that occur once in a statement and that no brackets name."""
    listed = {label for label, _ in item.labels}
    uses: dict[str, int] = {}
    for tree in item.trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                uses[node.id] = uses.get(node.id, 0) + 1
    for entry in occurrences(item.value, known):
        if uses[entry.label] == 1 and entry.label not in listed:
            yield entry


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
