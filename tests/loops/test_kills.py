"""Ranks of real runs are killed at any time: what continues has the bits of a run that was not."""

import os
import random
import signal
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest
from mpi_helpers import MPIRUN, environment, needs_mpirun, run_mpi

JOB = """
program = '''
P[b,j]      = sum(X[b,i] * W[i,j]) * where(b < rows, 1.0, 0.0)
W_next[i,j] = W[i,j] - 0.001 * sum(X[b,i] * P[b,j]) + 1e-3 * step / (step + 1)
c_next[t,j] = where(t == step % 16, P[0,j], c[t,j])
m_next[j]   = m[j] + step * (epoch + 1)
loss        = sum(P[b,j]**2) / rows
'''
[inputs]
X = {{ file = "train.h5", dataset = "/X", batch = 8 }}
W = {{ shape = [24, 6], random = "normal", seed = 2 }}
c = {{ shape = [16, 6], random = "zeros" }}
m = {{ shape = [6], random = "zeros", dtype = "int64" }}
[outputs]
W = "out.h5:/W"
c = "out.h5:/c"
m = "out.h5:/m"
[loop]
steps   = {steps}
shuffle = 7
last    = "pad"
carry   = {{ W = "W_next", c = "c_next", m = "m_next" }}
record  = ["loss"]
history = "history.h5:/run"
"""

# Each rank leaves its process id, so that it can be killed alone.
RANK = """
import os, sys
from einmpi.cli.main import main

open(f"pids/{os.getpid()}", "w").close()
sys.exit(main(sys.argv[1:]))
"""


def write_job(folder, steps):
    (folder / "job.toml").write_text(JOB.format(steps=steps))


def checkpoints(folder):
    return sorted(int(path.name) for path in (folder / "saved").glob("[0-9]*"))


def kill_ranks(folder, ranks, kills, flags, times):
    """Start a run again and again, and kill one of its ranks; return how often it was still there.

    Some are killed while they start, most of them after they have saved something.
    """
    killed = 0
    for _ in range(kills):
        before = checkpoints(folder)
        for path in (folder / "pids").iterdir():
            path.unlink()
        with subprocess.Popen(
            [str(MPIRUN), "-n", str(ranks), sys.executable, "rank.py", *flags],
            cwd=folder,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            while len(os.listdir(folder / "pids")) < ranks and process.poll() is None:
                time.sleep(0.01)
            if times.random() < 0.8:
                deadline = time.monotonic() + 120
                while checkpoints(folder)[-1:] == before[-1:] and time.monotonic() < deadline:
                    time.sleep(0.005)
            time.sleep(times.uniform(0.0, 0.3))
            one = int(times.choice(sorted(os.listdir(folder / "pids"))))
            if process.poll() is None:
                os.kill(one, signal.SIGKILL)
                killed += 1
            assert process.wait(300) != 0
    return killed


def results(folder):
    with h5py.File(folder / "out.h5") as file:
        found = {name: file[name][()].tobytes() for name in ("W", "c", "m")}
    with h5py.File(folder / "history.h5") as file:
        rows = file["run"][()]
    return found, rows


def check_kills(folder, ranks, kills, seed=18):
    """Kill ranks, let a run continue to its end, and compare it with one that was not killed."""
    (folder / "pids").mkdir()
    with h5py.File(folder / "train.h5", "w") as file:
        X = np.random.default_rng(1).normal(size=(43, 24)) / 10
        file.create_dataset("X", data=X, chunks=(5, 24), compression="gzip")
    (folder / "rank.py").write_text(RANK)
    write_job(folder, 1_000_000)
    flags = ["job.toml", "--checkpoint", "saved", "--every", "20steps", "--resume", "--quiet"]
    killed = kill_ranks(folder, ranks, kills, flags, random.Random(seed))
    assert killed >= 0.8 * kills
    saved = checkpoints(folder)
    assert saved
    # From here on few steps are left, however far the killed runs came.
    write_job(folder, saved[-1] + 40)
    resumed = run_mpi(ranks, ["-m", "einmpi", *flags], cwd=folder)
    assert resumed.returncode == 0, resumed.stderr
    found, rows = results(folder)
    whole = run_mpi(ranks, ["-m", "einmpi", "job.toml", "--quiet"], cwd=folder)
    assert whole.returncode == 0, whole.stderr
    wanted, wanted_rows = results(folder)
    assert found == wanted
    assert rows["step"].tolist() == list(range(saved[-1] + 40))
    assert rows.tobytes() == wanted_rows.tobytes()
    assert not list(folder.glob(".*"))
    return saved[-1]


@pytest.mark.slow
@needs_mpirun
@pytest.mark.mpirun
def test_ranks_killed_at_any_time(tmp_path):
    check_kills(tmp_path, 2, 5)
