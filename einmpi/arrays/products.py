"""Products of DistArrays: matmul, dot, tensordot and the like, each as an einsum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

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
from einmpi.graph.arithmetic import result_type
from einmpi.graph.dtypes import DTYPES, Type, is_bfloat16
from einmpi.job.job import Job
from einmpi.job.program import program_job
from einmpi.kernels.cpu.blas import numpy_einsum
from einmpi.kernels.given import as_numpy
from einmpi.language.numpy_einsum import (
    CASTINGS,
    ORDERS,
    EinsumTypeError,
    check_choice,
    check_optimize,
    label_extents,
    parse_subscripts,
    program_text,
    split_arguments,
)

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_Operand = TypeVar("_Operand")


def compile_einsum(subscripts: str, arrays: Sequence[Any], comm: Comm) -> Compiled:
    """Return the compiled program of an einsum: its operands are x0, x1, …, its result is out."""
    kinds = tuple((tuple(array.shape), array.dtype.name) for array in arrays)

    def make_job() -> Job:
        common_dtype = ""
        if arrays:
            common_dtype = _common_dtype([array.dtype for array in arrays])
        text = program_text(subscripts, kinds, common_dtype)
        return program_job(text, _by_name(kinds), {}, common_dtype, None)

    return compiled_once(comm, ("einsum", subscripts, kinds), make_job)


def _common_dtype(dtypes: Sequence[np.dtype[Any]]) -> str:
    """Return the dtype of a product of operands; numpy does not know it for bfloat16."""
    if not any(map(is_bfloat16, dtypes)):
        return np.result_type(*dtypes).name
    common: Type = dtypes[0]
    for dtype in dtypes[1:]:
        common = result_type("*", (common, dtype))
    return np.dtype(common).name


def _by_name(operands: Sequence[_Operand]) -> dict[str, _Operand]:
    """Return operands of an einsum by the names that its program gives them."""
    return {f"x{number}": operand for number, operand in enumerate(operands)}


def evaluate_einsum(
    *arguments: Any,
    out: npt.NDArray[Any] | None = None,
    dtype: Any = None,
    order: str = "K",
    casting: str = "safe",
    optimize: Any = False,
) -> Any:
    """Evaluate the arguments of `einmpi.einsum`. All ranks call it if there is a DistArray."""
    distributed = [argument for argument in arguments if isinstance(argument, DistArray)]
    comm: Comm = ALONE
    if distributed:
        comm = distributed[0].own_comm

    def check_and_compile() -> tuple[Compiled | None, str, list[Any]]:
        subscripts, operands = split_arguments(arguments)
        check_optimize(optimize, len(operands))
        checked_casting = check_choice("casting", casting, CASTINGS)
        check_choice("order", order, ORDERS)
        if distributed:
            common_comm("einsum", distributed)
            if out is not None:
                raise InputError("einsum", "out is given with a DistArray", "arrays only")
        elif out is not None and not isinstance(out, np.ndarray):
            raise EinsumTypeError("einsum", f"out is {type(out).__name__}", "an array")
        wanted = None if dtype is None else _dtype_of(dtype)
        arrays: list[Any] = []
        for number, operand in enumerate(operands):
            if not isinstance(operand, DistArray):
                operand = as_numpy("einsum", f"operand {number}", operand)
            arrays.append(_cast(number, operand, wanted, checked_casting))
        if out is None and len(arrays) == 1 and isinstance(arrays[0], np.ndarray):
            terms, output = parse_subscripts(subscripts, [arrays[0].shape])
            label_extents(terms, [arrays[0].shape])
            if set(terms[0]) == set(output) and arrays[0].dtype.name in DTYPES:
                return None, subscripts, arrays  # a view, as in numpy
        return compile_einsum(subscripts, arrays, comm), subscripts, arrays

    compiled, subscripts, arrays = together(comm, check_and_compile)
    numpy_order: Any = order.upper()
    if compiled is None:
        (labels,), output = parse_subscripts(subscripts, [arrays[0].shape])
        view: Any = _view(arrays[0], labels, output)
        return np.asarray(view, order=numpy_order)
    result = compiled(_by_name(arrays))["out"]
    if distributed:
        return result
    if out is None:
        return _in_order(numpy_order, subscripts, arrays, result.local)
    if out.shape != result.shape:
        what = f"out is an array of shape {out.shape}"
        raise InputError("einsum", what, f"an array of shape {result.shape}")
    # As in numpy, a product in several steps is assigned to `out` whatever its dtype.
    out_casting: Any = "unsafe" if optimize else casting
    if not np.can_cast(result.dtype, out.dtype, out_casting):
        what = f"out is {out.dtype.name}, which does not hold {result.dtype.name}"
        raise EinsumTypeError("einsum", what, "another dtype", 'or use casting="unsafe"')
    np.copyto(out, result.local, casting="unsafe")
    return out


def _dtype_of(given: Any) -> np.dtype[Any]:
    try:
        dtype: np.dtype[Any] = np.dtype(given)
    except TypeError:
        raise EinsumTypeError("einsum", f"{given!r:.60} is not a dtype", "a dtype") from None
    return dtype


def _cast(number: int, array: Any, dtype: np.dtype[Any] | None, casting: Any) -> Any:
    """Return an operand in the dtype in which the einsum is computed, if one is given."""
    if dtype is None or array.dtype == dtype:
        return array
    if not np.can_cast(array.dtype, dtype, casting):
        what = f"operand {number} is {array.dtype.name}, which is not cast to {dtype.name}"
        raise EinsumTypeError("einsum", what, "another dtype", 'or use casting="unsafe"')
    return array.astype(dtype)


def _view(
    array: npt.NDArray[Any], labels: Sequence[str], output: Sequence[str]
) -> npt.NDArray[Any]:
    """Return a view of an array with its dimensions permuted, or its diagonals."""
    axes = [output.index(label) for label in labels]
    view: npt.NDArray[Any] = numpy_einsum(array, axes, list(range(len(output))))
    return view


def _in_order(
    order: Any, subscripts: str, arrays: Sequence[npt.NDArray[Any]], result: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Return the result in a memory order of numpy."""
    if order == "A":
        order = "F" if all(array.flags.f_contiguous for array in arrays) else "C"
    if order in ("C", "F"):
        ordered: npt.NDArray[Any] = np.asarray(result, order=order)
        return ordered
    if result.ndim < 2 or all(array.flags.c_contiguous for array in arrays):
        return result
    ordered = _like_operands(subscripts, arrays, result)
    ordered[...] = result
    return ordered


def _like_operands(
    subscripts: str, arrays: Sequence[npt.NDArray[Any]], result: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Return an empty array whose dimensions lie in memory as those of the operands do.

    numpy's iterator decides about it, for operands that are broadcast as in the einsum.
    """
    terms, output = parse_subscripts(subscripts, [array.shape for array in arrays])
    labels = list(output)
    for term in terms:
        labels += [label for label in term if label not in labels]
    axes: list[list[int]] = []
    diagonals = []
    for array, term in zip(arrays, terms, strict=True):
        own_labels = list(dict.fromkeys(term))
        diagonals.append(_view(array, term, own_labels))
        own_axes = dict.fromkeys(labels, -1)
        own_axes.update({label: axis for axis, label in enumerate(own_labels)})
        axes.append(list(own_axes.values()))
    axes.append([*range(len(output)), *[-1] * (len(labels) - len(output))])
    operand_flags: list[Any] = [["readonly"]] * len(arrays)
    try:
        iterator = np.nditer(
            [*diagonals, None],
            flags=["reduce_ok", "external_loop", "zerosize_ok"],
            op_flags=[*operand_flags, ["readwrite", "allocate"]],
            op_dtypes=[*[array.dtype for array in arrays], result.dtype],
            op_axes=axes,
            order="K",
        )
    except ValueError:  # there are too many elements or dimensions for an iterator
        return np.empty_like(result)
    found: npt.NDArray[Any] = iterator.operands[-1]
    return found


def product(where: str, subscripts: str, *operands: Any) -> DistArray:
    """Return an einsum of operands, at least one of which is a DistArray."""
    arrays: list[Any] = []
    distributed: list[DistArray] = []
    for operand in operands:
        if isinstance(operand, DistArray):
            arrays.append(operand)
            distributed.append(operand)
        else:
            arrays.append(as_numpy(where, "an operand", operand))
    comm = common_comm(where, distributed)
    compiled = compile_einsum(subscripts, arrays, comm)
    return compiled(_by_name(arrays))["out"]


def matmul(left: Any, right: Any) -> Any:
    """Return the matrix product, as `numpy.matmul`."""
    left_ndim = np.ndim(left)
    right_ndim = np.ndim(right)
    if min(left_ndim, right_ndim) == 0:
        raise ValueError("matmul: a number is not a matrix; use * instead")
    if left_ndim == 1 and right_ndim == 1:
        subscripts = "a,a->"
    elif left_ndim == 1:
        subscripts = "a,...ac->...c"
    elif right_ndim == 1:
        subscripts = "...ba,a->...b"
    else:
        subscripts = "...ba,...ac->...bc"
    return product("matmul", subscripts, left, right)


def dot(left: Any, right: Any, /) -> Any:
    """Return the sum of products over the last dimension of `left`, as `numpy.dot`.

    Its counterpart is the last dimension but one of `right`, or the only one of a vector.
    """
    right_ndim = np.ndim(right)
    if np.ndim(left) == 0 or right_ndim == 0:
        return np.multiply(left, right)
    right_axis = -min(2, right_ndim)
    return tensordot(left, right, axes=([-1], [right_axis]))


def inner(left: Any, right: Any, /) -> Any:
    """Return the sum of products over the last dimensions of both."""
    if np.ndim(left) == 0 or np.ndim(right) == 0:
        return np.multiply(left, right)
    return tensordot(left, right, axes=([-1], [-1]))


def tensordot(left: Any, right: Any, /, axes: Any = 2) -> Any:
    """Return the sum of products over pairs of dimensions, as `numpy.tensordot`.

    An integer `axes` pairs that many of the last dimensions of `left` with the first of `right`.
    """
    left_shape = np.shape(left)
    right_shape = np.shape(right)
    left_ndim = len(left_shape)
    right_ndim = len(right_shape)
    if isinstance(axes, int):
        left_axes = list(range(left_ndim - axes, left_ndim))
        right_axes = list(range(axes))
    else:
        left_axes = list(np.atleast_1d(axes[0]))
        right_axes = list(np.atleast_1d(axes[1]))
    if len(left_axes) != len(right_axes):
        raise ValueError("tensordot: the number of axes differs between the two tensors")

    # Every dimension has its own label, except that those of a pair share the one of the left.
    left_labels = list(_LETTERS[:left_ndim])
    right_labels = list(_LETTERS[left_ndim : left_ndim + right_ndim])
    for left_axis, right_axis in zip(left_axes, right_axes, strict=True):
        left_extent = left_shape[left_axis]
        right_extent = right_shape[right_axis]
        if left_extent != right_extent:
            raise ValueError(f"tensordot: extents {left_extent} and {right_extent} differ")
        right_labels[right_axis] = left_labels[left_axis]
    summed = set(left_labels) & set(right_labels)
    result_labels = [label for label in left_labels + right_labels if label not in summed]

    operand_subscripts = f"{''.join(left_labels)},{''.join(right_labels)}"
    subscripts = f"{operand_subscripts}->{''.join(result_labels)}"
    return product("tensordot", subscripts, left, right)


def outer(left: Any, right: Any, /) -> Any:
    """Return the products of all pairs of elements."""
    return product("outer", "a,b->ab", np.ravel(left), np.ravel(right))


def vdot(left: Any, right: Any, /) -> Any:
    """Return the sum of the products of the conjugate elements of `left` and those of `right`."""
    conjugates = np.conjugate(np.ravel(left))
    return product("vdot", "a,a->", conjugates, np.ravel(right))


def vecdot(left: Any, right: Any, /, axis: int = -1) -> Any:
    """Return the sum of products over one dimension; elements of `left` are conjugated."""
    left_extent = np.shape(left)[axis]
    right_extent = np.shape(right)[axis]
    if left_extent != right_extent:
        raise ValueError(f"vecdot: extents {left_extent} and {right_extent} differ")
    left_last = np.moveaxis(left, axis, -1)
    right_last = np.moveaxis(right, axis, -1)
    return product("vecdot", "...a,...a->...", np.conjugate(left_last), right_last)


def trace(array: Any, /, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None) -> Any:
    """Return the sum of a diagonal of a matrix, or of two dimensions."""
    return np.sum(diagonal(array, offset, axis1, axis2), axis=-1, dtype=dtype)


def diagonal(array: Any, /, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    """Return a diagonal of a matrix, or of two dimensions."""
    matrices = np.moveaxis(array, (axis1, axis2), (0, 1))
    first_row = max(-offset, 0)
    first_column = max(offset, 0)
    extent = min(matrices.shape[0] - first_row, matrices.shape[1] - first_column)
    extent = max(extent, 0)
    rows = slice(first_row, first_row + extent)
    columns = slice(first_column, first_column + extent)
    return product("diagonal", "aa...->...a", matrices[rows, columns])
