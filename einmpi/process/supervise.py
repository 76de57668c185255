"""What a rank is doing, and its last words: when a signal ends it, when it fails, when its launcher is gone.

The launcher's file of notes has one record for each rank: the process id in 8 bytes, then what it is doing."""

from __future__ import annotations

import contextlib
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
from typing import Any

from einmpi.errors import EinmpiError, Stopped
from einmpi.process.environment import launched, take, taken

VARIABLE = "EINMPI_NOTES"  # in the environment of the ranks: the path of the file
# In that path, for machines may share a folder, but they share no socket; and after it: where the launcher hears who
# lives. Both are short, because the path of a socket has to be.
FOLDER, SOCKET = f"einmpi-{zlib.crc32(os.uname().nodename.encode()):08x}-", ".s"
RECORD = 256
ERROR = "einmpi: error:"  # last words begin like this
_PID = 8
# When all ranks end for the same reason, rank 0 speaks and aborts before those of other machines would.
_FIRST, _TURN, _LAST_TURN = 0.3, 0.02, 40
# Open MPI terminates all ranks when one has failed, and kills them a second later. That one has spoken already.
_HUSH = 2.0
_PASS_ON = 0.2  # seconds for the launcher to pass on what was said, before all is torn down
_LOOK = 0.05  # often enough to see a rank that speaks and passes on
_GRACE = 2.0  # seconds for MPI to abort
# A rank without memory has none for a thread that watches over its end either. It ends all the same.
_NO_ROOM = contextlib.suppress(RuntimeError, MemoryError)
_LAST_WORDS = "last-words"  # the name that the speaker of a machine takes
SIGNALS = {signal.SIGTERM: "terminated by SIGTERM", signal.SIGINT: "interrupted"}

Notes = list[tuple[int, str]]  # process id and text of each rank

_last = [""]
_patience = [False]  # whether the next SIGTERM only asks
_deeds: list[Callable[[], None]] = []


# ---- notes ----------------------------------------------------------------------------------------------------------


def note_to(rank: int) -> Callable[[str], None]:
    """A function that notes what this rank does now, for the launcher if there is one. It makes no system calls."""
    memory = _map(rank)
    if memory is None:
        return _remember
    start = rank * RECORD
    memory[start : start + _PID] = os.getpid().to_bytes(_PID, "little")
    start, room = start + _PID, RECORD - _PID - 1

    def note(text: str) -> None:
        _last[0] = text
        data = text.encode(errors="replace")[:room] + b"\0"
        memory[start : start + len(data)] = data

    return note


def current() -> str:
    """What this rank noted last."""
    return _last[0]


def read_notes(path: str | os.PathLike[str]) -> Notes:
    """Process id and text of each rank; 0 and nothing for one that has not noted anything."""
    with open(path, "rb") as file:
        data = file.read()
    records = [data[start : start + RECORD] for start in range(0, len(data), RECORD)]
    return [
        (
            int.from_bytes(record[:_PID], "little"),
            record[_PID:].split(b"\0")[0].decode(errors="ignore"),
        )
        for record in records
    ]


def _remember(text: str) -> None:
    _last[0] = text


def _map(rank: int) -> mmap.mmap | None:
    try:
        with open(os.environ.get(VARIABLE, ""), "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError):  # no launcher, or one on another machine
        return None
    return memory if len(memory) >= (rank + 1) * RECORD else None


# ---- last words -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def before_the_end(deed: Callable[[], None]) -> Iterator[None]:
    """While this lasts, a rank that is about to end all ranks does this first."""
    _deeds.append(deed)
    try:
        yield
    finally:
        _deeds.remove(deed)


def _tidy_up() -> None:
    for deed in _deeds:
        with contextlib.suppress(Exception):
            deed()


def fail(rank: int, error: BaseException, abort: Callable[[int], object]) -> None:
    """End all ranks because of an error on this one."""
    if os.environ.get("EINMPI_DEBUG") == "1":
        traceback.print_exception(error)
    what = "not enough memory" if isinstance(error, MemoryError) else type(error).__name__
    message = str(error) if isinstance(error, EinmpiError) else f"{what}: {error}"
    with open(os.devnull, "w") as nowhere:
        # mpi4py aborts without giving Python's lock away. If it hangs, only faulthandler's thread, which needs no lock,
        # can still end this process.
        with _NO_ROOM:
            faulthandler.dump_traceback_later(
                _turn(rank) + _PASS_ON + _GRACE, exit=True, file=nowhere
            )
        try:
            _tidy_up()
            last_words(rank, ": ".join(part for part in (_last[0], message) if part))
            abort(1)
        finally:
            faulthandler.cancel_dump_traceback_later()


def watch_signals(rank: int, abort: Callable[[int], object]) -> Callable[[], None]:
    """End all ranks at SIGTERM and SIGINT, and when the launcher is gone; a function that undoes this.

    The main thread may be deep inside MPI or BLAS, where Python's handlers do not run. But the signal itself writes
    to a pipe at once, and a thread reads it. Call this in the main thread.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    launcher = _connect(rank)
    # A signal that is ignored, as for a job in the background, stays so.
    previous = {
        number: signal.signal(number, lambda *_: None)
        for number in SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    previous_pipe = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    nowhere = open(os.devnull, "w")  # noqa: SIM115
    timers: list[threading.Timer] = []

    def end(reason: str, status: int) -> None:
        # The last resort comes first: speaking and aborting may both block; as for faulthandler, see `fail`.
        hush = (
            _HUSH if "PMIX_RANK" in os.environ and launcher is None else 0.0
        )  # our launcher knows who was the first
        limit = hush + _turn(rank) + _PASS_ON + _GRACE
        with _NO_ROOM:
            timers.append(threading.Timer(limit, os._exit, (status,)))
            timers[-1].daemon = True
            timers[-1].start()
        with _NO_ROOM:
            faulthandler.dump_traceback_later(limit + 0.5, exit=True, file=nowhere)
        _tidy_up()
        time.sleep(hush)
        last_words(rank, f"{reason} in {_last[0]}" if _last[0] else reason)
        abort(status)

    thread = threading.Thread(
        target=_watch, args=(reader, launcher, end), daemon=True, name="signals"
    )
    thread.start()

    def undo() -> None:
        signal.set_wakeup_fd(previous_pipe)
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        os.close(writer)  # the thread reads the end of the pipe and returns
        thread.join()
        for descriptor in (reader, launcher):
            if descriptor is not None:
                os.close(descriptor)
        for timer in timers:
            timer.cancel()
            faulthandler.cancel_dump_traceback_later()
        nowhere.close()

    return undo


def hold_requests() -> None:
    """SIGUSR1 waits until this rank knows what it means. With checkpoints it asks to stop. Without them it ends a rank
    under Open MPI; MPICH has a handler of its own, and nothing happens."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


def hear_requests() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


@contextlib.contextmanager
def asked_to_stop() -> Iterator[list[str]]:
    """Inside, SIGUSR1 and the first SIGTERM end nothing: their names are added to the list. A second SIGTERM does what
    the first does without this. Use it in the main thread."""
    asked: list[str] = []
    before: dict[int, Any] = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGUSR1)
        if signal.getsignal(number) is not signal.SIG_IGN
    }

    def note(number: int, _: Any) -> None:
        asked.append(signal.Signals(number).name)
        if number == signal.SIGTERM:
            signal.signal(number, before[number] or signal.SIG_DFL)

    _patience[0] = True
    for number in before:
        signal.signal(number, note)
    hear_requests()
    left = before
    try:
        yield asked
        if (
            launched() and signal.SIGUSR1 in before
        ):  # who asks now must not end a rank that has done its work
            left = {**before, signal.SIGUSR1: signal.SIG_IGN}
    except Stopped:
        left = dict.fromkeys(
            before, signal.SIG_IGN
        )  # what stopped another rank may come to this one only now
        raise
    finally:
        _patience[0] = False
        for number, handler in left.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _connect(rank: int) -> int | None:
    """Tell a launcher on this machine that this rank lives; a descriptor that ends when the launcher does."""
    path = os.environ.get(VARIABLE, "")
    if FOLDER not in path:
        return None
    with socket.socket(socket.AF_UNIX) as link, contextlib.suppress(OSError):
        with contextlib.suppress(
            ConnectionError
        ):  # the launcher is gone already, and so the descriptor has ended
            link.connect(path + SOCKET)
            link.sendall(rank.to_bytes(4, "little"))
        # When a process ends, Linux closes the highest descriptor first. So the launcher hears of it before mpirun
        # does, which kills the other ranks at once and does not always tell who was the first.
        high = max(64, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1024) - 24)
        return fcntl.fcntl(link, fcntl.F_DUPFD_CLOEXEC, high)
    return None


def _watch(reader: int, launcher: int | None, end: Callable[[str, int], None]) -> None:
    waiting = select.poll()
    for source in (reader, launcher):
        if source is not None:
            waiting.register(source, select.POLLIN)
    while True:
        if reader not in dict(waiting.poll()):
            return end("the launching process is gone", 1)
        numbers = os.read(reader, 1024)
        if not numbers:
            return None
        if _patience[0] and signal.SIGTERM in numbers:
            _patience[0] = False
            numbers = numbers.replace(bytes([signal.SIGTERM]), b"", 1)
        for number, reason in SIGNALS.items():
            if number in numbers:
                return end(reason, 128 + number)


def _turn(rank: int) -> float:
    return _FIRST + min(rank, _LAST_TURN) * _TURN if rank else 0.0


def _is_my_turn(rank: int) -> bool:
    """Wait for this rank's turn. Slurm ends all ranks at once, when one was killed or the time is up; one of a machine
    says so. It has the name only while it lives, so the others look for it on and on."""
    deadline = time.monotonic() + _turn(rank)
    while time.monotonic() < deadline:
        if launched() and taken(_LAST_WORDS):
            return False
        time.sleep(_LOOK)
    return not launched() or take(_LAST_WORDS)


def last_words(rank: int, text: str) -> None:
    """One line, whole, on standard error; and in the notes, because launchers lose what is said last."""
    line = " ".join(f"{ERROR} rank {rank}: {text}".split())
    note_to(rank)(line)
    if _is_my_turn(rank):
        with contextlib.suppress(OSError):
            os.write(2, f"{line}\n".encode(errors="replace"))
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    time.sleep(_PASS_ON)
