"""Losses and gradients of four models against numbers on which PyTorch and JAX agree."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import einmpi

FOLDER = Path(__file__).parent / "golden"
PROBLEMS = json.loads((FOLDER / "gradients.json").read_text())["problems"]


@pytest.mark.parametrize("name", PROBLEMS)
def test_golden_numbers(name):
    expected = PROBLEMS[name]
    parameters = list(expected["gradients"])
    job = einmpi.load(FOLDER / f"{name}.toml")
    loss, gradients = einmpi.value_and_grad(job, "loss", parameters)
    np.testing.assert_allclose(loss, float(expected["loss"]), rtol=1e-11)
    for parameter in parameters:
        numbers = expected["gradients"][parameter]
        norm = float(numbers["norm"])
        gradient = gradients[parameter].gather()
        np.testing.assert_allclose(np.linalg.norm(gradient), norm, rtol=1e-11)
        np.testing.assert_allclose(gradient.sum(), float(numbers["sum"]), atol=1e-11 * norm)
        np.testing.assert_allclose(gradient.flat[0], float(numbers["first"]), atol=1e-11 * norm)
