"""Orders of a graph in which the vertices of each chain follow one another."""

from __future__ import annotations

from collections.abc import Sequence

from einmpi.graph.eingraph import EinGraph
from einmpi.planner.chains.record import FusedChain
from einmpi.planner.saving_memory.order import with_groups_together


def with_chains_together(graph: EinGraph, chains: Sequence[FusedChain]) -> EinGraph | None:
    """Return the graph with the vertices of each chain one after another, in their order.

    Everything else stays as near to the given order as it can. None if there is no such order,
    because two chains need results of each other.
    """
    chain_of = {name: chain.vertices for chain in chains for name in chain.vertices}
    groups: dict[tuple[str, ...], None] = {}  # in the order of their first vertices
    for vertex in graph.computed:
        groups[chain_of.get(vertex.name, (vertex.name,))] = None
    return with_groups_together(graph, groups)
