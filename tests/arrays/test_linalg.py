"""numpy.linalg of one matrix as a DistArray: ranks share it, in panels and with pivots."""

from __future__ import annotations

import matrix_cases
import numpy as np
import pytest
from matrix_cases import MOST, definite_matrix_of, matrix_of

import einmpi
from einmpi import DistArray
from einmpi.comm.threads import run_threads
from einmpi.graph import matrices
from einmpi.planner import orders

EXTENT = 45


@pytest.fixture(autouse=True)
def _small_matrices_are_large(monkeypatch):
    """Share small matrices too, in panels of a few columns."""
    monkeypatch.setattr(matrices, "LARGE_BYTES", 1)
    monkeypatch.setattr(orders, "LEAST_BLOCK", 4)


@pytest.mark.parametrize("ranks", [1, 4])
def test_functions_of_numpy(ranks):
    a = matrix_of("random", EXTENT, EXTENT)
    definite = definite_matrix_of("complex", EXTENT)
    b = matrix_of("random", EXTENT, 3, 1)

    def on_rank(comm):
        x, y = DistArray.from_global(a, comm), DistArray.from_global(b, comm)
        lower = np.linalg.cholesky(DistArray.from_global(definite, comm))
        assert matrix_cases.of_cholesky(definite, lower.gather()) < MOST
        for right in (b, y, b[:, 0], y[:, 1]):
            found = np.linalg.solve(x, right)
            known = right if isinstance(right, np.ndarray) else right.gather()
            assert matrix_cases.of_solution(a, known, found.gather()) < MOST
        assert matrix_cases.of_inverse(a, np.linalg.inv(x).gather()) < MOST
        q, r = np.linalg.qr(x)
        assert matrix_cases.of_qr(a, q.gather(), r.gather()) < MOST
        assert np.linalg.det(x).item() == pytest.approx(np.linalg.det(a), rel=1e-10)
        sign, logarithm = np.linalg.slogdet(x)
        assert (sign.item(), logarithm.item()) == pytest.approx(tuple(np.linalg.slogdet(a)))
        values, vectors = np.linalg.eigh(x + x.T)
        assert np.allclose(((x + x.T) @ vectors - vectors * values).gather(), 0, atol=1e-10)
        u, s, vh = np.linalg.svd(x, full_matrices=False)
        assert np.allclose(((u * s) @ vh - x).gather(), 0, atol=1e-10)

    run_threads(ranks, on_rank)


@pytest.mark.parametrize("ranks", [3])
def test_least_squares_as_numpy(ranks):
    a = matrix_of("random", 3 * EXTENT, EXTENT)
    dependent = a.copy()
    dependent[:, 4] = a[:, 3]
    b = matrix_of("random", 3 * EXTENT, 2, 1)

    def on_rank(comm):
        for matrix in (a, dependent, a.astype("float32"), a * 1j):
            for right in (b, b[:, 0], DistArray.from_global(b, comm)):
                given = DistArray.from_global(matrix, comm)
                known = right if isinstance(right, np.ndarray) else right.gather()
                expected = np.linalg.lstsq(matrix, known)
                found = np.linalg.lstsq(given, right)
                assert found[2] == expected[2]
                tolerance = 1e-3 if matrix.dtype == "float32" else 1e-9
                for one, other in zip(found, expected, strict=True):
                    assert np.shape(one) == np.shape(other)
                    gathered = one.gather() if isinstance(one, DistArray) else one
                    np.testing.assert_allclose(gathered, other, tolerance, tolerance)
        with pytest.raises(np.linalg.LinAlgError, match="Incompatible"):
            np.linalg.lstsq(DistArray.from_global(a, comm), b[1:])

    run_threads(ranks, on_rank)


@pytest.mark.parametrize("ranks", [2, 6])
def test_results_are_arrays_as_others(ranks):
    """Ranks have blocks of them in turns, which other functions have to know."""
    a = definite_matrix_of("random", EXTENT)

    def on_rank(comm):
        given = DistArray.from_global(a, comm)
        x, expected = np.linalg.cholesky(given), np.linalg.cholesky(a)
        y = DistArray.from_global(expected + 1, comm)
        for compute in (
            lambda m, other: m + other,
            lambda m, other: m @ other,
            lambda m, other: other.T @ m.T,
            lambda m, other: m.sum(0) + other.max(axis=1),
            lambda m, other: m[3:40:2, ::-1],
            lambda m, other: m[[3, 1, 40]],
            lambda m, other: m.reshape(-1, 9),
            lambda m, other: np.concatenate([m, other]),
            lambda m, other: np.sort(m, axis=0),
            lambda m, other: np.cumsum(m, axis=1),
            lambda m, other: np.where(m > 0.1, m, other),
            lambda m, other: m[m > 0.2],
            lambda m, other: np.linalg.solve(m, other),
            lambda m, other: np.roll(m, 5, axis=1) - np.diag(np.diag(m)),
        ):
            found = compute(x, y)
            np.testing.assert_allclose(found.gather(), compute(expected, expected + 1), atol=1e-12)
        x[4:7] = 3
        expected[4:7] = 3
        np.testing.assert_allclose(x.gather(), expected, atol=1e-12)
        again = DistArray.from_local(x.local, x.layout, comm)
        np.testing.assert_array_equal(again.gather(), x.gather())

    run_threads(ranks, on_rank)


@pytest.mark.parametrize("ranks", [1, 3])
def test_small_and_empty_matrices(ranks):
    def on_rank(comm):
        for extent in (0, 1, 2):
            a = np.eye(extent) * 4
            x = DistArray.from_global(a, comm)
            np.testing.assert_array_equal(np.linalg.cholesky(x).gather(), a / 2)
            np.testing.assert_array_equal(np.linalg.inv(x).gather(), a / 16)
            np.testing.assert_array_equal(np.linalg.solve(x, a).gather(), a / 4)
            assert np.linalg.det(x).item() == pytest.approx(4.0**extent)
            q, r = np.linalg.qr(x)
            np.testing.assert_allclose((q @ r).gather(), a)

    run_threads(ranks, on_rank)


def message_on_all_ranks(ranks, call):
    """Return what numpy's error of a call says, which all ranks raise alike."""

    def on_rank(comm):
        with pytest.raises(np.linalg.LinAlgError) as caught:
            call(comm)
        return str(caught.value)

    (found,) = set(run_threads(ranks, on_rank))
    assert "\n" not in found
    return found


@pytest.mark.parametrize("ranks", [1, 4])
def test_errors_say_where(ranks):
    a = definite_matrix_of("random", EXTENT)
    indefinite = a.copy()
    indefinite[29, 29] = -1
    unknown = a.copy()
    unknown[7, 3] = np.nan
    singular = matrix_of("random", EXTENT, EXTENT)
    singular[:, 17] = 0

    def of(function, matrix, *others):
        return message_on_all_ranks(
            ranks, lambda comm: function(DistArray.from_global(matrix, comm), *others)
        )

    if ranks > 1:
        assert "leading minor of order 30 " in of(np.linalg.cholesky, indefinite)
        assert "leading minor of order 8 " in of(np.linalg.cholesky, unknown)
        for function, others in ((np.linalg.solve, (a,)), (np.linalg.inv, ())):
            assert "singular matrix: element 17" in of(function, singular, *others)
    else:
        assert "positive definite" in of(np.linalg.cholesky, indefinite)
        assert "Singular matrix" in of(np.linalg.inv, singular)
    assert "must be square" in of(np.linalg.cholesky, a[1:])
    assert "must be square" in of(np.linalg.inv, a[:, 1:])


@pytest.mark.parametrize("ranks", [1, 4])
def test_what_is_not_a_number_stays(ranks):
    a = matrix_of("random", EXTENT, EXTENT)
    a[7, 3] = np.nan

    def on_rank(comm):
        x = DistArray.from_global(a, comm)
        for found in (np.linalg.inv(x), np.linalg.solve(x, a[0]), *np.linalg.qr(x)):
            assert np.isnan(found.gather()).any()
        assert np.isnan(np.linalg.det(x).item())

    run_threads(ranks, on_rank)


@pytest.mark.parametrize("ranks", [1, 4])
def test_determinants_of_singular_matrices_are_0(ranks):
    a = matrix_of("random", EXTENT, EXTENT)
    a[:, 17] = 0

    def on_rank(comm):
        x = DistArray.from_global(a, comm)
        assert np.linalg.det(x).item() == 0
        assert [each.item() for each in np.linalg.slogdet(x)] == [0, -np.inf]

    run_threads(ranks, on_rank)


def test_statements_of_traced_functions():
    """A traced function has its factorisations as statements, which are planned with the rest."""
    a = definite_matrix_of("random", EXTENT)
    b = matrix_of("random", EXTENT, 3, 1)

    @einmpi.jit
    def whitened(a, b):
        lower = np.linalg.cholesky(a)
        return np.linalg.solve(lower, b), np.linalg.qr(a)[1], np.linalg.det(a / 2)

    def on_rank(comm):
        found = whitened(DistArray.from_global(a, comm), DistArray.from_global(b, comm))
        lower = np.linalg.cholesky(a)
        np.testing.assert_allclose(found[0].gather(), np.linalg.solve(lower, b), atol=1e-9)
        np.testing.assert_allclose(abs(found[1].gather()), abs(np.linalg.qr(a)[1]), atol=1e-9)
        assert found[2].item() == pytest.approx(np.linalg.det(a / 2))

    run_threads(3, on_rank)
    text = str(einmpi.trace(whitened, a, b).program)
    assert "cholesky(" in text and "solve(" in text and "qr_r(" in text
