"""The output of mpirun and its ranks, and why a run under mpirun failed, in one line."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from typing import NamedTuple

from einmpi.errors import InputError, Stopped
from einmpi.process.signals import ERROR_PREFIX, REASONS, RankNote

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


# ---- failures ------------------------------------------------------------------------------------


_HINTS: dict[int, str] = {
    signal.SIGKILL: "; perhaps there was not enough memory",
    signal.SIGBUS: "; perhaps /dev/shm is full",
}
# The last line of a rank that was ended by a signal.
_ENDED_BY_SIGNAL = re.compile(rf"{ERROR_PREFIX} rank \d+: ({'|'.join(REASONS.values())})( |$)")
# How Open MPI names the first rank to end: by its exit code or, in the first pattern, by a signal.
_OPEN_MPI_SIGNAL = r"rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)"
_OPEN_MPI_STATUS = (
    r"Process name: \[\S*,(\d+)\] Exit code: (\d+)",
    r"MPI_ABORT was invoked on rank (\d+) in .*? Errorcode: (\d+)",
)
_HYDRA_CODES = r"Exit codes: \[[^]]*\] ([\d,]+)(?! \[)"
_INTEL_CODE = r"RANK (\d+) PID \d+ RUNNING AT \S+ = (KILLED|EXIT)[A-Z ]*: (\d+)"
# The statuses of einmpi that mean something to scripts. All other failures are status 1.
_MEANINGFUL_STATUSES = (InputError.status, Stopped.status)
_MOST_LAUNCHER_TEXT = 300  # characters


class Failure(NamedTuple):
    """A line for the user, empty if a rank has explained itself, and the exit status."""

    line: str
    status: int


class _FirstEnd(NamedTuple):
    """How the first rank ended. `code` is negative for a signal; `rank` is None if unknown."""

    rank: int | None
    code: int


def explain_failure(
    returncode: int,
    out: OutputFilter,
    err: OutputFilter,
    end_order: Sequence[int],
    notes: Sequence[RankNote],
) -> Failure:
    """Explain why mpirun ended with this return code."""
    launcher_text = " ".join([*out.launcher_lines, *err.launcher_lines]).replace("--", "")
    launcher_text = " ".join(launcher_text.split())
    named = _first_end_by_open_mpi(launcher_text)
    first = named or _first_end_by_hydra(launcher_text, end_order, len(notes))
    if first is None:
        first = _FirstEnd(None, returncode)
    rank, code = first
    status = code if code in _MEANINGFUL_STATUSES else 1

    last_lines = [*err.errors, *(note.text for note in notes if note.text.startswith(ERROR_PREFIX))]
    if named is not None:
        # Open MPI ends the other ranks with SIGTERM, and they say so.
        own_prefix = f"{ERROR_PREFIX} rank {rank}: "
        kept_lines = []
        for line in last_lines:
            is_own = line.startswith(own_prefix)
            if is_own or not _ENDED_BY_SIGNAL.match(line):
                kept_lines.append(line)
        last_lines = kept_lines
    # A rank that says what went wrong comes before one that was only told to end.
    last_lines.sort(key=lambda line: _ENDED_BY_SIGNAL.match(line) is not None)
    if last_lines:
        return Failure(last_lines[0], status)

    where = ""
    if rank is not None and notes[rank].text:
        where = f" in {notes[rank].text}"
    if returncode < 0:
        return Failure(f"{ERROR_PREFIX} mpirun was killed by {_signal_name(-returncode)}", status)
    if code < 0:
        who = "an unidentified rank" if rank is None else f"rank {rank}"
        hint = _HINTS.get(-code, "")
        killed = f"{who} was killed by {_signal_name(-code)}{where}{hint}"
        return Failure(f"{ERROR_PREFIX} {killed}", status)
    if err.has_passed:
        return Failure("", status)
    if rank is not None:
        line = (
            f"{ERROR_PREFIX} rank {rank} exited with status {code}{where} without an error message"
        )
        return Failure(line, status)
    line = f"{ERROR_PREFIX} mpirun exited with status {returncode}"
    if launcher_text:
        line += f": {launcher_text[:_MOST_LAUNCHER_TEXT]}"
    return Failure(line, 1)


def _first_end_by_open_mpi(text: str) -> _FirstEnd | None:
    found = re.search(_OPEN_MPI_SIGNAL, text)
    if found is not None:
        return _FirstEnd(int(found[1]), -int(found[2]))
    for pattern in _OPEN_MPI_STATUS:
        found = re.search(pattern, text)
        if found is not None:
            return _FirstEnd(int(found[1]), int(found[2]))
    return None


def _first_end_by_hydra(text: str, end_order: Sequence[int], ranks: int) -> _FirstEnd | None:
    """Guess the first rank to end: Hydra says how some ranks ended, or how it ended them."""
    codes = _exit_codes(text, ranks)
    failed = [rank for rank, code in codes.items() if code]
    # Hydra kills the other ranks, so a rank that ended otherwise was first.
    not_killed = [rank for rank in failed if codes[rank] != -signal.SIGKILL]
    candidates = not_killed or failed
    for rank in end_order:
        if rank in candidates:
            return _FirstEnd(rank, codes[rank])
    if len(candidates) == 1:
        return _FirstEnd(candidates[0], codes[candidates[0]])
    if candidates:
        return _FirstEnd(None, codes[candidates[0]])
    found = re.search(r"\(signal (\d+)\)", text)
    if found is not None:
        return _FirstEnd(None, -int(found[1]))
    return None


def _exit_codes(text: str, ranks: int) -> dict[int, int]:
    """Return the exit codes of ranks by what MPICH's or Intel's Hydra says."""
    codes: dict[int, int] = {}
    found = re.search(_HYDRA_CODES, text)
    if found is not None:
        statuses = found[1].split(",")
        if len(statuses) == ranks:
            for rank, status in enumerate(statuses):
                codes[rank] = os.waitstatus_to_exitcode(int(status))
    for found in re.finditer(_INTEL_CODE, text):
        rank = int(found[1])
        code = int(found[3])
        codes[rank] = -code if found[2] == "KILLED" else code
    return codes


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
