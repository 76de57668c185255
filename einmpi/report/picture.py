"""Pictures made of boxes, curves and texts, written as SVG; where the boxes of a graph go."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right, insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from einmpi.planner.text.compare import CurvePoint
from einmpi.units import show_bytes

SANS = "'DejaVu Sans', 'Segoe UI', Helvetica, Arial, sans-serif"
MONO = "'DejaVu Sans Mono', Menlo, Consolas, monospace"
# The width of a character relative to the font size.
MONO_WIDTH = 0.602
BOLD_WIDTH = 0.64
PLAIN_WIDTH = 0.57


class Style(NamedTuple):
    """Colours on a light background, then on a dark one. Text has a fill and no edge."""

    fill: str
    edge: str
    dark_fill: str
    dark_edge: str
    line: str = "1.2"  # its width
    dashes: str = ""


# Text has a contrast of at least 4.5 to its background in both colour schemes.
_STYLES = """
input         #ffffff  #57606a  #161b22  #8b949e
vertex        #f6f8fa  #57606a  #1c2128  #8b949e
output        #e9f7ec  #1a7f37  #12261a  #3fb950  2.2
more          #fff8e5  #9a6700  #272115  #d29922  1.4  6,4
ground        #ffffff  none     #0d1117  none
chip          #ddf0ff  none     #10304f  none
chip-partial  #ffe7d1  none     #47260f  none
ink           #1f2328  none     #e6edf3  none
faint         #57606a  none     #9da7b3  none
join          #0550ae  #0969da  #79c0ff  #58a6ff
aggregate     #953800  #bc4c00  #ffa657  #f0883e
repartition   #6639ba  #8250df  #d2a8ff  #bc8cff
stays         #57606a  #8c959f  #9da7b3  #6e7681
"""
STYLES = {
    name: Style(*cells) for name, *cells in (row.split() for row in _STYLES.strip().splitlines())
}


@dataclass(frozen=True)
class Box:
    """A rectangle with round corners."""

    x: float
    y: float
    width: float
    height: float
    style: str
    radius: float = 6.0


@dataclass(frozen=True)
class Curve:
    """A smooth line through points, vertical at each of them."""

    points: tuple[Point, ...]
    style: str
    line: float

    def beziers(self) -> list[tuple[Point, Point, Point, Point]]:
        """Return the cubic Bézier curves between neighbouring points."""
        pieces = []
        for (x0, y0), (x1, y1) in pairwise(self.points):
            bend = (y1 - y0) / 2
            pieces.append(((x0, y0), (x0, y0 + bend), (x1, y1 - bend), (x1, y1)))
        return pieces


@dataclass(frozen=True)
class Text:
    """One line of text; (x, y) is the start, middle or end of its baseline."""

    x: float
    y: float
    text: str
    style: str
    size: float = 12.0
    anchor: str = "start"  # or "middle", "end"
    mono: bool = False
    bold: bool = False

    @property
    def width(self) -> float:
        """An estimate: fonts differ."""
        if self.mono:
            width = MONO_WIDTH
        elif self.bold:
            width = BOLD_WIDTH
        else:
            width = PLAIN_WIDTH
        return len(self.text) * self.size * width

    def moved_to(self, x: float, y: float) -> Text:
        return replace(self, x=x, y=y)


Shape: TypeAlias = Box | Curve | Text


@dataclass(frozen=True)
class ShapeGroup:
    """Shapes that belong together, and the tooltip that they share."""

    shapes: tuple[Shape, ...]
    hint: str = ""


@dataclass(frozen=True)
class Picture:
    """Groups of shapes on a rectangle."""

    width: float
    height: float
    title: str
    groups: tuple[ShapeGroup, ...]


def shifted(group: ShapeGroup, right: float, down: float) -> ShapeGroup:
    """Return a group with all its shapes moved."""
    shapes: list[Shape] = []
    for shape in group.shapes:
        if isinstance(shape, Curve):
            points = tuple((x + right, y + down) for x, y in shape.points)
            shapes.append(replace(shape, points=points))
        else:
            shapes.append(replace(shape, x=shape.x + right, y=shape.y + down))
    return ShapeGroup(tuple(shapes), group.hint)


def svg(picture: Picture, standalone: bool = False) -> str:
    """Return SVG for a page that includes `css()`, or a standalone file with its own colours."""
    width = f"{picture.width:.0f}"
    height = f"{picture.height:.0f}"
    title = escape(picture.title)
    head = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    if standalone:
        head = f'xmlns="http://www.w3.org/2000/svg" {head} font-family="{SANS}"'
    parts = [f'<svg {head} role="img" aria-label="{title}">']
    if standalone:
        parts.append(f"<title>{title}</title>")
    for group in picture.groups:
        shapes = "".join(_shape(shape, standalone) for shape in group.shapes)
        if group.hint:
            shapes = f"<g><title>{escape(group.hint)}</title>{shapes}</g>"
        parts.append(shapes)
    parts.append("</svg>")
    return "\n".join(parts)


def _shape(shape: Shape, standalone: bool) -> str:
    if isinstance(shape, Text):
        return _text(shape, standalone)
    if isinstance(shape, Box):
        return _box(shape, standalone)
    return _curve(shape, standalone)


def _text(shape: Text, standalone: bool) -> str:
    if standalone:
        look = f'fill="{STYLES[shape.style].fill}"'
        if shape.mono:
            look += f' font-family="{MONO}"'
    elif shape.mono:
        look = f'class="t-{shape.style} m"'
    else:
        look = f'class="t-{shape.style}"'
    if shape.anchor != "start":
        look += f' text-anchor="{shape.anchor}"'
    if shape.bold:
        look += ' font-weight="bold"'
    place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size:g}"'
    return f"<text {place} {look}>{escape(shape.text)}</text>"


def _box(shape: Box, standalone: bool) -> str:
    look = f'class="s-{shape.style}"'
    if standalone:
        style = STYLES[shape.style]
        look = f'fill="{style.fill}" stroke="{style.edge}" stroke-width="{style.line}"'
        if style.dashes:
            look += f' stroke-dasharray="{style.dashes}"'
    place = f'x="{shape.x:.1f}" y="{shape.y:.1f}"'
    size = f'width="{shape.width:.1f}" height="{shape.height:.1f}" rx="{shape.radius:g}"'
    return f"<rect {place} {size} {look}/>"


def _curve(shape: Curve, standalone: bool) -> str:
    x, y = shape.points[0]
    path = f"M{x:.1f},{y:.1f}"
    for _, *controls in shape.beziers():
        path += "C" + " ".join(f"{x:.1f},{y:.1f}" for x, y in controls)
    look = f'class="e-{shape.style}"'
    if standalone:
        look = f'fill="none" stroke="{STYLES[shape.style].edge}" stroke-opacity="0.8"'
    return f'<path d="{path}" stroke-width="{shape.line:.1f}" {look}/>'


def css() -> str:
    """Return the style sheet for pictures in a page, light and dark."""
    light = ""
    dark = ""
    for name, style in STYLES.items():
        light += _rules(name, style.fill, style.edge, style)
        dark += _rules(name, style.dark_fill, style.dark_edge, style)
    return f"{light}@media (prefers-color-scheme: dark) {{\n{dark}}}\n"


def _rules(name: str, fill: str, edge: str, style: Style) -> str:
    dashes = f" stroke-dasharray: {style.dashes};" if style.dashes else ""
    return (
        f".s-{name} {{ fill: {fill}; stroke: {edge}; stroke-width: {style.line};{dashes} }} "
        f".t-{name} {{ fill: {fill}; color: {fill}; }} "
        f".e-{name} {{ fill: none; stroke: {edge}; stroke-opacity: 0.8; background: {edge}; }}\n"
    )


def shortened(text: str, length: int) -> str:
    """Cut off what exceeds a number of characters."""
    if len(text) <= length:
        return text
    return text[: length - 1] + "…"


def overlap(one: Text, others: Sequence[Text]) -> bool:
    """Whether a text anchored in its middle covers another such text."""
    for other in others:
        near_x = abs(one.x - other.x) < (one.width + other.width) / 2 + 4
        near_y = abs(one.y - other.y) < other.size + 2
        if near_x and near_y:
            return True
    return False


# ---- memory picture ------------------------------------------------------------------------------
#
# Bytes moved under each memory limit, as a picture (`einmpi plan --memory-curve FILE.svg`).


WIDTH = 560.0
HEIGHT = 320.0
LEFT = 90.0  # of the area inside the axes
RIGHT = 30.0
TOP = 40.0
BOTTOM = 50.0
LINE = 1.8  # width of the curve
AXIS_LINE = 1.0


def memory_picture(points: Sequence[CurvePoint], title: str) -> Picture:
    """Return a falling staircase: bytes moved, over the logarithm of the memory limit."""
    low = math.log(points[0].limit)
    high = math.log(points[-1].limit)
    most = max(1, *(point.nbytes for point in points))

    def place(point: CurvePoint) -> tuple[float, float]:
        share = (math.log(point.limit) - low) / (high - low) if high > low else 0.0
        x = LEFT + (WIDTH - LEFT - RIGHT) * share
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * point.nbytes / most
        return x, y

    base = HEIGHT - BOTTOM
    right = WIDTH - RIGHT
    frame: tuple[Shape, ...] = (
        Curve(((LEFT, TOP), (LEFT, base)), "stays", AXIS_LINE),
        Curve(((LEFT, base), (right, base)), "stays", AXIS_LINE),
        Text(LEFT, TOP - 16, f"{title}: bytes moved by memory limit of a rank", "ink", bold=True),
        Text(LEFT - 8, TOP + 4, show_bytes(most), "faint", anchor="end"),
        Text(LEFT - 8, base, "0 B", "faint", anchor="end"),
        Text(LEFT, base + 20, show_bytes(points[0].limit), "faint"),
        Text(right, base + 20, show_bytes(points[-1].limit), "faint", anchor="end"),
    )
    groups = [ShapeGroup(frame)]
    for point, following in itertools.pairwise(points):
        x, y = place(point)
        next_x, next_y = place(following)
        step = (
            Curve(((x, y), (next_x, y)), "join", LINE),
            Curve(((next_x, y), (next_x, next_y)), "join", LINE),
        )
        hint = f"{show_bytes(point.limit)}: {show_bytes(point.nbytes)} moved"
        groups.append(ShapeGroup(step, hint))
    return Picture(WIDTH, HEIGHT, title, tuple(groups))


# ---- arrangement ---------------------------------------------------------------------------------
#
# Positions for a layered drawing of a graph: few crossings, short straight edges.


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
