"""A job as text for people, its results compared, its plan as a picture, all in a notebook."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from html import escape
from importlib.util import find_spec
from io import BytesIO
from math import prod
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.errors import InputError, printable
from einmpi.files.atomic import replace_file
from einmpi.files.formats import find
from einmpi.files.reading import is_missing
from einmpi.files.specs import InputSpec
from einmpi.graph.dtypes import kind_of
from einmpi.graph.eingraph import Vertex
from einmpi.job.batches import Batches, Validation
from einmpi.job.job import Job
from einmpi.job.loop import Loop
from einmpi.language.scope import label_notes
from einmpi.loops.stages import final_names, stages_of
from einmpi.planner.plan import Plan
from einmpi.planner.text.explain import heading, totals
from einmpi.report.graph_picture import graph_picture
from einmpi.report.picture import STYLES, Box, Curve, Picture, Shape, Text, svg
from einmpi.schedule.regions import show_region
from einmpi.units import counted, show_bytes, show_count, show_shape

if TYPE_CHECKING:
    from einmpi.arrays.dist_array import DistArray
    from einmpi.compiled.program import Compiled


def describe_job(job: Job) -> str:
    """Return what `einmpi check` prints: sizes, inputs and their origins, the graph, outputs."""
    lines = [printable(job.title or job.source.name)]
    if job.sizes:
        sizes = "  ".join(f"{name}={value}" for name, value in job.sizes.items())
        lines.append(f"sizes    {sizes}")
    if job.strict:
        lines.append("strict   only rewrites that are exact for all values")
    if job.half == "steps":
        lines.append("half     float16 and bfloat16 rounded after every operation")
    parts = job.one_after_another()
    unused = {spec.name for spec in job.inputs}
    for part in parts:
        unused -= set(part.graph.by_name)
    made_earlier: set[str] = set()  # by earlier loops
    for number, part in enumerate(parts, 1):
        if job.loops:
            lines.append(f"loop {number} of {len(parts)}")
        lines += _program_lines(part, made_earlier, unused if number == 1 else ())
        made_earlier |= {vertex.name for vertex in part.written.computed}
        made_earlier |= set(() if part.loop is None else part.loop.carry)
    for part in parts:
        for note in label_notes(part.source, part.written.by_name, part.sizes):
            lines.append(f"note     {printable(note)}")
        if part.loop is not None:
            lines += [f"note     {note}" for note in _rows_left_out(part.loop)]
    lines.append("ok")
    return "\n".join(lines)


def _program_lines(job: Job, made_earlier: Collection[str], unused: Iterable[str]) -> list[str]:
    """Return the inputs, the graph, the outputs and the loop of a program.

    Inputs in `made_earlier` are results of earlier loops; those in `unused` no program reads.
    """
    lines = []
    origins = {spec.name: _origin(spec) for spec in job.inputs}
    sparse = {spec.name for spec in job.inputs if spec.key_dimensions}
    for name in made_earlier:
        if name in origins:
            origins[name] = "of an earlier loop"
    graphs = {"": job.graph}
    if job.loop is not None:
        for name in job.loop.numbers(0):
            if name in origins:
                origins[name] = "of each step"
        stages = stages_of(job)
        graphs = {"step": stages.step.graph}
        if stages.once is not None:
            graphs = {"once": stages.once.graph, **graphs}
    for vertex in job.graph.inputs:
        signature = _signature(vertex)
        if vertex.name in sparse:  # it does not take the bytes of a dense one
            signature = f"{vertex.name} {vertex.dtype} {show_shape(vertex.bound)}"
        lines.append(f"input    {signature}  {origins.get(vertex.name, 'given')}")
    for name in sorted(unused):
        lines.append(f"unused   {name}")
    if job.loop is not None:
        for statement in job.loop.written_out:
            lines.append(f"train    {printable(statement)}")
    for when, graph in graphs.items():
        for vertex in graph.computed:
            fused = ""
            if len(vertex.origin) > 1:
                fused = f"   (fuses {', '.join(vertex.origin[:-1])})"
            lines.append(f"{when:8} {vertex}   {_shape(vertex)}{fused}")
    targets = {spec.name: f"  {printable(spec.target)}" for spec in job.outputs}
    # The results of a loop have the names of the inputs that are carried.
    outputs = job.graph.outputs if job.loop is None else final_names(job)
    for name in outputs:
        lines.append(f"output   {_signature(job.graph[name])}{targets.get(name, '')}")
    if job.loop is not None:
        lines += _loop_lines(job.loop)
    return lines


def _loop_lines(loop: Loop) -> list[str]:
    """Return what a loop carries, and when it ends."""
    carried = [f"{output} becomes {name}" for name, output in loop.carry.items()]
    lines = [f"loop     at most {counted(loop.steps, 'step')}; {', '.join(carried)}"]
    if not carried:
        lines = ["loop     one step, which carries nothing"]
    if loop.batches is not None:
        lines.append(f"batches  {_batches_text(loop.batches)}")
    if loop.validation is not None:
        lines.append(f"validate {_validation_text(loop.validation)}")
    if loop.until_text:
        lines.append(f"until    {printable(loop.until_text)}")
    if loop.record:
        target = "" if loop.history is None else f"  {printable(loop.history.target)}"
        lines.append(f"record   {', '.join(loop.record)}{target}")
    return lines


def _validation_text(validation: Validation) -> str:
    """Return what a validation computes, when, and from which inputs."""
    text = f"{', '.join(validation.record)} every {counted(validation.every, 'step')}"
    names = ", ".join(spec.name for spec in validation.inputs)
    text += f" with another {names}"
    if validation.batches is not None:
        text += f": {counted(validation.batches.rows, 'row')}"
        text += f", {counted(validation.steps, 'batch', 'batches')}"
    if validation.keep == "best":
        least = "least" if validation.goal == "min" else "greatest"
        text += f"; results are those with the {least} {validation.columns[0]}"
    return text


def _rows_left_out(loop: Loop) -> list[str]:
    """Return notes about rows that no batch has."""
    batches = {"an epoch": loop.batches}
    if loop.validation is not None:
        batches["the validation"] = loop.validation.batches
    notes = []
    for what, each in batches.items():
        if each is not None and each.rows_after_last and not each.pads_last:
            count = counted(each.rows_after_last, "row")
            rows = f"{what} leaves out {count} of {each.rows}, which is no multiple of {each.batch}"
            notes.append(f'{", ".join(each.names)}: {rows}; last = "pad" takes all')
    return notes


def _batches_text(batches: Batches) -> str:
    """Return how many steps take all rows, and in which order."""
    text = f"{', '.join(batches.names)}: {counted(batches.steps_an_epoch, 'step')} an epoch"
    if batches.epochs is not None:
        text += f", {counted(batches.epochs, 'epoch')}"
    if batches.rows_after_last:
        what = "in a padded batch" if batches.pads_last else "left out"
        text += f"; {counted(batches.rows_after_last, 'row')} {what}"
    if batches.shuffle is not None:
        text += f"; shuffled by seed {batches.shuffle.seed}"
        if batches.shuffle.block > 1:
            text += f" in blocks of {batches.shuffle.block} rows"
    return text


def _origin(spec: InputSpec) -> str:
    if spec.value is not None:
        return f"parameter {spec.value}"
    origin = printable(spec.file or spec.random or "given")
    if spec.rows is not None and spec.shape:
        origin += f", {spec.shape[0]} of {counted(spec.rows, 'row')} a step"
    if is_missing(spec):
        return f"{origin} (does not exist yet)"
    if spec.key_dimensions:
        stored = "" if spec.stored is None else f" {show_count(spec.stored)}"
        origin = printable(spec.file or "at random places")
        return f"{origin}, sparse:{stored} stored, others {spec.implicit or 0}"
    packing = find(spec).packing if spec.file is not None else ""
    return f"{origin}, read as stored: {packing}" if packing else origin


def _signature(vertex: Vertex) -> str:
    return f"{vertex.name} {_shape(vertex)}"


def _shape(vertex: Vertex) -> str:
    return f"{vertex.dtype} {show_shape(vertex.bound)}, {show_bytes(vertex.nbytes)}"


# ---- compare -------------------------------------------------------------------------------------
#
# The comparison of results with those of the reference evaluator.


Array: TypeAlias = npt.NDArray[Any]

# Relative to the largest element. Sums are added up in another order, so the last digits differ.
TOLERANCE = {
    "float64": 1e-10,
    "complex128": 1e-10,
    "float32": 1e-4,
    "complex64": 1e-4,
    "float16": 1e-2,
    "bfloat16": 8e-2,
}


# What is left of numbers that cancel has few digits that are right. A result may be as far from the
# reference as so many times what it changes by if the last digits of the inputs change.
_MOST_TIMES_ROUNDING = 100


def compare_with(
    reference: Mapping[str, Array],
    found: Mapping[str, Array],
    of_rounded: Callable[[], Mapping[str, Array]],
) -> tuple[list[str], str]:
    """Return the names of the outputs that differ, and a line of text for each output.

    `of_rounded` returns the reference results of inputs whose last digits differ. It is called
    where results are further from the reference than the order of a sum explains.
    """
    wrong = []
    lines = []
    rounded: Mapping[str, Array] = {}
    for name, expected in reference.items():
        allowed = TOLERANCE.get(expected.dtype.name, 0.0)
        error = relative_error(expected, found[name])
        verdict = "agrees"
        reason = ""
        if not error <= allowed and allowed:
            rounded = rounded or of_rounded()
            rounding = relative_error(expected, rounded[name])
            if allowed < _MOST_TIMES_ROUNDING * rounding < np.inf:
                allowed = _MOST_TIMES_ROUNDING * rounding
                reason = f", as the last digits of the inputs change it by {rounding:.1e}"
        if not error <= allowed:
            verdict = "DIFFERS"
            wrong.append(name)
        lines.append(f"  {name}  {verdict}: error {error:.1e}, allowed {allowed:.0e}{reason}")
    return wrong, "\n".join(lines)


def with_other_last_digits(array: Array) -> Array:
    """Return numbers with a fraction rounded to their neighbours, up and down in turns."""
    if array.dtype.kind == "c":
        parts = np.ascontiguousarray(array).view(array.real.dtype)
        return with_other_last_digits(parts).view(array.dtype).reshape(array.shape)
    if array.dtype.kind != "f":
        return array
    towards = np.where(np.arange(array.size).reshape(array.shape) % 2, np.inf, -np.inf)
    nearest = np.nextafter(array, towards.astype(array.dtype))
    return np.where((array == 0) | ~np.isfinite(array), array, nearest)


def relative_error(expected: Array, found: Array) -> float:
    """Return the largest difference, relative to the largest finite element.

    It is infinite if shapes, dtypes, infinities or the places of nan differ.
    """
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return np.inf
    finite = np.isfinite(expected)
    expected_odd = expected[~finite]
    found_odd = found[~finite]
    both_nan = (expected_odd != expected_odd) & (found_odd != found_odd)
    same = (expected_odd == found_odd) | both_nan
    if not same.all() or not np.isfinite(found[finite]).all():
        return np.inf
    if not finite.any():
        return 0.0
    wide = _wide_dtype(expected.dtype)
    expected_finite = expected[finite].astype(wide)
    difference = np.abs(expected_finite - found[finite].astype(wide)).max()
    largest = np.abs(expected_finite).max()
    return float(difference / largest) if largest else float(difference)


def _wide_dtype(dtype: np.dtype[Any]) -> Any:
    """Return a dtype in which differences neither overflow nor lose digits."""
    if dtype.kind == "c":
        return np.complex128
    if kind_of(dtype) == "f":
        return np.float64
    return object


# ---- plot ----------------------------------------------------------------------------------------
#
# The graph of a plan as a picture for a paper or a slide (`einmpi plan --plot`): SVG or PNG.


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
        linewidth=float(style.line) * POINTS_PER_PIXEL,
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

# ---- notebook ------------------------------------------------------------------------------------
#
# What a notebook shows of plans, jobs, compiled jobs and DistArrays: HTML with pictures.


LONGEST_SIDE = 160  # pixels of the longest side of a drawn tensor
SHORTEST_SIDE = 24


def plan_html(plan: Plan) -> str:
    """Return a plan as the picture of its graph, with its totals."""
    rows = totals(plan)
    picture = svg(graph_picture(plan), standalone=True)
    return _page(heading(plan), f'<div style="overflow-x:auto">{picture}</div>{_table(rows)}')


def job_html(job: Job) -> str:
    """Return a job as its program, and the tensors that go in and come out."""
    program = "\n".join(line.rstrip() for line in job.source.lines).strip("\n")
    rows = []
    for vertex in job.graph.inputs:
        rows.append((f"input {vertex.name}", f"{vertex.dtype} {show_shape(vertex.bound)}"))
    for name in job.graph.outputs:
        vertex = job.graph[name]
        rows.append((f"output {name}", f"{vertex.dtype} {show_shape(vertex.bound)}"))
    text = f"<pre>{escape(program)}</pre>{_table(rows)}"
    return _page(printable(job.title or job.source.name), text)


def compiled_html(compiled: Compiled) -> str:
    """Return a compiled job: its program, and the plan it was called with last."""
    parts = [job_html(compiled.job)]
    if compiled.ready:
        plan, _ = list(compiled.ready.values())[-1]
        parts.append(plan_html(plan))
    else:
        parts.append("<p>It is planned when it is first called.</p>")
    return "".join(parts)


def array_html(array: DistArray) -> str:
    """Return a DistArray as its shape, dtype and layout, with a drawing of this rank's block."""
    comm = array.own_comm
    own = "nothing" if array.region is None else show_region(array.region)
    block_shape = array.layout.block_shape(comm.rank)
    own_bytes = 0 if block_shape is None else prod(block_shape) * array.itemsize
    rows = [
        ("shape", show_shape(array.shape)),
        ("dtype", f"{array.dtype}, {show_bytes(array.nbytes)} in all"),
        ("layout", str(array.layout)),
        (f"rank {comm.rank} of {comm.size}", f"{own}, {show_bytes(own_bytes)}"),
    ]
    return _page(f"DistArray on {counted(comm.size, 'rank')}", _drawing(array) + _table(rows))


def _page(title: str, content: str) -> str:
    return f"<div><p><b>{escape(title)}</b></p>{content}</div>"


def _table(rows: Iterable[tuple[str, str]]) -> str:
    lines = []
    for name, value in rows:
        lines.append(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>")
    return f"<table>{''.join(lines)}</table>"


def _drawing(array: DistArray) -> str:
    """Return the first two dimensions as a rectangle in which this rank's runs are filled."""
    if not array.size or not array.ndim or array.region is None:
        return ""
    rows = array.shape[0] if array.ndim > 1 else 1
    columns = array.shape[1] if array.ndim > 1 else array.shape[0]
    scale = LONGEST_SIDE / max(rows, columns)
    height = max(SHORTEST_SIDE, rows * scale)
    width = max(SHORTEST_SIDE, columns * scale)
    row_runs = array.region[0] if array.ndim > 1 else ((0, 1),)
    column_runs = array.region[1] if array.ndim > 1 else array.region[0]
    filled = []
    for first_row, last_row in row_runs:
        for first_column, last_column in column_runs:
            x = first_column * width / columns
            y = first_row * height / rows
            box_width = (last_column - first_column) * width / columns
            box_height = (last_row - first_row) * height / rows
            filled.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{box_width:.1f}" '
                f'height="{box_height:.1f}" fill="#4a7ab5"/>'
            )
    outline = (
        f'<rect x="0.5" y="0.5" width="{width - 1:.1f}" height="{height - 1:.1f}" fill="none" '
        'stroke="#808080"/>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}">'
        f"{''.join(filled)}{outline}</svg>"
    )
