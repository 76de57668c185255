"""A command in one process, or on one rank of many: what goes wrong is one line and an exit status."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from einmpi.errors import EinmpiError

if TYPE_CHECKING:
    from einmpi.comm.base import Comm

_TURN = 0.3  # seconds between the first words of two ranks


def come_together() -> Comm:
    """This process alone, or all ranks of the launcher: they have started in time, with the same version of einmpi."""
    from einmpi.process.environment import launched
    from einmpi.process.startup import all_must_come
    from einmpi.process.supervise import hold_requests

    if launched():
        hold_requests()
    with all_must_come():
        from einmpi.comm.base import same_version
        from einmpi.comm.mpi import comm_of

        comm = comm_of()
        same_version(comm)
    return comm


def not_together(error: Exception) -> int:
    """What went wrong before there was anybody to agree with; the exit status."""
    from einmpi.process.environment import given_rank, launched

    if isinstance(error, EinmpiError):
        if error.everywhere and given_rank() > 0:
            return error.status
        time.sleep(
            _TURN * min(given_rank(), 8)
        )  # all may have it, and the launcher ends them after the first
        return say(error)
    if launched():
        from einmpi.comm.mpi import abort, world
        from einmpi.process.supervise import fail

        fail(given_rank(), error, partial(abort, world()))
    return say(error)


def one_of_many(comm: Comm, command: Callable[[], int]) -> int:
    """A rank under mpirun. What all ranks raise together rank 0 prints; what one raises alone ends all of them."""
    from einmpi.comm.mpi import abort, world
    from einmpi.process.supervise import fail, watch_signals

    abort_all = partial(abort, world())
    watch_signals(comm.rank, abort_all)
    try:
        if comm.rank == 0:
            return command()
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            return command()
    except EinmpiError as error:
        if error.everywhere:
            return say(error) if comm.rank == 0 else error.status
        reason: Exception = error
    except Exception as error:
        reason = error
    try:
        if not isinstance(reason, BrokenPipeError):
            fail(comm.rank, reason, abort_all)
    finally:
        abort_all(1)  # whatever else goes wrong, all must end
    raise AssertionError("an aborted rank goes on")


def alone(command: Callable[[], int]) -> int:
    """The only process: whatever happens is one line."""
    try:
        return command()
    except BrokenPipeError:  # `einmpi … | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("einmpi: interrupted", file=sys.stderr, flush=True)
        return 130
    except Exception as error:
        if os.environ.get("EINMPI_DEBUG") == "1":
            raise
        return say(error)


def say(error: Exception) -> int:
    """One line on standard error; the exit status."""
    known = isinstance(error, EinmpiError)
    line = (
        str(error)
        if known
        else f"einmpi: error: {type(error).__name__}: {error}; EINMPI_DEBUG=1 shows where"
    )
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    # In one piece, also without a buffer: other ranks and mpirun may write at the same time.
    print(" ".join((line + notes).split()) + "\n", end="", file=sys.stderr, flush=True)
    return error.status if isinstance(error, EinmpiError) else 1
