"""The paper's EinDecomp: the three costs, the dynamic program, linearisation (paper, sections 7 and 8).

Costs are upper bounds on the elements moved, in whole numbers, with the errata of the paper put right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.einsum import EinSum
from einmpi.plan.viable import Parts, vectors, viable

__all__ = ["Cost", "Parts", "cost_aggregate", "cost_join", "cost_repartition", "decompose", "graph_cost",
           "graph_costs", "is_tree", "longest_paths", "needs", "vertex_cost", "viable"]  # fmt: skip

Bound = tuple[int, ...]
Table = npt.NDArray[Any]  # whole numbers: int64, or Python's own where those could overflow

_CHUNK = 1 << 20  # cells of a repartition table made at a time
_KEPT = 1 << 24  # cells of repartition tables kept


# ---- the three costs ------------------------------------------------------------------------------------------------
# They take whole numbers, or numpy columns of them to price many partitionings at once.


def needs(einsum: EinSum, operand: int, parts: Sequence[Any], whole: int = 1) -> tuple[Any, ...]:
    """The partitioning of an operand, d[ℓX; ℓXY]. A label in two dimensions cuts both; a gathered one stays whole."""
    at = {label: k for k, label in enumerate(einsum.labels)}
    return tuple(parts[at[entry]] if isinstance(entry, str) else whole for entry in einsum.operands[operand])


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
        partial = partial | (-(-b // p) > -(-b // c))  # a tile has elements that the consumer's tile does not need
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
    return Cost(cost_join(einsum, parts, _bounds(graph, vertex)), cost_aggregate(einsum, parts), moved)


def graph_costs(graph: EinGraph, partitionings: Mapping[str, Parts]) -> dict[str, Cost]:
    return {vertex.name: vertex_cost(graph, vertex.name, partitionings) for vertex in graph.computed}


def graph_cost(graph: EinGraph, partitionings: Mapping[str, Parts]) -> int:
    """The paper's cost of a decomposition."""
    return sum(cost.total for cost in graph_costs(graph, partitionings).values())


def _bounds(graph: EinGraph, vertex: Vertex) -> tuple[Bound, ...]:
    return tuple(graph[name].bound for name in vertex.inputs)


# ---- the algorithm --------------------------------------------------------------------------------------------------


def decompose(graph: EinGraph, ranks: int) -> dict[str, Parts]:
    """The paper's partitioning of every computed vertex; of equally good ones the first in the order of `viable`.

    Exact where no computed tensor is used twice. Other graphs are cut into paths, the longest first, and each path is
    optimised as if nothing but the edges from each of its vertices to the next existed.
    """
    tables = _Tables(graph, ranks, _number_type(graph, ranks))
    if is_tree(graph):
        inputs = {vertex.name for vertex in graph.inputs}
        found = _optimise(tables, {v.name: tuple(n for n in v.inputs if n not in inputs) for v in graph.computed})
    else:
        found = {}
        for path in longest_paths(graph):
            found |= _optimise(tables, {path[0]: (), **{after: (before,) for before, after in pairwise(path)}})
    return {vertex.name: found[vertex.name] for vertex in graph.computed}


def is_tree(graph: EinGraph) -> bool:
    """Whether no computed tensor is used twice: the graph is a tree, or several."""
    uses = [name for vertex in graph.computed for name in vertex.inputs if not graph[name].is_input]
    return len(uses) == len(set(uses))


def longest_paths(graph: EinGraph) -> Iterator[tuple[str, ...]]:
    """The computed vertices in paths: each time the longest among those left, the first by the vertices' order."""
    left = {vertex.name: 0 for vertex in graph.computed}  # → vertices on the longest path that starts there
    changed = list(left)
    while left:
        for name in reversed(changed):
            left[name] = 1 + max((left[user] for user in graph.consumers[name] if user in left), default=0)
        path = [max(left, key=left.__getitem__)]
        while left[path[-1]] > 1:
            path.append(next(n for n in graph.consumers[path[-1]] if left.get(n) == left[path[-1]] - 1))
        yield tuple(path)
        above = set(path)  # only what leads into the path may have got shorter
        for name in reversed(left):
            if not above.isdisjoint(graph.consumers[name]):
                above.add(name)
        for name in path:
            del left[name]
        changed = [name for name in left if name in above]


@dataclass(frozen=True)
class _Space:
    """The viable vectors of a vertex as rows, those with the same output partitioning next to each other."""

    key: object
    rows: npt.NDArray[np.int64]
    starts: npt.NDArray[np.intp]  # of the groups with one output partitioning
    made: npt.NDArray[np.int64]  # that partitioning, group by group


@dataclass(frozen=True)
class _Tables:
    """Costs of all partitionings, by what they depend on: equal vertices share them."""

    graph: EinGraph
    ranks: int
    kind: type
    spaces: dict[object, _Space] = field(default_factory=dict)
    own: dict[object, Table] = field(default_factory=dict)
    moves: dict[object, Table] = field(default_factory=dict)


def _number_type(graph: EinGraph, ranks: int) -> type:
    """int64 if no sum at one vertex can overflow it, else Python's integers."""
    most = 0
    for vertex in graph.computed:
        bounds = (vertex.bound, *_bounds(graph, vertex))
        # parts × tile is below b + parts in each dimension, and a tile of uneven cuts meets twice as many.
        most = max(most, sum(4 * ranks * prod(2 * (b + min(b, ranks)) for b in bound) for bound in bounds))
    return np.int64 if most < 2**62 else object


def _optimise(tables: _Tables, producers: dict[str, tuple[str, ...]]) -> dict[str, Parts]:
    """Cheapest vectors of some vertices, given in order, each with those producers whose edges count.

    `least` is the paper's M[v, d_Z], less its smallest entry: only differences matter, and these stay small.
    """
    totals: dict[str, Table] = {}
    least: dict[str, Table] = {}
    for name, sources in producers.items():
        total = _own(tables, name)
        for source in sources:
            total = total + _cheapest(tables, source, name, least[source])
        groups = np.minimum.reduceat(total, _space(tables, name).starts)
        totals[name], least[name] = total, groups - groups.min()
    group: dict[str, int] = {}
    found: dict[str, Parts] = {}
    for name in reversed(producers):
        space = _space(tables, name)
        chosen = group.get(name, int(least[name].argmin()))
        start, *end = space.starts[chosen : chosen + 2]
        row = space.rows[start + int(totals[name][start : end[0] if end else None].argmin())]
        found[name] = tuple(map(int, row))
        for source in producers[name]:
            uses = _uses(tables, source, name)
            moved = _moved(tables, source, uses, _needed(uses, row[None])[0])
            group[source] = int((least[source] + moved[:, 0]).argmin())
    return found


def _space(tables: _Tables, name: str) -> _Space:
    einsum = _einsum(tables, name)
    extents = tuple(extent for _, extent in einsum.extents)
    key = (extents, len(einsum.output))
    if key not in tables.spaces:
        found = vectors(extents, tables.ranks)
        rows = np.array(found, np.int64).reshape(len(found), len(extents))
        made = rows[:, : len(einsum.output)]
        starts = np.flatnonzero(np.append(True, (made[1:] != made[:-1]).any(axis=1)))
        tables.spaces[key] = _Space(key, rows, starts, made[starts])
    return tables.spaces[key]


def _own(tables: _Tables, name: str) -> Table:
    """Join and aggregation cost of each vector."""
    einsum, space = _einsum(tables, name), _space(tables, name)
    bounds = _bounds(tables.graph, tables.graph[name])
    key = (space.key, bounds, tuple(_positions(einsum, operand) for operand in range(len(bounds))))
    if key not in tables.own:
        parts = list(space.rows.T.astype(tables.kind))
        cost = cost_join(einsum, parts, bounds) + cost_aggregate(einsum, parts)
        tables.own[key] = np.broadcast_to(np.asarray(cost, tables.kind), len(space.rows))
    return tables.own[key]


def _cheapest(tables: _Tables, source: str, name: str, least: Table) -> Table:
    """For each vector of a vertex: what it costs at least to make an operand and bring it into the right tiles."""
    target, origin, uses = _space(tables, name), _space(tables, source), _uses(tables, source, name)
    needed, which = _needed(uses, target.rows)
    step = max(1, _CHUNK // len(least))
    best = []
    for k in range(0, len(needed), step):
        key = (origin.key, target.key, uses, k)
        moved = tables.moves.get(key)
        if moved is None:
            moved = _moved(tables, source, uses, needed[k : k + step])
            if moved.size + sum(kept.size for kept in tables.moves.values()) <= _KEPT:
                tables.moves[key] = moved
        best.append((least[:, None] + moved).min(axis=0))
    return np.concatenate(best)[which]


def _uses(tables: _Tables, source: str, name: str) -> tuple[tuple[int, ...], ...]:
    """For each operand of a vertex that is this tensor: the positions of its labels, -1 for a gathered dimension."""
    einsum, inputs = _einsum(tables, name), tables.graph[name].inputs
    return tuple(_positions(einsum, k) for k, tensor in enumerate(inputs) if tensor == source)


def _positions(einsum: EinSum, operand: int) -> tuple[int, ...]:
    return needs(einsum, operand, range(len(einsum.labels)), -1)


def _needed(uses: tuple[tuple[int, ...], ...], rows: npt.NDArray[np.int64]) -> tuple[Table, npt.NDArray[np.intp]]:
    """The different partitionings of the uses, side by side, that the vectors need; and which of them each needs."""
    whole = np.ones((len(rows), 1), np.int64)  # the column that -1 picks
    wanted = np.hstack([rows, whole])[:, [k for use in uses for k in use]]
    if not wanted.shape[1]:
        return wanted[:1], np.zeros(len(rows), np.intp)
    different, which = np.unique(wanted, axis=0, return_inverse=True)
    return different, which.reshape(-1)


def _moved(tables: _Tables, source: str, uses: tuple[tuple[int, ...], ...], needed: Table) -> Table:
    """Repartition cost, [output partitioning of the source, needed partitionings]."""
    bound, made = tables.graph[source].bound, _space(tables, source).made
    producer = list(made.T[:, :, None].astype(tables.kind))
    consumer = needed.T[:, None, :].astype(tables.kind).reshape(len(uses), len(bound), 1, len(needed))
    cost = sum(cost_repartition(list(columns), producer, bound) for columns in consumer)
    return np.broadcast_to(np.asarray(cost, tables.kind), (len(made), len(needed)))


def _einsum(tables: _Tables, name: str) -> EinSum:
    einsum = tables.graph[name].einsum
    assert einsum is not None
    return einsum
