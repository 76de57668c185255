"""Checkpoints of jobs with sparse inputs: stopped after a step or vertex, continued, same bits."""

import numpy as np
import pytest
import scipy.sparse

import einmpi
from einmpi.cli.help import make_parser
from einmpi.cli.run import run_job
from einmpi.comm.threads import run_threads
from einmpi.errors import Stopped

MATRIX = scipy.sparse.random_array((23, 23), density=0.2, rng=np.random.default_rng(0))
MATRIX = (MATRIX + MATRIX.T + 20 * scipy.sparse.eye_array(23)).tocoo()

# Conjugate gradients: what is carried is dense.
SOLVE = '''
program = """
q[i]      = sum(A[i,j] * p[j])
before    = sum(r[i]**2)
alpha     = before / sum(p[i] * q[i])
x_next[i] = x[i] + alpha * p[i]
r_next[i] = r[i] - alpha * q[i]
residual  = sum(r_next[i]**2)
p_next[i] = r_next[i] + residual / before * p[i]
"""
[inputs]
A = "a.mtx"
x = { shape = [23], random = "zeros" }
r = { shape = [23], random = "ones" }
p = { shape = [23], random = "ones" }
[loop]
steps  = 6
carry  = { x = "x_next", r = "r_next", p = "p_next" }
record = ["residual"]
[outputs]
x = "x.npy"
'''
# What is stored is trained: it is carried, with the state of the optimiser.
TRAIN = '''
program = """
y[i] = sum(A[i,j] * B[i,j])
loss = sum((y[i] - 1)**2)
"""
[inputs]
A = "a.mtx"
B = { random = "sparse", shape = [23, 23], nnz = 200 }
[loop]
steps  = 6
record = ["loss"]
[train]
loss       = "loss"
parameters = ["A"]
optimizer  = { name = "adam", rate = 0.1 }
[outputs]
A = "trained.npz"
'''
# No loop: vertices one after another.
CHAIN = '''
program = """
C[i,k] = sum(A[i,j] * A[j,k])
D[i,k] = C[i,k] * A[i,k]
y[i]   = sum(D[i,k]) + 1
Z[i,k] = D[i,k] / y[k]
"""
[inputs]
A = "a.mtx"
[outputs]
Z = "z.npz"
'''
JOBS = {"solve": SOLVE, "train": TRAIN, "chain": CHAIN}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(MATRIX)
    return tmp_path


def write(matrix):
    einmpi.SparseArray.from_keys(matrix.coords, matrix.data, matrix.shape).save("a.mtx")


def run(name, ranks, *flags, stops=False):
    """Run a job, or a single step of it; return the values of its results, and whether it ended."""
    with open("job.toml", "w") as file:
        file.write(JOBS[name])
    options = make_parser().parse_args(["run", "job.toml", "--quiet", *flags])

    def on_rank(comm):
        report = run_job(options, comm, ["SIGUSR1"] if stops else [])
        found = {}
        for each, array in report.outputs.items():
            is_sparse = isinstance(array, einmpi.SparseArray)
            found[each] = array.coordinates().values if is_sparse else array.gather()
        histories = [loop.history for loop in report.loops]
        if report.checkpoints is not None:
            report.checkpoints.remove()
        return found, histories

    return run_threads(ranks, on_rank)[0]


def stop_after_a_step(name, ranks):
    with pytest.raises(Stopped):
        run(name, ranks, "--checkpoint", "saved", "--every", "1s", "--resume", stops=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", JOBS)
def test_stopped_runs_have_the_same_bits(name, ranks):
    wanted, wanted_history = run(name, ranks)
    for _ in range(3):
        stop_after_a_step(name, ranks)
    found, history = run(name, ranks, "--checkpoint", "saved", "--resume")
    assert found.keys() == wanted.keys()
    for each, values in wanted.items():
        np.testing.assert_array_equal(found[each], values)
    assert repr(history) == repr(wanted_history)


def test_dense_tensors_that_are_carried_go_on_on_other_ranks():
    wanted, _ = run("solve", 1)
    for ranks in (3, 2):
        stop_after_a_step("solve", ranks)
    found, _ = run("solve", 1, "--checkpoint", "saved", "--resume")
    np.testing.assert_allclose(found["x"], wanted["x"], rtol=1e-12)


@pytest.mark.parametrize("name", ["train", "chain"])
def test_stored_elements_need_as_many_ranks(name):
    stop_after_a_step(name, 3)
    with pytest.raises(einmpi.EinmpiError, match="another job: the number of ranks, which share"):
        run(name, 2, "--checkpoint", "saved", "--resume")


def test_a_plan_of_another_strategy_goes_on():
    wanted, _ = run("chain", 2)
    stop_after_a_step("chain", 2)
    found, _ = run("chain", 2, "--checkpoint", "saved", "--resume", "--strategy", "replicate")
    np.testing.assert_allclose(found["Z"], wanted["Z"], rtol=1e-12)


@pytest.mark.parametrize("what", ["a key", "a value", "an element more"])
def test_another_file_is_refused(what):
    stop_after_a_step("solve", 2)
    rows, columns = (each.copy() for each in MATRIX.coords)
    values = MATRIX.data.copy()
    if what == "a value":
        values[7] += 1e-12
    elif what == "a key":
        empty = np.argwhere(MATRIX.toarray() == 0)[0]
        rows[0], columns[0] = empty
    else:
        empty = np.argwhere(MATRIX.toarray() == 0)[0]
        rows, columns = np.append(rows, empty[0]), np.append(columns, empty[1])
        values = np.append(values, 1.0)
    write(scipy.sparse.coo_array((values, (rows, columns)), MATRIX.shape))
    with pytest.raises(
        einmpi.EinmpiError, match="another job: the sparse input A differs"
    ) as error:
        run("solve", 2, "--checkpoint", "saved", "--resume")
    assert "\n" not in str(error.value).replace("\non rank", " on rank")


def test_the_same_elements_in_a_new_file_are_the_same():
    wanted, _ = run("solve", 2)
    stop_after_a_step("solve", 2)
    write(MATRIX)
    found, _ = run("solve", 2, "--checkpoint", "saved", "--resume")
    np.testing.assert_array_equal(found["x"], wanted["x"])


def test_another_seed_is_refused():
    stop_after_a_step("train", 1)
    JOBS["other"] = TRAIN.replace("nnz = 200", "nnz = 200, seed = 9")
    with pytest.raises(einmpi.EinmpiError, match="another job: the sparse input B differs"):
        run("other", 1, "--checkpoint", "saved", "--resume")
    del JOBS["other"]
