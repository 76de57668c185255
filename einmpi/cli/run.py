"""The commands run and verify: checkpoints, repeats, loops, recording, stored outputs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from statistics import median

from einmpi.api import options_of, reference
from einmpi.arrays.dist_array import DistArray
from einmpi.checkpoint.folder import CheckpointFolder, claim_folder
from einmpi.checkpoint.resume import Checkpoints, identity, open_checkpoints, prepare
from einmpi.cli.job_options import (
    check_files,
    checked_job,
    checkpoint_interval,
    loop_interval,
    print_or_write,
    traced_steps,
    write_job_report,
)
from einmpi.comm.agreement import on_first_rank, together
from einmpi.comm.base import Comm, sharing_problem
from einmpi.compiled.inputs import Inputs
from einmpi.compiled.outputs import claim_outputs, store
from einmpi.compiled.running import Measured
from einmpi.errors import EinmpiError, InputError
from einmpi.files.claims import Claim
from einmpi.files.datasets import Dataset
from einmpi.job.job import Job
from einmpi.kernels.cpu.compiled import STATISTICS
from einmpi.loops.arrival import joined_plans
from einmpi.loops.checkpoints import LoopCheckpoints
from einmpi.loops.history import history_file
from einmpi.loops.running import LoopResult, LoopRun
from einmpi.loops.sequence import LoopSequence, ValidationRun, loop_kinds
from einmpi.planner.plan import Options, Plan
from einmpi.planner.plan_data import Cost
from einmpi.process.environment import columns
from einmpi.process.signals import activity_writer, clean_up_at_sigterm, collect_stop_requests
from einmpi.process.startup import COMPILING, LOADING_GENERATORS, first_use_seconds, first_uses
from einmpi.report.describe import compare_with
from einmpi.report.progress import LoopProgress
from einmpi.report.recording.loop_record import LoopRecorder, loops_timeline
from einmpi.report.recording.observe import Observer, is_interactive
from einmpi.report.recording.record import Timeline, write_trace
from einmpi.report.recording.summary import vertex_times
from einmpi.report.results import LoopReport, Report, Startup, Totals, figures, totals
from einmpi.report.terminal import loop_summary_text, summary_text
from einmpi.runtime.threads import threads_of
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Step
from einmpi.units import counted


def run(options: argparse.Namespace, comm: Comm) -> int:
    """Run a job and print its summary."""
    with ExitStack() as signals:
        if comm.size == 1:  # several ranks watch their signals from the start
            signals.enter_context(clean_up_at_sigterm())
        requests: list[str] = []
        if options.checkpoint is not None:
            requests = signals.enter_context(collect_stop_requests())
        report, checkpoints = run_job(options, comm, requests)
        on_first_rank(comm, lambda: _present(options, report))
        if checkpoints is not None:
            checkpoints.remove()
    return 0


def _present(options: argparse.Namespace, report: Report) -> None:
    """Print the summary of a run and write the files that flags ask for."""
    timeline = report.timeline
    text = str(report)
    data = report.as_json()
    if timeline is not None and not report.loops:
        times = vertex_times(timeline, [vertex.name for vertex in report.plan.graph.vertices])
        is_requested = is_recording_requested(options)
        if is_requested:
            data["vertices"] = [each.as_json() for each in times]
        if options.summary or not is_requested or columns(sys.stdout):
            text += "\n" + summary_text(times, report.totals.peak, report.plan.peak)
    if options.summary:
        for number, loop in enumerate(report.loops, 1):
            title = f"loop {number} of {len(report.loops)}" if len(report.loops) > 1 else ""
            summary = loop_summary_text(title, loop)
            if summary:
                text += "\n" + summary
    if options.trace and timeline is not None:
        write_trace(options.trace, timeline)
    if options.report:
        # The traced steps of a loop may lie far apart: a page has no room for what is between.
        shown = None if report.loops else timeline
        write_job_report(options, report.job, report.plan, measured=data, timeline=shown)
    print_or_write(options, text, data)


def verify(options: argparse.Namespace, comm: Comm) -> int:
    """Run a job without writing its outputs and compare it with the reference evaluator."""
    report, _ = run_job(options, comm, keep_outputs=False)
    results = {name: array.gather(0) for name, array in report.outputs.items()}

    def compare() -> None:
        different, text = compare_with(reference(report.job), results)
        without_files = replace(report, job=replace(report.job, outputs=()))
        print_or_write(options, f"{without_files}\n{text}", report.as_json())
        if different:
            names = ", ".join(different)
            raise EinmpiError(f"{report.job.path}: {names} differ from the reference results")

    on_first_rank(comm, compare)
    return 0


# ---- one run -------------------------------------------------------------------------------------


def run_job(
    options: argparse.Namespace,
    comm: Comm,
    stop_requests: Sequence[str] = (),
    keep_outputs: bool = True,
) -> tuple[Report, CheckpointFolder | None]:
    """Run the job of a command line; with `keep_outputs`, write its outputs to their files.

    The run stops at its next checkpoint when `stop_requests` is no longer empty.
    """
    start = time.perf_counter()
    job = together(comm, lambda: checked_job(options))
    # Only rank 0 writes these files, and other ranks may not see their folders.
    on_first_rank(comm, lambda: check_files(options, job))
    # The first activity also tells a launcher that all ranks handle signals now.
    activity_writer(comm.rank)("preparing the run")
    outputs_claim = None
    folder_claim = None
    with ExitStack() as claims:
        if keep_outputs:
            outputs_claim = claims.enter_context(claim_outputs(job, comm))
        if options.checkpoint is not None:
            folder_claim = claims.enter_context(claim_folder(options.checkpoint, comm))
        run_claimed = _run_schedule if job.loop is None else run_loops
        finished = run_claimed(job, options, comm, stop_requests, outputs_claim, folder_claim)
        report = stored_report(job, finished, comm, outputs_claim, start)
        return report, finished.checkpoints


def _run_schedule(
    job: Job,
    options: argparse.Namespace,
    comm: Comm,
    stop_requests: Sequence[str],
    outputs_claim: Claim | None,
    folder_claim: Claim | None,
) -> FinishedRun:
    """Run a job without loops, as often as --repeat asks for; nothing is written in the run."""
    checkpoints = _open_checkpoints(job, options, comm, stop_requests, folder_claim)
    compiled, plan, schedule, given = prepare(job, comm, options_of, checkpoints)
    should_record = _should_record(options, comm, schedule)
    wait = compiled.backend.wait
    observer = Observer(
        comm, schedule, options.repeat, should_record, options.quiet, checkpoints, wait
    )
    planned = time.perf_counter()

    note = activity_writer(comm.rank)
    keep_inputs = options.repeat > 1 and not plan.spilled
    inputs = Inputs(compiled.job, given, compiled.files, keep=keep_inputs)
    measured = []
    for _ in range(options.repeat):
        with observer.observe_run(note) as compiled.runner.on_step:
            compiled.runner.on_transfer = observer.on_transfer
            outputs, measured_run = compiled.run_schedule(plan, schedule, inputs, checkpoints)
        measured.append(measured_run)
    run_seconds = [each.seconds for each in measured]
    return FinishedRun(
        plan=plan,
        outputs=outputs,
        files=compiled.files,
        totals=_gather_totals(comm, measured[-1], measured[0].shuffled),
        planned=planned,
        seconds_loading=measured[0].seconds_loading,
        seconds_running=median(run_seconds),
        seconds_all=run_seconds,
        work=compiled.work.text,
        timeline=observer.timeline,
        checkpoints=checkpoints,
    )


def _open_checkpoints(
    job: Job,
    options: argparse.Namespace,
    comm: Comm,
    stop_requests: Sequence[str],
    claim: Claim | None,
) -> Checkpoints | None:
    if options.checkpoint is None:
        return None
    return open_checkpoints(
        job,
        comm,
        options.checkpoint,
        checkpoint_interval(options),
        options.resume,
        stop_requests,
        options.quiet,
        claim,
    )


def _gather_totals(comm: Comm, measured: Measured, shuffled: int) -> Totals:
    """Add up over all ranks what a run moved and held. Inputs are read in the first run only."""
    return totals(
        comm,
        measured.received,
        measured.peak,
        shuffled,
        measured.between,
        measured.spilled,
        measured.spilled_planned,
        measured.fetched,
        round(measured.seconds_hidden * 1e9),
        measured.shared,
        measured.shared_planned,
    )


def is_recording_requested(options: argparse.Namespace) -> bool:
    """Return whether a flag needs the times of all steps."""
    return options.command == "run" and bool(options.summary or options.trace or options.report)


def _should_record(options: argparse.Namespace, comm: Comm, schedule: Schedule) -> bool:
    """Return whether to record the times of all steps: on request, or for a user at a terminal."""
    if is_recording_requested(options):
        return True
    if options.command != "run" or options.quiet or options.json == "-":
        return False
    return is_interactive(comm, schedule)


# ---- a run with loops ----------------------------------------------------------------------------


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

    def plan_options(of_job: Job) -> Options:
        return together(comm, lambda: options_of(of_job))

    note = activity_writer(comm.rank)
    checkpoints = _open_loop_checkpoints(job, options, comm, stop_requests, folder_claim)
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
        totals=_gather_totals(loops.comm, measured, measured.shuffled),
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


def _open_loop_checkpoints(
    job: Job,
    options: argparse.Namespace,
    comm: Comm,
    stop_requests: Sequence[str],
    claim: Claim | None,
) -> LoopCheckpoints | None:
    """Return the checkpoints of a job with loops, with the one from which it continues."""
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


# ---- what a run leaves behind --------------------------------------------------------------------


@dataclass(frozen=True)
class FinishedRun:
    """The results of a run before they are stored, and what was measured."""

    plan: Plan
    outputs: Mapping[str, DistArray]
    files: Mapping[str, Dataset]  # where inputs were found
    totals: Totals
    planned: float  # when the first step could begin
    seconds_loading: float
    seconds_running: float
    seconds_all: Sequence[float]  # of each repeat
    work: str  # what computed, for people
    timeline: Timeline | None = None
    loops: Sequence[LoopReport] = ()
    checkpoints: CheckpointFolder | None = None


def stored_report(
    job: Job, finished: FinishedRun, comm: Comm, outputs_claim: Claim | None, start: float
) -> Report:
    """Store the outputs of a run, and return all there is to say about it.

    `start` is when the command began. Without `outputs_claim` nothing is stored.
    """
    activity_writer(comm.rank)("storing the results")
    before_storing = time.perf_counter()
    if outputs_claim is not None:
        store(job, finished.plan.digest, finished.outputs, outputs_claim, finished.files)
    end = time.perf_counter()
    checkpoints = finished.checkpoints
    seconds = {
        "plan": finished.planned - start,
        "load": finished.seconds_loading,
        "run": finished.seconds_running,
        "checkpoint": checkpoints.seconds if checkpoints else 0.0,
        "store": end - before_storing,
        "startup": first_use_seconds(),
        "total": end - start,
    }
    resumed_from = None
    if checkpoints is not None and checkpoints.saved is not None:
        resumed_from = checkpoints.saved.place
    return Report(
        job,
        finished.plan,
        finished.totals,
        seconds,
        finished.seconds_all,
        finished.outputs,
        figures(comm, finished.outputs),
        finished.work,
        threads_of(comm).count,
        _startup_of_first_rank(),
        resumed_from=resumed_from,
        checkpoints=checkpoints.count if checkpoints else 0,
        timeline=finished.timeline,
        loops=finished.loops,
        sharing_problem=sharing_problem(comm),
    )


def _startup_of_first_rank() -> Startup:
    """Return what rank 0 did for the first time."""
    seconds = first_uses()
    return Startup(STATISTICS.compiled, seconds[COMPILING], seconds[LOADING_GENERATORS])
