"""The commands `einmpi plan` and `einmpi simulate`: how a job is cut, and what that costs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

from einmpi import api
from einmpi.cli.job_options import check_files, load_job, print_or_write, write_job_report
from einmpi.errors import InputError, nearest_of, one_of, printable
from einmpi.job.job import Job, may_share_memory
from einmpi.planner.machine import read_machine
from einmpi.planner.make_plan import MAX_RANKS
from einmpi.planner.plan import Plan
from einmpi.planner.strategies import STRATEGIES
from einmpi.planner.text.compare import compare, curve_json, curve_text, memory_curve
from einmpi.planner.text.explain import as_json
from einmpi.planner.text.relations import relations
from einmpi.planner.text.summary import table_lines
from einmpi.process.signals import clean_up_at_sigterm
from einmpi.report.describe import check_plot, write_picture, write_plot
from einmpi.report.picture import memory_picture
from einmpi.report.record import write_trace
from einmpi.report.terminal import comparison_text, plan_text
from einmpi.simulate.cluster import (
    PLATFORM_EXPECTED,
    Network,
    make_cluster,
    read_network,
    read_platform,
)
from einmpi.simulate.simulation import (
    MOST_RANKS_OF_SIMGRID,
    Place,
    ReplayEnded,
    ReplayError,
    Simulated,
    find_smpirun,
    reason_against,
    simulate_plan,
)
from einmpi.units import counted, show_bytes, show_count, show_seconds


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


# ---- simulate ------------------------------------------------------------------------------------
#
# The command `einmpi simulate`: plan a job and replay it on a network that SimGrid simulates.


def simulate(options: argparse.Namespace) -> None:
    """Replay a job on a simulated network."""
    with clean_up_at_sigterm():
        _simulate(options)


def _simulate(options: argparse.Namespace) -> None:
    if not 1 <= options.ranks <= MAX_RANKS:
        raise InputError(
            "-n", f"{options.ranks} ranks requested", f"a number from 1 to {MAX_RANKS}"
        )
    job = load_job(options)
    check_files(options, job)
    if job.loop is not None and len(job.one_after_another()) > 1:
        raise InputError(options.job, "several loops follow one another", "a job with one loop")
    names = _strategies(options)
    place = _place(options, job)
    network = None
    needs_files = options.traces is not None or options.trace or options.report
    if options.ranks > MOST_RANKS_OF_SIMGRID and not needs_files:
        network = read_network(place.platform)
    if network is None:
        find_smpirun()
    done: list[Simulated] = []
    refused: dict[str | None, InputError] = {}
    for name in names:
        try:
            done.append(_simulate_strategy(options, job, name, place, network))
        except InputError as error:
            refused[name] = error
    if not done:
        raise next(iter(refused.values()))
    if options.compare is None:
        _write_timeline(options, job, done[0])
        print_or_write(options, _text(done[0], job), done[0].as_json())
        return
    notes = [f"{name}: {error}" for name, error in refused.items()]
    text = "\n".join([*_comparison(done), f"model: {done[0].model}", *notes])
    print_or_write(options, text, [each.as_json() for each in done])


def _strategies(options: argparse.Namespace) -> Sequence[str | None]:
    """Return the strategies to simulate; None is that of the job."""
    if options.compare is None:
        return [None]
    for name in options.compare:
        if name not in STRATEGIES:
            raise InputError("--compare", f"unknown strategy {name!r}", one_of(STRATEGIES, name))
    return list(dict.fromkeys(options.compare)) or list(STRATEGIES)


def _place(options: argparse.Namespace, job: Job) -> Place:
    """Return where the ranks are simulated."""
    machine = None if job.machine is None else read_machine(str(job.machine))
    if options.platform is None:
        cluster = make_cluster(options.cluster or "", options.ranks, machine)
        text, hosts, cores = cluster.platform(), cluster.hosts(), cluster.cores
        if machine is not None:
            machine = cluster.with_kernels_of(machine)
    else:
        platform = read_platform(options.platform)
        text, hosts, cores = platform.text, platform.hosts, platform.cores
        if len(hosts) * cores < options.ranks:
            room = f"{counted(len(hosts), 'host')} × {counted(cores, 'core')}"
            problem = f"{room} for {options.ranks} ranks"
            raise InputError(options.platform, problem, "a core for each rank")
    nodes = ceil(options.ranks / cores)
    if options.ranks % nodes:
        problem = f"{options.ranks} ranks on {nodes} nodes of {counted(cores, 'core')}"
        raise InputError("-n", problem, "the same number of ranks on each node")
    return Place(text, hosts[:nodes], machine)


def _simulate_strategy(
    options: argparse.Namespace,
    job: Job,
    strategy: str | None,
    place: Place,
    network: Network | None,
) -> Simulated:
    plan = api.plan(
        job,
        options.ranks,
        strategy=strategy,
        nodes=len(place.hosts),
        machine=place.machine,
    )
    folder = None
    if options.traces is not None:
        folder = Path(options.traces)
        if options.compare is not None:
            folder /= plan.strategy
        _make_empty(folder)
    try:
        return simulate_plan(
            plan,
            place,
            shared=may_share_memory(job) and (place.machine is None or place.machine.shared),
            folder=folder,
            with_timeline=bool(options.trace or options.report),
            network=network,
        )
    except ReplayEnded:
        raise
    except ReplayError:
        reason = None if options.platform is None else reason_against(place)
        if reason is None:
            raise
        raise InputError(options.platform, reason, PLATFORM_EXPECTED) from None


def _write_timeline(options: argparse.Namespace, job: Job, done: Simulated) -> None:
    """Write the files that show when each rank did its steps."""
    if done.timeline is None:
        return
    if options.trace:
        write_trace(options.trace, done.timeline)
    if options.report:
        network = options.platform or options.cluster or "a node for each rank"
        seconds = f"{show_seconds(done.seconds)}{_unit(job)}"
        details = {"job": job.path, "simulated": f"{seconds} on {network}"}
        write_job_report(options, job, done.plan, details, timeline=done.timeline, simulated=True)


def _make_empty(folder: Path) -> None:
    """Make a folder for traces; refuse one that has files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        problem = error.strerror or str(error)
        raise InputError(f"--traces {folder}", problem, "a folder to write to") from None
    if not is_empty:
        raise InputError(f"--traces {folder}", "the folder has files", "a new or an empty folder")


def _unit(job: Job) -> str:
    return " a step of the loop" if job.loop is not None else ""


def _text(done: Simulated, job: Job) -> str:
    plan = done.plan
    place = f"{counted(plan.ranks, 'rank')} on {counted(plan.nodes, 'node')}"
    moved = f"{show_bytes(done.nbytes)} in {show_count(done.messages)} messages"
    if done.shared:
        moved += f"; {show_bytes(done.shared)} of them in shared memory, without messages"
    lines = [
        f"{plan.strategy} on {place}",
        f"simulated    {show_seconds(done.seconds)}{_unit(job)}",
    ]
    if plan.seconds_predicted is not None:
        lines.append(f"predicted    {show_seconds(plan.seconds_predicted)} by the planner")
    lowered = f"{show_count(done.lowered)} of {counted(plan.ranks, 'rank')} lowered"
    lines += [f"moved        {moved}", f"model        {done.model}; {lowered}"]
    lines.append(f"digest       {plan.digest}")
    return "\n".join(lines)


def _comparison(done: Sequence[Simulated]) -> list[str]:
    rows = [("strategy", "simulated", "words", "bytes", "messages")]
    for each in done:
        rows.append(
            (
                each.plan.strategy,
                show_seconds(each.seconds),
                show_count(each.plan.words_predicted),
                show_bytes(each.nbytes),
                show_count(each.messages),
            )
        )
    return table_lines(rows)
