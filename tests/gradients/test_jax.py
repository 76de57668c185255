"""Gradients against those of JAX, program by program."""

from __future__ import annotations

import numpy as np
import pytest
from gradient_programs import PROGRAMS, arrays_of, gradient_text
from graph_helpers import as_written, results

jax_graph = pytest.importorskip("jax_graph", reason="JAX is not installed")


def test_there_are_many_programs():
    assert len(PROGRAMS) >= 60


def forward_graph(text, arrays):
    return as_written("\n".join(text.split(";")), arrays, outputs=["loss"])


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_those_of_jax(name):
    text, arrays, parameters = arrays_of(name)
    if name == "stop":
        # JAX knows no `stop` in the graph: what it stops is an input of its own.
        arrays["stopped"] = arrays["x"]
        forward = forward_graph(text.replace("stop(x[i])", "stopped[i]"), arrays)
    else:
        forward = forward_graph(text, arrays)
    value, expected = jax_graph.gradients(forward, "loss", parameters, arrays)
    found = results(gradient_text(text, parameters, arrays), arrays)
    np.testing.assert_allclose(found["value"], value, rtol=1e-13)
    for parameter in parameters:
        gradient = found[f"d{parameter}"]
        # JAX returns the conjugate of what a step of descent takes, which PyTorch returns.
        reference = np.conj(expected[parameter])
        assert gradient.shape == reference.shape
        assert gradient.dtype == reference.dtype
        scale = np.abs(reference).max(initial=0.0) or 1.0
        np.testing.assert_allclose(gradient, reference, rtol=1e-11, atol=1e-12 * scale)
