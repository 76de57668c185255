"""The example jobs that are trained: against numpy, and what they reach."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from numpy_optimizers import Adam
from paths import ROOT

import einmpi
from einmpi.comm.threads import run_threads
from einmpi.files.reading import load_array

TRAINED = []
for path in sorted((ROOT / "jobs").glob("*.toml")):
    if "\n[train]\n" in path.read_text():
        TRAINED.append(path.stem)


@pytest.fixture
def folder(tmp_path):
    """The example jobs, so that what they write goes elsewhere."""
    copied = tmp_path / "jobs"
    shutil.copytree(ROOT / "jobs", copied, ignore=shutil.ignore_patterns("*.h5"))
    return copied


def test_every_trained_example_is_tested():
    assert TRAINED == ["digits", "ffnn", "tensor", "text"]  # ffnn: test_experiment2.py


def first_values(job):
    """The inputs of a job that are generated."""
    arrays = {}
    for spec in job.inputs:
        if spec.file is None:
            arrays[spec.name] = load_array(spec, spec.shape, spec.dtype)
    return arrays


def trained(job, steps, ranks=1):
    """Train for some steps, with batches in the order of the file; return history and results."""
    batches = job.loop.batches
    if batches is not None:
        batches = replace(batches, shuffle=None, epochs=None)
    loop = replace(job.loop, steps=steps, batches=batches)

    def on_rank(comm):
        result = einmpi.loop(replace(job, loop=loop), comm=comm)
        outputs = {name: array.gather() for name, array in result.outputs.items()}
        return result.history, outputs

    return run_threads(ranks, on_rank)[0]


# ---- handwritten digits --------------------------------------------------------------------------


def digits_scores(X, W1, b1, W2, b2):
    return np.maximum(X / 16 @ W1 + b1, 0) @ W2 + b2


def digits_gradients(X, y, parameters):
    """The mean cross entropy and its gradients, written by hand."""
    W1, b1, W2, b2 = parameters
    inputs = X / 16
    hidden = np.maximum(inputs @ W1 + b1, 0)
    scores = hidden @ W2 + b2
    chances = np.exp(scores - scores.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    rows = np.arange(len(y))
    loss = -np.log(chances[rows, y]).mean()
    d_scores = chances
    d_scores[rows, y] -= 1
    d_scores /= len(y)
    d_hidden = np.where(hidden > 0, d_scores @ W2.T, 0)
    return loss, [inputs.T @ d_hidden, d_hidden.sum(0), hidden.T @ d_scores, d_scores.sum(0)]


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(5, marks=pytest.mark.slow)])
def test_digits_are_learned_as_by_hand(folder, ranks):
    job = einmpi.load(folder / "digits.toml", dtype="float64", b=60, h=9)
    history, outputs = trained(job, 4, ranks)
    arrays = first_values(job)
    rows = np.load(folder / "digits.npy")
    names = ["W1", "b1", "W2", "b2"]
    parameters = [arrays[name] for name in names]
    optimizer = Adam(0.01)
    for step in range(4):
        batch = rows[60 * step : 60 * (step + 1)]
        test_scores = digits_scores(rows[1497:, :64], *parameters)
        accuracy = (test_scores.argmax(1) == rows[1497:, 64]).mean()
        assert history["accuracy"][step] == pytest.approx(accuracy, abs=1e-12)
        loss, gradients = digits_gradients(batch[:, :64], batch[:, 64], parameters)
        assert history["loss"][step] == pytest.approx(loss, rel=1e-12)
        optimizer.step(step, parameters, gradients, 0.01)
    for name, wanted in zip(names, parameters, strict=True):
        np.testing.assert_allclose(outputs[name], wanted, rtol=1e-9, atol=1e-9)


def test_digits_are_those_of_scikit_learn(folder):
    import sklearn.datasets

    digits = sklearn.datasets.load_digits()
    rows = np.column_stack([digits.data, digits.target]).astype("uint8")
    wanted = np.random.default_rng(0).permutation(rows)
    np.testing.assert_array_equal(np.load(folder / "digits.npy"), wanted)


@pytest.mark.slow
def test_digits_reach_97_percent(folder):
    result = einmpi.loop(einmpi.load(folder / "digits.toml"))
    weights = [result.outputs[name].gather() for name in ("W1", "b1", "W2", "b2")]
    rows = np.load(folder / "digits.npy")[1497:]
    found = digits_scores(rows[:, :64].astype("float32"), *weights).argmax(1)
    assert (found == rows[:, 64]).mean() >= 0.97
    assert result.history["accuracy"][-1] >= 0.97


# ---- a tensor of low rank ------------------------------------------------------------------------


def test_tensor_is_decomposed_as_by_hand(folder):
    job = einmpi.load(folder / "tensor.toml")
    arrays = first_values(job)
    tensor = np.einsum("iq,jq,kq->ijk", arrays["A_true"], arrays["B_true"], arrays["C_true"])
    A, B, C = parameters = [arrays[name] for name in "ABC"]
    optimizer = Adam(0.05)
    history, outputs = trained(job, 5, ranks=3)
    for step in range(5):
        residual = np.einsum("ir,jr,kr->ijk", A, B, C) - tensor
        norm = np.square(tensor).sum()
        assert history["loss"][step] == pytest.approx(np.square(residual).sum() / norm, rel=1e-12)
        scaled = 2 * residual / norm
        gradients = [
            np.einsum("ijk,jr,kr->ir", scaled, B, C),
            np.einsum("ijk,ir,kr->jr", scaled, A, C),
            np.einsum("ijk,ir,jr->kr", scaled, A, B),
        ]
        optimizer.step(step, parameters, gradients, 0.05)
    for name, wanted in zip("ABC", parameters, strict=True):
        np.testing.assert_allclose(outputs[name], wanted, rtol=1e-9, atol=1e-9)


def test_decomposition_finds_the_products_that_made_the_tensor(folder):
    job = einmpi.load(folder / "tensor.toml")
    result = einmpi.loop(job)
    assert result.is_done
    arrays = first_values(job)
    agreement = np.ones((3, 3))  # of each product that was found with each that made the tensor
    for name in "ABC":
        found = result.outputs[name].gather()
        true = arrays[f"{name}_true"]
        cosines = found.T @ true
        cosines /= np.outer(np.linalg.norm(found, axis=0), np.linalg.norm(true, axis=0))
        agreement *= np.abs(cosines)
    assert sorted(agreement.argmax(axis=0)) == [0, 1, 2]
    np.testing.assert_allclose(agreement.max(axis=0), 1, atol=1e-6)


# ---- a language model ----------------------------------------------------------------------------


def layernorm(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5)


def text_loss(w, byte, following):
    """The mean cross entropy of the next byte, by the same layers in numpy."""
    x = w["E"][byte] + w["P"]
    later = np.triu(np.full((byte.shape[1],) * 2, -np.inf), 1)
    for layer in "12":
        u = layernorm(x)
        q, k, v = (np.einsum("bsa,ahd->bhsd", u, w[f"W{name}{layer}"]) for name in "QKV")
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + later
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("bhsd,hda->bsa", weights @ v, w[f"WO{layer}"])
        hidden = np.maximum(layernorm(x) @ w[f"F{layer}"] + w[f"c{layer}"], 0)
        x = x + hidden @ w[f"G{layer}"]
    z = layernorm(x) @ w["W"]
    highest = z.max(-1, keepdims=True)
    log_sums = np.log(np.exp(z - highest).sum(-1)) + highest[..., 0]
    picked = np.take_along_axis(z, following[..., None].astype("int64"), -1)[..., 0]
    return (log_sums - picked).mean()


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_language_model_equals_numpy(folder, ranks):
    """The losses are numpy's, and the first step goes downhill along each of the weights."""
    job = einmpi.load(folder / "text.toml", dtype="float64", a=8, h=2, b=3)
    history, _ = trained(job, 2, ranks)
    rows = np.load(folder / "text.npy")
    weights = {}
    for name, array in first_values(job).items():
        if name != "step" and name not in job.loop.state:
            weights[name] = array
    first = rows[:3]
    assert history["loss"][0] == pytest.approx(
        text_loss(weights, first[:, :64], first[:, 1:]), 1e-12
    )
    _, after = trained(job, 1, ranks)
    second = rows[3:6]
    changed = {name: after[name] for name in weights}
    wanted = text_loss(changed, second[:, :64], second[:, 1:])
    assert history["loss"][1] == pytest.approx(wanted, rel=1e-12)
    for name, array in weights.items():
        direction = (after[name] - array) / 1000
        losses = [
            text_loss(weights | {name: array + sign * direction}, first[:, :64], first[:, 1:])
            for sign in (1, -1)
        ]
        assert losses[0] < losses[1], name


def test_text_is_the_licence(folder):
    text = np.fromfile(ROOT / "LICENSE", "uint8")
    wanted = np.lib.stride_tricks.sliding_window_view(text, 65)[::64]
    np.testing.assert_array_equal(np.load(folder / "text.npy"), wanted)


@pytest.mark.slow
def test_language_model_learns(folder):
    """From a guess among all bytes to less than how often each of them occurs tells."""
    job = einmpi.load(folder / "text.toml")
    result = einmpi.loop(replace(job, loop=replace(job.loop, steps=60)))
    assert result.history["loss"][0] > 4.7
    assert result.history["loss"][-1] < 2.6
