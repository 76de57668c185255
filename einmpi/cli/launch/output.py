"""The output of mpirun and its ranks: the ranks' is passed on at once, the launcher's is kept."""

from __future__ import annotations

import os
import re
import time

from einmpi.process.abort import ERROR_PREFIX

# Hydra writes to standard output even for failures. Open MPI writes blocks between lines of dashes.
_HYDRA_RULE = b"=" * 83
_OPEN_MPI_RULE = b"-" * 74
_HYDRA_LINES = (
    _HYDRA_RULE + rb"$",
    rb"=   [A-Z]",
    rb"YOUR APPLICATION TERMINATED",
    rb"This typically refers to",
    rb"Please see the FAQ page",
    rb"\[mpiexec@",
)
_LAUNCHER_LINES = (
    *_HYDRA_LINES,
    _OPEN_MPI_RULE + rb"$",
    rb"Abort\(",
    rb"\[warn\] Epoll",
    rb"\[(?=[^\]]*[A-Za-z])[^\]\s]+[:@][^\]\s]+\] ",  # [host:pid] or [proxy:0@host]
)
# What a launcher writes to a descriptor.
_LAUNCHER_PATTERNS = {
    1: re.compile(b"|".join(_HYDRA_LINES)),
    2: re.compile(b"|".join(_LAUNCHER_LINES)),
}
# An incomplete line that begins like one of these waits for its end; any other is passed on.
_HYDRA_STARTS = (
    _HYDRA_RULE,
    b"=   ",
    b"YOUR APPLICATION",
    b"This typically",
    b"Please see",
    b"[mpiexec@",
    ERROR_PREFIX.encode(),
    b"\0",
)
_SPECIAL_STARTS = {
    1: _HYDRA_STARTS,
    2: (*_HYDRA_STARTS, b"[", _OPEN_MPI_RULE, b"Abort("),
}


class OutputFilter:
    """One output stream of mpirun.

    What ranks write is passed on to `target` at once. What the launcher writes, and the last lines
    of ranks, are kept for the end. With `passes_everything` they are passed on as well.
    """

    def __init__(self, target: int, passes_everything: bool) -> None:
        self.target = target
        self.passes_everything = passes_everything
        self.is_broken = False  # whether the reader of the target has gone
        self.has_ended = False
        self.is_muted = False
        self.has_passed = False  # whether a rank has written anything
        self.launcher_lines: list[str] = []
        self.errors: list[str] = []  # the last lines of ranks
        self._incomplete = b""
        self._held_blank_lines = b""
        self._previous = b""
        self._is_in_block = False
        self._is_line_begun = False

    def feed(self, data: bytes) -> None:
        """Take what has been read from the stream."""
        if self.passes_everything:
            self.write(data)
        *lines, rest = (self._incomplete + data).split(b"\n")
        for line in lines:
            self._take_line(line + b"\n")
        if rest and not self._is_in_block and not self._may_be_special(rest):
            self._pass_on(rest)
            self._is_line_begun = True
            rest = b""
        self._incomplete = rest

    def end(self) -> None:
        """Take the end of the stream."""
        self.has_ended = True
        if self._incomplete.strip(b"\0"):
            self._take_line(self._incomplete)
        if self._held_blank_lines:
            self._pass_on(b"")

    def write(self, data: bytes) -> None:
        """Write to the target."""
        while data and not self.is_broken:
            try:
                data = data[os.write(self.target, data) :]
            except BlockingIOError:  # another program left the terminal in this mode
                time.sleep(0.01)
            except BrokenPipeError:
                self.is_broken = True

    def _take_line(self, line: bytes) -> None:
        line = line.lstrip(b"\0")  # Open MPI ends its blocks with one
        text = line.decode(errors="replace").strip()
        was_begun = self._is_line_begun
        self._is_line_begun = False
        if text.startswith(ERROR_PREFIX):
            self.errors.append(text)
        elif self._is_in_block or _LAUNCHER_PATTERNS[self.target].match(line):
            self.launcher_lines.append(text)
            if line.startswith(_OPEN_MPI_RULE):
                self._is_in_block = not self._is_in_block
            if line.startswith(_HYDRA_RULE):
                self._held_blank_lines = self._held_blank_lines[:-1]
        elif not text and not was_begun:
            self._held_blank_lines += line  # Hydra's banner begins with a blank line
        elif line != self._previous or self.target == 1:  # all ranks may print the same warning
            self._pass_on(line)

    def _pass_on(self, data: bytes) -> None:
        if not self.passes_everything and not self.is_muted:
            self.write(self._held_blank_lines + data)
        self._held_blank_lines = b""
        self._previous = data
        self.has_passed = True

    def _may_be_special(self, incomplete: bytes) -> bool:
        """Return whether a line may become one of a launcher, or the last one of a rank.

        What goes on with a line of standard output does not: text appears token by token.
        """
        if self._is_line_begun and self.target == 1:
            return False
        for start in _SPECIAL_STARTS[self.target]:
            if start.startswith(incomplete) or incomplete.startswith(start):
                return True
        return False
