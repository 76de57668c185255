"""Training with accumulation, several loops, checkpoints and the reference."""

import signal
import subprocess
import sys

import numpy as np
import pytest
from in_process import einmpi_here
from mpi_helpers import environment
from numpy_optimizers import loss_and_gradients, make
from training_jobs import BATCH, NAMES, PROGRAM, ROWS, data, run_on, write_job

import einmpi

# einmpi itself, which is killed before it writes a row.
KILLED = """
import os, signal, sys
from einmpi.loops.history import CsvHistory

append = CsvHistory.append
def special(self, step, row):
    if step == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    append(self, step, row)
CsvHistory.append = special
from einmpi.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
ADAMW = '{ name = "adamw", rate = 0.02, clip = 0.5 }'


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "ranks"), [("sgd", 1), ("nesterov", 3), ("adamw", 2), ("adagrad", 1), ("lion", 1)]
)
def test_batches_that_are_accumulated(tmp_path, name, ranks):
    """Three batches of 8 rows change parameters as one of 24 rows does."""
    optimizer = f'{{ name = "{name}", rate = 0.02 }}'
    path = write_job(tmp_path, optimizer, loop="steps = 20", train="accumulate = 3")
    found, outputs, run = run_on(ranks, einmpi.load(path))
    X, y, parameters = data()
    reference = make(name, 0.02)
    losses = []
    for step in range(20):
        rows = slice(step * BATCH % ROWS, step * BATCH % ROWS + BATCH)
        losses.append(loss_and_gradients(X[rows], y[rows], *parameters)[0])
        if step % 3 == 2:
            _, gradients = loss_and_gradients(X, y, *parameters)
            reference.step(step // 3, parameters, gradients, 0.02)
    np.testing.assert_allclose(found.history["loss"], losses, rtol=1e-9)
    for parameter, values in zip(NAMES, parameters, strict=True):
        np.testing.assert_allclose(outputs[parameter], values, rtol=1e-9, atol=1e-12)
    assert {*NAMES, "W1_sum", "b1_sum", "w2_sum"} <= set(run.plan.in_place)


def test_reference_evaluator(tmp_path):
    job = einmpi.load(write_job(tmp_path, ADAMW, train="accumulate = 2"))
    _, outputs, _ = run_on(2, job)
    found = einmpi.reference(job)
    assert set(found) == {*NAMES, "loss"}  # no state
    for name in NAMES:
        np.testing.assert_allclose(found[name], outputs[name], rtol=1e-12)


def test_state_in_outputs(tmp_path):
    path = write_job(tmp_path, ADAMW, loop="epochs = 2\nshuffle = 1")
    path.write_text(path.read_text() + '[outputs]\nW1_v = "state.npy"\nW1 = "W1_last.npy"\n')
    done = einmpi_here(tmp_path, ["run", "job.toml", "--quiet"])
    assert done.returncode == 0, done.stderr
    _, outputs, _ = run_on(1, einmpi.load(path))
    np.testing.assert_array_equal(np.load(tmp_path / "state.npy"), outputs["W1_v"])
    np.testing.assert_array_equal(np.load(tmp_path / "W1_last.npy"), outputs["W1"])


@pytest.mark.parametrize(
    "precision",
    ["", pytest.param('precision = "float16"\nscale = 2e7\ngrowth = 3', marks=pytest.mark.slow)],
    ids=["", "float16"],
)
def test_a_resumed_run_has_the_same_bits(tmp_path, precision):
    """A run that is killed and continues ends like one that was not, histories included."""
    train = f"accumulate = 2\n{precision}"
    loop = 'steps = 20\nshuffle = 5\nhistory = "history.csv"'
    path = write_job(tmp_path, ADAMW, loop=loop, train=train, dtype="float32")
    outputs = "".join(f'{name} = "{name}_last.npy"\n' for name in NAMES)
    path.write_text(f"{path.read_text()}[outputs]\n{outputs}")

    def results():
        found = [(tmp_path / f"{name}_last.npy").read_bytes() for name in NAMES]
        return [*found, (tmp_path / "history.csv").read_bytes()]

    assert einmpi_here(tmp_path, ["run", "job.toml", "--quiet"]).returncode == 0
    whole = results()
    flags = ["job.toml", "--checkpoint", "saved", "--every", "4steps", "--resume", "--quiet"]
    (tmp_path / "killed.py").write_text(KILLED)
    killed = subprocess.run(
        [sys.executable, "killed.py", *flags], cwd=tmp_path, env=environment(), check=False
    )
    assert killed.returncode == -signal.SIGKILL
    done = einmpi_here(tmp_path, ["run", *flags])
    assert done.returncode == 0, done.stderr
    assert results() == whole


def test_several_loops(tmp_path):
    """Each loop has an optimiser of its own, which starts anew; parameters go on."""
    X, y, parameters = data()
    arrays = {"X": X, "y": y, **dict(zip(NAMES, parameters, strict=True))}
    text = "[inputs]\n"
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
        text += f'{name} = "{name}.npy"\n'
    for number, name in enumerate(("adamw", "momentum", "adamw")):
        trained = NAMES if number < 2 else NAMES[:1]
        text += f"""
[[loop]]
program = '''{PROGRAM}'''
steps = 5
record = ["loss"]
[loop.train]
loss = "loss"
parameters = {list(trained)!r}
optimizer = {{ name = "{name}", rate = 0.02 }}
"""
    (tmp_path / "job.toml").write_text(text.replace("'", '"').replace('"""', "'''"))
    job = einmpi.load(tmp_path / "job.toml")
    assert "W1_m_1" in job.loops[1].loop.carry and "W1_m_2" in job.loops[2].loop.carry
    found = einmpi.loop(job)
    losses = []
    for number, name in enumerate(("adamw", "momentum", "adamw")):
        trained = parameters if number < 2 else parameters[:1]
        reference = make(name, 0.02)
        for step in range(5):
            loss, gradients = loss_and_gradients(X, y, *parameters)
            losses.append(loss)
            reference.step(step, trained, gradients[: len(trained)], 0.02)
    results = [*found.earlier, found]
    history = np.concatenate([result.history["loss"] for result in results])
    np.testing.assert_allclose(history, losses, rtol=1e-12)
    assert set(found.outputs) == {*NAMES, "loss"}
    for name, values in zip(NAMES, parameters, strict=True):
        np.testing.assert_allclose(found.outputs[name].gather(), values, rtol=1e-12)


@pytest.mark.parametrize(
    "precision", ["", 'precision = "float16"\nscale = 64.0'], ids=["", "float16"]
)
def test_a_later_loop_writes_out_the_same_names(tmp_path, precision):
    """Rates by expressions, norms and rounded inputs are tensors of each loop."""
    X, y, parameters = data()
    text = "[inputs]\n"
    for name, array in {"X": X, "y": y, **dict(zip(NAMES, parameters, strict=True))}.items():
        np.save(tmp_path / f"{name}.npy", array)
        text += f'{name} = "{name}.npy"\n'
    for steps in (4, 5):
        text += f"""
[[loop]]
program = '''{PROGRAM}'''
steps = {steps}
record = ["loss", "train_rate", "train_norm"]
[loop.train]
loss = "loss"
parameters = ["W1", "b1", "w2"]
optimizer = {{ name = "momentum", rate = "0.02 * 0.9**step", clip = 100.0 }}
{precision}
"""
    (tmp_path / "job.toml").write_text(text)
    found = einmpi.loop(einmpi.load(tmp_path / "job.toml"))
    losses = []
    for steps in (4, 5):
        reference = make("momentum", 0.02)
        for step in range(steps):
            loss, gradients = loss_and_gradients(X, y, *parameters)
            losses.append(loss)
            reference.step(step, parameters, gradients, 0.02 * 0.9**step)
    history = np.concatenate([found.earlier[0].history["loss"], found.history["loss"]])
    np.testing.assert_allclose(history, losses, rtol=1e-2 if precision else 1e-12)
    np.testing.assert_allclose(found.history["train_rate"], 0.02 * 0.9 ** np.arange(5.0))
