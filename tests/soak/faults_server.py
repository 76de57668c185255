"""A process that has imported einmpi and forks a rank, or a whole run, for each request.

`python -m tests.soak.faults_server SOCKET`: the start of an interpreter takes longer than a run."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import io
import json
import os
import select
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from einmpi.cli.main import main as einmpi_main

from .faults_files import make_template
from .faults_inject import run_as_rank
from .fuzz import clean_environment


def serve(path: str) -> int:
    """Answer requests until standard input ends; return the status of a rank in its process."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(0, select.POLLIN)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no child is waited for
    print("ready", flush=True)
    while True:
        ready = [descriptor for descriptor, _ in poll.poll()]
        if 0 in ready:
            return 0
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return _answer(connection)
        connection.close()


def _answer(connection: socket.socket) -> int:
    """Start what is asked for and follow it, in a process of its own."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 16)
    line = connection.makefile("rb").readline()
    if not line:
        os._exit(1)
    message = json.loads(line)
    pid = os.fork()
    if pid == 0:
        connection.close()
        _become(message, descriptors)
        status = run_as_rank(message["words"])
        _end_quickly(status)
    for descriptor in {0, 1, 2, *descriptors}:
        os.close(descriptor)
    with contextlib.suppress(OSError):  # a client that is gone already
        connection.sendall(b"%d\n" % pid)
    own_poll = select.poll()
    own_poll.register(connection, select.POLLIN)
    own_poll.register(os.pidfd_open(pid), select.POLLIN)
    ready = [descriptor for descriptor, _ in own_poll.poll()]
    if connection.fileno() in ready:  # the client is gone
        os.kill(pid, signal.SIGKILL)
    _, wait_status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(wait_status))
    os._exit(0)


def _end_quickly(status: int) -> NoReturn:
    """End as an interpreter does, but without taking apart everything that the server has."""
    atexit._run_exitfuncs()
    if "mpi4py.MPI" in sys.modules:
        mpi = sys.modules["mpi4py.MPI"]
        if mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.Finalize()
    ctypes.CDLL(None).exit(status)  # MPICH takes leave of mpirun only here
    raise AssertionError("the process goes on")


def _warm_up() -> None:
    """Run a job, after which this process has imported and compiled what runs need."""
    with tempfile.TemporaryDirectory() as folder:
        make_template(Path(folder, "case"))
        os.chdir(Path(folder, "case"))
        saved = ["--checkpoint", "saved", "--every", "0", "--resume"]
        for words in (["job.toml", *saved], ["other.toml"], ["reading.toml"]):
            assert einmpi_main(["run", *words, "--quiet"]) == 0
    os.chdir("/")
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not survive a fork"


def _become(message: dict[str, Any], descriptors: list[int]) -> None:
    """Take over the environment, the folder and the descriptors of the client."""
    numbers = message["descriptors"]
    # None of the received descriptors may have a number that another one will get.
    above = max(*numbers, *descriptors) + 1
    moved = []
    for place, descriptor in enumerate(descriptors):
        moved.append(os.dup2(descriptor, above + place))
        os.close(descriptor)
    for number, descriptor in zip(numbers, moved, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(message["environment"])
    # The system still shows the environment of the server: a fork is known by its name.
    Path("/proc/self/comm").write_text(message["environment"].get("MARK", "rank"))
    os.chdir(message["folder"])
    faulthandler.disable()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8", write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), "utf-8", write_through=True)


if __name__ == "__main__":
    clean_environment()
    _warm_up()
    sys.exit(serve(sys.argv[1]))
