"""Functions of one large matrix that ranks share: results, words, memory, and what is refused."""

from __future__ import annotations

import matrix_cases
import numpy as np
import pytest
from distributed import run_from_files
from matrix_cases import DEFINITE, KINDS, MOST, definite_matrix_of, matrix_of
from mpi_helpers import run_mpi

import einmpi
from einmpi.comm.base import Comm
from einmpi.compiled.running import on_gpu
from einmpi.graph import matrices
from einmpi.planner import orders

EXTENT = 45  # with blocks of 4 columns: no multiple of them


@pytest.fixture(autouse=True)
def _small_matrices_are_large(monkeypatch):
    """Share small matrices too, in panels of a few columns."""
    monkeypatch.setattr(matrices, "LARGE_BYTES", 1)
    monkeypatch.setattr(orders, "LEAST_BLOCK", 4)


def computed(ranks, text, **inputs):
    """Return outputs on these ranks; the words are those of the plan, the peak is within it."""
    return run_from_files(ranks, text, inputs)[0]


def cholesky(ranks, kind):
    a = definite_matrix_of(kind, EXTENT)
    found = computed(ranks, "L[i,j] = cholesky(A[i,j])", A=a)
    assert matrix_cases.of_cholesky(a, found["L"]) < MOST


def solve(ranks, kind):
    a = matrix_of(kind, EXTENT, EXTENT)
    for columns in (3, EXTENT + 7):
        b = matrix_of("random", EXTENT, columns, 1).astype(a.dtype)
        found = computed(ranks, "X[j,k] = solve(A[i,j], B[i,k])", A=a, B=b)
        assert matrix_cases.of_solution(a, b, found["X"]) < MOST


def inverse(ranks, kind):
    a = matrix_of(kind, EXTENT, EXTENT)
    found = computed(ranks, "X[j,i] = inv(A[i,j])", A=a)
    assert matrix_cases.of_inverse(a, found["X"]) < MOST


def determinant(ranks, kind):
    a = matrix_of(kind, EXTENT, EXTENT)
    diagonal = computed(ranks, "D[i] = lu_diagonal(A[i,j])", A=a)["D"]
    sign, logarithm = np.linalg.slogdet(a)
    with np.errstate(divide="ignore"):
        assert np.sum(np.log(abs(diagonal))) == pytest.approx(logarithm, rel=1e-3, abs=1e-3)
    assert np.prod(diagonal / abs(diagonal)) == pytest.approx(sign, abs=1e-4)


def orthogonal(ranks, kind):
    for rows in (EXTENT, 3 * EXTENT, EXTENT // 2):
        a = matrix_of(kind, rows, EXTENT)
        found = computed(ranks, "Q[i,k], R[k,j] = qr(A[i,j])", A=a)
        assert matrix_cases.of_qr(a, found["Q"], found["R"]) < MOST


def least_squares(ranks, kind):
    a = matrix_of(kind, 3 * EXTENT, EXTENT)
    b = matrix_of("random", 3 * EXTENT, 2, 1).astype(a.dtype)
    found = computed(ranks, "X[j,k] = lstsq(A[i,j], B[i,k])", A=a, B=b)
    assert matrix_cases.of_least_squares(a, b, found["X"]) < MOST


def triangles(ranks, kind):
    a = definite_matrix_of("random" if kind in ("graded", "nearly singular") else kind, EXTENT)
    b = matrix_of("random", EXTENT, EXTENT, 1).astype(a.dtype)
    for function, triangle in (("solve_lower", np.tril(a)), ("solve_upper", np.triu(a))):
        for right in (b, b[:, :2]):
            found = computed(ranks, f"X[j,k] = {function}(A[i,j], B[i,k])", A=a, B=right)
            assert matrix_cases.of_solution(triangle, right, found["X"]) < MOST


CASES = [
    *[(cholesky, kind) for kind in DEFINITE],
    *[(triangles, kind) for kind in DEFINITE[:4]],
    *[(solve, kind) for kind in KINDS],
    *[(inverse, kind) for kind in KINDS],
    *[(determinant, kind) for kind in KINDS if kind not in ("nearly singular", "graded")],
    *[(orthogonal, kind) for kind in KINDS],
    *[(least_squares, kind) for kind in KINDS[:4]],
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("ranks", range(1, 10))
@pytest.mark.parametrize(("check", "kind"), CASES)
def test_errors_are_those_of_rounding(check, kind, ranks):
    check(ranks, kind)


# ---- words and memory ---------------------------------------------------------------------------


def least_words(name, ranks, extent):
    """Return the words of ScaLAPACK's algorithm on its best grid: docs/linear_algebra.md."""
    grids = [(rows, ranks // rows) for rows in range(1, ranks + 1) if ranks % rows == 0]
    exchanged = {"cholesky": lambda rows: 0, "lu_diagonal": lambda rows: 2 * (1 - 1 / rows)}
    found = []
    for rows, columns in grids:
        if name == "qr_r":
            found.append((columns - 1) / 2 + rows - 1)
        else:
            found.append((rows + columns - 2) / 2 + exchanged[name](rows))
    return min(found) * extent**2


@pytest.mark.parametrize("ranks", [4, 8, 16])
@pytest.mark.parametrize(
    ("statement", "more"),
    [
        ("L[i,j] = cholesky(A[i,j])", 1.0),
        ("D[i] = lu_diagonal(A[i,j])", 1.0),
        ("R[k,j] = qr_r(A[i,j])", 1.1),
    ],
)
def test_words_beside_scalapack(statement, more, ranks, monkeypatch):
    monkeypatch.undo()
    extent = 4000
    name = statement.partition(" = ")[2].partition("(")[0]
    plan = einmpi.plan(einmpi.program(statement, A=(extent, extent)), ranks=ranks)
    assert plan.words_predicted <= more * least_words(name, ranks, extent) + 8 * ranks
    assert plan.lower_bound <= plan.words_predicted


def test_memory_is_that_of_shares(monkeypatch):
    """The matrix, its factor and panels: the more ranks, the less each of them has."""
    monkeypatch.undo()
    job = einmpi.program("L[i,j] = cholesky(A[i,j])", A=(4000, 4000))
    peaks = [einmpi.plan(job, ranks=ranks).peak for ranks in (1, 4, 16)]
    assert peaks[1] < 0.32 * peaks[0] and peaks[2] < 0.12 * peaks[0]


def test_a_memory_limit_is_kept():
    a = definite_matrix_of("random", EXTENT)
    text = "S[i,j] = A[i,j] * 2\nL[i,j] = cholesky(S[i,j])\nM[i,j] = sum(L[i,k] * S[k,j])"
    free = einmpi.plan(einmpi.program(text, A=a), ranks=4).peak
    found = run_from_files(4, text, {"A": a}, memory=free * 9 // 10)[0]
    np.testing.assert_allclose(found["M"], np.linalg.cholesky(2 * a) @ (2 * a), rtol=1e-12)


# ---- together with others -----------------------------------------------------------------------


def test_statements_around_it():
    """Blocks in turns go on into products and elementwise statements."""
    a = definite_matrix_of("random", EXTENT)
    b = matrix_of("random", EXTENT, 4, 2)
    text = """
    S[i,j] = (A[i,j] + A[j,i]) / 2
    L[i,j] = cholesky(S[i,j])
    y[j,k] = solve_lower(L[i,j], B[i,k])
    U[j,i] = L[i,j]
    x[j,k] = solve_upper(U[i,j], y[i,k])
    error = max(abs(sum(S[i,j] * x[j,k]) - B[i,k]))
    largest[i] = max(L[i,j])
    """
    for ranks in (1, 3, 4):
        found = computed(ranks, text, A=a, B=b)
        assert found["error"] < 1e-12
        np.testing.assert_allclose(found["largest"], np.linalg.cholesky(a).max(1), atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 4])
def test_stacks_are_whole_on_ranks(ranks):
    a = np.stack([definite_matrix_of("random", 7) + k * np.eye(7) for k in range(6)])
    b = matrix_of("random", 7, 2)
    text = """
    L[b,i,j] = cholesky(A[b,i,j])
    X[b,j,k] = solve(A[b,i,j], B[i,k])
    w[b,j] = eigh_values(A[b,i,j])
    """
    found = computed(ranks, text, A=a, B=b)
    np.testing.assert_allclose(found["L"], np.linalg.cholesky(a), atol=1e-12)
    np.testing.assert_allclose(found["X"], np.linalg.solve(a, b), atol=1e-12)
    np.testing.assert_allclose(found["w"], np.linalg.eigvalsh(a), atol=1e-12)


@pytest.mark.parametrize("extent", [0, 1, 2])
def test_small_matrices(extent):
    a = 4 * np.eye(extent)
    for ranks in (1, 3):
        text = "L[i,j] = cholesky(A[i,j])\nX[j,i] = inv(A[i,j])\nR[k,j] = qr_r(A[i,j])"
        found = computed(ranks, text, A=a)
        np.testing.assert_allclose(found["L"], a / 2)
        np.testing.assert_allclose(found["X"], a / 16)
        np.testing.assert_allclose(abs(found["R"]), a)


def test_bits_are_the_same_each_time():
    a = matrix_of("random", EXTENT, EXTENT)
    for text in ("X[j,i] = inv(A[i,j])", "Q[i,k], R[k,j] = qr(A[i,j])"):
        first, second = (computed(4, text, A=a) for _ in range(2))
        for name, array in first.items():
            np.testing.assert_array_equal(array, second[name])


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 4, 6])
@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("L[i,j] = cholesky(A[i,j])", "L: the leading minor of order 30 is not positive definite"),
        ("X[j,i] = inv(B[i,j])", "X: singular matrix: element 17 of the diagonal of its factor"),
        ("X[j,k] = solve_lower(C[i,j], A[i,k])", "X: singular matrix: element 12 of the diagonal"),
    ],
)
def test_one_line_says_where(statement, said, ranks):
    a = definite_matrix_of("random", EXTENT)
    a[29, 29] = -1
    b = matrix_of("random", EXTENT, EXTENT)
    b[:, 17] = 0
    c = np.tril(b)
    c[12, 12] = 0
    c[17, 17] = 1
    matrices_by_name = {"A": a, "B": b, "C": c}
    given = {name: each for name, each in matrices_by_name.items() if f"{name}[" in statement}
    with pytest.raises(einmpi.EinmpiError) as caught:
        computed(ranks, statement, **given)
    found = str(caught.value)
    assert "\n" not in found
    if ranks == 1 and "inv" in statement:
        assert "Singular matrix" in found  # numpy's own words
    else:
        assert said in found


def test_gpus_are_refused():
    job = einmpi.program("L[i,j] = cholesky(A[i,j])", A=(4, 4))
    with pytest.raises(einmpi.InputError, match="L is a function of matrices, which GPUs do not"):
        on_gpu(job, Comm(0, 1))


def test_an_error_of_many_steps_is_one_short_line(tmp_path):
    """What a rank was doing are hundreds of steps, of which the line has none."""
    (tmp_path / "job.toml").write_text(
        'program = "L = cholesky(A[i,j])"\n'
        'inputs.A = { shape = [400, 400], random = "normal" }\noutputs.L = "o.h5:/L"\n'
    )
    done = run_mpi(2, ["-m", "einmpi", "job.toml"], cwd=tmp_path)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("einmpi: error")]
    assert done.returncode != 0 and len(line) < 200
    assert line.endswith("the leading minor of order 1 is not positive definite")
