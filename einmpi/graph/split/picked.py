"""Gathers from a dimension that ranks cut: each rank picks what it has, and the parts are summed.

Z[b,y[b]] becomes P[b] ← Σ[l](where(y[b] == l, Z[b,l], 0)). Where Z is large and cut along l, this
moves P instead of Z.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from einmpi.graph.eingraph import EinGraph, Vertex, make_vertex
from einmpi.graph.einsum import make_einsum, reopen
from einmpi.graph.index_arithmetic import arithmetic_labels
from einmpi.graph.labels import Names, unique, unlike
from einmpi.graph.scalar import Call, Const, Element, Index, Scalar, labels_of, rebuild


@dataclass(frozen=True)
class PickedGather:
    """A gather that a vertex of its own can compute: an element, and its gathered dimension."""

    element: Element
    dimension: int


def picked_gathers(vertex: Vertex, known: Mapping[str, Vertex]) -> tuple[PickedGather, ...]:
    """Return the gathers of a vertex that can be picked.

    These are elements of floating-point tensors with one gathered dimension; their other indices
    are different labels.
    """
    if vertex.einsum is None or not vertex.einsum.is_gathering:
        return ()
    if vertex.einsum.segments is not None:
        return ()  # a value that goes nowhere may have any index
    found: dict[PickedGather, None] = {}

    def leaf(node: Scalar) -> Scalar:
        if isinstance(node, Element):
            dimension = _gathered_dimension(node)
            is_rounded = np.dtype(known[node.tensor].dtype).kind in "fc"
            if dimension is not None and is_rounded:
                found[PickedGather(node, dimension)] = None
        return node

    rebuild(reopen(vertex.einsum, vertex.inputs), leaf)
    return tuple(found)


def _gathered_dimension(element: Element) -> int | None:
    """Return the only dimension that is gathered; None if another index is not a plain label."""
    gathered = []
    labels = []
    for dimension, entry in enumerate(element.index):
        if isinstance(entry, str):
            labels.append(entry)
        elif arithmetic_labels(entry) is None:
            gathered.append(dimension)
        else:
            return None
    if len(gathered) != 1 or len(set(labels)) < len(labels):
        return None
    return gathered[0]


def with_picked_gathers(
    graph: EinGraph, names: Sequence[str]
) -> tuple[EinGraph, dict[str, list[str]]]:
    """Return the graph in which these vertices read picked values, and the vertices that pick."""
    known = dict(graph.by_name)
    taken = Names(known)
    vertices: list[Vertex] = []
    added: dict[str, list[str]] = {}
    for vertex in graph.vertices:
        if vertex.name in names:
            picks: dict[Scalar, Vertex] = {}
            for gather in picked_gathers(vertex, known):
                picks[gather.element] = _pick_vertex(vertex, gather, known, taken)
            for pick in picks.values():
                known[pick.name] = pick
            vertices.extend(picks.values())
            added[vertex.name] = [pick.name for pick in picks.values()]
            vertex = _reading(vertex, picks, known)
            known[vertex.name] = vertex
        vertices.append(vertex)
    return EinGraph(tuple(vertices), graph.outputs), added


def _pick_vertex(
    vertex: Vertex, gather: PickedGather, known: Mapping[str, Vertex], taken: Names
) -> Vertex:
    """Return the vertex that picks the values of a gather."""
    einsum = vertex.computed_einsum
    element = gather.element
    index = element.index[gather.dimension]
    assert not isinstance(index, str)
    whole = known[element.tensor].bound[gather.dimension]
    label = unlike(f"{element.tensor}_at", einsum.labels)
    entries = list(element.index)
    entries[gather.dimension] = label
    output = unique(labels_of(element))
    is_picked = Call("==", (index, Index(label)))
    expression = Call("where", (is_picked, Element(element.tensor, tuple(entries)), Const(0)))
    extents = {**einsum.extent, label: whole}
    picking, inputs = make_einsum(output, expression, "sum", (label,), extents)
    picking = replace(picking, picked_extent=whole)
    pick = make_vertex(
        taken.take_new(f"{vertex.name}_picked"), picking, inputs, known, places=vertex.places
    )
    return replace(pick, is_auxiliary=True)


def _reading(vertex: Vertex, picks: Mapping[Scalar, Vertex], known: Mapping[str, Vertex]) -> Vertex:
    """Return a vertex that reads picked values in place of the gathers."""
    einsum = vertex.computed_einsum

    def leaf(node: Scalar) -> Scalar:
        pick = picks.get(node)
        if pick is None:
            return node
        return Element(pick.name, pick.computed_einsum.output)

    expression = rebuild(reopen(einsum, vertex.inputs), leaf)
    changed, inputs = make_einsum(
        einsum.output, expression, einsum.aggregation, einsum.aggregated, einsum.extent
    )
    made = make_vertex(vertex.name, changed, inputs, known, vertex.origin, vertex.places)
    return replace(made, is_auxiliary=vertex.is_auxiliary)
