"""The report page: a plan, and what a run measured, as one self-contained HTML file."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

from einmpi.errors import printable
from einmpi.files.replace import replace_file
from einmpi.planner.plan import Plan
from einmpi.planner.text.compare import Comparison
from einmpi.planner.text.explain import explain, heading, loops_of
from einmpi.report.curves import curves
from einmpi.report.graph_picture import graph_picture
from einmpi.report.page_data import layouts_data, timeline_data
from einmpi.report.page_tables import comparison_table, figures, tensor_table, time_by_kind
from einmpi.report.picture import css, svg
from einmpi.report.recording.timeline import Timeline
from einmpi.units import counted, plural
from einmpi.version import __version__

SCRIPTS = ("common.js", "tensors.js", "timeline.js", "start.js")


@dataclass(frozen=True)
class _Section:
    anchor: str
    heading: str
    html: str


def write_report(
    file: str | os.PathLike[str],
    plan: Plan,
    comparison: Comparison | None = None,
    timeline: Timeline | None = None,
    measured: Mapping[str, Any] | None = None,
    program: str = "",
    title: str = "",
    details: Mapping[str, str] | None = None,
    simulated: bool = False,
) -> None:
    """Write the page. `measured` is the JSON of a run. What is not given gets no section.

    `simulated` says that the timeline is one of a simulation.
    `details` are lines below the title, such as the date, by what they are.
    """
    text = page(plan, comparison, timeline, measured, program, title, details, simulated)
    replace_file(file, [text.encode()])


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
    """Return the HTML of the page."""
    title = title or "einmpi plan"
    tracks = None if timeline is None else timeline_data(timeline)
    merged = 0 if tracks is None else tracks["merged"]
    recorded = curves(measured or {})
    timeline_is = "simulated" if simulated else "measured"
    sections = _sections(plan, comparison, timeline, timeline_is, merged, program, recorded)
    links = []
    body = []
    for section in sections:
        links.append(f'<a href="#{section.anchor}">{section.heading}</a>')
        head = f'<section id="{section.anchor}">\n<h2>{section.heading}</h2>'
        body.append(f"{head}\n{section.html}\n</section>")
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
) -> list[_Section]:
    found = []
    if program.strip():
        text = escape(program.strip("\n"))
        found.append(_Section("program", "Program", f'<pre tabindex="0"><code>{text}</code></pre>'))
    if recorded:
        found.append(_Section("history", "Recorded values", recorded))
    picture = svg(graph_picture(plan))
    found.append(_Section("plan", "Graph and cuts", _GRAPH.format(svg=picture)))
    found.append(_Section("tensors", "Who holds what", _TENSORS))
    head = "What moves" if timeline is None else f"Predicted and {timeline_is}"
    found.append(_Section("table", head, tensor_table(plan, timeline)))
    if timeline is not None:
        found.append(_Section("time", "Timeline", _timeline(timeline, merged)))
    for title, each in loops_of(plan)[1:]:
        text = escape(explain(each))
        anchor = title.replace(" ", "-")
        html = f'<pre tabindex="0"><code>{text}</code></pre>'
        found.append(_Section(anchor, f"Plan of {title}", html))
    if comparison is not None:
        found.append(_Section("strategies", "Strategies", comparison_table(plan, comparison)))
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
