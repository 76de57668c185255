"""The report page: a plan, and what became of it in a run, as one HTML file that needs nothing from elsewhere."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

from einmpi.files.replace import replace_file
from einmpi.planner.make_plan import Plan
from einmpi.planner.text.explain import Comparison, heading
from einmpi.report.graph_picture import graph_picture
from einmpi.report.page_data import layouts_data, timeline_data
from einmpi.report.page_tables import comparison_table, figures, tensor_table, time_by_kind
from einmpi.report.picture import css, svg
from einmpi.report.timeline import Timeline
from einmpi.version import __version__

SCRIPTS = ("common.js", "tensors.js", "timeline.js", "start.js")


def write_report(
    file: str | os.PathLike[str],
    plan: Plan,
    comparison: Comparison | None = None,
    timeline: Timeline | None = None,
    measured: Mapping[str, Any] | None = None,
    program: str = "",
    title: str = "",
) -> None:
    """Write the page. `measured` is the JSON of a run; what is not given has no section."""
    text = page(plan, comparison, timeline, measured, program, title)
    replace_file(file, [text.encode()])


def page(
    plan: Plan,
    comparison: Comparison | None = None,
    timeline: Timeline | None = None,
    measured: Mapping[str, Any] | None = None,
    program: str = "",
    title: str = "",
) -> str:
    """The text of the page."""
    title = title or "A plan of einmpi"
    script = "\n".join(_file(name) for name in SCRIPTS)
    tracks = timeline_data(timeline) if timeline else None
    data = {"layouts": layouts_data(plan), "timeline": tracks}
    # Only the script whose hash stands here runs, and nothing is fetched from anywhere, whatever a program says.
    allowed = base64.b64encode(sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{allowed}'; style-src 'unsafe-inline'; base-uri 'none'; "
        "form-action 'none'"
    )
    merged = tracks["merged"] if tracks else 0
    sections = list(_sections(plan, comparison, timeline, merged, program))
    links = " ".join(f'<a href="#{key}">{head}</a>' for key, head, _ in sections)
    body = "\n".join(
        f'<section id="{key}">\n<h2>{head}</h2>\n{text}\n</section>' for key, head, text in sections
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{_file("page.css")}{css()}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p class="faint">{escape(_subtitle(plan))}</p>
{figures(plan, measured)}
<nav aria-label="Sections">{links}</nav>
</header>
<main>
{body}
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


def _json(data: object) -> str:
    """JSON that cannot end the element it stands in."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _subtitle(plan: Plan) -> str:
    graph = f"{len(plan.graph.computed):,} operations on {len(plan.graph.inputs):,} inputs"
    return f"{heading(plan)}, {graph}"


def _sections(
    plan: Plan, comparison: Comparison | None, timeline: Timeline | None, merged: int, program: str
) -> Iterator[tuple[str, str, str]]:
    """(anchor, heading, HTML) of each section that there is something for."""
    if program.strip():
        yield (
            "program",
            "Program",
            f'<pre tabindex="0"><code>{escape(program.strip(chr(10)))}</code></pre>',
        )
    yield "plan", "Graph and cuts", _GRAPH.format(svg=svg(graph_picture(plan)))
    yield "tensors", "Who holds what", _TENSORS
    yield (
        "table",
        "Predicted and measured" if timeline else "What moves",
        tensor_table(plan, timeline),
    )
    if timeline:
        yield "time", "Timeline", _timeline(timeline, merged)
    if comparison:
        yield "strategies", "Strategies", comparison_table(plan, comparison)


_GRAPH = """<p>Every box is a tensor: an input, a result of an EinSum, or (green) an output. The small tags say into how
many parts each label is cut; an orange one is aggregated, so that the ranks hold partial results. An edge is as wide as
what moves on it.</p>
<div class="tools">
<button id="graph-in">Zoom in</button><button id="graph-out">Zoom out</button><button id="graph-fit">Fit</button>
<span class="faint">Ctrl and the wheel zoom, dragging scrolls.</span></div>
<div class="scroll" id="graph" tabindex="0" role="region" aria-label="The graph and its cuts">{svg}</div>"""

_TENSORS = """<p>How each tensor lies on the ranks when it is made, kept and read. A colour is a rank; a block with
several numbers is on all of these ranks, with + each of them has a partial result of it. Further dimensions are
unfolded into several pictures. Many short runs of indices of the same ranks are drawn as one; the pointer tells which
they are.</p>
<div class="tools"><label>Find a tensor <input id="tensor-filter" type="search" autocomplete="off"></label>
<label>Only rank <input id="tensor-rank" type="number" min="0" placeholder="all" autocomplete="off"></label></div>
<div class="cards" id="cards"></div>
<div class="tools"><button id="tensor-more" hidden></button></div>"""


def _timeline(timeline: Timeline, merged: int) -> str:
    keys = "".join(
        f'<span class="key"><i class="k-{kind}"></i>{kind} {100 * share:.1f}%</span>'
        for kind, share in time_by_kind(timeline).items()
    )
    note = (
        f"<p>Steps shorter than {merged:,} µs are drawn together with their neighbours.</p>"
        if merged
        else ""
    )
    label = f"Timeline of {timeline.ranks} ranks over {timeline.seconds:.3g} seconds"
    return f"""<div>{keys}</div>{note}
<div class="tools">
<button id="track-in">Zoom in</button><button id="track-out">Zoom out</button><button id="track-reset">Reset</button>
<span class="faint" id="track-range"></span></div>
<canvas id="track" tabindex="0" role="application" aria-describedby="track-keys" aria-label="{label}"></canvas>
<p class="faint" id="track-keys">The wheel zooms, dragging moves, Shift and the wheel go to other ranks. With the
keyboard: arrows go from step to step and from rank to rank, + and - zoom, 0 resets.</p>
<div class="unseen" id="track-said" aria-live="polite"></div>"""
