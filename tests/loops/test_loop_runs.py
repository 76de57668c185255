"""Loops of real processes: the command line, kills at any step, signals, other numbers of ranks."""

import json
import random
import shutil
import subprocess
import sys

import h5py
import numpy as np
import pytest
from mpi_helpers import environment, needs_mpirun, run_mpi

JOB = """
title = "Jacobi"
program = '''
u_next[i,j] = where((i > 0) & (i < n-1) & (j > 0) & (j < n-1),
                    (u[i-1,j] + u[i+1,j] + u[i,j-1] + u[i,j+1]) / 4, u[i,j])
change = max(abs(u_next[i,j] - u[i,j]))
'''
sizes = { n = 24 }
inputs.u = { shape = ["n", "n"], random = "uniform", seed = 1 }
outputs.u = "out.h5:/u"
[loop]
steps = 120
carry = { u = "u_next" }
record = ["change"]
history = "history.csv"
"""
# einmpi itself; something happens on rank 0 before the row of a step is written.
PROGRAM = """
import os, signal, sys
from einmpi.loops.history import CsvHistory

append = CsvHistory.append
def special(self, step, row):
    if step == {step} and {which}:
        os.kill(os.getpid(), signal.{signal})
    append(self, step, row)
CsvHistory.append = special
from einmpi.cli.main import main
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


def alone(folder, *arguments):
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)


def result(folder):
    with h5py.File(folder / "out.h5") as file:
        return file["u"][...]


@pytest.mark.slow
def test_the_command_line(folder):
    done = alone(folder, "-m", "einmpi", "job.toml", "--json", "found.json")
    assert done.returncode == 0, done.stderr
    data = json.loads((folder / "found.json").read_text())
    assert data["loop"]["steps"] == 120 and len(data["loop"]["history"]["change"]) == 120
    rows = (folder / "history.csv").read_text().split("\n")
    assert rows[0] == "step,change" and len(rows) == 122
    # The file has all digits.
    written = [float(row.split(",")[1]) for row in rows[1:-1]]
    assert written == data["loop"]["history"]["change"]
    verified = alone(folder, "-m", "einmpi", "verify", "job.toml", "-n", "3")
    assert verified.returncode == 0 and "agrees" in verified.stdout, verified.stderr


@pytest.mark.slow
@needs_mpirun
@pytest.mark.mpirun
def test_moved_as_planned_under_mpirun(folder):
    done = run_mpi(3, ["-m", "einmpi", "job.toml", "--json", "found.json"], cwd=folder)
    assert done.returncode == 0, done.stderr
    data = json.loads((folder / "found.json").read_text())
    assert data["bytes_moved"] == data["bytes_predicted"] > 0
    assert data["bytes_predicted"] == 120 * data["loop"]["bytes_a_step"]


@pytest.mark.slow
@needs_mpirun
@pytest.mark.mpirun
def test_updates_in_place_under_mpirun(folder):
    """Several ranks copy halos and write over the old values; one rank needs both."""
    lines = JOB.splitlines()
    kept = [line for line in lines if not line.startswith(("change", "record", "history"))]
    (folder / "job.toml").write_text("\n".join(kept))
    assert alone(folder, "-m", "einmpi", "job.toml").returncode == 0
    expected = result(folder)
    done = run_mpi(3, ["-m", "einmpi", "job.toml", "--json", "found.json"], cwd=folder)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(result(folder), expected)
    data = json.loads((folder / "found.json").read_text())
    assert data["bytes_moved"] == data["bytes_predicted"] > 0
    plan = alone(folder, "-m", "einmpi", "plan", "job.toml", "-n", "3")
    assert "in place     u" in plan.stdout


FAILING = """
program = '''
at[i:30000] = where((step == 5) & (i == 25000), 99, 0)
y[i] = 0.5 * x[i] + T[at[i]]
t = sum(y[i]**2)
r = sqrt(t)
'''
inputs.x = { shape = [30000], random = "uniform" }
inputs.T = { shape = [4], random = "uniform" }
[loop]
steps = 2000
carry = { x = "y" }
until = "r < 1e-3"
"""


@pytest.mark.mpirun
def test_one_rank_fails_where_values_end_the_loop(folder):
    """r is 0 on the rank that fails, and not on the others: they must not wait for each other."""
    (folder / "job.toml").write_text(FAILING)
    done = run_mpi(3, ["-m", "einmpi", "job.toml"], cwd=folder)
    assert done.returncode != 0
    message = "y: an index from 0 to 99 is out of range; expected 0 to 3"
    lines = [line for line in done.stderr.splitlines() if message in line]
    assert len(lines) == 1, done.stderr


@pytest.mark.slow
@needs_mpirun
@pytest.mark.mpirun
def test_kills_at_random_steps(folder):
    """The result has the bits of a run that was never stopped; the history has each row once."""
    whole = run_mpi(2, ["-m", "einmpi", "job.toml"], cwd=folder)
    assert whole.returncode == 0, whole.stderr
    wanted = result(folder)
    history = (folder / "history.csv").read_bytes()
    (folder / "out.h5").unlink()
    flags = ["job.toml", "--checkpoint", "saved", "--every", "7steps", "--resume"]
    for step in sorted(random.Random(18).sample(range(120), 5)):
        text = PROGRAM.format(step=step, which="True", signal="SIGKILL")
        (folder / "killed.py").write_text(text)
        killed = run_mpi(2, ["killed.py", *flags], cwd=folder)
        assert killed.returncode != 0
        assert not (folder / "out.h5").exists()
    resumed = run_mpi(2, ["-m", "einmpi", *flags], cwd=folder)
    assert resumed.returncode == 0, resumed.stderr
    assert result(folder).tobytes() == wanted.tobytes()
    assert (folder / "history.csv").read_bytes() == history
    assert not list((folder / "saved").glob("0*"))


IN_PLACE = """
program = '''
P[b,j]      = sum(X[b,i] * W[i,j])
W_next[i,j] = W[i,j] - 0.01 * sum(X[b,i] * P[b,j])
u_next[i]   = where((i > 0) & (i < n-1), (u[i-1] + u[i+1]) / 2, u[i])
c_next[t,j] = where(t == at, P[0,j], c[t,j])
at_next     = at + 1
m_next[j]   = m[j] + step
loss        = sum(P[b,j]**2)
'''
sizes = { n = 24 }
[inputs]
X  = { shape = [5, "n"], random = "normal", seed = 1 }
W  = { shape = ["n", 7], random = "normal", seed = 2 }
u  = { shape = ["n"], random = "uniform", seed = 3 }
c  = { shape = [16, 7], random = "zeros" }
at = { shape = [], random = "zeros", dtype = "int64" }
m  = { shape = [7], random = "zeros", dtype = "int64" }
[outputs]
W = "out.h5:/W"
u = "out.h5:/u"
c = "out.h5:/c"
at = "out.h5:/at"
m = "out.h5:/m"
[loop]
steps = 40
carry = { W = "W_next", u = "u_next", c = "c_next", at = "at_next", m = "m_next" }
record = ["loss"]
history = "history.csv"
"""


@pytest.mark.slow
@needs_mpirun
@pytest.mark.mpirun
def test_a_loop_that_updates_in_place_is_killed_and_resumed(folder):
    """What a checkpoint has is what the step has written over; nothing of an older one is used."""
    (folder / "job.toml").write_text(IN_PLACE)
    names = ("W", "u", "c", "at", "m")
    plan = alone(folder, "-m", "einmpi", "plan", "job.toml", "-n", "3")
    (line,) = [line for line in plan.stdout.splitlines() if line.startswith("in place")]
    assert line.split(";")[0].split(maxsplit=2)[2] == "W, c, m"

    def results():
        with h5py.File(folder / "out.h5") as file:
            return {name: file[name][()] for name in names}

    whole = run_mpi(3, ["-m", "einmpi", "job.toml"], cwd=folder)
    assert whole.returncode == 0, whole.stderr
    wanted = results()
    history = (folder / "history.csv").read_bytes()
    (folder / "out.h5").unlink()
    flags = ["job.toml", "--checkpoint", "saved", "--every", "5steps", "--resume"]
    for step in (6, 11, 33):
        (folder / "killed.py").write_text(PROGRAM.format(step=step, which="True", signal="SIGKILL"))
        killed = run_mpi(3, ["killed.py", *flags], cwd=folder)
        assert killed.returncode != 0
    shutil.copytree(folder / "saved", folder / "copy")
    resumed = run_mpi(3, ["-m", "einmpi", *flags], cwd=folder)
    assert resumed.returncode == 0, resumed.stderr
    for name, array in results().items():
        assert array.tobytes() == wanted[name].tobytes(), name
    assert (folder / "history.csv").read_bytes() == history
    flags[2] = "copy"
    elsewhere = alone(folder, "-m", "einmpi", *flags)
    assert elsewhere.returncode == 0, elsewhere.stderr
    for name, array in results().items():
        np.testing.assert_allclose(array, wanted[name], rtol=1e-11, atol=1e-12, err_msg=name)


@pytest.mark.slow
def test_a_signal_stops_a_loop_that_continues_on_more_ranks(folder):
    whole = alone(folder, "-m", "einmpi", "job.toml")
    assert whole.returncode == 0, whole.stderr
    wanted = result(folder)
    rows = (folder / "history.csv").read_text().split("\n")
    (folder / "stopped.py").write_text(PROGRAM.format(step=9, which="True", signal="SIGTERM"))
    flags = ["job.toml", "--checkpoint", "saved", "--resume"]
    stopped = alone(folder, "stopped.py", *flags)
    assert stopped.returncode == 75, stopped.stderr
    assert "SIGTERM: stopped after step" in stopped.stderr
    more = alone(folder, "-m", "einmpi", "run", *flags, "-n", "3")
    assert more.returncode == 0, more.stderr
    # The same operations in another order of ranks; maxima and stencils do not round differently.
    np.testing.assert_array_equal(result(folder), wanted)
    assert (folder / "history.csv").read_text().split("\n") == rows


def test_a_history_that_cannot_be_written(folder):
    (folder / "history.csv").mkdir()
    done = alone(folder, "-m", "einmpi", "job.toml")
    assert done.returncode == 2
    assert done.stderr == "job.toml:15:1: history.csv is a folder; expected a file to write\n"
    assert not (folder / "out.h5").exists()


def test_a_loop_is_not_repeated(folder):
    done = alone(folder, "-m", "einmpi", "job.toml", "--repeat", "2")
    assert done.returncode == 2
    assert done.stderr == "--repeat: the job has a loop; expected --steps to run more steps\n"
    assert not (folder / "out.h5").exists()
