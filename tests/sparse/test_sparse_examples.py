"""The example jobs with sparse tensors on 1 and 3 ranks, against numpy and scipy."""

import shutil

import numpy as np
import pytest
import scipy.io
import scipy.sparse
import scipy.sparse.csgraph
import scipy.sparse.linalg
from numpy_optimizers import Adam
from paths import JOBS
from sparse_examples import FILES

import einmpi
from einmpi.cli.main import main
from einmpi.comm.threads import run_threads
from einmpi.files.reading import load_array
from einmpi.files.sparse.reading import generate_sparse

FOLDER = JOBS / "sparse"

# ---- what each of them should find, from arrays, and the files read by scipy and numpy -----------


def web(A, R, damping):
    """The ranks are the solution of a system of equations."""
    A = scipy.io.mmread(FOLDER / "web.mtx").toarray()
    pages, links = len(A), A.sum(axis=1, keepdims=True)
    moves = np.where(links > 0, A / np.maximum(links, 1), 1 / pages)
    matrix = np.eye(pages) - damping * moves.T
    return {"R": np.linalg.solve(matrix, np.full(pages, (1 - damping) / pages))}


def poisson(A, x, r, p):
    matrix = scipy.sparse.csc_array(scipy.sparse.load_npz(FOLDER / "poisson.npz"))
    return {"x": scipy.sparse.linalg.spsolve(matrix, r)}


def citations(A, X, W1, W2, b):
    nodes = len(A)
    edges = ((A + A.T) > 0).astype(float)
    near = edges @ X.sum(axis=1) > 0
    norm = 1 / np.sqrt(1 + edges.sum(axis=1))
    S = norm[:, None] * (edges + np.eye(nodes)) * norm
    sign = np.where(near, -1.0, 1.0)
    adam = Adam(0.02)
    for number in range(300):
        before = S @ X @ W1
        H = np.maximum(before, 0)
        Z = S @ H @ W2 + b
        margin = sign * Z
        d_Z = sign / (1 + np.exp(-margin)) / nodes
        d_H = S.T @ np.outer(d_Z, W2) * (before > 0)
        found = {"loss": np.log1p(np.exp(margin)).mean(), "accuracy": ((Z > 0) == near).mean()}
        adam.step(number, [W1, W2, b], [X.T @ S.T @ d_H, H.T @ S.T @ d_Z, d_Z.sum()], 0.02)
    return {"W1": W1, "W2": W2, "b": b, **found}


def events(T, A, B, C, error, tiny):
    table = np.loadtxt(FOLDER / "events.tns", dtype=int)
    T = np.zeros((30, 20, 12))
    T[tuple(table[:, :3].T - 1)] = table[:, 3]
    error = np.inf
    while True:
        A = A * np.einsum("ijk,jr,kr->ir", T, B, C) / (A @ ((B.T @ B) * (C.T @ C)) + tiny)
        B = B * np.einsum("ijk,ir,kr->jr", T, A, C) / (B @ ((A.T @ A) * (C.T @ C)) + tiny)
        C = C * np.einsum("ijk,ir,jr->kr", T, A, B) / (C @ ((A.T @ A) * (B.T @ B)) + tiny)
        before = error
        error = np.linalg.norm(T - np.einsum("ir,jr,kr->ijk", A, B, C))
        if abs(before - error) < 1e-6 * error:
            return {"A": A, "B": B, "C": C, "error": error}


def routes(W, D):
    roads = scipy.sparse.csr_array(np.where(np.isinf(W), 0, W))  # there, no road is a 0
    return {"D": scipy.sparse.csgraph.dijkstra(roads, indices=0)}


def triangles(A):
    edges = ((A + A.T) > 0) & ~np.eye(len(A), dtype=bool)
    edges = edges.astype(int)
    closed = np.diagonal(edges @ edges @ edges)
    degree = edges.sum(axis=1)
    pairs = degree * (degree - 1)
    cluster = np.where(pairs > 0, closed / np.maximum(pairs, 1), 0)
    return {"triangles": np.array(closed.sum() // 6), "cluster": cluster}


def selected_attention(M, Q, K, V):
    scores = np.where(M, Q @ K.T / np.sqrt(8), -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return {"Z": weights / weights.sum(axis=1, keepdims=True) @ V}


def ratings(seen, tastes, kinds, U, V, penalty):
    is_known = seen > 0
    known = is_known.sum()
    wanted = tastes @ kinds.T
    adam = Adam(0.05)
    for number in range(200):
        residual = np.where(is_known, U @ V.T - wanted, 0)
        loss = (residual**2).sum() / known + penalty * ((U**2).mean() + (V**2).mean())
        d_U = 2 * (residual @ V / known + penalty * U / U.size)
        d_V = 2 * (residual.T @ U / known + penalty * V / V.size)
        adam.step(number, [U, V], [d_U, d_V], 0.05)
    return {"U": U, "V": V, "loss": loss}


BY_NUMPY = {
    "citations": citations,
    "events": events,
    "poisson": poisson,
    "ratings": ratings,
    "routes": routes,
    "selected_attention": selected_attention,
    "triangles": triangles,
    "web": web,
}
# The most by which an element may differ, relative to the largest if that is above 1.
TOLERANCES = {
    "citations": 1e-6,  # 300 steps of Adam, each of which amplifies the rounding of those before
    "events": 1e-6,  # as many steps, until the error falls by less than 1e-6
    "poisson": 1e-8,  # the residual is below 1e-8, and no eigenvalue below 0.03
    "ratings": 1e-6,  # as citations
    "routes": 1e-14,  # sums of a few numbers
    "selected_attention": 1e-12,
    "triangles": 1e-15,
    "web": 1e-9,  # it ends at 1e-10, and a step shrinks the error to 0.85 of it
}


def test_every_example_has_its_own_check():
    assert sorted(BY_NUMPY) == sorted(path.stem for path in FOLDER.glob("*.toml"))
    assert sorted(BY_NUMPY) == sorted(TOLERANCES)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", BY_NUMPY)
@pytest.mark.parametrize("ranks", [1, 3])
def test_an_example_equals_numpy(name, ranks, tmp_path):
    copied = shutil.copytree(FOLDER, tmp_path / "sparse")
    job = einmpi.load(copied / f"{name}.toml")
    arrays = {}
    for spec in job.inputs:
        if spec.name not in BY_NUMPY[name].__code__.co_varnames:
            continue
        if spec.random == "sparse":
            arrays[spec.name] = generate_sparse(spec).dense()
        elif spec.key_dimensions:
            arrays[spec.name] = None  # it is in a file
        else:
            arrays[spec.name] = load_array(spec, spec.shape, spec.dtype)

    def on_rank(comm):
        found = einmpi.run(job, comm=comm)
        return {key: each.gather() for key, each in found.items()}

    results = run_threads(ranks, on_rank)
    for key, wanted in BY_NUMPY[name](**arrays).items():
        is_finite = np.isfinite(wanted)
        tolerance = TOLERANCES[name] * max(1.0, float(np.abs(wanted[is_finite]).max()))
        for found in results:
            np.testing.assert_array_equal(np.isfinite(found[key]), is_finite)
            np.testing.assert_allclose(found[key], wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("file", FILES)
def test_the_files_are_those_that_are_made(file):
    made = FILES[file]().coordinates()
    entry = {"file": str(FOLDER / file), "shape": list(made.shape)}
    job = einmpi.program(_copy(made), inputs={"A": entry})
    found = einmpi.run(job)["S"].coordinates()
    np.testing.assert_array_equal(found.dense(), made.dense())
    assert found.stored == made.stored


def _copy(tensor):
    labels = ",".join("ijk"[: len(tensor.shape)])
    return f"S[{labels}] = A[{labels}]"


def test_a_job_whose_inner_tensors_are_computed_where_they_are_read(tmp_path, capsys):
    """Nobody asks for the implicit value of the scores."""
    copied = shutil.copytree(FOLDER, tmp_path / "sparse")
    assert main(["verify", str(copied / "selected_attention.toml")]) == 0
    assert "Z  agrees" in capsys.readouterr().out
