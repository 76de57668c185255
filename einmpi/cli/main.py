"""The entry point: `einmpi COMMAND …`, and `einmpi JOB.toml` runs a job."""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from einmpi.cli.calibrate.command import calibrate
from einmpi.cli.commands import check, plan, run, verify
from einmpi.cli.completion import completion_script
from einmpi.cli.doctor.command import doctor
from einmpi.cli.examples import examples
from einmpi.cli.help import help_text, make_parser
from einmpi.cli.llama.command import is_run_on_ranks, llama
from einmpi.cli.new.command import new
from einmpi.cli.options import RANKS_FLAGS, check_together
from einmpi.cli.rank import connect_ranks, fail_to_connect, run_alone, run_rank
from einmpi.cli.sbatch.command import sbatch
from einmpi.cli.simulate.command import simulate
from einmpi.errors import InputError, one_of
from einmpi.process.terminal import open_closed_streams

if TYPE_CHECKING:
    from einmpi.comm.base import Comm

_STARTS_RANKS = ("run", "verify", "calibrate", "llama")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # tests replace them
            stream.reconfigure(errors="replace")  # a terminal without × shows ?
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        comm = connect_ranks()
    except (Exception, KeyboardInterrupt) as error:
        return fail_to_connect(error)
    if comm.size == 1:
        return run_alone(lambda: _run_command(words, comm))
    return run_rank(comm, lambda: _run_command(words, comm))


def _run_command(words: list[str], comm: Comm) -> int:
    from einmpi.comm.agreement import together
    from einmpi.process.signals import deliver_stop_requests

    options = together(comm, lambda: _parse(_with_command(words)), _fingerprint)
    if options is None:
        return 0
    if options.checkpoint is None:
        deliver_stop_requests()
    starts_ranks = options.command in _STARTS_RANKS and options.ranks is not None
    if starts_ranks and is_run_on_ranks(options):
        return _run_on_ranks(options, _with_command(words), comm)
    return COMMANDS[options.command](options, comm)


def _with_command(words: list[str]) -> list[str]:
    """Return the arguments with the command `run` in front, if they have no command."""
    positional = [word for word in words if not word.startswith("-")]
    if not positional or positional[0] in COMMANDS:
        return words
    first = positional[0]
    begins_with_two = len(positional) > 1 and words[:2] == positional[:2]
    if begins_with_two and not first.endswith(".toml"):  # not a job file: a misspelt command
        raise InputError("einmpi", f"unknown command {first!r}", one_of(COMMANDS, first))
    return ["run", *words]


def _parse(words: list[str]) -> argparse.Namespace | None:
    """Parse the command line; return None if it only asked for help or the version."""
    try:
        options = make_parser().parse_args(words)
    except SystemExit:
        return None
    check_together(options)
    return options


def _fingerprint(options: argparse.Namespace | None) -> str:
    """Return what must be the same on all ranks. The path of the job may differ."""
    if options is None:
        return "None"
    settings = {name: value for name, value in vars(options).items() if name != "job"}
    return repr(sorted(settings.items()))


def _run_on_ranks(options: argparse.Namespace, words: Sequence[str], comm: Comm) -> int:
    """Run a command with -n P: one rank is this process, several are started with mpirun."""
    from einmpi.cli.launch.launcher import launch
    from einmpi.comm.agreement import together
    from einmpi.planner.make_plan import MAX_RANKS

    def check_ranks() -> None:
        if comm.size > 1:
            problem = "this process was already started by mpirun"
            raise InputError("-n", problem, hint="leave out -n")
        if not 1 <= options.ranks <= MAX_RANKS:
            problem = f"{options.ranks} ranks requested"
            raise InputError("-n", problem, f"a number from 1 to {MAX_RANKS}")

    together(comm, check_ranks)
    if options.ranks == 1:
        return COMMANDS[options.command](options, comm)
    graceful = options.checkpoint is not None
    return launch(options.ranks, _without_ranks(words), graceful=graceful)


def _without_ranks(words: Sequence[str]) -> list[str]:
    """Return the arguments without -n P, which the ranks must not see."""
    kept: list[str] = []
    is_value = False  # of -n
    for word in words:
        if is_value:
            is_value = False
        elif word in RANKS_FLAGS.split():
            is_value = True
        elif not re.match(r"-n[\d=]|-np=|--ranks=", word):
            kept.append(word)
    return kept


def completion(options: argparse.Namespace, comm: Comm) -> int:
    """Print the completion script of a shell."""
    from einmpi.comm.agreement import on_first_rank

    on_first_rank(comm, lambda: print(completion_script(options.shell), end=""))
    return 0


def show_help(options: argparse.Namespace, comm: Comm) -> int:
    """Print the help of a command or of the whole program."""
    from einmpi.comm.agreement import on_first_rank

    on_first_rank(comm, lambda: print(help_text(options.topic), end=""))
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace, Comm], int]] = {
    "run": run,
    "check": check,
    "plan": plan,
    "verify": verify,
    "sbatch": sbatch,
    "simulate": simulate,
    "new": new,
    "llama": llama,
    "examples": examples,
    "doctor": doctor,
    "calibrate": calibrate,
    "completion": completion,
    "help": show_help,
}
