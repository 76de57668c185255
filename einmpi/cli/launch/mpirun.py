"""`einmpi run JOB -n 4`: starts mpirun and stays until it has ended, or must be ended."""

from __future__ import annotations

import contextlib
import functools
import os
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

from einmpi.cli.launch.output import Output, reason
from einmpi.errors import EinmpiError, InputError
from einmpi.process.environment import own_cores
from einmpi.process.supervise import ERROR, FOLDER, RECORD, SOCKET, VARIABLE, Notes, read_notes
from einmpi.process.terminal import clearing, for_ranks

_INSIDE = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
# A word of `mpirun --version`, and the family. Intel's launcher is a Hydra as well, so it comes first.
_FAMILIES = {"Open MPI": "openmpi", "Intel": "intel", "HYDRA": "mpich", "MPICH": "mpich"}
_TICK = 0.1  # seconds between two looks at everything that does not wake us
_GRACE = 5.0  # seconds for mpirun to end after a signal
_STARTED = 60.0  # seconds after which ranks have started


def launch(
    ranks: int,
    arguments: Sequence[str],
    program: Sequence[str] = (sys.executable, "-m", "einmpi"),
    patient: bool = False,
) -> int:
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
        out, err = Output(1, everything), Output(2, everything)
        with process:
            try:
                doing, order = _follow(process, out, err, path, living, asked, patient)
            finally:
                _clear(process, path)
        notes = _read(path, ranks)
    if out.broken:
        raise BrokenPipeError  # `einmpi … | head`
    if asked:
        line = (
            "einmpi: interrupted"
            if asked[0] == signal.SIGINT
            else f"{ERROR} terminated by {asked[0].name}"
        )
        line, status = f"{line} in {doing}" if doing else line, 128 + asked[0]
    else:
        line, status = (
            reason(process.returncode, out, err, order, notes) if process.returncode else ("", 0)
        )
    if line and not (everything and line in err.errors):
        err.write(f"{clearing(sys.stderr)}{line}\n".encode(errors="replace"))
    return status


# ---- which mpirun, and how ------------------------------------------------------------------------------------------


def mpirun(ranks: int) -> list[str]:
    """mpirun and its options."""
    beside = Path(sys.executable).with_name("mpirun")
    path = (
        str(beside)
        if os.access(beside, os.X_OK)
        else shutil.which("mpirun") or shutil.which("mpiexec")
    )
    if path is None:
        raise InputError(
            "einmpi", "there is no mpirun", "pip install 'einmpi[mpich]', or load your site's MPI"
        )
    family = family_of(path)
    if family == "openmpi" and ranks > _cores():
        return [path, "--oversubscribe", "--bind-to", "none"]
    # The banner of MPICH's Hydra mixes up who failed and who was killed because of it; the list does not.
    return [path, "-print-all-exitcodes"] if family == "mpich" else [path]


@functools.cache
def family_of(path: str) -> str:
    """Whose launcher this is."""
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=_environment(),
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "other"
    return family_in(done.stdout + done.stderr)


def family_in(version: str) -> str:
    """The family that a launcher or a library belongs to, by what it says about itself."""
    return next((family for word, family in _FAMILIES.items() if word in version), "other")


def _environment(notes: str = "") -> dict[str, str]:
    # Open MPI refuses to run as root, which is the usual user in a container.
    root = (
        {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if os.geteuid() == 0
        else {}
    )
    return {**os.environ, **root, VARIABLE: notes, **for_ranks()}


def _cores() -> int:
    """Places for ranks. Threads of one core share a place, as Open MPI counts; Slurm may give places elsewhere."""
    threads = own_cores()
    try:
        names = (
            f"/sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list"
            for thread in threads
        )
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
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix=FOLDER, ignore_cleanup_errors=True)
            )
            path = f"{folder}/notes"
            Path(path).write_bytes(bytes(ranks * RECORD))
        except OSError as error:
            problem = error.strerror or str(error)
            raise InputError(
                tempfile.gettempdir(), problem, "set TMPDIR to a folder with room"
            ) from None
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
        for number in (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGHUP,
            *((signal.SIGUSR1,) if patient else ()),
        ):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(
                    number, lambda got, _: asked.append(signal.Signals(got))
                )
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _follow(
    process: subprocess.Popen[bytes],
    out: Output,
    err: Output,
    path: str,
    living: socket.socket,
    asked: list[signal.Signals],
    patient: bool,
) -> tuple[str, list[int]]:
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
        while (
            not (out.ended and err.ended and process.poll() is not None)
            and time.monotonic() < deadline
        ):
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
                process.send_signal(
                    signal.SIGUSR1
                )  # every mpirun passes this one on, and goes on itself
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
