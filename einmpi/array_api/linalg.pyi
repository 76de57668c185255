# python docs/make_stubs.py writes this file: change the functions instead.

from collections.abc import Sequence
from typing import Any, TypeAlias

from einmpi.arrays.dist_array import DistArray

Axis: TypeAlias = int | tuple[int, ...] | None

def cholesky(x: DistArray, /, *, upper: bool = False) -> DistArray:
    """Return the Cholesky factor of each matrix of a stack."""

def cross(x1: DistArray, x2: DistArray, /, *, axis: int = -1) -> DistArray:
    """Return the cross products of vectors of three elements."""

def det(x: DistArray, /) -> DistArray:
    """Return the determinant of each matrix of a stack."""

def diagonal(x: DistArray, /, *, offset: int = 0) -> DistArray:
    """Return a diagonal of each matrix of a stack."""

def eig(x: DistArray, /) -> Any:
    """Return the eigenvalues and eigenvectors of each matrix of a stack, as complex numbers."""

def eigh(x: DistArray, /) -> Any:
    """Return the eigenvalues and eigenvectors of each Hermitian matrix of a stack."""

def eigvals(x: DistArray, /) -> DistArray:
    """Return the eigenvalues of each matrix of a stack, as complex numbers."""

def eigvalsh(x: DistArray, /) -> DistArray:
    """Return the eigenvalues of each Hermitian matrix of a stack."""

def inv(x: DistArray, /) -> DistArray:
    """Return the inverse of each matrix of a stack."""

def matmul(x1: DistArray, x2: DistArray, /) -> DistArray:
    """Return the matrix product."""

def matrix_norm(x: DistArray, /, *, keepdims: bool = False, ord: Any = "fro") -> DistArray:
    """Return the norm of each matrix of a stack."""

def matrix_power(x: DistArray, n: int, /) -> DistArray:
    """Return an integer power of each matrix of a stack."""

def matrix_rank(x: DistArray, /, *, rtol: Any = None) -> DistArray:
    """Return the rank of each matrix of a stack; `rtol` may have a number for each."""

def matrix_transpose(x: DistArray, /) -> DistArray:
    """Return the tensor with its last two dimensions swapped."""

def outer(x1: DistArray, x2: DistArray, /) -> DistArray:
    """Return the products of all pairs of elements of two vectors."""

def pinv(x: DistArray, /, *, rtol: Any = None) -> DistArray:
    """Return the pseudo-inverse of each matrix of a stack; `rtol` may have a number for each."""

def qr(x: DistArray, /, *, mode: str = "reduced") -> Any:
    """Return the QR decomposition of each matrix of a stack."""

def slogdet(x: DistArray, /) -> Any:
    """Return the sign and the logarithm of the determinant of each matrix of a stack."""

def solve(x1: DistArray, x2: DistArray, /) -> DistArray:
    """Return the solutions of systems of linear equations, a stack of matrices `x1` each.

    A vector `x2` is the right-hand side of all systems.
    """

def svd(x: DistArray, /, *, full_matrices: bool = True) -> Any:
    """Return the singular value decomposition of each matrix of a stack."""

def svdvals(x: DistArray, /) -> DistArray:
    """Return the singular values of each matrix of a stack."""

def tensordot(
    x1: DistArray, x2: DistArray, /, *, axes: int | tuple[Sequence[int], Sequence[int]] = 2
) -> DistArray:
    """Return the sum of products over pairs of dimensions."""

def trace(x: DistArray, /, *, offset: int = 0, dtype: Any = None) -> DistArray:
    """Return the sum of a diagonal of each matrix of a stack."""

def vecdot(x1: DistArray, x2: DistArray, /, *, axis: int = -1) -> DistArray:
    """Return the sum of products over one dimension; elements of `x1` are conjugated."""

def vector_norm(
    x: DistArray, /, *, axis: Axis = None, keepdims: bool = False, ord: Any = 2
) -> DistArray:
    """Return the norms of vectors along some dimensions, by default of all elements as one."""
