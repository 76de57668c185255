"""Evaluate expressions in the grammar of numpy.einsum, on arrays and DistArrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from einmpi.comm.agreement import together
from einmpi.comm.base import Comm
from einmpi.comm.local import ALONE
from einmpi.errors import InputError
from einmpi.job.job import Job
from einmpi.job.program import program_job
from einmpi.kernels.given import as_numpy
from einmpi.language.numpy_einsum import program_text, split_arguments

if TYPE_CHECKING:
    from einmpi.compiled.program import Compiled


def einsum(
    *arguments: Any, dtype: Any = None, out: npt.NDArray[Any] | None = None, optimize: Any = True
) -> Any:
    """Evaluate an expression in the grammar of `numpy.einsum`.

    Ellipsis, implicit output and repeated labels are supported.

    Parameters
    ----------
    *arguments
        ``"ij,jk->ik", a, b`` or ``a, [0, 1], b, [1, 2], [0, 2]``. If one of the operands is a
        DistArray, all ranks call it.
    dtype : dtype, optional
        The dtype to which operands are converted first; not for DistArrays.
    out : array, optional
        Takes the result; not for DistArrays.
    optimize : optional
        Accepted and ignored: the order of a product is always chosen.

    Returns
    -------
    array or DistArray
        A DistArray if one of the operands is.

    Raises
    ------
    InputError
        The subscripts or operands are wrong.

    Examples
    --------
    >>> a, b = np.ones((2, 3)), np.ones((3, 2))
    >>> einmpi.einsum("ij,jk->ik", einmpi.DistArray.from_global(a), b).gather()
    array([[3., 3.],
           [3., 3.]])
    """
    from einmpi.compiled.dist_array import DistArray

    distributed = [given for given in arguments if isinstance(given, DistArray)]
    comm: Any = distributed[0].comm if distributed else ALONE

    def check_and_compile() -> tuple[Compiled, list[Any]]:
        subscripts, operands = split_arguments(arguments)
        if any(array.comm is not comm for array in distributed):
            raise InputError(
                "einsum",
                "the operands are on different communicators",
                "DistArrays on the same ranks",
            )
        if distributed and (dtype is not None or out is not None):
            raise InputError("einsum", "dtype or out is given with a DistArray", "arrays only")
        arrays: list[Any] = []
        for number, operand in enumerate(operands):
            if isinstance(operand, DistArray):
                arrays.append(operand)
            else:
                arrays.append(as_numpy("einsum", f"operand {number}", operand, dtype))
        return _compile_einsum(subscripts, arrays, comm), arrays

    compiled, arrays = together(comm, check_and_compile)
    result = compiled({f"x{number}": array for number, array in enumerate(arrays)})["out"]
    if distributed:
        return result
    if out is None:
        return result.local
    if not isinstance(out, np.ndarray) or out.shape != result.shape:
        raise InputError("einsum", f"out is {_kind(out)}", f"an array of shape {result.shape}")
    np.copyto(out, result.local, casting="safe")
    return out


def _kind(given: Any) -> str:
    if isinstance(given, np.ndarray):
        return f"an array of shape {given.shape}"
    return type(given).__name__


def _compile_einsum(subscripts: str, arrays: Sequence[Any], comm: Comm) -> Compiled:
    from einmpi.compiled.known import compiled_once

    operands = tuple((tuple(array.shape), array.dtype.name) for array in arrays)

    def make_job() -> Job:
        common = ""
        if arrays:
            common = np.result_type(*(array.dtype for array in arrays)).name
        text = program_text(subscripts, operands, common)
        inputs = {f"x{number}": operand for number, operand in enumerate(operands)}
        return program_job(text, inputs, {}, common, None)

    return compiled_once(comm, ("einsum", subscripts, operands), make_job)
