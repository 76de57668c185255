"""What mpirun and its ranks write: passed on or kept. And what is to be read in it: why a run failed, in one line."""

from __future__ import annotations

import os
import re
import signal
import time

from einmpi.errors import InputError, Stopped
from einmpi.process.supervise import ERROR, SIGNALS, Notes

# Hydra writes to standard output, even for failures; blocks between lines of dashes are Open MPI's.
_HYDRA = rb"={83}$|=   [A-Z]|YOUR APPLICATION TERMINATED|This typically refers to|Please see the FAQ page|\[mpiexec@"
_RULE, _DASHES = b"=" * 83, b"-" * 74
_LAUNCHER = (
    _HYDRA
    + rb"|"
    + _DASHES
    + rb"$|Abort\(|\[warn\] Epoll|\[(?=[^\]]*[A-Za-z])[^\]\s]+[:@][^\]\s]+\] "
)
_STARTS = (
    _RULE,
    b"=   ",
    b"YOUR APPLICATION",
    b"This typically",
    b"Please see",
    b"[",
    _DASHES,
    b"Abort(",
    ERROR.encode(),
    b"\0",
)
# By descriptor: what a launcher writes there.
_WRITTEN = {1: _HYDRA, 2: _LAUNCHER}
_HINTS: dict[int, str] = {
    signal.SIGKILL: "; perhaps there was not enough memory",
    signal.SIGBUS: "; perhaps /dev/shm is full",
}
# What ranks say when a signal ends them. How Open MPI names the first rank to end; exit codes of signals are negative.
_SIGNALLED = re.compile(rf"{ERROR} rank \d+: ({'|'.join(SIGNALS.values())})( |$)")
_OPEN_MPI = {
    r"rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)": -1,
    r"Process name: \[\S*,(\d+)\] Exit code: (\d+)": 1,
    r"MPI_ABORT was invoked on rank (\d+) in .*? Errorcode: (\d+)": 1,
}
_PASSED_ON = (InputError.status, Stopped.status)


class Output:
    """Passes on at once what the ranks write. Keeps what the launcher writes, and the last words, for the end."""

    def __init__(self, target: int, everything: bool) -> None:
        self.target, self.everything = (
            target,
            everything,
        )  # `everything`: what the launcher writes is passed on too
        self.broken = self.ended = self.muted = self.passed = False
        self.kept: list[str] = []
        self.errors: list[str] = []
        self._launcher = re.compile(_WRITTEN[target])
        self._rest = self._blank = self._previous = b""
        self._block = self._begun = False

    def feed(self, data: bytes) -> None:
        if self.everything:
            self.write(data)
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line + b"\n")
        if (
            rest
            and not self._block
            and not any(start.startswith(rest) or rest.startswith(start) for start in _STARTS)
        ):
            self._pass(rest)
            self._begun, rest = True, b""
        self._rest = rest

    def end(self) -> None:
        self.ended = True
        if self._rest.strip(b"\0"):
            self._line(self._rest)
        if self._blank:
            self._pass(b"")

    def write(self, data: bytes) -> None:
        while data and not self.broken:
            try:
                data = data[os.write(self.target, data) :]
            except BlockingIOError:  # a terminal that another program has left so
                time.sleep(0.01)
            except BrokenPipeError:
                self.broken = True

    def _line(self, line: bytes) -> None:
        line = line.lstrip(b"\0")  # Open MPI's blocks end with one
        text, begun = line.decode(errors="replace").strip(), self._begun
        self._begun = False
        if text.startswith(ERROR):
            self.errors.append(text)
        elif self._block or self._launcher.match(line):
            self.kept.append(text)
            self._block ^= line.startswith(_DASHES)
            self._blank = self._blank[: -1 if line.startswith(_RULE) else None]
        elif not text and not begun:
            self._blank += line  # Hydra's banner has one before its first rule
        elif line != self._previous or self.target == 1:  # all ranks may complain about the same
            self._pass(line)

    def _pass(self, data: bytes) -> None:
        if not self.everything and not self.muted:
            self.write(self._blank + data)
        self._blank, self._previous, self.passed = b"", data, True


def reason(
    returned: int, out: Output, err: Output, order: list[int], notes: Notes
) -> tuple[str, int]:
    """One line, or none when a rank has explained itself, and the exit status."""
    text = " ".join(" ".join(out.kept + err.kept).replace("--", "").split())
    named = next(
        (
            (int(found[1]), sign * int(found[2]))
            for pattern, sign in _OPEN_MPI.items()
            if (found := re.search(pattern, text))
        ),
        None,
    )
    rank, code = named or _guessed(text, order, len(notes)) or (None, returned)
    status = code if code in _PASSED_ON else 1
    said = err.errors + [note for _, note in notes if note.startswith(ERROR)]
    said.sort(key=lambda line: _SIGNALLED.match(line) is not None)
    if named:  # Open MPI ends the other ranks with SIGTERM, and they say so
        said = [
            line
            for line in said
            if not _SIGNALLED.match(line) or line.startswith(f"{ERROR} rank {rank}: ")
        ]
    where = f" in {notes[rank][1]}" if rank is not None and notes[rank][1] else ""
    if said:
        return said[0], status
    if returned < 0:
        return f"{ERROR} mpirun was killed by {_name(-returned)}", status
    if code < 0:
        who = "a rank, nobody knows which one," if rank is None else f"rank {rank}"
        return f"{ERROR} {who} was killed by {_name(-code)}{where}{_HINTS.get(-code, '')}", status
    if err.passed:
        return "", status
    if rank is not None:
        return f"{ERROR} rank {rank} ended with status {code}{where} and did not say why", status
    return f"{ERROR} mpirun ended with status {returned}{': ' if text else ''}{text:.300}", 1


def _guessed(text: str, order: list[int], ranks: int) -> tuple[int | None, int] | None:
    """The first rank to end and its exit code, by Hydra: it tells how some ranks ended, or how it ended them."""
    codes: dict[int, int] = {}
    if (found := re.search(r"Exit codes: \[[^]]*\] ([\d,]+)(?! \[)", text)) and found[1].count(
        ","
    ) == ranks - 1:
        codes = {
            rank: os.waitstatus_to_exitcode(int(number))
            for rank, number in enumerate(found[1].split(","))
        }
    for found in re.finditer(
        r"RANK (\d+) PID \d+ RUNNING AT \S+ = (KILLED|EXIT)[A-Z ]*: (\d+)", text
    ):  # Intel's
        codes[int(found[1])] = -int(found[3]) if found[2] == "KILLED" else int(found[3])
    failed = [rank for rank in codes if codes[rank]]
    failed = [rank for rank in failed if codes[rank] != -signal.SIGKILL] or failed
    first = next(
        (rank for rank in order if rank in failed), failed[0] if len(failed) == 1 else None
    )
    if failed:
        return first, codes[failed[0] if first is None else first]
    found = re.search(r"\(signal (\d+)\)", text)
    return (None, -int(found[1])) if found else None


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
