"""`einmpi run JOB -n 4`: starts mpirun, passes on what the ranks say, and says in one line why a run failed."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from einmpi.errors import EinmpiError, InputError, Stopped
from einmpi.runtime.neighbours import own_cores
from einmpi.runtime.terminals import clearing, for_ranks
from einmpi.runtime.watch import ERROR, FOLDER, RECORD, SIGNALS, SOCKET, VARIABLE, Notes, read_notes

_INSIDE = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
# A word of `mpirun --version`, and the family. Intel's launcher is a Hydra as well, so it comes first.
_FAMILIES = {"Open MPI": "openmpi", "Intel": "intel", "HYDRA": "mpich", "MPICH": "mpich"}
# Hydra writes to standard output, even for failures; blocks between lines of dashes are Open MPI's.
_HYDRA = rb"={83}$|=   [A-Z]|YOUR APPLICATION TERMINATED|This typically refers to|Please see the FAQ page|\[mpiexec@"
_RULE, _DASHES = b"=" * 83, b"-" * 74
_LAUNCHER = _HYDRA + rb"|" + _DASHES + rb"$|Abort\(|\[warn\] Epoll|\[(?=[^\]]*[A-Za-z])[^\]\s]+[:@][^\]\s]+\] "
_STARTS = (_RULE, b"=   ", b"YOUR APPLICATION", b"This typically", b"Please see", b"[", _DASHES, b"Abort(",
           ERROR.encode(), b"\0")  # fmt: skip
# What ranks say when a signal ends them. How Open MPI names the first rank to end; exit codes of signals are negative.
_SIGNALLED = re.compile(rf"{ERROR} rank \d+: ({'|'.join(SIGNALS.values())})( |$)")
_OPEN_MPI = {
    r"rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)": -1,
    r"Process name: \[\S*,(\d+)\] Exit code: (\d+)": 1,
    r"MPI_ABORT was invoked on rank (\d+) in .*? Errorcode: (\d+)": 1,
}
_PASSED_ON = (InputError.status, Stopped.status)
_TICK = 0.1  # seconds between two looks at everything that does not wake us
_GRACE = 5.0  # seconds for mpirun to end after a signal
_STARTED = 60.0  # seconds after which ranks have started


def launch(ranks: int, arguments: Sequence[str], program: Sequence[str] = (sys.executable, "-m", "einmpi"),
           patient: bool = False) -> int:  # fmt: skip
    """Run the program on so many ranks; the exit status for the user. A caller with one rank needs no mpirun.

    `patient`: the ranks can stop in good order. The first SIGTERM or SIGUSR1 asks them to; they may take their time.
    """
    if any(name in os.environ for name in _INSIDE):
        raise InputError("-n", "this process was started by mpirun already", "leave out -n")
    everything = os.environ.get("EINMPI_DEBUG") == "1"
    sys.stdout.flush()
    with _signals(patient) as asked, _notes(ranks) as (path, living):
        command = [*mpirun(ranks), "-n", str(ranks), *program, *arguments]
        try:
            process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_environment(path),
                start_new_session=True,
            )
        except OSError as error:
            raise EinmpiError(f"{command[0]}: {error.strerror or error}") from None
        out, err = _Stream(1, _HYDRA, everything), _Stream(2, _LAUNCHER, everything)
        with process:
            try:
                doing, order = _follow(process, out, err, path, living, asked, patient)
            finally:
                _clear(process, path)
        notes = _read(path, ranks)
    if out.broken:
        raise BrokenPipeError  # `einmpi … | head`
    if asked:
        line = "einmpi: interrupted" if asked[0] == signal.SIGINT else f"{ERROR} terminated by {asked[0].name}"
        line, status = f"{line} in {doing}" if doing else line, 128 + asked[0]
    else:
        line, status = _reason(process.returncode, out, err, order, notes) if process.returncode else ("", 0)
    if line and not (everything and line in err.errors):
        err.write(f"{clearing(sys.stderr)}{line}\n".encode(errors="replace"))
    return status


# ---- which mpirun, and how ------------------------------------------------------------------------------------------


def mpirun(ranks: int) -> list[str]:
    """mpirun and its options."""
    beside = Path(sys.executable).with_name("mpirun")
    path = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun") or shutil.which("mpiexec")
    if path is None:
        raise InputError("einmpi", "there is no mpirun", "pip install 'einmpi[mpich]', or load your site's MPI")
    family = family_of(path)
    if family == "openmpi" and ranks > _cores():
        return [path, "--oversubscribe", "--bind-to", "none"]
    # The banner of MPICH's Hydra mixes up who failed and who was killed because of it; the list does not.
    return [path, "-print-all-exitcodes"] if family == "mpich" else [path]


@functools.cache
def family_of(path: str) -> str:
    """Whose launcher this is."""
    try:
        done = subprocess.run([path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              errors="replace", env=_environment(), timeout=30)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return "other"
    return family_in(done.stdout + done.stderr)


def family_in(version: str) -> str:
    """The family that a launcher or a library belongs to, by what it says about itself."""
    return next((family for word, family in _FAMILIES.items() if word in version), "other")


def _environment(notes: str = "") -> dict[str, str]:
    # Open MPI refuses to run as root, which is the usual user in a container.
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
    return {**os.environ, **root, VARIABLE: notes, **for_ranks()}


def _cores() -> int:
    """Places for ranks. Threads of one core share a place, as Open MPI counts; Slurm may give places elsewhere."""
    threads = own_cores()
    try:
        names = (f"/sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list" for thread in threads)
        cores = len({Path(name).read_text() for name in names})
    except OSError:
        cores = len(threads)
    tasks = os.environ.get("SLURM_NTASKS", "")
    return max(cores, int(tasks) if tasks.isdecimal() else 0)


# ---- while it runs --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _notes(ranks: int) -> Iterator[tuple[str, socket.socket]]:
    """A file for the ranks' notes, and a socket whose connections end when their rank does, or this process."""
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=FOLDER, ignore_cleanup_errors=True))
            path = f"{folder}/notes"
            Path(path).write_bytes(bytes(ranks * RECORD))
        except OSError as error:
            reason = error.strerror or str(error)
            raise InputError(tempfile.gettempdir(), reason, "set TMPDIR to a folder with room") from None
        living = stack.enter_context(socket.socket(socket.AF_UNIX))
        try:
            living.bind(path + SOCKET)
            living.listen(ranks)
        except OSError:  # the path is too long for a socket: we must do without
            living.close()
        yield path, living


def _read(path: str, ranks: int) -> Notes:
    try:
        return read_notes(path)
    except OSError:  # temporary files are removed after some days
        return [(0, "")] * ranks


@contextlib.contextmanager
def _signals(patient: bool) -> Iterator[list[signal.Signals]]:
    """The signals that asked this process to end. What is ignored stays so, as under nohup."""
    asked: list[signal.Signals] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *((signal.SIGUSR1,) if patient else ())):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, lambda got, _: asked.append(signal.Signals(got)))
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class _Stream:
    """Passes on at once what the ranks write. Keeps what the launcher writes, and the last words, for the end."""

    def __init__(self, target: int, launcher: bytes, everything: bool) -> None:
        self.target, self.everything = target, everything
        self.broken = self.ended = self.muted = self.passed = False
        self.kept: list[str] = []
        self.errors: list[str] = []
        self._launcher = re.compile(launcher)
        self._rest = self._blank = self._previous = b""
        self._block = self._begun = False

    def feed(self, data: bytes) -> None:
        if self.everything:
            self.write(data)
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line + b"\n")
        if rest and not self._block and not any(start.startswith(rest) or rest.startswith(start) for start in _STARTS):
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


def _follow(process: subprocess.Popen[bytes], out: _Stream, err: _Stream, path: str, living: socket.socket,
            asked: list[signal.Signals], patient: bool) -> tuple[str, list[int]]:  # fmt: skip
    """Until mpirun has ended, or must be killed.

    What rank 0 was doing when this process was asked to end, and the ranks of this machine in the order they ended.
    """
    doing, deadline, began, wished = "", float("inf"), time.monotonic(), False
    order: list[int] = []
    ranks: dict[int, int] = {}  # of descriptors
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as links:
        selector.register(process.stdout, selectors.EVENT_READ, out)  # type: ignore[arg-type]
        selector.register(process.stderr, selectors.EVENT_READ, err)  # type: ignore[arg-type]
        if living.fileno() >= 0:
            selector.register(living, selectors.EVENT_READ)
        while not (out.ended and err.ended and process.poll() is not None) and time.monotonic() < deadline:
            for key, _ in selector.select(_TICK):  # in the order in which they became ready
                if key.fileobj is living:
                    link = links.enter_context(living.accept()[0])
                    selector.register(link, selectors.EVENT_READ)
                    if len(selector.get_map()) > 500:  # a process has few descriptors
                        selector.unregister(living)
                elif data := os.read(key.fd, 65536):
                    if key.data:
                        key.data.feed(data)
                    else:
                        ranks[key.fd] = int.from_bytes(data, "little")
                else:
                    selector.unregister(key.fileobj)
                    if key.data:
                        key.data.end()
                    elif key.fd in ranks:
                        order.append(ranks[key.fd])
            if out.broken and not asked:
                asked.append(signal.SIGPIPE)
            if asked and (asked[0] == signal.SIGUSR1 or (patient and asked[0] == signal.SIGTERM)):
                patient = asked.pop(0) == signal.SIGUSR1 and patient
                wished = True
            if wished and _can_stop(path, began):
                process.send_signal(signal.SIGUSR1)  # every mpirun passes this one on, and goes on itself
                wished = False
            if asked and not err.muted:
                doing, err.muted, deadline = _read(path, 1)[0][1], True, time.monotonic() + _GRACE
                process.send_signal(signal.SIGINT if asked[0] == signal.SIGINT else signal.SIGTERM)
            if len(asked) > 1:
                deadline = 0  # the user does not want to wait
            if err.errors:  # a rank has spoken its last words: all must end
                deadline = min(deadline, time.monotonic() + 2 * _GRACE)
            if process.poll() is not None:  # whoever still holds the pipes is lost
                deadline = min(deadline, time.monotonic() + 1)
                _kill(path)
    return doing, order


def _can_stop(path: str, began: float) -> bool:
    """Whether the ranks are ready to be asked; before that a signal would end them. When one notes something, all are.
    Those of other machines note nothing here, but need not longer than that to start."""
    return any(text for _, text in _read(path, 1)) or time.monotonic() > began + _STARTED


def _clear(process: subprocess.Popen[bytes], path: str) -> None:
    """Nothing of a run stays."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + _GRACE
    while _kill(path) and time.monotonic() < deadline:
        time.sleep(0.02)


def _kill(path: str) -> int:
    """Kill and count what has our file in its environment: launchers put ranks in groups and sessions of their own."""
    mark, pids = f"{VARIABLE}={path}".encode(), []
    if os.path.exists("/proc/self/environ"):
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if mark in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                    pids.append(int(name))
    else:
        pids = [pid for pid, _ in _read(path, 1) if pid]
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)


# ---- why it failed --------------------------------------------------------------------------------------------------


def _reason(returned: int, out: _Stream, err: _Stream, order: list[int], notes: Notes) -> tuple[str, int]:
    """One line, or none when a rank has explained itself, and the exit status."""
    text = " ".join(" ".join(out.kept + err.kept).replace("--", "").split())
    named = next(((int(found[1]), sign * int(found[2])) for pattern, sign in _OPEN_MPI.items()
                  if (found := re.search(pattern, text))), None)  # fmt: skip
    rank, code = named or _guessed(text, order, len(notes)) or (None, returned)
    status = code if code in _PASSED_ON else 1
    said = err.errors + [note for _, note in notes if note.startswith(ERROR)]
    said.sort(key=lambda line: _SIGNALLED.match(line) is not None)
    if named:  # Open MPI ends the other ranks with SIGTERM, and they say so
        said = [line for line in said if not _SIGNALLED.match(line) or line.startswith(f"{ERROR} rank {rank}: ")]
    where = f" in {notes[rank][1]}" if rank is not None and notes[rank][1] else ""
    if said:
        return said[0], status
    if returned < 0:
        return f"{ERROR} mpirun was killed by {_name(-returned)}", status
    if code < 0:
        who = "a rank, nobody knows which one," if rank is None else f"rank {rank}"
        hint = "; perhaps there was not enough memory" if code == -signal.SIGKILL else ""
        return f"{ERROR} {who} was killed by {_name(-code)}{where}{hint}", status
    if err.passed:
        return "", status
    if rank is not None:
        return f"{ERROR} rank {rank} ended with status {code}{where} and did not say why", status
    return f"{ERROR} mpirun ended with status {returned}{': ' if text else ''}{text:.300}", 1


def _guessed(text: str, order: list[int], ranks: int) -> tuple[int | None, int] | None:
    """The first rank to end and its exit code, by Hydra: it tells how some ranks ended, or how it ended them."""
    codes: dict[int, int] = {}
    if (found := re.search(r"Exit codes: \[[^]]*\] ([\d,]+)(?! \[)", text)) and found[1].count(",") == ranks - 1:
        codes = {rank: os.waitstatus_to_exitcode(int(number)) for rank, number in enumerate(found[1].split(","))}
    for found in re.finditer(r"RANK (\d+) PID \d+ RUNNING AT \S+ = (KILLED|EXIT)[A-Z ]*: (\d+)", text):  # Intel's
        codes[int(found[1])] = -int(found[3]) if found[2] == "KILLED" else int(found[3])
    failed = [rank for rank in codes if codes[rank]]
    failed = [rank for rank in failed if codes[rank] != -signal.SIGKILL] or failed
    first = next((rank for rank in order if rank in failed), failed[0] if len(failed) == 1 else None)
    if failed:
        return first, codes[failed[0] if first is None else first]
    found = re.search(r"\(signal (\d+)\)", text)
    return (None, -int(found[1])) if found else None


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
