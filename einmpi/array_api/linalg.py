"""Products of tensors, and the linear algebra extension of the array API standard.

Products are EinSum programs. Decompositions are of stacks of matrices: the stack is cut over the
ranks, and each matrix is whole on a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from einmpi.array_api.calls import call
from einmpi.arrays.whole_axes import on_matrices
from einmpi.compiled.dist_array import DistArray

Axis: TypeAlias = int | tuple[int, ...] | None


class EighResult(NamedTuple):
    """What `eigh` returns."""

    eigenvalues: DistArray
    eigenvectors: DistArray


class QRResult(NamedTuple):
    """What `qr` returns."""

    Q: DistArray
    R: DistArray


class SlogdetResult(NamedTuple):
    """What `slogdet` returns."""

    sign: DistArray
    logabsdet: DistArray


class SVDResult(NamedTuple):
    """What `svd` returns."""

    U: DistArray
    S: DistArray
    Vh: DistArray


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
    options = {"axis": axis, "keepdims": keepdims}
    absolute = call(np.abs, x)
    if ord == np.inf:
        return call(np.max, absolute, **options)
    if ord == -np.inf:
        return call(np.min, absolute, **options)
    if ord == 0:
        return call(np.count_nonzero, x, **options).astype(absolute.dtype)
    powers = call(np.power, absolute, ord)
    return call(np.power, call(np.sum, powers, dtype=absolute.dtype, **options), 1 / ord)


def matrix_norm(x: DistArray, /, *, keepdims: bool = False, ord: Any = "fro") -> DistArray:
    """Return the norm of each matrix of a stack."""
    norms = _on_matrices(lambda block: np.linalg.matrix_norm(block, ord=ord), x)
    if keepdims:
        return call(np.expand_dims, norms, (-2, -1))
    return norms


# ---- functions of matrices that are whole on a rank ---------------------------------------------


def _on_matrices(function: Callable[[Any], Any], x: DistArray) -> DistArray:
    found: DistArray = on_matrices(function, x)
    return found


def cholesky(x: DistArray, /, *, upper: bool = False) -> DistArray:
    """Return the Cholesky factor of each matrix of a stack."""
    return _on_matrices(lambda block: np.linalg.cholesky(block, upper=upper), x)


def det(x: DistArray, /) -> DistArray:
    """Return the determinant of each matrix of a stack."""
    return _on_matrices(np.linalg.det, x)


def slogdet(x: DistArray, /) -> SlogdetResult:
    """Return the sign and the logarithm of the determinant of each matrix of a stack."""
    sign, logarithm = on_matrices(lambda block: tuple(np.linalg.slogdet(block)), x)
    return SlogdetResult(sign, logarithm)


def eigh(x: DistArray, /) -> EighResult:
    """Return the eigenvalues and eigenvectors of each Hermitian matrix of a stack."""
    values, vectors = on_matrices(lambda block: tuple(np.linalg.eigh(block)), x)
    return EighResult(values, vectors)


def eigvalsh(x: DistArray, /) -> DistArray:
    """Return the eigenvalues of each Hermitian matrix of a stack."""
    return _on_matrices(np.linalg.eigvalsh, x)


def inv(x: DistArray, /) -> DistArray:
    """Return the inverse of each matrix of a stack."""
    return _on_matrices(np.linalg.inv, x)


def matrix_power(x: DistArray, n: int, /) -> DistArray:
    """Return an integer power of each matrix of a stack."""
    return _on_matrices(lambda block: np.linalg.matrix_power(block, n), x)


def matrix_rank(x: DistArray, /, *, rtol: Any = None) -> DistArray:
    """Return the rank of each matrix of a stack."""
    tolerance = _same_for_all(rtol)
    return _on_matrices(lambda block: np.linalg.matrix_rank(block, rtol=tolerance), x)


def pinv(x: DistArray, /, *, rtol: Any = None) -> DistArray:
    """Return the pseudo-inverse of each matrix of a stack."""
    tolerance = _same_for_all(rtol)
    return _on_matrices(lambda block: np.linalg.pinv(block, rtol=tolerance), x)


def _same_for_all(rtol: Any) -> Any:
    """Return a relative tolerance as a number; one for each matrix is refused."""
    if not isinstance(rtol, DistArray):
        return rtol
    if rtol.ndim:
        raise TypeError("rtol of DistArrays is the same number for all matrices")
    return rtol.item()


def qr(x: DistArray, /, *, mode: str = "reduced") -> QRResult:
    """Return the QR decomposition of each matrix of a stack."""

    def decompose(block: Any) -> Any:
        return tuple(np.linalg.qr(block, mode=mode))  # type: ignore[call-overload]

    orthogonal, triangular = on_matrices(decompose, x)
    return QRResult(orthogonal, triangular)


def svd(x: DistArray, /, *, full_matrices: bool = True) -> SVDResult:
    """Return the singular value decomposition of each matrix of a stack."""

    def decompose(block: Any) -> Any:
        return tuple(np.linalg.svd(block, full_matrices=full_matrices))

    left, values, right = on_matrices(decompose, x)
    return SVDResult(left, values, right)


def svdvals(x: DistArray, /) -> DistArray:
    """Return the singular values of each matrix of a stack."""
    return _on_matrices(np.linalg.svdvals, x)


def solve(x1: DistArray, x2: DistArray, /) -> DistArray:
    """Return the solutions of systems of linear equations, a stack of matrices `x1` each.

    A vector `x2` is the right-hand side of all systems.
    """
    is_vector = x2.ndim == 1
    right = call(np.expand_dims, x2, -1) if is_vector else x2
    stack_shape = np.broadcast_shapes(x1.shape[:-2], right.shape[:-2])
    matrices = call(np.broadcast_to, x1, (*stack_shape, *x1.shape[-2:]))
    sides = call(np.broadcast_to, right, (*stack_shape, *right.shape[-2:]))
    size = x1.shape[-1]
    # Both in one tensor, so that a rank has the matrices and their right-hand sides.
    dtype = np.result_type(x1.dtype, x2.dtype)
    systems = call(np.concatenate, [matrices, sides], axis=-1).astype(dtype)

    def solve_block(block: Any) -> Any:
        return np.linalg.solve(block[..., :size], block[..., size:])

    solutions = _on_matrices(solve_block, systems)
    return call(np.squeeze, solutions, -1) if is_vector else solutions
