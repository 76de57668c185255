"""The paper's EinDecomp algorithm (paper, section 8).

A dynamic program on trees; other graphs are linearised into paths first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.graph.eingraph import EinGraph
from einmpi.graph.einsum import EinSum
from einmpi.planner.paper.costs import (
    cost_aggregate,
    cost_join,
    cost_repartition,
    needs,
    operand_bounds,
)
from einmpi.planner.paper.viable import Parts, join_order, viable

Table = npt.NDArray[Any]  # whole numbers: int64, or Python's own where those could overflow

CHUNK_CELLS = 1 << 20  # of a repartition table, made at a time
Vectors = npt.NDArray[np.int64]  # a row for each partitioning
Uses = tuple[tuple[int, ...], ...]  # of a tensor by one vertex: see `_uses`


def decompose(graph: EinGraph, ranks: int) -> dict[str, Parts]:
    """Return the paper's partitioning of every computed vertex.

    Of equally good ones, the first in the order of `viable` is taken. The result is optimal where
    no computed tensor is used twice. Other graphs are cut into paths, the longest first, and each
    path is optimised as if only the edges from each of its vertices to the next existed.
    """
    tables = _Tables(graph, ranks, _number_type(graph, ranks))
    found: dict[str, Parts] = {}
    if is_tree(graph):
        producers = {}
        for vertex in graph.computed:
            computed = [name for name in vertex.inputs if not graph[name].is_input]
            producers[vertex.name] = tuple(computed)
        found = _optimise(tables, producers)
    else:
        for path in longest_paths(graph):
            producers = {path[0]: ()}
            for before, after in pairwise(path):
                producers[after] = (before,)
            found |= _optimise(tables, producers)
    return {vertex.name: found[vertex.name] for vertex in graph.computed}


def is_tree(graph: EinGraph) -> bool:
    """Return whether no computed tensor is used twice: the graph is a tree, or several."""
    uses = []
    for vertex in graph.computed:
        uses += [name for name in vertex.inputs if not graph[name].is_input]
    return len(uses) == len(set(uses))


def longest_paths(graph: EinGraph) -> Iterator[tuple[str, ...]]:
    """Yield the computed vertices in paths: each time the longest path among those left.

    Of equally long paths, the first by the order of the vertices is taken.
    """
    # Vertex → number of vertices on the longest path that starts there.
    lengths = {vertex.name: 0 for vertex in graph.computed}
    changed = list(lengths)
    while lengths:
        for name in reversed(changed):
            users = [user for user in graph.consumers[name] if user in lengths]
            lengths[name] = 1 + max((lengths[user] for user in users), default=0)
        path = [max(lengths, key=lengths.__getitem__)]
        while lengths[path[-1]] > 1:
            left = lengths[path[-1]] - 1
            path.append(
                next(user for user in graph.consumers[path[-1]] if lengths.get(user) == left)
            )
        yield tuple(path)
        # Only paths that lead into this one may have become shorter.
        leading = set(path)
        for name in reversed(lengths):
            if not leading.isdisjoint(graph.consumers[name]):
                leading.add(name)
        for name in path:
            del lengths[name]
        changed = [name for name in lengths if name in leading]


@dataclass(frozen=True)
class _Space:
    """The viable vectors of a vertex, in groups with the same output partitioning."""

    key: object
    rows: Vectors
    made: Vectors  # the output partitioning of each group
    group: npt.NDArray[np.intp]  # of each row


@dataclass(frozen=True)
class _Tables:
    """The costs of all partitionings, by what they depend on: equal vertices share them."""

    graph: EinGraph
    ranks: int
    kind: type  # of the numbers: np.int64 or object
    spaces: dict[object, _Space] = field(default_factory=dict)  # see `_space`
    own: dict[object, Table] = field(default_factory=dict)  # see `_own_costs`
    best: dict[object, Table] = field(default_factory=dict)  # see `_cheapest`


def _number_type(graph: EinGraph, ranks: int) -> type:
    """Return int64 if no sum of costs at one vertex can overflow it, else Python's integers."""
    most = 0
    for vertex in graph.computed:
        total = 0
        for bound in (vertex.bound, *operand_bounds(graph, vertex)):
            # In each dimension, parts × tile is below extent + parts; a tile of uneven cuts meets
            # twice as many tiles.
            total += 4 * ranks * prod(2 * (extent + min(extent, ranks)) for extent in bound)
        most = max(most, total)
    return np.int64 if most < 2**62 else object


def _optimise(tables: _Tables, producers: dict[str, tuple[str, ...]]) -> dict[str, Parts]:
    """Return the cheapest vectors of some vertices.

    `producers` has the vertices in order, each with the producers whose edges count.
    """
    # Forwards: the cost of each vector of a vertex, with the cheapest way to make its operands.
    totals: dict[str, Table] = {}
    # The paper's M[v, d_Z], less its smallest entry: only differences matter, and they stay small.
    least: dict[str, Table] = {}
    for name, sources in producers.items():
        total = _own_costs(tables, name)
        for source in sources:
            total = total + _cheapest(tables, source, name, least[source])
        totals[name] = total
        least[name] = _least_of_groups(total - total.min(), _space(tables, name))

    # Backwards: users before producers. Once a user's vector is known, each vector of the producer
    # costs that repartition too.
    found: dict[str, Parts] = {}
    for name in reversed(producers):
        row = _space(tables, name).rows[totals[name].argmin()]
        found[name] = tuple(map(int, row))
        for source in producers[name]:
            uses = _uses(tables, source, name)
            needed, _ = _needed(uses, row[None])
            moved = _repartition_costs(tables, source, uses, needed)
            totals[source] = totals[source] + moved[_space(tables, source).group, 0]
    return found


def _least_of_groups(costs: Table, space: _Space) -> Table:
    """Return the smallest cost in each group of vectors."""
    order = np.argsort(space.group, kind="stable")
    first_of_group = np.searchsorted(space.group[order], np.arange(len(space.made)))
    return np.minimum.reduceat(costs[order], first_of_group)


def _space(tables: _Tables, name: str) -> _Space:
    """Return the viable vectors of a vertex; vertices with equal labels share them."""
    if name not in tables.spaces:
        einsum = tables.graph[name].computed_einsum
        extents = tuple(extent for _, extent in einsum.extents)
        key = (extents, len(einsum.output), join_order(einsum))
        if key not in tables.spaces:
            vectors = viable(einsum, tables.ranks)
            rows = np.array(vectors, np.int64).reshape(len(vectors), len(einsum.labels))
            made, group = _distinct(rows[:, : len(einsum.output)])
            tables.spaces[key] = _Space(key, rows, made, group)
        tables.spaces[name] = tables.spaces[key]
    return tables.spaces[name]


def _distinct(rows: Vectors) -> tuple[Vectors, npt.NDArray[np.intp]]:
    """Return (the distinct rows, the number of the distinct row that each row equals)."""
    if not rows.shape[1]:
        return rows[:1], np.zeros(len(rows), np.intp)
    distinct, which = np.unique(rows, axis=0, return_inverse=True)
    return distinct, which.reshape(-1)


def _own_costs(tables: _Tables, name: str) -> Table:
    """Return the join and aggregation cost of each vector of a vertex."""
    einsum = tables.graph[name].computed_einsum
    space = _space(tables, name)
    bounds = operand_bounds(tables.graph, tables.graph[name])
    positions = tuple(_positions(einsum, operand) for operand in range(len(bounds)))
    key = (space.key, bounds, positions)
    if key not in tables.own:
        parts = list(space.rows.T.astype(tables.kind))
        cost = cost_join(einsum, parts, bounds) + cost_aggregate(einsum, parts)
        tables.own[key] = np.broadcast_to(np.asarray(cost, tables.kind), len(space.rows))
    return tables.own[key]


def _cheapest(tables: _Tables, source: str, name: str, least: Table) -> Table:
    """Return, for each vector of a vertex, the least cost of making and repartitioning an operand.

    `least` is the least cost of making it in each output partitioning of its producer.
    """
    target = _space(tables, name)
    origin = _space(tables, source)
    uses = _uses(tables, source, name)
    digest = blake2b(repr(least.tolist()).encode()).digest()
    key = (origin.key, target.key, uses, digest)  # repeated layers soon ask for the same again
    if key not in tables.best:
        needed, which = _needed(uses, target.rows)
        step = max(1, CHUNK_CELLS // len(least))
        best = []
        for start in range(0, len(needed), step):
            chunk = needed[start : start + step]
            costs = least[:, None] + _repartition_costs(tables, source, uses, chunk)
            best.append(costs.min(axis=0))
        tables.best[key] = np.concatenate(best)[which]
    return tables.best[key]


def _uses(tables: _Tables, source: str, name: str) -> Uses:
    """Return, for each operand of a vertex that is this tensor, the positions of its labels.

    A gathered dimension has position −1.
    """
    einsum = tables.graph[name].computed_einsum
    uses = []
    for operand, tensor in enumerate(tables.graph[name].inputs):
        if tensor == source:
            uses.append(_positions(einsum, operand))
    return tuple(uses)


def _positions(einsum: EinSum, operand: int) -> tuple[int, ...]:
    return needs(einsum, operand, range(len(einsum.labels)), -1)


def _needed(uses: Uses, rows: Vectors) -> tuple[Vectors, npt.NDArray[np.intp]]:
    """Return (the distinct partitionings that the vectors need, which of them each needs).

    Those of several uses stand side by side.
    """
    whole = np.ones((len(rows), 1), np.int64)  # the column that position −1 picks
    columns = list(chain(*uses))
    return _distinct(np.hstack([rows, whole])[:, columns])


def _repartition_costs(tables: _Tables, source: str, uses: Uses, needed: Vectors) -> Table:
    """Return the costs [output partitioning of the source, needed partitioning]."""
    bound = tables.graph[source].bound
    made = _space(tables, source).made
    producer = list(made.T[:, :, None].astype(tables.kind))
    # [use, dimension, 1, needed partitioning]
    consumer: Table = needed.T[:, None, :].astype(tables.kind)
    consumer = consumer.reshape(len(uses), len(bound), 1, len(needed))
    cost = sum(cost_repartition(list(columns), producer, bound) for columns in consumer)
    return np.broadcast_to(np.asarray(cost, tables.kind), (len(made), len(needed)))
