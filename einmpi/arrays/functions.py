"""The functions of numpy that take DistArrays, and what computes each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from einmpi.arrays import indexing, products, reductions, shapes
from einmpi.arrays.elementwise import on_blocks
from einmpi.arrays.reshaping import reshape
from einmpi.compiled.dist_array import DistArray


def apply_function(
    function: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]
) -> Any:
    """Evaluate a function of numpy on DistArrays; refuse one that is not in `FUNCTIONS`."""
    implementation = FUNCTIONS.get(function)
    if implementation is None:
        name = f"{function.__module__}.{function.__name__}"
        raise TypeError(
            f"{name} does not take a DistArray; gather() returns an array that it takes, and a "
            "program may compute the same on the ranks"
        )
    return implementation(*arguments, **options)


def _aggregation(name: str) -> Callable[..., DistArray]:
    """Return the function for an aggregation whose numpy function has no argument `dtype`."""

    def aggregate(
        array: DistArray, axis: Any = None, out: Any = None, keepdims: bool = False, **options: Any
    ) -> DistArray:
        return reductions.aggregate(name, array, axis, None, out, keepdims, **options)

    return aggregate


def _where(condition: Any, x: Any = None, y: Any = None) -> Any:
    """Choose elements of x or y; where(condition) alone, which returns indices, is refused."""
    if x is None or y is None:
        raise TypeError("where of a DistArray takes a condition and two values")
    return on_blocks("where", np.where, (condition, x, y))


def _clip(array: Any, a_min: Any = None, a_max: Any = None, **options: Any) -> Any:
    """Limit the elements to a range; numpy calls its ends a_min and a_max, or min and max."""
    lowest = options.pop("min", a_min)
    highest = options.pop("max", a_max)
    clipped = array
    if lowest is not None:
        clipped = np.maximum(clipped, lowest)
    if highest is not None:
        clipped = np.minimum(clipped, highest)
    return clipped


def _by_blocks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that applies another one to every block of a DistArray.

    All arguments but the first are the same for every block.
    """

    def apply_to_array(array: DistArray, *arguments: Any, **options: Any) -> Any:
        def apply_to_block(block: Any) -> Any:
            return function(block, *arguments, **options)

        return on_blocks(function.__name__, apply_to_block, (array,))

    return apply_to_array


def _full_like(array: DistArray, value: Any, dtype: Any = None, **_: Any) -> DistArray:
    if dtype is None:
        dtype = array.dtype
    local = np.full(array.local.shape, value, dtype)
    return DistArray(local, array.layout, array.own_comm)


def _zeros_like(array: DistArray, dtype: Any = None, **_: Any) -> DistArray:
    return _full_like(array, 0, dtype)


def _ones_like(array: DistArray, dtype: Any = None, **_: Any) -> DistArray:
    return _full_like(array, 1, dtype)


def _is_close(
    a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Any:
    def compare_blocks(a_block: Any, b_block: Any) -> Any:
        return np.isclose(a_block, b_block, rtol, atol, equal_nan)

    return on_blocks("isclose", compare_blocks, (a, b))


def _all_close(a: Any, b: Any, *arguments: Any, **options: Any) -> bool:
    return bool(np.all(_is_close(a, b, *arguments, **options)))


def _array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> bool:
    if np.shape(a1) != np.shape(a2):
        return False
    is_equal = np.equal(a1, a2)
    if equal_nan:
        # Only a nan differs from itself.
        are_both_nan = np.not_equal(a1, a1) & np.not_equal(a2, a2)
        is_equal = is_equal | are_both_nan
    return bool(np.all(is_equal))


def _size(array: DistArray, axis: int | None = None) -> int:
    if axis is None:
        return array.size
    return array.shape[axis]


def _vstack(arrays: Sequence[Any], **_: Any) -> DistArray:
    """Join tensors along the first dimension; a vector is a matrix of one row."""
    matrices: list[Any] = []
    for array in arrays:
        if np.ndim(array) > 1:
            matrices.append(array)
        else:
            matrices.append(np.reshape(array, (1, -1)))
    return shapes.concatenate(matrices, 0)


def _hstack(arrays: Sequence[Any], **_: Any) -> DistArray:
    """Join tensors along the second dimension, and vectors along their only one."""
    axis = 1
    if np.ndim(arrays[0]) == 1:
        axis = 0
    return shapes.concatenate(arrays, axis)


def _ravel(array: DistArray, order: str = "C") -> DistArray:
    if order != "C":
        raise TypeError("ravel of a DistArray takes elements in row-major order only")
    return reshape(array, (-1,))


def _reshape(array: DistArray, shape: Any = None, order: str = "C", **options: Any) -> DistArray:
    if order != "C" or options.pop("copy", None) is False:
        raise TypeError("reshape of a DistArray copies elements in row-major order")
    return reshape(array, shape)


FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    # aggregations
    np.sum: partial(reductions.aggregate, "sum"),
    np.prod: partial(reductions.aggregate, "prod"),
    np.any: _aggregation("any"),
    np.all: _aggregation("all"),
    np.max: _aggregation("max"),
    np.min: _aggregation("min"),
    np.mean: reductions.mean,
    np.var: reductions.var,
    np.std: reductions.std,
    np.argmax: partial(reductions.argument_of, "max"),
    np.argmin: partial(reductions.argument_of, "min"),
    np.count_nonzero: reductions.count_nonzero,
    np.ptp: reductions.peak_to_peak,
    np.linalg.norm: reductions.norm,
    # products
    np.dot: products.dot,
    np.vdot: products.vdot,
    np.inner: products.inner,
    np.outer: products.outer,
    np.tensordot: products.tensordot,
    np.trace: products.trace,
    np.diagonal: products.diagonal,
    np.einsum: products.evaluate_einsum,
    # shapes
    np.transpose: shapes.transpose,
    np.permute_dims: shapes.transpose,
    np.matrix_transpose: lambda array: shapes.swapaxes(array, -1, -2),
    np.swapaxes: shapes.swapaxes,
    np.moveaxis: shapes.moveaxis,
    np.expand_dims: shapes.expand_dims,
    np.squeeze: shapes.squeeze,
    np.broadcast_to: shapes.broadcast_to,
    np.reshape: _reshape,
    np.ravel: _ravel,
    np.concatenate: shapes.concatenate,
    np.stack: shapes.stack,
    np.vstack: _vstack,
    np.hstack: _hstack,
    np.flip: shapes.flip,
    np.roll: shapes.roll,
    np.take: indexing.take,
    np.shape: lambda array: array.shape,
    np.ndim: lambda array: array.ndim,
    np.size: _size,
    # elements
    np.where: _where,
    np.clip: _clip,
    np.round: _by_blocks(np.round),
    np.around: _by_blocks(np.round),
    np.real: _by_blocks(np.real),
    np.imag: _by_blocks(np.imag),
    np.angle: _by_blocks(np.angle),
    np.nan_to_num: _by_blocks(np.nan_to_num),
    np.copy: _by_blocks(lambda block: block.copy()),
    np.astype: _by_blocks(lambda block, dtype, **_: block.astype(dtype)),
    np.isclose: _is_close,
    np.allclose: _all_close,
    np.array_equal: _array_equal,
    np.zeros_like: _zeros_like,
    np.empty_like: _zeros_like,
    np.ones_like: _ones_like,
    np.full_like: _full_like,
}
