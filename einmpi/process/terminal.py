"""Whether anyone watches the output of this process: on its own terminal or on the launcher's."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple, TextIO

from einmpi.errors import on_one_line
from einmpi.process.variables import TERMINALS_VARIABLE

# What a launcher tells its ranks about its terminal, see `_LauncherTerminal`.
CLEAR = "\r\x1b[2K"  # return to the start of the line and clear it
# Open MPI's mpirun gives its ranks terminals even if it has none itself.
_OPEN_MPI_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK")
_DEFAULT_COLUMNS = 80


class _LauncherTerminal(NamedTuple):
    """The terminal of a launcher. The columns of a stream are 0 if it is not a terminal."""

    machine: str
    stdout_columns: int
    stderr_columns: int
    stderr_path: str

    def __str__(self) -> str:
        return " ".join(map(str, self))


def _launcher_terminal() -> _LauncherTerminal | None:
    """Return what the launcher of this rank says, or None without one."""
    fields = os.environ.get(TERMINALS_VARIABLE, "").split(" ", 3)
    if len(fields) != 4:
        return None
    machine, stdout_columns, stderr_columns, path = fields
    return _LauncherTerminal(machine, int(stdout_columns), int(stderr_columns), path)


def open_closed_streams() -> None:
    """Connect standard streams that were closed, as by `>&-` in a shell, to /dev/null.

    Otherwise the next file that is opened takes the number of the stream, and everything that
    libraries print goes into that file.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it takes the lowest number, which is this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def columns(stream: TextIO) -> int:
    """Return the width of the terminal behind a stream, 0 if there is none."""
    try:
        descriptor = stream.fileno()
        is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        launcher = _launcher_terminal()
        if launcher is not None:
            by_descriptor = {1: launcher.stdout_columns, 2: launcher.stderr_columns}
            return by_descriptor.get(descriptor, 0)
        is_open_mpi = any(name in os.environ for name in _OPEN_MPI_VARIABLES)
        if is_terminal and not is_open_mpi:
            return os.get_terminal_size(descriptor).columns or _DEFAULT_COLUMNS
    except (OSError, ValueError):  # not a file, or closed
        pass
    return 0


def screen() -> tuple[TextIO, int]:
    """Return a stream for a progress bar and its width; the width is 0 if no bar can be shown.

    A rank writes to its launcher's terminal directly: mpirun may hold back incomplete lines.
    """
    width = columns(sys.stderr)
    launcher = _launcher_terminal()
    if launcher is None or not launcher.stderr_path:
        return sys.stderr, width
    try:
        if width and launcher.machine == os.uname().nodename:
            # O_NOCTTY: the terminal must not become the one that sends signals to this process.
            descriptor = os.open(launcher.stderr_path, os.O_WRONLY | os.O_NOCTTY)
            return open(descriptor, "w", encoding="utf-8", errors="replace"), width
    except OSError:
        pass
    return sys.stderr, 0


def clear_line(stream: TextIO) -> str:
    """Return what removes a progress bar before a line is written; empty without a terminal."""
    return CLEAR if columns(stream) else ""


def print_notice(text: str) -> None:
    """Print one whole line to standard error, in place of a progress bar."""
    if sys.stderr is None:  # it was closed when the process started
        return
    if sys.stdout is not None:
        sys.stdout.flush()  # keep the order if both streams go to one file
    line = on_one_line(text)
    print(f"{clear_line(sys.stderr)}{line}\n", end="", file=sys.stderr, flush=True)


def terminal_environment() -> dict[str, str]:
    """Return the variable by which a launcher describes its terminal to its ranks."""
    stderr_columns = columns(sys.stderr)
    path = ""
    if stderr_columns:
        try:
            path = os.ttyname(sys.stderr.fileno())
        except OSError:
            stderr_columns = 0
    machine = os.uname().nodename
    terminal = _LauncherTerminal(machine, columns(sys.stdout), stderr_columns, path)
    return {TERMINALS_VARIABLE: str(terminal)}
