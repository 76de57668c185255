"""Where the boxes of a layered drawing of a graph go: layers by longest path, few crossings, short straight edges."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

Point: TypeAlias = tuple[float, float]
Edge: TypeAlias = tuple[str, str]

GAP_X, GAP_Y, MARGIN = 28.0, 64.0, 16.0
LANE = 18.0  # the width of an edge that passes a layer
PORT = 30.0  # between two edges that end at the same box
STRAIGHT = 4.0  # how much more it counts where such an edge goes than where a box is
SWEEPS = 12
MOST_LANES = 3000  # with more of them, edges over more than MOST_LAYERS layers go straight
MOST_LAYERS = 8


@dataclass(frozen=True)
class Arrangement:
    centres: Mapping[str, Point]
    routes: Mapping[
        Edge, tuple[Point, ...]
    ]  # from the bottom of the one box to the top of the other
    width: float
    height: float


def arrange(
    sizes: Mapping[str, Point], edges: Sequence[Edge], sources: Collection[str]
) -> Arrangement:
    """Place boxes of these sizes, named in an order in which every edge goes forwards.

    `sources` without edges into them are put just above the first box that needs them. Equal graphs get equal drawings.
    """
    if not sizes:
        return Arrangement({}, {}, 2 * MARGIN, 2 * MARGIN)
    layer = _layers(list(sizes), edges, sources)
    lanes = _lanes(layer, edges)
    rows: list[list[str]] = [[] for _ in range(max(layer.values()) + 1)]
    for name in sizes:
        rows[layer[name]].append(name)
    width = {name: size[0] for name, size in sizes.items()}
    links: list[Edge] = []  # between neighbouring layers
    for (a, b), names in lanes.items():
        for k, name in enumerate(names):
            rows[layer[a] + 1 + k].append(name)
            width[name] = LANE
        chain = (a, *names, b)
        if len(names) == layer[b] - layer[a] - 1:
            links += pairwise(chain)
    above, below = _neighbours(width, links, 1), _neighbours(width, links, 0)
    rows = _order(rows, above, below)
    x = _columns(rows, width, above, below)
    return _place(sizes, rows, x, lanes, edges)


def _layers(
    names: Sequence[str], edges: Sequence[Edge], sources: Collection[str]
) -> dict[str, int]:
    before: dict[str, list[str]] = {name: [] for name in names}
    for a, b in edges:
        before[b].append(a)
    layer: dict[str, int] = {}
    for name in names:
        layer[name] = max((layer[a] + 1 for a in before[name]), default=0)
    first: dict[str, int] = {}
    for a, b in edges:
        first[a] = min(first.get(a, layer[b]), layer[b])
    for name in sources:
        if not before[name] and name in first:
            layer[name] = first[name] - 1
    return layer


def _lanes(layer: Mapping[str, int], edges: Sequence[Edge]) -> dict[Edge, tuple[str, ...]]:
    """For each edge the names of the places where it passes a layer. A name with a space is no tensor's."""
    spans = {(a, b): layer[b] - layer[a] - 1 for a, b in edges}
    limit = MOST_LAYERS if sum(spans.values()) > MOST_LANES else max(layer.values())
    return {
        (a, b): tuple(f"{a} {b} {k}" for k in range(span)) if span <= limit else ()
        for (a, b), span in spans.items()
    }


def _neighbours(names: Collection[str], links: Sequence[Edge], of: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {name: [] for name in names}
    for link in links:
        found[link[of]].append(link[1 - of])
    return found


# ---- the order in a layer -------------------------------------------------------------------------------------------


def _order(
    rows: list[list[str]], above: Mapping[str, list[str]], below: Mapping[str, list[str]]
) -> list[list[str]]:
    """Each box near the mean of its neighbours in the layer above, then in the one below, and so on: the best seen."""
    best, fewest = rows, _crossings(rows, below)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        rows = _swept(rows if down else rows[::-1], above if down else below)
        rows = rows if down else rows[::-1]
        crossings = _crossings(rows, below)
        if crossings < fewest:
            best, fewest = rows, crossings
        if not fewest:
            break
    return best


def _swept(rows: list[list[str]], neighbours: Mapping[str, list[str]]) -> list[list[str]]:
    swept = [rows[0]]
    for row in rows[1:]:
        place = {name: (k + 0.5) / len(swept[-1]) for k, name in enumerate(swept[-1])}
        wish = {}
        for k, name in enumerate(row):
            known = [place[other] for other in neighbours[name] if other in place]
            wish[name] = sum(known) / len(known) if known else (k + 0.5) / len(row)
        swept.append(sorted(row, key=wish.__getitem__))
    return swept


def _crossings(rows: list[list[str]], below: Mapping[str, list[str]]) -> int:
    count = 0
    for row, following in pairwise(rows):
        place = {name: k for k, name in enumerate(following)}
        seen: list[int] = []
        for name in row:
            ends = sorted(place[other] for other in below[name] if other in place)
            count += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
    return count


# ---- coordinates ----------------------------------------------------------------------------------------------------


def _columns(
    rows: list[list[str]],
    width: Mapping[str, float],
    above: Mapping[str, list[str]],
    below: Mapping[str, list[str]],
) -> dict[str, float]:
    """The middle of each box: as near to the mean of its neighbours as the boxes beside it allow."""
    x: dict[str, float] = {}
    for row in rows:
        x.update(zip(row, _apart([0.0] * len(row), row, width), strict=True))
    for sweep in range(SWEEPS):
        for row in rows if sweep % 2 == 0 else rows[::-1]:
            wishes = []
            for name in row:
                ends = (
                    (above[name] if sweep % 2 == 0 else below[name])
                    if sweep < SWEEPS - 2
                    else (above[name] + below[name])
                )
                wishes.append(sum(x[end] for end in ends) / len(ends) if ends else x[name])
            x.update(zip(row, _apart(wishes, row, width), strict=True))
    left = min(x[name] - width[name] / 2 for name in x)
    return {name: value - left + MARGIN for name, value in x.items()}


def _apart(wishes: Sequence[float], row: Sequence[str], width: Mapping[str, float]) -> list[float]:
    """The positions nearest to the wishes, by least squares, that keep the order and the gaps."""
    offset, offsets = 0.0, []
    for k, name in enumerate(row):
        if k:
            offset += (width[row[k - 1]] + width[name]) / 2 + GAP_X
        offsets.append(offset)
    weights = [STRAIGHT if width[name] == LANE else 1.0 for name in row]
    pools: list[
        tuple[float, float, int]
    ] = []  # wishes that must move together: their sum, weight and number
    for wish, off, weight in zip(wishes, offsets, weights, strict=True):
        total, heavy, count = weight * (wish - off), weight, 1
        while pools and pools[-1][0] / pools[-1][1] > total / heavy:
            before = pools.pop()
            total, heavy, count = total + before[0], heavy + before[1], count + before[2]
        pools.append((total, heavy, count))
    means = [total / heavy for total, heavy, count in pools for _ in range(count)]
    return [mean + off for mean, off in zip(means, offsets, strict=True)]


def _place(
    sizes: Mapping[str, Point],
    rows: list[list[str]],
    x: Mapping[str, float],
    lanes: Mapping[Edge, tuple[str, ...]],
    edges: Sequence[Edge],
) -> Arrangement:
    y, top = {}, MARGIN
    for row in rows:
        height = max((sizes[name][1] for name in row if name in sizes), default=0.0)
        for name in row:
            y[name] = top + height / 2
        top += height + GAP_Y
    starts, stops = (_ports(sizes, x, lanes, end) for end in (0, 1))
    routes = {}
    for edge in edges:
        a, b = edge
        start = starts[edge], y[a] + sizes[a][1] / 2
        stop = stops[edge], y[b] - sizes[b][1] / 2
        routes[edge] = (start, *((x[lane], y[lane]) for lane in lanes[edge]), stop)
    right = max(x[name] + sizes[name][0] / 2 for name in sizes)
    right = max([right, *(x[lane] for names in lanes.values() for lane in names)])
    return Arrangement(
        {name: (x[name], y[name]) for name in sizes}, routes, right + MARGIN, top - GAP_Y + MARGIN
    )


def _ports(
    sizes: Mapping[str, Point],
    x: Mapping[str, float],
    lanes: Mapping[Edge, tuple[str, ...]],
    end: int,
) -> dict[Edge, float]:
    """Where edges leave their boxes (end 0) or reach them (end 1), in the order of where they go: they do not cross."""
    near = {edge: x[(edge[0], *names, edge[1])[(1, -2)[end]]] for edge, names in lanes.items()}
    at: dict[str, list[Edge]] = {}
    for edge in sorted(lanes, key=near.__getitem__):
        at.setdefault(edge[end], []).append(edge)
    found = {}
    for name, edges in at.items():
        step = min(PORT, sizes[name][0] / (len(edges) + 1))
        for k, edge in enumerate(edges):
            found[edge] = x[name] + (k - (len(edges) - 1) / 2) * step
    return found
