"""Timelines for tests: recorded on ranks that are threads, or made up."""

from __future__ import annotations

from typing import Any

import einmpi
from einmpi.api import options_of
from einmpi.comm.threads import run_threads
from einmpi.compiled.program import Compiled
from einmpi.planner.make_plan import Plan
from einmpi.report.record import Recorder, work_of
from einmpi.report.timeline import Span, Timeline
from einmpi.schedule.lower import lower


def recorded(job: einmpi.Job, ranks: int) -> tuple[Plan, Timeline]:
    """A run on threads: its plan, and what each rank did when."""
    plan, timeline, _ = recorded_run(job, ranks)
    return plan, timeline


def recorded_run(job: einmpi.Job, ranks: int) -> tuple[Plan, Timeline, list[int]]:
    """The same, and the bytes that each rank received."""

    def on_rank(comm: Any) -> Any:
        compiled, recorder = Compiled(job, comm, options_of(job)), Recorder(comm)
        compiled.on_step = recorder
        before = comm.received
        recorder.begin()
        compiled()
        return compiled, recorder.finish(), comm.received - before

    results = run_threads(ranks, on_rank)
    compiled, timeline, _ = results[0]
    assert timeline is not None and all(other is None for _, other, _ in results[1:])
    ((plan, _),) = compiled.ready.values()
    return plan, timeline, [received for _, _, received in results]


def made_up(plan: Plan) -> Timeline:
    """As many spans as a run has, with labels that differ from rank to rank like real ones. Nothing is run."""
    steps = [
        (work, str(step)) for step in lower(plan, 0).steps if (work := work_of(step)) is not None
    ]
    spans = []
    for rank in range(plan.ranks):
        now = 1e-5 * rank
        for k, (work, line) in enumerate(steps):
            label = line.replace("[0:", f"[{rank}:") if work.kind == "load" else line
            took = (1 + (7 * rank + 13 * k) % 17) * 1e-6 + (
                work.operations + 16 * work.nbytes
            ) / 1e12
            spans.append(
                Span(
                    rank,
                    work.kind,
                    work.vertex,
                    label,
                    now,
                    now + took,
                    work.nbytes,
                    work.operations,
                )
            )
            now += took + 1e-6
    return Timeline(plan.ranks, max(span.end for span in spans), tuple(spans))
