"""The paper's EinDecomp algorithm: the dynamic program and the linearisation of general graphs (paper, section 8)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
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

_CHUNK = 1 << 20  # cells of a repartition table made at a time


def decompose(graph: EinGraph, ranks: int) -> dict[str, Parts]:
    """The paper's partitioning of every computed vertex; of equally good ones the first in the order of `viable`.

    Exact where no computed tensor is used twice. Other graphs are cut into paths, the longest first, and each path is
    optimised as if nothing but the edges from each of its vertices to the next existed.
    """
    tables = _Tables(graph, ranks, _number_type(graph, ranks))
    if is_tree(graph):
        inputs = {vertex.name for vertex in graph.inputs}
        found = _optimise(
            tables, {v.name: tuple(n for n in v.inputs if n not in inputs) for v in graph.computed}
        )
    else:
        found = {}
        for path in longest_paths(graph):
            found |= _optimise(
                tables, {path[0]: (), **{after: (before,) for before, after in pairwise(path)}}
            )
    return {vertex.name: found[vertex.name] for vertex in graph.computed}


def is_tree(graph: EinGraph) -> bool:
    """Whether no computed tensor is used twice: the graph is a tree, or several."""
    uses = [name for vertex in graph.computed for name in vertex.inputs if not graph[name].is_input]
    return len(uses) == len(set(uses))


def longest_paths(graph: EinGraph) -> Iterator[tuple[str, ...]]:
    """The computed vertices in paths: each time the longest among those left, the first by the vertices' order."""
    left = {
        vertex.name: 0 for vertex in graph.computed
    }  # → vertices on the longest path that starts there
    changed = list(left)
    while left:
        for name in reversed(changed):
            left[name] = 1 + max(
                (left[user] for user in graph.consumers[name] if user in left), default=0
            )
        path = [max(left, key=left.__getitem__)]
        while left[path[-1]] > 1:
            path.append(
                next(n for n in graph.consumers[path[-1]] if left.get(n) == left[path[-1]] - 1)
            )
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
    """The viable vectors of a vertex as rows, and the groups of those with the same output partitioning."""

    key: object
    rows: npt.NDArray[np.int64]
    made: npt.NDArray[np.int64]  # the output partitioning of each group
    group: npt.NDArray[np.intp]  # of each row


@dataclass(frozen=True)
class _Tables:
    """Costs of all partitionings, by what they depend on: equal vertices share them."""

    graph: EinGraph
    ranks: int
    kind: type
    spaces: dict[object, _Space] = field(default_factory=dict)
    own: dict[object, Table] = field(default_factory=dict)
    best: dict[object, Table] = field(default_factory=dict)


def _number_type(graph: EinGraph, ranks: int) -> type:
    """int64 if no sum at one vertex can overflow it, else Python's integers."""
    most = 0
    for vertex in graph.computed:
        bounds = (vertex.bound, *operand_bounds(graph, vertex))
        # parts × tile is below b + parts in each dimension, and a tile of uneven cuts meets twice as many.
        most = max(
            most, sum(4 * ranks * prod(2 * (b + min(b, ranks)) for b in bound) for bound in bounds)
        )
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
        totals[name], least[name] = total, _grouped(total - total.min(), _space(tables, name))
    found: dict[str, Parts] = {}
    for name in reversed(producers):
        row = _space(tables, name).rows[totals[name].argmin()]
        found[name] = tuple(map(int, row))
        for source in producers[
            name
        ]:  # now that its user is known, each of its vectors costs that repartition too
            uses = _uses(tables, source, name)
            moved = _moved(tables, source, uses, _needed(uses, row[None])[0])
            totals[source] = totals[source] + moved[_space(tables, source).group, 0]
    return found


def _grouped(costs: Table, space: _Space) -> Table:
    """The smallest cost in each group."""
    order = np.argsort(space.group, kind="stable")
    return np.minimum.reduceat(
        costs[order], np.searchsorted(space.group[order], np.arange(len(space.made)))
    )


def _space(tables: _Tables, name: str) -> _Space:
    if name not in tables.spaces:
        einsum = _einsum(tables, name)
        key = (
            tuple(extent for _, extent in einsum.extents),
            len(einsum.output),
            join_order(einsum),
        )
        if key not in tables.spaces:
            found = viable(einsum, tables.ranks)
            rows = np.array(found, np.int64).reshape(len(found), len(einsum.labels))
            tables.spaces[key] = _Space(key, rows, *_different(rows[:, : len(einsum.output)]))
        tables.spaces[name] = tables.spaces[key]
    return tables.spaces[name]


def _different(rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.intp]]:
    """The rows, each once, and which of these each row is."""
    if not rows.shape[1]:
        return rows[:1], np.zeros(len(rows), np.intp)
    once, which = np.unique(rows, axis=0, return_inverse=True)
    return once, which.reshape(-1)


def _own(tables: _Tables, name: str) -> Table:
    """Join and aggregation cost of each vector."""
    einsum, space = _einsum(tables, name), _space(tables, name)
    bounds = operand_bounds(tables.graph, tables.graph[name])
    key = (space.key, bounds, tuple(_positions(einsum, operand) for operand in range(len(bounds))))
    if key not in tables.own:
        parts = list(space.rows.T.astype(tables.kind))
        cost = cost_join(einsum, parts, bounds) + cost_aggregate(einsum, parts)
        tables.own[key] = np.broadcast_to(np.asarray(cost, tables.kind), len(space.rows))
    return tables.own[key]


def _cheapest(tables: _Tables, source: str, name: str, least: Table) -> Table:
    """For each vector of a vertex: what it costs at least to make an operand and bring it into the right tiles."""
    target, origin, uses = _space(tables, name), _space(tables, source), _uses(tables, source, name)
    costs = blake2b(repr(least.tolist()).encode()).digest()
    key = (origin.key, target.key, uses, costs)  # repeated layers soon ask the same again
    if key not in tables.best:
        needed, which = _needed(uses, target.rows)
        step = max(1, _CHUNK // len(least))
        chunks = [needed[k : k + step] for k in range(0, len(needed), step)]
        best = [
            (least[:, None] + _moved(tables, source, uses, chunk)).min(axis=0) for chunk in chunks
        ]
        tables.best[key] = np.concatenate(best)[which]
    return tables.best[key]


def _uses(tables: _Tables, source: str, name: str) -> tuple[tuple[int, ...], ...]:
    """For each operand of a vertex that is this tensor: the positions of its labels, -1 for a gathered dimension."""
    einsum, inputs = _einsum(tables, name), tables.graph[name].inputs
    return tuple(_positions(einsum, k) for k, tensor in enumerate(inputs) if tensor == source)


def _positions(einsum: EinSum, operand: int) -> tuple[int, ...]:
    return needs(einsum, operand, range(len(einsum.labels)), -1)


def _needed(
    uses: tuple[tuple[int, ...], ...], rows: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.intp]]:
    """The different partitionings of the uses, side by side, that the vectors need; and which of them each needs."""
    whole = np.ones((len(rows), 1), np.int64)  # the column that -1 picks
    return _different(np.hstack([rows, whole])[:, [k for use in uses for k in use]])


def _moved(tables: _Tables, source: str, uses: tuple[tuple[int, ...], ...], needed: Table) -> Table:
    """Repartition cost, [output partitioning of the source, needed partitionings]."""
    bound, made = tables.graph[source].bound, _space(tables, source).made
    producer = list(made.T[:, :, None].astype(tables.kind))
    consumer: Table = (
        needed.T[:, None, :].astype(tables.kind).reshape(len(uses), len(bound), 1, len(needed))
    )
    cost = sum(cost_repartition(list(columns), producer, bound) for columns in consumer)
    return np.broadcast_to(np.asarray(cost, tables.kind), (len(made), len(needed)))


def _einsum(tables: _Tables, name: str) -> EinSum:
    einsum = tables.graph[name].einsum
    assert einsum is not None
    return einsum
