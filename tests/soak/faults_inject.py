"""Deliver a fault at the k-th step of a rank: a file opened, renamed, locked, written, a kernel.

A rank under mpirun is this file as a program, with the fault in its environment."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAULT_VARIABLE = "SOAK_FAULT"
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_LAUNCHER_VARIABLES = ("PMI", "OMPI_", "PRTE", "MPI_", "HYDI_", "HYDRA_", "EINMPI")
NOTE = "fault-note.json"  # what happened: the step, and the status of a second run
STOP_SECONDS = 0.3
# Steps that Python reports to audit hooks; all but locks have a path.
_AUDITED = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate")
_AUDITED_WITHOUT_PATH = ("fcntl.flock",)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _stop_for_a_while() -> None:
    """Stop this process; a child lets it continue."""
    if os.fork() == 0:
        time.sleep(STOP_SECONDS)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.wait()


def _stop_and_kill() -> None:
    """Stop this process; a child kills it."""
    if os.fork() == 0:
        time.sleep(STOP_SECONDS)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def _fill_disk() -> None:
    """Let every write beyond the end of an empty file fail from now on."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _put_in_place(source: str, target: str) -> None:
    os.rename(source, target)


def _run_meanwhile() -> int:
    """Run another job that writes to the same file; return its status."""
    environment = {}
    for name, value in os.environ.items():
        if not name.startswith((*_LAUNCHER_VARIABLES, FAULT_VARIABLE)):
            environment[name] = value
    command = [sys.executable, "-m", "einmpi", "other.toml", "--quiet"]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=60
    )
    return done.returncode


ACTIONS: dict[str, Callable[[], int | None]] = {
    "kill": _kill,
    "terminate": _terminate,
    "stop": _stop_for_a_while,
    "stop and kill": _stop_and_kill,
    "full disk": _fill_disk,
    "replaced output": lambda: _put_in_place("other-a.h5", "a.h5"),
    "removed output": lambda: os.remove("b.npy"),
    "replaced input": lambda: _put_in_place("other-x.h5", "x.h5"),
    "removed input": lambda: os.remove("x.h5"),
    "second run": _run_meanwhile,
}


class Injector:
    """Counts the steps of this process, and makes the fault happen at one of them."""

    def __init__(self, folder: Path, number: int, action: str) -> None:
        self._folder = str(folder)
        self._number = number
        self._action = action
        self._count = 0

    def step(self, name: str) -> None:
        """Count a step; deliver the fault if its turn has come."""
        self._count += 1
        if self._count != self._number:
            return
        note = {"step": name}
        self._write(note)
        status = ACTIONS[self._action]()
        if status is not None:
            self._write({**note, "second": status})

    def _write(self, note: dict[str, Any]) -> None:
        # Counting has ended: this step is not the fault's.
        path = os.path.join(self._folder, NOTE)
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump(note, file)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _AUDITED_WITHOUT_PATH:
            self.step(event)
        elif event in _AUDITED and isinstance(arguments[0], str | bytes):
            path = os.fsdecode(arguments[0])
            if path.startswith(self._folder) or not path.startswith("/"):
                self.step(f"{event} {os.path.basename(path)}")

    def install(self) -> None:
        """Watch this process from now on."""
        import h5py

        from einmpi.runtime.backend import NumpyBackend

        self._wrap(os, "fsync")
        self._wrap(os, "pwrite")
        self._wrap(os, "pread")
        self._wrap(os, "copy_file_range")
        self._wrap(h5py.File, "__init__")
        self._wrap(h5py.File, "close")
        self._wrap(h5py.Dataset, "read_direct")
        self._wrap(NumpyBackend, "compute_kernel")
        sys.addaudithook(self._audit)

    def _wrap(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.step(name)
            return original(*arguments, **options)

        setattr(owner, name, counted)


def main() -> int:
    """Run einmpi as a rank, with the fault of the environment if it is this rank's."""
    folder, rank, number, action = json.loads(os.environ[FAULT_VARIABLE])
    own_rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0")
    if int(own_rank) == rank:
        Injector(Path(folder), number, action).install()
    from einmpi.cli.main import main as einmpi_main

    return einmpi_main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
