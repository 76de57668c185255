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
WIDTH = 430.0  # without the names of lines
HEIGHT = 340.0
LEFT = 78.0
RIGHT = 20.0
LETTER = 6.6  # the width of most letters
TOP = 52.0  # for a title and the unit
BOTTOM = 46.0
BAR = 18.0  # height of a bar and the space after it
LONGEST_BAR = 270.0
ROOM_OF_NUMBER = 40.0
MARK = 3.5  # half of its size


def line_plot(
    title: str,
    x_label: str,
    unit: str,
    lines: Mapping[str, Points],
    *,
    log_y: bool = True,
) -> str:
    """Return lines through points; the horizontal axis is logarithmic.

    Where the vertical one is, too, points that are not above zero are left out.
    """
    shown = {}
    for name, line in lines.items():
        places = sorted((x, y) for x, y in line if y > 0 or not log_y)
        if places:
            shown[name] = places
    points = [point for line in shown.values() for point in line]
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

    parts = [_heading(title, unit), _axes(x_label)]
    for x in xs:
        across = place(x, points[0][1])[0]
        parts.append(_text(across, HEIGHT - BOTTOM + 16, f"{x:,g}", "middle"))
    for y in _ticks(bottom, top, log_y):
        up = place(xs[0], y)[1]
        parts.append(f"<path d='M{LEFT:g},{up:.1f}H{WIDTH - RIGHT:g}' stroke='#d0d7de'/>")
        parts.append(_text(LEFT - 6, up + 4, _short(y), "end"))
    for number, (name, line) in enumerate(shown.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [place(x, y) for x, y in line]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        width = 3 if _is_ours(name) else 1.3
        parts.append(
            f"<polyline points='{joined}' fill='none' stroke='{colour}' stroke-width='{width}'/>"
        )
        mark = MARKS[number % len(MARKS)]
        parts += [_mark(mark, x, y, colour) for x, y in places]
        across, up = WIDTH + 8, TOP + 12 + 18 * number
        parts.append(_mark(mark, across, up - 4, colour))
        parts.append(_text(across + 10, up, name, "start"))
    width = WIDTH + 34 + LETTER * max(map(len, shown))
    return _svg(title, max(width, _heading_width(title, unit)), HEIGHT, parts)


def bar_plot(
    title: str, unit: str, bars: Sequence[tuple[str, float]], *, is_ratio: bool = False
) -> str:
    """Return a horizontal bar for each name and number, from zero; empty without any.

    Bars of einmpi and of its planner are darker than those of others. Ratios have a line at 1.
    """
    if not bars:
        return ""
    left = 16 + LETTER * max(len(name) for name, _ in bars)
    height = TOP + BAR * len(bars) + 12
    largest = max(value for _, value in bars) or 1.0
    scale = LONGEST_BAR / (max(largest, 1.0) if is_ratio else largest)
    parts = [_heading(title, unit)]
    if is_ratio:
        line = f"M{left + scale:.1f},{TOP - 4:g}V{height - 12:g}"
        parts.append(f"<path d='{line}' stroke='#000000' stroke-dasharray='3,2'/>")
    has_ours = any(_is_ours(name) for name, _ in bars)
    for number, (name, value) in enumerate(bars):
        colour = OTHERS if has_ours and not _is_ours(name) else COLOURS[0]
        up = TOP + BAR * number
        length = scale * max(value, 0.0)
        parts.append(_text(left - 8, up + 11, name, "end"))
        parts.append(
            f"<rect x='{left:g}' y='{up:g}' width='{length:.1f}' height='{BAR - 5:g}' "
            f"fill='{colour}'/>"
        )
        end = length
        if is_ratio and length <= scale < length + ROOM_OF_NUMBER:
            end = scale  # the number would lie on the line
        parts.append(_text(left + end + 6, up + 11, _short(value), "start"))
    width = max(left + LONGEST_BAR + 90, _heading_width(title, unit))
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
    if len(found) > 1:
        return found
    return [10 ** (bottom + (top - bottom) * share) for share in (0.1, 0.5, 0.9)]


def _heading(title: str, unit: str) -> str:
    """Return the title of a plot, and below it what its numbers are."""
    if not title:
        return _text(8, 36, unit, "start", is_bold=True)
    return _text(8, 18, title, "start", is_bold=True) + _text(8, 36, unit, "start")


def _heading_width(title: str, unit: str) -> float:
    return 16 + 7.2 * max(len(title), len(unit))


def _axes(x_label: str) -> str:
    axes = f"M{LEFT:g},{TOP:g}V{HEIGHT - BOTTOM:g}H{WIDTH - RIGHT:g}"
    return f"<path d='{axes}' fill='none' stroke='#57606a'/>" + _text(
        (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_label, "middle"
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


def _text(x: float, y: float, text: str, anchor: str, *, is_bold: bool = False) -> str:
    weight = " font-weight='bold'" if is_bold else ""
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'{weight}>{escape(text)}</text>"


def _short(value: float) -> str:
    """Return a number for a reader: 0.0123, 12.3, 691,200, 1.23 T."""
    if abs(value) < 1e3:
        return f"{value:.3g}"
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G")):
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:,.0f}"


def _svg(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' role='img' aria-label='{escape(title)}' "
        f"viewBox='0 0 {width:g} {height:g}' width='{width:g}' height='{height:g}' {FONT}>"
        f"<rect width='{width:g}' height='{height:g}' fill='#ffffff'/>"
        f"{''.join(parts)}</svg>"
    )
