"""Products of DistArrays: matmul, dot, tensordot and their relatives, all as one einsum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.arrays.programs import common_comm
from einmpi.comm.agreement import together
from einmpi.comm.base import Comm
from einmpi.comm.local import ALONE
from einmpi.compiled.dist_array import DistArray
from einmpi.compiled.known import compiled_once
from einmpi.compiled.program import Compiled
from einmpi.errors import InputError
from einmpi.job.job import Job
from einmpi.job.program import program_job
from einmpi.kernels.given import as_numpy
from einmpi.language.numpy_einsum import program_text, split_arguments

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def compile_einsum(subscripts: str, arrays: Sequence[Any], comm: Comm) -> Compiled:
    """Return the compiled program of an einsum whose operands are x0, x1, … and result is out."""
    operands = tuple((tuple(array.shape), array.dtype.name) for array in arrays)

    def make_job() -> Job:
        common = ""
        if arrays:
            common = np.result_type(*(array.dtype for array in arrays)).name
        text = program_text(subscripts, operands, common)
        inputs = {f"x{number}": operand for number, operand in enumerate(operands)}
        return program_job(text, inputs, {}, common, None)

    return compiled_once(comm, ("einsum", subscripts, operands), make_job)


def evaluate_einsum(
    *arguments: Any, dtype: Any = None, out: npt.NDArray[Any] | None = None, optimize: Any = True
) -> Any:
    """Evaluate the arguments of `einmpi.einsum`. All ranks call it if there is a DistArray."""
    distributed = [given for given in arguments if isinstance(given, DistArray)]
    comm: Any = distributed[0].own_comm if distributed else ALONE

    def check_and_compile() -> tuple[Compiled, list[Any]]:
        subscripts, operands = split_arguments(arguments)
        if any(array.own_comm is not comm for array in distributed):
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
        return compile_einsum(subscripts, arrays, comm), arrays

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


def product(where: str, subscripts: str, *operands: Any) -> DistArray:
    """Return an einsum of operands, at least one of which is a DistArray."""
    arrays: list[Any] = []
    for operand in operands:
        if isinstance(operand, DistArray):
            arrays.append(operand)
        else:
            arrays.append(as_numpy(where, "an operand", operand))
    comm = common_comm(where, [array for array in arrays if isinstance(array, DistArray)])
    compiled = compile_einsum(subscripts, arrays, comm)
    return compiled({f"x{number}": array for number, array in enumerate(arrays)})["out"]


def matmul(one: Any, two: Any) -> Any:
    """Return the matrix product, as `numpy.matmul`."""
    if np.ndim(one) == 0 or np.ndim(two) == 0:
        raise ValueError("matmul: a number is not a matrix; use * instead")
    one_labels = "a" if np.ndim(one) == 1 else "...ba"
    two_labels = "a" if np.ndim(two) == 1 else "...ac"
    out = "..." + one_labels.strip("a.") + two_labels.strip("a.")
    if one_labels == two_labels == "a":
        out = ""
    return product("matmul", f"{one_labels},{two_labels}->{out}", one, two)


def dot(one: Any, two: Any) -> Any:
    """Return the product over the last dimension of one and the last but one of two."""
    if np.ndim(one) == 0 or np.ndim(two) == 0:
        return np.multiply(one, two)
    return tensordot(one, two, axes=([-1], [-min(2, np.ndim(two))]))


def inner(one: Any, two: Any) -> Any:
    """Return the product over the last dimensions of both."""
    if np.ndim(one) == 0 or np.ndim(two) == 0:
        return np.multiply(one, two)
    return tensordot(one, two, axes=([-1], [-1]))


def tensordot(one: Any, two: Any, axes: Any = 2) -> Any:
    """Return the sum of products over pairs of dimensions, as `numpy.tensordot`."""
    if isinstance(axes, int):
        one_axes = list(range(np.ndim(one) - axes, np.ndim(one)))
        two_axes = list(range(axes))
    else:
        one_axes = list(np.atleast_1d(axes[0]))
        two_axes = list(np.atleast_1d(axes[1]))
    if len(one_axes) != len(two_axes):
        raise ValueError("tensordot: both tensors need equally many axes")
    one_labels = list(_LETTERS[: np.ndim(one)])
    two_labels = list(_LETTERS[np.ndim(one) : np.ndim(one) + np.ndim(two)])
    for one_axis, two_axis in zip(one_axes, two_axes, strict=True):
        two_labels[two_axis] = one_labels[one_axis]
        if np.shape(one)[one_axis] != np.shape(two)[two_axis]:
            raise ValueError(
                f"tensordot: extents {np.shape(one)[one_axis]} and {np.shape(two)[two_axis]} differ"
            )
    shared = set(one_labels) & set(two_labels)
    out = [label for label in (*one_labels, *two_labels) if label not in shared]
    subscripts = f"{''.join(one_labels)},{''.join(two_labels)}->{''.join(out)}"
    return product("tensordot", subscripts, one, two)


def outer(one: Any, two: Any) -> Any:
    """Return the products of all pairs of elements."""
    return product("outer", "a,b->ab", np.ravel(one), np.ravel(two))


def vdot(one: Any, two: Any) -> Any:
    """Return the sum of conjugates of one times the elements of two."""
    return product("vdot", "a,a->", np.conjugate(np.ravel(one)), np.ravel(two))


def trace(array: Any) -> Any:
    """Return the sum of the diagonal of a matrix, or of the first two dimensions."""
    return product("trace", "aa...->...", array)


def diagonal(array: Any) -> Any:
    """Return the diagonal of a matrix, or of the first two dimensions."""
    return product("diagonal", "aa...->...a", array)
