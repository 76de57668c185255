"""The derivative of every operation and aggregation, by its record, against differences."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from graph_helpers import build
from hypothesis import given, settings
from hypothesis import strategies as st

import einmpi
from einmpi.errors import InputError
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.dtypes import as_ufunc
from einmpi.graph.operations import (
    OPERATIONS,
    Operation,
    register_operation,
    unregister_operation,
)
from einmpi.kernels.reference import evaluate

COUNT = 6
STEP = 1e-6
RECORDS = {**OPERATIONS, **AGGREGATIONS}
# Values at which functions of real numbers are smooth; where not stated, −2 to 2.
POSITIVE = (0.25, 3.0)
DOMAINS = {
    "log": POSITIVE,
    "log2": POSITIVE,
    "log10": POSITIVE,
    "log1p": (-0.5, 3.0),
    "sqrt": POSITIVE,
    "rsqrt": POSITIVE,
    "tan": (-1.25, 1.25),
    "**": POSITIVE,
    "/": POSITIVE,
    "%": POSITIVE,
    "arctan2": POSITIVE,
}
TEXTS = {
    "+": "x[i] + y[i]",
    "-": "x[i] - y[i]",
    "*": "x[i] * y[i]",
    "/": "x[i] / y[i]",
    "%": "x[i] % y[i]",
    "**": "x[i] ** y[i]",
    "neg": "-x[i]",
    "where": "where(z[i] > 0.5, x[i], y[i])",
    "clip": "clip(x[i], y[i] - 1, z[i] + 1)",
}


def test_every_record_has_a_derivative_or_is_flat():
    for name, record in RECORDS.items():
        assert (record.derivative is None) == record.is_flat, name


DIFFERENTIABLE = [name for name, record in OPERATIONS.items() if record.derivative is not None]


def expression(name):
    if name in TEXTS:
        return TEXTS[name]
    if name.startswith(("complex", "conj", "real", "imag")):
        return f"real({name}(x[i]) * z[i])"
    arguments = ", ".join(("x[i]", "y[i]", "z[i]")[: OPERATIONS[name].arity])
    return f"{name}({arguments})"


@cache
def graphs(text, shape):
    """The graphs of a loss over three inputs, and of its gradients by them."""
    inputs = dict.fromkeys("xyz", (shape, "float64"))
    loss = f"loss = sum({text}) + 0 * sum(x[i] * y[i] * z[i])"
    labels = ",".join("ijk"[: len(shape)])
    if len(shape) == 2:
        loss = f"loss = sum(({text}) * z[i,0]) + 0 * sum(x[i,j] * y[i,j] * z[i,j])"
    gradients = "\n".join(f"d{name}[{labels}] = grad(loss, {name}[{labels}])" for name in "xyz")
    forward = build(loss, inputs)
    backward = build(f"{loss}\n{gradients}", inputs)
    return forward, backward


def check_slopes(text, arrays, rtol):
    forward, backward = graphs(text, arrays["x"].shape)
    gradients = evaluate(backward, arrays)
    rng = np.random.default_rng(0)
    for name in "xyz":
        direction = rng.uniform(0.5, 1, arrays[name].shape)
        losses = []
        for sign in (1, -1):
            moved = {**arrays, name: arrays[name] + sign * STEP * direction}
            losses.append(float(evaluate(forward, moved)["loss"]))
        slope = (losses[0] - losses[1]) / (2 * STEP)
        found = np.sum(gradients[f"d{name}"] * direction)
        np.testing.assert_allclose(found, slope, rtol=rtol, atol=rtol, err_msg=name)


@pytest.mark.sampled(10, always=["**", "where", "float16", "complex64"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
@settings(max_examples=3)
@given(data=st.data())
def test_operation(name, data):
    low, high = DOMAINS.get(name, (-2.0, 2.0))
    numbers = st.floats(low, high, width=32)
    arrays = {}
    for key in "xyz":
        arrays[key] = np.array(data.draw(st.lists(numbers, min_size=COUNT, max_size=COUNT)))
    # Away from ties and kinks, which have no derivative.
    arrays["x"] = arrays["x"] + np.where(np.abs(arrays["x"]) < 0.1, 0.15, 0)
    arrays["y"] = arrays["y"] + np.where(np.abs(arrays["x"] - arrays["y"]) < 0.01, 0.03, 0)
    if name == "%":
        fraction = arrays["x"] / arrays["y"] % 1
        arrays["x"] = arrays["x"] + np.where(np.abs(fraction - 0.5) > 0.45, arrays["y"] / 4, 0)
    if name in ("clip", "where"):
        near = np.abs(arrays["x"] - arrays["y"] + 1) < 0.01
        near |= np.abs(arrays["x"] - arrays["z"] - 1) < 0.01
        near |= np.abs(arrays["z"] - 0.5) < 0.01
        near |= np.abs(np.maximum(arrays["x"], arrays["y"] - 1) - arrays["z"] - 1) < 0.01
        for key in "xyz":
            arrays[key] = arrays[key][~near]
        for key in "xyz":
            arrays[key] = np.resize(arrays[key], COUNT) if arrays[key].size else np.ones(COUNT) / 4
    text = expression(name)
    is_single = name in ("float16", "bfloat16", "float32", "complex64")
    if is_single:  # differences would show the steps of the dtype
        _, backward = graphs(text, (COUNT,))
        gradient = evaluate(backward, arrays)["dx"]
        expected = arrays["z"] if name == "complex64" else np.ones(COUNT)
        np.testing.assert_allclose(gradient, expected, rtol=1e-6)
        return
    check_slopes(text, arrays, 1e-5)


@pytest.mark.parametrize("name", [n for n, r in AGGREGATIONS.items() if not r.is_flat])
@settings(max_examples=4)
@given(seed=st.integers(0, 10**6), zeros=st.integers(0, 2))
def test_aggregation(name, seed, zeros):
    rng = np.random.default_rng(seed)
    arrays = {key: rng.normal(size=(3, 4)) for key in "xyz"}
    if name == "prod":
        arrays["x"][0, :zeros] = 0
        arrays["y"][0, :zeros] = 0
    check_slopes(f"{name}[j](x[i,j] + y[i,j] * y[i,j])", arrays, 1e-5)


def test_ties():
    """Equal values share the derivative; that of relu is 0 at 0, and that of abs too."""
    text = (
        "extreme = sum(max(x[i,j]) * w[i] + min(x[i,j]))\n"
        "loss = extreme + sum(maximum(a[i], 0) + relu(b[i]) + abs(c[i]))\n"
        "dx[i,j] = grad(loss, x[i,j])\nda[i] = grad(loss, a[i])\n"
        "db[i] = grad(loss, b[i])\ndc[i] = grad(loss, c[i])"
    )
    x = np.array([[1.0, 1, 0], [2, 2, 2]])
    zeros = np.zeros(2)
    arrays = {"x": x, "w": np.array([6.0, 12]), "a": zeros, "b": zeros, "c": zeros}
    found = evaluate(build(text, arrays), arrays)
    np.testing.assert_array_equal(found["dx"], [[3, 3, 1], [4 + 1 / 3] * 3])
    np.testing.assert_array_equal(found["da"], [0.5, 0.5])
    np.testing.assert_array_equal(found["db"], zeros)
    np.testing.assert_array_equal(found["dc"], zeros)


def test_far_out():
    """No inf/inf or 0 · inf where functions themselves are finite."""
    text = (
        "loss = sum(sigmoid(x[i]) + 1 / (1 + exp(-x[i])) + log(1 + exp(-x[i])) + silu(x[i]))\n"
        "safe = sum(where(x[i] > 0, log(x[i]), 0) + where(x[i] > 0, sqrt(x[i]), x[i]))\n"
        "soft = sum(softmax[i](x[i]) * w[i]) + logsumexp(x[i])\n"
        "a[i] = grad(loss, x[i]); b[i] = grad(safe, x[i]); c[i] = grad(soft, x[i])"
    )
    arrays = {"x": np.array([-1000.0, 0, 1000]), "w": np.ones(3)}
    found = evaluate(build(text, arrays), arrays)
    np.testing.assert_allclose(found["a"], [-1, 0.25 + 0.25 - 0.5 + 0.5, 1], atol=1e-15)
    np.testing.assert_allclose(found["b"], [1, 1, 1e-3 + 0.5 / np.sqrt(1000)], rtol=1e-15)
    np.testing.assert_allclose(found["c"], [0, 0, 1], atol=1e-15)


def test_an_operation_whose_derivative_is_not_known():
    twice = Operation(
        name="twice",
        arity=1,
        documentation="2 x",
        function=lambda x: 2 * x,
        dtypes=as_ufunc(np.sqrt),
    )
    register_operation(twice)
    try:
        with pytest.raises(InputError) as error:
            einmpi.program("loss = sum(twice(x[i])); g[i] = grad(loss, x[i])", x=(3,))
    finally:
        unregister_operation("twice")
    assert str(error.value) == (
        "program:1:33: the derivative of twice is not known; "
        "expected an operation with a derivative; use stop(…) around it"
    )
