"""What remains of a graph when its first vertices are computed, for a run that resumes another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.rewrite import copy_of, prune


def in_order(graph: EinGraph, names: Sequence[str]) -> EinGraph:
    """Return the graph with its computed vertices in this order; ValueError if it is not one."""
    if sorted(names) != sorted(vertex.name for vertex in graph.computed):
        raise ValueError("other vertices")
    known = {vertex.name for vertex in graph.inputs}
    for name in names:
        if not known.issuperset(graph[name].inputs):
            raise ValueError(name)
        known.add(name)
    return replace(graph, vertices=(*graph.inputs, *(graph[name] for name in names)))


def needed(graph: EinGraph, done: int) -> tuple[str, ...]:
    """Return those of the first `done` computed tensors that are outputs or are read later."""
    read_later: set[str] = set()
    for vertex in graph.computed[done:]:
        read_later.update(vertex.inputs)
    kept = []
    for vertex in graph.computed[:done]:
        if vertex.name in graph.outputs or vertex.name in read_later:
            kept.append(vertex.name)
    return tuple(kept)


def saved_name(name: str) -> str:
    """Return the name of the input that holds a saved tensor; no program can use this name."""
    return f"saved {name}"


def rest(graph: EinGraph, done: int) -> EinGraph:
    """Return the graph without its first `done` computed vertices.

    Their tensors become inputs, and copies of these inputs come first: outputs stay computed
    tensors, and what is needed later is on the ranks from the start, not in files.
    """
    saved = []
    copies = []
    for name in needed(graph, done):
        vertex = graph[name]
        source = Vertex(saved_name(name), vertex.bound, vertex.dtype)
        saved.append(source)
        copies.append(copy_of(vertex, source))
    vertices = (*graph.inputs, *saved, *copies, *graph.computed[done:])
    return prune(EinGraph(vertices, graph.outputs))
