"""A rank that fails, is killed or terminated ends the whole run: soon, with one line, leaving nothing behind."""

import os
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi_helpers import OPEN_MPI, needs_mpirun, run_mpi

pytestmark = [pytest.mark.mpi, needs_mpirun]

# einmpi itself, with a rank that breaks down in its second kernel.
PROGRAM = """
import os, signal, sys, time
from einmpi.runtime.backend import NumpyBackend
from einmpi.runtime.comm_mpi import world

compute, count = NumpyBackend.compute, [0]
def broken(self, step, operands, target):
    count[0] += 1
    if count[0] == 2 and world() is not None and world().rank == 1:
        {what}
    compute(self, step, operands, target)
NumpyBackend.compute = broken
from einmpi.cli import main
sys.exit(main(sys.argv[1:]))
"""
RAISE = "raise ZeroDivisionError('two' + chr(10) + 'lines')"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
TERMINATE = "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"


@pytest.fixture
def job(tmp_path):
    """A job whose output file exists already."""
    (tmp_path / "job.toml").write_text('program = "Y[i,k] = sum(A[i,j] * B[j,k]); m = max(Y[i,k]); '
                                       'Z[i,k] = exp(Y[i,k]) - m"\n'
                                       'inputs.A = { shape = [24, 12], random = "normal" }\n'
                                       'inputs.B = { shape = [12, 24], random = "normal" }\n'
                                       'outputs.Z = "out.h5:/Z"\n')  # fmt: skip
    with h5py.File(tmp_path / "out.h5", "w") as file:
        file["Z"] = np.arange(3)
    return tmp_path / "job.toml"


def processes(marker: str) -> list[str]:
    """Command lines of processes that name the job."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if marker in line and int(entry.name) != os.getpid():
                found.append(line)
    return found


def fails(job, what, *arguments):
    """Run it on three ranks: (its last words, its status); it must be over soon and leave nothing."""
    script = job.parent / "broken.py"
    script.write_text(PROGRAM.format(what=what))
    before, content = time.monotonic(), (job.parent / "out.h5").read_bytes()
    done = run_mpi(3, [str(script), str(job), *arguments])
    assert time.monotonic() - before < 20  # ten of them for a busy machine to start
    assert done.returncode != 0 and done.stdout.count("norm") == 0
    for _ in range(50):
        left = processes(str(job))
        if not left:
            break
        time.sleep(0.1)
    assert not left
    assert (job.parent / "out.h5").read_bytes() == content
    # A rank that was killed cannot tidy up. The lock has gone with its process; the next run removes the file.
    kept = [".out.h5.lock"] if what == KILL else []
    assert sorted({*os.listdir(job.parent), *kept}) == sorted([*kept, "broken.py", "job.toml", "out.h5"])
    return [line for line in done.stderr.splitlines() if line.startswith("einmpi:")], done


def test_a_rank_that_raises(job):
    lines, done = fails(job, RAISE)
    assert len(lines) == 1
    assert lines[0].startswith("einmpi: error: rank 1: kernel ") and lines[0].endswith(": ZeroDivisionError: two lines")
    if not OPEN_MPI:  # whose mpirun adds a block of its own
        assert done.stderr == lines[0] + "\n"


def test_a_rank_that_is_terminated(job):
    lines, _ = fails(job, TERMINATE)
    assert len(lines) == 1
    assert lines[0].startswith("einmpi: error: rank 1: terminated by SIGTERM in kernel ")


def test_a_rank_that_is_killed(job):
    """It cannot say anything; mpirun does, and ends the others."""
    fails(job, KILL)


def test_debug_shows_the_traceback(job, monkeypatch):
    script = job.parent / "broken.py"
    script.write_text(PROGRAM.format(what=RAISE))
    done = run_mpi(3, [str(script), str(job)], env={"EINMPI_DEBUG": "1"})
    assert "Traceback" in done.stderr and "ZeroDivisionError: two" in done.stderr


def test_different_job_files_on_two_ranks(job):
    """Before anything moves: one line, from rank 0."""
    other = job.parent / "other.toml"
    other.write_text(job.read_text().replace("exp", "tanh"))
    code = ("import sys; from mpi4py import MPI; from einmpi.cli import main\n"
            f"sys.exit(main([{str(other)!r} if MPI.COMM_WORLD.rank == 2 else {str(job)!r}]))")  # fmt: skip
    done = run_mpi(3, code)
    assert done.returncode != 0 and done.stdout == ""
    assert [line for line in done.stderr.splitlines() if line.startswith("einmpi:")] == [
        "einmpi: rank 2 has another command, job or version of einmpi than rank 0; all ranks must do the same"
    ]


def test_a_job_file_that_one_rank_cannot_read(job):
    code = ("import sys; from mpi4py import MPI; from einmpi.cli import main\n"
            f"sys.exit(main(['none.toml' if MPI.COMM_WORLD.rank == 1 else {str(job)!r}]))")  # fmt: skip
    done = run_mpi(3, code)
    assert (done.returncode != 0, done.stdout) == (True, "")
    lines = [line for line in done.stderr.splitlines() if "none.toml" in line]
    assert lines == ["none.toml: there is no such file; a job file in TOML (on rank 1)"]


@pytest.mark.parametrize("other", [["--repeat", "2"], ["--help"], ["--quiet"]])
def test_different_command_lines_on_two_ranks(job, other):
    code = ("import sys; from mpi4py import MPI; from einmpi.cli import main\n"
            f"sys.exit(main([{str(job)!r}] + ({other!r} if MPI.COMM_WORLD.rank == 1 else [])))")  # fmt: skip
    done = run_mpi(2, code)
    assert done.returncode != 0
    assert [line for line in done.stderr.splitlines() if line.startswith("einmpi:")] == [
        "einmpi: rank 1 has another command, job or version of einmpi than rank 0; all ranks must do the same"
    ]
