"""Recurrences and random numbers on a real GPU; skipped where there is none."""

from dataclasses import replace

import numpy as np
import pytest
from language.test_random_numbers import CALLS
from paths import ROOT
from runtime.gpu.test_gpu import NO_GPU
from test_recurrence import (
    EDIT,
    GATES,
    LSTM,
    RNN,
    edit_distances,
    kalman_case,
    lstm,
    lstm_gradients,
    lstm_inputs,
    normal,
    rnn,
    rnn_gradients,
    rnn_inputs,
    with_gradients,
)

import einmpi
from einmpi.comm.base import ALONE
from einmpi.process.environment import GRAPHS_VARIABLE
from tests.soak.random_numbers import random_numbers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)]

# Products add up in another order, and tanh and exp are those of CUDA: some roundings of float64.
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def on_gpu(job):
    return replace(job, backend="cupy")


def run_on_gpu(job, inputs):
    return {name: each.gather() for name, each in einmpi.run(on_gpu(job), inputs, ALONE).items()}


# ---- recurrences ---------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", (1, 2, 7))
def test_recurrent_network(steps):
    inputs = rnn_inputs(steps=steps)
    found = run_on_gpu(einmpi.program(RNN, **inputs), inputs)
    np.testing.assert_allclose(found["h"], rnn(**inputs), **CLOSE)


def test_recurrent_network_of_single_precision():
    inputs = {name: array.astype("float32") for name, array in rnn_inputs().items()}
    found = run_on_gpu(einmpi.program(RNN, **inputs), inputs)["h"]
    assert found.dtype == np.float32
    # Values up to 1 after seven steps, each with sums of a dozen products.
    np.testing.assert_allclose(found, rnn(**rnn_inputs()), rtol=0, atol=2e-5)


def gradients_case():
    inputs = rnn_inputs() | normal(7, V=(12,), y=(7,))
    names = ("W", "U", "x", "h0", "V")
    text = with_gradients(RNN, "mean((sum(V[k] * h[t,k]) - y[t])**2)", names, inputs)
    job = einmpi.program(text, outputs=[f"grad_{name}" for name in names], **inputs)
    expected = {f"grad_{name}": array for name, array in rnn_gradients(**inputs).items()}
    return job, inputs, expected


def test_gradients_through_time():
    job, inputs, expected = gradients_case()
    found = run_on_gpu(job, inputs)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, **CLOSE, err_msg=name)


@pytest.mark.parametrize("graphs", ("off", "on"))
def test_again_and_again_gives_the_same_bits(graphs, monkeypatch):
    """Kernels before and after the steps are launched in graphs from the third call on."""
    monkeypatch.setenv(GRAPHS_VARIABLE, graphs)
    job, inputs, expected = gradients_case()
    compiled = einmpi.compile(on_gpu(job), ALONE)
    first = {name: array.gather() for name, array in compiled(inputs).items()}
    for name, values in expected.items():
        np.testing.assert_allclose(first[name], values, **CLOSE, err_msg=name)
    for _ in range(5):
        for name, array in compiled(inputs).items():
            np.testing.assert_array_equal(array.gather(), first[name], err_msg=name)


def test_kalman_filter():
    text, inputs, sizes, expected = kalman_case()
    job = einmpi.program(text, outputs=list(expected), **inputs, **sizes)
    found = run_on_gpu(job, inputs)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, **CLOSE, err_msg=name)


def test_the_job_of_the_kalman_filter():
    job = einmpi.load(ROOT / "jobs" / "kalman.toml")
    expected = einmpi.reference(job)
    for name, values in run_on_gpu(job, {}).items():
        np.testing.assert_allclose(values, expected[name], **CLOSE, err_msg=name)


def test_several_tensors_together():
    inputs = lstm_inputs()
    found = run_on_gpu(einmpi.program(LSTM, outputs=["h", "c"], **inputs), inputs)
    for name, values in zip("hc", lstm(**inputs), strict=True):
        np.testing.assert_allclose(found[name], values, **CLOSE, err_msg=name)


def test_integers_backwards_and_two_steps_back():
    a, b = (np.random.default_rng(seed).integers(0, 4, size) for seed, size in ((1, 9), (2, 13)))
    text = f"""{EDIT}
    f[t:30] = where(t > 1, f[t-1] + f[t-2], 1)
    last[t] = where(t < 8, maximum(last[t+1], a[t]), a[t])
    """
    job = einmpi.program(text, outputs=["d", "f", "last"], a=a, b=b, p=9, q=13)
    found = run_on_gpu(job, {"a": a, "b": b})
    np.testing.assert_array_equal(found["d"], edit_distances(a, b))
    assert found["f"].tolist()[:8] == [1, 1, 2, 3, 5, 8, 13, 21]
    np.testing.assert_array_equal(found["last"], np.maximum.accumulate(a[::-1])[::-1])


def test_gates_that_are_computed_again():
    job, inputs = lstm_gradients(20)
    expected = einmpi.reference(job, inputs)
    for name, values in run_on_gpu(job, inputs).items():
        np.testing.assert_allclose(values, expected[name], **CLOSE, err_msg=name)
    found = einmpi.run(on_gpu(job), inputs, ALONE, recompute=GATES)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name].gather(), values, **CLOSE, err_msg=name)


def test_training_in_a_loop():
    text = f"""
    {RNN}
    loss = mean((sum(V[k] * h[t,k]) - y[t])**2)
    W_next[k,l] = W[k,l] - 0.05 * grad(loss, W[k,l])
    V_next[k] = V[k] - 0.05 * grad(loss, V[k])
    """
    inputs = rnn_inputs(steps=9, width=6) | normal(7, V=(6,), y=(9,))
    job = einmpi.program(text, **inputs)
    carry = {"W": "W_next", "V": "V_next"}
    done = einmpi.loop(on_gpu(job), inputs, ALONE, carry=carry, steps=8, record=["loss"])
    state = dict(inputs)
    for _ in range(8):
        gradients = rnn_gradients(**state)
        state |= {name: state[name] - 0.05 * gradients[name] for name in "WV"}
    for name in "WV":
        np.testing.assert_allclose(done.outputs[name].gather(), state[name], **CLOSE)


# ---- random numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
def test_random_numbers_have_the_bits_of_the_cpu(call):
    job = einmpi.program(f"Z[i:230,j:170] = {call}")
    found = run_on_gpu(job, {})["Z"]
    expected = einmpi.run(job, {}, ALONE)["Z"].gather()
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_random_numbers_inside_of_other_kernels():
    """Of a mask alone, the bits are those of the CPU; sums add up in another order."""
    text = """
    Y[i,j] = where(bernoulli(0.8, seed, i, j), X[i,j], 0.0)
    s[i] = sum(normal(seed, i, j) * X[i,j])
    """
    x = np.random.default_rng(1).normal(size=(60, 90))
    inputs = {"X": x, "seed": np.int64(-(2**40))}
    job = einmpi.program(text, **inputs)
    found = run_on_gpu(job, inputs)
    i, j = np.indices(x.shape)
    kept = random_numbers("bernoulli", 0.8, inputs["seed"], i, j)
    np.testing.assert_array_equal(found["Y"], np.where(kept, x, 0.0))
    numbers = random_numbers("normal", inputs["seed"], i, j)
    np.testing.assert_allclose(found["s"], (numbers * x).sum(axis=1), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("graphs", ("off", "on"))
def test_loops_take_new_numbers_in_each_step(graphs, monkeypatch):
    """The number of the step changes what is launched, with graphs as well."""
    monkeypatch.setenv(GRAPHS_VARIABLE, graphs)
    text = """
    u[i:11]   = uniform(3, i, step)
    v[i:11]   = uniform32(3, i, step)
    x_next[i] = x[i] + u[i] + v[i] + where(bernoulli(0.5, 5, step, i), 1.0, 0.0)
    """
    job = einmpi.program(text, x=(11,))
    inputs = {"x": np.zeros(11)}
    found = einmpi.loop(on_gpu(job), inputs, ALONE, carry={"x": "x_next"}, steps=9)
    on_cpu = einmpi.loop(job, inputs, ALONE, carry={"x": "x_next"}, steps=9)
    # Additions alone: they are rounded alike everywhere.
    np.testing.assert_array_equal(found.outputs["x"].gather(), on_cpu.outputs["x"].gather())
    i = np.arange(11)
    wanted = np.zeros(11)
    for step in range(9):
        wanted += random_numbers("uniform", 3, i, step) + random_numbers("uniform32", 3, i, step)
        wanted += random_numbers("bernoulli", 0.5, 5, step, i)
    np.testing.assert_allclose(found.outputs["x"].gather(), wanted, rtol=1e-14)


def test_noise_in_the_steps_of_a_recurrence():
    """A random walk: the numbers depend on the label along which it goes."""
    job = einmpi.program("w[t:40,k:7] = where(t > 0, w[t-1,k], 0.0) + normal(9, t, k)")
    found = run_on_gpu(job, {})["w"]
    t, k = np.indices((40, 7))
    wanted = np.cumsum(random_numbers("normal", 9, t, k), axis=0)
    # The oracle's logarithms and sines may differ in the last bits.
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal(found, einmpi.run(job, {}, ALONE)["w"].gather())
