"""Whether somebody looks at what this process writes: at its own terminal, or at that of the launcher."""

from __future__ import annotations

import os
import sys
from typing import TextIO

# What a launcher tells its ranks: its machine, the columns of its standard output and of its standard error, 0 where
# that is no terminal, and the file of the latter.
VARIABLE = "EINMPI_TERMINALS"
CLEAR = "\r\x1b[2K"  # to the start of the line, and empty it
_FOREIGN = (
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
)  # Open MPI's mpirun gives its ranks terminals, though itself has none


def columns(stream: TextIO) -> int:
    """How wide the terminal behind a stream is; 0 where there is none."""
    try:
        descriptor = stream.fileno()
        terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        told = os.environ.get(VARIABLE, "").split(" ", 3)
        if len(told) == 4:
            return int(told[descriptor]) if descriptor in (1, 2) else 0
        if terminal and not any(name in os.environ for name in _FOREIGN):
            return os.get_terminal_size(descriptor).columns or 80
    except (OSError, ValueError):  # no file, or closed
        pass
    return 0


def screen() -> tuple[TextIO, int]:
    """Where a bar can be shown, and its columns; standard error and 0 where it cannot.

    A rank writes to its launcher's terminal directly: mpirun may hold back what is no whole line.
    """
    width = columns(sys.stderr)
    machine, _, _, path = (os.environ.get(VARIABLE) or "   ").split(" ", 3)
    if not path:
        return sys.stderr, width
    try:
        if width and machine == os.uname().nodename:
            # The terminal stays the launcher's: it must not become the one that sends signals to this process.
            descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY)
            return open(descriptor, "w", encoding="utf-8", errors="replace"), width
    except OSError:
        pass
    return sys.stderr, 0


def clearing(stream: TextIO) -> str:
    """What takes away a bar that may stand there, before a line is written; nothing where there is no terminal."""
    return CLEAR if columns(stream) else ""


def for_ranks() -> dict[str, str]:
    """What a launcher adds to the environment of its ranks."""
    width, path = columns(sys.stderr), ""
    if width:
        try:
            path = os.ttyname(sys.stderr.fileno())
        except OSError:
            width = 0
    return {VARIABLE: f"{os.uname().nodename} {columns(sys.stdout)} {width} {path}"}
