"""The command `einmpi plan`: how a job is partitioned over ranks, and what that costs."""

from __future__ import annotations

import argparse
from dataclasses import replace

from einmpi import api
from einmpi.cli.job_options import check_files, load_job, print_or_write, write_job_report
from einmpi.errors import InputError, nearest_of, printable
from einmpi.planner.plan import Plan
from einmpi.planner.text.compare import compare, curve_json, curve_text, memory_curve
from einmpi.planner.text.explain import as_json
from einmpi.planner.text.relations import relations
from einmpi.report.describe import check_plot, write_picture, write_plot
from einmpi.report.picture import memory_picture
from einmpi.report.terminal import comparison_text, plan_text


def plan(options: argparse.Namespace) -> None:
    """Show how a job is partitioned over ranks."""
    if options.memory_curve is not None:
        _memory_curve(options)
    else:
        _explain(options)


def _memory_curve(options: argparse.Namespace) -> None:
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
        write_job_report(options, job, shown, comparison=comparison)
    print_or_write(options, text, data)


def _relations(plan: Plan, vertex: str) -> str:
    if vertex not in plan.states:
        expected = nearest_of(plan.states, vertex)
        raise InputError("--show-relations", f"unknown vertex {vertex!r}", expected)
    parts = {name: tuple(plan.parts(name).values()) for name in plan.states}
    return relations(plan.graph, vertex, parts)
