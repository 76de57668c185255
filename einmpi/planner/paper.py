"""The paper's EinDecomp algorithm (paper, section 8).

A dynamic program on trees; other graphs are linearised into paths first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from itertools import chain, pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import unique
from einmpi.planner.mesh import divisors

# ---- viable --------------------------------------------------------------------------------------
#
# The partitionings of an EinSum that make exactly as many kernel calls as there are ranks.
#
# Paper, sections 6 and 8.1.


Parts = tuple[int, ...]  # of each label of an EinSum, or of each dimension of a tensor
Extents = tuple[int, ...]

MAX_VECTORS = 8192  # of one EinSum; enough for all of them with 6 labels at 4096 ranks


def viable(einsum: EinSum, ranks: int) -> list[Parts]:
    """Return every way to cut the labels into exactly `ranks` kernel calls.

    No label is cut into more parts than its extent. The prime factors of `ranks` are balls in the
    labels' buckets. The list is in rising lexicographic order of the paper's vectors, whose labels
    stand in the order of the operands, ℓX ⊙ ℓY. Where the labels are too small for `ranks` calls,
    the list has the vectors with the most calls below that. Beyond MAX_VECTORS vectors only the
    longest labels are cut, as many of them as keep the list that short.
    """
    order = join_order(einsum)
    vectors = _vectors(tuple(einsum.extents[position][1] for position in order), ranks)
    # Back from the paper's order of the labels to that of EinSum.labels.
    place = [order.index(position) for position in range(len(order))]
    found = []
    for vector in vectors:
        found.append(tuple(vector[position] for position in place))
    return found


def join_order(einsum: EinSum) -> tuple[int, ...]:
    """Return the positions of the labels in the order of the operands; other labels come last."""
    labels = unique(einsum.bounded_labels(), einsum.labels)
    return tuple(einsum.labels.index(label) for label in labels)


def fullest(extents: Extents, ranks: int) -> Parts:
    """Return the cuts of labels with the largest product that divides `ranks`.

    The first label takes as much as it can: extents (4, 100) at 8 ranks are cut (4, 2).
    """
    ways = _ways(extents, ranks)
    left = max(ways[0])
    parts = []
    for extent, later in zip(extents, ways[1:], strict=True):
        cut = max(_cuts(left, extent, later))
        parts.append(cut)
        left //= cut
    return tuple(parts)


@cache
def _vectors(extents: Extents, ranks: int) -> tuple[Parts, ...]:
    """Return all vectors of parts with as many kernel calls as possible, at most `ranks`.

    A vector is begun only if the later labels can complete it.
    """
    ways = _ways(extents, ranks)
    calls = max(ways[0])
    if ways[0][calls] > MAX_VECTORS:
        extents = _fewer_labels(extents, ranks, calls)
        ways = _ways(extents, ranks)
    # Beginnings of vectors, each with the product that is left for the later labels.
    begun: list[tuple[Parts, int]] = [((), calls)]
    for extent, later in zip(extents, ways[1:], strict=True):
        cuts_of = {left: _cuts(left, extent, later) for left in divisors(calls)}
        longer = []
        for vector, left in begun:
            for cut in cuts_of[left]:
                longer.append(((*vector, cut), left // cut))
        begun = longer
    return tuple(vector for vector, _ in begun)


def _cuts(left: int, extent: int, later: dict[int, int]) -> list[int]:
    """Return the cuts of a label that the later labels can complete to the product `left`."""
    return [cut for cut in divisors(left) if cut <= max(extent, 1) and left // cut in later]


def _ways(extents: Extents, ranks: int) -> list[dict[int, int]]:
    """Return, for the labels from each position on: product of parts → number of vectors.

    For extents (2, 4) and 4 ranks: [{1: 1, 2: 2, 4: 2}, {1: 1, 2: 1, 4: 1}, {1: 1}].
    """
    ways = [{1: 1}]
    for extent in reversed(extents):
        cuts = [cut for cut in divisors(ranks) if cut <= max(extent, 1)]
        here: dict[int, int] = {}
        for later_product, count in ways[-1].items():
            for cut in cuts:
                product = later_product * cut
                if ranks % product == 0:
                    here[product] = here.get(product, 0) + count
        ways.append(here)
    ways.reverse()
    return ways


def _fewer_labels(extents: Extents, ranks: int, calls: int) -> Extents:
    """Return the extents with those of the shortest labels set to 1, so that they stay uncut.

    As many labels are kept as MAX_VECTORS allows, but enough for `calls` kernel calls.
    """
    longest_first = sorted(range(len(extents)), key=lambda label: (-extents[label], label))
    best: Extents | None = None
    for count in range(1, len(extents) + 1):
        kept = longest_first[:count]
        fewer = tuple(extent if label in kept else 1 for label, extent in enumerate(extents))
        vectors = _ways(fewer, ranks)[0].get(calls, 0)
        if vectors and (best is None or vectors <= MAX_VECTORS):
            best = fewer
        if vectors > MAX_VECTORS:
            break
    return best or extents


# ---- costs ---------------------------------------------------------------------------------------
#
# The paper's costs of a decomposition: upper bounds on the elements moved (paper, section 7).
#
# Parts are whole numbers, or numpy columns of them: then many partitionings are priced at once.
# docs/paper_notes.md lists the errata that are corrected here.


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

    def times(self, steps: int) -> Cost:
        """Return what a vertex moves that is computed in all steps of a recurrence."""
        return Cost(steps * self.join, steps * self.aggregate, steps * self.repartition)


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
        total += vertex.steps * vertex_cost(graph, vertex.name, partitionings).total
    return total


def operand_bounds(graph: EinGraph, vertex: Vertex) -> tuple[Bound, ...]:
    """Return the shapes of a vertex's operands."""
    return tuple(graph[name].bound for name in vertex.inputs)


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
