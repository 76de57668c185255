"""The run of a job as the flags ask for it: checkpoints, repeats, recording, stored outputs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import TYPE_CHECKING

from einmpi.cli.finished import FinishedRun, stored_report
from einmpi.cli.job_options import checked_job, checkpoint_interval
from einmpi.cli.output_files import check_files
from einmpi.cli.run_loop import run_loops

if TYPE_CHECKING:
    from einmpi.checkpoint.folder import CheckpointFolder
    from einmpi.checkpoint.save import Checkpoints
    from einmpi.comm.base import Comm
    from einmpi.compiled.measured import Measured
    from einmpi.files.claims import Claim
    from einmpi.job.job import Job
    from einmpi.report.results import Report, Totals
    from einmpi.schedule.schedule import Schedule


def run_job(
    options: argparse.Namespace,
    comm: Comm,
    stop_requests: Sequence[str] = (),
    keep_outputs: bool = True,
) -> tuple[Report, CheckpointFolder | None]:
    """Run the job of a command line; with `keep_outputs`, write its outputs to their files.

    The run stops at its next checkpoint when `stop_requests` is no longer empty.
    """
    from einmpi.checkpoint.folder import claim_folder
    from einmpi.comm.agreement import on_first_rank, together
    from einmpi.compiled.outputs import claim_outputs
    from einmpi.process.notes import activity_writer

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
    from einmpi.api import options_of
    from einmpi.checkpoint.resume import prepare
    from einmpi.compiled.inputs import Inputs
    from einmpi.process.notes import activity_writer
    from einmpi.report.recording.observe import Observer

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
        totals=_gather_totals(comm, measured),
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
    from einmpi.checkpoint.resume import open_checkpoints

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


def _gather_totals(comm: Comm, measured: Sequence[Measured]) -> Totals:
    """Add up over all ranks what the last run moved and held; inputs are read in the first run."""
    from einmpi.report.results import totals

    last = measured[-1]
    return totals(
        comm,
        last.received,
        last.peak,
        measured[0].shuffled,
        last.between,
        last.spilled,
        last.spilled_planned,
        last.fetched,
        round(last.seconds_hidden * 1e9),
        last.shared,
        last.shared_planned,
    )


def is_recording_requested(options: argparse.Namespace) -> bool:
    """Return whether a flag needs the times of all steps."""
    return options.command == "run" and bool(options.summary or options.trace or options.report)


def _should_record(options: argparse.Namespace, comm: Comm, schedule: Schedule) -> bool:
    """Return whether to record the times of all steps: on request, or for a user at a terminal."""
    from einmpi.report.recording.observe import is_interactive

    if is_recording_requested(options):
        return True
    if options.command != "run" or options.quiet or options.json == "-":
        return False
    return is_interactive(comm, schedule)
