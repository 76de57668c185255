"""Replay traces with SimGrid's `smpirun`, which is a program of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event

from einmpi.errors import EinmpiError, InputError, printable
from einmpi.process.abort import on_abort

# Small messages are not sent ahead of their receive: in a schedule, the receives come first, so the
# times are the same, and SimGrid is five times as fast.
_OPTIONS = (
    "--cfg=smpi/send-is-detached-thresh:0",
    "--cfg=smpi/host-speed:1f",
    "--cfg=contexts/stack-size:64",
    "--log=root.thres:warning",
    "--log=smpi_replay.fmt:%.12r%e%m%n",
)
# What happens within so many seconds counts as one event. SimGrid shares out the links anew at each
# event; where there are many messages, that would take most of the time.
_PRECISION = 1e-12
_MANY_MESSAGES = 200_000
_PRECISION_OF_MANY = 5e-9
_LONGEST_START = 10.0  # seconds until a program has begun, on a machine with much other load
_SECONDS = re.compile(r"([0-9.e+-]+) Simulation time ")
_ACTION = re.compile(r"([0-9.e+-]+) ([0-9]+) [a-z]+ ")
# What SimGrid, C++ and the loader of programs say where there is no memory.
_NO_MEMORY = re.compile(
    r"bad_alloc|failed to allocate|cannot allocate|out of memory|failed to map segment", re.I
)
# What SimGrid writes before its words: a host and a time, a place in its own source, a category.
_PLACE_IN_SIMGRID = re.compile(r"\[[^]]*\] (\./src/\S+ )?\[[^]]*\] (Uncaught exception \S+ )?")


class ReplayError(EinmpiError):
    """SimGrid could not replay traces."""


class ReplayEnded(ReplayError):
    """SimGrid was killed, or had no memory: what it read may be right."""


def find_smpirun() -> str:
    """Return SimGrid's program; refuse if it is not installed."""
    found = shutil.which("smpirun")
    if found is None:
        raise InputError(
            "einmpi simulate",
            "SimGrid's smpirun is not installed",
            "apt-get install libsimgrid-dev, or https://simgrid.org",
        )
    return found


def replay(
    folder: Path,
    ranks: int,
    messages: int,
    on_action: Callable[[int, float], None] | None = None,
) -> float:
    """Return the simulated seconds of the traces in a folder, which have so many messages.

    `on_action` is called with the rank and the time whenever an action of a trace is done, for each
    rank in the order of its trace. The first and the last action, which take no time, are left out.
    """
    precision = _PRECISION if messages < _MANY_MESSAGES else _PRECISION_OF_MANY
    command = [
        find_smpirun(),
        *("-np", str(ranks)),
        *("-platform", "platform.xml", "-hostfile", "hosts", "-replay", "traces"),
        *_OPTIONS,
        f"--cfg=surf/precision:{precision}",
        f"--log=smpi_replay.thres:{'info' if on_action is None else 'verbose'}",
    ]
    seconds = None
    other_lines: deque[str] = deque(maxlen=1000)
    with _running(command, folder) as process:
        assert process.stdout is not None
        for line in process.stdout:
            action = _ACTION.match(line)
            if action is not None and on_action is not None:
                on_action(int(action[2]), float(action[1]))
                continue
            end = _SECONDS.match(line)
            if end is not None:
                seconds = float(end[1])
            other_lines.append(line.strip())
    if process.returncode or seconds is None:
        raise _failure(process.returncode, [line for line in other_lines if line])
    return seconds


@contextmanager
def _running(command: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a program, and end it with all that it has started if this process is interrupted.

    smpirun is a script: to kill it alone would leave SimGrid running.
    """
    processes: list[subprocess.Popen[str]] = []
    has_begun = Event()

    def kill() -> None:
        # Another thread may call this while the program is being started.
        has_begun.wait(_LONGEST_START)
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    with on_abort(kill):
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            processes.append(process)
        finally:
            has_begun.set()
        with process:
            try:
                yield process
            except BaseException:
                kill()
                raise


def _failure(status: int, lines: Sequence[str]) -> ReplayError:
    """Return the error for a status of smpirun and the lines that it wrote."""
    # smpirun passes on how SimGrid ended as shells do, unless it was killed itself.
    number = -status if status < 0 else status - 128
    if number > 0 and number != signal.SIGABRT:  # SimGrid aborts when it finds something wrong
        return ReplayEnded(f"smpirun: SimGrid was ended by signal {number}{_meaning(number)}")
    for line in lines:
        if _NO_MEMORY.search(line):
            return ReplayEnded(f"smpirun: not enough memory: {_said(line)}")
    return ReplayError(f"smpirun: {_reason(lines)}")


def _meaning(number: int) -> str:
    if number == signal.SIGKILL:
        return ", SIGKILL; the system does this when memory runs out"
    try:
        return f", {signal.Signals(number).name}"
    except ValueError:
        return ""


def _reason(lines: Sequence[str]) -> str:
    """Return the line of SimGrid's output that says why it failed."""
    for line in lines:
        if "CRITICAL" in line or "rror" in line:
            return _said(line)
    return _said(lines[-1]) if lines else "it failed without a word"


def _said(line: str) -> str:
    """Return a line of SimGrid without the place where it is from."""
    return printable(_PLACE_IN_SIMGRID.sub("", line)[:300])
