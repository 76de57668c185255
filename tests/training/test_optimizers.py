"""Optimisers, step by step, against numpy; what they carry is updated in place."""

import math

import numpy as np
import pytest
from numpy_optimizers import clipped, loss_and_gradients, make
from training_jobs import BATCH, NAMES, ROWS, data, run_on, write_job

import einmpi
from einmpi.report.describe import describe_job
from einmpi.training.settings import OPTIMIZERS

STEPS = 20
CASES = {
    "sgd": {},
    "momentum": {},
    "nesterov": {},
    "adam": {},
    "adamw": {},
    "adagrad": {},
    "lion": {},
    "sgd-decay": {"decay": 0.1},
    "momentum-all": {"momentum": 0.7, "decay": 0.1},
    "nesterov-all": {"momentum": 0.7, "decay": 0.1},
    "adam-all": {"beta1": 0.8, "beta2": 0.95, "eps": 1e-4, "decay": 0.1},
    "adamw-all": {"beta1": 0.8, "beta2": 0.95, "eps": 1e-4, "decay": 0.3},
    "adagrad-all": {"rate_decay": 0.1, "initial": 0.5, "eps": 1e-3, "decay": 0.1},
    "lion-all": {"beta1": 0.8, "beta2": 0.95, "decay": 0.3},
}


def toml(name, rate, **options):
    """Return the table of an optimiser as a job file writes it."""
    shown = repr(rate) if isinstance(rate, float) else f'"{rate}"'
    rest = "".join(f", {key} = {value!r}" for key, value in options.items())
    return f'{{ name = "{name}", rate = {shown}{rest} }}'


def expected(name, rate, clip=None, **options):
    """Return the losses of all steps and the last parameters, by numpy."""
    X, y, parameters = data()
    optimizer = make(name, 0.0, **options)
    losses = []
    for step in range(STEPS):
        first = step * BATCH % ROWS
        rows = slice(first, first + BATCH)
        loss, gradients = loss_and_gradients(X[rows], y[rows], *parameters)
        if clip is not None:
            gradients = clipped(gradients, clip)
        optimizer.step(step, parameters, gradients, rate(step))
        losses.append(loss)
    return losses, parameters


def check(found, outputs, losses, parameters):
    np.testing.assert_allclose(found.history["loss"], losses, rtol=1e-12)
    for name, values in zip(NAMES, parameters, strict=True):
        np.testing.assert_allclose(outputs[name], values, rtol=1e-12, atol=1e-14)


def test_every_optimizer_has_a_case():
    assert set(OPTIMIZERS) == {case.partition("-")[0] for case in CASES}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_against_numpy(tmp_path, case):
    name = case.partition("-")[0]
    options = CASES[case]
    job = einmpi.load(write_job(tmp_path, toml(name, 0.02, **options)))
    found, outputs, run = run_on(1, job)
    check(found, outputs, *expected(name, lambda step: 0.02, **options))
    # All state is carried, and updated in place like the parameters.
    state = {f"{parameter}_{suffix}" for parameter in NAMES for suffix in OPTIMIZERS[name].state}
    assert set(job.loop.carry) == {*NAMES, *state}
    assert set(run.plan.in_place) == {*NAMES, *state}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "ranks"), [("nesterov", 3), ("adamw", 2), ("adamw", 3), ("adamw", 4), ("lion", 2)]
)
def test_ranks_move_what_is_planned(tmp_path, name, ranks):
    job = einmpi.load(write_job(tmp_path, toml(name, 0.02, clip=0.5)))
    found, outputs, _ = run_on(ranks, job)
    check(found, outputs, *expected(name, lambda step: 0.02, clip=0.5))


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "lion"])
def test_rate_as_an_expression(tmp_path, name):
    rate = "0.05 * minimum(1, (step + 1) / 5) * (1 + cos(pi * step / steps)) / 2"
    job = einmpi.load(write_job(tmp_path, toml(name, rate)))
    found, outputs, _ = run_on(1, job)

    def in_python(step):
        return 0.05 * min(1, (step + 1) / 5) * (1 + math.cos(math.pi * step / STEPS)) / 2

    check(found, outputs, *expected(name, in_python))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_float32(tmp_path, name):
    """Everything of a parameter is in its dtype, and bias corrections are precise."""
    options = {"decay": 0.1, "clip": 0.5}
    job = einmpi.load(write_job(tmp_path, toml(name, "0.02", **options), dtype="float32"))
    for vertex in job.graph.vertices:
        assert vertex.dtype != "float64" or not vertex.bound
    found, outputs, _ = run_on(2, job)
    losses, parameters = expected(name, lambda step: 0.02, **options)
    np.testing.assert_allclose(found.history["loss"], losses, rtol=2e-4)
    for parameter, values in zip(NAMES, parameters, strict=True):
        assert outputs[parameter].dtype == np.float32
        np.testing.assert_allclose(outputs[parameter], values, rtol=2e-4, atol=2e-5)


def test_statements_are_printed(tmp_path):
    job = einmpi.load(write_job(tmp_path, '{ name = "momentum", rate = 0.1, decay = 0.5 }'))
    lines = [line for line in describe_job(job).splitlines() if line.startswith("train ")]
    assert [line.removeprefix("train    ") for line in lines][:3] == [
        "W1_grad[i,h] = grad(loss, W1[i,h])",
        "b1_grad[h] = grad(loss, b1[h])",
        "w2_grad[h] = grad(loss, w2[h])",
    ]
    assert [line.removeprefix("train    ") for line in lines][3:6] == [
        "W1_descent[i,h] = W1_grad[i,h] + 0.5 * W1[i,h]",
        "W1_m_next[i,h] = 0.9 * W1_m[i,h] + W1_descent[i,h]",
        "W1_next[i,h] = W1[i,h] - 0.1 * W1_m_next[i,h]",
    ]
    # They are the program: the same text by hand gives the same graph.
    assert job.source.text.endswith("\n".join(job.loop.written_out))


def test_places_of_what_is_written_out(tmp_path):
    """Messages about it point at [train], not at a line that the file does not have."""
    path = write_job(tmp_path, '{ name = "sgd", rate = 0.1 }')
    row = path.read_text().splitlines().index("[train]") + 1
    job = einmpi.load(path)
    assert job.written["W1_next"].places == (f"{path}:{row}:1",)
