"""Functions of single elements: numpy computes them on the blocks of a common layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arrays.products import matmul
from einmpi.arrays.programs import common_comm
from einmpi.arrays.reductions import REDUCTIONS
from einmpi.comm.base import Comm
from einmpi.comm.same_arrays import is_checking, require_same_arrays
from einmpi.compiled.dist_array import DistArray
from einmpi.compiled.inputs import block_of
from einmpi.kernels.cuda.driver import cupy, is_device_array
from einmpi.kernels.given import as_numpy
from einmpi.schedule.layout import Layout

Array: TypeAlias = npt.NDArray[Any]
Number: TypeAlias = bool | int | float | complex | np.generic


def apply_ufunc(
    ufunc: np.ufunc, method: str, inputs: Sequence[Any], options: dict[str, Any]
) -> Any:
    """Apply a ufunc of numpy to DistArrays, arrays and numbers."""
    out = options.pop("out", ())
    if ufunc is np.matmul and method == "__call__" and not options and not out:
        return matmul(*inputs)
    if method == "reduce" and ufunc in REDUCTIONS and not out:
        return REDUCTIONS[ufunc](inputs[0], **{"axis": 0, **options})
    known_options = set(options) <= {"dtype", "casting"}
    if method != "__call__" or ufunc.signature is not None or not known_options:
        return NotImplemented
    for target in out:
        if target is not None and not isinstance(target, DistArray):
            return NotImplemented
    for given in inputs:
        if not isinstance(given, DistArray | np.ndarray | list | tuple | Number):
            return NotImplemented
    found = on_blocks(ufunc.__name__, lambda *blocks: ufunc(*blocks, **options), inputs)
    if not out:
        return found
    results = found if isinstance(found, tuple) else (found,)
    for target, result in zip(out, results, strict=True):
        if target is not None:
            store(target, result)
    return out[0] if len(out) == 1 else out


def store(target: DistArray, result: DistArray) -> None:
    """Write a result into a tensor that exists, as `x += y` does."""
    if target.shape != result.shape:
        raise ValueError(f"a result of shape {result.shape} for an array of shape {target.shape}")
    if result.layout != target.layout:
        result = result.redistribute(target.layout)
    np.copyto(target.local, result.local, casting="same_kind")


def on_blocks(where: str, function: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """Apply an elementwise function to the blocks of a common layout; operands are broadcast.

    A function with several results returns them as a tuple.
    """
    distributed = [operand for operand in operands if isinstance(operand, DistArray)]
    comm = common_comm(where, distributed)
    values: list[Any] = []
    for operand in operands:
        if isinstance(operand, DistArray | Number):
            values.append(operand)
        else:
            values.append(as_numpy(where, "an operand", operand))
    arrays = [value for value in values if isinstance(value, DistArray | np.ndarray)]
    if comm.size > 1 and is_checking():
        plain = [array for array in arrays if isinstance(array, np.ndarray)]
        names = [f"operand {number}" for number in range(len(plain))]
        require_same_arrays(comm, where, dict(zip(names, plain, strict=True)))
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    layout = common_layout(shape, distributed)
    blocks = [_block(value, layout, comm) for value in values]
    return _wrapped(function(*_in_one_memory(blocks)), layout, comm)


def common_layout(shape: tuple[int, ...], operands: Sequence[DistArray]) -> Layout:
    """Return the layout of a result: that of the largest operand, whose elements stay in place."""
    largest = max(operands, key=lambda operand: operand.size)
    offset = len(shape) - largest.ndim
    cuts = tuple(None if cut is None else cut + offset for cut in largest.layout.cuts)
    return Layout(largest.layout.mesh, shape, cuts)


def _projected(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """Return how an operand of this shape must lie for a result in the layout."""
    offset = len(layout.bound) - len(shape)
    cuts: list[int | None] = []
    for cut in layout.cuts:
        dimension = None if cut is None else cut - offset
        if dimension is None or dimension < 0 or shape[dimension] != layout.bound[cut or 0]:
            dimension = None
        cuts.append(dimension)
    return Layout(layout.mesh, shape, tuple(cuts))


def _block(value: Any, layout: Layout, comm: Comm) -> Any:
    """Return the part of an operand that this rank's block of the result needs."""
    if isinstance(value, Number):
        return value
    wanted = _projected(layout, value.shape)
    if isinstance(value, DistArray):
        if value.layout != wanted:
            value = value.redistribute(wanted)
        block = value.local
    else:
        block = value
        region = wanted.block(comm.rank)
        if region is not None:
            block = block_of(value, region, value.dtype.name)
    if layout.block(comm.rank) is None:  # this rank is idle, but has to know the dtype
        return np.empty(0, block.dtype)
    return block


def _in_one_memory(blocks: Sequence[Any]) -> list[Any]:
    """Copy blocks to the GPU if some are there."""
    if not any(map(is_device_array, blocks)):
        return list(blocks)
    return [cupy().asarray(block) if isinstance(block, np.ndarray) else block for block in blocks]


def _wrapped(found: Any, layout: Layout, comm: Comm) -> Any:
    if isinstance(found, tuple):
        return tuple(_wrapped(part, layout, comm) for part in found)
    local = found if is_device_array(found) else np.asarray(found)
    if layout.block(comm.rank) is None:
        local = np.empty((0,) * (len(layout.bound) or 1), local.dtype)
    return DistArray(local, layout, comm)
