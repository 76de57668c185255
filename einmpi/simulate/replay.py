"""Replay traces with SimGrid's `smpirun`, which is a program of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from einmpi.errors import EinmpiError, InputError, printable
from einmpi.process.abort import on_abort

# Small messages are not sent ahead of their receive: in a schedule, the receives come first, so the
# times are the same, and SimGrid is five times as fast.
_OPTIONS = (
    "--cfg=smpi/send-is-detached-thresh:0",
    "--cfg=smpi/host-speed:1f",
    "--cfg=contexts/stack-size:64",
    "--cfg=surf/precision:1e-12",
    "--log=root.thres:warning",
    "--log=smpi_replay.fmt:%.12r%e%m%n",
)
_SECONDS = re.compile(r"([0-9.e+-]+) Simulation time ")
_ACTION = re.compile(r"([0-9.e+-]+) ([0-9]+) [a-z]+ ")


# What SimGrid writes before its words: a host and a time, a place in its own source, a category.
_PLACE_IN_SIMGRID = re.compile(r"\[[^]]*\] (\./src/\S+ )?\[[^]]*\] (Uncaught exception \S+ )?")


class ReplayError(EinmpiError):
    """SimGrid could not replay traces."""


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
    folder: Path, ranks: int, on_action: Callable[[int, float], None] | None = None
) -> float:
    """Return the simulated seconds of the traces in a folder.

    `on_action` is called with the rank and the time when an action of a trace is done; of each rank
    in order, but for the first and the last action, which take no time.
    """
    command = [
        find_smpirun(),
        *("-np", str(ranks)),
        *("-platform", "platform.xml", "-hostfile", "hosts", "-replay", "traces"),
        *_OPTIONS,
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
        raise ReplayError(f"smpirun: {_reason(other_lines)}")
    return seconds


@contextmanager
def _running(command: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a program, and end it with all that it has started if this process is interrupted.

    smpirun is a script: to kill it alone would leave SimGrid running.
    """
    with subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:

        def kill() -> None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        with on_abort(kill):
            try:
                yield process
            except BaseException:
                kill()
                raise


def _reason(output: Iterable[str]) -> str:
    """Return the line of SimGrid's output that says why it failed."""
    lines = [line for line in output if line]
    for line in lines:
        if "CRITICAL" in line or "rror" in line:
            return printable(_PLACE_IN_SIMGRID.sub("", line)[:300])
    return printable(lines[-1][:300]) if lines else "it failed without a word"
