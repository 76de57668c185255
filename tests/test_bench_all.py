"""python -m bench: the names, the runs of all, the one form of results, the page and its plots."""

import importlib
import json
import math
import os
import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from mpi_helpers import finished
from paths import ROOT

GOOD = {
    "bench": "spill",
    "machine": {"cores": 2},
    "date": "2026-11-17",
    "command": "python -m bench spill",
    "rows": [{"way": "a", "seconds": 1.5, "times": [1.0, 2], "peers": {"numpy": None}}],
}


@pytest.fixture
def bench():
    """Return a function that imports a module of bench/lib."""
    return lambda name: importlib.import_module(f"bench.lib.{name}")


def run_bench(*arguments, cwd=ROOT):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return finished([sys.executable, "-m", "bench", *arguments], cwd=cwd, env=environment)


def test_list_names_every_script():
    done = run_bench("list")
    assert done.returncode == 0, done.stderr
    listed = [line.split()[0] for line in done.stdout.splitlines()]
    scripts = []
    for file in sorted((ROOT / "bench").glob("*/*.py")):
        if "\ndef main() -> None:" in file.read_text() and file.stem != "node_peers":
            scripts.append(file.stem)
    assert set(scripts) <= set(listed) and "results" not in listed and "plots" not in listed


@pytest.mark.slow
def test_a_name_is_a_script():
    by_name = run_bench("step", "--help")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    by_file = finished(
        [sys.executable, "bench/kernels/step.py", "--help"], cwd=ROOT, env=environment
    )
    assert by_name.returncode == by_file.returncode == 0
    assert by_name.stdout == by_file.stdout


def test_an_unknown_name_is_refused():
    done = run_bench("steps")
    assert done.returncode == 1
    assert done.stderr.startswith("there is no benchmark 'steps'; usage: python -m bench list")


def test_all(tmp_path):
    done = run_bench("all", "--quick", "--only", "spill", "array_api", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    first, second, _ = done.stdout.splitlines()
    assert re.fullmatch(r"spill +4 rows in \d+ s", first)
    assert re.fullmatch(r"array_api +skipped: it needs a copy of the suite: .*", second)
    record = json.loads((tmp_path / "spill.json").read_text())
    assert list(record) == ["bench", "machine", "date", "command", "rows"]
    assert record["command"] == "python -m bench spill --size 300 --repeat 2"
    assert [row["limit"] for row in record["rows"]] == ["none", "1/2", "1/4", "1/8"]
    page = (tmp_path / "index.html").read_text()
    assert "<svg" in page and "it needs a copy of the suite" in page
    assert not re.search(r"src=|href='[^#]|url\(|@import|<script", page)  # nothing from elsewhere
    title = "The matrix chain with less memory"
    assert f"<a href='#spill'>{title}</a>" in page and f"<h2 id='spill'>{title}</h2>" in page


def test_a_failing_benchmark_is_named_and_the_others_go_on(bench, tmp_path, monkeypatch, capsys):
    catalogue = bench("catalogue")
    module = bench("all")
    benches = (
        catalogue.Bench("wrong", "spill", quick="--size none"),
        catalogue.Bench("slow", "spill", quick="--size 3000 --repeat 1000"),
        catalogue.Bench("missing", "no_such_script"),
    )
    outcomes = module.run_all(benches[:1] + benches[2:], tmp_path, True, 60)
    outcomes += module.run_all(benches[1:2], tmp_path, True, 0.2)
    assert [bool(outcome.failed) for outcome in outcomes] == [True, False, True]
    wrong, missing, slow = capsys.readouterr().out.splitlines()
    assert "failed: status 2: " in wrong and "--size" in wrong
    assert missing.endswith("skipped: there is no benchmark 'no_such_script'")
    assert slow.endswith("failed: it was not done after 0.2 s")


def test_every_benchmark_of_all_is_there_and_takes_json(bench):
    catalogue = bench("catalogue")
    benches = catalogue.BENCHES
    assert len({each.name for each in benches}) == len(benches)
    for each in benches:
        file = catalogue.scripts()[each.script]
        assert '"--json"' in file.read_text() or each.script == "array_api", each.name
        assert each.title and (each.reading or {"gpu", "suite"} & set(each.needs)), each.name


def change(name, value):
    return {**GOOD, name: value}


@pytest.mark.parametrize(
    "record",
    [
        [],
        {"rows": []},
        {**GOOD, "more": 1},
        change("bench", 3),
        change("date", "17.11.2026"),
        change("rows", [[]]),
        change("rows", [{}]),
        change("rows", [{"way": object()}]),
        change("rows", [{"peers": {"numpy": {1, 2}}}]),
    ],
)
def test_other_forms_of_results_are_refused(bench, record):
    results = bench("results")
    results.check_results(GOOD)
    with pytest.raises(ValueError, match=r".+"):
        results.check_results(record)


# ---- plots ---------------------------------------------------------------------------------------


def places(svg, shape):
    """Return the points of the first shape of a kind."""
    root = ET.fromstring(svg)
    found = root.find(f"{{http://www.w3.org/2000/svg}}{shape}")
    return [tuple(map(float, pair.split(","))) for pair in found.get("points").split()]


def test_lines_are_straight_where_both_axes_are_logarithmic(bench):
    points = [(8, 4.0), (64, 0.5), (512, 0.0625)]
    svg = bench("plots").line_plot("a <title>", "ranks", "s", {"one & two": points})
    (x0, y0), (x1, y1), (x2, y2) = places(svg, "polyline")
    assert x0 < x1 < x2 and y0 < y1 < y2  # SVG counts from the top
    assert math.isclose(x1 - x0, x2 - x1, abs_tol=0.2)
    assert math.isclose(y1 - y0, y2 - y1, abs_tol=0.2)
    assert "a &lt;title&gt;" in svg and "one &amp; two" in svg


def test_bars_are_as_long_as_their_numbers(bench):
    svg = bench("plots").bar_plot("times", "s", [("a", 1.0), ("b", 4.0), ("c", 0.0)])
    root = ET.fromstring(svg)
    bars = root.findall("{http://www.w3.org/2000/svg}rect")[1:]
    lengths = [float(bar.get("width")) for bar in bars]
    assert lengths[1] == 4 * lengths[0] > lengths[2] == 0


def test_points_at_zero_are_left_out_where_the_axis_is_logarithmic(bench):
    lines = {"sqrt": [(8, 0), (64, 4.0), (512, 2.0)], "nothing": [(8, 0)]}
    svg = bench("plots").line_plot("words", "ranks", "words", lines)
    assert len(places(svg, "polyline")) == 2 and "nothing" not in svg


def test_names_of_lines_are_not_cut_off(bench):
    name = "einmpi eindecomp-paper, with a long name"
    root = ET.fromstring(bench("plots").line_plot("t", "x", "y", {name: [(1, 1), (2, 2)]}))
    (legend,) = [text for text in root.iter() if text.text == name]
    assert float(legend.get("x")) + 6 * len(name) < float(root.get("width"))


def test_ratios_have_a_line_at_one(bench):
    svg = bench("plots").bar_plot("ratios", "s", [("a", 0.5), ("b", 2.0)], is_ratio=True)
    root = ET.fromstring(svg)
    _, first, second = root.findall("{http://www.w3.org/2000/svg}rect")
    (line,) = root.findall("{http://www.w3.org/2000/svg}path")
    across = float(line.get("d").removeprefix("M").partition(",")[0]) - float(first.get("x"))
    assert math.isclose(across, 2 * float(first.get("width")), abs_tol=0.2)
    assert math.isclose(across, float(second.get("width")) / 2, abs_tol=0.2)


@pytest.mark.parametrize(
    "value, text", [(0.0123, "0.0123"), (12.34, "12.3"), (691200, "691,200"), (2.38e9, "2.38 G")]
)
def test_numbers_beside_bars(bench, value, text):
    assert f">{text}</text>" in bench("plots").bar_plot("t", "words", [("a", value)])


def test_nothing_to_plot(bench):
    plots = bench("plots")
    assert plots.line_plot("t", "x", "y", {}) == plots.bar_plot("t", "s", []) == ""


def test_the_page_has_all_rows(bench, tmp_path):
    page = bench("results_page")
    catalogue = bench("catalogue")
    spill = catalogue.Bench("spill", "spill", plots=(catalogue.Bars(("way",), "seconds"),))
    outcomes = [page.Outcome(spill, record=GOOD), page.Outcome(spill, skipped="a < b")]
    page.write_page(tmp_path / "index.html", outcomes)
    text = (tmp_path / "index.html").read_text()
    assert "<td class='number'>1.5</td>" in text and "a &lt; b" in text
    assert "<th>peers numpy</th>" in text and "times" not in text.partition("<details>")[2]


def test_bars_are_apart_where_their_columns_differ(bench):
    page = bench("results_page")
    catalogue = bench("catalogue")
    bars = catalogue.Bars(("peer",), "words", per=("kind", "ranks"))
    place = {"kind": "skewed", "ranks": 4}
    rows = [{**place, "ranks": ranks, "peer": "einmpi", "words": ranks} for ranks in (2, 4)]
    rows += [{**place, "peer": "numpy", "words": 691200}, {"peer": "no place", "words": 1}]
    two, four = page.plots_of(catalogue.Bench("chain", "chain", plots=(bars,)), rows)
    assert ">skewed, ranks 2</text>" in two and ">words</text>" in two and "numpy" not in two
    assert "numpy" in four and "691,200" in four and "no place" not in two + four
    assert bench("plots").OTHERS in four and bench("plots").OTHERS not in two
    many = [{**place, "peer": f"p{number}", "words": 1} for number in range(61)]
    (first,) = page.plots_of(catalogue.Bench("chain", "chain", plots=(bars,)), many)
    assert "the first 60 of 61" in first


def test_bars_of_names_inside_of_a_row(bench):
    page = bench("results_page")
    catalogue = bench("catalogue")
    bars = catalogue.Bars(("kernel",), "ratio", inside="peers", in_order=True, is_ratio=True)
    peers = {"torch": {"seconds": 1.0, "ratio": 3.0}, "numpy": {"ratio": 0.5}, "none": {}}
    (plot,) = page.bar_plots(bars, [{"kernel": "softmax", "peers": peers}])
    assert plot.index(">softmax, torch<") < plot.index(">softmax, numpy<") and "none" not in plot
    assert "stroke-dasharray" in plot


def test_bars_are_sorted_and_have_units_that_can_be_read(bench):
    page = bench("results_page")
    bars = bench("catalogue").Bars(("peer", "ranks"), "seconds", unit="seconds of a step")
    rows = [{"peer": name, "ranks": 1, "seconds": s} for name, s in (("a", 0.02), ("b", 0.01))]
    (plot,) = page.bar_plots(bars, rows)
    assert plot.index(">b, 1 rank<") < plot.index(">a, 1 rank<")
    assert ">milliseconds of a step<" in plot and ">20<" in plot
    titled = replace(bars, subject="a chain", per=("ranks",))
    assert ">a chain, ranks 1</text>" in page.bar_plots(titled, rows)[0]
    (plot,) = page.bar_plots(bars, [{"peer": "a", "ranks": 2, "seconds": 4e-5}])
    assert ">microseconds of a step<" in plot and ">40<" in plot and ">a, 2 ranks<" in plot


def test_peers_that_are_left_out_are_named_on_the_page(bench, tmp_path):
    printed = tmp_path / "spill.txt"
    line = "heat is left out: heat is <not> installed"
    printed.write_text(f"words\n  {line}\n{line}\nother\n")
    left_out = bench("all").lines_about_peers(printed)
    assert left_out == (line,)
    page = bench("results_page")
    spill = bench("catalogue").Bench("spill", "spill")
    page.write_page(tmp_path / "i.html", [page.Outcome(spill, record=GOOD, left_out=left_out)])
    assert "<li>heat is left out: heat is &lt;not&gt; installed</li>" in (
        tmp_path / "i.html"
    ).read_text(encoding="utf-8")


def test_lines_of_a_page_are_those_of_its_rows(bench):
    page = bench("results_page")
    catalogue = bench("catalogue")
    lines = catalogue.Lines(("graph",), "strategy", "ranks", "words")
    rows = []
    for graph in ("chain", "layer"):
        for ranks in (8, 64):
            rows.append({"graph": graph, "strategy": "sqrt", "ranks": ranks, "words": 2 * ranks})
    rows.append({"graph": "layer", "strategy": "data", "ranks": 8, "words": None})  # no plan
    found = page.plots_of(catalogue.Bench("planning", "planning", plots=(lines,)), rows)
    assert len(found) == 2 and "chain" in found[0] and "layer" in found[1]
    assert len(places(found[0], "polyline")) == 2 and "data" not in found[1]
