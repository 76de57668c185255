"""Functions of numpy that are no ufuncs, computed block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from einmpi.arrays.elementwise import on_blocks
from einmpi.arrays.moving import block_indices
from einmpi.arrays.places import nonzero
from einmpi.arrays.shapes import broadcast_to
from einmpi.compiled.dist_array import DistArray


def by_blocks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that applies another one to every block of a DistArray.

    All arguments but the first are the same for every block.
    """

    def apply_to_array(array: DistArray, /, **options: Any) -> Any:
        def apply_to_block(block: Any) -> Any:
            return function(block, **options)

        return on_blocks(function.__name__, apply_to_block, (array,))

    return apply_to_array


def where(condition: Any, x: Any = None, y: Any = None, /) -> Any:
    """Choose elements of x or y; without them, return the indices where the condition is true."""
    if x is None and y is None:
        return nonzero(condition)
    if x is None or y is None:
        raise ValueError("where takes a condition and two values, or a condition alone")
    return on_blocks("where", np.where, (condition, x, y))


def clip(array: Any, /, a_min: Any = None, a_max: Any = None, **options: Any) -> Any:
    """Limit the elements to a range; numpy calls its ends a_min and a_max, or min and max."""
    lowest = options.pop("min", a_min)
    highest = options.pop("max", a_max)
    if options:
        raise TypeError(f"clip of a DistArray does not take {', '.join(options)}")
    limits = [limit for limit in (lowest, highest) if limit is not None]

    def clip_block(block: Any, *own_limits: Any) -> Any:
        # numpy's clip takes numbers that the dtype does not hold; its maximum refuses them.
        least = None if lowest is None else own_limits[0]
        greatest = None if highest is None else own_limits[-1]
        return np.clip(block, least, greatest)

    return on_blocks("clip", clip_block, (array, *limits))


def full_like(array: DistArray, value: Any, /, dtype: Any = None, device: Any = None) -> DistArray:
    """Return a tensor of equal elements, in the layout of another one."""
    if dtype is None:
        dtype = array.dtype
    element = np.full((), value, dtype)  # blocks of one value: an array is refused
    local = np.full(array.local.shape, element, dtype)
    return DistArray(local, array.layout, array.own_comm)


def zeros_like(array: DistArray, /, dtype: Any = None, device: Any = None) -> DistArray:
    """Return a tensor of zeros, in the layout of another one."""
    return full_like(array, 0, dtype)


def ones_like(array: DistArray, /, dtype: Any = None, device: Any = None) -> DistArray:
    """Return a tensor of ones, in the layout of another one."""
    return full_like(array, 1, dtype)


def is_close(
    a: Any, b: Any, /, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Any:
    """Return, for each element, whether two tensors are close to each other."""

    def compare_blocks(a_block: Any, b_block: Any) -> Any:
        return np.isclose(a_block, b_block, rtol, atol, equal_nan)

    return on_blocks("isclose", compare_blocks, (a, b))


def all_close(
    a: Any, b: Any, /, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    """Return whether two tensors are close to each other everywhere."""
    return bool(np.all(is_close(a, b, rtol, atol, equal_nan)))


def array_equal(a1: Any, a2: Any, /, equal_nan: bool = False) -> bool:
    """Return whether two tensors have the same shape and elements."""
    if np.shape(a1) != np.shape(a2):
        return False
    is_equal = np.equal(a1, a2)
    if equal_nan:
        # Only a nan differs from itself.
        are_both_nan = np.not_equal(a1, a1) & np.not_equal(a2, a2)
        is_equal = is_equal | are_both_nan
    return bool(np.all(is_equal))


def tril(array: DistArray, /, k: int = 0) -> DistArray:
    """Return the tensor with zeros above the k-th diagonal of its last two dimensions."""
    return _triangle(array, lambda rows, columns: columns <= rows + k)


def triu(array: DistArray, /, k: int = 0) -> DistArray:
    """Return the tensor with zeros below the k-th diagonal of its last two dimensions."""
    return _triangle(array, lambda rows, columns: columns >= rows + k)


def _triangle(array: DistArray, is_kept: Callable[[Any, Any], Any]) -> DistArray:
    if array.ndim == 0:
        raise ValueError("a triangle is part of a matrix, or of a stack of matrices")
    if array.ndim == 1:
        array = broadcast_to(array, array.shape * 2)  # as numpy, each row is the vector
    rows, columns = block_indices(array.layout, array.own_comm.rank)[-2:]
    zero = np.zeros((), array.dtype)
    kept = is_kept(rows[:, np.newaxis], columns)
    if not array.local.size:
        return array.copy()
    return DistArray(np.where(kept, array.host, zero), array.layout, array.own_comm)


def size(array: DistArray, /, axis: int | None = None) -> int:
    """Return the number of elements, or an extent."""
    if axis is None:
        return array.size
    return array.shape[axis]
