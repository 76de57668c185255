"""The command line: `einmpi JOB` runs a job; check, plan and verify. Under mpirun rank 0 speaks for all."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from einmpi.cli.calibrate.command import add_options as add_calibration
from einmpi.cli.calibrate.command import calibrate
from einmpi.cli.commands import check, plan, run, verify
from einmpi.cli.completion import SHELLS, script
from einmpi.cli.doctor.command import add_options, doctor
from einmpi.cli.help import Parser, Version
from einmpi.cli.job_options import EVERY
from einmpi.cli.rank import connect_ranks, fail_to_connect, run_alone, run_rank
from einmpi.cli.sbatch.command import add_options as add_sbatch_options
from einmpi.cli.sbatch.command import sbatch
from einmpi.errors import InputError, one_of

if TYPE_CHECKING:
    from einmpi.comm.base import Comm


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="einmpi", description="Extended Einstein summation over MPI.")
    parser.add_argument("--version", action=Version, help="of einmpi and of what it runs on")
    parser.set_defaults(
        checkpoint=None, machine=None, repeat=1, quiet=False
    )  # of commands that have no such flags
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, function in COMMANDS.items():
        command = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        if name in WITHOUT_JOB:
            WITHOUT_JOB[name](command)
            continue
        command.add_argument("job", metavar="JOB.toml", help="the job file")
        command.add_argument(
            "--set", action="append", default=[], metavar="SIZE=N", help="replace a size of the job"
        )
        command.add_argument("--dtype", help="dtype of generated inputs")
        command.add_argument("--quiet", action="store_true", help="print errors only")
        if name == "sbatch":
            add_sbatch_options(command)
        if name != "check":
            _add_planning(command, name)
        if name in ("run", "verify", "sbatch"):
            command.add_argument(
                "--backend", help="numpy, or cupy for GPUs; the job's own by default"
            )
            command.add_argument(
                "--fast-math", action="store_true", help="faster arithmetic that rounds more"
            )
        if name in ("run", "plan"):
            command.add_argument(
                "--report", metavar="FILE.html", help="write a page about it, for any browser"
            )
        if name in ("run", "sbatch"):
            command.add_argument(
                "--checkpoint",
                metavar="DIR",
                help="save finished tensors in this folder on the way",
            )
            command.add_argument(
                "--every", metavar="TIME", help=f"how often: 30s, 1h, 0 for each vertex; {EVERY}"
            )
        if name == "run":
            command.add_argument(
                "--repeat", type=int, default=1, metavar="N", help="run N times, report the median"
            )
            command.add_argument(
                "--resume", action="store_true", help="go on from the checkpoint, if there is one"
            )
            command.add_argument(
                "--trace", metavar="FILE.json", help="write what every rank did when, for Perfetto"
            )
            command.add_argument(
                "--summary", action="store_true", help="print where the time went, also in a pipe"
            )
    return parser


def _add_planning(command: argparse.ArgumentParser, name: str) -> None:
    which = command.add_mutually_exclusive_group()
    which.add_argument("--strategy", help="how to cut; the job's own by default")
    command.add_argument("--memory", metavar="BYTES", help="limit a rank, such as 4GiB")
    command.add_argument(
        "--machine", metavar="FILE.toml", help="plan for the times that einmpi calibrate measured"
    )
    if name == "sbatch":
        return
    what = "number of ranks" if name == "plan" else "start this many ranks with mpirun"
    command.add_argument("-n", "--ranks", type=int, required=name == "plan", metavar="P", help=what)
    command.add_argument(
        "--json", metavar="FILE", help="write what is printed as JSON; - is standard output"
    )
    if name == "plan":
        command.add_argument(
            "--nodes", type=int, default=1, metavar="N", help="that the ranks lie on, evenly"
        )
        which.add_argument("--compare", action="store_true", help="all strategies side by side")
        command.add_argument(
            "--plot", metavar="FILE.svg", help="draw the graph with its cuts; or FILE.png"
        )
        command.add_argument(
            "--show-relations", metavar="VERTEX", help="join keys, aggregation groups, repartitions"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.reconfigure(errors="replace")  # a terminal without × shows ?
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        comm = connect_ranks()
    except Exception as error:
        return fail_to_connect(error)
    if comm.size == 1:
        return run_alone(lambda: _command(given, comm))
    return run_rank(comm, lambda: _command(given, comm))


def _command(given: list[str], comm: Comm) -> int:
    from einmpi.comm.base import together
    from einmpi.process.signals import deliver_stop_requests

    options = together(comm, lambda: _parse(given), _what_to_do)
    if options is None:
        return 0
    if options.checkpoint is None:
        deliver_stop_requests()
    if options.command in ("run", "verify", "calibrate") and options.ranks is not None:
        return _on_ranks(options, given, comm)
    return COMMANDS[options.command](options, comm)


def _parse(given: list[str]) -> argparse.Namespace | None:
    """None where --help or --version was all that was asked for. Without a command it is `run`."""
    words = [word for word in given if not word.startswith("-")]
    if words and words[0] not in COMMANDS:
        if given[:2] == words[:2] != words[:1] and not words[0].endswith(
            ".toml"
        ):  # two words, and no job first
            raise InputError("einmpi", f"unknown command {words[0]!r}", one_of(COMMANDS, words[0]))
        given.insert(0, "run")
    try:
        return make_parser().parse_args(given)
    except SystemExit:
        return None


def _what_to_do(options: argparse.Namespace | None) -> str:
    """What all ranks must be asked alike; where the job is found may differ."""
    return repr(
        options and sorted((key, value) for key, value in vars(options).items() if key != "job")
    )


def _on_ranks(options: argparse.Namespace, given: Sequence[str], comm: Comm) -> int:
    """-n P: one rank is this process, more are started."""
    from einmpi.cli.launch.launcher import launch
    from einmpi.comm.base import together
    from einmpi.planner.make_plan import MAX_RANKS

    def check() -> None:
        if comm.size > 1:
            raise InputError(
                "-n", "this process was already started by mpirun", hint="leave out -n"
            )
        if not 1 <= options.ranks <= MAX_RANKS:
            raise InputError("-n", f"{options.ranks} ranks", f"1 to {MAX_RANKS}")

    together(comm, check)
    if options.ranks == 1:
        return COMMANDS[options.command](options, comm)
    return launch(options.ranks, _without_ranks(given), graceful=options.checkpoint is not None)


def _without_ranks(given: Sequence[str]) -> list[str]:
    """The arguments but for -n P, which the ranks must not see."""
    kept: list[str] = []
    skip = False
    for word in given:
        if skip:
            skip = False
        elif word in ("-n", "--ranks"):
            skip = True
        elif not re.match(r"-n[\d=]|--ranks=", word):
            kept.append(word)
    return kept


def completion(options: argparse.Namespace, comm: Comm) -> int:
    """a script that completes commands, options and files in a shell"""
    from einmpi.comm.base import on_first_rank

    on_first_rank(comm, lambda: print(script(options.shell, make_parser()), end=""))
    return 0


COMMANDS = {
    "run": run,
    "check": check,
    "plan": plan,
    "verify": verify,
    "sbatch": sbatch,
    "doctor": doctor,
    "calibrate": calibrate,
    "completion": completion,
}
# How the others get their options.
WITHOUT_JOB: dict[str, Callable[[argparse.ArgumentParser], object]] = {
    "doctor": add_options,
    "calibrate": add_calibration,
    "completion": lambda command: command.add_argument(
        "shell", choices=SHELLS, help="whose script"
    ),
}
