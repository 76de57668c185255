"""Parts of Householder's QR factorisation on a grid of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from einmpi.kernels.cpu.panels.lapack import blas, lapack
from einmpi.kernels.cpu.product_updates import subtract_product
from einmpi.kernels.operands import Array


def _orthogonal(matrix: Array) -> Array:
    """Return the orthogonal factor of a matrix, with columns of 0 if it has too few rows."""
    found = np.zeros(matrix.shape, matrix.dtype)
    factors, scales, _, _ = lapack("geqrf", matrix)(matrix)
    name = "ungqr" if matrix.dtype.kind == "c" else "orgqr"
    rows = min(matrix.shape)
    found[:, :rows] = lapack(name, matrix)(factors[:, :rows], scales)[0]
    return found


def _local_q(panel: Array, out: Array) -> None:
    out[...] = _orthogonal(panel)


def _product_h(left: Array, right: Array, out: Array) -> None:
    out[...] = left.conj().T @ right


def _join(triangles: Array, out: Array) -> None:
    """Factor triangles of several ranks: the orthogonal factor, and below it the triangle."""
    rows = len(triangles)
    out[:rows] = _orthogonal(triangles)
    out[rows:] = np.triu(out[:rows].conj().T @ triangles)


def _combine(joined: Array, out: Array) -> None:
    out[...] = out @ joined


def _signed(top: Array) -> tuple[Array, Array]:
    """Return the factors of a block less a diagonal of signs, in one array, and the signs."""
    factors = top.copy()
    signs = np.ones(len(top), top.dtype)
    for place in range(len(top)):
        pivot = factors[place, place]
        signs[place] = -pivot / abs(pivot) if pivot else -1
        factors[place, place] -= signs[place]
        factors[place + 1 :, place] /= factors[place, place]
        factors[place + 1 :, place + 1 :] -= np.outer(
            factors[place + 1 :, place], factors[place, place + 1 :]
        )
    return factors, signs


def _to_vectors(rows: Array, columns: Array, top: Array, out: Array) -> None:
    """Replace the orthogonal factor of a panel by the vectors of its reflections."""
    factors, _ = _signed(top)
    first = np.count_nonzero(rows <= columns[-1])  # rows of the block on the diagonal
    right = np.asfortranarray(out[first:])
    if right.size:
        out[first:] = blas("trsm", out)(1.0, factors, right, side=1, overwrite_b=1)
    if first:
        out[:first] = np.tril(factors, -1) + np.eye(len(factors))


def _put_triangle(top: Array, joined: Array, out: Array) -> None:
    _, signs = _signed(top)
    out[...] = np.tril(out, -1) + signs[:, None] * joined


def _unit_lower(rows: Array, columns: Array, matrix: Array, out: Array) -> None:
    out[...] = np.where(rows[:, None] > columns, matrix, rows[:, None] == columns)


def _combined(products: Array) -> Array:
    """Return how reflections combine, inverted, given the products of their vectors."""
    return np.triu(products, 1) + np.diag(np.diagonal(products) / 2)


def _reflect(vectors: Array, products: Array, projected: Array, out: Array) -> None:
    change = blas("trsm", out)(1.0, _combined(products), projected, trans_a=2)
    subtract_product(vectors, change, out)


def _reflect_back(vectors: Array, products: Array, projected: Array, out: Array) -> None:
    subtract_product(vectors, blas("trsm", out)(1.0, _combined(products), projected), out)


def _upper(rows: Array, columns: Array, out: Array) -> None:
    """Set what is below the diagonal to 0."""
    for row, first in enumerate(np.searchsorted(columns, rows).tolist()):
        out[row, :first] = 0


PARTS: Mapping[str, Any] = {
    "combine": _combine,
    "join": _join,
    "local_q": _local_q,
    "product_h": _product_h,
    "put_triangle": _put_triangle,
    "reflect": _reflect,
    "reflect_back": _reflect_back,
    "to_vectors": _to_vectors,
    "unit_lower": _unit_lower,
    "upper": _upper,
}
