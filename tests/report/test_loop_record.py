"""Recorded loops: sums over all steps, traces of a few, on threads and on real ranks."""

import json

import pytest
from in_process import einmpi_here
from mpi_helpers import needs_mpirun, run_mpi
from paths import ROOT

import einmpi
from einmpi.api import options_of
from einmpi.comm.threads import run_threads
from einmpi.loops.sequence import LoopSequence
from einmpi.report.times import LAST_STEPS_TRACED, LoopRecorder, loops_timeline

TWO_LOOPS = """
sizes = { n = 24 }
[inputs]
A = { shape = ["n", "n"], random = "uniform", seed = 1 }
x = { shape = ["n"], random = "ones" }
[[loop]]
program = "y[i] = sum(A[i,j] * x[j]) / n; total = sum(y[i])"
steps = 9
carry = { x = "y" }
record = ["total"]
[[loop]]
program = "z[i] = x[i] + sum(A[j,i] * x[j]) / n; least = min(z[i])"
steps = 30
carry = { x = "z" }
until = "step >= 4"
record = ["least"]
"""


def recorded_loops(job, ranks, chosen=None):
    """Run loops on thread ranks; return their runs and records."""

    def on_rank(comm):
        loops = LoopSequence(job, comm, options_of)
        recorders = []

        class Recording:
            def __init__(self, run):
                self.run = run

            def __enter__(self):
                run = self.run
                name = f"loop {run.number}, "
                recorder = LoopRecorder(comm, lambda: None, chosen, name)
                run.step.runner.on_step = recorder
                run.on_computed = recorder.end_step
                recorder.begin()
                recorders.append(recorder)

            def __exit__(self, *_):
                pass

        loops.run({}, Recording)
        pairs = zip(loops.runs, recorders, strict=True)
        return loops.runs, [recorder.finish_loop(run.plan.graph) for run, recorder in pairs]

    results = run_threads(ranks, on_rank)
    for _, records in results[1:]:
        assert records == [None, None]
    return results[0]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_bytes_of_all_steps_and_of_each_traced_step_are_those_of_the_plan(tmp_path, ranks):
    (tmp_path / "job.toml").write_text(TWO_LOOPS)
    runs, records = recorded_loops(einmpi.load(tmp_path / "job.toml"), ranks)
    for run, record, steps in zip(runs, records, (9, 5), strict=True):
        assert sum(times.nbytes for times in record.times) == steps * run.plan.bytes_predicted
        assert sum(times.words for times in record.times) == steps * run.plan.words_predicted
        assert record.traced == (0, *range(steps - LAST_STEPS_TRACED, steps))
        computed = {times.name for times in record.times if times.operations}
        assert computed == {vertex.name for vertex in run.plan.graph.computed}
        seconds = sum(times.seconds for times in record.times)
        assert 0 < seconds <= run.measured.seconds + 0.1
    timeline = loops_timeline(records)
    assert timeline.ranks == ranks
    for number, (run, record) in enumerate(zip(runs, records, strict=True)):
        for step in record.traced:
            moved = 0
            for span in timeline.spans:
                if span.during == f"loop {number}, step {step}":
                    moved += span.nbytes if span.kind in ("exchange", "reduce") else 0
            assert moved == run.plan.bytes_predicted
    for rank in range(ranks):
        own = [span for span in timeline.spans if span.rank == rank]
        assert [span.start for span in own] == sorted(span.start for span in own)


@pytest.mark.parametrize(
    ("chosen", "first", "second"),
    [
        (range(2, 4), (2, 3), (2, 3)),
        (range(4, 7), (4, 5, 6), (4,)),
        # The second loop ends before: its last steps are there instead.
        (range(6, 7), (6,), (0, 2, 3, 4)),
    ],
)
def test_chosen_steps(tmp_path, chosen, first, second):
    (tmp_path / "job.toml").write_text(TWO_LOOPS)
    _, records = recorded_loops(einmpi.load(tmp_path / "job.toml"), 2, chosen)
    assert [record.traced for record in records] == [first, second]


def test_memory_does_not_grow_with_the_steps(tmp_path):
    """Only a few steps are kept, however many there are."""
    (tmp_path / "job.toml").write_text(TWO_LOOPS.replace("steps = 9", "steps = 200"))
    (_, (record, _)) = recorded_loops(einmpi.load(tmp_path / "job.toml"), 1)
    assert record.traced == (0, 197, 198, 199)


def test_the_command_line(tmp_path):
    (tmp_path / "job.toml").write_text(TWO_LOOPS)
    flags = ["--summary", "--trace", "trace.json", "--trace-steps", "3", "--json", "run.json"]
    done = einmpi_here(tmp_path, ["job.toml", *flags])
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.split("\n")
    assert "loop 1 of 2" in lines and "loop 2 of 2" in lines
    assert done.stdout.count("traced       step 3\n") == 2
    data = json.loads((tmp_path / "run.json").read_text())
    for loop, computed in zip(data["loops"], (["y", "total"], ["z", "least"]), strict=True):
        assert loop["steps_traced"] == [3]
        assert {*computed} <= {vertex["name"] for vertex in loop["vertices"]}
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = {event["args"]["loop"] for event in events if event["ph"] == "X"}
    assert steps == {"loop 1 of 2, step 3", "loop 2 of 2, step 3"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--trace-steps", "3"],
            "--trace-steps: alone it does nothing; expected --trace FILE.json with it",
        ),
        (
            ["--trace", "t.json", "--trace-steps", "x"],
            "--trace-steps: 'x' requested; expected a step, or FIRST:END",
        ),
        (
            ["--trace", "t.json", "--trace-steps", "3:3"],
            "--trace-steps: '3:3' has no step; expected FIRST below END",
        ),
        (
            ["--trace", "t.json", "--trace-steps", "30"],
            "--trace-steps: '30' requested; expected a step from 0 to 29",
        ),
    ],
)
def test_refused(tmp_path, flags, message):
    (tmp_path / "job.toml").write_text(TWO_LOOPS)
    done = einmpi_here(tmp_path, ["job.toml", *flags])
    assert (done.returncode, done.stderr) == (2, message + "\n")


def test_a_job_without_a_loop_has_no_steps_to_choose(tmp_path):
    (tmp_path / "job.toml").write_text('program = "Z[i:3] = i"')
    done = einmpi_here(tmp_path, ["job.toml", "--trace", "t.json", "--trace-steps", "3"])
    message = "--trace-steps: the job has no loop; expected a job with a [loop]\n"
    assert (done.returncode, done.stderr) == (2, message)


@pytest.mark.slow
@needs_mpirun
def test_real_ranks(tmp_path):
    job = str(ROOT / "jobs" / "power.toml")
    flags = ["--trace", "trace.json", "--summary", "--json", "run.json"]
    done = run_mpi(2, ["-m", "einmpi", job, *flags], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads((tmp_path / "run.json").read_text())
    loop = data["loop"]
    assert sum(vertex["bytes"] for vertex in loop["vertices"]) == 7 * loop["bytes_a_step"]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in spans} == {0, 1}
    moved = 0
    for event in spans:
        if event["cat"] in ("exchange", "reduce"):
            moved += event["args"].get("bytes", 0)
    assert moved == len(loop["steps_traced"]) * loop["bytes_a_step"]
    assert any(event["ph"] == "s" for event in events)
