"""Sparse tensors in several loops, in validations and in what is carried, against numpy."""

import numpy as np
import pytest
import scipy.sparse
from numpy_optimizers import make

import einmpi
from einmpi.cli.help import make_parser
from einmpi.cli.main import main
from einmpi.cli.run import run_job
from einmpi.comm.threads import run_threads
from einmpi.errors import Stopped
from einmpi.files.sparse.reading import generate_sparse

N = 20
# A matrix is scaled, then multiplied in a loop, then another one is trained with its products.
SEQUENCE = f'''
[inputs]
A = {{ random = "sparse", shape = [{N}, {N}], nnz = 70, seed = 1, low = 0.1 }}
W = {{ random = "sparse", shape = [{N}, {N}], nnz = 50, seed = 3 }}
x = {{ random = "uniform", shape = [{N}], seed = 2 }}
[formats]
S = "sparse"
[outputs]
x = "x.npy"
S = "s.npz"
W = "w.mtx"
[[loop]]
program = """
d[i]   = sum[j](A[i,j]) + 0.1
S[i,j] = A[i,j] / d[i]
"""
[[loop]]
program = """
y[j]   = 0.9 * sum[i](S[i,j] * x[i]) + 0.01
change = max(abs(y[i] - x[i]))
"""
carry  = {{ x = "y" }}
steps  = 5
record = ["change"]
[[loop]]
program = """
z[i] = sum[j](W[i,j] * x[j])
w[i] = sum[j](S[i,j] * z[j])
loss = sum((w[i] - 0.1)**2)
"""
steps  = 6
record = ["loss"]
[loop.train]
loss       = "loss"
parameters = ["W"]
optimizer  = {{ name = "adam", rate = 0.01 }}
validation.every    = 4
validation.inputs.S = {{ random = "sparse", shape = [{N}, {N}], nnz = 90, seed = 9 }}
'''


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(SEQUENCE)
    return einmpi.load("job.toml")


def wanted_of_sequence(job):
    """What numpy makes of it: x, S, W, and the losses of the training and the validation."""
    specs = {spec.name: spec for spec in job.inputs}
    A, W = (generate_sparse(specs[name]).dense() for name in "AW")
    validation = job.loops[2].loop.validation
    other = generate_sparse(validation.inputs[0]).dense()
    x = einmpi.run(
        einmpi.program("y[i] = x[i]", inputs={"x": {"random": "uniform", "seed": 2, "shape": [N]}})
    )
    x = x["y"].gather()
    S = A / (A.sum(axis=1, keepdims=True) + 0.1)
    for _ in range(5):
        x = 0.9 * (S.T @ x) + 0.01
    is_stored = W != 0
    oracle = make("adam", 0.01)
    losses, validated = [], []
    for step in range(6):
        error = S @ W @ x - 0.1
        losses.append(error @ error)
        oracle.step(step, [W], [np.outer(2 * S.T @ error, x) * is_stored], 0.01)
        error = other @ W @ x - 0.1
        validated.append(error @ error if step in (3, 5) else np.nan)
    return x, S, W, losses, validated


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_loops_one_after_another(job, ranks):
    x, S, W, losses, validated = wanted_of_sequence(job)
    options = make_parser().parse_args(["run", "job.toml", "--quiet"])

    def on_rank(comm):
        report = run_job(options, comm)
        found = {name: report.outputs[name].gather() for name in "xSW"}
        return found, report.loops[2].history, report.as_json()

    found, history, data = run_threads(ranks, on_rank)[0]
    np.testing.assert_allclose(found["x"], x, rtol=1e-12)
    np.testing.assert_allclose(found["S"].toarray(), S, rtol=1e-12)
    np.testing.assert_allclose(found["W"].toarray(), W, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-10)
    np.testing.assert_allclose(history["validation_loss"], validated, rtol=1e-10)
    assert data["bytes_moved"] == data["bytes_predicted"]
    assert data["bytes_peak"] <= data["bytes_peak_predicted"]
    np.testing.assert_allclose(scipy.sparse.load_npz("s.npz").toarray(), S, rtol=1e-12)


@pytest.mark.parametrize("ranks", [1, 3])
def test_loops_from_python(job, ranks):
    """Given tensors take the places of those of the job, and dense ones those of sparse ones."""
    _, S, W, losses, _ = wanted_of_sequence(job)
    A = scipy.sparse.csr_array(generate_sparse(job.inputs[0]).dense())

    def on_rank(comm):
        found = einmpi.loop(job, {"A": A}, comm)
        assert isinstance(found.outputs["S"], einmpi.SparseArray)
        dense = einmpi.loop(job, {"A": A.toarray()}, comm)
        return found.outputs["W"].gather().toarray(), dense.outputs["S"].gather(), found.history

    trained, dense, history = run_threads(ranks, on_rank)[0]
    np.testing.assert_allclose(trained, W, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(dense, S, rtol=1e-12)
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-10)


def test_commands_with_several_loops(job, capsys):
    for command in (["check"], ["plan", "-n", "2"], ["verify"], ["run"]):
        assert main([*command, "job.toml"]) == 0
    text = capsys.readouterr().out
    assert f"stores       A: 70 of {N * N} elements, by rows" in text
    assert "S  agrees" in text and "validate loss every 4 steps with another S" in text
    assert main(["sbatch", "job.toml", "--nodes", "1", "--ntasks-per-node", "2"]) == 0
    assert "to read sparse inputs" in capsys.readouterr().out


@pytest.mark.parametrize("ranks", [1, 2])
def test_several_loops_continue(job, ranks, monkeypatch):
    def run(*flags, asked=()):
        options = make_parser().parse_args(["run", "job.toml", "--quiet", *flags])

        def on_rank(comm):
            report = run_job(options, comm, list(asked))
            if report.checkpoints is not None:
                report.checkpoints.remove()
            return report.outputs["W"].coordinates().values, report.loops[2].history

        return run_threads(ranks, on_rank)[0]

    wanted, history = run()
    flags = ("--checkpoint", "saved", "--every", "1s", "--resume")
    for _ in range(30):  # each of them does a step
        try:
            found, again = run(*flags, asked=["SIGUSR1"])
            break
        except Stopped:
            pass
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(again["validation_loss"], history["validation_loss"])


def test_a_format_names_a_tensor_of_any_loop(job, tmp_path):
    text = SEQUENCE.replace('S = "sparse"', 'Q = "sparse"')
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(einmpi.InputError, match="unknown tensor 'Q'"):
        einmpi.load("job.toml")


# ---- validation ----------------------------------------------------------------------------------

GCN = """
H[v,k] = relu(sum[w](A[v,w] * sum[f](X[w,f] * W1[f,k])))
Z[v]   = sum[w](A[v,w] * sum[k](H[w,k] * W2[k]))
loss   = sum[v](where(m[v] > 0, (Z[v] - t[v])**2, 0))
"""
RNG = np.random.default_rng(5)


def graph(nodes=12):
    edges = np.triu(RNG.random((nodes, nodes)) < 0.25)
    return scipy.sparse.csr_array((edges + edges.T + np.eye(nodes)) / 3)


INPUTS = {
    "A": graph(),
    "X": RNG.standard_normal((12, 3)),
    "W1": RNG.standard_normal((3, 4)),
    "W2": RNG.standard_normal(4),
    "m": np.arange(12) % 2 * 1.0,
    "t": RNG.standard_normal(12),
}
OTHERS = {  # what the validation has in place of them
    "the same graph": {"m": 1 - INPUTS["m"]},
    "another graph": {"A": graph(), "m": np.ones(12)},
    "another library": {"A": einmpi.SparseArray.from_sparse(graph())},
    "a dense graph": {"A": graph().toarray()},
    "nothing stored": {"A": scipy.sparse.csr_array((12, 12))},
}


def trained(inputs, others, comm=None, **more):
    return einmpi.train(
        einmpi.program(GCN, **inputs),
        inputs,
        comm,
        loss="loss",
        parameters=["W1", "W2"],
        optimizer={"name": "adam", "rate": 0.02},
        steps=6,
        record=["loss"],
        validation={"inputs": others, "every": 2, **more},
    )


def as_dense(inputs):
    found = {}
    for name, value in inputs.items():
        found[name] = value.gather().toarray() if isinstance(value, einmpi.SparseArray) else value
        if scipy.sparse.issparse(value):
            found[name] = value.toarray()
    return found


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_validation(name, ranks):
    """With sparse graphs as with dense ones, whether each of them or only one is sparse."""
    others = OTHERS[name]
    wanted = trained(as_dense(INPUTS), as_dense(others))

    def on_rank(comm):
        own = dict(others)
        if isinstance(own.get("A"), einmpi.SparseArray):
            whole = own["A"].gather()
            own["A"] = einmpi.SparseArray.from_sparse(whole, comm)
        return trained(INPUTS, own, comm).history, trained(as_dense(INPUTS), own, comm).history

    for history in run_threads(ranks, on_rank)[0]:
        for column in ("loss", "validation_loss"):
            np.testing.assert_allclose(history[column], wanted.history[column], rtol=1e-10)


def test_the_best_validation_ends_a_training():
    others = OTHERS["another graph"]
    found = trained(INPUTS, others, keep="best", patience=1)
    wanted = trained(as_dense(INPUTS), as_dense(others), keep="best", patience=1)
    assert (found.steps, found.best_step) == (wanted.steps, wanted.best_step)
    np.testing.assert_allclose(found.outputs["W2"].gather(), wanted.outputs["W2"].gather())


def test_a_sparse_parameter_is_validated_as_it_is_stored():
    A = graph()
    X = RNG.random((7, 12))
    job = einmpi.program("y[b,i] = sum[j](X[b,j] * A[j,i]); loss = sum((y[b,i] - 1)**2)", A=A, X=X)
    other = scipy.sparse.csr_array(np.where(RNG.random((7, 12)) < 0.3, X, 0))
    found = einmpi.train(
        job,
        {"A": A, "X": X},
        loss="loss",
        parameters=["A"],
        optimizer={"name": "sgd", "rate": 0.01},
        steps=3,
        validation={"inputs": {"X": other}, "every": 3},
    )
    values = found.outputs["A"].gather().toarray()
    assert ((values != 0) == (A.toarray() != 0)).all()
    wanted = ((other @ values - 1) ** 2).sum()
    np.testing.assert_allclose(found.history["validation_loss"][-1], wanted, rtol=1e-12)


def test_sparse_tensors_do_not_come_in_batches():
    X = scipy.sparse.csr_array(RNG.random((12, 3)))
    job = einmpi.program("loss = sum((sum[j](X[b,j] * w[j]) - 1)**2)", X=(4, 3), w=(3,))
    more = {"loss": "loss", "parameters": ["w"], "optimizer": "sgd", "batch": ["X"]}
    with pytest.raises(einmpi.InputError, match="X is sparse, and cannot come in batches"):
        einmpi.train(job, {"X": X, "w": np.ones(3)}, epochs=1, **more)
    validation = {"inputs": {"X": X}, "every": 1}
    given = {"X": X.toarray(), "w": np.ones(3)}
    with pytest.raises(einmpi.InputError, match="X is sparse, and cannot come in batches"):
        einmpi.train(job, given, epochs=1, validation=validation, **more)


def test_strict_validations_are_dense():
    job = einmpi.program(GCN, **INPUTS)
    with pytest.raises(einmpi.InputError, match="strict is true, and A is sparse"):
        einmpi.train(
            job,
            as_dense(INPUTS),
            loss="loss",
            parameters=["W1"],
            optimizer="sgd",
            steps=1,
            strict=True,
            validation={"inputs": OTHERS["another graph"], "every": 1},
        )


# ---- what is carried -----------------------------------------------------------------------------


def test_what_is_carried_keeps_its_implicit_value():
    """It would be another tensor from the second step on."""
    A = scipy.sparse.csr_array([[0.0, 2], [3, 0]])
    job = einmpi.program("B[i,j] = A[i,j] + 1; s = sum(A[i,j])", A=A)
    match = "A is 0.0 where nothing is stored, and B, which it becomes in the next step, 1.0"
    with pytest.raises(einmpi.InputError, match=match):
        einmpi.loop(job, {"A": A}, carry={"A": "B"}, steps=3)
    W = einmpi.SparseArray.from_keys(([0, 1], [1, 1]), [1.0, 2.0], (2, 2), implicit=np.inf)
    job = einmpi.program("V[i,j] = W[i,j] + 1", W=W)
    found = einmpi.loop(job, {"W": W}, carry={"W": "V"}, steps=3).outputs["W"]
    assert found.implicit == np.inf and found.values.gather().tolist() == [4, 5]


def test_a_plan_without_a_tensor_that_nothing_needs():
    A = scipy.sparse.eye_array(3)
    job = einmpi.program("y = sum(A[i,j]); z = sum(B[i,j])", A=A, B=A, outputs=["z"])
    assert einmpi.plan(job, 1).words_predicted == 0
