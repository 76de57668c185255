"""The entry point: `einmpi COMMAND …`, in one process or as a rank; failures become one line."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from einmpi.cli.help import make_parser
from einmpi.cli.options import COMMANDS, RANKS_FLAGS, check_together
from einmpi.errors import EinmpiError, InputError, is_everywhere, on_one_line, one_of
from einmpi.process.environment import (
    DEBUG_VARIABLE,
    is_debugging,
    is_launched,
    launcher_rank,
    open_closed_streams,
)

if TYPE_CHECKING:
    from einmpi.comm.base import Comm


# Commands that all ranks carry out, and that return the exit status. The others only need rank 0.
_BY_ALL_RANKS = ("run", "verify", "llama", "doctor", "calibrate")
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
    # The command llama may only plan for ranks, or write a job file.
    is_llama = options.command == "llama"
    if starts_ranks and not (is_llama and (options.plan_only or options.job is not None)):
        return _run_on_ranks(options, _with_command(words), comm)
    return _run_in_this_process(options, comm)


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
    from einmpi.cli.launcher import launch
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
        return _run_in_this_process(options, comm)
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


def _run_in_this_process(options: argparse.Namespace, comm: Comm) -> int:
    from einmpi.comm.agreement import on_first_rank

    function = resolve_name(f"einmpi.cli.{COMMANDS[options.command].function}")
    if options.command in _BY_ALL_RANKS:
        status: int = function(options, comm)
        return status
    on_first_rank(comm, lambda: function(options))
    return 0


# ---- one process, or one rank of many ------------------------------------------------------------


_TURN_SECONDS = 0.3  # between the lines of two ranks that fail to start for the same reason
_MOST_TURNS = 8


def connect_ranks() -> Comm:
    """Return the Comm of all ranks that the launcher started, or of this process alone.

    All ranks have started in time and have the same version of einmpi.
    """
    from einmpi.process.signals import hold_stop_requests
    from einmpi.process.startup import startup_deadline

    if is_launched():
        hold_stop_requests()
    with startup_deadline():
        from einmpi.comm.agreement import require_same_version
        from einmpi.comm.mpi import comm_of

        comm = comm_of()
        require_same_version(comm)
    return comm


def fail_to_connect(error: Exception | KeyboardInterrupt) -> int:
    """Print an error of `connect_ranks`, when ranks cannot agree who prints; return the status."""
    rank = launcher_rank()
    if isinstance(error, EinmpiError):
        if error.everywhere and rank > 0:
            return error.status
        # All ranks may have this error; the launcher ends the others after the first one.
        time.sleep(_TURN_SECONDS * min(rank, _MOST_TURNS))
        return print_error(error)
    if is_launched():
        from einmpi.comm.agreement import end_all_ranks

        end_all_ranks(error)
    if isinstance(error, KeyboardInterrupt):
        return print_interrupted()
    return print_error(error)


def run_rank(comm: Comm, command: Callable[[], int]) -> int:
    """Run the command as one rank of many; return the exit status.

    Rank 0 prints an error that all ranks raise together. An error on one rank ends all of them.
    """
    from einmpi.comm.mpi_library import abort, world
    from einmpi.process.signals import SignalWatch, abort_on_error, wait_if_aborting

    abort_all = partial(abort, world())
    SignalWatch(comm.rank, abort_all)

    def run_command() -> int:
        try:
            return command()
        finally:
            wait_if_aborting()  # after a signal the line and the status are those of the signal

    try:
        if comm.rank == 0:
            return run_command()
        with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):
            return run_command()
    except Exception as error:
        if is_everywhere(error):
            if isinstance(error, EinmpiError):
                return print_error(error) if comm.rank == 0 else error.status
            if is_debugging():
                traceback.print_exception(error)
            return print_error(error) if comm.rank == 0 else EinmpiError.status
        reason = error
    try:
        if not isinstance(reason, BrokenPipeError):
            abort_on_error(comm.rank, reason, abort_all)
    finally:
        abort_all(1)  # all ranks must end, whatever else goes wrong
    raise AssertionError("an aborted rank goes on")


def run_alone(command: Callable[[], int]) -> int:
    """Run the command in the only process; return the exit status."""
    try:
        return command()
    except BrokenPipeError:  # as in `einmpi … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return print_interrupted()
    except Exception as error:
        if is_debugging():
            raise
        return print_error(error)


def print_interrupted() -> int:
    """Print that the user has interrupted the command; return the exit status."""
    print("einmpi: interrupted", file=sys.stderr, flush=True)
    return 130


def print_error(error: Exception) -> int:
    """Print one line to standard error; return the exit status."""
    if isinstance(error, EinmpiError):
        line = str(error)
        status = error.status
    else:
        name = type(error).__name__
        line = f"einmpi: error: {name}: {error}; {DEBUG_VARIABLE}=1 shows the traceback"
        status = 1
    for note in getattr(error, "__notes__", ()):
        line += f" ({note})"
    # One write, even without a buffer: other ranks and mpirun may write at the same time.
    print(on_one_line(line) + "\n", end="", file=sys.stderr, flush=True)
    return status
