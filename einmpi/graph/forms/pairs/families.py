"""What can be computed by pairs of rows: a symmetric aggregate, and its family.

What is symmetric too and follows from such a result element by element is computed from its pairs,
and so are aggregates over one row or all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.forms.symmetry import find_symmetry, symmetry_under
from einmpi.graph.scalar import Arg, IndexEntries, labels_of, walk


@dataclass(frozen=True)
class Paired:
    """A vertex that can be computed by pairs of rows: one label numbers each row of a pair.

    The output has both labels, or one, as Σ[k](C[i,k] × v[k]), or none. There are no labels if
    the vertex reads nothing but diagonals of others.
    """

    vertex: Vertex
    labels: tuple[str, ...]
    conjugates: bool = False  # C[k,i] is the conjugate of C[i,k]

    @property
    def kept(self) -> tuple[str, ...]:
        """The labels of rows that the output has."""
        output = self.vertex.computed_einsum.output
        return tuple(label for label in self.labels if label in output)

    @property
    def is_square(self) -> bool:
        """Whether each pair of rows has elements of its own."""
        return len(self.kept) == 2

    def rows_in(self, index: IndexEntries) -> IndexEntries:
        """Return the entries of an index that number the rows of a pair."""
        output = self.vertex.computed_einsum.output
        return tuple(index[output.index(label)] for label in self.kept)

    def others_in(self, index: IndexEntries) -> IndexEntries:
        """Return the other entries of an index."""
        output = self.vertex.computed_einsum.output
        pairs = zip(index, output, strict=True)
        return tuple(entry for entry, label in pairs if label not in self.kept)


def paired(graph: EinGraph, vertex: Vertex) -> Paired | None:
    """Return how a symmetric aggregate can be computed by pairs of blocks; None if it cannot.

    No operand may have both labels of rows, and neither is used as a number.
    """
    einsum = vertex.einsum
    if einsum is None or not einsum.aggregated or not _is_ordinary(vertex):
        return None
    found = find_symmetry(einsum, vertex.inputs, _dtypes(graph, vertex))
    if found is None or len(found.swap) > 1:
        return None
    (labels,) = found.swap
    if not set(labels).isdisjoint(einsum.labels_as_numbers):
        return None
    for index in einsum.operands:
        if sum(entry in labels for entry in index) > 1:
            return None
    return Paired(vertex, labels, found.conjugates and vertex.dtype.startswith("complex"))


def family_of(graph: EinGraph, name: str, kept: Collection[int] = (0, 1, 2)) -> dict[str, Paired]:
    """Return a symmetric vertex, and all that can be computed from its pairs.

    `kept` says how many labels of rows the output of the latter may have.
    """
    first = paired(graph, graph[name])
    assert first is not None, f"{name} is not symmetric"
    squares = {name: first}
    found = dict(squares)
    for vertex in graph.computed:
        if vertex.name != name and not squares.keys().isdisjoint(vertex.inputs):
            reader = _reader(graph, vertex, squares)
            if reader is not None and len(reader.kept) in kept:
                found[vertex.name] = reader
                if reader.is_square:
                    squares[vertex.name] = reader
    return found


def _reader(graph: EinGraph, vertex: Vertex, squares: Mapping[str, Paired]) -> Paired | None:
    """Return how a vertex can be computed from pairs of rows of what it reads."""
    einsum = vertex.computed_einsum
    labels: tuple[str, ...] = ()
    for name, index in zip(vertex.inputs, einsum.operands, strict=True):
        if name not in squares:
            continue
        rows = squares[name].rows_in(index)
        one, other = rows
        if not isinstance(one, str) or not isinstance(other, str):
            return None
        if one != other and labels and set(labels) != set(rows):
            return None
        if one != other and not labels:
            labels = tuple(sorted((one, other), key=lambda label: label not in einsum.output))
    if not _is_ordinary(vertex) or not _stay_apart(vertex, labels, squares):
        return None
    reader = Paired(vertex, labels)
    if len(reader.kept) < len(labels):
        # What is counted twice, or not at all, has to be left out.
        record = AGGREGATIONS[einsum.required_aggregation]
        is_half = record.is_rounded and DTYPES[vertex.dtype].is_half
        if is_half or (record.empty is None and not record.is_idempotent):
            return None
    if len(labels) - len(reader.kept) in (0, 2) and labels:
        known = {name: square.conjugates for name, square in squares.items()}
        dtypes = _dtypes(graph, vertex)
        conjugates = symmetry_under(((labels[0], labels[1]),), einsum, vertex.inputs, dtypes, known)
        if conjugates is None:
            return None
        return replace(reader, conjugates=conjugates and vertex.dtype.startswith("complex"))
    return reader


def _stay_apart(vertex: Vertex, labels: Sequence[str], squares: Mapping[str, Paired]) -> bool:
    """Return whether labels of rows number rows alone, and are no part of other indices."""
    for name, index in zip(vertex.inputs, vertex.computed_einsum.operands, strict=True):
        others = squares[name].others_in(index) if name in squares else ()
        computed = [entry for entry in index if not isinstance(entry, str)]
        inside = list(chain(others, *map(labels_of, computed)))
        if computed and not set(labels).isdisjoint(index):
            return False
        read = [
            part.position for entry in computed for part in walk(entry) if isinstance(part, Arg)
        ]
        if not set(labels).isdisjoint(inside) or any(vertex.inputs[k] in squares for k in read):
            return False
    return True


def _is_ordinary(vertex: Vertex) -> bool:
    einsum = vertex.computed_einsum
    is_special = einsum.has_special_form or einsum.is_pass_of_scan
    return vertex.recurrence is None and not is_special


def _dtypes(graph: EinGraph, vertex: Vertex) -> list[str]:
    return [graph[name].dtype for name in vertex.inputs]
