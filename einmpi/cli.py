"""The command line: `einmpi JOB` runs a job, `einmpi check JOB` looks at it. One line and status 2 for bad input."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from einmpi.errors import EinmpiError, InputError, one_of
from einmpi.version import __version__

_EXAMPLES = """examples:
  einmpi jobs/chain.toml                     run a job
  mpirun -n 4 python -m einmpi jobs/chain.toml
  einmpi jobs/chain.toml --set s=2000 --set skew=10
  einmpi check jobs/attention.toml           parse it, infer shapes, look at its files
  einmpi plan jobs/attention.toml -n 64      how it is cut over 64 ranks; needs no MPI and touches no data
  einmpi plan jobs/chain.toml -n 8 --compare
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError("einmpi", message, f"see {self.prog} --help")


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="einmpi", description="Extended Einstein summation over MPI.", epilog=_EXAMPLES,
                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--version", action="version", version=f"einmpi {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, function in COMMANDS.items():
        command = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        command.add_argument("job", metavar="JOB.toml")
        command.add_argument("--set", action="append", default=[], metavar="SIZE=N", help="replace a size of the job")
        command.add_argument("--dtype", help="dtype of generated inputs")
        command.add_argument("--quiet", action="store_true", help="print errors only")
        if name == "plan":
            _add_plan_arguments(command)
    return parser


def _add_plan_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("-n", "--ranks", type=int, required=True, metavar="P", help="number of ranks")
    which = command.add_mutually_exclusive_group()
    which.add_argument("--strategy", help="see the list in the documentation; the job's own by default")
    which.add_argument("--compare", action="store_true", help="all strategies side by side")
    command.add_argument("--memory", metavar="BYTES", help="limit a rank, such as 4GiB")
    command.add_argument("--json", metavar="FILE", help="write the plan as JSON; - is standard output")
    command.add_argument("--show-relations", metavar="VERTEX", help="join keys, aggregation groups, repartitions")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status. Under mpirun, rank 0 speaks for all."""
    from einmpi.runtime.comm_mpi import wait_for_status, world

    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without × shows ?
    comm = world()
    if comm is None:
        return _run_safely(arguments)
    if comm.rank != 0:
        return wait_for_status(comm, None)
    status = 1
    try:
        status = _run_safely(arguments)
    finally:  # whatever happens here, the other ranks must not wait for ever
        wait_for_status(comm, status)
    return status


def _run_safely(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        words = [word for word in given if not word.startswith("-")]
        if words and words[0] not in COMMANDS:
            given.insert(0, "run")
        options = make_parser().parse_args(given)
        return COMMANDS[options.command](options)
    except SystemExit as stop:  # --help and --version
        return int(stop.code or 0)
    except BrokenPipeError:  # `einmpi … | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("einmpi: interrupted", file=sys.stderr, flush=True)
        return 130
    except Exception as error:
        if os.environ.get("EINMPI_DEBUG") == "1":
            raise
        known = isinstance(error, EinmpiError)
        line = str(error) if known else f"einmpi: error: {type(error).__name__}: {error}; EINMPI_DEBUG=1 shows where"
        print(" ".join(line.split()), file=sys.stderr, flush=True)
        return error.status if isinstance(error, EinmpiError) else 1


def check(options: argparse.Namespace) -> int:
    """parse a job, infer shapes, look at its files"""
    from einmpi.report.describe import describe_job
    from einmpi.runtime.storage import check_targets

    job = _load(options)
    check_targets(job)
    if not options.quiet:
        print(describe_job(job))
    return 0


def run(options: argparse.Namespace) -> int:
    """run a job (the default)"""
    from einmpi.api import reference
    from einmpi.report.describe import describe_results
    from einmpi.runtime.storage import check_targets, store

    start = time.perf_counter()
    job = _load(options)
    check_targets(job)
    if job.backend != "numpy":
        raise InputError(job.path, f"backend {job.backend} is not available in this version", "numpy")
    results = reference(job)
    store(job, results)
    if not options.quiet:
        print(describe_results(job, results, time.perf_counter() - start))
    return 0


def plan(options: argparse.Namespace) -> int:
    """how a job is cut over ranks: EXPLAIN"""
    import json

    from einmpi.api import plan as make_plan
    from einmpi.plan.explain import as_json, compare, explain
    from einmpi.plan.relations import relations

    job = _load(options)
    data: object
    if options.compare:
        plans = compare(lambda name: make_plan(job, options.ranks, strategy=name, memory=options.memory))
        text, data = plans.text, [as_json(plan) for plan in plans.plans]
    else:
        made = make_plan(job, options.ranks, strategy=options.strategy, memory=options.memory)
        text, data = explain(made), as_json(made)
        if options.show_relations:
            name = options.show_relations
            if name not in made.states:
                raise InputError("--show-relations", f"unknown vertex {name!r}", one_of(made.states, name))
            parts = {vertex: tuple(made.parts(vertex).values()) for vertex in made.states}
            text = relations(job.graph, name, parts)
    if options.json == "-":
        print(json.dumps(data, indent=1))
        return 0
    if options.json:
        try:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(data, file, indent=1)
        except OSError as error:
            raise InputError(f"--json {options.json}", error.strerror or str(error), "a file to write") from None
    if not options.quiet:
        print(text)
    return 0


COMMANDS = {"run": run, "check": check, "plan": plan}


def _load(options: argparse.Namespace):  # type: ignore[no-untyped-def]
    from einmpi.graph.job_file import read_job
    from einmpi.runtime.storage import describe

    sizes: dict[str, int] = {}
    for setting in options.set:
        name, _, value = setting.partition("=")
        if re.fullmatch(r"-?[0-9]{1,20}", value) is None:
            raise InputError(f"--set {setting}", f"{value!r} is not a whole number", "--set NAME=NUMBER")
        sizes[name] = int(value)
    return read_job(options.job, describe, sizes, options.dtype)
