"""The paper's costs of a decomposition: upper bounds on the elements moved (paper, section 7, errata put right).

Parts are whole numbers, or numpy columns of them: then many partitionings are priced at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.einsum import EinSum
from einmpi.planner.paper.viable import Parts

Bound = tuple[int, ...]


def needs(einsum: EinSum, operand: int, parts: Sequence[Any], whole: int = 1) -> tuple[Any, ...]:
    """The partitioning of an operand, d[ℓX; ℓXY]. A label in two dimensions cuts both; a gathered one stays whole."""
    at = {label: k for k, label in enumerate(einsum.labels)}
    return tuple(
        parts[at[entry]] if isinstance(entry, str) else whole for entry in einsum.operands[operand]
    )


def cost_join(einsum: EinSum, parts: Sequence[Any], bounds: Sequence[Bound] | None = None) -> Any:
    """Elements moved to the kernel calls: one tile of every operand for each call.

    The operands' own `bounds` are needed only where a dimension is gathered: the labels do not tell its extent.
    """
    if bounds is None:
        extent: dict[Any, int] = dict(einsum.extents)
        bounds = [tuple(extent[entry] for entry in index) for index in einsum.operands]
    tiles = [_tile(bound, needs(einsum, operand, parts)) for operand, bound in enumerate(bounds)]
    return prod(parts) * sum(tiles)


def cost_aggregate(einsum: EinSum, parts: Sequence[Any]) -> Any:
    """Elements moved to add up the kernel calls' results: each group's n_agg tiles but one move."""
    output = len(einsum.output)
    return prod(parts[:output]) * (prod(parts[output:]) - 1) * _tile(einsum.bound, parts[:output])


def cost_repartition(consumer: Sequence[Any], producer: Sequence[Any], bound: Bound) -> Any:
    """Elements moved to make a tensor, cut as the producer leaves it, into tiles as the consumer needs them.

    Each consumer tile travels to its pieces one after another, and a producer tile to every tile it is a piece of; 0
    when the partitionings are equal.
    """
    pieces, partial = 1, False
    for b, c, p in zip(bound, consumer, producer, strict=True):
        pieces = pieces * -(-p // c)
        partial = partial | (
            -(-b // p) > -(-b // c)
        )  # a tile has elements that the consumer's tile does not need
    tiles, made = prod(consumer), _tile(bound, producer)
    return (pieces - 1) * tiles * (_tile(bound, consumer) + made) + partial * made * tiles


def _tile(bound: Sequence[int], parts: Sequence[Any]) -> Any:
    return prod(-(-b // d) for b, d in zip(bound, parts, strict=True))


@dataclass(frozen=True)
class Cost:
    """Elements that one vertex moves, by the paper's count; repartition is that of its operands."""

    join: int
    aggregate: int
    repartition: int

    @property
    def total(self) -> int:
        return self.join + self.aggregate + self.repartition

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.join + other.join,
            self.aggregate + other.aggregate,
            self.repartition + other.repartition,
        )


def vertex_cost(graph: EinGraph, name: str, partitionings: Mapping[str, Parts]) -> Cost:
    """The cost of a computed vertex. Inputs are free in any partitioning, and `partitionings` need not have them."""
    vertex, parts = graph[name], partitionings[name]
    einsum = vertex.einsum
    assert einsum is not None, f"{name} is an input"
    moved = 0
    for operand, source in enumerate(vertex.inputs):
        if not graph[source].is_input:
            made = partitionings[source][: len(graph[source].bound)]
            moved += cost_repartition(needs(einsum, operand, parts), made, graph[source].bound)
    return Cost(
        cost_join(einsum, parts, operand_bounds(graph, vertex)),
        cost_aggregate(einsum, parts),
        moved,
    )


def graph_costs(graph: EinGraph, partitionings: Mapping[str, Parts]) -> dict[str, Cost]:
    return {
        vertex.name: vertex_cost(graph, vertex.name, partitionings) for vertex in graph.computed
    }


def graph_cost(graph: EinGraph, partitionings: Mapping[str, Parts]) -> int:
    """The paper's cost of a decomposition."""
    return sum(cost.total for cost in graph_costs(graph, partitionings).values())


def operand_bounds(graph: EinGraph, vertex: Vertex) -> tuple[Bound, ...]:
    return tuple(graph[name].bound for name in vertex.inputs)
