"""Run a command in one process or as one rank of many; failures become one line and a status."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from einmpi.errors import EinmpiError, is_everywhere, on_one_line
from einmpi.process.variables import DEBUG_VARIABLE, is_debugging

if TYPE_CHECKING:
    from einmpi.comm.base import Comm

_TURN_SECONDS = 0.3  # between the lines of two ranks that fail to start for the same reason
_MOST_TURNS = 8


def connect_ranks() -> Comm:
    """Return the Comm of all ranks that the launcher started, or of this process alone.

    All ranks have started in time and have the same version of einmpi.
    """
    from einmpi.process.environment import is_launched
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
    from einmpi.process.environment import is_launched, launcher_rank

    rank = launcher_rank()
    if isinstance(error, EinmpiError):
        if error.everywhere and rank > 0:
            return error.status
        # All ranks may have this error; the launcher ends the others after the first one.
        time.sleep(_TURN_SECONDS * min(rank, _MOST_TURNS))
        return print_error(error)
    if is_launched():
        from einmpi.comm.programs import end_all_ranks

        end_all_ranks(error)
    if isinstance(error, KeyboardInterrupt):
        return print_interrupted()
    return print_error(error)


def run_rank(comm: Comm, command: Callable[[], int]) -> int:
    """Run the command as one rank of many; return the exit status.

    Rank 0 prints an error that all ranks raise together. An error on one rank ends all of them.
    """
    from einmpi.comm.mpi_library import abort, world
    from einmpi.process.abort import abort_on_error, wait_if_aborting
    from einmpi.process.signals import SignalWatch

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
