"""Why a run under mpirun failed, in one line: from the ranks' last lines and the launcher's."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from einmpi.cli.launch.output import OutputFilter
from einmpi.errors import InputError, Stopped
from einmpi.process.abort import ERROR_PREFIX
from einmpi.process.notes import RankNote
from einmpi.process.signals import REASONS

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
