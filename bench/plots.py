"""Plots as SVG texts: lines over a logarithmic axis, and bars. They need no package."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

# Colours that people with any colour vision can tell apart, and marks for those who see none.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
OTHERS = "#a3b8cc"  # bars of peers
MARKS = ("circle", "square", "diamond", "triangle")
FONT = "font-family='Helvetica, Arial, sans-serif' font-size='12'"
WIDTH = 560.0
HEIGHT = 340.0
LEFT = 78.0
RIGHT = 130.0  # for the names of lines
TOP = 34.0
BOTTOM = 46.0
BAR = 18.0  # height of a bar and the space after it
MARK = 3.5  # half of its size


def line_plot(
    title: str,
    x_label: str,
    y_label: str,
    lines: Mapping[str, Points],
    *,
    log_y: bool = True,
) -> str:
    """Return lines through points with positive coordinates; the horizontal axis is logarithmic."""
    points = [point for line in lines.values() for point in line]
    if not points:
        return ""
    xs = sorted({x for x, _ in points})
    bottom, top = _range([y for _, y in points], log_y)

    def place(x: float, y: float) -> tuple[float, float]:
        span = math.log(xs[-1] / xs[0]) or 1.0
        across = math.log(x / xs[0]) / span
        height = math.log10(y) if log_y else y
        up = (height - bottom) / (top - bottom)
        width = WIDTH - LEFT - RIGHT
        return LEFT + width * across, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * up

    parts = [_frame(title, x_label, y_label)]
    for x in xs:
        across = place(x, points[0][1])[0]
        parts.append(_text(across, HEIGHT - BOTTOM + 16, f"{x:g}", "middle"))
    for y in _ticks(bottom, top, log_y):
        up = place(xs[0], y)[1]
        parts.append(f"<path d='M{LEFT:g},{up:.1f}H{WIDTH - RIGHT:g}' stroke='#d0d7de'/>")
        parts.append(_text(LEFT - 6, up + 4, _short(y), "end"))
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [place(x, y) for x, y in line]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f"<polyline points='{joined}' fill='none' stroke='{colour}'/>")
        mark = MARKS[number % len(MARKS)]
        parts += [_mark(mark, x, y, colour) for x, y in places]
        across, up = WIDTH - RIGHT + 14, TOP + 12 + 18 * number
        parts.append(_mark(mark, across, up - 4, colour))
        parts.append(_text(across + 10, up, name, "start"))
    return _svg(title, WIDTH, HEIGHT, parts)


def bar_plot(title: str, unit: str, bars: Sequence[tuple[str, float]]) -> str:
    """Return a horizontal bar for each name and number, from zero; empty without any.

    Bars of einmpi and of its planner are darker than those of others.
    """
    if not bars:
        return ""
    left = 16 + 6.6 * max(len(name) for name, _ in bars)
    longest_line = 16 + 7.2 * (len(title) + len(unit) + 2)
    height = TOP + BAR * len(bars) + 12
    width = max(left + 360.0, longest_line)
    largest = max(value for _, value in bars) or 1.0
    heading = f"{title}: {unit}" if title else unit
    parts = [_text(8, 20, heading, "start", is_bold=True)]
    has_ours = any(_is_ours(name) for name, _ in bars)
    for number, (name, value) in enumerate(bars):
        colour = OTHERS if has_ours and not _is_ours(name) else COLOURS[0]
        up = TOP + BAR * number
        length = 270.0 * max(value, 0.0) / largest
        parts.append(_text(left - 8, up + 11, name, "end"))
        parts.append(
            f"<rect x='{left:g}' y='{up:g}' width='{length:.1f}' height='{BAR - 5:g}' "
            f"fill='{colour}'/>"
        )
        parts.append(_text(left + length + 6, up + 11, _short(value), "start"))
    return _svg(title, width, height, parts)


def _is_ours(name: str) -> bool:
    return "einmpi" in name or "eindecomp" in name


def _range(values: Sequence[float], log: bool) -> tuple[float, float]:
    """Return the ends of the vertical axis: of a log scale the exponents, else from zero."""
    if not log:
        return 0.0, max(values) or 1.0
    bottom = math.log10(min(values))
    top = math.log10(max(values))
    margin = 0.05 * (top - bottom) or 0.3
    return bottom - margin, top + margin


def _ticks(bottom: float, top: float, log: bool) -> list[float]:
    """Return the numbers beside the vertical axis."""
    if not log:
        return [top * step / 4 for step in range(5)]
    steps = (1, 2, 5) if top - bottom < 2 else (1,)
    found = []
    for exponent in range(math.floor(bottom), math.ceil(top) + 1):
        for step in steps:
            if bottom <= exponent + math.log10(step) <= top:
                found.append(step * 10.0**exponent)
    return found


def _frame(title: str, x_label: str, y_label: str) -> str:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    axes = f"M{LEFT:g},{TOP:g}V{HEIGHT - BOTTOM:g}H{WIDTH - RIGHT:g}"
    turned = f"transform='rotate(-90 16 {middle:g})'"
    return (
        _text(8, 20, title, "start", is_bold=True)
        + f"<path d='{axes}' fill='none' stroke='#57606a'/>"
        + _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_label, "middle")
        + _text(16, middle, y_label, "middle", turned)
    )


def _mark(kind: str, x: float, y: float, colour: str) -> str:
    if kind == "circle":
        return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{MARK}' fill='{colour}'/>"
    shapes = {
        "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
        "triangle": ((0, -1.2), (1.2, 1), (-1.2, 1)),
    }
    corners = " ".join(f"{x + MARK * dx:.1f},{y + MARK * dy:.1f}" for dx, dy in shapes[kind])
    return f"<polygon points='{corners}' fill='{colour}'/>"


def _text(
    x: float, y: float, text: str, anchor: str, more: str = "", *, is_bold: bool = False
) -> str:
    weight = " font-weight='bold'" if is_bold else ""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'{weight} {more}>{escape(text)}</text>"
    )


def _short(value: float) -> str:
    """Return a number for a reader: 0.0123, 12.3, 691,200, 1.23e+12."""
    if 1e3 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _svg(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' role='img' aria-label='{escape(title)}' "
        f"viewBox='0 0 {width:g} {height:g}' width='{width:g}' height='{height:g}' {FONT}>"
        f"<rect width='{width:g}' height='{height:g}' fill='#ffffff'/>"
        f"{''.join(parts)}</svg>"
    )
