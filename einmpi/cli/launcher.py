"""`einmpi run JOB -n 4`: start mpirun, follow its ranks to the end, and leave nothing behind."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import selectors
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from einmpi.cli.launch_output import OutputFilter, explain_failure
from einmpi.errors import EinmpiError, InputError
from einmpi.process.environment import (
    NOTES_VARIABLE,
    RANK_VARIABLES,
    available_cores,
    clear_line,
    is_debugging,
    python_command,
    terminal_environment,
)
from einmpi.process.names import stale_segments
from einmpi.process.signals import (
    ERROR_PREFIX,
    FOLDER_PREFIX,
    RECORD_BYTES,
    SOCKET_SUFFIX,
    RankNote,
    read_notes,
)

_POLL_SECONDS = 0.1  # between two looks at everything that does not wake this process
_GRACE_SECONDS = 5.0  # for mpirun to end after a signal
_START_SECONDS = 60.0  # after this time all ranks have started
_NOTES_NAME = "notes"
_NEW_FOLDER_SECONDS = 60.0  # a folder without notes may be in the making for this long
_MOST_CONNECTIONS = 500  # a process may open few descriptors


def launch(
    ranks: int,
    arguments: Sequence[str],
    program: Sequence[str] | None = None,
    graceful: bool = False,
) -> int:
    """Run the program, or einmpi itself, on this many ranks; return the exit status for the user.

    With `graceful` the ranks save a checkpoint when they are asked to stop: the first SIGTERM or
    SIGUSR1 is passed on as such a request, and the ranks may take their time.
    """
    if any(name in os.environ for name in RANK_VARIABLES):
        raise InputError("-n", "this process was already started by mpirun", hint="leave out -n")
    if program is None:
        program = [*python_command(), "-m", "einmpi"]
    sys.stdout.flush()
    stale_segments(remove=True)
    with _collect_signals(graceful) as signals, _share_notes(ranks) as notes_files:
        command = [*mpirun_command(ranks), "-n", str(ranks), *program, *arguments]
        process = _start(command, notes_files.path)
        run = _LaunchedRun(process, notes_files, signals, graceful, is_debugging())
        with process:
            try:
                run.follow()
            finally:
                run.clear()
        notes = notes_files.read()
    if process.returncode:
        stale_segments(remove=True)
    if run.out.is_broken:
        raise BrokenPipeError  # as in `einmpi … | head`
    if signals:
        line, status = _explain_signal(signals[0], run.activity_at_signal)
    elif process.returncode:
        failure = explain_failure(process.returncode, run.out, run.err, run.end_order, notes)
        line, status = failure.line, failure.status
    else:
        line, status = "", 0
    is_printed = is_debugging() and line in run.err.errors
    if line and not is_printed:
        run.err.write(f"{clear_line(sys.stderr)}{line}\n".encode(errors="replace"))
    return status


def _start(command: Sequence[str], notes_path: str) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=launcher_environment(notes_path),
            start_new_session=True,
        )
    except OSError as error:
        raise EinmpiError(f"{command[0]}: {error.strerror or error}") from None


def _explain_signal(number: signal.Signals, activity: str) -> tuple[str, int]:
    if number == signal.SIGINT:
        line = "einmpi: interrupted"
    else:
        line = f"{ERROR_PREFIX} terminated by {number.name}"
    if activity:
        line += f" in {activity}"
    return line, 128 + number


@contextlib.contextmanager
def _collect_signals(graceful: bool) -> Iterator[list[signal.Signals]]:
    """Collect the signals that ask this process to end. Ignored ones stay so, as under nohup."""
    received: list[signal.Signals] = []
    previous: dict[signal.Signals, Any] = {}
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    if graceful:
        numbers.append(signal.SIGUSR1)
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(
                    number, lambda got, _: received.append(signal.Signals(got))
                )
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


# ---- what the launcher and its ranks share -------------------------------------------------------


class _NotesFiles:
    """The file in which ranks note what they do, and the socket that tells which ranks live.

    A connection to the socket ends with its rank, or with this process.
    """

    def __init__(self, path: str, ranks: int, listener: socket.socket) -> None:
        self.path = path
        self.ranks = ranks
        self.listener = listener

    def read(self) -> list[RankNote]:
        try:
            return read_notes(self.path)
        except OSError:  # systems remove temporary files after some days
            return [RankNote(0, "")] * self.ranks

    def kill_ranks(self) -> int:
        """Kill all processes of this run and return how many there were.

        Launchers put ranks into process groups and sessions of their own. The path of the notes in
        their environment tells which ones belong to this run.
        """
        pids = []
        if os.path.exists("/proc/self/environ"):
            entry = f"{NOTES_VARIABLE}={self.path}".encode()
            for name in os.listdir("/proc"):
                if not name.isdecimal():
                    continue
                with contextlib.suppress(OSError):
                    if entry in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                        pids.append(int(name))
        else:
            pids = [note.pid for note in self.read() if note.pid]
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        return len(pids)


@contextlib.contextmanager
def _share_notes(ranks: int) -> Iterator[_NotesFiles]:
    with contextlib.ExitStack() as stack:
        try:
            _remove_stale_folders(tempfile.gettempdir())
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True)
            )
            path = f"{folder}/{_NOTES_NAME}"
            # It gets its name when it is locked, so it is locked while this process lives.
            notes = stack.enter_context(open(f"{path}.new", "xb"))
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(notes, fcntl.LOCK_EX | fcntl.LOCK_NB)
            notes.write(bytes(ranks * RECORD_BYTES))
            notes.flush()
            os.rename(notes.name, path)
        except OSError as error:
            problem = error.strerror or str(error)
            hint = "set TMPDIR to a folder with free space"
            raise InputError(tempfile.gettempdir(), problem, hint=hint) from None
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        try:
            listener.bind(path + SOCKET_SUFFIX)
            listener.listen(ranks)
        except OSError:  # the path is too long for a socket: do without it
            listener.close()
        yield _NotesFiles(path, ranks, listener)


def _remove_stale_folders(temporary: str) -> None:
    """Remove the folders that launchers of this user left on this machine when they were killed."""
    for folder in Path(temporary).glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if is_own and _is_abandoned(folder, time.time() - status.st_mtime):
                shutil.rmtree(folder)


def _is_abandoned(folder: Path, age: float) -> bool:
    """Return whether the launcher of a folder is gone: then its notes are not locked any more."""
    try:
        with open(folder / _NOTES_NAME, "rb") as notes:
            fcntl.flock(notes, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:  # it is being made, or was not finished
        return age > _NEW_FOLDER_SECONDS
    except OSError:  # it is locked, or there are no locks
        return False
    return True


# ---- while mpirun runs ---------------------------------------------------------------------------


class _LaunchedRun:
    """A running mpirun: what it prints, which ranks have ended, and when it must be killed."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        notes_files: _NotesFiles,
        signals: list[signal.Signals],
        graceful: bool,
        is_debug: bool,
    ) -> None:
        self.out = OutputFilter(1, passes_everything=is_debug)
        self.err = OutputFilter(2, passes_everything=is_debug)
        self.activity_at_signal = ""  # what rank 0 was doing when this process was told to end
        self.end_order: list[int] = []  # the ranks of this machine in the order in which they ended
        self._process = process
        self._notes_files = notes_files
        self._signals = signals
        self._started = time.monotonic()
        self._deadline = float("inf")
        self._first_sigterm_is_request = graceful
        self._is_stop_requested = False
        self._rank_of_descriptor: dict[int, int] = {}

    def follow(self) -> None:
        """Pass on output and signals until mpirun has ended or must be killed."""
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as connections:
            assert self._process.stdout is not None and self._process.stderr is not None
            selector.register(self._process.stdout, selectors.EVENT_READ, self.out)
            selector.register(self._process.stderr, selectors.EVENT_READ, self.err)
            if self._notes_files.listener.fileno() >= 0:
                selector.register(self._notes_files.listener, selectors.EVENT_READ)
            while not self._has_ended() and time.monotonic() < self._deadline:
                self._read_ready(selector, connections)
                self._handle_signals()
                if self.err.errors:  # a rank has printed its last line: all ranks must end
                    self._end_within(2 * _GRACE_SECONDS)
                if self._process.poll() is not None:  # who still holds the pipes is left over
                    self._end_within(1)
                    self._notes_files.kill_ranks()

    def clear(self) -> None:
        """Kill everything that is left of the run."""
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        deadline = time.monotonic() + _GRACE_SECONDS
        while self._notes_files.kill_ranks() and time.monotonic() < deadline:
            time.sleep(0.02)

    def _has_ended(self) -> bool:
        return self.out.has_ended and self.err.has_ended and self._process.poll() is not None

    def _end_within(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _read_ready(
        self, selector: selectors.BaseSelector, connections: contextlib.ExitStack
    ) -> None:
        """Read what has arrived, in the order in which it arrived."""
        listener = self._notes_files.listener
        for key, _ in selector.select(_POLL_SECONDS):
            if key.fileobj is listener:
                connection = connections.enter_context(listener.accept()[0])
                selector.register(connection, selectors.EVENT_READ)
                if len(selector.get_map()) > _MOST_CONNECTIONS:
                    selector.unregister(listener)
                continue
            stream: OutputFilter | None = key.data  # None for the connection of a rank
            data = os.read(key.fd, 65536)
            if data:
                if stream is not None:
                    stream.feed(data)
                else:
                    self._rank_of_descriptor[key.fd] = int.from_bytes(data, "little")
                continue
            selector.unregister(key.fileobj)
            if stream is not None:
                stream.end()
            elif key.fd in self._rank_of_descriptor:
                self.end_order.append(self._rank_of_descriptor[key.fd])

    def _handle_signals(self) -> None:
        signals = self._signals
        if self.out.is_broken and not signals:
            signals.append(signal.SIGPIPE)
        if signals and self._is_request(signals[0]):
            if signals.pop(0) == signal.SIGTERM:
                self._first_sigterm_is_request = False
            self._is_stop_requested = True
        if self._is_stop_requested and self._ranks_can_stop():
            # Every mpirun passes SIGUSR1 on to its ranks and goes on itself.
            self._process.send_signal(signal.SIGUSR1)
            self._is_stop_requested = False
        if signals and not self.err.is_muted:
            self.activity_at_signal = self._notes_files.read()[0].text
            self.err.is_muted = True
            self._deadline = time.monotonic() + _GRACE_SECONDS
            is_interrupt = signals[0] == signal.SIGINT
            self._process.send_signal(signal.SIGINT if is_interrupt else signal.SIGTERM)
        if len(signals) > 1:
            self._deadline = 0  # the user does not want to wait

    def _is_request(self, number: signal.Signals) -> bool:
        if number == signal.SIGUSR1:
            return True
        return number == signal.SIGTERM and self._first_sigterm_is_request

    def _ranks_can_stop(self) -> bool:
        """Return whether the ranks handle a request to stop; before they do, it would kill them.

        All handle it once one of them has written a note. Ranks on other machines write no notes
        here, but after some seconds they have started.
        """
        if any(note.text for note in self._notes_files.read()):
            return True
        return time.monotonic() > self._started + _START_SECONDS


# ---- which mpirun there is, and how to call it ---------------------------------------------------


# A word in the output of `mpirun --version`, and the family of the launcher. Intel's launcher calls
# itself Hydra as well, so it comes first.
_FAMILIES = {"Open MPI": "openmpi", "Intel": "intel", "HYDRA": "mpich", "MPICH": "mpich"}


def mpirun_command(ranks: int) -> list[str]:
    """Return the path of mpirun and its options for this many ranks."""
    path = _find_mpirun()
    family = family_of(path)
    if family == "openmpi" and ranks > _slots():
        return [path, "--oversubscribe", "--bind-to", "none"]
    if family == "mpich":
        # Hydra's banner confuses who failed and who was killed because of it; this list does not.
        return [path, "-print-all-exitcodes"]
    return [path]


@functools.cache
def family_of(path: str) -> str:
    """Return the family of a launcher: mpich, openmpi, intel or other."""
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=launcher_environment(),
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "other"
    return family_in(done.stdout + done.stderr)


def family_in(version: str) -> str:
    """Return the family of a launcher or a library from its version text."""
    for word, family in _FAMILIES.items():
        if word in version:
            return family
    return "other"


def launcher_environment(notes_path: str = "") -> dict[str, str]:
    """Return the environment for mpirun, which its ranks inherit."""
    environment = {**os.environ, NOTES_VARIABLE: notes_path, **terminal_environment()}
    if os.geteuid() == 0:
        # Open MPI refuses to run as root, which is the usual user in a container.
        environment["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
        environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return environment


def _find_mpirun() -> str:
    """Return the mpirun of this Python's environment, or else the one on PATH."""
    own = Path(sys.executable).with_name("mpirun")
    if os.access(own, os.X_OK):
        return str(own)
    path = shutil.which("mpirun") or shutil.which("mpiexec")
    if path is None:
        hint = "pip install 'einmpi[mpich]', or load your site's MPI"
        raise InputError("einmpi", "there is no mpirun", hint=hint)
    return path


def _slots() -> int:
    """Return how many ranks Open MPI places here without oversubscribing.

    It counts cores, not their hardware threads. Slurm may provide slots on other machines too.
    """
    threads = available_cores()
    try:
        cores = set()
        for thread in threads:
            topology = Path(f"/sys/devices/system/cpu/cpu{thread}/topology")
            cores.add((topology / "thread_siblings_list").read_text())
        slots = len(cores)
    except OSError:
        slots = len(threads)
    slurm_tasks = os.environ.get("SLURM_NTASKS", "")
    if slurm_tasks.isdecimal():
        slots = max(slots, int(slurm_tasks))
    return slots
