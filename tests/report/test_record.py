"""Recorded runs: timelines, trace files and summaries, on threads and on real ranks."""

import json
import re
import threading
import time
from itertools import count, pairwise
from pathlib import Path

import pytest
from mpi_helpers import needs_mpirun, run_mpi
from paths import ROOT
from timelines import recorded_run

import einmpi
from einmpi.cli.main import main
from einmpi.comm import control_messages as clocks
from einmpi.report import record
from einmpi.report.record import KINDS, Span, Timeline, events, write_trace
from einmpi.report.times import VertexTimes, summary_rows, vertex_times
from einmpi.schedule.lower import lower


def job(name, **sizes):
    return einmpi.load(ROOT / "jobs" / f"{name}.toml", **sizes)


def check_trace(data, ranks, moved):
    """Check what Perfetto needs, and that the bytes equal those counted."""
    tracks = {
        event["tid"]: event["args"]["name"] for event in data if event["name"] == "thread_name"
    }
    assert tracks == {rank: f"rank {rank}" for rank in range(ranks)}
    spans = [event for event in data if event["ph"] == "X"]
    for rank in range(ranks):
        own = [event for event in spans if event["tid"] == rank]
        now = 0.0
        for event in own:
            assert (
                event["cat"] in KINDS
                and event["args"]["step"]
                and "\n" not in event["args"]["step"]
            )
            assert event["ts"] >= now - 1e-6 and event["dur"] >= 0  # rounded to a nanosecond
            now = event["ts"] + event["dur"]
    sent = sum(
        event["args"].get("bytes", 0) for event in spans if event["cat"] in ("exchange", "reduce")
    )
    assert sent == moved
    starts, ends = (
        {event["id"]: event for event in data if event["ph"] == phase} for phase in "sf"
    )
    assert starts.keys() == ends.keys() and len(starts) + len(ends) == sum(
        event["ph"] in "sf" for event in data
    )
    for number, start in starts.items():
        end = ends[number]
        assert (
            start["ts"] <= end["ts"] and start["tid"] != end["tid"] and start["name"] == end["name"]
        )
        for arrow in (start, end):  # bound to a step of that kind
            assert any(
                event["tid"] == arrow["tid"]
                and event["cat"] == arrow["cat"]
                and event["name"] == arrow["name"]
                and event["ts"] <= arrow["ts"] < event["ts"] + event["dur"]
                for event in spans
            )
    return len(starts)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "ranks"),
    [("distances", 1), ("distances", 4), ("attention", 3), ("chain", 4), ("softmax", 2)],
)
def test_a_timeline_has_every_step(name, ranks):
    plan, timeline, received = recorded_run(job(name), ranks)
    for rank in range(ranks):
        own = [span for span in timeline.spans if span.rank == rank]
        assert all(one.end <= two.start + 1e-9 for one, two in pairwise(own))
        moved = [span for span in own if span.kind in ("exchange", "reduce")]
        assert sum(span.nbytes for span in moved) == received[rank]
        if name not in ("chain", "softmax"):  # whose kernels are done together
            steps = [step for step in lower(plan, rank).steps if step.kind]
            assert [span.label for span in own] == [" ".join(str(step).split()) for step in steps]
    assert timeline.ranks == ranks and timeline.seconds == max(span.end for span in timeline.spans)
    assert min(span.start for span in timeline.spans) == 0
    if name == "chain":  # whose extents divide
        assert sum(span.operations for span in timeline.spans) == plan.graph.operations()
        assert sum(received) == plan.bytes_predicted
    arrows = check_trace(list(events(timeline)), ranks, sum(received))
    assert (arrows > 0) == (sum(received) > 0) == (ranks > 1 and name != "softmax")


def test_clocks_that_differ_are_put_on_one_axis(monkeypatch):
    own, threads = threading.local(), count()

    def shifted():
        if not hasattr(own, "shift"):
            own.shift = 3000.0 * next(threads)
        return time.perf_counter() + own.shift

    monkeypatch.setattr(record, "perf_counter", shifted)
    monkeypatch.setattr(clocks, "time", type("Clock", (), {"perf_counter": staticmethod(shifted)}))
    _, timeline, _ = recorded_run(job("chain"), 4)
    assert next(threads) == 4 and timeline.seconds < 1000
    meetings = timeline.meetings()
    assert meetings
    for members in meetings:  # nobody leaves before all have come
        spans = [timeline.spans[place] for place in members.values()]
        assert {span.rank for span in spans} == set(spans[0].group)
        assert max(span.start for span in spans) < min(span.end for span in spans) + 0.5


# ---- a timeline that is known --------------------------------------------------------------------

PAIR = (0, 1)
KNOWN = Timeline(
    3,
    4.0,
    (
        Span(0, "load", "A", "load A", 0.0, 1.0, 80),
        Span(0, "exchange", "A", "exchange A", 1.0, 2.5, 40, 0, PAIR, 1),
        Span(0, "kernel", "Z", "kernel Z", 2.5, 4.0, 0, 600),
        Span(1, "load", "A", "load A", 0.0, 2.0, 80),
        Span(1, "exchange", "A", "exchange A", 2.0, 2.5, 40, 0, PAIR, 0),
        Span(1, "kernel", "Z", "kernel Z", 2.5, 3.0, 0, 200),
    ),
)


def test_times_of_vertices():
    """Rank 0 waits for a second. The third rank has no steps and does not count."""
    assert vertex_times(KNOWN, ["A", "B", "Z"]) == (
        VertexTimes("A", 0.0, 0.0, communication=0.5, waiting=0.5, operations=0, nbytes=80),
        VertexTimes("Z", kernel=1.0, slowest_kernel=1.5, operations=800),
    )


def test_waiting_is_never_longer_than_the_step():
    """If a rank seems to arrive after the step has ended, only its clock is late."""
    spans = (
        Span(0, "reduce", "Z", "", 0.0, 1.0, 8, 0, PAIR, 1),
        Span(1, "reduce", "Z", "", 5.0, 6.0, 8, 0, PAIR, 0),
    )
    late = Timeline(2, 6.0, spans)
    (times,) = vertex_times(late, ["Z"])
    assert (times.waiting, times.communication) == (0.5, 0.5)
    assert [event["ph"] for event in events(late)].count(
        "s"
    ) == 1  # the arrow back would go into the past


def test_the_slowest_vertices_come_first_and_the_rest_in_one_line():
    vertices = [
        VertexTimes(f"V{k}", k / 10, k / 10, 0.5, 0.25, k * 10**9, 10**9) for k in range(30)
    ]
    head, *rows = summary_rows(vertices)
    assert head[0] == "vertex" and [row[0] for row in rows] == [
        *(f"V{k}" for k in range(29, 9, -1)),
        "10 others",
        "in all",
    ]
    assert rows[0] == ("V29", "2.9000", "0.5000", "0.2500", "10.0", "2.0", "1.00")
    assert rows[-1][1:4] == ("43.5000", "15.0000", "7.5000")
    assert summary_rows([])[1:] == []


def test_events_of_a_known_timeline(tmp_path):
    write_trace(tmp_path / "trace.json", KNOWN)
    data = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert check_trace(data, 3, 80) == 2
    (kernel,) = [
        event for event in data if event["ph"] == "X" and event["name"] == "Z" and event["tid"] == 1
    ]
    assert kernel == {
        "ph": "X",
        "name": "Z",
        "pid": 1,
        "tid": 1,
        "cat": "kernel",
        "ts": 2.5e6,
        "dur": 5e5,
        "args": {"step": "kernel Z", "operations": 200},
    }


# ---- the command ---------------------------------------------------------------------------------

TABLE = re.compile(
    r"^vertex +computing s +moving s +waiting s +GFLOP/s +GB/s +imbalance$", re.MULTILINE
)


@pytest.mark.slow
@needs_mpirun
@pytest.mark.mpirun
@pytest.mark.parametrize("ranks", [2, 3])
def test_on_real_ranks(ranks, tmp_path):
    arguments = [
        "-m",
        "einmpi",
        str(ROOT / "jobs/chain.toml"),
        "--set",
        "s=240",
        "--repeat",
        "2",
        "--summary",
        "--trace",
        "trace.json",
        "--json",
        "run.json",
        "--report",
        "run.html",
    ]
    done = run_mpi(ranks, arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert TABLE.search(done.stdout) and "\x1b" not in done.stdout
    found = json.loads((tmp_path / "run.json").read_text())
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert check_trace(trace, ranks, found["bytes_moved"]) > 0
    assert found["bytes_moved"] == found["bytes_predicted"]
    assert sum(vertex["bytes"] for vertex in found["vertices"]) == found["bytes_moved"]
    assert sum(vertex["operations"] for vertex in found["vertices"]) == found["flops"]
    kinds = ("kernel", "communication", "waiting")
    assert all(vertex[f"seconds_{kind}"] >= 0 for vertex in found["vertices"] for kind in kinds)
    assert {"Z", "Z_1"} <= {vertex["name"] for vertex in found["vertices"]}
    assert "Timeline" in (tmp_path / "run.html").read_text()


def test_in_a_pipe_nothing_is_added(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([str(ROOT / "jobs/softmax.toml"), "--json", "run.json"]) == 0
    out, err = capsys.readouterr()
    assert not TABLE.search(out) and not err
    assert "vertices" not in json.loads(Path("run.json").read_text())
    assert main([str(ROOT / "jobs/softmax.toml"), "--summary", "--quiet", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert [vertex["name"] for vertex in json.loads(out)["vertices"]]
    assert main([str(ROOT / "jobs/softmax.toml"), "--trace", "none/trace.json"]) == 2
    out, err = capsys.readouterr()
    message = "No such file or directory; expected a file that can be written"
    assert err == f"--trace none/trace.json: {message}\n"
