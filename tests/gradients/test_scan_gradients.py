"""Gradients of running products, maxima and minima: linear work, zeros and ties, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import run_on_threads
from hypothesis import given, settings
from hypothesis import strategies as st

import einmpi

ACCUMULATE = {
    "cumprod": np.multiply.accumulate,
    "cummax": np.maximum.accumulate,
    "cummin": np.minimum.accumulate,
}
PROGRAM = "c[a,j] = {}[j](x[a,j]); loss = sum(c[a,j] * g[a,j]); dx[a,j] = grad(loss, x[a,j])"


def gradient_of_row(function: str, values: np.ndarray, adjoint: np.ndarray) -> np.ndarray:
    """Return the gradient by its definition, with n² operations."""
    results = ACCUMULATE[function](values)
    gradient = np.zeros_like(values)
    for end in range(len(values)):
        before = values[: end + 1]
        for place in range(end + 1):
            if function == "cumprod":
                sent = adjoint[end] * np.conj(np.prod(np.delete(before, place)))
            else:
                is_equal = before == results[end]
                sent = adjoint[end] / is_equal.sum() if is_equal[place] else 0
            gradient[place] += sent
    return gradient


def gradient(function: str, values: np.ndarray, adjoint: np.ndarray) -> np.ndarray:
    rows = zip(values, adjoint, strict=True)
    return np.array([gradient_of_row(function, *row) for row in rows]).reshape(values.shape)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("function", ACCUMULATE)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_zeros_and_ties(function, data):
    rows = data.draw(st.integers(1, 2))
    length = data.draw(st.integers(1, 9))
    ranks = data.draw(st.sampled_from((1, 2, 3)))
    seed = data.draw(st.integers(0, 10**6))
    rng = np.random.default_rng(seed)
    values = rng.integers(-2, 3, (rows, length)).astype(float)  # many are 0, many are equal
    if data.draw(st.booleans()):
        values = rng.normal(size=(rows, length))
    adjoint = rng.normal(size=(rows, length))
    job = einmpi.program(PROGRAM.format(function), x=values, g=adjoint)
    done = run_on_threads(job, ranks, {"x": values, "g": adjoint})
    assert done.moved == done.plan.bytes_predicted
    wanted = gradient(function, values, adjoint)
    np.testing.assert_allclose(done.outputs["dx"], wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("function", ACCUMULATE)
def test_the_work_is_linear(function):
    """It was quadratic: 10⁸ for 10⁴ values."""
    shapes = {"x": (1, 10_000), "g": (1, 10_000)}
    job = einmpi.program(PROGRAM.format(function), **shapes)
    assert job.graph.operations() < 60 * 10_000


@pytest.mark.parametrize("function", ACCUMULATE)
def test_long_lines_in_float32(function):
    rng = np.random.default_rng(5)
    values = (1 + rng.normal(size=(1, 150)) / 50).astype("float32")
    adjoint = rng.normal(size=(1, 150)).astype("float32")
    job = einmpi.program(PROGRAM.format(function), x=values, g=adjoint)
    found = run_on_threads(job, 2, {"x": values, "g": adjoint}).outputs["dx"]
    wanted = gradient(function, values.astype(float), adjoint.astype(float))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


def test_complex_products():
    rng = np.random.default_rng(6)
    values = rng.normal(size=(2, 6)) + 1j * rng.normal(size=(2, 6))
    values[0, 2] = 0
    values[1, [1, 4]] = 0
    text = "c[a,j] = cumprod[j](x[a,j]); loss = sum(real(c[a,j]) * g[a,j])"
    weights = rng.normal(size=(2, 6))
    job = einmpi.program(f"{text}; dx[a,j] = grad(loss, x[a,j])", x=values, g=weights)
    found = run_on_threads(job, 2, {"x": values, "g": weights}).outputs["dx"]
    wanted = gradient("cumprod", values, weights.astype(complex))
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("function", ["cummax", "cummin"])
def test_nan_has_no_gradient(function):
    values = np.array([[1.0, 3.0, np.nan, 5.0]])
    weights = np.array([[1.0, 2.0, 4.0, 8.0]])
    job = einmpi.program(PROGRAM.format(function), x=values, g=weights)
    found = run_on_threads(job, 1, {"x": values, "g": weights}).outputs["dx"]
    wanted = {"cummax": [1, 2, 0, 0], "cummin": [3, 0, 0, 0]}
    np.testing.assert_array_equal(found, [wanted[function]])


@pytest.mark.parametrize("function", ACCUMULATE)
def test_second_derivatives(function):
    """The Hessian of Σ g·c² by differences of the gradient."""
    rng = np.random.default_rng(7)
    values = rng.normal(size=(1, 5))
    weights = rng.normal(size=(1, 5))
    direction = rng.normal(size=(1, 5))
    text = (
        f"c[a,j] = {function}[j](x[a,j]); loss = sum(c[a,j]**2 * g[a,j]); "
        "dx[a,j] = grad(loss, x[a,j]); slope = sum(dx[a,j] * v[a,j]); "
        "h[a,j] = grad(slope, x[a,j])"
    )
    job = einmpi.program(text, outputs=["dx", "h"], x=values, g=weights, v=direction)

    def outputs(at: np.ndarray) -> dict[str, np.ndarray]:
        return run_on_threads(job, 1, {"x": at, "g": weights, "v": direction}).outputs

    step = 1e-6
    above = outputs(values + step * direction)["dx"]
    below = outputs(values - step * direction)["dx"]
    np.testing.assert_allclose(outputs(values)["h"], (above - below) / (2 * step), rtol=1e-6)
