"""The command line: `einmpi JOB` runs a job, `einmpi check JOB` looks at it. One line and status 2 for bad input."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from einmpi.errors import EinmpiError, InputError
from einmpi.version import __version__

COMMANDS = ("run", "check")
_EXAMPLES = """examples:
  einmpi jobs/chain.toml                     run a job
  mpirun -n 4 python -m einmpi jobs/chain.toml
  einmpi jobs/chain.toml --set s=2000 --set skew=10
  einmpi check jobs/attention.toml           parse it, infer shapes, look at its files
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError("einmpi", message, f"see {self.prog} --help")


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="einmpi", description="Extended Einstein summation over MPI.", epilog=_EXAMPLES,
                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--version", action="version", version=f"einmpi {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, text in (("run", "run a job (the default)"), ("check", "parse a job, infer shapes, look at its files")):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("job", metavar="JOB.toml")
        command.add_argument("--set", action="append", default=[], metavar="SIZE=N", help="replace a size of the job")
        command.add_argument("--dtype", help="dtype of generated inputs")
        command.add_argument("--quiet", action="store_true", help="print errors only")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status. Under mpirun, rank 0 speaks for all."""
    from einmpi.runtime.comm_mpi import wait_for_status, world

    comm = world()
    if comm is None:
        return _run_safely(arguments)
    status = _run_safely(arguments) if comm.rank == 0 else None
    return wait_for_status(comm, status)


def _run_safely(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given and not given[0].startswith("-") and given[0] not in COMMANDS:
            given.insert(0, "run")
        options = make_parser().parse_args(given)
        return {"run": run, "check": check}[options.command](options)
    except SystemExit as stop:  # --help and --version
        return int(stop.code or 0)
    except (EinmpiError, MemoryError, OSError) as error:
        if os.environ.get("EINMPI_DEBUG") == "1":
            raise
        print(str(error) or type(error).__name__, file=sys.stderr, flush=True)
        return error.status if isinstance(error, EinmpiError) else 1


def check(options: argparse.Namespace) -> int:
    from einmpi.report.describe import describe_job

    job = _load(options)
    if not options.quiet:
        print(describe_job(job))
    return 0


def run(options: argparse.Namespace) -> int:
    from einmpi.api import reference
    from einmpi.report.describe import describe_results
    from einmpi.runtime.storage import check_targets, store

    start = time.perf_counter()
    job = _load(options)
    check_targets(job)
    results = reference(job)
    store(job, results)
    if not options.quiet:
        print(describe_results(job, results, time.perf_counter() - start))
    return 0


def _load(options: argparse.Namespace):  # type: ignore[no-untyped-def]
    from einmpi.api import load

    sizes: dict[str, int] = {}
    for setting in options.set:
        name, _, value = setting.partition("=")
        if re.fullmatch(r"-?[0-9]{1,20}", value) is None:
            raise InputError(f"--set {setting}", f"{value!r} is not a whole number", "--set NAME=NUMBER")
        sizes[name] = int(value)
    return load(options.job, dtype=options.dtype, **sizes)
