"""Pictures made of boxes, curves and texts, each with a style; written as SVG."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from typing import TypeAlias

from einmpi.planner.text.compare import CurvePoint
from einmpi.report.arrange import Point
from einmpi.units import show_bytes

SANS = "'DejaVu Sans', 'Segoe UI', Helvetica, Arial, sans-serif"
MONO = "'DejaVu Sans Mono', Menlo, Consolas, monospace"
# The width of a character relative to the font size.
MONO_WIDTH = 0.602
BOLD_WIDTH = 0.64
PLAIN_WIDTH = 0.57


@dataclass(frozen=True)
class Style:
    """Colours on a light background, then on a dark one. Text has a fill and no edge."""

    fill: str
    edge: str
    dark_fill: str
    dark_edge: str
    line: float = 1.2
    dashes: str = ""


# Text has a contrast of at least 4.5 to its background in both colour schemes.
STYLES = {
    "input": Style("#ffffff", "#57606a", "#161b22", "#8b949e"),
    "vertex": Style("#f6f8fa", "#57606a", "#1c2128", "#8b949e"),
    "output": Style("#e9f7ec", "#1a7f37", "#12261a", "#3fb950", 2.2),
    "more": Style("#fff8e5", "#9a6700", "#272115", "#d29922", 1.4, "6 4"),
    "ground": Style("#ffffff", "none", "#0d1117", "none"),
    "chip": Style("#ddf0ff", "none", "#10304f", "none"),
    "chip-partial": Style("#ffe7d1", "none", "#47260f", "none"),
    "ink": Style("#1f2328", "none", "#e6edf3", "none"),
    "faint": Style("#57606a", "none", "#9da7b3", "none"),
    "join": Style("#0550ae", "#0969da", "#79c0ff", "#58a6ff"),
    "aggregate": Style("#953800", "#bc4c00", "#ffa657", "#f0883e"),
    "repartition": Style("#6639ba", "#8250df", "#d2a8ff", "#bc8cff"),
    "stays": Style("#57606a", "#8c959f", "#9da7b3", "#6e7681"),
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
