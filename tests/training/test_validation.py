"""Validation: numbers of the program for other inputs, every so many steps."""

import csv
import json
import subprocess
import sys

import numpy as np
import pytest
from in_process import einmpi_here
from mpi_helpers import environment
from numpy_optimizers import loss_and_gradients, make
from training_jobs import BATCH, NAMES, PROGRAM, ROWS, data, write_job

import einmpi
from einmpi.api import options_of
from einmpi.comm.threads import run_threads
from einmpi.loops.sequence import LoopSequence

VALIDATION_ROWS = 21  # two batches and 5 rows
ADAMW = '{ name = "adamw", rate = 0.02 }'
VALIDATION = """
[train.validation]
inputs = { X = "Xv.npy", y = "yv.npy" }
every = 3
record = ["loss", "error", "taken"]
"""


def validation_data():
    rng = np.random.default_rng(9)
    X = rng.normal(size=(VALIDATION_ROWS, 5))
    return X, np.sin(X @ np.arange(1.0, 6))


def write(folder, last, steps=10, more=""):
    """Write a job that is validated every three steps."""
    X, y = validation_data()
    np.save(folder / "Xv.npy", X)
    np.save(folder / "yv.npy", y)
    loop = f'steps = {steps}\nlast = "{last}"'
    path = write_job(folder, ADAMW, loop=loop + more, train=VALIDATION)
    padded = """
H[b,h] = tanh(sum(X[b,i] * W1[i,h]) + b1[h])
r[b]   = where(b < rows, sum[h](H[b,h] * w2[h]) - y[b], 0)
loss   = sum(r[b]**2) / rows
error  = sum(abs(r[b])) / rows
taken  = 100 * step + rows
"""
    path.write_text(path.read_text().replace(PROGRAM, padded))
    return path


def expected(last, steps=10):
    """Return the losses of the steps, and the numbers of validations, by numpy."""
    X, y, parameters = data()
    Xv, yv = validation_data()
    rows = VALIDATION_ROWS if last == "pad" else 2 * BATCH
    optimizer = make("adamw", 0.02)
    losses = []
    numbers = np.full((steps, 3), np.nan)
    for step in range(steps):
        taken = slice(step * BATCH % ROWS, step * BATCH % ROWS + BATCH)
        loss, gradients = loss_and_gradients(X[taken], y[taken], *parameters)
        losses.append(loss)
        optimizer.step(step, parameters, gradients, 0.02)
        if step % 3 == 2 or step + 1 == steps:
            loss, _ = loss_and_gradients(Xv[:rows], yv[:rows], *parameters)
            W1, b1, w2 = parameters
            error = np.mean(np.abs(np.tanh(Xv[:rows] @ W1 + b1) @ w2 - yv[:rows]))
            counts = [8, 8, 5] if last == "pad" else [8, 8]
            count = 100 * step + np.average(counts, weights=counts)
            numbers[step] = loss, error, count
    return losses, numbers


@pytest.mark.sampled(2)
@pytest.mark.parametrize("last", ["drop", "pad"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_against_numpy(tmp_path, last, ranks):
    """Rows are counted, no matter how they are cut; bytes are those of both plans."""
    job = einmpi.load(write(tmp_path, last))

    def on_rank(comm):
        loops = LoopSequence(job, comm, options_of)
        result = loops.run({})
        return result, loops.runs[0], loops.validations[0]

    results = run_threads(ranks, on_rank)
    losses, numbers = expected(last)
    history = results[0][0].history
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-12)
    for column, name in enumerate(["loss", "error", "taken"]):
        found = history[f"validation_{name}"]
        np.testing.assert_allclose(found, numbers[:, column], rtol=1e-12)
    moved = sum(run.measured.received for _, run, _ in results)
    assert moved == results[0][1].plan.bytes_predicted * 10
    moved = sum(validation.measured.received for _, _, validation in results)
    assert moved == results[0][2].predicted.nbytes


def test_history_json_and_summary(tmp_path):
    path = write(tmp_path, "drop", more='\nhistory = "history.csv"')
    done = einmpi_here(tmp_path, ["run", path.name, "--json", "run.json", "--report", "page.html"])
    assert done.returncode == 0, done.stderr
    _, numbers = expected("drop")
    assert f"validation_loss {numbers[-1, 0]:.6g}" in done.stdout
    with open(tmp_path / "history.csv") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        "step",
        "loss",
        "validation_loss",
        "validation_error",
        "validation_taken",
    ]
    found = [float(row["validation_error"]) for row in rows]
    np.testing.assert_allclose(found, numbers[:, 1], rtol=1e-12)
    recorded = json.loads((tmp_path / "run.json").read_text())["loop"]["history"]
    assert [value is None for value in recorded["validation_loss"]] == list(np.isnan(numbers[:, 0]))
    assert "validation_loss, last" in (tmp_path / "page.html").read_text()
    checked = einmpi_here(tmp_path, ["check", path.name])
    assert (
        "validate loss, error, taken every 3 steps with another X, y: 21 rows, 2 batches"
        in checked.stdout
    )


KILLED = """
import os, signal, sys
from einmpi.loops.history import CsvHistory

append = CsvHistory.append
def special(self, step, row):
    if step == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    append(self, step, row)
CsvHistory.append = special
from einmpi.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_resumed_run_has_the_same_history(tmp_path):
    write(tmp_path, "pad", more='\nhistory = "history.csv"\nshuffle = 1')
    assert einmpi_here(tmp_path, ["run", "job.toml", "--quiet"]).returncode == 0
    whole = (tmp_path / "history.csv").read_bytes()
    (tmp_path / "killed.py").write_text(KILLED)
    flags = ["job.toml", "--checkpoint", "saved", "--every", "4steps", "--resume", "--quiet"]
    killed = subprocess.run(
        [sys.executable, "killed.py", *flags], cwd=tmp_path, env=environment(), check=False
    )
    assert killed.returncode < 0
    done = einmpi_here(tmp_path, ["run", *flags])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "history.csv").read_bytes() == whole


def test_from_python():
    X, y, parameters = data()
    Xv, yv = validation_data()
    job = einmpi.program(PROGRAM, X=(BATCH, 5), y=(BATCH,), W1=(5, 4), b1=(4,), w2=(4,))
    found = einmpi.train(
        job,
        {"X": X, "y": y, **dict(zip(NAMES, parameters, strict=True))},
        loss="loss",
        parameters=NAMES,
        optimizer={"name": "adamw", "rate": 0.02},
        batch=["X", "y"],
        steps=10,
        validation={"inputs": {"X": Xv, "y": yv}, "every": 3},
    )
    _, numbers = expected("drop")
    np.testing.assert_allclose(found.history["validation_loss"], numbers[:, 0], rtol=1e-12)


def test_without_batches(tmp_path):
    """An input of the same shape takes the place of that of the steps."""
    (tmp_path / "job.toml").write_text(
        """
program = "loss = sum((x[i] - a[i])**2)"
inputs.x = { shape = [3], random = "ones" }
inputs.a = { shape = [3], random = "zeros" }
loop.steps = 4
[train]
loss = "loss"
parameters = ["x"]
optimizer = { name = "sgd", rate = 0.25 }
[train.validation]
every = 2
inputs.a = { shape = [3], random = "ones" }
"""
    )
    found = einmpi.loop(einmpi.load(tmp_path / "job.toml"))
    np.testing.assert_allclose(
        found.history["validation_loss"], [np.nan, 3 * 0.75**2, np.nan, 3 * (15 / 16) ** 2]
    )
