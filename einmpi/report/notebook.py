"""What a notebook shows of plans, jobs, compiled jobs and DistArrays: HTML with pictures."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from einmpi.arrays.dist_array import DistArray
from einmpi.compiled.program import Compiled
from einmpi.errors import printable
from einmpi.job.job import Job
from einmpi.planner.plan import Plan
from einmpi.planner.text.explain import heading, totals
from einmpi.report.graph_picture import graph_picture
from einmpi.report.picture import svg
from einmpi.schedule.regions import show_region
from einmpi.units import counted, show_bytes, show_shape

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
    rows = [
        ("shape", show_shape(array.shape)),
        ("dtype", f"{array.dtype}, {show_bytes(array.nbytes)} in all"),
        ("layout", str(array.layout)),
        (f"rank {comm.rank} of {comm.size}", f"{own}, {show_bytes(array.local.nbytes)}"),
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
