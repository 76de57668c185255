"""What the commands do: run, check, plan, verify. Each is a function of the options and of the ranks."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from einmpi.cli.job_options import checked_job, load_job, seconds_between
from einmpi.cli.output_files import check_files, print_or_write
from einmpi.errors import EinmpiError, InputError, one_of
from einmpi.units import counted

if TYPE_CHECKING:
    from einmpi.checkpoint.save import Checkpoints
    from einmpi.comm.base import Comm
    from einmpi.job.job import Job
    from einmpi.planner.make_plan import Plan
    from einmpi.report.results import Report


def check(options: argparse.Namespace, comm: Comm) -> int:
    """parse a job, infer shapes, look at its files"""
    from einmpi.comm.base import on_first_rank
    from einmpi.compiled.outputs import check_targets
    from einmpi.report.describe import describe_job

    def look() -> None:
        job = load_job(options)
        check_targets(job)
        if not options.quiet:
            print(describe_job(job))

    on_first_rank(comm, look)
    return 0


def run(options: argparse.Namespace, comm: Comm) -> int:
    """run a job (the default)"""
    from einmpi.comm.base import on_first_rank
    from einmpi.process.signals import collect_stop_requests
    from einmpi.process.terminal import columns
    from einmpi.report.summary import vertex_times
    from einmpi.report.terminal import summary_text
    from einmpi.report.trace import write_trace

    def tell() -> None:
        timeline = report.timeline
        text, data = str(report), report.as_json()
        if timeline is not None:
            times = vertex_times(timeline, [vertex.name for vertex in report.plan.graph.vertices])
            if _asked_to_record(options):
                data["vertices"] = [each.as_json() for each in times]
            if options.summary or not _asked_to_record(options) or columns(sys.stdout):
                text += "\n" + summary_text(times, report.totals.peak, report.plan.peak)
        if options.trace and timeline is not None:
            write_trace(options.trace, timeline)
        if options.report:
            _write_report(options, report.job, report.plan, measured=data, timeline=timeline)
        print_or_write(options, text, data)

    patient: AbstractContextManager[list[str]] = (
        collect_stop_requests() if options.checkpoint is not None else nullcontext([])
    )
    with patient as asked:
        report, checkpoints = _run(options, comm, asked)
        on_first_rank(comm, tell)
        if checkpoints is not None:
            checkpoints.remove()
    return 0


def _run(
    options: argparse.Namespace, comm: Comm, asked: Sequence[str] = (), keep: bool = True
) -> tuple[Report, Checkpoints | None]:
    """Run a job; its outputs go to their files where they are to be kept."""
    from einmpi.checkpoint.save import claim_folder
    from einmpi.comm.base import on_first_rank, together
    from einmpi.compiled.outputs import claim
    from einmpi.process.notes import activity_writer

    start = time.perf_counter()
    job = together(comm, lambda: checked_job(options))
    on_first_rank(
        comm, lambda: check_files(options, job)
    )  # it writes them, and others may not see their folders
    activity_writer(comm.rank)(
        "preparing the run"
    )  # for a launcher, too: all ranks listen to signals now
    with (
        claim(job, comm) if keep else nullcontext(),
        claim_folder(options.checkpoint, comm) if options.checkpoint is not None else nullcontext(),
    ):
        return _run_job(job, options, comm, asked, keep, start)


def _run_job(
    job: Job,
    options: argparse.Namespace,
    comm: Comm,
    asked: Sequence[str],
    keep: bool,
    start: float,
) -> tuple[Report, Checkpoints | None]:
    from statistics import median

    from einmpi.api import options_of
    from einmpi.checkpoint.resume import open_checkpoints, prepare
    from einmpi.compiled.inputs import Inputs
    from einmpi.compiled.outputs import store
    from einmpi.process.notes import activity_writer
    from einmpi.report.observe import Observer, is_interactive
    from einmpi.report.results import Report, figures, totals
    from einmpi.schedule.memory import spilled_bytes

    checkpoints = None
    if options.checkpoint is not None:
        checkpoints = open_checkpoints(
            job,
            comm,
            options.checkpoint,
            seconds_between(options),
            options.resume,
            asked,
            options.quiet,
        )
    compiled, plan, schedule, given = prepare(
        job,
        comm,
        lambda job: options_of(job, options.strategy, options.memory, machine=options.machine),
        checkpoints,
    )
    note = activity_writer(comm.rank)
    record = _asked_to_record(options) or (
        options.command == "run"
        and not options.quiet
        and options.json != "-"
        and is_interactive(comm, schedule)
    )
    observer = Observer(
        comm, schedule, options.repeat, record, options.quiet, checkpoints, compiled.backend.wait
    )
    planned = time.perf_counter()
    inputs = Inputs(
        compiled.job, given, compiled.files, keep=options.repeat > 1 and not plan.spilled
    )
    measured = []
    for _ in range(options.repeat):
        with observer.run(note) as compiled.on_step:
            outputs, figures_of_run = compiled.run(plan, schedule, inputs, checkpoints)
        measured.append(figures_of_run)
    note("storing the results")
    before = time.perf_counter()
    if keep:
        store(job, plan.digest, outputs)
    stored = time.perf_counter() - before
    runs = [each.seconds for each in measured]
    seconds = {
        "plan": planned - start,
        "load": measured[0].seconds_loading,
        "run": median(runs),
        "checkpoint": checkpoints.seconds if checkpoints else 0.0,
        "store": stored,
        "total": time.perf_counter() - start,
    }
    last = measured[-1]
    moved = totals(
        comm,
        last.received,
        last.peak,
        measured[0].shuffled,
        last.between,
        last.spilled,
        spilled_bytes(schedule),
        last.fetched,
    )
    report = Report(
        job,
        plan,
        moved,
        seconds,
        runs,
        outputs,
        figures(comm, outputs),
        compiled.work.text,
        _kernels(),
        timeline=observer.timeline,
    )
    if checkpoints is not None:
        resumed_from = checkpoints.saved.vertex if checkpoints.saved is not None else None
        report = replace(report, resumed_from=resumed_from, checkpoints=checkpoints.count)
    return report, checkpoints


def _asked_to_record(options: argparse.Namespace) -> bool:
    return options.command == "run" and bool(options.summary or options.trace or options.report)


def _kernels() -> str:
    """What rank 0 compiled; nothing where all was there already."""
    from einmpi.kernels.cpu.compiled import STATISTICS

    if not STATISTICS.compiled:
        return ""
    return (
        f"; {counted(STATISTICS.compiled, 'kernel')} compiled in {STATISTICS.compile_seconds:.2f} s"
    )


def verify(options: argparse.Namespace, comm: Comm) -> int:
    """run a job and compare with the plain evaluator; writes no outputs"""
    from einmpi.api import reference
    from einmpi.comm.base import on_first_rank
    from einmpi.report.compare import compare_with

    report, _ = _run(options, comm, keep=False)
    whole = {name: array.gather(0) for name, array in report.outputs.items()}

    def compare() -> None:
        wrong, text = compare_with(reference(report.job), whole)
        unwritten = replace(
            report, job=replace(report.job, outputs=())
        )  # so that it names no files
        print_or_write(options, f"{unwritten}\n{text}", report.as_json())
        if wrong:
            raise EinmpiError(
                f"{report.job.path}: {', '.join(wrong)} differ from the plain evaluator's results"
            )

    on_first_rank(comm, compare)
    return 0


def plan(options: argparse.Namespace, comm: Comm) -> int:
    """how a job is cut over ranks: EXPLAIN"""
    from einmpi.comm.base import on_first_rank

    on_first_rank(comm, lambda: _plan(options))
    return 0


def _plan(options: argparse.Namespace) -> None:
    from einmpi.api import plan as make_plan
    from einmpi.planner.text.compare import compare
    from einmpi.planner.text.explain import as_json
    from einmpi.planner.text.relations import relations
    from einmpi.report.plot import check_plot, write_plot
    from einmpi.report.terminal import comparison_text, plan_text

    if options.plot:
        check_plot(options.plot)
    job = load_job(options)
    check_files(options, job)
    asked = {"memory": options.memory, "nodes": options.nodes, "machine": options.machine}
    data: object
    plans = None
    if options.compare:
        plans = compare(lambda name: make_plan(job, options.ranks, strategy=name, **asked))
        text, data = comparison_text(plans), [as_json(plan) for plan in plans.plans]
        made = next((plan for plan in plans.plans if plan.strategy == job.strategy), plans.plans[0])
    else:
        made = make_plan(job, options.ranks, strategy=options.strategy, **asked)
        text, data = plan_text(made), as_json(made)
        if options.show_relations:
            name = options.show_relations
            if name not in made.states:
                raise InputError(
                    "--show-relations", f"unknown vertex {name!r}", one_of(made.states, name)
                )
            parts = {vertex: tuple(made.parts(vertex).values()) for vertex in made.states}
            text = relations(job.graph, name, parts)
    if options.plot:
        write_plot(options.plot, made)
    if options.report:
        _write_report(options, job, made, comparison=plans)
    print_or_write(options, text, data)


def _write_report(options: argparse.Namespace, job: Job, plan: Plan, **more: Any) -> None:
    from einmpi.report.html import write_report

    write_report(
        options.report, plan, program=job.source.text, title=job.title or job.source.name, **more
    )
