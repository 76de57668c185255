"""Optimisers, step by step, against numpy; what they carry is updated in place."""

import math

import numpy as np
import pytest
from numpy_optimizers import clipped, loss_and_gradients, make
from training_jobs import BATCH, NAMES, ROWS, data, run_on, write_job

import einmpi
from einmpi.comm.threads import run_threads
from einmpi.report.describe import describe_job
from einmpi.training.settings import optimizers

STEPS = 20
CASES = {
    "sgd": {},
    "momentum": {},
    "nesterov": {},
    "adam": {},
    "adamw": {},
    "adagrad": {},
    "lion": {},
    "rmsprop": {},
    "adafactor": {},
    "muon": {},
    "sgd-decay": {"decay": 0.1},
    "momentum-all": {"momentum": 0.7, "decay": 0.1},
    "nesterov-all": {"momentum": 0.7, "decay": 0.1},
    "adam-all": {"beta1": 0.8, "beta2": 0.95, "eps": 1e-4, "decay": 0.1},
    "adamw-all": {"beta1": 0.8, "beta2": 0.95, "eps": 1e-4, "decay": 0.3},
    "adagrad-all": {"rate_decay": 0.1, "initial": 0.5, "eps": 1e-3, "decay": 0.1},
    "lion-all": {"beta1": 0.8, "beta2": 0.95, "decay": 0.3},
    "rmsprop-all": {"alpha": 0.8, "eps": 1e-3, "decay": 0.1},
    "adafactor-all": {"beta2_decay": -0.5, "eps": 0.5, "threshold": 0.7, "decay": 0.3},
    "muon-all": {"momentum": 0.8, "beta1": 0.7, "beta2": 0.9, "eps": 1e-3, "decay": 0.3},
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
    assert set(optimizers()) == {case.partition("-")[0] for case in CASES}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_against_numpy(tmp_path, case):
    name = case.partition("-")[0]
    options = CASES[case]
    job = einmpi.load(write_job(tmp_path, toml(name, 0.02, **options)))
    found, outputs, run = run_on(1, job)
    check(found, outputs, *expected(name, lambda step: 0.02, **options))
    # All state is carried, and updated in place like the parameters.
    state = set()
    for parameter, values in zip(NAMES, data()[2], strict=True):
        state |= {f"{parameter}_{suffix}" for suffix in optimizers()[name].of(values.ndim).state}
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
@pytest.mark.parametrize("name", optimizers())
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["adafactor", "muon"])
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (2, 3, 4)])
def test_matrices_on_ranks(name, ranks, shape):
    """Tall, wide and stacked matrices: the last two dimensions are a matrix."""
    rng = np.random.default_rng(2)
    wanted = rng.normal(size=shape)
    first = rng.normal(size=shape)
    labels = "abc"[-len(shape) :]
    text = f"loss = sum((W[{','.join(labels)}] - T[{','.join(labels)}])**4)"
    job = einmpi.program(text, W=shape, T=shape)

    def on_rank(comm):
        return (
            einmpi.train(
                job,
                {"W": first, "T": wanted},
                comm,
                loss="loss",
                parameters=["W"],
                optimizer={"name": name, "rate": 0.05},
                steps=6,
            )
            .outputs["W"]
            .gather()
        )

    W = first.copy()
    optimizer = make(name, 0.05)
    for step in range(6):
        optimizer.step(step, [W], [4 * (W - wanted) ** 3], 0.05)
    # Newton-Schulz multiplies rounding errors of small singular values by up to 3.4445**5 ≈ 500.
    np.testing.assert_allclose(run_threads(ranks, on_rank)[0], W, rtol=1e-11)


GROUPS = """
[[train.groups]]
parameters = ["b1"]
rate = "0.1 * 0.9**step"
decay = 0
[[train.groups]]
parameters = ["w2"]
name = "momentum"
rate = 0.03
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 1, 3, 4])
def test_groups(tmp_path, ranks):
    """A group has a rate, decay or an optimiser of its own; the norm is that of all gradients."""
    optimizer = toml("adamw", 0.02, decay=0.3, beta1=0.8, clip=0.5)
    job = einmpi.load(write_job(tmp_path, optimizer, train=GROUPS))
    found, outputs, _ = run_on(ranks, job)
    X, y, parameters = data()
    rules = [
        (make("adamw", 0.0, decay=0.3, beta1=0.8), lambda step: 0.02),
        (make("adamw", 0.0, decay=0.0, beta1=0.8), lambda step: 0.1 * 0.9**step),
        (make("momentum", 0.0), lambda step: 0.03),
    ]
    losses = []
    for step in range(STEPS):
        rows = slice(step * BATCH % ROWS, step * BATCH % ROWS + BATCH)
        loss, gradients = loss_and_gradients(X[rows], y[rows], *parameters)
        losses.append(loss)
        gradients = clipped(gradients, 0.5)
        for (rule, rate), parameter, gradient in zip(rules, parameters, gradients, strict=True):
            rule.step(step, [parameter], [gradient], rate(step))
    check(found, outputs, losses, parameters)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({}, "groups is {}; expected a list such as"),
        ([1], "groups has 1; expected a list such as"),
        ([{"rate": 0.1}], "there are no parameters to train"),
        ([{"parameters": ["x"]}], "x is not trained; expected w"),
        ([{"parameters": ["w"]}, {"parameters": ["w"]}], "w is in two groups"),
        ([{"parameters": ["w"], "clip": 1}], "adamw has no option 'clip'"),
        ([{"parameters": ["w"], "rate": -1}], "rate is -1; expected a number above 0"),
        ([{"parameters": ["w"], "name": "sgd", "beta1": 0.5}], "sgd has no option 'beta1'"),
    ],
)
def test_wrong_groups(groups, message):
    job = einmpi.program("loss = sum(w[i]**2)", w=(3,))
    training = {"loss": "loss", "parameters": ["w"], "optimizer": "adamw", "steps": 1}
    with pytest.raises(einmpi.InputError) as caught:
        einmpi.train(job, {"w": np.ones(3)}, groups=groups, **training)
    assert message in str(caught.value)
