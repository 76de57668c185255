"""--metrics: the numbers of --json as OpenMetrics, read by a strict parser and by Prometheus's."""

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from einmpi.cli.main import main
from einmpi.report.results import metrics_text

INFO = dict.fromkeys(("title", "job", "strategy", "digest", "backend", "blas", "host"), "x")
LOOP = """
program = "x = x0 + 1"
inputs.x0 = { shape = [], random = "ones" }
[loop]
carry = { x0 = "x" }
steps = 4
record = ["x"]
"""
NAME = r"[a-z_][a-z0-9_]*"
LABEL = rf'{NAME}="(?:[^"\\\n]|\\[\\"n])*"'
SAMPLE = rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? (-?[0-9][0-9.e+-]*)"

UNESCAPED = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


def read(text):
    """Return {(name, labels): value}: lines of a metric are together, after its HELP and TYPE."""
    *lines, end = text.removesuffix("\n").split("\n")
    assert end == "# EOF" and text.endswith("\n")
    found, names, expected = {}, set(), None
    for line in lines:
        if line.startswith("# HELP "):
            expected = line.split(" ", 3)[2]
            assert expected not in names
            names.add(expected)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == expected and kind == ("info" if name == "einmpi_run" else "gauge")
        else:
            name, labels, value = re.fullmatch(SAMPLE, line).groups()
            assert name == expected or name == f"{expected}_info"
            pairs = re.findall(rf'({NAME})="((?:[^"\\]|\\.)*)"', labels or "")
            key = frozenset(
                (label, re.sub(r"\\.", lambda found: UNESCAPED[found[0]], text))
                for label, text in pairs
            )
            assert (name, key) not in found
            found[name, key] = float(value)
    return found


def by_prometheus(text):
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def value_of(found, name, /, **labels):
    return found[name, frozenset(labels.items())]


def run(tmp_path, monkeypatch, job, *flags):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(job)
    words = ["run", "job.toml", "--quiet", "--json", "run.json", "--metrics", "run.prom"]
    assert main([*words, *flags]) == 0
    text = (tmp_path / "run.prom").read_text()
    return json.loads((tmp_path / "run.json").read_text()), text


JOB = """
title = 'a "title" \\ ü'
program = "Z[i,k] = sum(A[i,j] * A[j,k])"
sizes.n = 8
inputs.A = { shape = ["n", "n"], random = "normal", seed = 1 }
"""


def test_a_run(tmp_path, monkeypatch):
    data, text = run(tmp_path, monkeypatch, JOB, "--trace", "t.json")
    found = read(text)
    numbers = {key: each for key, each in data.items() if isinstance(each, (int, float))}
    assert len(numbers) > 15
    for key, number in numbers.items():
        assert value_of(found, f"einmpi_{key}") == number
    for phase, seconds in data["seconds"].items():
        assert value_of(found, "einmpi_seconds", phase=phase) == seconds
    assert value_of(found, "einmpi_sizes", size="n") == 8
    assert value_of(found, "einmpi_outputs_norm", output="Z") == data["outputs"]["Z"]["norm"]
    (vertex,) = [each for each in data["vertices"] if each["name"] == "Z"]
    operations = value_of(found, "einmpi_vertices_operations", vertex="Z")
    assert operations == vertex["operations"] > 0
    assert value_of(found, "einmpi_startup_kernels_compiled") >= 0
    assert not any("date" in name or "versions" in name for name, _ in found)
    (info,) = [dict(labels) for name, labels in found if name == "einmpi_run_info"]
    assert (info["title"], info["digest"]) == ('a "title" \\ ü', data["digest"])


def test_a_loop(tmp_path, monkeypatch):
    data, text = run(tmp_path, monkeypatch, LOOP)
    found = read(text)
    assert value_of(found, "einmpi_loop_steps") == 4
    assert value_of(found, "einmpi_loop_done") == int(data["loop"]["done"])
    last = value_of(found, "einmpi_loop_history", name="x")
    assert last == data["loop"]["history"]["x"][-1] == 5


def test_several_loops_have_a_number():
    loops = [{"steps": 3, "history": {"loss": [2.0, None]}}, {"steps": 4, "history": {}}]
    found = read(metrics_text({**INFO, "loops": loops, "outputs": {}}))
    assert value_of(found, "einmpi_loops_steps", loop="1") == 3
    assert value_of(found, "einmpi_loops_steps", loop="2") == 4
    assert not any("history" in name for name, _ in found)


@given(
    title=st.text(),
    numbers=st.dictionaries(
        st.sampled_from(["ranks", "flops", "seconds_hidden"]),
        st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.none()
        | st.booleans(),
    ),
    norms=st.dictionaries(st.text(min_size=1), st.floats(0, 1e300), max_size=3),
)
def test_any_numbers_and_names(title, numbers, norms):
    outputs = {name: {"norm": norm, "shape": [2]} for name, norm in norms.items()}
    text = metrics_text({**INFO, "title": title, **numbers, "outputs": outputs})
    found = read(text)
    for name, number in numbers.items():
        if number is None:
            assert (f"einmpi_{name}", frozenset()) not in found
        else:
            assert value_of(found, f"einmpi_{name}") == float(number)
    norms_found = [value for (name, _), value in found.items() if name == "einmpi_outputs_norm"]
    assert math.isclose(sum(norms_found), sum(norms.values()))


def test_prometheus_reads_the_same(tmp_path, monkeypatch):
    _, text = run(tmp_path, monkeypatch, JOB, "--trace", "t.json")
    assert by_prometheus(text) == read(text)
