"""The report page: a plan, and what a run measured, as one self-contained HTML file."""

from __future__ import annotations

import base64
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from itertools import groupby
from typing import Any

from einmpi.errors import printable
from einmpi.files.atomic import replace_file
from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.job.batches import PREFIX as VALIDATION
from einmpi.planner.mesh import sides
from einmpi.planner.plan import Plan
from einmpi.planner.text.compare import Comparison
from einmpi.planner.text.explain import explain, heading, loops_of
from einmpi.report.graph_picture import LayoutUse, graph_picture, layouts_of
from einmpi.report.page_tables import comparison_table, figures, tensor_table, time_by_kind
from einmpi.report.picture import css, svg
from einmpi.report.record import KINDS, Span, Timeline
from einmpi.units import counted, plural
from einmpi.version import __version__

# ---- page data -----------------------------------------------------------------------------------
#
# The data that the script of a report page draws from, in few bytes: layouts and the timeline.


MAX_SPANS = 250_000
MAX_LABEL_CHARACTERS = 1 << 20
MAX_READERS_NAMED = 3
REGION = re.compile(r"\[[^]]*:[^]]*\]")


def layouts_data(plan: Plan) -> dict[str, Any]:
    """Return the mesh, and of each tensor: name, dtype, bound, names of dimensions, layouts.

    A layout is a text that says when the tensor has it, and the cut of each mesh axis. The script
    works out the blocks from this as schedule/regions.py does; a test compares the two.
    """
    tensors = []
    windows: dict[str, Any] = {}  # of each extent with an order of its digits
    for vertex in plan.graph.vertices:
        layouts = []
        for cuts, use in layouts_of(plan, vertex.name).items():
            layouts.append([_use_text(use), *cuts])
        dimensions = _dimensions(plan.graph, vertex)
        in_orders = sides(vertex.bound, plan.orders_of(vertex.name))
        for side in in_orders:
            windows[str(side)] = plan.mesh.windows(side)
        own_windows = [str(side) for side in in_orders]
        tensors.append([vertex.name, vertex.dtype, vertex.bound, dimensions, layouts, own_windows])
    return {
        "mesh": plan.mesh.factors,
        "windows": windows,
        "tensors": tensors,
    }


def _use_text(use: LayoutUse) -> str:
    """Return when a tensor has a layout: "made, kept; read by B, C, D and 3 more"."""
    parts = []
    if use.events:
        parts.append(", ".join(use.events))
    if use.readers:
        readers = f"read by {', '.join(use.readers[:MAX_READERS_NAMED])}"
        others = len(use.readers) - MAX_READERS_NAMED
        if others > 0:
            readers += f" and {others} more"
        parts.append(readers)
    return "; ".join(parts)


def _dimensions(graph: EinGraph, vertex: Vertex) -> list[str]:
    """Return the labels of a tensor's dimensions; those of an input come from its first reader."""
    if vertex.einsum is not None:
        return list(vertex.einsum.output)
    names = [f"dimension {number}" for number in range(len(vertex.bound))]
    readers = graph.consumers[vertex.name]
    if readers:
        reader = graph[readers[0]]
        index = reader.computed_einsum.operands[reader.inputs.index(vertex.name)]
        for number, entry in enumerate(index):
            if isinstance(entry, str):
                names[number] = entry
    return names


# ---- the timeline --------------------------------------------------------------------------------


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """Return each distinct step once, and the spans of each rank in base 64.

    A span is three numbers: the gap before it, its length, and the number of its step relative to
    the step after that of the span before.
    """
    tracks, merged = _merge_down_to(_tracks(timeline), MAX_SPANS)
    numbers_of: dict[tuple[int, str, str, int, int], int] = {}  # of what spans are about
    texts = []
    for track in tracks:
        numbers: list[int] = []
        end_before = 0
        step_before = -1
        for span in track:
            kind = KINDS.index(span.kind)
            work = (kind, span.vertex, span.label, span.nbytes, span.operations)
            step = numbers_of.setdefault(work, len(numbers_of))
            numbers.append(_zigzag(int(span.start) - end_before))
            numbers.append(_length(span))
            numbers.append(_zigzag(step - step_before - 1))
            end_before = int(span.end)
            step_before = step
        texts.append(base64.b64encode(_variable_length(numbers)).decode())
    return {
        "seconds": timeline.seconds,
        "kinds": KINDS,
        "steps": list(numbers_of),
        "tracks": texts,
        "ranks": timeline.ranks,  # each has as many tracks; the second one is what moves meanwhile
        "merged": merged,
    }


def _tracks(timeline: Timeline) -> list[list[Span]]:
    """Return the spans of each track, in whole microseconds.

    Regions make the labels of the same step differ from rank to rank: if there is too much text,
    labels are without them.
    """
    origin = min((span.start for span in timeline.spans), default=0.0)
    tracks_per_rank = 2 if timeline.has_background else 1
    tracks: list[list[Span]] = [[] for _ in range(tracks_per_rank * timeline.ranks)]
    labels = {span.label: span.label for span in timeline.spans}
    if sum(map(len, labels)) > MAX_LABEL_CHARACTERS:
        labels = {label: REGION.sub("[…]", label) for label in labels}
    for span in timeline.spans:
        start = round((span.start - origin) * 1e6)
        end = max(start, round((span.end - origin) * 1e6))
        track = tracks_per_rank * span.rank + int(span.background)
        tracks[track].append(span._replace(label=labels[span.label], start=start, end=end))
    return tracks


def _merge_down_to(tracks: list[list[Span]], most: int) -> tuple[list[list[Span]], int]:
    """Merge neighbouring short spans until at most so many are left.

    Return them, and the length in microseconds below which spans were merged.
    """
    limit = 0
    found = tracks
    while sum(map(len, found)) > most:
        limit = max(1, 2 * limit)
        found = [_merge_shorter_than(track, limit) for track in tracks]
        if limit > 1 << 50:  # each rank has one span by now: there are more ranks than spans wanted
            break
    return found, limit


def _merge_shorter_than(track: list[Span], limit: int) -> list[Span]:
    found: list[Span] = []
    for is_short, group in groupby(track, key=lambda span: _length(span) < limit):
        spans = list(group)
        if is_short and len(spans) > 1:
            found.append(_merged(spans))
        else:
            found += spans
    return found


def _merged(spans: list[Span]) -> Span:
    """Return one span of the kind that took longest."""
    time = dict.fromkeys(KINDS, -1)
    for span in spans:
        time[span.kind] = max(0, time[span.kind]) + _length(span)
    return spans[0]._replace(
        kind=max(KINDS, key=lambda each: time[each]),
        vertex="",
        label=f"{len(spans)} short steps",
        end=spans[-1].end,
        nbytes=sum(span.nbytes for span in spans),
        operations=sum(span.operations for span in spans),
    )


def _length(span: Span) -> int:
    """Return the whole microseconds of a span."""
    return int(span.end - span.start)


def _zigzag(number: int) -> int:
    """Map small numbers of either sign to small numbers that are not negative."""
    return 2 * number if number >= 0 else -2 * number - 1


def _variable_length(numbers: Iterable[int]) -> bytes:
    """Encode seven bits a byte, low bits first; the high bit says that more follow."""
    encoded = bytearray()
    for number in numbers:
        while number > 127:
            encoded.append(number & 127 | 128)
            number >>= 7
        encoded.append(number)
    return bytes(encoded)


# ---- curves --------------------------------------------------------------------------------------
#
# Curves of the values that loops record, step by step, for the report page.


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


SCRIPTS = ("common.js", "tensors.js", "timeline.js", "start.js")


def write_report(file: str | os.PathLike[str], plan: Plan, **contents: Any) -> None:
    """Write the page; `contents` are further arguments of `page`."""
    replace_file(file, [page(plan, **contents).encode()])


def page(
    plan: Plan,
    comparison: Comparison | None = None,
    timeline: Timeline | None = None,
    measured: Mapping[str, Any] | None = None,
    program: str = "",
    title: str = "",
    details: Mapping[str, str] | None = None,
    simulated: bool = False,
) -> str:
    """Return the HTML of the page. `measured` is the JSON of a run.

    What is not given gets no section. `simulated` says that the timeline is one of a simulation.
    `details` are lines below the title, such as the date, by what they are.
    """
    title = title or "einmpi plan"
    tracks = None if timeline is None else timeline_data(timeline)
    merged = 0 if tracks is None else tracks["merged"]
    recorded = curves(measured or {})
    timeline_is = "simulated" if simulated else "measured"
    sections = _sections(plan, comparison, timeline, timeline_is, merged, program, recorded)
    links = []
    body = []
    for anchor, head, html in sections:
        links.append(f'<a href="#{anchor}">{head}</a>')
        body.append(f'<section id="{anchor}">\n<h2>{head}</h2>\n{html}\n</section>')
    script = "\n".join(_file(name) for name in SCRIPTS)
    data = {"layouts": layouts_data(plan), "timeline": tracks}
    newline = "\n"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_content_policy(script)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{_file("page.css")}{css()}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p class="faint">{escape(_subtitle(plan))}</p>
{_details(details or {})}
{figures(plan, measured)}
<nav aria-label="Sections">{" ".join(links)}</nav>
</header>
<main>
{newline.join(body)}
</main>
<footer><p>einmpi {escape(__version__)}, plan {escape(plan.digest)}</p></footer>
<div id="tip" role="tooltip" hidden></div>
<script type="application/json" id="data">{_json(data)}</script>
<script>{script}</script>
</body>
</html>
"""


def _file(name: str) -> str:
    return (files("einmpi.report") / "page" / name).read_text(encoding="utf-8")


def _content_policy(script: str) -> str:
    """Allow this one script to run, and nothing to be fetched, whatever a program contains."""
    digest = base64.b64encode(sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )


def _json(data: object) -> str:
    """Return JSON that cannot end the script element that contains it."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _details(details: Mapping[str, str]) -> str:
    lines = ""
    for name, text in details.items():
        lines += f"<dt>{escape(name)}</dt><dd>{escape(printable(text))}</dd>"
    return f'<dl class="details faint">{lines}</dl>' if lines else ""


def _subtitle(plan: Plan) -> str:
    computed = len(plan.graph.computed)
    inputs = len(plan.graph.inputs)
    graph = f"{computed:,} {plural(computed, 'operation')} on {inputs:,} {plural(inputs, 'input')}"
    return f"{heading(plan)}, {graph}"


def _sections(
    plan: Plan,
    comparison: Comparison | None,
    timeline: Timeline | None,
    timeline_is: str,
    merged: int,
    program: str,
    recorded: str,
) -> list[tuple[str, str, str]]:
    """Return the sections of the page: the anchor, the heading and the HTML of each."""
    found = []
    if program.strip():
        text = escape(program.strip("\n"))
        found.append(("program", "Program", f'<pre tabindex="0"><code>{text}</code></pre>'))
    if recorded:
        found.append(("history", "Recorded values", recorded))
    picture = svg(graph_picture(plan))
    found.append(("plan", "Graph and cuts", _GRAPH.format(svg=picture)))
    found.append(("tensors", "Who holds what", _TENSORS))
    head = "What moves" if timeline is None else f"Predicted and {timeline_is}"
    found.append(("table", head, tensor_table(plan, timeline)))
    if timeline is not None:
        found.append(("time", "Timeline", _timeline(timeline, merged)))
    for title, each in loops_of(plan)[1:]:
        text = escape(explain(each))
        anchor = title.replace(" ", "-")
        html = f'<pre tabindex="0"><code>{text}</code></pre>'
        found.append((anchor, f"Plan of {title}", html))
    if comparison is not None:
        found.append(("strategies", "Strategies", comparison_table(plan, comparison)))
    return found


_GRAPH = """<p>Each box is a tensor: an input, the result of an EinSum, or (green) an output. The
tags say into how many parts each label is cut. A label with an orange tag is aggregated, so each
rank holds a partial result. The wider an edge, the more bytes move along it.</p>
<div class="tools">
<button id="graph-in">Zoom in</button><button id="graph-out">Zoom out</button>
<button id="graph-fit">Fit</button>
<span class="faint">Ctrl + wheel zooms, dragging scrolls.</span></div>
<div class="scroll" id="graph" tabindex="0" role="region" aria-label="The graph and its cuts">
{svg}</div>"""

_TENSORS = """<p>The layout of each tensor on the ranks when it is made, kept and read. Each colour
is a rank. A block with several numbers is held by all of these ranks; with + between the numbers,
each of them holds a partial result. Tensors with more than two cut dimensions are shown as several
pictures. Many short index ranges of the same ranks are drawn as one block; point at it to see
them.</p>
<div class="tools">
<label>Find a tensor <input id="tensor-filter" type="search" autocomplete="off"></label>
<label>Show only rank
<input id="tensor-rank" type="number" min="0" placeholder="all" autocomplete="off"></label></div>
<div class="cards" id="cards"></div>
<div class="tools"><button id="tensor-more" hidden></button></div>"""


def _timeline(timeline: Timeline, merged: int) -> str:
    keys = ""
    for kind, share in time_by_kind(timeline).items():
        keys += f'<span class="key"><i class="k-{kind}"></i>{kind} {100 * share:.1f}%</span>'
    note = ""
    if merged:
        note = f"<p>Neighbouring steps shorter than {merged:,} µs are drawn as one.</p>"
    label = f"Timeline of {counted(timeline.ranks, 'rank')} over {timeline.seconds:.3g} seconds"
    return f"""<div>{keys}</div>{note}
<div class="tools">
<button id="track-in">Zoom in</button><button id="track-out">Zoom out</button>
<button id="track-reset">Reset</button>
<span class="faint" id="track-range"></span></div>
<canvas id="track" tabindex="0" role="application" aria-describedby="track-keys"
aria-label="{label}"></canvas>
<p class="faint" id="track-keys">The wheel zooms, dragging moves, Shift + wheel scrolls through the
ranks. Keyboard: arrow keys move between steps and ranks, + and - zoom, 0 resets.</p>
<div class="unseen" id="track-said" aria-live="polite"></div>"""
