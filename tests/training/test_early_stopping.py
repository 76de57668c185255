"""Loops that a validation or a function ends, the best weights, and loops that go on."""

import json
import os
import subprocess
import sys

import h5py
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

EVERY = 2
PATIENCE = 3
STEPS = 60
RATE = 0.05


def validation_data():
    rng = np.random.default_rng(9)
    X = rng.normal(size=(16, 5))
    return X, np.sin(X @ np.arange(1.0, 6))


def table(**others):
    """Return the table of the validation as a job file writes it."""
    lines = ["[train.validation]", 'inputs = { X = "Xv.npy", y = "yv.npy" }', f"every = {EVERY}"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in others.items()]
    return "\n".join(lines)


def write(folder, loop=f"steps = {STEPS}", outputs="", **validation):
    X, y = validation_data()
    np.save(folder / "Xv.npy", X)
    np.save(folder / "yv.npy", y)
    optimizer = f'{{ name = "adamw", rate = {RATE} }}'
    return write_job(folder, optimizer, loop=loop, train=table(**validation) + outputs)


def expected(is_done):
    """Return the validations, the parameters after each, and the step that ends the loop.

    `is_done` tells from the validations so far whether it does.
    """
    X, y, parameters = data()
    Xv, yv = validation_data()
    optimizer = make("adamw", RATE)
    validations = []
    copies = []
    for step in range(STEPS):
        rows = slice(step * BATCH % ROWS, step * BATCH % ROWS + BATCH)
        _, gradients = loss_and_gradients(X[rows], y[rows], *parameters)
        optimizer.step(step, parameters, gradients, RATE)
        if (step + 1) % EVERY == 0:
            validations.append(loss_and_gradients(Xv, yv, *parameters)[0])
            copies.append([parameter.copy() for parameter in parameters])
            if is_done(validations):
                break
    return validations, copies, step


def is_out_of_patience(validations):
    return len(validations) - 1 - np.argmin(validations) >= PATIENCE


def check_best(found, best, copies, step):
    """Compare results with those of numpy; the rounding of some 50 steps adds up."""
    assert (found.steps, found.is_done) == (step + 1, True)
    assert found.best_step == (best + 1) * EVERY - 1
    for name, values, last in zip(NAMES, copies[best], copies[-1], strict=True):
        np.testing.assert_allclose(found.outputs[name].gather(), values, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(found.state[name].gather(), last, rtol=1e-10, atol=1e-12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [1, 3, 2, 4])
def test_patience_against_numpy(tmp_path, ranks):
    job = einmpi.load(write(tmp_path, patience=PATIENCE, keep="best"))
    validations, copies, step = expected(is_out_of_patience)
    best = int(np.argmin(validations))
    assert best > 0 and step + 1 < STEPS  # else this tests nothing

    def on_rank(comm):
        loops = LoopSequence(job, comm, options_of)
        result = loops.run({})
        outputs = {name: result.outputs[name].gather() for name in NAMES}
        check_best(result, best, copies, step)
        return outputs, loops.runs[0], loops.validations[0]

    results = run_threads(ranks, on_rank)
    run = results[0][1]
    history = run.history()["validation_loss"]
    np.testing.assert_allclose(history[EVERY - 1 :: EVERY], validations, rtol=1e-10)
    assert sum(run.measured.received for _, run, _ in results) == run.plan.bytes_predicted * (
        step + 1
    )
    moved = sum(validation.measured.received for _, _, validation in results)
    assert moved == results[0][2].predicted.nbytes
    for _, each, _ in results:
        assert each.measured.peak <= each.plan.peak
    planned = einmpi.plan(job, ranks).peak
    assert planned == einmpi.plan(einmpi.load(write(tmp_path)), ranks).peak + sum(
        array.layout.max_elements() * 8 for array in run.best.values()
    )


@pytest.mark.parametrize(
    ("until", "is_done"),
    [
        ("validation_loss > best_validation_loss", lambda found: found[-1] > min(found)),
        ("validations_since_best == 2", lambda found: len(found) - 1 - np.argmin(found) == 2),
        ("(validation_loss < 2) & (step > 8)", lambda found: found[-1] < 2 and len(found) > 4),
    ],
)
def test_until_reads_validations(tmp_path, until, is_done):
    job = einmpi.load(write(tmp_path, loop=f'steps = {STEPS}\nuntil = "{until}"'))
    found = einmpi.loop(job)
    _, copies, step = expected(is_done)
    assert (found.steps, found.is_done) == (step + 1, step + 1 < STEPS)
    for name, last in zip(NAMES, copies[-1], strict=True):
        np.testing.assert_allclose(found.outputs[name].gather(), last, rtol=1e-10, atol=1e-12)


def test_patience_besides_a_condition(tmp_path):
    """Either ends the loop; the last step is validated in any case."""
    path = write(tmp_path, loop=f'steps = {STEPS}\nuntil = "step == 4"', patience=PATIENCE)
    job = einmpi.load(path)
    assert job.loop.until_text == "(step == 4) | (validations_since_best >= 3)"
    found = einmpi.loop(job)
    assert found.steps == 5
    assert list(np.isnan(found.history["validation_loss"])) == [True, False, True, False, False]


def test_goal_max(tmp_path):
    """With the greatest first number as the best, the first validation of a fit is."""
    job = einmpi.load(write(tmp_path, patience=2, keep="best", goal="max"))

    def is_done(found):
        return len(found) - 1 - np.argmax(found) >= 2

    validations, copies, step = expected(is_done)
    check_best(einmpi.loop(job), int(np.argmax(validations)), copies, step)


KILLED = """
import os, signal, sys
from einmpi.loops.history import CsvHistory

append = CsvHistory.append
def special(self, step, row):
    if step == int(os.environ["KILLED_AT"]):
        os.kill(os.getpid(), signal.SIGKILL)
    append(self, step, row)
CsvHistory.append = special
from einmpi.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("when", ["in between", "before a validation", "after the best"])
def test_a_resumed_run_has_the_same_results(tmp_path, when):
    validations, _, step = expected(is_out_of_patience)
    best_step = (int(np.argmin(validations)) + 1) * EVERY - 1
    killed_at = {"in between": 7, "before a validation": 1, "after the best": step - 1}[when]
    every = {"in between": 3, "before a validation": 1, "after the best": best_step + 2}[when]
    loop = f'steps = {STEPS}\nshuffle = 1\nhistory = "history.csv"'
    if when == "after the best":
        loop = loop.replace("shuffle = 1\n", "")  # the steps are those of `expected`
    outputs = '\n[outputs]\nW1 = "model.h5:/W1"\nW1_m = "model.h5:/W1_m"\n'
    write(tmp_path, loop, outputs, patience=PATIENCE, keep="best")
    flags = ["job.toml", "--quiet"]
    assert einmpi_here(tmp_path, ["run", *flags, "--json", "whole.json"]).returncode == 0
    whole = (tmp_path / "history.csv").read_bytes()
    with h5py.File(tmp_path / "model.h5") as file:
        arrays = {name: file[name][()] for name in ("W1", "W1_m")}
    (tmp_path / "model.h5").unlink()
    (tmp_path / "killed.py").write_text(KILLED)
    flags += ["--checkpoint", "saved", "--every", f"{every}steps", "--resume"]
    killed = subprocess.run(
        [sys.executable, "killed.py", *flags],
        cwd=tmp_path,
        env={**environment(), "KILLED_AT": str(killed_at)},
        check=False,
    )
    assert killed.returncode < 0
    assert os.listdir(tmp_path / "saved")
    done = einmpi_here(tmp_path, ["run", *flags, "--json", "resumed.json"])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "history.csv").read_bytes() == whole
    with h5py.File(tmp_path / "model.h5") as file:
        for name, array in arrays.items():
            assert np.array_equal(file[name][()], array)
    first, second = (
        json.loads((tmp_path / name).read_text())["loop"] for name in ("whole.json", "resumed.json")
    )
    assert second["steps_before"] > 0
    assert first["best_step"] == second["best_step"] is not None


def test_summary_and_check(tmp_path):
    write(tmp_path, patience=PATIENCE, keep="best")
    validations, _, _ = expected(is_out_of_patience)
    done = einmpi_here(tmp_path, ["run", "job.toml"])
    step = (int(np.argmin(validations)) + 1) * EVERY - 1
    assert "steps until validations_since_best >= 3" in done.stdout
    wanted = f"results of step {step}, the best: validation_loss {min(validations):.6g}"
    assert wanted in done.stdout
    checked = einmpi_here(tmp_path, ["check", "job.toml"]).stdout
    assert "2 batches; results are those with the least validation_loss" in checked
    assert "until    validations_since_best >= 3" in checked


@pytest.mark.parametrize(
    ("validation", "message"),
    [
        ({"patience": 0}, "patience is 0; expected a number of validations, at least 1"),
        ({"keep": "worst"}, "keep is 'worst'; expected one of last, best"),
        ({"goal": "mean"}, "goal is 'mean'; expected one of min, max"),
    ],
)
def test_wrong_settings(tmp_path, validation, message):
    with pytest.raises(einmpi.InputError) as caught:
        einmpi.load(write(tmp_path, **validation))
    assert message in str(caught.value)


def test_the_reference_refuses_what_it_does_not_compute(tmp_path):
    with pytest.raises(einmpi.InputError, match="the results depend on a validation"):
        einmpi.reference(einmpi.load(write(tmp_path, patience=1)))


# ---- from Python --------------------------------------------------------------------------------


def train(comm=None, start=None, steps=STEPS, optimizer="adamw", dtype=np.float64, **others):
    X, y, parameters = data()
    Xv, yv = (array.astype(dtype) for array in validation_data())
    inputs = {"X": X, "y": y, **dict(zip(NAMES, parameters, strict=True))}
    inputs = {name: array.astype(dtype) for name, array in inputs.items()}
    if start is not None:
        for name in NAMES:
            del inputs[name]  # `start` has them
    shapes = {"X": (BATCH, 5), "y": (BATCH,), "W1": (5, 4), "b1": (4,), "w2": (4,)}
    job = einmpi.program(PROGRAM, **shapes, dtype=np.dtype(dtype).name)
    return einmpi.train(
        job,
        inputs,
        comm,
        loss="loss",
        parameters=NAMES,
        optimizer={"name": optimizer, "rate": RATE},
        batch=["X", "y"],
        record=["loss"],
        steps=steps,
        start=start,
        **({"validation": {"inputs": {"X": Xv, "y": yv}, "every": EVERY}} | others),
    )


def validation(**others):
    Xv, yv = validation_data()
    return {"inputs": {"X": Xv, "y": yv}, "every": EVERY, **others}


def test_early_stopping_from_python():
    validations, copies, step = expected(is_out_of_patience)
    found = train(validation=validation(patience=PATIENCE, keep="best"))
    check_best(found, int(np.argmin(validations)), copies, step)


CASES = {
    "adamw": {},
    "muon": {"optimizer": "muon"},
    "accumulate": {"optimizer": "adafactor", "accumulate": 3},
    "float16": {"precision": "float16", "dtype": np.float32, "scale": 2.0**40, "growth": 4},
    "shuffle": {"shuffle": 3},
    "best": {"validation": validation(patience=PATIENCE, keep="best")},
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_going_on_gives_the_same_bits(case, ranks):
    """All state is in the result, and a call that starts from it goes on as if nothing were."""
    settings = CASES[case]

    def on_rank(comm):
        whole = train(comm, steps=40, **settings)
        first = train(comm, steps=14, **settings)
        second = train(comm, start=first, steps=40, **settings)
        return whole, second

    for whole, second in run_threads(ranks, on_rank):
        assert (whole.steps, whole.is_done) == (second.steps, second.is_done)
        assert whole.best_step == second.best_step
        assert set(whole.state) == set(second.state)
        for name, array in whole.state.items():
            assert np.array_equal(array.local, second.state[name].local)
        for name, array in whole.outputs.items():
            assert np.array_equal(array.local, second.outputs[name].local)
        for name, values in whole.history.items():
            assert np.array_equal(values, second.history[name], equal_nan=True)


def test_names_of_state():
    assert sorted(set(train(steps=2).state) - set(NAMES)) == [
        "W1_m",
        "W1_v",
        "b1_m",
        "b1_v",
        "w2_m",
        "w2_v",
    ]
    with pytest.raises(einmpi.InputError, match="start has no state W1_m; expected the result"):
        train(start=train(steps=2, optimizer="sgd"))
    with pytest.raises(einmpi.InputError, match="start has 2 steps, and the loop 2"):
        train(start=train(steps=2), steps=2)
    with pytest.raises(einmpi.InputError, match="start is dict"):
        train(start={})
    with pytest.raises(einmpi.InputError, match="start has not recorded validation_loss"):
        train(start=train(steps=2, validation=None))
    for first in (validation(), validation(keep="best", goal="max")):
        with pytest.raises(einmpi.InputError, match="start has not kept the best parameters"):
            train(start=train(steps=8, validation=first), validation=validation(keep="best"))


def test_a_loop_goes_on():
    job = einmpi.program("y = (x + a / x) / 2", x=(), a=())
    settings = {"carry": {"x": "y"}, "record": ["y"]}
    first = einmpi.loop(job, {"x": 1.0, "a": 2.0}, steps=2, **settings)
    second = einmpi.loop(job, {"a": 2.0}, steps=4, start=first, **settings)
    assert second.steps == 4
    x = [1.0]
    for _ in range(4):
        x.append((x[-1] + 2 / x[-1]) / 2)
    assert list(second.history["y"]) == x[1:]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_function_sees_every_step_and_ends_the_loop(ranks):
    """It ends the loop on all ranks if it returns True on one."""

    def on_rank(comm):
        seen = []

        def on_step(step, numbers):
            seen.append((step, dict(numbers)))
            return comm.rank == ranks - 1 and step == 6

        return train(comm, on_step=on_step), seen

    for found, seen in run_threads(ranks, on_rank):
        assert (found.steps, found.is_done) == (7, True)
        assert [step for step, _ in seen] == list(range(7))
        assert [numbers["loss"] for _, numbers in seen] == list(found.history["loss"])
        assert np.isnan(seen[0][1]["validation_loss"])
        assert seen[1][1]["validation_loss"] == found.history["validation_loss"][1]
        assert not np.isnan(found.history["validation_loss"][6])  # the last step is validated


def test_an_error_of_a_function_is_one_of_all_ranks():
    def on_rank(comm):
        def on_step(step, numbers):
            if comm.rank == 1 and step == 2:
                raise KeyError("accuracy")

        with pytest.raises(Exception, match="accuracy") as caught:
            train(comm, on_step=on_step)
        return type(caught.value)

    types = run_threads(3, on_rank)
    assert types[1] is KeyError


def test_ranks_that_do_not_have_the_same_arguments():
    def on_rank(comm):
        with pytest.raises(einmpi.EinmpiError, match="all ranks must do the same"):
            train(comm, steps=2, on_step=print if comm.rank else None)

    run_threads(2, on_rank)


def test_rows_left_out_are_noted(tmp_path):
    path = write_job(tmp_path, '{ name = "sgd" }')
    text = path.read_text()
    assert "note" not in einmpi_here(tmp_path, ["check", "job.toml"]).stdout
    path.write_text(text.replace("batch = 8", "batch = 7"))
    checked = einmpi_here(tmp_path, ["check", "job.toml"]).stdout
    note = (
        'X, y: an epoch leaves out 3 rows of 24, which is no multiple of 7; last = "pad" takes all'
    )
    assert f"note     {note}\n" in checked
    padded = text.replace("batch = 8", "batch = 7").replace("[loop]", '[loop]\nlast = "pad"')
    path.write_text(padded)
    assert "leaves out" not in einmpi_here(tmp_path, ["check", "job.toml"]).stdout


def test_patience_beside_a_condition_that_the_job_has(tmp_path):
    (tmp_path / "job.toml").write_text(
        """
        program = "loss = sum((w[i] - x[i])**2) + 0 * z; following = z + 1"
        loop = { steps = 50, carry = { z = "following" }, until = "loss < -1" }
        [inputs]
        w = { shape = [2], random = "zeros" }
        x = { shape = [2], random = "ones" }
        z = { shape = [], random = "zeros" }
        """
    )
    found = einmpi.train(
        einmpi.load(tmp_path / "job.toml"),
        loss="loss",
        parameters=["w"],
        optimizer={"name": "sgd", "rate": 1e-4},
        validation={"inputs": {"x": np.array([-5.0, -5.0])}, "every": 1, "patience": 3},
    )
    assert (found.steps, found.best_step) == (4, 0)  # each step is worse than the first
