"""Whether somebody looks at what this process writes: at its own terminal, or at that of the launcher."""

from __future__ import annotations

import os
import sys
from typing import TextIO

VARIABLE = "EINMPI_TERMINALS"  # the launcher's columns of standard output and of standard error, 0 where it has none
CLEAR = "\r\x1b[2K"  # to the start of the line, and empty it


def columns(stream: TextIO) -> int:
    """How wide the terminal behind a stream is; 0 where there is none."""
    try:
        descriptor = stream.fileno()
        if stream.isatty():
            return 0 if os.environ.get("TERM") == "dumb" else os.get_terminal_size(descriptor).columns or 80
    except (OSError, ValueError):  # no file, or closed
        return 0
    told = os.environ.get(VARIABLE, "").split()
    return int(told[descriptor - 1]) if descriptor in (1, 2) and len(told) == 2 else 0


def clearing(stream: TextIO) -> str:
    """What takes away a bar that may stand there, before a line is written; nothing where there is no terminal."""
    return CLEAR if columns(stream) else ""


def for_ranks() -> dict[str, str]:
    """What a launcher tells its ranks, who write to pipes."""
    return {VARIABLE: f"{columns(sys.stdout)} {columns(sys.stderr)}"}
