"""The command line: `einmpi JOB` runs a job; check, plan and verify. Under mpirun rank 0 speaks for all."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from einmpi.completion import SHELLS, script
from einmpi.doctor.command import add_options, doctor
from einmpi.errors import EinmpiError, InputError, one_of
from einmpi.graph.job_file import BACKENDS
from einmpi.help import Parser, Version
from einmpi.process import alone, one_of_many, say
from einmpi.units import parse_seconds

if TYPE_CHECKING:
    from einmpi.graph.job_file import Job
    from einmpi.plan.plan import Plan
    from einmpi.report.results import Report
    from einmpi.runtime.checkpoint import Checkpoints
    from einmpi.runtime.comm import Comm

EVERY = "10min"  # between two checkpoints


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="einmpi", description="Extended Einstein summation over MPI.")
    parser.add_argument("--version", action=Version, help="of einmpi and of what it runs on")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, function in COMMANDS.items():
        command = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        if name in WITHOUT_JOB:
            WITHOUT_JOB[name](command)
            continue
        command.add_argument("job", metavar="JOB.toml", help="the job file")
        command.add_argument("--set", action="append", default=[], metavar="SIZE=N", help="replace a size of the job")
        command.add_argument("--dtype", help="dtype of generated inputs")
        command.add_argument("--quiet", action="store_true", help="print errors only")
        if name != "check":
            _add_planning(command, ranks_needed=name == "plan")
        if name in ("run", "verify"):
            command.add_argument("--backend", help="numpy; the job's own by default")
            command.add_argument("--fast-math", action="store_true", help="faster arithmetic that rounds more")
        if name in ("run", "plan"):
            command.add_argument("--report", metavar="FILE.html", help="write a page about it, for any browser")
        if name == "run":
            command.add_argument("--repeat", type=int, default=1, metavar="N", help="run N times, report the median")
            command.add_argument("--checkpoint", metavar="DIR", help="save finished tensors in this folder on the way")
            command.add_argument("--every", metavar="TIME", help=f"how often: 30s, 1h, 0 for each vertex; {EVERY}")
            command.add_argument("--resume", action="store_true", help="go on from the checkpoint, if there is one")
            command.add_argument("--trace", metavar="FILE.json", help="write what every rank did when, for Perfetto")
            command.add_argument("--summary", action="store_true", help="print where the time went, also in a pipe")
    return parser


def _add_planning(command: argparse.ArgumentParser, ranks_needed: bool) -> None:
    what = "number of ranks" if ranks_needed else "start this many ranks with mpirun"
    command.add_argument("-n", "--ranks", type=int, required=ranks_needed, metavar="P", help=what)
    which = command.add_mutually_exclusive_group()
    which.add_argument("--strategy", help="how to cut; the job's own by default")
    command.add_argument("--memory", metavar="BYTES", help="limit a rank, such as 4GiB")
    command.add_argument("--json", metavar="FILE", help="write what is printed as JSON; - is standard output")
    if ranks_needed:
        which.add_argument("--compare", action="store_true", help="all strategies side by side")
        command.add_argument("--plot", metavar="FILE.svg", help="draw the graph with its cuts; or FILE.png")
        command.add_argument("--show-relations", metavar="VERTEX", help="join keys, aggregation groups, repartitions")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.reconfigure(errors="replace")  # a terminal without × shows ?
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        from einmpi.runtime.comm_mpi import comm_of

        comm = comm_of()
    except EinmpiError as error:
        return say(error)
    if comm.size == 1:
        return alone(lambda: _command(given, comm))
    return one_of_many(comm, lambda: _command(given, comm))


def _command(given: list[str], comm: Comm) -> int:
    words = [word for word in given if not word.startswith("-")]
    if words and words[0] not in COMMANDS:
        given.insert(0, "run")
    from einmpi.runtime.comm import together

    options = together(comm, lambda: _parse(given), _what_to_do)
    if options is None:
        return 0
    if options.command in ("run", "verify") and options.ranks is not None:
        return _on_ranks(options, given, comm)
    return COMMANDS[options.command](options, comm)


def _parse(given: Sequence[str]) -> argparse.Namespace | None:
    """None where --help or --version was all that was asked for."""
    try:
        return make_parser().parse_args(given)
    except SystemExit:
        return None


def _what_to_do(options: argparse.Namespace | None) -> str:
    """What all ranks must be asked alike; where the job is found may differ."""
    return repr(options and sorted((key, value) for key, value in vars(options).items() if key != "job"))


def _on_ranks(options: argparse.Namespace, given: Sequence[str], comm: Comm) -> int:
    """-n P: one rank is this process, more are started."""
    from einmpi.launch import launch
    from einmpi.plan.plan import MAX_RANKS
    from einmpi.runtime.comm import together

    def check() -> None:
        if comm.size > 1:
            raise InputError("-n", "this process was started by mpirun already", "leave out -n")
        if not 1 <= options.ranks <= MAX_RANKS:
            raise InputError("-n", f"{options.ranks} ranks", f"1 to {MAX_RANKS}")

    together(comm, check)
    if options.ranks == 1:
        return COMMANDS[options.command](options, comm)
    return launch(options.ranks, _without_ranks(given), patient=getattr(options, "checkpoint", None) is not None)


def _without_ranks(given: Sequence[str]) -> list[str]:
    """The arguments but for -n P, which the ranks must not see."""
    kept: list[str] = []
    skip = False
    for word in given:
        if skip:
            skip = False
        elif word in ("-n", "--ranks"):
            skip = True
        elif not re.match(r"-n\d|--ranks=", word):
            kept.append(word)
    return kept


# ---- commands -------------------------------------------------------------------------------------------------------


def check(options: argparse.Namespace, comm: Comm) -> int:
    """parse a job, infer shapes, look at its files"""
    from einmpi.report.describe import describe_job
    from einmpi.runtime.comm import on_first_rank
    from einmpi.runtime.outputs import check_targets

    def look() -> None:
        job = _load(options)
        check_targets(job)
        if not options.quiet:
            print(describe_job(job))

    on_first_rank(comm, look)
    return 0


def run(options: argparse.Namespace, comm: Comm) -> int:
    """run a job (the default)"""
    from einmpi.report.summary import vertex_times
    from einmpi.report.terminal import summary_text
    from einmpi.report.trace import write_trace
    from einmpi.runtime.comm import on_first_rank
    from einmpi.runtime.terminals import columns
    from einmpi.runtime.watch import asked_to_stop

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
        _print(options, text, data)

    patient: AbstractContextManager[list[str]] = asked_to_stop() if options.checkpoint is not None else nullcontext([])
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
    from einmpi.runtime.comm import together
    from einmpi.runtime.outputs import check_targets, claim

    start = time.perf_counter()
    job = together(comm, lambda: _checked_job(options, check_targets))
    with claim(job, comm) if keep else contextlib.nullcontext():
        return _run_job(job, options, comm, asked, keep, start)


def _run_job(
    job: Job, options: argparse.Namespace, comm: Comm, asked: Sequence[str], keep: bool, start: float
) -> tuple[Report, Checkpoints | None]:
    from einmpi.api import options_of
    from einmpi.checkpointed import open_checkpoints, prepare
    from einmpi.report.observe import Observer, somebody_looks
    from einmpi.report.results import Report, figures, median, totals
    from einmpi.runtime.inputs import Inputs
    from einmpi.runtime.outputs import store
    from einmpi.runtime.watch import note_to

    checkpoints = None
    if getattr(options, "checkpoint", None) is not None:
        every = parse_seconds(options.every or EVERY)
        checkpoints = open_checkpoints(job, comm, options.checkpoint, every, options.resume, asked, options.quiet)
    compiled, plan, schedule, given = prepare(
        job, comm, lambda job: options_of(job, options.strategy, options.memory), checkpoints
    )
    note = note_to(comm.rank)
    repeats = getattr(options, "repeat", 1)
    record = _asked_to_record(options) or (
        options.command == "run" and not options.quiet and options.json != "-" and somebody_looks(comm, schedule)
    )
    observer = Observer(comm, schedule, repeats, record, options.quiet, checkpoints)
    planned = time.perf_counter()
    inputs = Inputs(compiled.job, given, compiled.files, keep=repeats > 1)
    measured = []
    for _ in range(repeats):
        with observer.run(note) as compiled.on_step:
            outputs, figures_of_run = compiled.run(plan, schedule, inputs, checkpoints)
        measured.append(figures_of_run)
    note("storing the results")
    before = time.perf_counter()
    if keep:
        store(job, plan.digest, outputs)
    stored = time.perf_counter() - before
    runs = [each.seconds for each in measured]
    seconds = {"plan": planned - start, "load": measured[0].seconds_loading, "run": median(runs),
               "checkpoint": checkpoints.seconds if checkpoints else 0.0, "store": stored,
               "total": time.perf_counter() - start}  # fmt: skip
    last = measured[-1]
    moved = totals(comm, last.received, last.peak, measured[0].shuffled)
    report = Report(job, plan, moved, seconds, runs, outputs, figures(comm, outputs), str(compiled.threads), _kernels(),
                    timeline=observer.timeline)  # fmt: skip
    if checkpoints is not None:
        resumed_from = checkpoints.saved.vertex if checkpoints.saved is not None else None
        report = replace(report, resumed_from=resumed_from, checkpoints=checkpoints.count)
    return report, checkpoints


def _asked_to_record(options: argparse.Namespace) -> bool:
    return options.command == "run" and bool(options.summary or options.trace or options.report)


def _kernels() -> str:
    """What rank 0 compiled; nothing where all was there already."""
    from einmpi.runtime.fused import STATISTICS

    if not STATISTICS.compiled:
        return ""
    kernels = f"{STATISTICS.compiled} kernel{'s' * (STATISTICS.compiled > 1)}"
    return f"; {kernels} compiled in {STATISTICS.compile_seconds:.2f} s"


def _checked_job(options: argparse.Namespace, check_targets: Callable[[Job], None]) -> Job:
    if options.command == "run":
        _check_flags(options)
    job = _load(options)
    check_targets(job)
    if options.backend is not None:
        if options.backend not in BACKENDS:
            raise InputError("--backend", f"unknown backend {options.backend!r}", one_of(BACKENDS, options.backend))
        job = replace(job, backend=options.backend)
    job = replace(job, fast_math=job.fast_math or options.fast_math)
    if options.json not in (None, "-"):
        _check_writable("--json", options.json)
    for flag in ("report", "trace"):
        if getattr(options, flag, None):
            _check_writable(f"--{flag}", getattr(options, flag))
    return job


def _check_flags(options: argparse.Namespace) -> None:
    if options.repeat < 1:
        raise InputError("--repeat", f"{options.repeat} times", "1 or more")
    if options.checkpoint is None and (options.resume or options.every):
        raise InputError("--resume" if options.resume else "--every", "there is no folder", "--checkpoint DIR with it")
    if options.checkpoint is not None and options.repeat > 1:
        raise InputError("--checkpoint", f"does not go with --repeat {options.repeat}", "one of the two")
    try:
        parse_seconds(options.every or EVERY)
    except ValueError as error:
        raise InputError("--every", *str(error).split("; ", 1)) from None


def _check_writable(flag: str, file: str) -> None:
    """Before hours of work, not after them."""
    folder = os.path.dirname(file) or "."
    if os.path.isdir(file) or not os.access(file if os.path.exists(file) else folder, os.W_OK):
        raise InputError(f"{flag} {file}", "cannot be written", "a file in a folder with write permission")


def verify(options: argparse.Namespace, comm: Comm) -> int:
    """run a job and compare with the plain evaluator; writes no outputs"""
    from einmpi.api import reference
    from einmpi.report.compare import compare_with
    from einmpi.runtime.comm import on_first_rank

    report, _ = _run(options, comm, keep=False)
    whole = {name: array.gather(0) for name, array in report.outputs.items()}

    def compare() -> None:
        wrong, text = compare_with(reference(report.job), whole)
        _print(options, f"{report}\n{text}", report.as_json())
        if wrong:
            raise EinmpiError(f"{report.job.path}: {', '.join(wrong)} differ from the plain evaluator's results")

    on_first_rank(comm, compare)
    return 0


def plan(options: argparse.Namespace, comm: Comm) -> int:
    """how a job is cut over ranks: EXPLAIN"""
    from einmpi.runtime.comm import on_first_rank

    on_first_rank(comm, lambda: _plan(options))
    return 0


def _plan(options: argparse.Namespace) -> None:
    from einmpi.api import plan as make_plan
    from einmpi.plan.explain import as_json, compare
    from einmpi.plan.relations import relations
    from einmpi.report.plot import check_plot, write_plot
    from einmpi.report.terminal import comparison_text, plan_text

    if options.plot:
        check_plot(options.plot)
    job = _load(options)
    data: object
    plans = None
    if options.compare:
        plans = compare(lambda name: make_plan(job, options.ranks, strategy=name, memory=options.memory))
        text, data = comparison_text(plans), [as_json(plan) for plan in plans.plans]
        made = next((plan for plan in plans.plans if plan.strategy == job.strategy), plans.plans[0])
    else:
        made = make_plan(job, options.ranks, strategy=options.strategy, memory=options.memory)
        text, data = plan_text(made), as_json(made)
        if options.show_relations:
            name = options.show_relations
            if name not in made.states:
                raise InputError("--show-relations", f"unknown vertex {name!r}", one_of(made.states, name))
            parts = {vertex: tuple(made.parts(vertex).values()) for vertex in made.states}
            text = relations(job.graph, name, parts)
    if options.plot:
        write_plot(options.plot, made)
    if options.report:
        _write_report(options, job, made, comparison=plans)
    _print(options, text, data)


def _write_report(options: argparse.Namespace, job: Job, plan: Plan, **more: Any) -> None:
    from einmpi.report.html import write_report

    write_report(options.report, plan, program=job.source.text, title=job.title or job.source.name, **more)


def completion(options: argparse.Namespace, comm: Comm) -> int:
    """a script that completes commands, options and files in a shell"""
    from einmpi.runtime.comm import on_first_rank

    on_first_rank(comm, lambda: print(script(options.shell, make_parser()), end=""))
    return 0


COMMANDS = {"run": run, "check": check, "plan": plan, "verify": verify, "doctor": doctor, "completion": completion}
# How the others get their options.
WITHOUT_JOB: dict[str, Callable[[argparse.ArgumentParser], object]] = {
    "doctor": add_options,
    "completion": lambda command: command.add_argument("shell", choices=SHELLS, help="whose script"),
}


def _print(options: argparse.Namespace, text: str, data: Any) -> None:
    """The text, and the same as JSON where it was asked for."""
    import json

    if options.json == "-":
        print(json.dumps(data, indent=1))
        return
    if options.json:
        try:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(data, file, indent=1)
        except OSError as error:
            raise InputError(f"--json {options.json}", error.strerror or str(error), "a file to write") from None
    if not options.quiet:
        print(text)


def _load(options: argparse.Namespace) -> Job:
    from einmpi.graph.job_file import read_job
    from einmpi.runtime.storage import describe

    sizes: dict[str, int] = {}
    for setting in options.set:
        name, _, value = setting.partition("=")
        if re.fullmatch(r"-?[0-9]{1,20}", value) is None:
            raise InputError(f"--set {setting}", f"{value!r} is not a whole number", "--set NAME=NUMBER")
        sizes[name] = int(value)
    return read_job(options.job, describe, sizes, options.dtype)
