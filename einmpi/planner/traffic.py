"""What a plan moves, and how long it takes on a measured machine: of every edge, and of every vertex."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from einmpi.graph.eingraph import EinGraph
from einmpi.planner.factor import Edge, Name, factor
from einmpi.planner.mesh import Mesh
from einmpi.planner.paper.costs import Cost
from einmpi.planner.prices import Prices
from einmpi.planner.volume import moved_words


@dataclass(frozen=True)
class Traffic:
    """What moves along an edge: words over all ranks, and with how many ranks each one exchanges something."""

    copied: int  # for a join,
    combined: int  # as partial results,
    recut: int  # because the tensor is cut along other dimensions
    between: tuple[int, int] = (0, 0)  # words between nodes: of the combined ones, of the others
    peers: tuple[int, int] = (1, 1)  # inside a node and between nodes, itself included

    @property
    def words(self) -> tuple[int, int, int]:
        return self.copied, self.combined, self.recut


def edge_traffic(mesh: Mesh, edge: Edge, cuts: Sequence[Sequence[int]]) -> Traffic:
    """What an edge moves, given what each axis cuts at its ends."""
    elements = prod(edge.bound)
    targets = [edge.target_symbols[symbol] for symbol in cuts[-1]]
    if edge.source is None:
        copies = [f if t == edge.ndim else 1 for f, t in zip(mesh.factors, targets, strict=True)]
        across, inside = prod(copies[: mesh.node_axes]), prod(copies[mesh.node_axes :])
        return Traffic(
            (across * inside - 1) * elements, 0, 0, (0, (across - 1) * elements), (inside, across)
        )
    sources = [edge.source_symbols[symbol] for symbol in cuts[0]]
    axes = tuple(zip(mesh.factors, sources, targets, strict=True))
    total, crossing = moved_words(mesh, edge.bound, sources, targets)
    partial = [f if s == edge.ndim + 1 else 1 for f, s, _ in axes]
    combined = min(total, (prod(partial) - 1) * elements)
    first = min(crossing, (prod(partial[: mesh.node_axes]) - 1) * elements)
    changing = [f if s not in (t, edge.ndim) else 1 for f, s, t in axes]
    peers = prod(changing[mesh.node_axes :]), prod(changing[: mesh.node_axes])
    turned = any(s < edge.ndim and t < edge.ndim and s != t for _, s, t in axes)
    others = (0, total - combined) if turned else (total - combined, 0)
    return Traffic(others[0], combined, others[1], (first, crossing - first), peers)


NOTHING = Cost(0, 0, 0)


@dataclass
class Bill:
    """What a vertex costs. Times are picoseconds of all ranks together, where a machine was measured."""

    words: Cost = NOTHING
    nbytes: int = 0
    between: int = 0  # bytes
    computing: int = 0
    moving_inside: int = 0
    moving_between: int = 0

    @property
    def time(self) -> int:
        return self.computing + self.moving_inside + self.moving_between

    def add(self, words: Cost, between: int, size: int, prices: Prices) -> None:
        nbytes = words.total * size
        self.words += words
        self.nbytes += nbytes
        self.between += between * size
        if prices.machine is not None:
            self.moving_inside += (nbytes - between * size) * prices.inside
            self.moving_between += between * size * prices.between


def bills(
    graph: EinGraph,
    mesh: Mesh,
    states: Mapping[Name, tuple[int, ...]],
    resident: Collection[str],
    pinned: Collection[str],
    prices: Prices,
) -> dict[str, Bill]:
    """What each vertex costs, every layer by itself. Copies and new cuts are paid by who needs them, partial results by
    who made them."""
    whole = factor(graph, resident, pinned)
    found = {vertex.name: Bill() for vertex in graph.computed}
    for edge in whole.edges:
        target = whole.variables[edge.target]
        ends = [target] if edge.source is None else [whole.variables[edge.source], target]
        tensor = graph[edge.tensor]
        user = target.name if target.kind == "vertex" or tensor.is_input else edge.tensor
        user = user if user in found else graph.consumers[user][0]
        traffic = edge_traffic(mesh, edge, [states[end.kind, end.name] for end in ends])
        size, count = np.dtype(tensor.dtype).itemsize, edge.weight
        first, rest = (count * words for words in traffic.between)
        found[user].add(Cost(count * traffic.copied, 0, count * traffic.recut), rest, size, prices)
        if traffic.combined:
            found[edge.tensor].add(Cost(0, count * traffic.combined, 0), first, size, prices)
        payer = found[edge.tensor if traffic.combined else user]
        inside, across = traffic.peers
        payer.moving_inside += count * mesh.ranks * prices.messages(inside, 1)
        payer.moving_between += count * mesh.ranks * prices.messages(1, across)
    if prices.machine is not None:
        for vertex in graph.computed:
            assert vertex.einsum is not None
            state = states["vertex", vertex.name]
            again = mesh.parts(state, [len(vertex.einsum.labels)])[0]
            found[vertex.name].computing = (
                vertex.einsum.operations() * prices.operation(vertex) // 1000 * again
            )
    return found
