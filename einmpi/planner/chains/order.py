"""Orders of a graph in which the vertices of each chain follow one another."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.planner.chains.record import FusedChain


def with_chains_together(graph: EinGraph, chains: Sequence[FusedChain]) -> EinGraph | None:
    """Return the graph with the vertices of each chain one after another, in their order.

    Everything else stays as near to the given order as it can. None if there is no such order,
    because two chains need results of each other.
    """
    unit_of: dict[str, int] = {}  # the first place of a vertex or of its chain
    vertices: dict[int, list[Vertex]] = {}
    for chain in chains:
        first = min(graph.position[name] for name in chain.vertices)
        unit_of.update(dict.fromkeys(chain.vertices, first))
        vertices[first] = [graph[name] for name in chain.vertices]
    for vertex in graph.computed:
        if vertex.name not in unit_of:
            place = graph.position[vertex.name]
            unit_of[vertex.name] = place
            vertices[place] = [vertex]
    missing: dict[int, set[int]] = {}  # units that a unit needs results of
    readers: dict[int, set[int]] = {place: set() for place in vertices}
    for place, members in vertices.items():
        needed: set[int] = set()
        for vertex in members:
            needed.update(unit_of[name] for name in vertex.inputs if name in unit_of)
        needed.discard(place)
        missing[place] = needed
        for other in needed:
            readers[other].add(place)
    ready = [place for place, needed in missing.items() if not needed]
    heapq.heapify(ready)
    order: list[Vertex] = []
    while ready:
        place = heapq.heappop(ready)
        order += vertices[place]
        for reader in readers[place]:
            missing[reader].discard(place)
            if not missing[reader]:
                heapq.heappush(ready, reader)
    if len(order) < len(graph.computed):
        return None
    return replace(graph, vertices=(*graph.inputs, *order))
