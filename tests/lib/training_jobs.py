"""A small model as a job file, its data, and runs of it on thread ranks."""

import numpy as np

from einmpi.api import options_of
from einmpi.comm.threads import run_threads
from einmpi.loops.running import LoopRun

ROWS = 24
BATCH = 8
PROGRAM = """
H[b,h] = tanh(sum(X[b,i] * W1[i,h]) + b1[h])
loss   = mean[b]((sum[h](H[b,h] * w2[h]) - y[b])**2)
"""
NAMES = ("W1", "b1", "w2")


def data(seed=0):
    """Return X, y, and the first values of the parameters."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(ROWS, 5))
    y = np.sin(X @ np.arange(1.0, 6)) + 0.1 * rng.normal(size=ROWS)
    return X, y, [rng.normal(size=(5, 4)), np.zeros(4) + 0.1, rng.normal(size=4)]


def write_job(folder, optimizer, loop="steps = 20", train="", batched=True, seed=0, dtype=None):
    """Write a job file with its inputs; return its path."""
    X, y, parameters = data(seed)
    arrays = {"X": X, "y": y, **dict(zip(NAMES, parameters, strict=True))}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array if dtype is None else array.astype(dtype))
    batch = f", batch = {BATCH}" if batched else ""
    path = folder / "job.toml"
    path.write_text(
        f"""
program = '''{PROGRAM}'''
[inputs]
X = {{ file = "X.npy"{batch} }}
y = {{ file = "y.npy"{batch} }}
W1 = {{ file = "W1.npy" }}
b1 = {{ file = "b1.npy" }}
w2 = {{ file = "w2.npy" }}
[loop]
{loop}
record = ["loss"]
[train]
loss = "loss"
parameters = ["W1", "b1", "w2"]
optimizer = {optimizer}
{train}
"""
    )
    return path


def run_on(ranks, job, inputs=None):
    """Run the loop of a job on thread ranks; every step moves what the plan says.

    Return the result, the outputs as arrays, and the run of rank 0.
    """

    def on_rank(comm):
        received = []
        run = LoopRun(job, comm, options_of(job))
        run.on_row = lambda number, row: received.append(run.measured.received)
        run.prepare(inputs or {})
        before = run.measured.received
        result = run.run()
        outputs = {name: array.gather() for name, array in result.outputs.items()}
        return result, outputs, np.diff([before, *received]), run

    results = run_threads(ranks, on_rank)
    first, outputs, _, run = results[0]
    every_step = set(sum(steps for _, _, steps, _ in results))
    assert every_step == {run.plan.bytes_predicted}
    return first, outputs, run
