"""Timelines for tests: recorded with threads as ranks, or synthetic."""

from __future__ import annotations

from typing import Any

import einmpi
from einmpi.api import options_of
from einmpi.comm.threads import run_threads
from einmpi.compiled.program import Compiled
from einmpi.planner.plan import Plan
from einmpi.report.record import Recorder, Timeline, is_reported, span_of
from einmpi.schedule.lower import lower


def recorded(job: einmpi.Job, ranks: int) -> tuple[Plan, Timeline]:
    """Run a job on threads. Return its plan and its timeline."""
    plan, timeline, _ = recorded_run(job, ranks)
    return plan, timeline


def recorded_run(job: einmpi.Job, ranks: int) -> tuple[Plan, Timeline, list[int]]:
    """The same, with the bytes that each rank received."""

    def on_rank(comm: Any) -> Any:
        compiled, recorder = Compiled(job, comm, options_of(job)), Recorder(comm)
        compiled.runner.on_step = recorder
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
    """Return as many spans as a run has, without running anything.

    Labels differ from rank to rank, as those of real runs do.
    """
    steps = []
    for step in lower(plan, 0).steps:
        if is_reported(step):
            steps.append(span_of(step, 0, 0.0, 0.0))
    spans = []
    for rank in range(plan.ranks):
        now = 1e-5 * rank
        for k, span in enumerate(steps):
            label = span.label
            if span.kind == "load":
                label = label.replace("[0:", f"[{rank}:")
            jitter = (1 + (7 * rank + 13 * k) % 17) * 1e-6
            took = jitter + (span.operations + 16 * span.nbytes) / 1e12
            spans.append(
                span._replace(rank=rank, label=label, start=now, end=now + took, group=(), to=None)
            )
            now += took + 1e-6
    return Timeline(plan.ranks, max(span.end for span in spans), tuple(spans))
