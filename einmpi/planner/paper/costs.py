"""The paper's costs of a decomposition: upper bounds on the elements moved (paper, section 7).

Parts are whole numbers, or numpy columns of them: then many partitionings are priced at once.
docs/paper_notes.md lists the errata that are corrected here.
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
    """Return the partitioning that an operand must have, d[ℓX; ℓXY].

    A label in two dimensions cuts both. A gathered dimension is not cut: it gets `whole`.
    """
    position = {label: k for k, label in enumerate(einsum.labels)}
    needed = []
    for entry in einsum.operands[operand]:
        needed.append(parts[position[entry]] if isinstance(entry, str) else whole)
    return tuple(needed)


def cost_join(einsum: EinSum, parts: Sequence[Any], bounds: Sequence[Bound] | None = None) -> Any:
    """Return the elements moved to the kernel calls: one tile of every operand for each call.

    The operands' own `bounds` are needed only where a dimension is gathered: the labels do not
    tell its extent.
    """
    if bounds is None:
        extent: dict[Any, int] = dict(einsum.extents)
        bounds = [tuple(extent[entry] for entry in index) for index in einsum.operands]
    tiles = [_tile(bound, needs(einsum, operand, parts)) for operand, bound in enumerate(bounds)]
    return prod(parts) * sum(tiles)


def cost_aggregate(einsum: EinSum, parts: Sequence[Any]) -> Any:
    """Return the elements moved to add up the results of the kernel calls.

    In each group of n_agg tiles, all but one move.
    """
    output = len(einsum.output)
    groups = prod(parts[:output])
    tiles_per_group = prod(parts[output:])
    return groups * (tiles_per_group - 1) * _tile(einsum.bound, parts[:output])


def cost_repartition(consumer: Sequence[Any], producer: Sequence[Any], bound: Bound) -> Any:
    """Return the elements moved to cut a tensor as the consumer needs it, not as it was made.

    Each consumer tile travels to its pieces one after another, and a producer tile to every tile
    it is a piece of; 0 when the partitionings are equal.
    """
    pieces = 1  # producer tiles that make one consumer tile
    partial = False  # whether a producer tile has elements that a consumer tile does not need
    for extent, needed, made in zip(bound, consumer, producer, strict=True):
        pieces = pieces * -(-made // needed)
        partial = partial | (-(-extent // made) > -(-extent // needed))
    consumer_tiles = prod(consumer)
    producer_tile = _tile(bound, producer)
    moved = (pieces - 1) * consumer_tiles * (_tile(bound, consumer) + producer_tile)
    return moved + partial * producer_tile * consumer_tiles


def _tile(bound: Sequence[int], parts: Sequence[Any]) -> Any:
    """Return the elements of the largest tile."""
    return prod(-(-extent // part) for extent, part in zip(bound, parts, strict=True))


@dataclass(frozen=True)
class Cost:
    """Elements that one vertex moves; the repartition is that of its operands."""

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
    """Return the cost of a computed vertex.

    Inputs are free in any partitioning, and `partitionings` need not contain them.
    """
    vertex = graph[name]
    parts = partitionings[name]
    einsum = vertex.computed_einsum
    moved = 0
    for operand, source in enumerate(vertex.inputs):
        bound = graph[source].bound
        if not graph[source].is_input:
            made = partitionings[source][: len(bound)]
            moved += cost_repartition(needs(einsum, operand, parts), made, bound)
    join = cost_join(einsum, parts, operand_bounds(graph, vertex))
    return Cost(join, cost_aggregate(einsum, parts), moved)


def graph_cost(graph: EinGraph, partitionings: Mapping[str, Parts]) -> int:
    """Return the paper's cost of a decomposition."""
    total = 0
    for vertex in graph.computed:
        total += vertex_cost(graph, vertex.name, partitionings).total
    return total


def operand_bounds(graph: EinGraph, vertex: Vertex) -> tuple[Bound, ...]:
    """Return the shapes of a vertex's operands."""
    return tuple(graph[name].bound for name in vertex.inputs)
