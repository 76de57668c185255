"""The graph of a plan as a picture for a paper or a slide (`einmpi plan --plot`): SVG or PNG."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from io import BytesIO
from pathlib import PurePath
from typing import Any

from einmpi.errors import InputError
from einmpi.files.replace import replace_file
from einmpi.planner.plan import Plan
from einmpi.report.graph_picture import graph_picture
from einmpi.report.picture import STYLES, Box, Curve, Picture, Shape, Text, svg

PIXELS_PER_INCH = 100
POINTS_PER_PIXEL = 72 / PIXELS_PER_INCH
PNG_SCALE = 2  # pixels in the file for each pixel of the picture


def write_plot(file: str | os.PathLike[str], plan: Plan) -> None:
    """Write the graph with its cuts in the format that the file's suffix names."""
    write_picture(file, graph_picture(plan))


def write_picture(file: str | os.PathLike[str], picture: Picture) -> None:
    """Write a picture in the format that the file's suffix names."""
    check_plot(file)
    encode = ENCODERS[PurePath(file).suffix.lower()]
    replace_file(file, [encode(picture)])


def check_plot(file: str | os.PathLike[str]) -> None:
    """Raise an error if `write_plot` cannot write such a file. No plan is needed to ask."""
    suffix = PurePath(file).suffix.lower()
    if suffix not in ENCODERS:
        expected = f"a file name that ends in {' or '.join(ENCODERS)}"
        raise InputError(os.fspath(file), "unknown picture format", expected)
    if suffix == ".png" and find_spec("matplotlib") is None:
        raise InputError(
            os.fspath(file),
            "PNG pictures need matplotlib, which is not installed",
            "a file name that ends in .svg",
            "or install einmpi[plot]",
        )


def _svg_file(picture: Picture) -> bytes:
    return f"{svg(picture, standalone=True)}\n".encode()


def _png_file(picture: Picture) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(picture.width / PIXELS_PER_INCH, picture.height / PIXELS_PER_INCH))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, picture.width)
    axes.set_ylim(picture.height, 0)
    axes.axis("off")
    for group in picture.groups:
        for shape in group.shapes:
            _draw(axes, shape)
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=PIXELS_PER_INCH * PNG_SCALE)
    return drawn.getvalue()


def _draw(axes: Any, shape: Shape) -> None:
    if isinstance(shape, Box):
        _draw_box(axes, shape)
    elif isinstance(shape, Curve):
        _draw_curve(axes, shape)
    else:
        _draw_text(axes, shape)


def _draw_box(axes: Any, shape: Box) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = STYLES[shape.style]
    radius = min(shape.radius, shape.height / 2)
    box = FancyBboxPatch(
        (shape.x, shape.y),
        shape.width,
        shape.height,
        boxstyle=f"round,pad=0,rounding_size={radius}",
        facecolor=style.fill,
        edgecolor=style.edge,
        linewidth=style.line * POINTS_PER_PIXEL,
        linestyle="--" if style.dashes else "-",
        zorder=2,
    )
    axes.add_patch(box)


def _draw_curve(axes: Any, shape: Curve) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    points = [shape.points[0]]
    for _, *controls in shape.beziers():
        points += controls
    codes = [Path.MOVETO, *[Path.CURVE4] * (len(points) - 1)]
    curve = PathPatch(
        Path(points, codes),
        fill=False,
        edgecolor=STYLES[shape.style].edge,
        linewidth=shape.line * POINTS_PER_PIXEL,
        alpha=0.8,
        zorder=1,
    )
    axes.add_patch(curve)


def _draw_text(axes: Any, shape: Text) -> None:
    alignment = {"start": "left", "middle": "center", "end": "right"}
    axes.text(
        shape.x,
        shape.y,
        shape.text,
        color=STYLES[shape.style].fill,
        fontsize=shape.size * POINTS_PER_PIXEL,
        ha=alignment[shape.anchor],
        va="baseline",
        family="DejaVu Sans Mono" if shape.mono else "DejaVu Sans",
        weight="bold" if shape.bold else "normal",
        parse_math=False,
        zorder=3,
    )


ENCODERS: dict[str, Callable[[Picture], bytes]] = {".svg": _svg_file, ".png": _png_file}
