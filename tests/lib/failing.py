"""Runs of three ranks of which one fails, in every way, and what must hold at their end."""

import os
import re
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
from mpi_helpers import STARTS

RANKS = 3
START_LIMIT = 4  # seconds to wait for a rank that does not start
MOST = 90  # seconds from the failure to the end: it takes two or three, and slow machines are slow

# einmpi itself; rank 1 breaks down before it starts, or in its second kernel.
PROGRAM = """
import os, sys, time
names = ("PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
rank = int(next(os.environ[name] for name in names if name in os.environ))

def now(code):
    with open(os.environ["FAILED_AT"], "w") as file:
        file.write(str(time.time()))
    exec(code)

def wait_for_the_others():
    # Until they have computed their share of m, and wait for that of this rank.
    while not all(os.path.exists(f"other/rank-{other}") for other in (0, 2)):
        time.sleep(0.01)
    time.sleep(0.1)

if rank == 1:
    exec(os.environ["AT_START"])
from einmpi.runtime.cpu.backend import NumpyBackend

compute, count = NumpyBackend.compute_kernel, [0]
def broken(self, *arguments):
    count[0] += 1
    if count[0] == 2 and rank == 1 and os.environ["IN_KERNEL"]:
        now(os.environ["IN_KERNEL"])
    compute(self, *arguments)
    if count[0] == 2:
        open(f"other/rank-{rank}", "w").close()
NumpyBackend.compute_kernel = broken
from einmpi.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
KERNEL = r"einmpi: error: rank 1: kernel m\[\].*"
WHO = "(rank 1|ranks .*) of 3|1 of the 2 ranks of n1"  # Slurm does not say which ranks a node has
MISSING = (
    f"einmpi: error: rank .: ({WHO}) ha(s|ve) not started after {START_LIMIT} s; "
    "EINMPI_START_TIMEOUT sets .*"
)
# What goes wrong at the start or in a kernel, and the one line; None if only the launcher prints.
FAILURES = {
    "exception": (
        "",
        "raise ZeroDivisionError('two' + chr(10) + 'lines')",
        f"{KERNEL}: ZeroDivisionError: two lines",
    ),
    "killed": (
        "",
        "import signal; wait_for_the_others(); os.kill(os.getpid(), signal.SIGKILL)",
        None,
    ),
    "terminated": (
        "",
        "import signal; os.kill(os.getpid(), signal.SIGTERM); time.sleep(600)",
        r"einmpi: error: rank 1: terminated by SIGTERM in kernel m\[\].*",
    ),
    "memory": (
        "",
        "import resource, numpy\n"
        "held = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (held + 2**26,) * 2)\n"
        "numpy.ones(2**28)",
        f"{KERNEL}: m: Unable to allocate 2.00 GiB .*",
    ),
    "disk": (
        "",
        # A module that is imported later would leave a part of its bytecode.
        "import resource; sys.dont_write_bytecode = True\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))",
        r"job.toml:\d+:\d+: out.h5 cannot be written: .*too large; "
        r"out.h5 is unchanged \(on rank 1\)",
    ),
    "missing": ("now('import signal; os.kill(os.getpid(), signal.SIGSTOP)')", "", MISSING),
    "version": (
        "import types; sys.modules['einmpi.version'] = types.SimpleNamespace(__version__='0.0.1')",
        "",
        "einmpi: rank 1 has version 0.0.1, rank 0 has .*; all ranks must have the same",
    ),
    "job": (
        "sys.argv[1] = 'other/job.toml'",
        "",
        "einmpi: rank 1 has another command, job, BLAS or version of einmpi than rank 0; "
        "all ranks must do the same",
    ),
    "no job": (
        "sys.argv[1] = 'none.toml'",
        "",
        r"none.toml: there is no such file; expected a job file in TOML \(on rank 1\)",
    ),
}


def fail(
    folder: Path, name: str, start: Callable[["Failing"], subprocess.CompletedProcess[str]]
) -> tuple["Failing", subprocess.CompletedProcess[str]]:
    """Start a run that is made to fail, and return it and its end.

    If its launcher broke down before that, start it again in a fresh folder. A run in which the
    failure did happen is never repeated, whatever its end.
    """
    for attempt in range(STARTS):
        fresh = folder / f"attempt-{attempt}"
        fresh.mkdir()
        run = Failing(fresh, name)
        done = start(run)
        if run.happened():
            break
    return run, done


class Failing:
    """A folder with a job whose output exists, and a failing run of it with marked processes."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, (at_start, in_kernel, self.line) = folder, FAILURES[name]
        self.mark = f"MARK={uuid.uuid4()}"
        self.killed = name == "killed"
        self.noted = bool(in_kernel) or "now" in at_start
        job = (
            'program = "Y[i,k] = sum(A[i,j] * B[j,k]); m = max(Y[i,k]); Z[i,k] = exp(Y[i,k]) - m"\n'
            'inputs.A = { shape = [96, 12], random = "uniform" }\n'
            'inputs.B = { shape = [12, 96], random = "uniform" }\n'
            'outputs.Z = "out.h5:/Z"\n'
        )
        (folder / "other").mkdir()
        (folder / "job.toml").write_text(job)
        (folder / "other/job.toml").write_text(job.replace("exp", "tanh"))
        (folder / "failing.py").write_text(PROGRAM)
        with h5py.File(folder / "out.h5", "w") as file:
            file["Z"] = np.arange(3)
        self.content = (folder / "out.h5").read_bytes()
        self.files = sorted(os.listdir(folder))
        start_limit = START_LIMIT if self.line == MISSING else 60
        self.environment = {
            "AT_START": at_start,
            "IN_KERNEL": in_kernel,
            "FAILED_AT": str(folder / "failed-at"),
            "EINMPI_START_TIMEOUT": str(start_limit),
            "MARK": self.mark.partition("=")[2],
        }

    def check(self, status: int, out: str, err: str) -> None:
        """Check a run that has ended: in time, with one line, no process left, no file changed."""
        assert self.happened(), f"the run ended before anything was made to fail: {out}{err}"
        took = self.took()
        assert status != 0 and "norm" not in out, (status, out)
        lines = [
            line for line in err.splitlines() if re.match(r"einmpi|job\.toml|none\.toml", line)
        ]
        assert len(lines) <= 1, err
        assert lines or self.line is None, f"no line of einmpi: {err}"
        assert not lines or self.line is not None, err
        assert all(re.fullmatch(self.line, line) for line in lines), lines
        assert took < MOST + (START_LIMIT if self.line == MISSING else 0)
        deadline = time.monotonic() + MOST  # launchers do not wait for those that they kill
        while self.living() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not self.living()
        assert (self.folder / "out.h5").read_bytes() == self.content
        # A killed rank cannot clean up. The lock is gone with its process; the next run removes the
        # file.
        kept = {"failed-at", *([".out.h5.lock"] if self.killed else [])}
        assert {*os.listdir(self.folder)} - kept == {*self.files}

    def happened(self) -> bool:
        """Whether the rank has reached the place where it is made to fail."""
        return not self.noted or (self.folder / "failed-at").exists()

    def took(self) -> float:
        """Return the seconds since the failure; 0 for a wrong job, which has no such moment."""
        note = self.folder / "failed-at"
        return time.time() - float(note.read_text()) if self.noted else 0.0

    def living(self) -> list[str]:
        """The processes with the mark in their environment, but for those that have ended."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(folder.name)
            except OSError:
                continue
        return found
