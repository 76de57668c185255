"""The example jobs with a loop, on several ranks and by the reference, against other libraries."""

import shutil
from dataclasses import replace

import h5py
import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg
from paths import ROOT

import einmpi
from einmpi.api import options_of
from einmpi.comm.threads import run_threads
from einmpi.files.reading import load_array
from einmpi.job.loop import StepProgram, make_loop
from einmpi.loops.running import LoopRun

# ---- what each loop should find, by another library ----------------------------------------------
# scikit-learn and networkx are imported where they are used: they take seconds, and every process
# that collects tests imports this file.


def power(A, x):
    matrix = scipy.sparse.linalg.aslinearoperator(A + A.T)
    values, vectors = scipy.sparse.linalg.eigsh(matrix, k=1, which="LM")
    return {"x": np.abs(vectors[:, 0]), "value": values[0]}


def solve(A, x, r, p):
    matrix = A @ A.T / len(A) + 0.1 * np.eye(len(A))
    return {"x": scipy.linalg.solve(matrix, r, assume_a="pos")}


def clusters(X, C, near):
    import sklearn.cluster

    found = sklearn.cluster.KMeans(len(C), init=C, n_init=1, tol=0, algorithm="lloyd").fit(X)
    return {"C": found.cluster_centers_, "near": found.labels_, "inertia": found.inertia_}


def ranking(src, dst, R, damping):
    import networkx

    graph = networkx.MultiDiGraph()
    graph.add_nodes_from(range(len(R)))
    graph.add_edges_from(zip(src.tolist(), dst.tolist(), strict=True))
    ranks = networkx.pagerank(graph, alpha=damping, tol=1e-15, max_iter=1000)
    return {"R": np.array([ranks[page] for page in range(len(R))])}


def plate(U):
    """The same equations for the inner points as one sparse system."""
    inner = len(U) - 2
    second = scipy.sparse.diags_array([1.0, -2.0, 1.0], offsets=[-1, 0, 1], shape=(inner, inner))
    one = scipy.sparse.eye_array(inner)
    laplace = scipy.sparse.kron(second, one) + scipy.sparse.kron(one, second)
    edges = np.zeros((inner, inner))
    edges[0] = -100.0
    wanted = np.zeros_like(U)
    wanted[0] = 100.0
    inside = scipy.sparse.linalg.spsolve(scipy.sparse.csr_array(laplace), edges.ravel())
    wanted[1:-1, 1:-1] = inside.reshape(inner, inner)
    return {"U": wanted}


def factors(X, W, H, error, steps):
    import sklearn.decomposition

    model = sklearn.decomposition.NMF(W.shape[1], solver="mu", init="custom", tol=0, max_iter=steps)
    W = model.fit_transform(X, W=W.copy(), H=H.copy())
    return {"W": W, "H": model.components_, "error": model.reconstruction_err_}


def paths(D):
    import networkx

    graph = networkx.from_numpy_array(D, create_using=networkx.DiGraph)
    return {"D": networkx.floyd_warshall_numpy(graph)}


def logistic(X, truth, noise, w, rate, penalty):
    import sklearn.linear_model

    classes = X @ truth + noise > 0
    model = sklearn.linear_model.LogisticRegression(
        C=1 / (penalty * len(X)), fit_intercept=False, tol=1e-12, solver="newton-cholesky"
    )
    model.fit(X, classes)
    return {"w": model.coef_[0]}


BY_LIBRARY = {
    "power": power,
    "solve": solve,
    "clusters": clusters,
    "ranking": ranking,
    "plate": plate,
    "factors": factors,
    "paths": paths,
    "logistic": logistic,
}
# The most by which an element may differ, relative to the largest if that is above 1.
TOLERANCES = {
    "power": 1e-7,  # the loop ends at 1e-10
    "solve": 1e-7,  # it ends at 1e-8, and no eigenvalue of the matrix is below 0.1
    "clusters": 1e-12,  # the same clusters in both; sums of 900 numbers in another order
    "ranking": 1e-9,  # it ends at 1e-10, and a step shrinks the error to 0.85 of it
    "plate": 5e-5,  # it ends at 1e-4, and a step shrinks the error to cos(π/11) of it: 1e-4 / 0.04
    "factors": 1e-6,  # as many steps in both; each amplifies the rounding of those before
    "paths": 1e-14,  # sums of a few numbers below 1, added in another order
    "logistic": 1e-7,  # the gradient is below 1e-9, and no curvature below the penalty, 0.01
}
# Sizes with which a loop takes fewer or shorter steps.
SIZES = {"plate": {"n": 12}, "factors": {"rows": 30, "columns": 20, "r": 3}}
RANKS = [2, 4]
for number in (3, 6, 8):
    RANKS.append(pytest.param(number, marks=pytest.mark.slow))
LOOPED = []
for path in sorted((ROOT / "jobs").glob("*.toml")):
    is_trained = "\n[train]\n" in path.read_text()  # those are in tests/training
    if einmpi.load(path).loop is not None and not is_trained:
        LOOPED.append(path.stem)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The example jobs, and the file that one of them writes for another."""
    copied = tmp_path_factory.mktemp("examples") / "jobs"
    shutil.copytree(ROOT / "jobs", copied, ignore=shutil.ignore_patterns("*.h5"))
    points = einmpi.run(einmpi.load(copied / "points.toml"))["X"].gather()
    with h5py.File(copied / "points.h5", "w") as file:
        file["X"] = points
    return copied


def test_every_loop_has_its_own_check():
    assert sorted(BY_LIBRARY) == LOOPED == sorted(TOLERANCES)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LOOPED)
@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_loop_equals_another_library(name, ranks, folder):
    job = einmpi.load(folder / f"{name}.toml", **SIZES.get(name, {}))
    arrays = {}
    for spec in job.inputs:
        arrays[spec.name] = load_array(spec, spec.shape, spec.dtype)

    def on_rank(comm):
        result = einmpi.loop(job, comm=comm)
        assert result.is_done
        found = {key: values[-1] for key, values in result.history.items()}
        for key, array in result.outputs.items():
            found[key] = array.gather()
        return result.steps, found

    results = run_threads(ranks, on_rank)
    steps, _ = results[0]
    if name == "factors":
        arrays["steps"] = steps
    wanted = BY_LIBRARY[name](**arrays)
    for own_steps, found in results:
        assert own_steps == steps
        for key, array in wanted.items():
            largest = max(1.0, float(np.abs(array).max()))
            tolerance = TOLERANCES[name] * largest
            np.testing.assert_allclose(found[key], array, rtol=0, atol=tolerance)


# ---- what a step moves ---------------------------------------------------------------------------


def by_hand(name, ranks, sizes):
    """Return the words that a person would move in a step.

    Inputs and what is carried are where they are best. A number that all ranks get from all is
    2 (p - 1) words, and so is each word of a vector; a copy for all ranks of what is cut is
    p - 1 times its words.
    """
    others = ranks - 1
    if name == "power":  # x to all ranks; the norm of y, the value, and how far x turned
        return others * (sizes["n"] + 3 * 2)
    if name == "solve":  # p to all ranks; p·q and r·r, of the next residual only
        return others * (sizes["n"] + 2 * 2)
    if name == "clusters":  # sums and numbers of members; two numbers of the whole step
        return 2 * others * (sizes["k"] * (sizes["f"] + 1) + 2)
    if name == "ranking":  # shares to all ranks, flows back; what is lost, and the change
        return others * (2 * sizes["n"] + 2 * 2)
    if name == "plate":  # a row to each neighbour and from it; the change
        return others * (2 * sizes["n"] + 2)
    if name == "factors":  # H whole, rows of W: two sums that all ranks get; the error
        width = sizes["r"]
        return 2 * others * (width * sizes["columns"] + width**2 + 1)
    if name == "paths":  # rows: all of the matrix to all ranks; whether anything changed
        return others * (sizes["n"] ** 2 + 2)
    if name == "logistic":  # the gradient, and the loss
        return 2 * others * (sizes["f"] + 1)
    raise AssertionError(name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LOOPED)
@pytest.mark.parametrize("ranks", RANKS)
def test_step_moves_as_planned_and_no_more_than_by_hand(name, ranks, folder):
    job = einmpi.load(folder / f"{name}.toml")
    loop = replace(job.loop, steps=4)
    one = einmpi.loop(replace(job, loop=loop))

    def on_rank(comm):
        received = []
        run = LoopRun(replace(job, loop=loop), comm, options_of(job))
        run.on_row = lambda number, row: received.append(comm.received)
        run.prepare({})
        before = comm.received
        shuffled_once = run.measured.shuffled
        result = run.run()
        steps = np.diff([before, *received])
        # What one rank reads for another is no part of a step.
        steps[0] -= run.measured.shuffled - shuffled_once
        outputs = {key: array.gather() for key, array in result.outputs.items()}
        return steps, outputs, run.plan

    results = run_threads(ranks, on_rank)
    plan = results[0][2]
    every_step = sum(steps for steps, _, _ in results)
    assert set(every_step) == {plan.bytes_predicted}
    assert plan.bytes_predicted <= 8 * by_hand(name, ranks, job.sizes)
    for _, outputs, _ in results:
        for key, array in outputs.items():
            np.testing.assert_allclose(array, one.outputs[key].gather(), rtol=1e-9, atol=1e-12)


def test_power_iteration_moves_two_halves_of_half_a_vector_to_each_rank():
    """On 2·2 ranks a rank adds up 75 elements of y from another, and gets 75 of x."""
    program = "S[i,j] = A[i,j] + A[j,i]; y[i] = sum(S[i,j] * x[j]) / 300"
    job = einmpi.program(program, A=(300, 300), x=(300,))
    plan = einmpi.plan(replace(job, loop=einmpi_loop(job)), 4)
    assert plan.bytes_predicted <= 4 * 1200
    # The whole example has three numbers more that all ranks get: the norm, `value` and `turned`.
    example = einmpi.plan(einmpi.load(ROOT / "jobs" / "power.toml"), 4)
    assert example.bytes_predicted <= 4 * (1200 + 3 * 8)


def test_power_iteration_on_two_ranks_moves_half_a_vector_to_each():
    """Both ranks have all of y then: the three numbers of a step need no message."""
    plan = einmpi.plan(einmpi.load(ROOT / "jobs" / "power.toml"), 2)
    assert plan.bytes_predicted <= 2 * 1200


def einmpi_loop(job):
    program = StepProgram(job.written, job.sizes, job.inputs)
    return make_loop(program, lambda *_: "loop", 10, {"x": "y"})


@pytest.mark.parametrize("ranks", [1, 3])
def test_centre_without_points_stays(folder, ranks):
    job = einmpi.load(folder / "clusters.toml")
    X = np.array([[0.0, 0], [0, 1], [5, 5], [5, 6], [9, 0], [8, 0]] * 150)
    C = np.array([[0.0, 0.5], [5, 5], [9, 9], [-50, 40], [8, 1], [70, 70]])

    def on_rank(comm):
        result = einmpi.loop(job, {"X": X, "C": C}, comm)
        assert result.is_done
        return result.outputs["C"].gather()

    wanted = C.copy()
    for _ in range(10):
        near = np.square(X[:, None] - wanted).sum(axis=2).argmin(axis=1)
        for number in set(near):
            wanted[number] = X[near == number].mean(axis=0)
    assert {2, 3, 5} <= set(range(6)) - set(near)
    for found in run_threads(ranks, on_rank):
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
