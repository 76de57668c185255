"""Signals to a rank: SIGTERM and SIGINT end all ranks; with checkpoints, SIGUSR1 and the first
SIGTERM ask the run to stop in good order. The end of the launcher counts as a signal too."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import mmap
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

from einmpi.errors import EinmpiError, Stopped, on_one_line
from einmpi.process.environment import NOTES_VARIABLE, is_debugging, is_launched
from einmpi.process.names import NAMES, is_claimed, leave_word

# ---- notes ---------------------------------------------------------------------------------------
#
# What each rank is doing now, in a file that a launcher on the same machine provides and reads.
#
# The file has one record per rank: the process id in 8 bytes, then a text. A socket next to it
# tells the launcher which ranks are alive, and the ranks whether the launcher is.


# Machines may share a folder but never a socket, so the folder is named after the machine. Both
# names are short because the path of a socket must be.
FOLDER_PREFIX = f"einmpi-{zlib.crc32(os.uname().nodename.encode()):08x}-"
SOCKET_SUFFIX = ".s"
RECORD_BYTES = 256
_PID_BYTES = 8


class RankNote(NamedTuple):
    """The record of one rank; (0, "") if the rank has not written anything."""

    pid: int
    text: str


@dataclass
class _State:
    """What this process is doing, and how it has to end."""

    activity: str = ""
    # Called before this rank ends all ranks.
    callbacks: list[Callable[[], None]] = field(default_factory=list)
    aborting_thread: threading.Thread | None = None  # if the process is about to end
    next_sigterm_is_request: bool = False  # to stop, which the main thread handles


_state = _State()


def activity_writer(rank: int) -> Callable[[str], None]:
    """Return a function that records what this rank is doing, for a launcher if there is one.

    The function is called for every step of a run: it writes to memory and makes no system call.
    """
    memory = _map_notes(rank)
    start = rank * RECORD_BYTES
    text_start = start + _PID_BYTES
    most_bytes = RECORD_BYTES - _PID_BYTES - 1

    def write(text: str) -> None:
        _state.activity = text
        if memory is not None:
            data = text.encode(errors="replace")[:most_bytes] + b"\0"
            memory[text_start : text_start + len(data)] = data

    if memory is not None:
        memory[start:text_start] = os.getpid().to_bytes(_PID_BYTES, "little")
    return write


def current_activity() -> str:
    """Return what this rank recorded last."""
    return _state.activity


def read_notes(path: str | os.PathLike[str]) -> list[RankNote]:
    """Return the records of all ranks."""
    with open(path, "rb") as file:
        data = file.read()
    notes = []
    for start in range(0, len(data), RECORD_BYTES):
        record = data[start : start + RECORD_BYTES]
        pid = int.from_bytes(record[:_PID_BYTES], "little")
        text = record[_PID_BYTES:].split(b"\0")[0].decode(errors="ignore")
        notes.append(RankNote(pid, text))
    return notes


def connect_to_launcher(rank: int) -> int | None:
    """Tell a launcher on this machine that this rank is alive.

    Return a descriptor that reaches its end when the launcher does, or None without a launcher.
    """
    path = os.environ.get(NOTES_VARIABLE, "")
    if FOLDER_PREFIX not in path:
        return None
    with socket.socket(socket.AF_UNIX) as link, contextlib.suppress(OSError):
        # If the launcher is gone already, the descriptor is at its end from the beginning.
        with contextlib.suppress(ConnectionError):
            link.connect(path + SOCKET_SUFFIX)
            link.sendall(rank.to_bytes(4, "little"))
        # When a process ends, Linux closes the highest descriptor first. So the launcher learns of
        # it before mpirun does, which kills the other ranks and does not always say who was first.
        most_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        high = max(64, min(most_descriptors, 1024) - 24)
        return fcntl.fcntl(link, fcntl.F_DUPFD_CLOEXEC, high)
    return None


def _map_notes(rank: int) -> mmap.mmap | None:
    try:
        with open(os.environ.get(NOTES_VARIABLE, ""), "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError):  # no launcher, or one on another machine
        return None
    if len(memory) < (rank + 1) * RECORD_BYTES:
        return None
    return memory


# ---- abort ---------------------------------------------------------------------------------------
#
# The end of a run that fails: clean up, print one line, end all ranks, and never hang.


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


@contextlib.contextmanager
def on_abort(callback: Callable[[], None]) -> Iterator[None]:
    """Register a function to be called if this rank ends all ranks inside the `with` block."""
    _state.callbacks.append(callback)
    try:
        yield
    finally:
        _state.callbacks.remove(callback)


def clean_up() -> None:
    """Call the functions that `on_abort` has registered: this thread is about to end the process.

    What the functions undo may make other threads fail; these call `wait_if_aborting`.
    """
    _state.aborting_thread = threading.current_thread()
    for callback in list(_state.callbacks):
        with contextlib.suppress(Exception):
            callback()


def wait_if_aborting() -> None:
    """Wait for the end if another thread of this process is ending all ranks.

    What the run has done or found wrong since then may be a consequence: that thread says why.
    """
    while _state.aborting_thread not in (None, threading.current_thread()):
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
    _state.aborting_thread = None


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


REASONS = {signal.SIGTERM: "terminated by SIGTERM", signal.SIGINT: "interrupted"}
# Open MPI terminates all ranks when one has failed, and kills them a second later. The failed rank
# has printed its line by then, so the others stay silent this long: seconds.
_OPEN_MPI_SILENCE = 2.0


class SignalWatch:
    """Ends all ranks at SIGTERM and SIGINT, and when the launcher is gone, until `stop` is called.

    The main thread may be deep inside MPI or BLAS, where Python's signal handlers do not run. But
    Python writes the number of a signal to a pipe at once, and a thread reads that pipe. Create and
    stop it in the main thread.
    """

    handled: tuple[signal.Signals, ...] = tuple(REASONS)

    def __init__(self, rank: int, abort: Callable[[int], object]) -> None:
        self._rank = rank
        self._abort = abort
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._launcher = connect_to_launcher(rank)
        self._previous_handlers: dict[signal.Signals, Any] = {}
        for number in self.handled:
            # An ignored signal stays ignored, as for a job in the background.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous_handlers[number] = signal.signal(number, _only_wake_up)
        self._previous_pipe = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._wait, daemon=True, name="signals")
        self._thread.start()

    def stop(self) -> None:
        """Restore the previous signal handlers and release everything."""
        signal.set_wakeup_fd(self._previous_pipe)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        os.close(self._writer)  # the thread reads the end of the pipe and returns
        self._thread.join()
        os.close(self._reader)
        if self._launcher is not None:
            os.close(self._launcher)

    def _wait(self) -> None:
        """Wait for a signal, for the end of the launcher, or for `stop`."""
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        if self._launcher is not None:
            poll.register(self._launcher, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in poll.poll()]
            if self._reader not in ready:
                self._end("the launching process is gone", 1)
                return
            numbers = os.read(self._reader, 1024)
            if not numbers:
                return
            if _state.next_sigterm_is_request and signal.SIGTERM in numbers:
                _state.next_sigterm_is_request = False
                numbers = numbers.replace(bytes([signal.SIGTERM]), b"", 1)
            for number in self.handled:
                if number in numbers:
                    self._end(REASONS[number], 128 + number)
                    return

    def _end(self, reason: str, status: int) -> None:
        activity = current_activity()
        line = f"{reason} in {activity}" if activity else reason
        delay = 0.0
        if "PMIX_RANK" in os.environ and self._launcher is None:
            # Our own launcher knows which rank was the first to fail; Open MPI's does not say.
            delay = _OPEN_MPI_SILENCE
        abort_all_ranks(self._rank, line, status, self._abort, delay)


def _only_wake_up(number: int, frame: FrameType | None) -> None:
    """Do nothing: with a handler, Python writes the signal to the wake-up pipe."""


@contextlib.contextmanager
def clean_up_at_sigterm() -> Iterator[None]:
    """Remove temporary files before SIGTERM ends a process that has no other ranks.

    Nothing is done outside the main thread, or if the process handles SIGTERM itself.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    watch = _SingleProcessWatch()
    try:
        yield
    finally:
        wait_if_aborting()
        watch.stop()


class _SingleProcessWatch(SignalWatch):
    """Cleans up at SIGTERM, which then ends the process as it does without this."""

    handled = (signal.SIGTERM,)

    def __init__(self) -> None:
        super().__init__(0, os._exit)

    def _end(self, reason: str, status: int) -> None:
        clean_up()
        # Python changes handlers only in its main thread, which may be deep inside BLAS.
        ctypes.CDLL(None).signal(int(signal.SIGTERM), int(signal.SIG_DFL))
        os.kill(os.getpid(), signal.SIGTERM)


def hold_stop_requests() -> None:
    """Keep SIGUSR1 pending until this rank knows what it means.

    With checkpoints it asks to stop. Without them it ends a rank under Open MPI, and MPICH has a
    handler of its own that does nothing.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


def deliver_stop_requests() -> None:
    """Deliver a SIGUSR1 that was held, and all later ones."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


@contextlib.contextmanager
def collect_stop_requests() -> Iterator[list[str]]:
    """Add the names of SIGUSR1 and of the first SIGTERM to a list, instead of ending this rank.

    A second SIGTERM does what the first does without this. Use it in the main thread.
    """
    requests: list[str] = []
    previous: dict[signal.Signals, Any] = {}
    for number in (signal.SIGTERM, signal.SIGUSR1):
        handler = signal.getsignal(number)
        if handler is not signal.SIG_IGN:
            previous[number] = handler

    def add_request(received: int, frame: FrameType | None) -> None:
        requests.append(signal.Signals(received).name)
        if received == signal.SIGTERM:
            signal.signal(signal.SIGTERM, previous[signal.SIGTERM] or signal.SIG_DFL)

    _state.next_sigterm_is_request = True
    for number in previous:
        signal.signal(number, add_request)
    deliver_stop_requests()
    afterwards = dict(previous)
    try:
        yield requests
        if is_launched() and signal.SIGUSR1 in previous:
            # A late request must not end a rank that has finished its work.
            afterwards[signal.SIGUSR1] = signal.SIG_IGN
    except Stopped:
        # The signal that stopped another rank may reach this one only now.
        afterwards = dict.fromkeys(previous, signal.SIG_IGN)
        raise
    finally:
        _state.next_sigterm_is_request = False
        for number, handler in afterwards.items():
            signal.signal(number, handler or signal.SIG_DFL)
