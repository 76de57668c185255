"""Curves of the values that loops record, step by step, for the report page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from einmpi.job.loop import PREFIX as VALIDATION

WIDTH = 460.0  # of a picture
HEIGHT = 190.0
LEFT = 74.0  # of the area inside the axes
RIGHT = 10.0
TOP = 10.0
BOTTOM = 26.0
MOST_POINTS = 800  # of a curve; of more, the least and greatest of neighbours are drawn
LOGARITHMIC_RATIO = 1e3  # between the greatest and the least value, if all are positive


def curves(measured: Mapping[str, Any]) -> str:
    """Return the curves of all loops, given the JSON of a run; empty if nothing was recorded."""
    loops = measured.get("loops") or [measured.get("loop") or {}]
    found = []
    for number, loop in enumerate(loops, 1):
        which = f"loop {number}: " if len(loops) > 1 else ""
        for name, values in loop.get("history", {}).items():
            numbers = [_plain(value) for value in values]
            if name.startswith(VALIDATION):
                numbers = _held(numbers)
            found.append(_figure(f"{which}{name}", numbers))
    if not found:
        return ""
    return f'<div class="curves">{"".join(found)}</div>'


def _plain(value: Any) -> float | None:
    """Return a recorded value as a real number: of a complex one the magnitude, None for nan."""
    if isinstance(value, list):
        if None in value:
            return None
        return math.hypot(*value)
    return None if value is None else float(value)


def _held(values: Sequence[float | None]) -> list[float | None]:
    """Return the numbers of validations, each until the next one: most steps have none."""
    found: list[float | None] = []
    last = None
    for value in values:
        last = last if value is None else value
        found.append(last)
    return found


def _figure(title: str, values: Sequence[float | None]) -> str:
    """Return the curve of one tensor with its title and its last value."""
    last = values[-1] if values else None
    last_text = "not finite" if last is None else f"{last:.6g}"
    caption = f"{title}, last {last_text}"
    return (
        f'<figure class="curve"><figcaption>{escape(caption)}</figcaption>'
        f"{_svg(caption, values)}</figure>"
    )


def _svg(caption: str, values: Sequence[float | None]) -> str:
    finite = [value for value in values if value is not None]
    low = min(finite, default=0.0)
    high = max(finite, default=1.0)
    is_logarithmic = low > 0 and high / low >= LOGARITHMIC_RATIO
    if is_logarithmic:
        bottom = math.log10(low)
        top = math.log10(high)
    else:
        bottom = low
        top = high
    if bottom == top:
        margin = abs(bottom) / 10 or 1.0
        bottom -= margin
        top += margin

    def place(step: int, value: float) -> str:
        height = math.log10(value) if is_logarithmic else value
        # Halves, because the difference of two large numbers may be infinite.
        share = (height / 2 - bottom / 2) / (top / 2 - bottom / 2)
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / max(1, len(values) - 1)
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share
        return f"{x:.1f},{y:.1f}"

    lines = ""
    for points in _connected(values):
        places = " ".join(place(step, value) for step, value in points)
        if len(points) == 1:
            x, y = places.split(",")
            lines += f'<circle class="curve-line" cx="{x}" cy="{y}" r="1.5"/>'
        else:
            lines += f'<polyline class="curve-line" points="{places}"/>'
    base = HEIGHT - BOTTOM
    axis = f'<path class="curve-axis" d="M{LEFT},{TOP}V{base}H{WIDTH - RIGHT}"/>'
    scale = " (log)" if is_logarithmic else ""
    texts = [
        _text(LEFT - 6, TOP + 9, f"{high:.4g}", "end"),
        _text(LEFT - 6, base, f"{low:.4g}", "end"),
        _text(LEFT, HEIGHT - 8, "step 0", "start"),
        _text(WIDTH - RIGHT, HEIGHT - 8, f"{len(values) - 1:,}{scale}", "end"),
    ]
    return (
        f'<svg role="img" aria-label="{escape(caption)}" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" '
        f'width="{WIDTH:g}" height="{HEIGHT:g}">{axis}{lines}{"".join(texts)}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="curve-text" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{text}</text>'


def _connected(values: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    """Return the points of a curve, which ends and begins anew where values are not finite."""
    found: list[list[tuple[int, float]]] = [[]]
    width = max(1, math.ceil(2 * len(values) / MOST_POINTS))  # steps that two points stand for
    for first in range(0, len(values), width):
        neighbours: list[tuple[int, float]] = []
        has_gap = False
        for step in range(first, min(first + width, len(values))):
            value = values[step]
            if value is None:
                has_gap = True
            else:
                neighbours.append((step, value))
        if neighbours:
            extremes = {min(neighbours, key=_value), max(neighbours, key=_value)}
            found[-1] += sorted(extremes)
        if has_gap:
            found.append([])
    return [points for points in found if points]


def _value(point: tuple[int, float]) -> float:
    return point[1]
