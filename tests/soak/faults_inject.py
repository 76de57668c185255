"""Deliver a fault at the k-th step of a rank: a file opened, renamed, locked, a message, a kernel.

The fault is in the environment of all ranks."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tests.soak import faults_client, faults_volume

FAULT_VARIABLE = "SOAK_FAULT"
RANK_COMMAND_VARIABLE = "SOAK_RANK_COMMAND"  # how to start a rank, in JSON
# A rank is a fork of a server, or, which takes longer, an interpreter of its own.
FORKED_RANK = (sys.executable, "-I", "-S", faults_client.__file__)
NEW_RANK = (sys.executable, "-m", "tests.soak.faults_inject")
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_LAUNCHER_VARIABLES = ("PMI", "OMPI_", "PRTE", "MPI_", "HYDI_", "HYDRA_", "EINMPI")
NO_STEP = 10**9  # the number of a fault that never happens
STOP_SECONDS = 0.3
SECOND_RUN_SECONDS = 60
# Steps that Python reports to audit hooks; all but locks have a path.
_AUDITED = (
    "open",
    "os.chmod",
    "os.link",
    "os.listdir",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.truncate",
)
_AUDITED_WITHOUT_PATH = ("fcntl.flock",)
_MESSAGES = (
    "alltoallv",
    "allgatherv",
    "reduce_scatter",
    "sendrecv",
    "lowest",
    "compare",
    "barrier",
)
# What a step belongs to, by the innermost module at work that is one of these.
_PHASES = {
    "einmpi/checkpoint/folder": "checkpoint",
    "einmpi/checkpoint/save": "checkpoint",
    "einmpi/checkpoint/load": "checkpoint",
    "einmpi/files/writing": "store",
    "einmpi/files/hdf5/writing": "store",
    "einmpi/files/journal": "store",
    "einmpi/files/claims": "store",
    "einmpi/compiled/outputs": "store",
    "einmpi/files/reading": "load",
    "einmpi/files/datasets": "load",
    "einmpi/files/hdf5/datasets": "load",
    "einmpi/compiled/inputs": "load",
    "einmpi/job/": "load",
    "einmpi/runtime/": "run",
}


@dataclass(frozen=True)
class Fault:
    """One fault: what happens, on which rank, and at which of its steps."""

    action: str
    rank: int
    number: int
    folder: str  # of the case; the file system's own folder is above it
    error_trigger: str  # a file of the kernel that makes the disk fail
    command: list[str]  # of the run, as one process would have it
    note_path: str


def text_of(fault: Fault) -> str:
    return json.dumps(asdict(fault))


# ---- processes ----------------------------------------------------------------------------------


def _kill(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _terminate(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _stop_for_a_while(fault: Fault) -> None:
    """Stop this process; a child lets it continue."""
    if os.fork() == 0:
        time.sleep(STOP_SECONDS)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.wait()


def _stop_and_kill(fault: Fault) -> None:
    """Stop this process; a child kills it."""
    if os.fork() == 0:
        time.sleep(STOP_SECONDS)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


# ---- disks --------------------------------------------------------------------------------------


def _limit_size(fault: Fault) -> None:
    """Let every write beyond the end of an empty file fail from now on."""
    sys.dont_write_bytecode = True  # a module that is imported later would leave an empty file
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _fill_disk(fault: Fault) -> None:
    faults_volume.fill_bytes(os.path.dirname(fault.folder))


def _use_up_files(fault: Fault) -> None:
    faults_volume.fill_files(os.path.dirname(fault.folder))


def _turn_read_only(fault: Fault) -> None:
    faults_volume.break_disk(fault.error_trigger)


def _mount_read_only(fault: Fault) -> None:
    faults_volume.mount_read_only(fault.folder)


# ---- files --------------------------------------------------------------------------------------


def _replace_output(fault: Fault) -> None:
    os.rename(f"{fault.folder}/other-a.h5", f"{fault.folder}/a.h5")


def _remove_output(fault: Fault) -> None:
    os.remove(f"{fault.folder}/b.npy")


def _replace_input(fault: Fault) -> None:
    os.rename(f"{fault.folder}/other-x.h5", f"{fault.folder}/x.h5")


def _remove_input(fault: Fault) -> None:
    os.remove(f"{fault.folder}/x.h5")


def _remove_hidden(fault: Fault) -> None:
    """Remove drafts, locks and journals, as somebody might who tidies up."""
    for path in Path(fault.folder).glob(".*"):
        with contextlib.suppress(OSError):
            path.unlink()


def _remove_checkpoint(fault: Fault) -> None:
    for path in Path(fault.folder, "saved").glob("*"):
        shutil.rmtree(path, ignore_errors=True)


def _replace_checkpoint(fault: Fault) -> None:
    """Replace the files of checkpoints by others of the same size."""
    for path in Path(fault.folder, "saved").glob("*/*"):
        size = path.stat().st_size
        other = path.with_name("other")
        other.write_bytes(b"7" * size)
        other.rename(path)


# ---- runs ---------------------------------------------------------------------------------------


def _run_meanwhile(words: list[str]) -> dict[str, Any]:
    """Run a command from beginning to end; return its status and what it says."""
    environment = {}
    for name, value in os.environ.items():
        if not name.startswith((*_LAUNCHER_VARIABLES, FAULT_VARIABLE)):
            environment[name] = value
    with tempfile.TemporaryFile(dir="/dev/shm") as out, open(os.devnull) as devnull:
        descriptors = {0: devnull.fileno(), 1: out.fileno(), 2: out.fileno()}
        answers, _ = faults_client.request(environment, words, descriptors, os.getcwd())
        answers.raw._sock.settimeout(SECOND_RUN_SECONDS)
        status = int(answers.readline())
        out.seek(0)
        return {"second": status, "second said": out.read().decode()}


def _run_other_job(fault: Fault) -> dict[str, Any]:
    return _run_meanwhile(["run", f"{fault.folder}/other.toml", "--quiet"])


def _run_same_job(fault: Fault) -> dict[str, Any]:
    found = _run_meanwhile(fault.command)
    return {"same": found["second"], "second said": found["second said"]}


ACTIONS: dict[str, Callable[[Fault], dict[str, Any] | None]] = {
    "kill": _kill,
    "terminate": _terminate,
    "stop": _stop_for_a_while,
    "stop and kill": _stop_and_kill,
    "size limit": _limit_size,
    "full disk": _fill_disk,
    "no more files": _use_up_files,
    "read-only disk": _turn_read_only,
    "read-only mount": _mount_read_only,
    "replaced output": _replace_output,
    "removed output": _remove_output,
    "replaced input": _replace_input,
    "removed input": _remove_input,
    "removed drafts": _remove_hidden,
    "replaced checkpoint": _replace_checkpoint,
    "removed checkpoint": _remove_checkpoint,
    "second run": _run_other_job,
    "same run twice": _run_same_job,
}
ON_VOLUME = ("full disk", "no more files", "read-only mount")
ON_DISK = ("read-only disk",)
OF_PROCESSES = ("kill", "terminate", "stop", "stop and kill", "size limit")  # on one rank
OF_CHECKPOINTS = ("replaced checkpoint", "removed checkpoint")


# ---- steps --------------------------------------------------------------------------------------


class Injector:
    """Counts the steps of this process, and makes the fault happen at one of them."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._count = 0
        self._steps: list[tuple[str, str]] = []  # their phases and names, if nothing happens
        self._pid = os.getpid()

    def step(self, name: str) -> None:
        """Count a step; deliver the fault if its turn has come."""
        if os.getpid() != self._pid:  # a process that this one has started
            return
        self._count += 1
        if self._fault.number == NO_STEP:
            self._steps.append((_current_phase(), name))
        if self._count != self._fault.number:
            return
        note = {"step": name, "phase": _current_phase()}
        self._write(note)
        found = ACTIONS[self._fault.action](self._fault)
        if found is not None:
            self._write({**note, **found})

    def write_steps(self) -> None:
        """Note which steps there were."""
        if self._fault.number == NO_STEP:
            self._write({"steps": self._steps})

    def _write(self, note: dict[str, Any]) -> None:
        # Counting has ended: this step is not the fault's.
        with contextlib.suppress(OSError), open(self._fault.note_path, "w") as file:
            json.dump(note, file)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _AUDITED_WITHOUT_PATH:
            self.step(event)
        elif event in _AUDITED and isinstance(arguments[0], str | bytes):
            path = os.fsdecode(arguments[0])
            if path.startswith(self._fault.folder) or not path.startswith("/"):
                self.step(f"{event} {_plain_name(path)}")

    def install(self) -> None:
        """Watch this process from now on."""
        import h5py

        from einmpi.comm.mpi import MpiComm
        from einmpi.runtime.cpu.backend import NumpyBackend

        self._wrap(os, "fsync")
        self._wrap(os, "ftruncate")
        self._wrap(os, "pwrite")
        self._wrap(os, "pread")
        self._wrap(os, "copy_file_range")
        self._wrap(h5py.File, "__init__")
        self._wrap(h5py.File, "close")
        self._wrap(h5py.Dataset, "read_direct")
        self._wrap(NumpyBackend, "compute_kernel")
        for name in _MESSAGES:
            self._wrap(MpiComm, name)
        sys.addaudithook(self._audit)
        self.step("start")

    def _wrap(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.step(name)
            return original(*arguments, **options)

        setattr(owner, name, counted)


def _plain_name(path: str) -> str:
    """Return the last part of a path, without what is random in it."""
    parts = os.path.basename(path).split(".")
    return ".".join("*" if len(part) == 16 and part.isalnum() else part for part in parts)


def _current_phase() -> str:
    """Return what the run is doing: load, run, store, checkpoint, or start and end."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        for part, phase in _PHASES.items():
            if part in frame.f_code.co_filename:
                return phase
        frame = frame.f_back
    return "start and end"


def run_as_rank(words: list[str]) -> int:
    """Run einmpi as a rank or as a launcher; the fault of the environment is that of one rank."""
    from einmpi.cli import launcher
    from einmpi.cli.main import main as einmpi_main

    if "run" in words:
        words = words[words.index("run") :]  # without "-m einmpi"
    if "-n" in words:
        rank_command = json.loads(os.environ[RANK_COMMAND_VARIABLE])
        launcher.python_command = lambda: rank_command
        return einmpi_main(words)
    injector = None
    if FAULT_VARIABLE in os.environ:
        fault = Fault(**json.loads(os.environ[FAULT_VARIABLE]))
        own_rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0")
        if int(own_rank) == fault.rank:
            injector = Injector(fault)
            injector.install()
    status = einmpi_main(words)
    if injector is not None:
        injector.step("end")
        injector.write_steps()
    return status


if __name__ == "__main__":
    sys.exit(run_as_rank(sys.argv[1:]))
