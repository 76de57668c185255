"""Gradients of random functions written with numpy, against differences."""

import numpy as np
import pytest

import einmpi
from einmpi.comm.threads import run_threads

# Smooth functions of a matrix, whose values and slopes stay moderate.
UNARY = [
    np.tanh,
    np.sin,
    lambda x: np.exp(-(x**2)),
    lambda x: np.sqrt(1 + x**2),
    lambda x: np.log1p(x**2),
    lambda x: x / (1 + np.abs(x)),
    lambda x: np.where(x > 0, x, 0.1 * x),
    lambda x: np.cos(x) * x,
]
RESHAPING = [
    lambda x: x.T,
    lambda x: x[::-1],
    lambda x: x[1:] - x[:-1],
    lambda x: x[:, ::2],
    lambda x: x.reshape(-1)[: x.size // 2 * 2].reshape(-1, 2),
    lambda x: np.concatenate([x, x[:1] * 2], axis=0),
    lambda x: np.stack([x, x**2]).sum(0),
    lambda x: np.roll(x, 1, axis=0),
    lambda x: np.pad(x, ((1, 0), (0, 1))),
    lambda x: x[np.arange(x.shape[0]) // 2],
    lambda x: np.cumsum(x, axis=0),
    lambda x: _with_a_row(x),
]
JOINING = [
    lambda x: x @ x.T / x.shape[1],
    lambda x: np.einsum("ij,ik->jk", x, x) / x.shape[0],
    lambda x: x - x.mean(0),
    lambda x: x / np.sqrt(1 + (x**2).sum(1, keepdims=True)),
    lambda x: np.exp(x - x.max(1, keepdims=True)) / 2,
    lambda x: x * x.sum(),
    lambda x: x * np.arange(1, x.shape[1] + 1) / 4,
]


def _with_a_row(x):
    found = x.copy()
    found[0] = np.tanh(x[-1])
    found[-1] *= 2
    return found


def random_loss(seed):
    """Return a function of a matrix to a number."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(rng.integers(2, 6)):
        kind = (UNARY, RESHAPING, JOINING)[rng.integers(3)]
        steps.append(kind[rng.integers(len(kind))])
    uses_input_again = rng.random() < 0.5

    def loss(x):
        value = x
        for step in steps:
            value = step(value)
        total = (value**2).mean() + value.sum() / 50
        return total + (np.tanh(x) * x).sum() / 9 if uses_input_again else total

    return loss


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(50))
def test_gradients_of_random_functions(seed):
    """Differences of fourth order, with steps of 1e-4: their errors are about 1e-11 of values."""
    loss = random_loss(seed)
    rng = np.random.default_rng(1000 + seed)
    x = rng.normal(size=(rng.integers(3, 6), rng.integers(3, 6)))
    expected = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[place] = 1e-4
        near = loss(x + step) - loss(x - step)
        far = loss(x + 2 * step) - loss(x - 2 * step)
        expected[place] = (8 * near - far) / 12e-4

    def on_rank(comm):
        value, gradient = einmpi.value_and_grad(loss)(einmpi.DistArray.from_global(x, comm))
        return value.gather(), gradient.gather()

    value, gradient = run_threads(1 + seed % 3, on_rank)[0]
    np.testing.assert_allclose(value, loss(x), rtol=1e-11)
    scale = 1 + np.abs(expected).max()
    np.testing.assert_allclose(gradient / scale, expected / scale, atol=1e-6)
