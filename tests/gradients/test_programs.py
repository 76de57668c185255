"""Gradients of many programs against differences of their losses."""

from __future__ import annotations

import numpy as np
import pytest
from gradient_programs import PROGRAMS, arrays_of, gradient_text
from graph_helpers import as_written, results

from einmpi.kernels.reference import evaluate

STEP = 1e-5


def change_along(graph, arrays, directions):
    """The derivative of the loss along directions of the inputs, by a difference."""
    losses = []
    for sign in (1, -1):
        moved = {key: arrays[key] + sign * STEP * d for key, d in directions.items()}
        losses.append(float(evaluate(graph, {**arrays, **moved})["loss"]))
    return (losses[0] - losses[1]) / (2 * STEP)


ALWAYS = ["convolution", "empty_periodic", "flatten_three", "gather_and_arithmetic", "softmax"]


@pytest.mark.sampled(18, always=ALWAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_limits_of_differences(name):
    text, arrays, parameters = arrays_of(name)
    found = results(gradient_text(text, parameters, arrays), arrays)
    forward = as_written("\n".join(text.split(";")), arrays, outputs=["loss"])
    if name == "stop":
        np.testing.assert_allclose(found["dx"], arrays["x"] * arrays["w"], rtol=1e-14)
        return
    rng = np.random.default_rng(5)
    for parameter in parameters:
        gradient = found[f"d{parameter}"]
        assert gradient.shape == arrays[parameter].shape
        assert gradient.dtype == arrays[parameter].dtype
        direction = rng.normal(size=gradient.shape)
        if gradient.dtype.kind == "c":
            direction = direction + 1j * rng.normal(size=gradient.shape)
        expected = change_along(forward, arrays, {parameter: direction})
        # The gradient by a complex number is by its real part, and i times that by its imaginary.
        slope = np.sum(np.real(np.conj(gradient) * direction))
        np.testing.assert_allclose(slope, expected, rtol=2e-7, atol=2e-7, err_msg=parameter)
