"""einmpi.train: arrays in, trained parameters out."""

import numpy as np
import pytest
from numpy_optimizers import loss_and_gradients, make
from training_jobs import BATCH, NAMES, PROGRAM, ROWS, data

import einmpi
from einmpi.comm.threads import run_threads
from einmpi.errors import InputError


def given_arrays():
    X, y, parameters = data()
    arrays = {"X": X, "y": y, **dict(zip(NAMES, parameters, strict=True))}
    job = einmpi.program(PROGRAM, X=(BATCH, 5), y=(BATCH,), W1=(5, 4), b1=(4,), w2=(4,), r=0.04)
    return job, arrays


def expected(rate, steps):
    X, y, parameters = data()
    optimizer = make("adamw", 0.02)
    losses = []
    for step in range(steps):
        rows = slice(step * BATCH % ROWS, step * BATCH % ROWS + BATCH)
        loss, gradients = loss_and_gradients(X[rows], y[rows], *parameters)
        losses.append(loss)
        optimizer.step(step, parameters, gradients, rate(step))
    return losses, parameters


@pytest.mark.parametrize("ranks", [1, 2])
def test_against_numpy(ranks):
    job, arrays = given_arrays()

    def on_rank(comm):
        found = einmpi.train(
            job,
            arrays,
            comm,
            loss="loss",
            parameters=NAMES,
            optimizer={"name": "adamw", "rate": "r / 2 * (1 - step / steps)"},
            batch=["X", "y"],
            epochs=4,
            record=["loss", "train_rate"],
        )
        return found, {name: array.gather() for name, array in found.outputs.items()}

    found, outputs = run_threads(ranks, on_rank)[0]
    losses, parameters = expected(lambda step: 0.02 * (1 - step / 12), 12)
    assert set(outputs) == {*NAMES, "loss"}
    np.testing.assert_allclose(found.history["loss"], losses, rtol=1e-12)
    for name, values in zip(NAMES, parameters, strict=True):
        np.testing.assert_allclose(outputs[name], values, rtol=1e-12)
    np.testing.assert_array_equal(arrays["W1"], data()[2][0])  # what was given is as it was


def test_a_job_file_with_a_loop(tmp_path):
    """[loop] says how often and what else is carried; arguments say what is trained."""
    (tmp_path / "job.toml").write_text(
        """
program = "loss = sum((x[i] - a)**2); n_next = n + 1"
parameters.a = 2.0
inputs.x = { shape = [3], random = "ones" }
inputs.n = { shape = [], random = "zeros" }
[loop]
steps = 7
carry = { n = "n_next" }
record = ["loss"]
"""
    )
    job = einmpi.load(tmp_path / "job.toml")
    found = einmpi.train(job, loss="loss", parameters=["x"], optimizer={"name": "sgd", "rate": 0.1})
    assert found.steps == 7 and found.outputs["n"].gather() == 7
    np.testing.assert_allclose(found.outputs["x"].gather(), 2 - 0.8**7, rtol=1e-13)


def test_half_precision_and_accumulation():
    _, arrays = given_arrays()
    for name, array in arrays.items():
        arrays[name] = array.astype("float32")
    shapes = {"X": (BATCH, 5), "y": (BATCH,), "W1": (5, 4), "b1": (4,), "w2": (4,)}
    job = einmpi.program(PROGRAM, dtype="float32", **shapes)
    found = einmpi.train(
        job,
        arrays,
        loss="loss",
        parameters=list(NAMES),
        optimizer="adam",
        precision="float16",
        scale=1024.0,
        growth=np.int64(5),
        accumulate=3,
        batch=["X", "y"],
        steps=30,
        record=["loss", "train_scale"],
    )
    np.testing.assert_array_equal(found.history["train_scale"], [1024] * 15 + [2048] * 15)
    assert found.outputs["W1"].gather().dtype == np.float32


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"loss": "los"}, "train: the loss los is not computed; expected one of H, loss"),
        ({"parameters": "W1"}, "train: parameters is 'W1'; expected a list of inputs such"),
        ({"parameters": ["X"]}, "train: X is trained, but comes in batches; expected an input"),
        ({"optimizer": "adem"}, "train: unknown optimizer 'adem'; expected one of sgd,"),
        ({"optimizer": {"name": "sgd", "rate": "q"}}, "rate:1:1: unknown name 'q'; expected one"),
        ({"precision": "float8"}, "train: precision is 'float8'; expected one of bfloat16,"),
        ({"scale": 3.0}, "train: scale is given, but the loss is not scaled; expected precision"),
        ({"carry": {"W1": "H"}}, "train: W1 is trained, but the loop carries it already; expected"),
        ({"carry": ["W1"]}, "loop: "),
        (
            {"optimizer": {"name": "sgd", "rate": "train_rate / 2"}},
            "train: the rate 'train_rate / 2' is computed from itself; expected an expression",
        ),
        (
            {"steps": None},
            "loop: steps is not given; expected steps=..., or epochs=... with batches",
        ),
        (
            {"optimizer": {"name": "sgd", "lr": 0.1}},
            "train: sgd has no option 'lr'; expected one of name, rate, decay, clip; "
            "lr of torch is called rate here",
        ),
    ],
)
def test_refused(changes, message):
    job, arrays = given_arrays()
    arguments = {
        "loss": "loss",
        "parameters": ["W1"],
        "optimizer": "sgd",
        "batch": ["X", "y"],
        "steps": 3,
        **changes,
    }
    with pytest.raises(InputError) as caught:
        einmpi.train(job, arrays, **arguments)
    assert str(caught.value).startswith(message)


def test_an_unknown_argument_is_one_of_train():
    job, arrays = given_arrays()
    with pytest.raises(TypeError, match=r"train\(\) got an unexpected keyword argument 'lr'"):
        einmpi.train(job, arrays, loss="loss", parameters=["W1"], optimizer="sgd", lr=0.1)
