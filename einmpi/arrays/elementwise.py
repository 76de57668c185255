"""Functions of single elements of DistArrays, which numpy computes on the blocks of a layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from einmpi.arrays.creation import block_of
from einmpi.arrays.dist_array import DistArray
from einmpi.arrays.moving import (
    block_indices,
    broadcast_layout,
    common_comm,
    with_other_dimensions,
)
from einmpi.arrays.shapes import broadcast_to
from einmpi.comm.agreement import is_checking, require_same_arrays, together
from einmpi.comm.base import Comm
from einmpi.errors import EinmpiError
from einmpi.kernels.cuda.driver import cupy, is_device_array
from einmpi.kernels.reference import as_numpy
from einmpi.schedule.layout import Layout

Number: TypeAlias = bool | int | float | complex | np.generic


def on_blocks(
    where: str,
    function: Callable[..., Any],
    operands: Sequence[Any],
    fails_by_value: bool = False,
) -> Any:
    """Apply an elementwise function to the blocks of a common layout; operands are broadcast.

    A function with several results returns them as a tuple. One that `fails_by_value` may raise an
    error on some ranks only: then all ranks raise it.
    """
    distributed = [operand for operand in operands if isinstance(operand, DistArray)]
    comm = common_comm(where, distributed)
    values: list[Any] = []
    shapes: list[tuple[int, ...]] = []
    plain_arrays: dict[str, Any] = {}
    for operand in operands:
        if isinstance(operand, Number):
            values.append(operand)
        elif isinstance(operand, DistArray):
            values.append(operand)
            shapes.append(operand.shape)
        else:
            array = as_numpy(where, "an operand", operand)
            values.append(array)
            shapes.append(array.shape)
            plain_arrays[f"operand {len(plain_arrays)}"] = array
    if comm.size > 1 and is_checking():
        require_same_arrays(comm, where, plain_arrays)

    layout = common_layout(np.broadcast_shapes(*shapes), distributed)
    blocks = [_needed_block(value, layout, comm) for value in values]
    if fails_by_value and layout.bound:  # every rank has all of a tensor without dimensions
        computed = raise_alike(comm, ValueError, lambda: function(*in_one_memory(blocks)))
    else:
        computed = function(*in_one_memory(blocks))
    if isinstance(computed, tuple):
        return tuple(_as_dist_array(block, layout, comm) for block in computed)
    return _as_dist_array(computed, layout, comm)


def common_layout(shape: tuple[int, ...], operands: Sequence[DistArray]) -> Layout:
    """Return the layout of a result: that of the largest operand, whose elements stay in place."""
    largest = max(operands, key=lambda operand: operand.size)
    return broadcast_layout(largest.layout, shape)


def _operand_layout(result: Layout, shape: tuple[int, ...]) -> Layout:
    """Return the layout in which an operand has, on each rank, what the result needs there.

    A cut through a dimension along which the operand is broadcast does not cut the operand: it is
    the same on all ranks of that axis.
    """
    new_dimensions = len(result.bound) - len(shape)

    def dimension_of(cut: int) -> int | None:
        dimension = cut - new_dimensions
        is_broadcast = dimension < 0 or shape[dimension] != result.bound[cut]
        return None if is_broadcast else dimension

    return with_other_dimensions(result, shape, dimension_of)


def _needed_block(value: Any, result: Layout, comm: Comm) -> Any:
    """Return the part of an operand that this rank's block of the result needs."""
    if isinstance(value, Number):
        return value
    layout = _operand_layout(result, value.shape)
    region = layout.block(comm.rank)
    if isinstance(value, DistArray):
        block = value._in_layout(layout).local
    elif region is not None:
        block = block_of(value, region, value.dtype.name)
    else:
        block = value
    if region is None:
        # This rank is idle, but it computes with no elements to find out the dtype of the result.
        return np.empty(0, block.dtype)
    return block


def in_one_memory(blocks: Sequence[Any]) -> list[Any]:
    """Return the blocks, all of them on the GPU if any of them is."""
    if not any(map(is_device_array, blocks)):
        return list(blocks)
    moved: list[Any] = []
    for block in blocks:
        if isinstance(block, np.ndarray):
            moved.append(cupy().asarray(block))
        else:
            moved.append(block)
    return moved


def _as_dist_array(block: Any, layout: Layout, comm: Comm) -> DistArray:
    """Return the tensor of which a function has computed this rank's block."""
    if not is_device_array(block):
        block = np.asarray(block)
    return DistArray(block, layout, comm)


def raise_alike(comm: Comm, kind: type[Exception], function: Callable[[], Any]) -> Any:
    """Call a function on every rank; if some raise an error of a kind, all ranks raise one."""
    try:
        return together(comm, function)
    except EinmpiError as error:  # of another rank
        name, _, message = str(error).partition(": ")
        raise kind(message) if name == kind.__name__ else error from None


# ---- functions of numpy that are no ufuncs ------------------------------------------------------


def by_blocks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that applies another one to every block of a DistArray.

    All arguments but the first are the same for every block.
    """

    def apply_to_array(array: DistArray, /, **options: Any) -> Any:
        def apply_to_block(block: Any) -> Any:
            return function(block, **options)

        return on_blocks(function.__name__, apply_to_block, (array,))

    return apply_to_array


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
    return filled_like(value, array, dtype)


def filled_like(
    value: Any, array: DistArray, /, dtype: Any = None, device: Any = None
) -> DistArray:
    """Return a tensor of equal elements, in the layout of another one."""
    if dtype is None:
        dtype = array.dtype
    element = np.full((), value, dtype)  # blocks of one value: an array is refused
    return array._with_block(np.full(array.local.shape, element, dtype))


def isclose(
    a: Any, b: Any, /, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Any:
    """Return, for each element, whether two tensors are close to each other."""
    return on_blocks("isclose", lambda x, y: np.isclose(x, y, rtol, atol, equal_nan), (a, b))


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


def triangle(compare: np.ufunc, array: DistArray, /, k: int = 0) -> DistArray:
    """Return the tensor with zeros on one side of the k-th diagonal of its last two dimensions.

    Elements stay where `compare` is True of their column and that of the diagonal.
    """
    if array.ndim == 0:
        raise ValueError("a triangle is part of a matrix, or of a stack of matrices")
    if array.ndim == 1:
        array = broadcast_to(array, array.shape * 2)  # as numpy, each row is the vector
    rows, columns = block_indices(array.layout, array.own_comm.rank)[-2:]
    zero = np.zeros((), array.dtype)
    kept = compare(columns, rows[:, np.newaxis] + k)
    if not array.local.size:
        return array.copy()
    return array._with_block(np.where(kept, array.host, zero))
