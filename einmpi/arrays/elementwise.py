"""Functions of single elements: numpy computes them on the blocks of a common layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from einmpi.arrays.moving import block_of_idle_rank, cuts_of_last_dimensions
from einmpi.arrays.products import matmul, vecdot
from einmpi.arrays.programs import common_comm, raise_alike
from einmpi.arrays.reductions import REDUCTIONS
from einmpi.arrays.scans import SCANS
from einmpi.comm.base import Comm
from einmpi.comm.same_arrays import is_checking, require_same_arrays
from einmpi.compiled.dist_array import DistArray
from einmpi.compiled.inputs import block_of
from einmpi.compiled.views import writing
from einmpi.kernels.cuda.driver import cupy, is_device_array
from einmpi.kernels.given import as_numpy, is_of_other_library
from einmpi.schedule.layout import Layout

Number: TypeAlias = bool | int | float | complex | np.generic


def apply_ufunc(
    ufunc: np.ufunc, method: str, inputs: Sequence[Any], options: dict[str, Any]
) -> Any:
    """Apply a numpy ufunc to DistArrays, arrays and numbers.

    A call that DistArrays do not support is left to the other operands, if they have ufuncs of
    their own; else it raises a TypeError.
    """
    targets = options.pop("out", ())
    if ufunc is np.matmul and method == "__call__" and not options and not targets:
        return matmul(*inputs)
    if ufunc is np.vecdot and method == "__call__" and set(options) <= {"axis"} and not targets:
        return vecdot(*inputs, **options)
    if method == "reduce" and ufunc in REDUCTIONS and not targets:
        # The reduce method of a ufunc aggregates over the first dimension by default.
        reduce_options = {"axis": 0, **options}
        return REDUCTIONS[ufunc](inputs[0], **reduce_options)

    if method == "accumulate" and ufunc in SCANS and not targets:
        scan_options = {"axis": 0, **options}
        return SCANS[ufunc](inputs[0], **scan_options)
    if method == "outer" and not targets and len(inputs) == 2:
        left, right = inputs
        left_extents = np.shape(left) + (1,) * np.ndim(right)
        return ufunc(np.reshape(left, left_extents), right, **options)

    is_elementwise = method == "__call__" and ufunc.signature is None
    has_known_options = set(options) <= {"dtype", "casting"}
    name = ufunc.__name__
    if not is_elementwise:
        return _refused(f"{name}.{method} does not take a DistArray", inputs)
    if not has_known_options:
        return _refused(f"{name} of a DistArray does not take {', '.join(options)}", inputs)
    for target in targets:
        if not isinstance(target, DistArray | None):
            what = f"{name} of a DistArray cannot be stored in {type(target).__name__}"
            return _refused(what, [*inputs, *targets])
    for operand in inputs:
        is_known = isinstance(operand, DistArray | np.ndarray | list | tuple | Number)
        if not is_known and not is_of_other_library(operand):
            return _refused(f"{name} of a DistArray and {type(operand).__name__}", inputs)

    outs = [target for target in targets if target is not None]

    def compute_block(*blocks: Any) -> Any:
        given = dict(options)
        if outs:
            # numpy decides whether what `out` holds can take the results.
            extents = np.broadcast_shapes(*map(np.shape, blocks))
            stored = (np.empty_like(block, shape=extents) for block in blocks)
            given["out"] = tuple(None if target is None else next(stored) for target in targets)
        return ufunc(*blocks[len(outs) :], **given)

    fails_by_value = ufunc is np.power and _may_be_negative_power(*inputs)
    computed = on_blocks(name, compute_block, (*outs, *inputs), fails_by_value)
    if not targets:
        return computed
    results = computed if isinstance(computed, tuple) else (computed,)
    found: list[DistArray] = []
    for target, result in zip(targets, results, strict=True):
        if target is not None:
            store(target, result)
        found.append(result if target is None else target)
    return found[0] if len(found) == 1 else tuple(found)


def _may_be_negative_power(base: Any, exponent: Any) -> bool:
    """Return whether this may be a power of integers that numpy refuses, on ranks that have it."""
    for each in (base, exponent):
        if (getattr(each, "dtype", None) or np.asarray(each).dtype).kind not in "iu":
            return False
    return not isinstance(exponent, Number) or bool(np.less(exponent, 0))


def _refused(what: str, operands: Sequence[Any]) -> Any:
    """Raise a TypeError, unless an operand of another kind may know what to do: NotImplemented."""
    for operand in operands:
        has_own_ufuncs = hasattr(type(operand), "__array_ufunc__")
        if has_own_ufuncs and not isinstance(operand, DistArray | np.ndarray | np.generic):
            return NotImplemented
    raise TypeError(f"{what}; expected DistArrays, arrays and numbers")


def store(target: DistArray, result: DistArray) -> None:
    """Write a result into an existing tensor, as `x += y` does."""
    if target.shape != result.shape:
        raise ValueError(
            f"a result of shape {result.shape} does not fit an array of shape {target.shape}"
        )
    if result.layout != target.layout:
        result = result.redistribute(target.layout)
    with writing(target) as changed:
        np.copyto(changed.local, result.local, casting="same_kind")


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
    cuts = cuts_of_last_dimensions(largest.layout, len(shape))
    return Layout(largest.layout.mesh, shape, cuts)


def _operand_layout(result: Layout, shape: tuple[int, ...]) -> Layout:
    """Return the layout in which an operand has, on each rank, what the result needs there.

    A cut through a dimension along which the operand is broadcast does not cut the operand: it is
    the same on all ranks of that axis.
    """
    new_dimensions = len(result.bound) - len(shape)
    cuts: list[int | None] = []
    for cut in result.cuts:
        operand_cut = None
        if cut is not None and cut >= new_dimensions:
            dimension = cut - new_dimensions
            is_broadcast = shape[dimension] != result.bound[cut]
            if not is_broadcast:
                operand_cut = dimension
        cuts.append(operand_cut)
    return Layout(result.mesh, shape, tuple(cuts))


def _needed_block(value: Any, result: Layout, comm: Comm) -> Any:
    """Return the part of an operand that this rank's block of the result needs."""
    if isinstance(value, Number):
        return value
    layout = _operand_layout(result, value.shape)
    region = layout.block(comm.rank)
    if isinstance(value, DistArray):
        if value.layout != layout:
            value = value.redistribute(layout)
        block = value.local
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
    if layout.block(comm.rank) is None:
        block = block_of_idle_rank(layout, block.dtype)
    return DistArray(block, layout, comm)
