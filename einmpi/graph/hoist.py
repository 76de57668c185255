"""Split the graph of a loop's step: what is the same in every step is computed once, before."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.rewrite import prune


@dataclass(frozen=True)
class Hoisted:
    """The graph that is computed once, and the graph of a step, which reads results of it."""

    once: EinGraph | None  # None if there is nothing to compute before the first step
    step: EinGraph
    names: tuple[str, ...]  # tensors that the first graph computes for the second


def hoist(graph: EinGraph, changing: Collection[str]) -> Hoisted:
    """Split a graph, given the inputs that change from step to step.

    A tensor that is computed from labels and numbers alone stays in the step: fusing it costs
    nothing there, and keeping it would take memory.
    """
    changed = set(changing)
    for vertex in graph.vertices:
        if not changed.isdisjoint(vertex.inputs):
            changed.add(vertex.name)
    inputs = {vertex.name for vertex in graph.inputs}
    from_tensors: set[str] = set()  # unchanged results that depend on an input
    for vertex in graph.computed:
        if vertex.name in changed:
            continue
        reads_input = not inputs.isdisjoint(vertex.inputs)
        reads_result = not from_tensors.isdisjoint(vertex.inputs)
        if reads_input or reads_result:
            from_tensors.add(vertex.name)

    once_outputs = [name for name in graph.outputs if name not in changed]
    step_outputs = tuple(name for name in graph.outputs if name in changed)
    needed: dict[str, None] = {}  # hoisted tensors that a step reads
    for vertex in graph.computed:
        if vertex.name in from_tensors:
            continue
        for name in vertex.inputs:
            if name in from_tensors:
                needed[name] = None
    step = prune(replace(graph, vertices=_with_inputs(graph, needed), outputs=step_outputs))
    names = tuple(name for name in needed if name in step.by_name)
    once_outputs += [name for name in names if name not in once_outputs]
    if not once_outputs:
        return Hoisted(None, step, ())
    once = prune(replace(graph, outputs=tuple(once_outputs)))
    return Hoisted(once, step, names)


def _with_inputs(graph: EinGraph, names: Collection[str]) -> tuple[Vertex, ...]:
    """Return the vertices of a graph in which these computed tensors are inputs."""
    inputs = list(graph.inputs)
    computed = []
    for vertex in graph.computed:
        if vertex.name in names:
            inputs.append(Vertex(vertex.name, vertex.bound, vertex.dtype))
        else:
            computed.append(vertex)
    return (*inputs, *computed)
