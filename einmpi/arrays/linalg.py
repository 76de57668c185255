"""Functions of numpy.linalg as statements: of one large matrix that ranks share, or in a program.

Stacks of matrices, and small ones, are computed block by block (arrays/elementwise.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

import numpy as np

from einmpi.arrays import elementwise
from einmpi.arrays.composed import on_every_rank
from einmpi.arrays.dist_array import DistArray
from einmpi.arrays.moving import common_comm
from einmpi.arrays.products import evaluate_programs
from einmpi.errors import EinmpiError
from einmpi.graph import matrices
from einmpi.graph.matrices import MATRIX_FUNCTIONS, result_names

TALL = 2  # a matrix has so many times as many rows as columns, or more


def results_of(name: str, *arrays: Any) -> list[Any]:
    """Return the results of a function of matrices, which a statement names.

    A second operand may be a matrix, or a vector, for all matrices of a stack.
    """
    record = MATRIX_FUNCTIONS[name]
    comm = common_comm(name, [array for array in arrays if isinstance(array, DistArray)])
    stack = [f"s{number}" for number in range(np.ndim(arrays[0]) - 2)]
    last = "k" if np.ndim(arrays[-1]) == 1 else " "  # of a vector it is left out
    operands = []
    for number, (array, letters) in enumerate(zip(arrays, record.operands, strict=True)):
        own = stack if np.ndim(array) == len(stack) + len(letters) else []
        operands.append(f"x{number}[{','.join([*own, *letters.replace(last, '')])}]")
    texts = []
    for call, letters in zip(result_names(record), record.results.values(), strict=True):
        labels = ",".join([*stack, *letters.replace(last, "")])
        target = f"out[{labels}]" if labels else "out"
        texts.append(f"{target} = {call}({', '.join(operands)})")
    named = {f"x{number}": array for number, array in enumerate(arrays)}
    try:
        return evaluate_programs(comm, texts, named)
    except EinmpiError as error:
        if isinstance(error.__cause__, np.linalg.LinAlgError):
            raise np.linalg.LinAlgError(str(error.__cause__)) from None
        raise


def _statement(name: str) -> Callable[..., Any]:
    return lambda *arrays: results_of(name, *arrays)[0]


def _named_tuple(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function with several results, in the tuple in which numpy returns them."""
    kind = type(function(np.eye(1)))
    return lambda array: kind(*results_of(name, array))


def _slogdet(array: Any) -> Any:
    (diagonal,) = results_of("lu_diagonal", array)
    size = abs(diagonal)
    signs = np.where(size == 0, 0, diagonal / np.where(size == 0, 1, size))
    with np.errstate(divide="ignore"):
        logarithm = np.sum(np.log(size), axis=-1)
    return type(np.linalg.slogdet(np.eye(1)))(np.prod(signs, axis=-1), logarithm)


def _det(array: Any) -> Any:
    return np.prod(results_of("lu_diagonal", array)[0], axis=-1)


# What statements compute, if these options are given, or none.
STATEMENTS: Mapping[Callable[..., Any], tuple[Callable[..., Any], Mapping[str, Any]]] = {
    np.linalg.cholesky: (_statement("cholesky"), {"upper": False}),
    np.linalg.det: (_det, {}),
    np.linalg.eigh: (_named_tuple(np.linalg.eigh, "eigh"), {"UPLO": "L"}),
    np.linalg.inv: (_statement("inv"), {}),
    np.linalg.qr: (_named_tuple(np.linalg.qr, "qr"), {"mode": "reduced"}),
    np.linalg.slogdet: (_slogdet, {}),
    np.linalg.solve: (_statement("solve"), {}),
    np.linalg.svd: (_named_tuple(np.linalg.svd, "svd"), {"full_matrices": False}),
}


def has_statement(
    function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]
) -> bool:
    """Return whether a statement computes what a function of `numpy.linalg` does."""
    if function not in STATEMENTS:
        return False
    parameters = signature(function)
    usual = {name: each.default for name, each in parameters.parameters.items()}
    usual.update(STATEMENTS[function][1])
    given = parameters.bind(*arguments, **options)
    given.apply_defaults()
    names = [name for name, value in usual.items() if value is not Parameter.empty]
    return all(given.arguments[name] == usual[name] for name in names)


def _no_matrices_like(array: Any) -> Any:
    """Return an empty stack of matrices, with the shape and dtype of these."""
    rows_and_columns = (*np.shape(array), 1)[:2] if array.ndim == 1 else np.shape(array)[-2:]
    return np.empty((0, *rows_and_columns), array.dtype)


def _is_large(array: Any) -> bool:
    """Whether it is one matrix that ranks share; stacks are computed block by block."""
    if not isinstance(array, DistArray) or array.ndim != 2 or array.is_alone():
        return False
    return array.size * array.dtype.itemsize >= matrices.LARGE_BYTES


def shared_by_ranks(
    function: Callable[..., Any], by_blocks: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function of `numpy.linalg` for DistArrays, given that for stacks of matrices."""

    def compute(array: Any, /, **options: Any) -> Any:
        arguments = [array]
        if "b" in options:
            arguments.append(options.pop("b"))
        is_symbol = any(getattr(each, "is_symbol", False) for each in arguments)
        is_large = _is_large(array) and has_statement(function, arguments, options)
        if is_symbol or is_large:
            function(*map(_no_matrices_like, arguments))  # it says if shapes or dtypes are wrong
            return STATEMENTS[function][0](*arguments)
        return by_blocks(*arguments, **options)

    return compute


def least_squares(on_every_rank: Callable[..., Any]) -> Callable[..., Any]:
    """Return `numpy.linalg.lstsq` for DistArrays, given that for arrays that every rank has.

    Of a tall matrix ranks share the QR factorisation, and each has its triangle.
    """

    def compute(a: Any, b: Any, /, rcond: float | None = None) -> Any:
        if not _is_large(a) or a.shape[0] < TALL * a.shape[1]:
            return on_every_rank(a, b, rcond=rcond)
        if np.ndim(b) not in (1, 2) or np.shape(b)[0] != a.shape[0]:
            raise np.linalg.LinAlgError("Incompatible dimensions")
        q, r = np.linalg.qr(a)
        if rcond is None:
            rcond = float(np.finfo(r.dtype).eps * max(a.shape))
        x, _, rank, singular_values = on_every_rank(r, q.conj().T @ b, rcond=rcond)
        residuals = np.sum(abs(b - a @ x) ** 2, axis=0, keepdims=np.ndim(b) == 1)
        if rank < a.shape[1]:
            residuals = residuals[:0]
        return x, residuals, rank, singular_values

    return compute


FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    np.linalg.lstsq: least_squares(on_every_rank(np.linalg.lstsq)),
    np.linalg.solve: shared_by_ranks(np.linalg.solve, elementwise.solve),
}
for _function in STATEMENTS:
    FUNCTIONS.setdefault(_function, shared_by_ranks(_function, elementwise.of_matrices(_function)))
