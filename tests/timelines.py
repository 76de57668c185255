"""Timelines for tests: recorded on ranks that are threads, or made up."""

from __future__ import annotations

import time
from typing import Any

import einmpi
from einmpi.api import options_of
from einmpi.compiled import Compiled
from einmpi.plan.plan import Plan
from einmpi.report.timeline import Span, Timeline
from einmpi.runtime.comm_threads import run_threads
from einmpi.schedule.lower import lower
from einmpi.schedule.steps import Exchange, Group, Kernel, Load, Reduce, Step, Store

KIND = {Load: "load", Exchange: "exchange", Reduce: "reduce", Kernel: "kernel", Group: "kernel", Store: "store"}


def recorded(job: einmpi.Job, ranks: int) -> tuple[Plan, Timeline]:
    """A run on threads: its plan, and what each rank did when."""

    def on_rank(comm: Any) -> Any:
        compiled, steps = Compiled(job, comm, options_of(job)), list[tuple[float, Step]]()
        compiled.on_step = lambda step: steps.append((time.perf_counter(), step))
        compiled()
        ends = [start for start, _ in steps[1:]] + [time.perf_counter()]
        return compiled, [(start, end, step) for (start, step), end in zip(steps, ends, strict=True)]

    results = run_threads(ranks, on_rank)
    ((plan, _),) = results[0][0].ready.values()
    first = min(start for _, steps in results for start, _, _ in steps)
    spans = tuple(
        span_of(rank, step, start - first, end - first)
        for rank, (_, steps) in enumerate(results)
        for start, end, step in steps
        if type(step) in KIND
    )
    return plan, Timeline(ranks, max(span.end for span in spans), spans)


def span_of(rank: int, step: Step, start: float, end: float) -> Span:
    kernels = step.kernels if isinstance(step, Group) else (step,) if isinstance(step, Kernel) else ()
    operations = sum(kernel.einsum.operations() for kernel in kernels)
    nbytes = 0 if kernels else step.slot.nbytes if isinstance(step, Load | Store) else step.nbytes
    name = step.vertex if kernels else step.tensor
    return Span(rank, KIND[type(step)], name, str(step), start, end, nbytes, operations)


def made_up(plan: Plan) -> Timeline:
    """As many spans as a run has, with labels that differ from rank to rank like real ones. Nothing is run."""
    steps = [span_of(0, step, 0, 0) for step in lower(plan, 0).steps if type(step) in KIND]
    spans = []
    for rank in range(plan.ranks):
        now = 1e-5 * rank
        for k, step in enumerate(steps):
            label = step.label.replace("[0:", f"[{rank}:") if step.kind == "load" else step.label
            took = (1 + (7 * rank + 13 * k) % 17) * 1e-6 + (step.operations + 16 * step.nbytes) / 1e12
            spans.append(Span(rank, step.kind, step.vertex, label, now, now + took, step.nbytes, step.operations))
            now += took + 1e-6
    return Timeline(plan.ranks, max(span.end for span in spans), tuple(spans))
