"""Matrices that factorisations are tested with, and the measures of LAPACK's own tests."""

from __future__ import annotations

import numpy as np

MOST = 30.0  # in LAPACK's tests a result is right if its measure is below this


def matrix_of(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Return a matrix of a kind, always the same."""
    rng = np.random.default_rng(seed)
    found = rng.standard_normal((rows, columns))
    match kind:
        case "single":
            return found.astype("float32")
        case "complex":
            return found + 1j * rng.standard_normal((rows, columns))
        case "integer":
            return rng.integers(-9, 9, (rows, columns))
        case "graded":
            return found * np.logspace(-8, 8, rows)[:, None]
        case "nearly singular":
            u, s, vh = np.linalg.svd(found, full_matrices=False)
            s[-1] = s[0] * 1e-14
            return (u * s) @ vh
        case "unpivoted":  # elimination in the order of the rows would divide by 0
            return found[:, ::-1] * np.tri(rows, columns)[:, ::-1]
        case _:
            assert kind == "random"
            return found


KINDS = ("random", "single", "complex", "integer", "graded", "nearly singular", "unpivoted")
DEFINITE = KINDS[:-1]


def definite_matrix_of(kind: str, extent: int) -> np.ndarray:
    """Return a Hermitian positive definite matrix of a kind."""
    if kind == "integer":
        return matrix_of(kind, extent, extent) ** 2 // 81 + 30 * np.eye(extent, dtype=int)
    if kind == "graded":
        found = definite_matrix_of("random", extent)
        scale = np.logspace(-4, 4, extent)
        return scale[:, None] * found * scale
    if kind == "nearly singular":
        q = np.linalg.qr(matrix_of("random", extent, extent))[0]
        values = np.linspace(1, 2, extent)
        values[0] = 1e-13
        return (q * values) @ q.T
    found = matrix_of(kind, extent, extent)
    return found @ found.conj().T / extent + np.eye(extent, dtype=found.dtype)


def norm(matrix: np.ndarray) -> float:
    return float(np.linalg.norm(matrix, 1)) if matrix.size else 0.0


def _share(error: float, *scales: float, dtype: np.dtype) -> float:
    """Return an error over rounding errors of such scales."""
    return error / (float(np.prod(scales)) * np.finfo(dtype).eps) if error else 0.0


def of_cholesky(a: np.ndarray, lower: np.ndarray) -> float:
    """Measure A - L·Lᴴ."""
    assert not np.triu(lower, 1).any()
    whole = np.tril(a) + np.tril(a, -1).conj().T  # the other triangle is not read
    error = norm(whole - lower @ lower.conj().T)
    return _share(error, len(a), norm(whole), dtype=lower.dtype)


def of_solution(a: np.ndarray, b: np.ndarray, x: np.ndarray) -> float:
    """Measure B - A·X."""
    found = [0.0]
    columns = (b[:, None], x[:, None]) if b.ndim == 1 else (b, x)
    for right, unknown in zip(columns[0].T, columns[1].T, strict=True):
        error = norm(right - a @ unknown)
        found.append(_share(error, len(a), norm(a), norm(unknown), dtype=x.dtype))
    return max(found)


def of_inverse(a: np.ndarray, inverse: np.ndarray) -> float:
    """Measure I - A⁻¹·A."""
    error = norm(np.eye(len(a)) - inverse @ a)
    return _share(error, len(a), norm(a), norm(inverse), dtype=inverse.dtype)


def of_qr(a: np.ndarray, q: np.ndarray, r: np.ndarray) -> float:
    """Measure R - Qᴴ·A, A - Q·R and I - Qᴴ·Q."""
    assert not np.tril(r, -1).any()
    rows = len(a)
    dtype = q.dtype
    orthogonal = _share(norm(np.eye(q.shape[1]) - q.conj().T @ q), rows, dtype=dtype)
    return max(
        _share(norm(r - q.conj().T @ a), rows, norm(a), dtype=dtype),
        _share(norm(a - q @ r), rows, norm(a), dtype=dtype),
        orthogonal,
    )


def of_least_squares(a: np.ndarray, b: np.ndarray, x: np.ndarray) -> float:
    """Measure Aᴴ·(B - A·X), which is 0 where B - A·X is as small as can be."""
    error = norm(a.conj().T @ (b - a @ x))
    return _share(error, max(a.shape), norm(a), norm(b) + norm(a) * norm(x), dtype=x.dtype)
