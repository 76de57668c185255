"""`einmpi run -n` with a real mpirun: ranks that end in every way, one line that says why."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import pytest
from mpi_helpers import STARTS, environment, finished, needs_mpirun

from einmpi.cli import launch_output, launcher
from einmpi.errors import EinmpiError, InputError
from einmpi.process import signals
from einmpi.process import signals as abort
from einmpi.process import signals as notes
from einmpi.process.environment import RANK_VARIABLES

RANKS = 3
SOON = 90  # seconds: it takes a few, and slow machines are slow; what hangs, hangs for minutes
MEMORY = "; perhaps there was not enough memory"

# Ranks that end as their argument says. Before `case`, all have noted what they do and know all
# process ids.
STAND_IN = """
import os, signal, sys, time
import numpy as np
from mpi4py import MPI
from einmpi.comm import mpi_library
from einmpi.process import signals as process_abort
from einmpi.process import signals
from einmpi.process import signals as notes

comm = MPI.COMM_WORLD
rank = comm.rank

def abort(status):
    mpi_library.abort(comm, status)

def kill(other, number):  # while the other one is deep inside a call
    if rank == 0:
        time.sleep(0.5)
        print(f"killed at {time.time()}\\n", end="", flush=True)
        os.kill(pids[other], number)
        time.sleep(600)

note = notes.activity_writer(rank)
signals.SignalWatch(rank, abort)
note(f"kernel Z{rank}")
pids = comm.allgather(os.getpid())
case = sys.argv[1]
open(sys.argv[3], "a").close()
if case == "well":
    print(f"rank {rank} is well\\n\\n" if rank == 0 else "", end="", flush=True)
    print(f"a warning of rank {rank}\\n" if rank == 1 else "", end="", file=sys.stderr, flush=True)
elif case == "input":
    os.write(2, b"job.toml: it is wrong; expected one of right\\n" if rank == 0 else b"")
    comm.Barrier()
    sys.exit(2)
elif case == "raise":
    if rank == 1:
        try:
            raise ValueError("two\\n  lines")
        except ValueError as error:
            process_abort.abort_on_error(rank, error, abort)
elif case == "status" and rank == 1:
    os._exit(3)
elif case == "abort" and rank == 2:
    os.abort()
elif case == "killed":
    os.write(2, b"a warning\\n" if rank == 1 else b"")
    comm.Barrier()
    kill(2, signal.SIGKILL)
elif case == "barrier":
    kill(1, signal.SIGTERM)
elif case == "matmul":
    kill(1, signal.SIGTERM)
    if rank == 1:
        large = np.ones((5000, 5000))
        large @ large
elif case == "wait":
    print("waiting\\n" if rank == 0 else "", end="", flush=True)
    time.sleep(600)
comm.Barrier()
"""
PARENT = """
import signal, sys
from einmpi.cli.launcher import launch
# A shell without job control ignores this signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(launch(int(sys.argv[1]), sys.argv[3:], (sys.executable, sys.argv[2])))
"""


def processes(mark):
    """The process ids with this in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found += (
                [int(folder.name)] if mark.encode() in (folder / "cmdline").read_bytes() else []
            )
        except OSError:
            continue
    return found


def until_gone(mark):
    """Wait for processes to end, which takes a moment after they were killed; return the rest."""
    deadline = time.monotonic() + SOON
    while (left := processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


class Run:
    """A started `launch`. A mark in its command lines lets the test find what is left of it."""

    def __init__(self, folder, case, temporary=None, **more):
        self.mark = f"mark-{uuid.uuid4()}"
        self.killed, self.temporary = temporary is not None, temporary or folder / "t"
        self.started = folder / f"started-{self.mark}"
        program = folder / "stand_in.py"
        program.write_text(STAND_IN)
        self.temporary.mkdir(exist_ok=True)
        arguments = [str(RANKS), str(program), case, self.mark, str(self.started)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PARENT, *arguments],
            env=environment(TMPDIR=str(self.temporary), **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def finish(self):
        """Its exit status and what it has written."""
        try:
            out, err = self.process.communicate(timeout=120)
        finally:
            self.process.kill()
        self.end = time.time()
        return self.process.returncode, out.decode(), err.decode()


def until_ended(begin, case):
    """A run and its end. It is started again if MPI broke down before the ranks had started."""
    for _ in range(STARTS):
        run = begin(case)
        end = run.finish()
        if run.started.exists():
            break
    return run, end


def until_waiting(begin, temporary=None):
    """A run whose ranks wait. It is started again if MPI broke down before they had started."""
    for _ in range(STARTS):
        run = begin("wait", temporary)
        line = run.process.stdout.readline()
        if line == b"waiting\n":
            return run
        run.finish()
    raise AssertionError(f"{line!r} was printed instead of waiting")


@pytest.fixture
def begin():
    """Start a run; in the end, nothing of it may be left."""
    runs = []

    def start(case, temporary=None, **more):
        runs.append(Run(Path(folder), case, temporary, **more))
        return runs[-1]

    with tempfile.TemporaryDirectory() as folder:  # pytest's own paths are too long for a socket
        yield start
        for run in runs:
            left = until_gone(run.mark)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            assert not left
            assert run.killed or not os.listdir(run.temporary)


ENDS = {
    "well": (0, "a warning of rank 1\n"),
    "input": (2, "job.toml: it is wrong; expected one of right\n"),
    "raise": (1, "einmpi: error: rank 1: kernel Z1: ValueError: two lines\n"),
    "status": (
        1,
        "einmpi: error: rank 1 exited with status 3 in kernel Z1 without an error message\n",
    ),
    "abort": (1, "einmpi: error: rank 2 was killed by SIGABRT in kernel Z2\n"),
    "killed": (1, f"a warning\neinmpi: error: rank 2 was killed by SIGKILL in kernel Z2{MEMORY}\n"),
    "barrier": (1, "einmpi: error: rank 1: terminated by SIGTERM in kernel Z1\n"),
    "matmul": (1, "einmpi: error: rank 1: terminated by SIGTERM in kernel Z1\n"),
}


@pytest.mark.sampled(3, always=["raise", "input", "killed"])
@pytest.mark.mpirun
@needs_mpirun
@pytest.mark.parametrize("case", ENDS)
def test_ends(begin, case):
    run, (status, out, err) = until_ended(begin, case)
    assert (status, err) == ENDS[case]
    killed = re.fullmatch(r"killed at (\S+)\n", out)
    assert killed or out == ("rank 0 is well\n\n" if case == "well" else "")
    assert not killed or run.end - float(killed[1]) < SOON


@pytest.mark.mpirun
@needs_mpirun
@pytest.mark.parametrize(
    ("number", "line"),
    [
        (signal.SIGTERM, "einmpi: error: terminated by SIGTERM in kernel Z0\n"),
        (signal.SIGINT, "einmpi: interrupted in kernel Z0\n"),
    ],
)
def test_parent_is_told_to_end(begin, number, line):
    run = until_waiting(begin)
    told = time.time()
    run.process.send_signal(number)
    assert run.finish() == (128 + number, "", line)
    assert run.end - told < SOON


@pytest.mark.mpirun
@needs_mpirun
def test_parent_is_killed(begin):
    run = until_waiting(begin)
    run.process.kill()
    run.killed = True  # it could not remove its files
    until_gone(run.mark)
    run.finish()
    assert len(own_folders(run)) == 1

    # The next launchers remove it, but not the folder of one that lives.
    living = until_waiting(begin, run.temporary)
    of_living = own_folders(run)
    assert len(of_living) == 1
    assert begin("well", run.temporary).finish()[0] == 0
    assert own_folders(run) == of_living
    living.process.terminate()
    living.finish()
    assert own_folders(run) == []


def own_folders(run):
    return [name for name in os.listdir(run.temporary) if name.startswith("einmpi-")]


@pytest.mark.mpirun
@needs_mpirun
def test_reader_has_seen_enough(begin):
    run = begin("wait")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), run.process.stdout.fileno())
    status, _, err = run.finish()
    assert (status, err.splitlines()[-1]) == (
        1,
        "BrokenPipeError",
    )  # the command line turns it into a status


# ---- without mpirun ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"])
def test_refuses_inside_mpirun(monkeypatch, name):
    monkeypatch.setenv(name, "0")
    with pytest.raises(
        InputError, match=r"^-n: this process was already started by mpirun; leave out -n$"
    ):
        launcher.launch(2, ["run", "job.toml"])


@pytest.fixture
def outside(monkeypatch):
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_no_mpirun(monkeypatch, tmp_path, outside):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        InputError,
        match=r"^einmpi: there is no mpirun; pip install 'einmpi\[mpich\]', or load your",
    ):
        launcher.launch(2, ["run", "job.toml"])


@pytest.mark.parametrize(
    ("version", "options"),
    [
        ("mpirun (Open MPI) 5.0.11", ["--oversubscribe", "--bind-to", "none"]),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701", []),
        ("HYDRA build details:", ["-print-all-exitcodes"]),
        ("something else", []),
    ],
)
def test_families(monkeypatch, tmp_path, version, options):
    other = tmp_path / "mpiexec"
    other.write_text(f"#!/bin/sh\necho '{version}'\n")
    other.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path}")
    assert launcher.mpirun_command(10**6) == [str(other), *options]
    assert launcher.mpirun_command(1) == [
        str(other),
        *(options if options[:1] != ["--oversubscribe"] else []),
    ]


def test_lost_notes(tmp_path):
    assert launcher._NotesFiles(str(tmp_path / "notes"), 2, None).read() == [(0, "")] * 2


DASHES = "-" * 74 + "\n"
FAILED = "einmpi: error: rank 1: kernel Z: ValueError: no"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            f"{DASHES}There are no\n slots.",
            "einmpi: error: mpirun exited with status 1: There are no slots.",
        ),
        (f"{FAILED}\n{FAILED.replace('1', '0')}\nAbort(1) on node 1", FAILED),
        ("the same\nthe same\nthe same", "the same"),
    ],
)
@pytest.mark.parametrize("debug", [False, True])
def test_made_up_mpirun(monkeypatch, tmp_path, capfd, outside, said, shown, debug):
    """With EINMPI_DEBUG=1, all of what was said comes first."""
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("EINMPI_DEBUG", str(int(debug)))
    assert launcher.launch(2, ["run", "job.toml"]) == 1
    more = "" if f"{shown}\n" in said else f"{shown}\n"
    assert capfd.readouterr() == ("", f"{said}\n{more}" if debug else f"{shown}\n")


BANNERS = {
    "Open MPI 4": (
        f"{DASHES}mpirun noticed that process rank 2 with PID 0 on node vm exited on signal 9 "
        f"(Killed).\n{DASHES}",
        f"einmpi: error: rank 2 was killed by SIGKILL in kernel Z{MEMORY}",
    ),
    "Intel": (
        f"\n{'=' * 83}\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n"
        "=   RANK 1 PID 77 RUNNING AT node\n"
        f"=   KILLED BY SIGNAL: 11 (Segmentation fault)\n{'=' * 83}\n",
        "einmpi: error: rank 1 was killed by SIGSEGV in kernel Y",
    ),
    "no shared memory": (
        "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Bus error (signal 7)\n",
        "einmpi: error: an unidentified rank was killed by SIGBUS; perhaps /dev/shm is full",
    ),
    "several machines": (
        "[mpiexec@a] Exit codes: [a] 0,9 [b] 9\n"
        "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n",
        f"einmpi: error: an unidentified rank was killed by SIGKILL{MEMORY}",
    ),
}


@pytest.mark.parametrize("name", BANNERS)
@pytest.mark.parametrize("piece", [1, 10**6])
def test_banners(capfd, name, piece):
    banner, line = BANNERS[name]
    stream = launch_output.OutputFilter(2, passes_everything=False)
    said = f"one line\n{banner}another line\n".encode()
    for start in range(0, len(said), piece):
        stream.feed(said[start : start + piece])
    stream.end()
    assert capfd.readouterr().err == "one line\nanother line\n"
    empty = launch_output.OutputFilter(1, passes_everything=False)
    records = [notes.RankNote(1, ""), notes.RankNote(2, "kernel Y"), notes.RankNote(3, "kernel Z")]
    assert launch_output.explain_failure(9, empty, stream, [], records) == (line, 1)


def test_text_that_appears_token_by_token_is_not_held_back(capfd):
    stream = launch_output.OutputFilter(1, passes_everything=False)
    stream.feed(b"a list ")
    for token in (b"[", b"mpi", b"]", b" = ", b"="):
        stream.feed(token)
        assert capfd.readouterr().out.endswith(token.decode())
    stream.feed(b"\n[x")
    assert capfd.readouterr().out.endswith("\n[x")
    stream.feed(b"]\n[mpiexec@host] Sending Ctrl-C\n")
    stream.end()
    assert capfd.readouterr().out == "]\n"
    assert stream.launcher_lines == ["[mpiexec@host] Sending Ctrl-C"]


# ---- what ranks do -------------------------------------------------------------------------------


@pytest.fixture
def notes_file(monkeypatch, tmp_path):
    path = tmp_path / "notes"
    path.write_bytes(bytes(3 * notes.RECORD_BYTES))
    monkeypatch.setenv("EINMPI_NOTES", str(path))
    return path


def test_notes(notes_file):
    note = notes.activity_writer(1)
    assert notes.read_notes(notes_file) == [(0, ""), (os.getpid(), ""), (0, "")]
    note("a longer text")
    note("kernel Z")
    assert notes.current_activity() == "kernel Z"
    assert notes.read_notes(notes_file)[1] == (os.getpid(), "kernel Z")
    note("é" * 300)
    assert notes.read_notes(notes_file) == [(0, ""), (os.getpid(), "é" * 123), (0, "")]
    assert notes.current_activity() == "é" * 300


def test_no_notes(monkeypatch, notes_file):
    notes.activity_writer(3)("there is no record for this rank")
    assert notes.read_notes(notes_file) == [(0, "")] * 3
    for path in ("", "/nowhere/notes"):
        monkeypatch.setenv("EINMPI_NOTES", path)
        notes.activity_writer(0)("a text")
        assert notes.current_activity() == "a text"


def test_notes_are_cheap(monkeypatch, notes_file):
    """They are made many times a second: memory is written, and nothing of the system is called."""
    note, called = notes.activity_writer(0), []
    sys.setprofile(
        lambda frame, event, function: called.append(function) if event == "c_call" else None
    )
    try:
        note("kernel Z[i,k] of step 17")
    finally:
        sys.setprofile(None)
    assert {function.__qualname__ for function in called} == {"str.encode", "len", "setprofile"}
    assert notes.read_notes(notes_file)[0] == (os.getpid(), "kernel Z[i,k] of step 17")


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGTERM, "terminated by SIGTERM in kernel Z"),
        (signal.SIGINT, "interrupted in kernel Z"),
    ],
)
def test_signal(monkeypatch, capfd, number, reason):
    # Otherwise a slow machine ends this process, as it should end a rank.
    monkeypatch.setattr(abort, "_ABORT_TIME", 60.0)
    before = signal.signal(number, signal.default_int_handler)
    aborted, statuses = threading.Event(), []
    notes.activity_writer(2)("kernel Z")
    watch = signals.SignalWatch(2, lambda status: (statuses.append(status), aborted.set()))
    try:
        os.kill(os.getpid(), number)
        assert aborted.wait(60)
    finally:
        watch.stop()
    assert signal.signal(number, before) is signal.default_int_handler
    assert signal.set_wakeup_fd(-1) == -1
    assert statuses == [128 + number]
    assert capfd.readouterr() == ("", f"einmpi: error: rank 2: {reason}\n")


def test_undo_gives_back_what_was_taken():
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        signals.SignalWatch(0, print).stop()
        assert "signals" not in {thread.name for thread in threading.enumerate()}
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (EinmpiError("Z: too\n  large"), "Z: too large"),
        (KeyError("k"), "KeyError: 'k'"),
        (MemoryError("no room"), "not enough memory: no room"),
    ],
)
def test_fail(monkeypatch, capfd, error, message):
    monkeypatch.delenv("EINMPI_DEBUG", raising=False)
    monkeypatch.setattr(abort, "_ABORT_TIME", 60.0)
    statuses = []
    notes.activity_writer(1)("kernel Z")
    abort.abort_on_error(1, error, statuses.append)
    assert statuses == [1]
    assert capfd.readouterr().err == f"einmpi: error: rank 1: kernel Z: {message}\n"


HANGS = """
import ctypes, os, signal, sys, time
from einmpi.process import signals
from einmpi.process import signals as abort
hang = ctypes.PyDLL(None).sleep  # keeps Python's lock, as mpi4py's Abort does
abort._ABORT_TIME = 0.3
if sys.argv[1] == "fail":
    abort.abort_on_error(0, ValueError("no"), lambda status: hang(600))
signals.SignalWatch(0, lambda status: hang(600))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("case", "said"), [("fail", "ValueError: no"), ("signal", "terminated by SIGTERM")]
)
def test_abort_hangs(case, said):
    command = [sys.executable, "-c", HANGS, case]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, f"einmpi: error: rank 0: {said}\n")


def test_fail_in_debug(monkeypatch, capfd):
    monkeypatch.setenv("EINMPI_DEBUG", "1")
    monkeypatch.setattr(abort, "_ABORT_TIME", 60.0)
    notes.activity_writer(0)("")
    try:
        raise EinmpiError("Z: too large")
    except EinmpiError as error:
        abort.abort_on_error(0, error, lambda status: None)
    first, *_, last = capfd.readouterr().err.splitlines()
    assert (first, last) == (
        "Traceback (most recent call last):",
        "einmpi: error: rank 0: Z: too large",
    )


@pytest.mark.slow
@needs_mpirun
def test_modules_in_the_current_folder_are_not_imported_by_ranks(tmp_path):
    """Others may be able to write there. `python -m` has it on the path, the command does not."""
    (tmp_path / "job.toml").write_text(
        'program = "Z[i] = A[i] + 1"\ninputs.A = { shape = [4], random = "normal" }\n'
    )
    (tmp_path / "numpy.py").write_text("open('planted', 'w').close()\nraise SystemExit(3)\n")
    command = [sys.executable, "-P", "-m", "einmpi", "run", "job.toml", "-n", "2"]
    done = finished(command, cwd=tmp_path)
    assert not (tmp_path / "planted").exists()
    assert done.returncode == 0, done.stderr
