"""The commands run, check, plan and verify: functions of the options and of the ranks."""

from __future__ import annotations

import argparse
import platform
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from einmpi.cli.job_options import load_job
from einmpi.cli.output_files import check_files, print_or_write
from einmpi.cli.run_job import is_recording_requested, run_job
from einmpi.errors import EinmpiError, InputError, nearest_of, printable

if TYPE_CHECKING:
    from einmpi.comm.base import Comm
    from einmpi.job.job import Job
    from einmpi.planner.plan import Plan
    from einmpi.report.results import Report


def check(options: argparse.Namespace, comm: Comm) -> int:
    """Parse a job, infer shapes and inspect its files."""
    from einmpi.comm.agreement import on_first_rank
    from einmpi.compiled.outputs import check_targets
    from einmpi.report.describe import describe_job

    def check_job() -> None:
        job = load_job(options)
        check_targets(job)
        if not options.quiet:
            print(describe_job(job))

    on_first_rank(comm, check_job)
    return 0


def run(options: argparse.Namespace, comm: Comm) -> int:
    """Run a job and print its summary."""
    from einmpi.comm.agreement import on_first_rank
    from einmpi.process.signals import clean_up_at_sigterm, collect_stop_requests

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
    from einmpi.process.terminal import columns
    from einmpi.report.recording.summary import vertex_times
    from einmpi.report.recording.trace import write_trace
    from einmpi.report.terminal import loop_summary_text, summary_text

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
        _write_report(options, report.job, report.plan, measured=data, timeline=shown)
    print_or_write(options, text, data)


def verify(options: argparse.Namespace, comm: Comm) -> int:
    """Run a job without writing its outputs and compare it with the reference evaluator."""
    from einmpi.api import reference
    from einmpi.comm.agreement import on_first_rank
    from einmpi.report.compare import compare_with

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


def plan(options: argparse.Namespace, comm: Comm) -> int:
    """Show how a job is partitioned over ranks."""
    from einmpi.comm.agreement import on_first_rank

    if options.memory_curve is not None:
        on_first_rank(comm, lambda: _memory_curve(options))
    else:
        on_first_rank(comm, lambda: _explain(options))
    return 0


def _memory_curve(options: argparse.Namespace) -> None:
    from einmpi import api
    from einmpi.planner.saving_memory.memory_curve import curve_json, curve_text, memory_curve
    from einmpi.report.memory_picture import memory_picture
    from einmpi.report.plot import check_plot, write_picture

    file = options.memory_curve
    if file:
        check_plot(file)
    job = load_job(options)
    check_files(options, job)
    without_limit = replace(job, memory=None)
    points = memory_curve(
        lambda limit: api.plan(without_limit, options.ranks, memory=limit, nodes=options.nodes)
    )
    if file:
        title = printable(job.title or job.source.name)
        write_picture(file, memory_picture(points, f"{title} on {options.ranks} ranks"))
    print_or_write(options, curve_text(points), curve_json(points))


def _explain(options: argparse.Namespace) -> None:
    from einmpi import api
    from einmpi.planner.text.compare import compare
    from einmpi.planner.text.plan_json import as_json
    from einmpi.report.plot import check_plot, write_plot
    from einmpi.report.terminal import comparison_text, plan_text

    if options.plot:
        check_plot(options.plot)
    job = load_job(options)
    check_files(options, job)
    if options.plot and job.loops:
        raise InputError("--plot", "several loops follow one another", "a job with one loop")
    comparison = None
    data: object
    if options.compare:
        comparison = compare(
            lambda name: api.plan(job, options.ranks, strategy=name, nodes=options.nodes)
        )
        text = comparison_text(comparison)
        data = [as_json(each) for each in comparison.plans]
        shown = comparison.plans[0]
        for each in comparison.plans:
            if each.strategy == job.strategy:
                shown = each
    else:
        shown = api.plan(job, options.ranks, nodes=options.nodes)
        text = plan_text(shown, options.full)
        data = as_json(shown)
        if options.show_relations:
            text = _relations(shown, options.show_relations)
    if options.plot:
        write_plot(options.plot, shown)
    if options.report:
        _write_report(options, job, shown, comparison=comparison)
    print_or_write(options, text, data)


def _relations(plan: Plan, vertex: str) -> str:
    from einmpi.planner.text.relations import relations

    if vertex not in plan.states:
        expected = nearest_of(plan.states, vertex)
        raise InputError("--show-relations", f"unknown vertex {vertex!r}", expected)
    parts = {name: tuple(plan.parts(name).values()) for name in plan.states}
    return relations(plan.graph, vertex, parts)


def _write_report(options: argparse.Namespace, job: Job, plan: Plan, **more: Any) -> None:
    from einmpi.process.software import current_date
    from einmpi.report.html import write_report

    title = printable(job.title or job.source.name)
    details = {"job": job.path, "date": current_date(), "host": platform.node()}
    if job.sizes:
        details["sizes"] = "  ".join(f"{name}={value}" for name, value in job.sizes.items())
    program = "\n\n".join(part.source.text.strip("\n") for part in job.one_after_another())
    write_report(options.report, plan, program=program, title=title, details=details, **more)
