"""Products of tensors, and the linear algebra extension of the array API standard.

Products are EinSum programs. Decompositions are of stacks of matrices: the stack is cut over the
ranks, and each matrix is whole on a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from einmpi.array_api.calls import call
from einmpi.compiled.dist_array import DistArray

Axis: TypeAlias = int | tuple[int, ...] | None


# ---- products -----------------------------------------------------------------------------------


def matmul(x1: DistArray, x2: DistArray, /) -> DistArray:
    """Return the matrix product."""
    return call(np.matmul, x1, x2)


def matrix_transpose(x: DistArray, /) -> DistArray:
    """Return the tensor with its last two dimensions swapped."""
    return call(np.matrix_transpose, x)


def tensordot(
    x1: DistArray, x2: DistArray, /, *, axes: int | tuple[Sequence[int], Sequence[int]] = 2
) -> DistArray:
    """Return the sum of products over pairs of dimensions."""
    return call(np.tensordot, x1, x2, axes=axes)


def vecdot(x1: DistArray, x2: DistArray, /, *, axis: int = -1) -> DistArray:
    """Return the sum of products over one dimension; elements of `x1` are conjugated."""
    return call(np.vecdot, x1, x2, axis=axis)


def outer(x1: DistArray, x2: DistArray, /) -> DistArray:
    """Return the products of all pairs of elements of two vectors."""
    return call(np.outer, x1, x2)


def cross(x1: DistArray, x2: DistArray, /, *, axis: int = -1) -> DistArray:
    """Return the cross products of vectors of three elements."""
    if x1.shape[axis] != 3 or x2.shape[axis] != 3:
        raise ValueError("cross products are of vectors of three elements")
    left = call(np.moveaxis, x1, axis, -1)
    right = call(np.moveaxis, x2, axis, -1)
    components: list[DistArray] = []
    for first, second in ((1, 2), (2, 0), (0, 1)):
        positive = left[..., first] * right[..., second]
        negative = left[..., second] * right[..., first]
        components.append(positive - negative)
    return call(np.stack, components, axis=axis)


def diagonal(x: DistArray, /, *, offset: int = 0) -> DistArray:
    """Return a diagonal of each matrix of a stack."""
    return call(np.diagonal, x, offset=offset, axis1=-2, axis2=-1)


def trace(x: DistArray, /, *, offset: int = 0, dtype: Any = None) -> DistArray:
    """Return the sum of a diagonal of each matrix of a stack."""
    return call(np.sum, diagonal(x, offset=offset), axis=-1, dtype=dtype)


# ---- norms --------------------------------------------------------------------------------------


def vector_norm(
    x: DistArray, /, *, axis: Axis = None, keepdims: bool = False, ord: Any = 2
) -> DistArray:
    """Return the norms of vectors along some dimensions, by default of all elements as one."""
    return call(np.linalg.vector_norm, x, axis=axis, keepdims=keepdims, ord=ord)


def matrix_norm(x: DistArray, /, *, keepdims: bool = False, ord: Any = "fro") -> DistArray:
    """Return the norm of each matrix of a stack."""
    return call(np.linalg.matrix_norm, x, keepdims=keepdims, ord=ord)


# ---- functions of matrices that are whole on a rank ---------------------------------------------


def cholesky(x: DistArray, /, *, upper: bool = False) -> DistArray:
    """Return the Cholesky factor of each matrix of a stack."""
    return call(np.linalg.cholesky, x, upper=upper)


def det(x: DistArray, /) -> DistArray:
    """Return the determinant of each matrix of a stack."""
    return call(np.linalg.det, x)


def slogdet(x: DistArray, /) -> Any:
    """Return the sign and the logarithm of the determinant of each matrix of a stack."""
    return call(np.linalg.slogdet, x)


def eigh(x: DistArray, /) -> Any:
    """Return the eigenvalues and eigenvectors of each Hermitian matrix of a stack."""
    return call(np.linalg.eigh, x)


def eigvalsh(x: DistArray, /) -> DistArray:
    """Return the eigenvalues of each Hermitian matrix of a stack."""
    return call(np.linalg.eigvalsh, x)


def inv(x: DistArray, /) -> DistArray:
    """Return the inverse of each matrix of a stack."""
    return call(np.linalg.inv, x)


def matrix_power(x: DistArray, n: int, /) -> DistArray:
    """Return an integer power of each matrix of a stack."""
    return call(np.linalg.matrix_power, x, n)


def matrix_rank(x: DistArray, /, *, rtol: Any = None) -> DistArray:
    """Return the rank of each matrix of a stack."""
    return call(np.linalg.matrix_rank, x, rtol=_same_for_all(rtol))


def pinv(x: DistArray, /, *, rtol: Any = None) -> DistArray:
    """Return the pseudo-inverse of each matrix of a stack."""
    return call(np.linalg.pinv, x, rtol=_same_for_all(rtol))


def _same_for_all(rtol: Any) -> Any:
    """Return a relative tolerance as a number; one for each matrix is refused."""
    if not isinstance(rtol, DistArray):
        return rtol
    if rtol.ndim:
        raise TypeError("rtol of DistArrays is the same number for all matrices")
    return rtol.item()


def qr(x: DistArray, /, *, mode: str = "reduced") -> Any:
    """Return the QR decomposition of each matrix of a stack."""
    return call(np.linalg.qr, x, mode=mode)


def svd(x: DistArray, /, *, full_matrices: bool = True) -> Any:
    """Return the singular value decomposition of each matrix of a stack."""
    return call(np.linalg.svd, x, full_matrices=full_matrices)


def svdvals(x: DistArray, /) -> DistArray:
    """Return the singular values of each matrix of a stack."""
    return call(np.linalg.svdvals, x)


def solve(x1: DistArray, x2: DistArray, /) -> DistArray:
    """Return the solutions of systems of linear equations, a stack of matrices `x1` each.

    A vector `x2` is the right-hand side of all systems.
    """
    return call(np.linalg.solve, x1, x2)
