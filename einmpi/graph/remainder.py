"""What is left of a graph when its first vertices are computed: for a run that goes on where another one stopped."""

from __future__ import annotations

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.rewrite import copy_of, prune


def needed(graph: EinGraph, done: int) -> tuple[str, ...]:
    """Of the first `done` computed tensors those that are outputs, or that later vertices read."""
    later = {name for vertex in graph.computed[done:] for name in vertex.inputs}
    finished = graph.computed[:done]
    return tuple(
        vertex.name for vertex in finished if vertex.name in graph.outputs or vertex.name in later
    )


def saved_name(name: str) -> str:
    """Of the input that holds what was computed; no tensor of a program can have this name."""
    return f"saved {name}"


def rest(graph: EinGraph, done: int) -> EinGraph:
    """The graph without its first `done` computed vertices. What they made are inputs, and copies of these come first:
    so outputs are computed tensors, and what is needed later is on the ranks from the start, not in files."""
    saved = [
        Vertex(saved_name(name), graph[name].bound, graph[name].dtype)
        for name in needed(graph, done)
    ]
    copies = [copy_of(graph[name], of) for name, of in zip(needed(graph, done), saved, strict=True)]
    return prune(EinGraph((*graph.inputs, *saved, *copies, *graph.computed[done:]), graph.outputs))
