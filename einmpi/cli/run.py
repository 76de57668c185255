"""The commands run and verify: checkpoints, repeats, loops, recording, stored outputs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

from einmpi.api import options_of, reference
from einmpi.api.running import reference_of_changed
from einmpi.checkpoint.folder import Saving, claim_folder, identity
from einmpi.checkpoint.resume import Checkpoints, LoopCheckpoints, prepare
from einmpi.cli.job_options import (
    check_files,
    checked_job,
    checkpoint_interval,
    print_or_write,
    traced_steps,
    write_job_report,
)
from einmpi.comm.agreement import on_first_rank, together
from einmpi.comm.base import Comm, sharing_problem
from einmpi.compiled.inputs import Inputs
from einmpi.compiled.outputs import claim_outputs, store
from einmpi.compiled.running import Runner
from einmpi.compiled.sparse_inputs import ReadJob, read_job_over_stored
from einmpi.errors import EinmpiError, InputError
from einmpi.files.atomic import replace_file
from einmpi.files.claims import Claim
from einmpi.job.job import Job
from einmpi.kernels.cpu.compiled import STATISTICS
from einmpi.loops.arrival import joined_plans
from einmpi.loops.history import history_file
from einmpi.loops.running import LoopResult, LoopRun
from einmpi.loops.sequence import LoopSequence, ValidationRun, loop_kinds
from einmpi.planner.plan import Cost, Options
from einmpi.process.environment import columns
from einmpi.process.signals import activity_writer, clean_up_at_sigterm, collect_stop_requests
from einmpi.process.startup import COMPILING, LOADING_GENERATORS, first_use_seconds, first_uses
from einmpi.report.describe import compare_with, with_other_last_digits
from einmpi.report.record import Recorder, write_trace
from einmpi.report.results import (
    FinishedRun,
    LoopReport,
    Report,
    Startup,
    figures,
    metrics_text,
    totals,
)
from einmpi.report.terminal import loop_summary_text, row_notes, shown_progress, summary_text
from einmpi.report.times import LoopRecord, LoopRecorder, loops_timeline, vertex_times
from einmpi.runtime.threads import threads_of
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Step
from einmpi.sparse_array import SparseArray
from einmpi.units import counted

# Up to this many spans, of all ranks, are gathered for the summary on a terminal without a request.
MAX_SPANS_UNREQUESTED = 200_000


def run(options: argparse.Namespace, comm: Comm) -> int:
    """Run a job and print its summary."""
    with ExitStack() as signals:
        if comm.size == 1:  # several ranks watch their signals from the start
            signals.enter_context(clean_up_at_sigterm())
        requests: list[str] = []
        if options.checkpoint is not None:
            requests = signals.enter_context(collect_stop_requests())
        report = run_job(options, comm, requests)
        on_first_rank(comm, lambda: _present(options, report))
        if report.checkpoints is not None:
            report.checkpoints.remove()
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
    if options.metrics:
        replace_file(options.metrics, [metrics_text(data).encode()])
    print_or_write(options, text, data)


def verify(options: argparse.Namespace, comm: Comm) -> int:
    """Run a job without writing its outputs and compare it with the reference evaluator."""
    report = run_job(options, comm, keep_outputs=False)
    results = {}
    for name, array in report.outputs.items():
        if isinstance(array, SparseArray):
            results[name] = array.coordinates().dense()
        else:
            results[name] = array.gather(0)

    def compare() -> None:
        def of_rounded() -> Mapping[str, Any]:
            return reference_of_changed(report.job, change=with_other_last_digits)

        different, text = compare_with(reference(report.job), results, of_rounded)
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
) -> Report:
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
    saving = None
    with ExitStack() as claims:
        if keep_outputs:
            outputs_claim = claims.enter_context(claim_outputs(job, comm))
        if options.checkpoint is not None:
            claim = claims.enter_context(claim_folder(options.checkpoint, comm))
            saving = Saving(
                options.checkpoint,
                *checkpoint_interval(options),
                options.resume,
                stop_requests,
                options.quiet,
                claim,
            )
        run_claimed = _run_schedule if job.loop is None else run_loops
        read = read_job_over_stored(comm, job)
        if saving is not None and read.stored is not None:
            sparse = read.identity(comm.size)
            parts = together(comm, lambda: {**sparse, **identity(job)})
            saving = replace(saving, identity=parts)
        finished = run_claimed(read, options, comm, outputs_claim, saving)
        finished = replace(finished, outputs=read.results(finished.outputs))
        return stored_report(job, finished, comm, outputs_claim, start)


def _run_schedule(
    read: ReadJob,
    options: argparse.Namespace,
    comm: Comm,
    outputs_claim: Claim | None,
    saving: Saving | None,
) -> FinishedRun:
    """Run a job without loops, as often as --repeat asks for; nothing is written in the run."""
    job = read.job
    checkpoints = None if saving is None else Checkpoints(saving, comm, job)
    compiled, plan, schedule, given = prepare(job, comm, options_of, checkpoints, read.inputs)
    recorder = None
    if _should_record(options, comm, schedule):
        recorder = Recorder(comm, compiled.backend.wait, checkpoints)
    note = activity_writer(comm.rank)

    def note_step(step: Step) -> None:
        first_line, _, _ = str(step).partition("\n")  # without the steps that it repeats
        note(" ".join(first_line.removesuffix(":").split()))

    planned = time.perf_counter()
    keep_inputs = options.repeat > 1 and not plan.spilled
    inputs = Inputs(compiled.job, given, compiled.files, keep=keep_inputs)
    measured = []
    with shown_progress(comm, schedule, options.repeat, options.quiet) as progress:
        for number in range(options.repeat):
            is_last = number + 1 == options.repeat
            _watch(compiled.runner, recorder if is_last else None, progress, note_step)
            outputs, measured_run = compiled.run_schedule(plan, schedule, inputs, checkpoints)
            measured.append(measured_run)
    return FinishedRun(
        plan=plan,
        outputs=outputs,
        files=compiled.files,
        measured=measured,
        planned_at=planned,
        work=compiled.work.text,
        timeline=None if recorder is None else recorder.finish(),
        checkpoints=checkpoints,
    )


def _watch(
    runner: Runner, recorder: Recorder | None, *others: Callable[[Step], None] | None
) -> None:
    """Tell a recorder and others when a step begins, in the runs that follow."""
    observers = [each for each in (recorder, *others) if each is not None]

    def on_step(step: Step) -> None:
        for observer in observers:
            observer(step)

    if len(observers) < 2:  # every step of a loop calls it
        runner.on_step = next(iter(observers), None)
    else:
        runner.on_step = on_step
    if recorder is not None:
        runner.on_transfer = recorder.on_transfer
        recorder.begin()


def is_recording_requested(options: argparse.Namespace) -> bool:
    """Return whether a flag needs the times of all steps."""
    return options.command == "run" and bool(options.summary or options.trace or options.report)


def _should_record(options: argparse.Namespace, comm: Comm, schedule: Schedule) -> bool:
    """Return whether to record the times of all steps: on request, or for a user at a terminal."""
    if is_recording_requested(options):
        return True
    if options.command != "run" or options.quiet or options.json == "-":
        return False
    is_small = comm.size * len(schedule.steps) <= MAX_SPANS_UNREQUESTED
    answer = on_first_rank(comm, lambda: "yes" if is_small and columns(sys.stdout) else "")
    return answer == "yes"


# ---- a run with loops ----------------------------------------------------------------------------


def run_loops(
    read: ReadJob,
    options: argparse.Namespace,
    comm: Comm,
    outputs_claim: Claim | None,
    saving: Saving | None,
) -> FinishedRun:
    """Run the loops of a job whose files no other run can write.

    Without `outputs_claim` no history is written.
    """

    def plan_options(of_job: Job) -> Options:
        return together(comm, lambda: options_of(of_job))

    job = read.job
    note = activity_writer(comm.rank)
    checkpoints = None if saving is None else _open_loop_checkpoints(job, comm, saving)
    loops = LoopSequence(job, comm, plan_options, checkpoints)
    recorders: dict[int, LoopRecorder] = {}  # of each loop, if it is recorded
    planned: list[float] = []

    @contextmanager
    def around(run: LoopRun) -> Iterator[None]:
        """Show the progress of a loop, and write its history."""
        planned.append(time.perf_counter())
        steps = run.loop.steps
        which = f"loop {run.number + 1} of {len(loops.runs)}, " if job.loops else ""
        recorder = None
        if options.command == "run" and (options.trace or options.summary):
            recorder = LoopRecorder(comm, run.step.backend.wait, traced_steps(options), which)
            recorders[run.number] = recorder
            run.on_computed = recorder.end_step
        with ExitStack() as stack:
            if run.loop.history is not None and outputs_claim is not None and comm.rank == 0:
                history = history_file(run.loop.history, outputs_claim)
                run.history_file = stack.enter_context(closing(history))
            shown = shown_progress(comm, run.schedule, steps, options.quiet)
            progress = stack.enter_context(shown)
            run.on_row = row_notes(progress, note, steps, which)
            _watch(run.step.runner, recorder, progress)
            yield
        run.step.backend.wait()

    result = loops.run(read.inputs, around)
    reports = []
    for run, each in zip(loops.runs, (*result.earlier, result), strict=True):
        recorder = recorders.get(run.number)
        record = None if recorder is None else recorder.finish_loop(run.plan.graph)
        reports.append(_loop_report(run, loops.validations.get(run.number), each, record))
    return _finished_run(loops, result, reports, planned[0])


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
        measured=[measured],
        planned_at=planned,
        work=loops.runs[0].step.work.text,
        timeline=loops_timeline(records) if records else None,
        loops=reports,
        checkpoints=loops.checkpoints,
    )


def _loop_report(
    run: LoopRun,
    validation: ValidationRun | None,
    result: LoopResult,
    record: LoopRecord | None,
) -> LoopReport:
    """Return the steps, the bytes and the seconds of a loop."""
    planned_peak = run.plan.peak_in_all
    cost_validation = Cost()
    if validation is not None and validation.is_planned:
        cost_validation = validation.predicted
        planned_peak = max(planned_peak, validation.plan.peak)
    seconds_of_steps = run.measured.seconds - run.seconds_once
    return LoopReport(
        result.steps,
        run.steps_before,
        result.is_done,
        run.loop.until_text,
        result.history,
        run.plan.cost_once,
        run.plan.cost,
        cost_validation,
        seconds_of_steps / max(1, result.steps - run.steps_before),
        planned_peak,
        record,
        result.best_step,
        bool(run.loop.kept_best),
    )


def _open_loop_checkpoints(job: Job, comm: Comm, saving: Saving) -> LoopCheckpoints:
    """Return the checkpoints of a job with loops, with the one from which it continues."""
    checkpoints = LoopCheckpoints(saving, comm, job, loop_kinds(job))
    loop = checkpoints.contents.current.loop
    if checkpoints.steps_done >= loop.steps:
        raise InputError(
            f"--checkpoint {saving.folder}",
            f"the checkpoint is after {counted(checkpoints.steps_done, 'step')}",
            f"more steps than {loop.steps}",
        )
    return checkpoints


# ---- what a run leaves behind --------------------------------------------------------------------


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
        "plan": finished.planned_at - start,
        "load": finished.measured[0].seconds_loading,
        "run": median(each.seconds for each in finished.measured),
        "checkpoint": checkpoints.seconds if checkpoints else 0.0,
        "store": end - before_storing,
        "startup": first_use_seconds(),
        "total": end - start,
    }
    first_used = first_uses()  # by rank 0, which shows it
    summed, moved_most = totals(comm, finished.measured)
    return Report(
        **vars(finished),
        job=job,
        totals=summed,
        moved_most=moved_most,
        seconds=seconds,
        figures=figures(comm, finished.outputs),
        thread_count=threads_of(comm).count,
        startup=Startup(STATISTICS.compiled, first_used[COMPILING], first_used[LOADING_GENERATORS]),
        sharing_problem=sharing_problem(comm),
    )
