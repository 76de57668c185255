"""The rows of a chain: labels that all its vertices have, under one name or another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.scalar import labels_of

_Node: TypeAlias = tuple[str, str]  # the name of a vertex, and one of its labels


@dataclass(frozen=True)
class Row:
    """A label that all vertices of a chain have."""

    labels: tuple[str, ...]  # its name in each vertex
    is_batch: bool  # all operands of the first contraction have it
    is_aggregated: bool  # a vertex aggregates it


def find_rows(graph: EinGraph, vertices: Sequence[Vertex], seed: str) -> list[Row]:
    """Return the rows of a chain: first those in which all operands of the seed are cut.

    Rows that a vertex aggregates come last. The seed is the first contraction of the chain.
    """
    members = {vertex.name for vertex in vertices}
    classes = _LabelClasses(graph, vertices, members)
    candidates: dict[_Node, list[str]] = {}  # class → its label in each vertex so far
    for number, vertex in enumerate(vertices):
        labels_of_class: dict[_Node, list[str]] = {}
        for label in vertex.computed_einsum.labels:
            label_class = classes.find((vertex.name, label))
            labels_of_class.setdefault(label_class, []).append(label)
        for label_class, labels in labels_of_class.items():
            found = candidates.setdefault(label_class, [])
            is_in_all_before = len(found) == number
            if is_in_all_before and len(labels) == 1:
                found.append(labels[0])
    unusable = {classes.find(node) for node in classes.unusable}
    rows = []
    for label_class, labels in candidates.items():
        is_in_all = len(labels) == len(vertices)
        if not is_in_all or label_class in unusable:
            continue
        row = _make_row(graph, vertices, labels, members, seed)
        if row is not None:
            rows.append(row)
    return sorted(rows, key=lambda row: (row.is_aggregated, not row.is_batch))


def _make_row(
    graph: EinGraph,
    vertices: Sequence[Vertex],
    labels: Sequence[str],
    members: set[str],
    seed: str,
) -> Row | None:
    """Return a label of all vertices as a row; None if results of parts cannot be used."""
    is_aggregated = False
    is_batch = True
    for vertex, label in zip(vertices, labels, strict=True):
        einsum = vertex.computed_einsum
        if label in einsum.aggregated:
            is_aggregated = True
            if members.intersection(graph.consumers[vertex.name]):
                return None
        if vertex.name == seed:
            is_batch = all(label in entries for entries in einsum.operands)
    return Row(tuple(labels), is_batch, is_aggregated)


class _LabelClasses:
    """The labels of all vertices in classes, each of which is named by one of its members.

    Labels of two vertices are of one class if one vertex reads the other's result at them.
    An index that is no label, such as s+1, needs more of a tensor than one block has: the classes
    of its labels are no rows.
    """

    def __init__(self, graph: EinGraph, vertices: Sequence[Vertex], members: set[str]) -> None:
        self.parent: dict[_Node, _Node] = {}
        self.unusable: list[_Node] = []
        for vertex in vertices:
            for label in vertex.computed_einsum.labels:
                node = vertex.name, label
                self.parent[node] = node
        for vertex in vertices:
            operands = vertex.computed_einsum.operands
            for name, entries in zip(vertex.inputs, operands, strict=True):
                written: Sequence[str | None] = [None] * len(entries)
                if name in members:
                    written = graph[name].computed_einsum.output
                for entry, written_label in zip(entries, written, strict=True):
                    if isinstance(entry, str):
                        if written_label is not None:
                            self._join((vertex.name, entry), (name, written_label))
                        continue
                    for label in labels_of(entry):
                        self.unusable.append((vertex.name, label))
                    if written_label is not None:
                        self.unusable.append((name, written_label))

    def find(self, node: _Node) -> _Node:
        """Return the class of a label of a vertex."""
        while self.parent[node] != node:
            node = self.parent[node]
        return node

    def _join(self, node: _Node, other: _Node) -> None:
        self.parent[self.find(node)] = self.find(other)
