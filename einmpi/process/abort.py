"""The end of a run that fails: clean up, print one line, end all ranks, and never hang."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

from einmpi.errors import EinmpiError, on_one_line
from einmpi.process.environment import is_launched
from einmpi.process.names import NAMES, is_claimed, leave_word
from einmpi.process.notes import activity_writer, current_activity
from einmpi.process.variables import is_debugging

ERROR_PREFIX = "einmpi: error:"  # the line of a failed rank begins with this
# When all ranks end for the same reason, rank 0 prints and aborts first. The others wait: the first
# of them this long, each further one a little longer, in seconds.
_FIRST_WAIT = 0.3
_WAIT_PER_RANK = 0.02
_MOST_WAITING_RANKS = 40
_LOOK_INTERVAL = 0.05  # seconds; often enough to see a rank that prints and ends
_FORWARDING_TIME = 0.2  # seconds for the launcher to pass on the line before all is torn down
_ABORT_TIME = 2.0  # seconds for MPI to abort
_SPEAKER = "last-words"  # the name that the rank which prints for its machine claims
# A process without memory cannot start a thread that ends it on time. It ends anyway.
_ignore_exhaustion = contextlib.suppress(RuntimeError, MemoryError)


class _AbortCallbacks:
    """The functions to call before this rank ends all ranks, and whether it is about to."""

    def __init__(self) -> None:
        self.registered: list[Callable[[], None]] = []
        self.aborting_thread: threading.Thread | None = None

    def call_all(self) -> None:
        for callback in list(self.registered):
            with contextlib.suppress(Exception):
                callback()


_callbacks = _AbortCallbacks()


@contextlib.contextmanager
def on_abort(callback: Callable[[], None]) -> Iterator[None]:
    """Register a function to be called if this rank ends all ranks inside the `with` block."""
    _callbacks.registered.append(callback)
    try:
        yield
    finally:
        _callbacks.registered.remove(callback)


def clean_up() -> None:
    """Call the functions that `on_abort` has registered: this thread is about to end the process.

    What the functions undo may make other threads fail; these call `wait_if_aborting`.
    """
    _callbacks.aborting_thread = threading.current_thread()
    _callbacks.call_all()


def wait_if_aborting() -> None:
    """Wait for the end if another thread of this process is ending all ranks.

    What the run has done or found wrong since then may be a consequence: that thread says why.
    """
    while _callbacks.aborting_thread not in (None, threading.current_thread()):
        time.sleep(_LOOK_INTERVAL)


class _ForcedExit:
    """A time limit after which this process ends, whatever it is doing.

    A thread ends it with the given status. mpi4py aborts without releasing Python's lock, so no
    thread runs if the abort hangs; then faulthandler, which needs no lock, ends it half a second
    later with status 1.
    """

    def __init__(self, seconds: float, status: int) -> None:
        self._devnull = open(os.devnull, "w")  # noqa: SIM115
        self._timer: threading.Timer | None = None
        with _ignore_exhaustion:
            faulthandler.dump_traceback_later(seconds + 0.5, exit=True, file=self._devnull)
        with _ignore_exhaustion:
            self._timer = threading.Timer(seconds, os._exit, (status,))
            self._timer.daemon = True
            self._timer.start()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()
        self._devnull.close()


def abort_on_error(rank: int, error: BaseException, abort: Callable[[int], object]) -> None:
    """End all ranks because of an error on this one."""
    if is_debugging():
        traceback.print_exception(error)
    if isinstance(error, EinmpiError):
        message = str(error)
    elif isinstance(error, MemoryError):
        message = f"not enough memory: {error}"
    else:
        message = f"{type(error).__name__}: {error}"
    activity = current_activity()
    abort_all_ranks(rank, f"{activity}: {message}" if activity else message, 1, abort)


def abort_all_ranks(
    rank: int, line: str, status: int, abort: Callable[[int], object], delay: float = 0.0
) -> None:
    """Clean up, wait for `delay` seconds, print the line and abort.

    Any of this may block, so a time limit on all of it starts first.
    """
    limit = delay + _wait_before_printing(rank) + _FORWARDING_TIME + _ABORT_TIME
    forced_exit = _ForcedExit(limit, status)
    clean_up()
    time.sleep(delay)
    print_last_line(rank, line)
    abort(status)
    forced_exit.cancel()  # MPI's abort does not return, those of tests do
    _callbacks.aborting_thread = None


def print_last_line(rank: int, text: str) -> None:
    """Print one whole line to standard error, if no other rank of this machine does.

    It also goes into the launcher's notes, because launchers lose what is printed last.
    """
    line = on_one_line(f"{ERROR_PREFIX} rank {rank}: {text}")
    activity_writer(rank)(line)
    if _may_print(rank):
        with contextlib.suppress(OSError):
            os.write(2, f"{line}\n".encode(errors="replace"))
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    time.sleep(_FORWARDING_TIME)


def _wait_before_printing(rank: int) -> float:
    if rank == 0:
        return 0.0
    return _FIRST_WAIT + min(rank, _MOST_WAITING_RANKS) * _WAIT_PER_RANK


def _may_print(rank: int) -> bool:
    """Wait for this rank's turn; return whether it is the one that prints for its machine.

    Slurm ends all ranks at once when one was killed or the time is up. A rank owns the name only
    while it lives, and a busy machine may let it print and end before another one looks. So it
    also leaves word for the others.
    """
    if not is_launched():
        time.sleep(_wait_before_printing(rank))
        return True
    deadline = time.monotonic() + _wait_before_printing(rank)
    while time.monotonic() < deadline:
        if is_claimed(_SPEAKER) or NAMES.has_word():
            return False
        time.sleep(_LOOK_INTERVAL)
    # In this order: the last owner of the name left word before it released the name.
    if not NAMES.claim(_SPEAKER) or NAMES.has_word():
        return False
    leave_word()
    return True
