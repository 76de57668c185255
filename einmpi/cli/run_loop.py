"""The run of a job with loops, as the flags ask for it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from einmpi.cli.finished import FinishedRun
from einmpi.cli.job_options import loop_interval, traced_steps
from einmpi.errors import InputError
from einmpi.units import counted

if TYPE_CHECKING:
    from einmpi.comm.base import Comm
    from einmpi.files.claims import Claim
    from einmpi.job.job import Job
    from einmpi.loops.checkpoints import LoopCheckpoints
    from einmpi.loops.result import LoopResult
    from einmpi.loops.running import LoopRun
    from einmpi.loops.sequence import LoopSequence
    from einmpi.loops.validation import ValidationRun
    from einmpi.planner.plan import Options
    from einmpi.report.recording.loop_record import LoopRecorder
    from einmpi.report.results import LoopReport
    from einmpi.schedule.steps import Step


def run_loops(
    job: Job,
    options: argparse.Namespace,
    comm: Comm,
    stop_requests: Sequence[str],
    outputs_claim: Claim | None,
    folder_claim: Claim | None,
) -> FinishedRun:
    """Run the loops of a job whose files no other run can write.

    Without `outputs_claim` no history is written.
    """
    from einmpi.api import options_of
    from einmpi.comm.agreement import together
    from einmpi.loops.history import history_file
    from einmpi.loops.sequence import LoopSequence
    from einmpi.process.notes import activity_writer
    from einmpi.report.progress import LoopProgress

    def plan_options(of_job: Job) -> Options:
        return together(comm, lambda: options_of(of_job))

    note = activity_writer(comm.rank)
    checkpoints = _open_checkpoints(job, options, comm, stop_requests, folder_claim)
    loops = LoopSequence(job, comm, plan_options, checkpoints)
    recorders: dict[int, LoopRecorder] = {}  # of each loop, if it is recorded
    seconds_once: dict[int, float] = {}  # of each loop, before its first step
    steps_before: dict[int, int] = {}  # that an earlier run has done
    planned: list[float] = []

    @contextmanager
    def around(run: LoopRun) -> Iterator[None]:
        """Show the progress of a loop, and write its history."""
        seconds_once[run.number] = run.measured.seconds
        steps_before[run.number] = run.steps_done
        planned.append(time.perf_counter())
        which = f"loop {run.number + 1} of {len(loops.runs)}, " if job.loops else ""
        progress = LoopProgress(comm, run.schedule, run.loop.steps, options.quiet, which)
        with ExitStack() as stack:
            if run.loop.history is not None and outputs_claim is not None and comm.rank == 0:
                history = history_file(run.loop.history, outputs_claim)
                run.history_file = stack.enter_context(closing(history))
            run.step.runner.on_step, run.on_row = stack.enter_context(progress.shown(note))
            if options.command == "run" and (options.trace or options.summary):
                recorders[run.number] = _start_recording(run, traced_steps(options), which)
            yield
        run.step.backend.wait()

    result = loops.run({}, around)
    reports = []
    for run, each in zip(loops.runs, (*result.earlier, result), strict=True):
        before = steps_before.get(run.number, each.steps)
        validation = loops.validations.get(run.number)
        seconds_before = seconds_once.get(run.number, 0.0)
        report = _loop_report(run, validation, each, before, seconds_before)
        if run.number in recorders:
            record = recorders[run.number].finish(run.plan.graph)
            report = replace(report, record=record)
        reports.append(report)
    return _finished_run(loops, result, reports, planned[0])


def _start_recording(run: LoopRun, chosen: range | None, name: str) -> LoopRecorder:
    """Record the steps of a loop, besides what is called for its progress. All ranks call it."""
    from einmpi.report.recording.loop_record import LoopRecorder

    recorder = LoopRecorder(run.comm, run.schedule, run.step.backend.wait, chosen, name)
    show_progress = run.step.runner.on_step

    def on_step(step: Step) -> None:
        recorder.on_schedule_step(step)
        if show_progress is not None:
            show_progress(step)

    run.step.runner.on_step = on_step
    run.step.runner.on_transfer = recorder.on_transfer
    run.on_computed = recorder.end_step
    recorder.begin()
    return recorder


def _finished_run(
    loops: LoopSequence, result: LoopResult, reports: list[LoopReport], planned: float
) -> FinishedRun:
    """Return what all loops together have computed and taken. All ranks call it.

    `planned` is the time at which the first loop was planned.
    """
    from einmpi.loops.planning import joined_plans
    from einmpi.report.recording.loop_record import loops_timeline
    from einmpi.report.results import totals

    measured = loops.runs[0].measured
    for run in (*loops.runs[1:], *loops.validations.values()):
        measured = measured.plus(run.measured)
    files = {}
    for run in loops.runs:
        files.update(run.step.files)
    records = [report.record for report in reports if report.record is not None]
    return FinishedRun(
        plan=joined_plans([run.plan for run in loops.runs]),
        outputs=result.outputs,
        files=files,
        totals=totals(
            loops.comm,
            measured.received,
            measured.peak,
            measured.shuffled,
            measured.between,
            measured.spilled,
            measured.spilled_planned,
            measured.fetched,
            round(measured.seconds_hidden * 1e9),
            measured.shared,
            measured.shared_planned,
        ),
        planned=planned,
        seconds_loading=measured.seconds_loading,
        seconds_running=measured.seconds,
        seconds_all=[measured.seconds],
        work=loops.runs[0].step.work.text,
        timeline=loops_timeline(records) if records else None,
        loops=reports,
        checkpoints=loops.checkpoints,
    )


def _loop_report(
    run: LoopRun,
    validation: ValidationRun | None,
    result: LoopResult,
    steps_before: int,
    seconds_once: float,
) -> LoopReport:
    """Return the steps, the bytes and the seconds of a loop.

    `steps_before` are the steps before a checkpoint, from which this run has continued.
    `seconds_once` is the time of what was computed before the first step.
    """
    from einmpi.planner.plan_data import Cost
    from einmpi.report.results import LoopReport

    planned_peak = run.plan.peak_in_all
    cost_validation = Cost()
    if validation is not None and validation.is_planned:
        cost_validation = validation.predicted
        planned_peak = max(planned_peak, validation.plan.peak)
    seconds_of_steps = run.measured.seconds - seconds_once
    return LoopReport(
        result.steps,
        steps_before,
        result.is_done,
        run.loop.until_text,
        result.history,
        run.plan.cost_once,
        run.plan.cost,
        cost_validation,
        seconds_of_steps / max(1, result.steps - steps_before),
        planned_peak,
    )


def _open_checkpoints(
    job: Job,
    options: argparse.Namespace,
    comm: Comm,
    stop_requests: Sequence[str],
    claim: Claim | None,
) -> LoopCheckpoints | None:
    """Return the checkpoints of a job with loops, with the one from which it continues."""
    from einmpi.checkpoint.resume import identity
    from einmpi.comm.agreement import together
    from einmpi.loops.checkpoints import LoopCheckpoints
    from einmpi.loops.sequence import loop_kinds

    if options.checkpoint is None:
        return None
    seconds, steps = loop_interval(options)
    checkpoints = LoopCheckpoints(
        options.checkpoint,
        seconds,
        steps,
        comm,
        loop_kinds(job),
        together(comm, lambda: identity(job)),
        stop_requests,
        options.quiet,
        claim,
    )
    checkpoints.find(options.resume)
    loop = checkpoints.contents.current.loop
    if checkpoints.steps_done >= loop.steps:
        raise InputError(
            f"--checkpoint {options.checkpoint}",
            f"the checkpoint is after {counted(checkpoints.steps_done, 'step')}",
            f"more steps than {loop.steps}",
        )
    return checkpoints
