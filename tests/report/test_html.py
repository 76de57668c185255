"""The HTML of the report page: complete, reproducible, and safe whatever a program contains."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from hashlib import sha256
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi_helpers import needs_mpirun, run_mpi
from paper_llama import llama_program
from paths import ROOT
from plan_oracle import owned_indices
from timelines import made_up, recorded

import einmpi
from einmpi.errors import InputError
from einmpi.models.config import NAMED, llama_1
from einmpi.planner.mesh import Mesh, may_cut
from einmpi.planner.text.compare import compare
from einmpi.report import html as page_data
from einmpi.report.describe import write_plot
from einmpi.report.graph_picture import (
    MORE_LAYERS,
    LayoutUse,
    edge_movements,
    graph_picture,
    layouts_of,
)
from einmpi.report.html import page, timeline_data, write_report
from einmpi.report.page_tables import tensor_table, time_by_kind
from einmpi.report.picture import STYLES, Box, Text, arrange, svg
from einmpi.report.record import KINDS, Span, Timeline

JOBS = ("chain", "attention", "softmax", "distances", "shortest_path")


def load(name):
    return einmpi.load(ROOT / "jobs" / f"{name}.toml")


class Elements(HTMLParser):
    """All elements of a page, and the text of scripts."""

    def __init__(self, text):
        super().__init__()
        self.found, self.scripts = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    handle_startendtag = handle_starttag

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1] += data


def sections(text):
    return [attrs["id"] for tag, attrs in Elements(text).found if tag == "section"]


# ---- what moves ----------------------------------------------------------------------------------


@pytest.mark.sampled(11)
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("ranks", [1, 6, 11, 16])
def test_edges_move_what_the_plan_moves(name, ranks):
    for strategy in ("eindecomp", "sqrt", "replicate"):
        plan = einmpi.plan(load(name), ranks, strategy=strategy)
        moved = edge_movements(plan)
        assert sum(each.nbytes for each in moved) == plan.bytes_predicted
        for way in ("join", "aggregate", "repartition"):
            billed = sum(getattr(bill.words, way) for bill in plan.bills.values())
            assert sum(getattr(each.words, way) for each in moved) == billed


def test_a_tensor_has_the_layouts_of_the_plan():
    plan = einmpi.plan(load("chain"), 8)
    assert sorted(plan.states["Z_1"]) == ["i", "j", "k"]
    made, wanted = layouts_of(plan, "Z_1").items()
    assert (sorted(made[0]), made[1]) == ([-2, 0, 1], LayoutUse(["made"], []))
    assert (sorted(wanted[0]), wanted[1]) == ([0, 0, 1], LayoutUse([], ["Z"]))
    assert list(layouts_of(plan, "Z").values()) == [LayoutUse(["made", "kept"], [])]


# ---- the drawing ---------------------------------------------------------------------------------


@st.composite
def graphs(draw):
    """Box sizes in an order in which edges go forwards, and the edges."""
    count = draw(st.integers(1, 14))
    sizes = {f"v{k}": (draw(st.integers(20, 300)), draw(st.integers(20, 80))) for k in range(count)}
    pairs = [(f"v{a}", f"v{b}") for b in range(count) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=24)) if pairs else []
    return sizes, edges


@given(graphs())
@settings(max_examples=60)
def test_boxes_do_not_touch_and_edges_go_down(graph):
    sizes, edges = graph
    sources = [name for name in sizes if all(b != name for _, b in edges)]
    place = arrange(sizes, edges, sources)
    assert place == arrange(sizes, edges, sources)
    boxes = [
        (x - sizes[name][0] / 2, y - sizes[name][1] / 2, *sizes[name])
        for name, (x, y) in place.centres.items()
    ]
    for k, (x, y, width, height) in enumerate(boxes):
        assert (
            x >= 0
            and y >= 0
            and x + width <= place.width + 1e-6
            and y + height <= place.height + 1e-6
        )
        for left, top, wide, tall in boxes[:k]:
            assert x + width <= left or left + wide <= x or y + height <= top or top + tall <= y
    assert set(place.routes) == set(edges)
    for (a, b), route in place.routes.items():
        assert [y for _, y in route] == sorted(y for _, y in route)
        assert route[0][1] == place.centres[a][1] + sizes[a][1] / 2
        assert route[-1][1] == place.centres[b][1] - sizes[b][1] / 2


def test_edges_that_need_not_cross_do_not():
    sizes = dict.fromkeys(["a", "b", "c", "x", "y", "z"], (50, 20))
    place = arrange(sizes, [("a", "z"), ("b", "x"), ("c", "y")], ["a", "b", "c"])
    order = sorted("abc", key=lambda name: place.centres[name][0])
    assert [{"a": "z", "b": "x", "c": "y"}[name] for name in order] == sorted(
        "xyz", key=lambda n: place.centres[n][0]
    )


def test_the_graph_shows_names_cuts_and_bytes():
    plan = einmpi.plan(load("chain"), 8)
    texts = [
        shape.text
        for group in graph_picture(plan).groups
        for shape in group.shapes
        if isinstance(shape, Text)
    ]
    for vertex in plan.graph.vertices:
        assert vertex.name in texts
    assert {
        "i:2",
        "j:2",
        "k:2",
        "l:2",
        "i:4",
        "Σ[j](A[i,j] × B[j,k])",
        "1.8 MiB",
        "3.5 MiB",
    } <= set(texts)


def contrast(one, two):
    def light(colour):
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(one), light(two)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("shade", ["fill", "dark_fill"])
def test_text_can_be_read(shade):
    boxes = ("ground", "input", "vertex", "output", "more")
    grounds = {
        "ink": boxes,
        "faint": boxes,
        "join": ("ground", "chip", "vertex", "output"),
        "aggregate": ("ground", "chip-partial", "vertex", "output"),
        "repartition": ("ground", "vertex", "output"),
        "stays": ("ground",),
    }
    for text, below in grounds.items():
        for ground in below:
            assert contrast(getattr(STYLES[text], shade), getattr(STYLES[ground], shade)) >= 4.5, (
                text,
                ground,
            )


def test_text_of_the_page_can_be_read():
    style = (ROOT / "einmpi" / "report" / "page" / "page.css").read_text()
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w{6})", part))
        for part in style.split("* {")[0].split("@media")
    )
    for colours in (light, dark):
        for text in ("ink", "faint", "accent", "good", "bad"):
            assert (
                contrast(colours[text], colours["ground"]) >= 4.5
                and contrast(colours[text], colours["panel"]) >= 4.5
            )
        for kind in KINDS:  # names of tensors stand on these
            assert contrast(colours[kind], colours["ground"]) >= 4.5, kind
        assert contrast(colours["ground"], colours["ink"]) >= 4.5, "the tooltip"


# ---- the page ------------------------------------------------------------------------------------


def test_a_dry_plan_has_no_measured_parts():
    plan = einmpi.plan(load("chain"), 8)
    text = page(plan, program=load("chain").source.text, title="Matrix chain")
    assert sections(text) == ["program", "plan", "tensors", "table"]
    assert "measured" not in text.split("<main>")[1].split("<script")[0]
    assert sections(page(plan)) == ["plan", "tensors", "table"]


def test_all_parts():
    job = load("chain")
    plan, timeline = recorded(job, 4)
    plans = compare(lambda name: einmpi.plan(job, 4, strategy=name))
    measured = {
        "seconds": {"run": 0.5, "total": 1.0},
        "flops": 10**9,
        "seconds_predicted": None,
        "bytes_predicted": plan.bytes_predicted,
        "bytes_moved": plan.bytes_predicted,
        "bytes_moved_max_rank": 7,
        "bytes_peak_predicted": plan.peak,
        "bytes_peak": 3 * 2**20,
    }
    text = page(plan, plans, timeline, measured, job.source.text, job.title)
    assert sections(text) == ["program", "plan", "tensors", "table", "time", "strategies"]
    assert "as planned" in text and "0.5 s" in text and "2 Gop/s" in text
    assert '<td class="bad">' not in text, "every tensor moved what was planned"
    for each in plans.plans:
        assert f'<td class="left">{each.strategy}</td>' in text
    assert "strategy data needs the role batch" in text
    other = Timeline(
        4,
        timeline.seconds,
        tuple(s for s in timeline.spans if s.vertex != "A" or s.kind != "exchange"),
    )
    assert page(plan, timeline=other).count('<td class="bad">') == 1


def test_nothing_comes_from_elsewhere_and_one_script_runs():
    plan, timeline = recorded(load("softmax"), 4)
    text = page(plan, timeline=timeline, program="see https://example.org", title="T")
    elements = Elements(text)
    for tag, attrs in elements.found:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form"), tag
        assert "src" not in attrs and (attrs.get("href") or "#").startswith("#")
        assert not any(name.startswith("on") for name in attrs)
    policy = next(attrs["content"] for tag, attrs in elements.found if "http-equiv" in attrs)
    data, script = elements.scripts
    assert json.loads(data)["timeline"]["kinds"] == list(KINDS)
    wanted = base64.b64encode(sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"script-src 'sha256-{wanted}'" in policy


EVIL = "</script></pre><img src=x onerror=alert(1)><script>alert(2)</script>\"'&<b>"


def test_text_from_users_is_escaped():
    program = f"Z[i] = sum(X[i,j])  # {EVIL}"
    job = einmpi.program(program, X=(8, 8))
    plan = einmpi.plan(job, 4)
    spans = (Span(0, "kernel", "Z", EVIL, 0.0, 1.0), Span(1, "kernel", EVIL, EVIL, 0.0, 1.0))
    text = page(plan, None, Timeline(4, 1.0, spans), None, program, EVIL)
    elements = Elements(text)
    assert "img" not in {tag for tag, _ in elements.found}
    assert len(elements.scripts) == 2
    assert not any(name.startswith("on") for _, attrs in elements.found for name in attrs)
    data = json.loads(elements.scripts[0])
    assert any(EVIL in step for step in data["timeline"]["steps"])
    assert "alert" not in elements.scripts[1]
    assert "<" not in elements.scripts[0]


@pytest.mark.slow
def test_the_same_page_in_every_process():
    code = (
        "import einmpi, sys; from einmpi.report.html import page; job = einmpi.load(sys.argv[1]); "
        "print(page(einmpi.plan(job, 12), program=job.source.text))"
    )
    command = [sys.executable, "-c", code, str(ROOT / "jobs" / "attention.toml")]
    texts = {
        subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1


@pytest.mark.parametrize("ranks", [1, 4, 11])
def test_small_and_odd_graphs(ranks):
    for program, inputs in (
        ("Z = 1", {}),
        ("n = sum(X[i]**2)", {"X": (5,)}),
        ("Y[i,j] = X[i,i] + X[j,i]", {"X": (3, 3)}),
        ("Z[i] = X[i] + X[i]; W[i] = X[i]", {"X": (0,)}),
    ):
        plan = einmpi.plan(einmpi.program(program, **inputs), ranks)
        Elements(page(plan))
        ElementTree.fromstring(svg(graph_picture(plan), standalone=True))


# ---- the timeline's numbers ----------------------------------------------------------------------


def unpacked(text):
    """Decode a track as the script does: (start, end, step)."""
    numbers, value, shift = [], 0, 0
    for byte in base64.b64decode(text):
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            numbers.append(value)
            value = shift = 0
    found, before, last = [], 0, -1
    for gap, length, step in zip(*[iter(numbers)] * 3, strict=True):
        start = before + (gap // 2 if gap % 2 == 0 else -(gap + 1) // 2)
        last += 1 + (step // 2 if step % 2 == 0 else -(step + 1) // 2)
        before = start + length
        found.append((start, before, last))
    return found


def test_spans_survive_encoding():
    _, timeline = recorded(load("attention"), 3)
    data = json.loads(json.dumps(timeline_data(timeline)))  # as a page has it
    origin = min(span.start for span in timeline.spans)
    found = [(rank, *span) for rank, track in enumerate(data["tracks"]) for span in unpacked(track)]
    assert len(found) == len(timeline.spans) and data["merged"] == 0
    for (rank, start, end, step), span in zip(found, timeline.spans, strict=True):
        assert rank == span.rank
        assert (
            abs(start - (span.start - origin) * 1e6) <= 0.51
            and abs(end - (span.end - origin) * 1e6) <= 0.51
        )
        assert data["steps"][step] == [
            KINDS.index(span.kind),
            span.vertex,
            " ".join(span.label.split()),
            span.nbytes,
            span.operations,
        ]


def test_too_many_spans_are_merged(monkeypatch):
    plan = einmpi.plan(load("attention"), 8)
    timeline = made_up(plan)
    monkeypatch.setattr(page_data, "MAX_SPANS", 60)
    data = timeline_data(timeline)
    tracks = [unpacked(track) for track in data["tracks"]]
    assert 8 <= sum(map(len, tracks)) <= 60 and data["merged"] > 0
    assert f"shorter than {data['merged']:,} µs" in page(plan, timeline=timeline)
    for rank, track in enumerate(tracks):
        own = [span for span in timeline.spans if span.rank == rank]
        assert sum(data["steps"][step][3] for _, _, step in track) == sum(
            span.nbytes for span in own
        )
        assert sum(data["steps"][step][4] for _, _, step in track) == sum(
            span.operations for span in own
        )
        assert all(one[1] <= two[0] for one, two in pairwise(track))
        assert track[-1][1] == round((own[-1].end - timeline.spans[0].start) * 1e6)


def test_too_many_labels_lose_their_regions(monkeypatch):
    timeline = made_up(einmpi.plan(load("chain"), 8))
    regions = {
        line
        for _, vertex, line, *_ in timeline_data(timeline)["steps"]
        if vertex == "A" and "load" in line
    }
    assert len(regions) == 8 and "load A[240, 240] ← […] of A" not in regions
    monkeypatch.setattr(page_data, "MAX_LABEL_CHARACTERS", 100)
    lines = {
        line for _, vertex, line, *_ in timeline_data(timeline)["steps"] if vertex in ("A", "Z_1")
    }
    assert (
        "load A[240, 240] ← […] of A" in lines
        and "kernel Z_1[240, 240] ← Σ[j](A[i,j] × B[j,k])" in lines
    )


def test_shares_of_the_time():
    spans = (Span(0, "kernel", "Z", "", 0.0, 3.0), Span(1, "reduce", "Z", "", 1.0, 2.0))
    assert time_by_kind(Timeline(2, 4.0, spans)) == {
        "reduce": 1 / 8,
        "kernel": 3 / 8,
        "idle": 1 / 2,
    }


# ---- large ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_large_run_is_a_small_page(tmp_path):
    """48 layers on 64 ranks: 1,441 tensors, 190,000 spans."""
    program, shapes, _ = llama_program(NAMED["7B"], 4, 2048, 48)
    plan = einmpi.plan(einmpi.program(program, dtype="float32", **shapes), 64)
    timeline = made_up(plan)
    assert len(timeline.spans) > 150_000
    write_report(tmp_path / "page.html", plan, timeline=timeline, program=program)
    assert (tmp_path / "page.html").stat().st_size < 5 * 2**20


def test_repeated_layers_are_drawn_once():
    program, shapes, _ = llama_program(NAMED["7B"], 2, 64, 6)
    plan = einmpi.plan(einmpi.program(program, dtype="float32", **shapes), 4)
    picture = graph_picture(plan)
    boxes = [shape for group in picture.groups for shape in group.shapes if isinstance(shape, Box)]
    assert sum(box.style == "more" for box in boxes) == 1
    drawn = sum(box.style in ("input", "vertex", "output") for box in boxes)
    texts = [
        shape.text for group in picture.groups for shape in group.shapes if isinstance(shape, Text)
    ]
    layers, hidden = (
        int(re.match(r"\d+", text)[0])
        for text in texts
        if "more layers" in text or " tensors, " in text
    )
    assert layers >= 3 and drawn + hidden == len(plan.graph.vertices)
    assert MORE_LAYERS not in plan.graph.by_name


@pytest.mark.parametrize("measured", [False, True])
def test_the_table_folds_repeated_layers(measured):
    program, shapes, _ = llama_program(llama_1(64, 6, 4, 96), 2, 32)
    plan = einmpi.plan(einmpi.program(program, dtype="float32", **shapes), 2)
    table = tensor_table(plan, made_up(plan) if measured else None)
    rows = re.findall(r"<tr( hidden| class=\"fold faint\")?>(.*?)</tr>", table.split("<tbody>")[1])
    folds = [cells for kind, cells in rows if "fold" in kind]
    hidden = [cells for kind, cells in rows if "hidden" in kind]
    assert folds and hidden and len(rows) == len(plan.graph.vertices) + len(folds)
    assert all("as in the layer before" in cells for cells in folds)
    counted = sum(int(re.search(r"(\d+) tensors? of", cells)[1]) for cells in folds)
    assert counted == len(hidden)
    assert len({cells.count("<td") for _, cells in rows}) == 1
    shown = [cells for kind, cells in rows if not kind]
    assert any(">wq_1<" in cells for cells in shown) and any(">wq_4<" in cells for cells in hidden)


def test_many_tensors_that_do_not_repeat_are_drawn_briefly():
    lines = [f"T{k}[i,j] = sum(T{k - 1}[i,l] * W{k}[l,j])" for k in range(1, 90)]
    shapes = {"T0": (7, 11), **{f"W{k}": (10 + k, 11 + k) for k in range(1, 90)}}
    picture = graph_picture(
        einmpi.plan(einmpi.program("\n".join(lines), **shapes), 2, strategy="sqrt")
    )
    texts = {
        shape.text for group in picture.groups for shape in group.shapes if isinstance(shape, Text)
    }
    assert {*(f"T{k}" for k in range(90)), *shapes} <= texts
    assert not any("Σ" in text for text in texts)


# ---- plots and the command line ------------------------------------------------------------------


def test_plot_as_svg(tmp_path):
    write_plot(tmp_path / "plan.svg", einmpi.plan(load("chain"), 8))
    root = ElementTree.parse(tmp_path / "plan.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert {"Z_1", "Z_2", "Z_3", "Z"} <= {element.text for element in root.iter()}
    assert not [
        e
        for e in root.iter()
        if e.tag.endswith("script") or any("href" in key or key == "class" for key in e.attrib)
    ]


def test_plot_as_png(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    write_plot(tmp_path / "plan.png", einmpi.plan(load("chain"), 8))
    data = (tmp_path / "plan.png").read_bytes()
    picture = graph_picture(einmpi.plan(load("chain"), 8))
    assert (
        data.startswith(b"\x89PNG")
        and abs(int.from_bytes(data[16:20], "big") - 2 * picture.width) <= 2
    )


def test_what_cannot_be_written(tmp_path, monkeypatch):
    plan = einmpi.plan(load("softmax"), 2)
    with pytest.raises(
        InputError,
        match=r"plan\.jpg: unknown picture format; expected a file name .* in \.svg or \.png",
    ):
        write_plot("plan.jpg", plan)
    with pytest.raises(
        InputError,
        match=r"none/plan\.svg: No such file or directory; expected a file that can be written",
    ):
        write_plot(tmp_path / "none" / "plan.svg", plan)
    with pytest.raises(InputError, match="No such file or directory"):
        write_report(tmp_path / "none" / "plan.html", plan)
    monkeypatch.setattr("einmpi.report.describe.find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=r"need matplotlib.* ends in \.svg; or install einmpi\[plot\]"
    ):
        write_plot(tmp_path / "plan.png", plan)


def einmpi_command(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "einmpi", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )


@pytest.mark.slow
def test_pages_and_plots_from_the_command_line(tmp_path):
    job = str(ROOT / "jobs" / "chain.toml")
    done = einmpi_command(
        tmp_path, "plan", job, "-n", "8", "--compare", "--report", "plan.html", "--plot", "plan.svg"
    )
    assert done.returncode == 0 and "eindecomp-paper" in done.stdout, done.stderr
    assert sections((tmp_path / "plan.html").read_text()) == [
        "program",
        "plan",
        "tensors",
        "table",
        "strategies",
    ]
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")
    done = einmpi_command(tmp_path, job, "--report", "none/run.html")
    assert (done.returncode, done.stdout) == (2, "")
    message = "No such file or directory; expected a file that can be written"
    assert done.stderr == f"--report none/run.html: {message}\n"


@pytest.mark.slow
@needs_mpirun
@pytest.mark.mpirun
def test_a_run_writes_its_page(tmp_path):
    job = str(ROOT / "jobs" / "chain.toml")
    done = run_mpi(2, ["-m", "einmpi", job, "--report", "run.html"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "run.html").read_text()
    assert "as planned" in text and "Gop/s" in text


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node to run scripts with")
@pytest.mark.parametrize("ranks", [8, 12, 16, 36])
def test_pictures_of_tensors_show_who_has_which_indices(ranks):
    """`segments` of the page against the shares of ranks, for all axes that may cut a label."""
    mesh = Mesh(ranks)
    extents = (2, 5, 7, 10, 12, 31, 100)
    cases = []
    for extent in extents:
        masks = np.arange(1 << len(mesh.factors))
        for mask in masks[may_cut(mesh.factors, extent, masks, True)].tolist():
            cuts = [0 if mask >> axis & 1 else -1 for axis in range(len(mesh.factors))]
            cases.append([extent, cuts])
    windows = {str(extent): mesh.windows(extent) for extent in extents}
    script = (ROOT / "einmpi" / "report" / "page" / "tensors.js").read_text()
    function = re.search(r"^function segments.*?^}$", script, re.DOTALL | re.MULTILINE)[0]
    lines = [
        f"const mesh = {json.dumps(mesh.factors)};",
        f"const data = {{ layouts: {{ windows: {json.dumps(windows)} }} }};",
        re.search(r"^const strides = .*?;$", script, re.MULTILINE)[0],
        function,
        f"const cases = {json.dumps(cases)};",
        "console.log(JSON.stringify(cases.map(([extent, cuts]) => segments(extent, 0, cuts))));",
    ]
    done = subprocess.run(
        ["node", "-"], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    for (extent, cuts), found in zip(cases, json.loads(done.stdout), strict=True):
        axes = [axis for axis, cut in enumerate(cuts) if cut == 0]
        owned = {}
        for start, stop, first_rank in found:
            owned.setdefault(first_rank, []).extend(range(start, stop))
        assert len(owned) == mesh.parts(cuts, [0])[0]
        for rank, indices in owned.items():
            assert tuple(indices) == owned_indices(mesh, extent, axes, rank), (extent, cuts)
