"""The run of a job with a loop, as the flags ask for it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING

from einmpi.cli.job_options import loop_interval
from einmpi.errors import InputError
from einmpi.units import counted

if TYPE_CHECKING:
    from einmpi.comm.base import Comm
    from einmpi.files.claims import Claim
    from einmpi.job.job import Job
    from einmpi.job.loop import Loop
    from einmpi.loops.checkpoints import LoopCheckpoints
    from einmpi.loops.running import LoopResult, LoopRun
    from einmpi.report.results import LoopReport, Report


def run_claimed_loop(
    job: Job,
    options: argparse.Namespace,
    comm: Comm,
    stop_requests: Sequence[str],
    outputs_claim: Claim | None,
    folder_claim: Claim | None,
    start: float,
) -> tuple[Report, LoopCheckpoints | None]:
    """Run a loop whose output files no other run can write. `start` is when the command began.

    Without `outputs_claim` the outputs are not stored.
    """
    from einmpi.api import options_of
    from einmpi.cli.run_job import startup_of_first_rank
    from einmpi.comm.agreement import together
    from einmpi.compiled.outputs import store
    from einmpi.loops.history import history_file
    from einmpi.loops.running import LoopRun
    from einmpi.process.first_use import first_use_seconds
    from einmpi.process.notes import activity_writer
    from einmpi.report.loop_progress import LoopProgress
    from einmpi.report.results import Report, figures, totals
    from einmpi.runtime.threads import threads_of

    loop = job.loop
    assert loop is not None
    plan_options = together(
        comm,
        lambda: options_of(job, options.strategy, options.memory, machine=options.machine),
    )
    note = activity_writer(comm.rank)
    checkpoints = _open_checkpoints(job, loop, options, comm, stop_requests, folder_claim)
    run = LoopRun(job, loop, comm, plan_options, checkpoints)
    files = ExitStack()
    if loop.history is not None and outputs_claim is not None and comm.rank == 0:
        history = history_file(loop.history, outputs_claim)
        run.history_file = files.enter_context(closing(history))
    run.prepare({})
    steps_before = run.steps_done
    seconds_once = run.measured.seconds
    planned = time.perf_counter()
    progress = LoopProgress(comm, run.schedule, loop.steps, options.quiet)
    with files, progress.shown(note) as (run.step.on_step, run.on_row):
        result = run.run()
    run.step.backend.wait()

    note("storing the results")
    before_storing = time.perf_counter()
    if outputs_claim is not None:
        store(job, run.plan.digest, result.outputs, outputs_claim, run.step.files)
    end = time.perf_counter()
    measured = run.measured
    seconds = {
        "plan": planned - start,
        "load": measured.seconds_loading,
        "run": measured.seconds,
        "checkpoint": checkpoints.seconds if checkpoints else 0.0,
        "store": end - before_storing,
        "startup": first_use_seconds(),
        "total": end - start,
    }
    report = Report(
        job,
        run.plan,
        totals(comm, measured.received, measured.peak, measured.shuffled, measured.between),
        seconds,
        [measured.seconds],
        result.outputs,
        figures(comm, result.outputs),
        run.step.work.text,
        threads_of(comm).count,
        startup_of_first_rank(),
        loop=_loop_report(run, result, steps_before, seconds_once),
    )
    if checkpoints is not None:
        resumed_from = checkpoints.saved.place if checkpoints.saved is not None else None
        report = replace(report, resumed_from=resumed_from, checkpoints=checkpoints.count)
    return report, checkpoints


def _loop_report(
    run: LoopRun, result: LoopResult, steps_before: int, seconds_once: float
) -> LoopReport:
    """Return the steps, the bytes and the seconds of a loop.

    `steps_before` are the steps before a checkpoint, from which this run has continued.
    `seconds_once` is the time of what was computed before the first step.
    """
    from einmpi.report.results import LoopReport

    bytes_once = 0
    planned_peak = run.plan.peak
    if run.once_plan is not None:
        bytes_once = run.once_plan.bytes_predicted
        planned_peak = max(planned_peak, run.once_plan.peak)
    seconds_of_steps = run.measured.seconds - seconds_once
    return LoopReport(
        result.steps,
        steps_before,
        result.is_done,
        run.loop.until_text,
        result.history,
        bytes_once,
        run.plan.bytes_predicted,
        seconds_of_steps / (result.steps - steps_before),
        planned_peak,
    )


def _open_checkpoints(
    job: Job,
    loop: Loop,
    options: argparse.Namespace,
    comm: Comm,
    stop_requests: Sequence[str],
    claim: Claim | None,
) -> LoopCheckpoints | None:
    """Return the checkpoints of a loop, with the one from which it continues."""
    from einmpi.checkpoint.resume import identity
    from einmpi.comm.agreement import together
    from einmpi.loops.checkpoints import LoopCheckpoints

    if options.checkpoint is None:
        return None
    seconds, steps = loop_interval(options)
    checkpoints = LoopCheckpoints(
        options.checkpoint,
        seconds,
        steps,
        comm,
        loop,
        job.written,
        together(comm, lambda: identity(job)),
        stop_requests,
        options.quiet,
        claim,
    )
    checkpoints.find(options.resume)
    if checkpoints.steps_done >= loop.steps:
        raise InputError(
            f"--checkpoint {options.checkpoint}",
            f"the checkpoint is after {counted(checkpoints.steps_done, 'step')}",
            f"more steps than {loop.steps}",
        )
    return checkpoints
