"""Sparse parameters in training: by every optimiser as numpy does it where something is stored."""

import numpy as np
import pytest
import scipy.sparse
from numpy_optimizers import clipped, make

import einmpi
from einmpi.cli.main import main
from einmpi.comm.threads import run_threads
from einmpi.training.settings import optimizers

RNG = np.random.default_rng(0)
DENSE = np.where(RNG.random((6, 5)) < 0.4, RNG.standard_normal((6, 5)), 0)
CSR = scipy.sparse.csr_array(DENSE)
X = RNG.standard_normal(5)
TEXT = "y[i] = sum(A[i,j] * x[j]); loss = sum((y[i] - 1)**2)"
NAMES = [name for name in optimizers() if name != "muon"]


def train(optimizer, steps, comm=None, **more):
    """Train A for some steps; return the result, and A as a dense matrix."""
    found = einmpi.train(
        einmpi.program(TEXT, A=CSR, x=X),
        {"A": CSR, "x": X},
        comm=comm,
        loss="loss",
        parameters=["A"],
        optimizer=optimizer,
        steps=steps,
        record=["loss"],
        **more,
    )
    return found, found.outputs["A"].gather().toarray()


def gradient_at(values):
    """The gradient where something is stored; what is not stored is a constant."""
    return np.where(DENSE != 0, np.outer(2 * (values @ X - 1), X), 0)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer(name, ranks):
    optimizer = {"name": name, "rate": 0.1, "decay": 0.05, "clip": 0.5}
    found, values = run_threads(ranks, lambda comm: train(optimizer, 4, comm))[0]
    wanted = DENSE.copy()
    oracle = make(name, 0.1, decay=0.05)
    for step in range(4):
        residual = wanted @ X - 1
        assert found.history["loss"][step] == pytest.approx(residual @ residual, rel=1e-12)
        oracle.step(step, [wanted], clipped([gradient_at(wanted)], 0.5), 0.1)
    np.testing.assert_allclose(values, wanted, rtol=1e-10, atol=1e-12)
    state = optimizers()[name].of(2)
    for each in state.state:
        kind = einmpi.DistArray if each in state.labels else einmpi.SparseArray
        assert isinstance(found.state[f"A_{each}"], kind)


def test_gradients_of_several_batches():
    _, values = train({"name": "momentum", "rate": 0.02}, 6, accumulate=2)
    wanted = DENSE.copy()
    oracle = make("momentum", 0.02)
    for step in range(3):
        oracle.step(step, [wanted], [gradient_at(wanted)], 0.02)
    np.testing.assert_allclose(values, wanted, rtol=1e-10)


@pytest.mark.parametrize(("precision", "bits"), [("float16", 10), ("bfloat16", 7)])
def test_precision(precision, bits):
    """Gradients are those that the precision has; their scale is a power of two."""
    more = {"scale": 16.0} if precision == "float16" else {}
    _, values = train({"name": "sgd", "rate": 0.01}, 3, precision=precision, **more)
    wanted = DENSE.copy()
    for _ in range(3):
        wanted -= 0.01 * gradient_at(wanted)
    assert (values[DENSE == 0] == 0).all()
    change = abs(wanted - DENSE).max()
    assert 0 < abs(values - wanted).max() <= 2.0 ** (2 - bits) * (change + abs(DENSE).max())


@pytest.mark.parametrize("name", ["adam", "adafactor"])
def test_a_training_goes_on_from_a_result(name):
    optimizer = {"name": name, "rate": 0.1}
    whole, values = train(optimizer, 5)
    half, _ = train(optimizer, 2)
    rest, again = train(optimizer, 5, start=half)
    np.testing.assert_array_equal(values, again)
    np.testing.assert_array_equal(whole.history["loss"], rest.history["loss"])
    A = half.state["A"]
    keys = (A.pattern[0], A.pattern[1][::-1])
    half.state["A"] = einmpi.SparseArray.from_keys(keys, np.ones(A.nnz), (6, 5))
    with pytest.raises(einmpi.InputError, match="start has another pattern of A; expected"):
        train(optimizer, 5, start=half)


def test_an_optimizer_of_whole_matrices_is_refused():
    with pytest.raises(einmpi.InputError, match="A has another pattern than A_next"):
        train({"name": "muon", "rate": 0.1}, 2)


def test_a_choice_of_the_same_numbers_is_sparse():
    job = einmpi.program("Z[i,j] = where(x[j] > 0, 0, A[i,j] + A[i,j])", A=CSR, x=X)
    found = einmpi.run(job, A=CSR, x=X)["Z"]
    assert isinstance(found, einmpi.SparseArray) and found.nnz == CSR.nnz
    np.testing.assert_array_equal(found.gather().toarray(), np.where(X > 0, 0, 2 * DENSE))


def test_the_reference_trains_what_is_stored(tmp_path, capsys):
    """Elements that are not stored are constants there, too."""
    with open(tmp_path / "job.toml", "w") as file:
        file.write("""
program = '''
y[b,i] = sum[j](X[b,j] * A[j,i])
loss = mean((y[b,i] - 1)**2)
'''
[inputs]
X = { shape = [40, 12], random = "normal", seed = 2, batch = 10 }
A = { random = "sparse", shape = [12, 5], nnz = 20, seed = 1 }
[loop]
epochs = 2
[train]
loss = "loss"
parameters = ["A"]
optimizer = { name = "adamw", rate = 0.05, decay = 0.1, clip = 0.5 }
""")
    assert main(["verify", str(tmp_path / "job.toml")]) == 0
    assert "A  agrees" in capsys.readouterr().out
    A = scipy.sparse.csr_array([[0.0, 2, 0], [3, 0, 0]])
    job = einmpi.grad(einmpi.program("loss = sum((A[i,j] - 1)**2)", A=A), "loss", ["A"])
    wanted = [[0, 2, 0], [4, 0, 0]]
    assert einmpi.reference(job, {"A": A})["dA"].tolist() == wanted
    assert einmpi.run(job, A=A)["dA"].gather().toarray().tolist() == wanted
    dense = [[-2, 2, -2], [4, -2, -2]]
    assert einmpi.reference(job, {"A": A.toarray()})["dA"].tolist() == dense
