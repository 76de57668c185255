"""The graph of a plan as a picture for a paper or a slide: `einmpi plan --plot`. PNG is drawn by matplotlib."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from io import BytesIO
from pathlib import PurePath
from typing import Any

from einmpi.errors import InputError
from einmpi.files.replace import replace_file
from einmpi.planner.make_plan import Plan
from einmpi.report.graph_picture import graph_picture
from einmpi.report.picture import STYLES, Box, Curve, Picture, Shape, svg

PIXELS_PER_INCH = 100
POINTS = 72 / PIXELS_PER_INCH  # of a pixel
SHARPNESS = 2  # pixels of the file for a pixel of the picture


def write_plot(file: str | os.PathLike[str], plan: Plan) -> None:
    """Write the graph with its cuts; the file's suffix says how."""
    check_plot(file)
    replace_file(file, [PLOTS[PurePath(file).suffix.lower()](graph_picture(plan))])


def check_plot(file: str | os.PathLike[str]) -> None:
    """Whether `write_plot` can write such a file: known before there is a plan."""
    suffix = PurePath(file).suffix.lower()
    if suffix not in PLOTS:
        raise InputError(
            os.fspath(file), "unknown kind of picture", f"a file that ends in {' or '.join(PLOTS)}"
        )
    if suffix == ".png" and find_spec("matplotlib") is None:
        allowed = "pip install 'einmpi[plot]', or a file that ends in .svg"
        raise InputError(os.fspath(file), "this needs matplotlib", allowed)


def _svg(picture: Picture) -> bytes:
    return f"{svg(picture, of_its_own=True)}\n".encode()


def _png(picture: Picture) -> bytes:
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
    figure.savefig(drawn, format="png", dpi=PIXELS_PER_INCH * SHARPNESS)
    return drawn.getvalue()


def _draw(axes: Any, shape: Shape) -> None:
    from matplotlib.patches import FancyBboxPatch, PathPatch
    from matplotlib.path import Path

    style = STYLES[shape.style]
    if isinstance(shape, Box):
        corners = f"round,pad=0,rounding_size={min(shape.radius, shape.height / 2)}"
        axes.add_patch(
            FancyBboxPatch(
                (shape.x, shape.y),
                shape.width,
                shape.height,
                boxstyle=corners,
                facecolor=style.fill,
                edgecolor=style.edge,
                linewidth=style.line * POINTS,
                linestyle="--" if style.dashes else "-",
                zorder=2,
            )
        )
    elif isinstance(shape, Curve):
        pieces = shape.beziers()
        points = [pieces[0][0], *(point for _, *rest in pieces for point in rest)]
        codes = [Path.MOVETO, *[Path.CURVE4] * (len(points) - 1)]
        axes.add_patch(
            PathPatch(
                Path(points, codes),
                fill=False,
                edgecolor=style.edge,
                linewidth=shape.line * POINTS,
                alpha=0.8,
                zorder=1,
            )
        )
    else:
        align = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
        axes.text(
            shape.x,
            shape.y,
            shape.text,
            color=style.fill,
            fontsize=shape.size * POINTS,
            ha=align,
            va="baseline",
            family="DejaVu Sans Mono" if shape.mono else "DejaVu Sans",
            weight="bold" if shape.bold else "normal",
            parse_math=False,
            zorder=3,
        )


PLOTS: dict[str, Callable[[Picture], bytes]] = {".svg": _svg, ".png": _png}
