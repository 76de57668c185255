"""Pictures as boxes, curves and texts, each with a style; as SVG for a page or for a file of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TypeAlias

from einmpi.report.arrange import Point

SANS = "'DejaVu Sans', 'Segoe UI', Helvetica, Arial, sans-serif"
MONO = "'DejaVu Sans Mono', Menlo, Consolas, monospace"


@dataclass(frozen=True)
class Style:
    """Colours on a light ground, then on a dark one. Text has no edge."""

    fill: str
    edge: str
    dark_fill: str
    dark_edge: str
    line: float = 1.2
    dashes: str = ""


# Text has a contrast of at least 4.5 to its ground, in both.
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
    x: float
    y: float
    width: float
    height: float
    style: str
    radius: float = 6.0


@dataclass(frozen=True)
class Curve:
    """Through points, up and down at each of them."""

    points: tuple[Point, ...]
    style: str
    line: float

    def beziers(self) -> list[tuple[Point, Point, Point, Point]]:
        pieces = []
        for (x0, y0), (x1, y1) in pairwise(self.points):
            bend = (y1 - y0) / 2
            pieces.append(((x0, y0), (x0, y0 + bend), (x1, y1 - bend), (x1, y1)))
        return pieces


@dataclass(frozen=True)
class Text:
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
        """About: fonts differ."""
        return len(self.text) * self.size * (0.602 if self.mono else 0.64 if self.bold else 0.57)


Shape: TypeAlias = Box | Curve | Text


@dataclass(frozen=True)
class Group:
    """Shapes that are one thing, and what a pointer on them tells."""

    shapes: tuple[Shape, ...]
    hint: str = ""


@dataclass(frozen=True)
class Picture:
    width: float
    height: float
    title: str
    groups: tuple[Group, ...]


def svg(picture: Picture, of_its_own: bool = False) -> str:
    """For a page, whose style sheet has `css()`; or with colours and fonts in it, as a file of its own."""
    size = f'width="{picture.width:.0f}" height="{picture.height:.0f}"'
    space = 'xmlns="http://www.w3.org/2000/svg" ' if of_its_own else ""
    fonts = f' font-family="{SANS}"' if of_its_own else ""
    parts = [
        f'<svg {space}viewBox="0 0 {picture.width:.0f} {picture.height:.0f}" {size}{fonts} role="img" '
        f'aria-label="{escape(picture.title)}">'
    ]
    if of_its_own:
        parts.append(f"<title>{escape(picture.title)}</title>")
    for group in picture.groups:
        shapes = "".join(_shape(shape, of_its_own) for shape in group.shapes)
        parts.append(
            f"<g><title>{escape(group.hint)}</title>{shapes}</g>" if group.hint else shapes
        )
    return "\n".join([*parts, "</svg>"])


def _shape(shape: Shape, of_its_own: bool) -> str:
    style = STYLES[shape.style]
    if isinstance(shape, Text):
        look = (
            f'fill="{style.fill}"' if of_its_own else f'class="t-{shape.style}{" m" * shape.mono}"'
        )
        look += f' font-family="{MONO}"' if of_its_own and shape.mono else ""
        look += f' text-anchor="{shape.anchor}"' if shape.anchor != "start" else ""
        look += ' font-weight="bold"' if shape.bold else ""
        return f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size:g}" {look}>{escape(shape.text)}</text>'
    look = f'class="s-{shape.style}"'
    if isinstance(shape, Box):
        if of_its_own:
            dashes = f' stroke-dasharray="{style.dashes}"' if style.dashes else ""
            look = f'fill="{style.fill}" stroke="{style.edge}" stroke-width="{style.line}"{dashes}'
        return (
            f'<rect x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}" '
            f'rx="{shape.radius:g}" {look}/>'
        )
    x, y = shape.points[0]
    path = f"M{x:.1f},{y:.1f}"
    for _, *rest in shape.beziers():
        path += "C" + " ".join(f"{x:.1f},{y:.1f}" for x, y in rest)
    look = (
        f'fill="none" stroke="{style.edge}" stroke-opacity="0.8"'
        if of_its_own
        else f'class="e-{shape.style}"'
    )
    return f'<path d="{path}" stroke-width="{shape.line:.1f}" {look}/>'


def css() -> str:
    """The style sheet of pictures in a page, light and dark."""
    dark = "".join(
        _rules(name, style.dark_fill, style.dark_edge, style) for name, style in STYLES.items()
    )
    light = "".join(_rules(name, style.fill, style.edge, style) for name, style in STYLES.items())
    return f"{light}@media (prefers-color-scheme: dark) {{\n{dark}}}\n"


def _rules(name: str, fill: str, edge: str, style: Style) -> str:
    dashes = f" stroke-dasharray: {style.dashes};" if style.dashes else ""
    return (
        f".s-{name} {{ fill: {fill}; stroke: {edge}; stroke-width: {style.line};{dashes} }} "
        f".t-{name} {{ fill: {fill}; color: {fill}; }} "
        f".e-{name} {{ fill: none; stroke: {edge}; stroke-opacity: 0.8; background: {edge}; }}\n"
    )


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def overlap(one: Text, others: Sequence[Text]) -> bool:
    """Whether a text in the middle of its place covers another one."""
    return any(
        abs(one.x - other.x) < (one.width + other.width) / 2 + 4
        and abs(one.y - other.y) < other.size + 2
        for other in others
    )
