"""Signals to a rank: SIGTERM and SIGINT end all ranks; with checkpoints, SIGUSR1 and the first
SIGTERM ask the run to stop in good order. The end of the launcher counts as a signal too."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from einmpi.errors import Stopped
from einmpi.process.abort import abort_all_ranks, clean_up, wait_if_aborting
from einmpi.process.environment import is_launched
from einmpi.process.notes import connect_to_launcher, current_activity

REASONS = {signal.SIGTERM: "terminated by SIGTERM", signal.SIGINT: "interrupted"}
# Open MPI terminates all ranks when one has failed, and kills them a second later. The failed rank
# has printed its line by then, so the others stay silent this long: seconds.
_OPEN_MPI_SILENCE = 2.0


class _StopRequests:
    """Whether the next SIGTERM is a request to stop that the main thread handles."""

    def __init__(self) -> None:
        self.next_sigterm_is_request = False


_requests = _StopRequests()


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
            if _requests.next_sigterm_is_request and signal.SIGTERM in numbers:
                _requests.next_sigterm_is_request = False
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

    _requests.next_sigterm_is_request = True
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
        _requests.next_sigterm_is_request = False
        for number, handler in afterwards.items():
            signal.signal(number, handler or signal.SIG_DFL)
