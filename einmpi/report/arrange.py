"""Positions for a layered drawing of a graph: few crossings, short straight edges."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

Point: TypeAlias = tuple[float, float]
Edge: TypeAlias = tuple[str, str]  # source, target

# Pixels.
GAP_X = 28.0
GAP_Y = 64.0
MARGIN = 16.0
LANE_WIDTH = 18.0  # the room that an edge takes where it passes a layer
PORT_GAP = 30.0  # between two edges that end at the same box

LANE_WEIGHT = 4.0  # how much more the position of a lane counts than that of a box
SWEEPS = 12
MAX_LANES = 3000  # with more lanes, edges over more than MAX_LANE_LAYERS layers go straight
MAX_LANE_LAYERS = 8


@dataclass(frozen=True)
class Arrangement:
    """Where the boxes and edges of a drawing go, and its size."""

    centres: Mapping[str, Point]
    routes: Mapping[
        Edge, tuple[Point, ...]
    ]  # from the bottom of the source to the top of the target
    width: float
    height: float


def arrange(
    sizes: Mapping[str, Point], edges: Sequence[Edge], sources: Collection[str]
) -> Arrangement:
    """Place boxes of these sizes, named in an order in which every edge goes forwards.

    `sources` without edges into them are put just above the first box that needs them. Equal graphs
    get equal drawings.
    """
    if not sizes:
        return Arrangement({}, {}, 2 * MARGIN, 2 * MARGIN)
    layer = _layers(list(sizes), edges, sources)
    lanes = _lanes(layer, edges)
    widths = {name: size[0] for name, size in sizes.items()}
    rows: list[list[str]] = [[] for _ in range(max(layer.values()) + 1)]
    for name in sizes:
        rows[layer[name]].append(name)
    above: dict[str, list[str]] = {name: [] for name in sizes}  # neighbours in the layer above
    below: dict[str, list[str]] = {name: [] for name in sizes}
    for (source, target), names in lanes.items():
        for number, name in enumerate(names):
            rows[layer[source] + 1 + number].append(name)
            widths[name] = LANE_WIDTH
            above[name] = []
            below[name] = []
        goes_straight = len(names) < layer[target] - layer[source] - 1
        if goes_straight:
            continue
        for upper, lower in pairwise((source, *names, target)):
            below[upper].append(lower)
            above[lower].append(upper)
    rows = _order(rows, above, below)
    x = _columns(rows, widths, above, below)
    return _place(sizes, rows, x, lanes, edges)


def _layers(
    names: Sequence[str], edges: Sequence[Edge], sources: Collection[str]
) -> dict[str, int]:
    """Return the layer of each box: the length of the longest path to it."""
    predecessors: dict[str, list[str]] = {name: [] for name in names}
    for source, target in edges:
        predecessors[target].append(source)
    layer: dict[str, int] = {}
    for name in names:
        layer[name] = max((layer[source] + 1 for source in predecessors[name]), default=0)
    first_use: dict[str, int] = {}
    for source, target in edges:
        first_use[source] = min(first_use.get(source, layer[target]), layer[target])
    for name in sources:
        if not predecessors[name] and name in first_use:
            layer[name] = first_use[name] - 1
    return layer


def _lanes(layer: Mapping[str, int], edges: Sequence[Edge]) -> dict[Edge, tuple[str, ...]]:
    """Name the places where each edge passes a layer. A name with a space cannot be a tensor's."""
    passed = {(source, target): layer[target] - layer[source] - 1 for source, target in edges}
    limit = max(layer.values())
    if sum(passed.values()) > MAX_LANES:
        limit = MAX_LANE_LAYERS
    found: dict[Edge, tuple[str, ...]] = {}
    for (source, target), count in passed.items():
        if count > limit:
            found[source, target] = ()
        else:
            found[source, target] = tuple(f"{source} {target} {k}" for k in range(count))
    return found


# ---- the order in a layer ------------------------------------------------------------------------


def _order(
    rows: list[list[str]], above: Mapping[str, list[str]], below: Mapping[str, list[str]]
) -> list[list[str]]:
    """Sort each layer by its neighbours above, then below, and so on; return the best order."""
    best = rows
    fewest = _crossings(rows, below)
    for sweep in range(SWEEPS):
        downwards = sweep % 2 == 0
        rows = _swept(rows, above) if downwards else _swept(rows[::-1], below)[::-1]
        crossings = _crossings(rows, below)
        if crossings < fewest:
            best = rows
            fewest = crossings
        if not fewest:
            break
    return best


def _swept(rows: list[list[str]], neighbours: Mapping[str, list[str]]) -> list[list[str]]:
    """Sort each layer but the first by the mean position of the neighbours in the layer before."""
    swept = [rows[0]]
    for row in rows[1:]:
        before = swept[-1]
        position = {name: (k + 0.5) / len(before) for k, name in enumerate(before)}
        wanted = {}
        for k, name in enumerate(row):
            known = [position[other] for other in neighbours[name] if other in position]
            if known:
                wanted[name] = sum(known) / len(known)
            else:
                wanted[name] = (k + 0.5) / len(row)
        swept.append(sorted(row, key=wanted.__getitem__))
    return swept


def _crossings(rows: list[list[str]], below: Mapping[str, list[str]]) -> int:
    count = 0
    for row, following in pairwise(rows):
        position = {name: k for k, name in enumerate(following)}
        seen: list[int] = []  # where the edges from the boxes further left end, sorted
        for name in row:
            ends = sorted(position[other] for other in below[name] if other in position)
            for end in ends:
                count += len(seen) - bisect_right(seen, end)
            for end in ends:
                insort(seen, end)
    return count


# ---- coordinates ---------------------------------------------------------------------------------


def _columns(
    rows: list[list[str]],
    widths: Mapping[str, float],
    above: Mapping[str, list[str]],
    below: Mapping[str, list[str]],
) -> dict[str, float]:
    """Return the middle of each box, as near to the mean of its neighbours as its row allows."""
    x: dict[str, float] = {}
    for row in rows:
        x.update(zip(row, _apart([0.0] * len(row), row, widths), strict=True))
    for sweep in range(SWEEPS):
        downwards = sweep % 2 == 0
        for row in rows if downwards else rows[::-1]:
            wanted = []
            for name in row:
                if sweep >= SWEEPS - 2:
                    neighbours = above[name] + below[name]
                else:
                    neighbours = above[name] if downwards else below[name]
                if neighbours:
                    wanted.append(sum(x[other] for other in neighbours) / len(neighbours))
                else:
                    wanted.append(x[name])
            x.update(zip(row, _apart(wanted, row, widths), strict=True))
    left = min(x[name] - widths[name] / 2 for name in x)
    return {name: value - left + MARGIN for name, value in x.items()}


@dataclass
class _Pool:
    """Neighbours in a row that move together, because they would overlap otherwise."""

    total: float  # the sum of weight times wanted position, relative to the start of the row
    weight: float
    count: int

    @property
    def mean(self) -> float:
        return self.total / self.weight


def _apart(wanted: Sequence[float], row: Sequence[str], widths: Mapping[str, float]) -> list[float]:
    """Return the positions nearest to the wanted ones that keep the order and the gaps.

    This is a weighted least squares problem, solved by pooling neighbours that are too close.
    """
    offsets = []  # of the boxes of a row without spare room
    offset = 0.0
    for k, name in enumerate(row):
        if k:
            offset += (widths[row[k - 1]] + widths[name]) / 2 + GAP_X
        offsets.append(offset)
    pools: list[_Pool] = []
    for name, position, offset in zip(row, wanted, offsets, strict=True):
        weight = LANE_WEIGHT if widths[name] == LANE_WIDTH else 1.0
        pool = _Pool(weight * (position - offset), weight, 1)
        while pools and pools[-1].mean > pool.mean:
            before = pools.pop()
            pool.total += before.total
            pool.weight += before.weight
            pool.count += before.count
        pools.append(pool)
    means: list[float] = []
    for pool in pools:
        means += [pool.mean] * pool.count
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]


def _place(
    sizes: Mapping[str, Point],
    rows: list[list[str]],
    x: Mapping[str, float],
    lanes: Mapping[Edge, tuple[str, ...]],
    edges: Sequence[Edge],
) -> Arrangement:
    y: dict[str, float] = {}
    top = MARGIN
    for row in rows:
        height = max((sizes[name][1] for name in row if name in sizes), default=0.0)
        for name in row:
            y[name] = top + height / 2
        top += height + GAP_Y
    starts = _ports(sizes, x, lanes, at_source=True)
    stops = _ports(sizes, x, lanes, at_source=False)
    routes: dict[Edge, tuple[Point, ...]] = {}
    for edge in edges:
        source, target = edge
        start = starts[edge], y[source] + sizes[source][1] / 2
        stop = stops[edge], y[target] - sizes[target][1] / 2
        passed = [(x[lane], y[lane]) for lane in lanes[edge]]
        routes[edge] = (start, *passed, stop)
    right = max(x[name] + sizes[name][0] / 2 for name in sizes)
    for names in lanes.values():
        for lane in names:
            right = max(right, x[lane])
    centres = {name: (x[name], y[name]) for name in sizes}
    return Arrangement(centres, routes, right + MARGIN, top - GAP_Y + MARGIN)


def _ports(
    sizes: Mapping[str, Point],
    x: Mapping[str, float],
    lanes: Mapping[Edge, tuple[str, ...]],
    at_source: bool,
) -> dict[Edge, float]:
    """Return where edges leave or reach their boxes: sorted by direction, so they do not cross."""
    next_x: dict[Edge, float] = {}  # of the first point of each edge after the box
    for edge, names in lanes.items():
        source, target = edge
        path = (source, *names, target)
        next_x[edge] = x[path[1]] if at_source else x[path[-2]]
    edges_at: dict[str, list[Edge]] = {}
    for edge in sorted(lanes, key=next_x.__getitem__):
        box = edge[0] if at_source else edge[1]
        edges_at.setdefault(box, []).append(edge)
    found: dict[Edge, float] = {}
    for name, edges in edges_at.items():
        step = min(PORT_GAP, sizes[name][0] / (len(edges) + 1))
        for k, edge in enumerate(edges):
            found[edge] = x[name] + (k - (len(edges) - 1) / 2) * step
    return found
