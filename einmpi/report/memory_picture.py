"""Bytes moved under each memory limit, as a picture (`einmpi plan --memory-curve FILE.svg`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from einmpi.planner.saving_memory.memory_curve import CurvePoint
from einmpi.report.picture import Curve, Picture, Shape, ShapeGroup, Text
from einmpi.units import show_bytes

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
