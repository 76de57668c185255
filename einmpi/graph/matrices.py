"""The functions of whole matrices, one record each: what they take, what they give, and by what.

In a graph they are EinSums whose ⊗ is a call of such a function: L[b,i,j] ← cholesky(A[b,i,j]).
The last two labels of the first operand are its rows and columns, those before them number the
matrices of a stack. One rank has whole matrices, or many ranks share one, as blocks of a grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from einmpi.errors import OperationError
from einmpi.graph.dtypes import DTYPES, Type

Matrices = npt.NDArray[Any]  # a stack of them, or one
LARGE_BYTES = 2**20  # of a matrix: a smaller one is whole on all ranks
ROWS, COLUMNS = "r#", "c#"  # the labels that a grid of ranks cuts; no program has such labels


@dataclass(frozen=True, kw_only=True, eq=False)
class MatrixFunction:
    """One function of stacks of matrices.

    Attributes
    ----------
    name : str
        What it is called by. The result of several with the name "q" is f"{name}_q".
    operands : tuple of str
        The dimensions of a matrix of each operand as letters: dimensions of equal letters have
        equal extents. The last letter of operands after the first may be left out: a vector.
    results : mapping of str to str
        The dimensions of each result; the letter k is new, with the shorter extent of the first
        operand. A function of one result has no name for it.
    function : callable
        The function on stacks of matrices in float32, float64, complex64 or complex128.
    operations : callable
        The number of scalar operations for one matrix, given the extents of the letters.
    documentation : str
        One line for the language reference.
    is_square : bool
        Whether the matrices of the first operand have as many rows as columns.
    real : tuple of str
        The results that are real where the operands are complex.
    on_grid : bool
        Whether many ranks can share one matrix.
    """

    name: str
    operands: tuple[str, ...]
    results: Mapping[str, str]
    function: Callable[..., Any]
    operations: Callable[[Mapping[str, int]], int]
    documentation: str
    is_square: bool = True
    real: tuple[str, ...] = ()
    on_grid: bool = False

    def result_type(self, result: str, types: Sequence[Type]) -> np.dtype[Any]:
        """Return the dtype of a result; OperationError if the function takes no such operands."""
        for kind in types:
            if np.dtype(kind).name in DTYPES and DTYPES[np.dtype(kind).name].is_half:
                what = f"{self.name} does not take {np.dtype(kind).name}"
                raise OperationError(what, "float32, float64, complex64 or complex128")
        exact = [np.float64 if np.dtype(kind).kind in "biu" else kind for kind in types]
        dtype: np.dtype[Any] = np.result_type(*exact)
        return np.empty(0, dtype).real.dtype if result in self.real else dtype


class MatrixResult(NamedTuple):
    """A result of a function of matrices, which a call in a graph names."""

    record: MatrixFunction
    name: str

    @property
    def letters(self) -> str:
        """The dimensions of one matrix."""
        return self.record.results[self.name]


MATRIX_FUNCTIONS: dict[str, MatrixFunction] = {}
MATRIX_RESULTS: dict[str, MatrixResult] = {}  # by the names of calls


def register_matrix_function(record: MatrixFunction) -> None:
    """Add a function to the language."""
    MATRIX_FUNCTIONS[record.name] = record
    for call, result in zip(result_names(record), record.results, strict=True):
        MATRIX_RESULTS[call] = MatrixResult(record, result)


def result_names(record: MatrixFunction) -> list[str]:
    """Return the names of calls that stand for the results of a function, in order."""
    return [f"{record.name}_{result}" if result else record.name for result in record.results]


# ---- the functions ------------------------------------------------------------------------------


def _triangular(is_lower: bool) -> Callable[[Matrices, Matrices], Matrices]:
    """Return what solves triangular systems; the other triangle is not looked at."""

    def solve(matrices: Matrices, sides: Matrices) -> Matrices:
        from scipy.linalg import solve_triangular

        dtype = np.result_type(matrices, sides)
        stack = np.broadcast_shapes(matrices.shape[:-2], sides.shape[:-2])
        found = np.empty((*stack, *sides.shape[-2:]), dtype)
        matrices = np.broadcast_to(matrices, (*stack, *matrices.shape[-2:]))
        sides = np.broadcast_to(sides, found.shape)
        for place in np.ndindex(stack):
            diagonal = np.diagonal(matrices[place])
            if not diagonal.all():
                raise np.linalg.LinAlgError(singular(int((diagonal == 0).argmax())))
            if found.size:
                found[place] = solve_triangular(
                    matrices[place], sides[place], lower=is_lower, check_finite=False
                )
        return found

    return solve


def singular(place: int) -> str:
    """Return what is wrong with a matrix that has a zero on the diagonal of its factor."""
    return f"singular matrix: element {place} of the diagonal of its factor is 0"


def not_definite(order: int) -> str:
    """Return what is wrong with a matrix that has no Cholesky factor."""
    return f"the leading minor of order {order} is not positive definite"


def _cholesky(matrices: Matrices) -> Matrices:
    try:
        return np.linalg.cholesky(matrices)
    except np.linalg.LinAlgError:
        raise np.linalg.LinAlgError(not_definite(_first_indefinite(matrices))) from None


def _first_indefinite(matrices: Matrices) -> int:
    """Return the order of the first leading minor, of any matrix, that is not positive definite."""
    from scipy.linalg import lapack

    (potrf,) = lapack.get_lapack_funcs(("potrf",), (matrices,))
    for place in np.ndindex(matrices.shape[:-2]):
        order = potrf(matrices[place], lower=1)[1]
        if order:
            return int(order)
    return 0


def _lu_diagonal(matrices: Matrices) -> Matrices:
    from scipy.linalg import lapack

    (getrf,) = lapack.get_lapack_funcs(("getrf",), (matrices,))
    found = np.empty(matrices.shape[:-1], matrices.dtype)
    for place in np.ndindex(matrices.shape[:-2]) if found.size else ():
        factors, pivots, _ = getrf(matrices[place])
        found[place] = np.diagonal(factors)
        found[place][0] *= (-1) ** np.count_nonzero(pivots != np.arange(len(pivots)))
    return found


def _lstsq(matrices: Matrices, sides: Matrices) -> Matrices:
    stack = np.broadcast_shapes(matrices.shape[:-2], sides.shape[:-2])
    matrices = np.broadcast_to(matrices, (*stack, *matrices.shape[-2:]))
    sides = np.broadcast_to(sides, (*stack, *sides.shape[-2:]))
    found = np.empty((*stack, matrices.shape[-1], sides.shape[-1]), sides.dtype)
    for place in np.ndindex(stack):
        found[place] = np.linalg.lstsq(matrices[place], sides[place])[0]
    return found


for _record in (
    MatrixFunction(
        name="cholesky",
        operands=("ij",),
        results={"": "ij"},
        function=_cholesky,
        operations=lambda extent: extent["i"] ** 3 // 3,
        documentation="lower triangular L with A = L·Lᴴ; only the lower triangle of A is read",
        on_grid=True,
    ),
    MatrixFunction(
        name="solve",
        operands=("ij", "ik"),
        results={"": "jk"},
        function=np.linalg.solve,
        operations=lambda extent: 2 * extent["i"] ** 2 * (extent["i"] // 3 + extent["k"]),
        documentation="X with A·X = B, by elimination with pivots",
        on_grid=True,
    ),
    MatrixFunction(
        name="inv",
        operands=("ij",),
        results={"": "ji"},
        function=np.linalg.inv,
        operations=lambda extent: 2 * extent["i"] ** 3,
        documentation="the inverse of A",
        on_grid=True,
    ),
    MatrixFunction(
        name="lu_diagonal",
        operands=("ij",),
        results={"": "i"},
        function=_lu_diagonal,
        operations=lambda extent: 2 * extent["i"] ** 3 // 3,
        documentation="the diagonal of the upper factor of A, the first element with the sign of "
        "the order of rows: its product is the determinant",
        on_grid=True,
    ),
    MatrixFunction(
        name="qr",
        operands=("ij",),
        results={"q": "ik", "r": "kj"},
        function=np.linalg.qr,
        operations=lambda extent: 4 * extent["i"] * extent["j"] * min(extent["i"], extent["j"]),
        documentation="Q with orthonormal columns and upper triangular R, with A = Q·R",
        is_square=False,
        on_grid=True,
    ),
    MatrixFunction(
        name="lstsq",
        operands=("ij", "ik"),
        results={"": "jk"},
        function=_lstsq,
        operations=lambda extent: 2 * extent["i"] * extent["j"] * (extent["j"] + extent["k"]),
        documentation="X for which A·X - B has the least Euclidean norm. The columns of a large "
        "matrix have to be independent",
        is_square=False,
        on_grid=True,
    ),
    MatrixFunction(
        name="eigh",
        operands=("ij",),
        results={"values": "j", "vectors": "ij"},
        function=np.linalg.eigh,
        operations=lambda extent: 9 * extent["i"] ** 3,
        documentation="the eigenvalues of a Hermitian matrix, in rising order, and its "
        "eigenvectors, in columns; only the lower triangle is read",
        real=("values",),
    ),
    MatrixFunction(
        name="svd",
        operands=("ij",),
        results={"u": "ik", "s": "k", "vh": "kj"},
        function=lambda matrices: np.linalg.svd(matrices, full_matrices=False),
        operations=lambda extent: 20 * extent["i"] * extent["j"] * min(extent["i"], extent["j"]),
        documentation="U, the singular values in falling order, and Vᴴ, with A = U·diag(s)·Vᴴ",
        is_square=False,
        real=("s",),
    ),
    MatrixFunction(
        name="solve_lower",
        operands=("ij", "ik"),
        results={"": "jk"},
        function=_triangular(is_lower=True),
        operations=lambda extent: extent["i"] ** 2 * extent["k"],
        documentation="X with A·X = B, where A is lower triangular",
        on_grid=True,
    ),
    MatrixFunction(
        name="solve_upper",
        operands=("ij", "ik"),
        results={"": "jk"},
        function=_triangular(is_lower=False),
        operations=lambda extent: extent["i"] ** 2 * extent["k"],
        documentation="X with A·X = B, where A is upper triangular",
        on_grid=True,
    ),
):
    register_matrix_function(_record)
