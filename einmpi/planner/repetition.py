"""Vertices that do the same in repeated layers: they can share their states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import relabel, relabel_index

MOST_READERS = 8  # an input with more readers, such as a mask, belongs to no layer
SMALL_SHARE = 16  # copies with less than this share of the bytes of all results are small
LEAST_LAYERS = 3  # one after another; fewer are no repetition
LEAST_COPIES = 2  # of a vertex with the same surroundings
# How far around a vertex its surroundings are compared. Farther ones differ at the first and the
# last layers only, and more so with each step.
STEPS_AROUND = 2

Kinds = list[int]  # of each vertex of a graph, in order


# ---- layers one after another --------------------------------------------------------------------


class Layers(NamedTuple):
    """Equal layers one after another among the computed vertices of a graph."""

    start: int  # the place of the first vertex of the first layer
    vertices: int  # of a layer
    layers: int  # the first one included; 0 if nothing repeats


def find_layers(graph: EinGraph, results_of_none: bool = False) -> Layers:
    """Return the repetition that covers most vertices.

    Every vertex gets a kind, equal for vertices that do the same at the same place of their layers.
    Then a layer is a period in the sequence of kinds: a b c a b c a b c has period 3. Nothing that
    repeats less than three times is found. An input with many readers belongs to no layer; with
    `results_of_none` the same is true of a computed tensor, such as the cosines of positions. The
    search for cuts holds such a tensor on all ranks if it is small, and else compares vertices by
    their surroundings.
    """
    computed = graph.computed
    position = {vertex.name: place for place, vertex in enumerate(computed)}
    of_no_layer = set()
    for vertex in graph.vertices:
        if _has_many_readers(graph, vertex) and (vertex.is_input or results_of_none):
            of_no_layer.add(vertex.name)
    numbers: dict[object, int] = {}
    kinds = []
    for vertex in computed:
        kind = _kind(graph, vertex, position, of_no_layer)
        kinds.append(numbers.setdefault(kind, len(numbers)))
    saved, period, start = _best_period(np.array(kinds, np.int64))
    if not saved:
        return Layers(0, 0, 0)
    return Layers(start, period, saved // period + 1)


def repeated_layers(graph: EinGraph, results_of_none: bool = False) -> dict[str, str]:
    """Return vertices and inputs of repeated layers → those of the first layer.

    The result is empty where nothing repeats. `results_of_none` is that of `find_layers`.
    """
    computed = graph.computed
    start, period, count = find_layers(graph, results_of_none)
    tie: dict[str, str] = {}
    for place in range(start + period, start + period * count):
        copy = computed[place]
        model = computed[start + (place - start) % period]
        pairs = zip((*copy.inputs, copy.name), (*model.inputs, model.name), strict=True)
        for name, model_name in pairs:
            belongs_to_layer = graph[name].is_input or name == copy.name
            if not belongs_to_layer or name == model_name:
                continue
            if tie.setdefault(name, model_name) != model_name:  # an input of two places
                return {}
    return tie


def small_results_of_no_layer(graph: EinGraph, ranks: int) -> list[str]:
    """Return the computed tensors with many readers, if copies on all ranks would be small.

    Together they have at most a sixteenth of the bytes of all results. Else nothing is returned.
    """
    found = [vertex for vertex in graph.computed if _has_many_readers(graph, vertex)]
    copies = ranks * sum(vertex.nbytes for vertex in found)
    of_all_results = sum(vertex.nbytes for vertex in graph.computed)
    if SMALL_SHARE * copies > of_all_results:
        return []
    return [vertex.name for vertex in found]


def _has_many_readers(graph: EinGraph, vertex: Vertex) -> bool:
    return len(graph.consumers[vertex.name]) > MOST_READERS


def _best_period(kinds: npt.NDArray[np.int64]) -> tuple[int, int, int]:
    """Return (vertices saved, period, start) of the repetition that saves most vertices."""
    best = (0, 0, 0)  # saved, minus the period, minus the start: the greatest is best
    for period in range(1, len(kinds) // 3 + 1):
        # Runs of vertices that are equal to those one period later, as (start, length).
        same = np.concatenate([[False], kinds[:-period] == kinds[period:], [False]])
        changes = np.flatnonzero(same[1:] != same[:-1])
        starts = changes[::2]
        lengths = changes[1::2] - starts
        if not len(lengths):
            continue
        longest = int(lengths.max())
        if longest >= (LEAST_LAYERS - 1) * period:
            start = int(starts[lengths.argmax()])
            best = max(best, (longest // period * period, -period, -start))
    return best[0], -best[1], -best[2]


def _kind(
    graph: EinGraph, vertex: Vertex, position: Mapping[str, int], of_no_layer: Set[str]
) -> object:
    """Return a value that is equal for vertices that do the same at the same place."""
    here = position[vertex.name]

    def distances_to_users(name: str) -> tuple[int, ...]:
        return tuple(position[user] - here for user in graph.consumers[name])

    def kind_of_operand(name: str) -> object:
        tensor = graph[name]
        if name in of_no_layer:
            return name
        if not tensor.is_input:
            return here - position[name]
        return tensor.bound, tensor.dtype, distances_to_users(name)

    operands = tuple(kind_of_operand(name) for name in vertex.inputs)
    is_output = graph.is_output(vertex.name)
    return vertex.einsum, vertex.dtype, operands, distances_to_users(vertex.name), is_output


# ---- vertices with the same surroundings ---------------------------------------------------------


def vertices_alike(graph: EinGraph, marks: Mapping[str, object]) -> dict[str, str]:
    """Return vertices and inputs → the first one that does the same in the same surroundings.

    In a training step a layer is computed forwards at one place and backwards at another, and these
    places are not equally far apart from layer to layer: there is no period. So vertices are
    compared by what they read, by what reads them, and by the same of these. Those of the first and
    last layers, whose surroundings are special, follow the vertices that they resemble most.
    `marks` has what else must be equal. The result is empty where less than half of the graph is
    repeated.
    """
    refinements = [_kinds_alone(graph, marks)]
    for _ in range(STEPS_AROUND):
        refinements.append(_refined(graph, refinements[-1]))
    first_of_kind: dict[int, str] = {}
    tie: dict[str, str] = {}
    for vertex, kind in zip(graph.vertices, _joined(refinements), strict=True):
        model = first_of_kind.setdefault(kind, vertex.name)
        if model != vertex.name:
            tie[vertex.name] = model
    return tie if 2 * len(tie) >= len(graph.vertices) else {}


def _kinds_alone(graph: EinGraph, marks: Mapping[str, object]) -> Kinds:
    """Return equal numbers for vertices that do the same, whatever is around them."""
    einsums: dict[EinSum | None, object] = {}
    numbers: dict[object, int] = {}
    kinds = []
    for vertex in graph.vertices:
        if vertex.einsum not in einsums:
            einsums[vertex.einsum] = _without_names(vertex.einsum)
        is_output = graph.is_output(vertex.name)
        mark = marks.get(vertex.name)
        kind = (einsums[vertex.einsum], vertex.bound, vertex.dtype, is_output, mark)
        kinds.append(numbers.setdefault(kind, len(numbers)))
    return kinds


def _without_names(einsum: EinSum | None) -> object:
    """Return what is equal for EinSums that differ in nothing but the names of their labels."""
    if einsum is None:
        return None
    numbered = {label: str(number) for number, label in enumerate(einsum.labels)}
    operands = tuple(relabel_index(index, numbered) for index in einsum.operands)
    extents = tuple(extent for _, extent in einsum.extents)
    function = relabel(einsum.function, numbered)
    shape = (len(einsum.output), extents, einsum.picked_extent)
    return function, operands, einsum.aggregation, shape


def _refined(graph: EinGraph, kinds: Kinds) -> Kinds:
    """Return kinds that also differ where the kinds of operands or readers do."""
    kind_of = {vertex.name: kind for vertex, kind in zip(graph.vertices, kinds, strict=True)}
    readers: dict[str, list[tuple[int, int]]] = {vertex.name: [] for vertex in graph.vertices}
    for vertex in graph.vertices:
        for operand, name in enumerate(vertex.inputs):
            readers[name].append((kind_of[vertex.name], operand))
    numbers: dict[object, int] = {}
    refined = []
    for vertex in graph.vertices:
        operand_kinds = tuple([kind_of[name] for name in vertex.inputs])
        kind = (kind_of[vertex.name], operand_kinds, tuple(sorted(readers[vertex.name])))
        refined.append(numbers.setdefault(kind, len(numbers)))
    return refined


def _joined(refinements: Sequence[Kinds]) -> Kinds:
    """Return the finest kinds, with rare ones replaced by the frequent one that is most similar.

    That is the most frequent one among those that were the same at the finest step possible. A
    vertex without any gets a kind of its own.
    """
    finest = refinements[-1]
    count = Counter(finest)
    joined: list[int | None] = [None] * len(finest)
    for kinds in reversed(refinements):
        frequent: dict[int, int] = {}
        for kind, fine in zip(kinds, finest, strict=True):
            if count[fine] < LEAST_COPIES:
                continue
            if kind not in frequent or count[fine] > count[frequent[kind]]:
                frequent[kind] = fine
        for number, kind in enumerate(kinds):
            if joined[number] is None:
                joined[number] = frequent.get(kind)
    unused = max(finest, default=0) + 1
    return [unused + number if kind is None else kind for number, kind in enumerate(joined)]
