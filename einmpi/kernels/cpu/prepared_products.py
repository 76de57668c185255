"""Contractions that are repeated on arrays stored in the same way: what is copied and which views
BLAS multiplies is found out once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from einmpi.kernels.contraction import Contraction
from einmpi.kernels.cpu.blas import (
    Call,
    calls_of,
    compute_by_blas,
    copy_shapes,
    product_dtype_of,
    stored_array,
    view_without_ones,
)
from einmpi.kernels.lowering import split_to_fit_memory
from einmpi.kernels.operands import Array
from einmpi.kernels.prepared import (
    NumpyCall,
    PreparedCall,
    ViewMaker,
    address_of,
    unchanged,
    view_maker,
)

# ---- temporaries ---------------------------------------------------------------------------------
#
# Memory for the copies that a kernel makes for itself. A thread uses it again and again, since
# new memory costs a page fault for every few kilobytes.


MOST_KEPT_BYTES = 2**22  # of a thread, between two kernels
ALIGNMENT = 64  # bytes: equal alignment on all ranks, so that equal work gives equal bits


class _Kept(threading.local):
    """What a thread has kept of the last kernel."""

    def __init__(self) -> None:
        self.memory: Array = np.empty(0, np.uint8)


_kept = _Kept()


def temporary_arrays(shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any]) -> list[Array]:
    """Return arrays with any values, for this thread and until it calls this again."""
    offsets = []
    total = 0
    for shape in shapes:
        offsets.append(total)
        total += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    memory = _kept.memory
    if memory.nbytes < total:
        memory = np.empty(total + ALIGNMENT, np.uint8)
        start = -address_of(memory) % ALIGNMENT
        memory = memory[start : start + total]
        if total <= MOST_KEPT_BYTES:
            _kept.memory = memory
    found = []
    for shape, offset in zip(shapes, offsets, strict=True):
        found.append(np.ndarray(shape, dtype, memory, offset))
    return found


class SinglePart(NamedTuple):
    """A contraction that is not split: the calls that compute it on some arrays.

    The arrays are the factors, the output, and `copies`, which have these shapes and one dtype.
    """

    calls: list[Call]
    arrays: list[Array]
    shapes: list[tuple[int, ...]]
    dtype: np.dtype[Any]
    is_matrix_product: bool  # of views with two dimensions, or of stacks of them


def prepare_by_blas(
    contraction: Contraction, operands: Sequence[Array], out: Array
) -> PreparedCall:
    """Return `compute_by_blas` for arrays that are stored as these are.

    The views and calls are prepared, unless the work is so large that it is split. The values of
    integers decide how they are multiplied, so nothing is prepared for them.
    """
    part = _single_part(contraction, operands, out)
    prepared = None if part is None else _prepare_part(contraction.positions, part)
    if prepared is not None:
        return prepared

    def compute(operands: Sequence[Array], out: Array) -> None:
        compute_by_blas(contraction, operands, out)

    return compute


def _prepare_part(positions: Sequence[int], part: SinglePart) -> PreparedCall | None:
    """Prepare the calls of a contraction; return None if their views cannot be made again."""
    prepared = []
    for call in part.calls:
        arguments: list[tuple[int, ViewMaker]] = []
        for view, owner in zip(call.arrays, call.owners, strict=True):
            make_view = view_maker(part.arrays[owner], view)
            if make_view is None:
                return None
            arguments.append((owner, make_view))
        prepared.append((call.function, arguments))

    def compute(operands: Sequence[Array], out: Array) -> None:
        arrays = [operands[k] for k in positions]
        arrays.append(out)
        arrays += temporary_arrays(part_shapes, dtype)
        for function, arguments in prepared:
            function(*[make_view(arrays[number]) for number, make_view in arguments])

    part_shapes = part.shapes
    dtype = part.dtype
    if len(prepared) > 1:
        return NumpyCall(compute)
    ((function, arguments),) = prepared

    def bind(operands: Sequence[Array], out: Array) -> Callable[[], Any]:
        arrays = [operands[k] for k in positions]
        arrays.append(out)
        return partial(function, *[make_view(arrays[number]) for number, make_view in arguments])

    if len(arguments) == 3 and all(make_view is unchanged for _, make_view in arguments):
        first, second = (positions[number] for number, _ in arguments[:2])
        return NumpyCall(
            lambda operands, out: function(operands[first], operands[second], out), bind
        )
    return NumpyCall(lambda operands, out: bind(operands, out)(), bind)


class ProductOfViews(NamedTuple):
    """A numpy function of views of operands, and of one of the output."""

    function: Callable[..., Any]
    positions: tuple[int, ...]  # of the operands
    views: tuple[Array, ...]
    target: Array
    is_matrix_product: bool


def product_of_views(
    contraction: Contraction, operands: Sequence[Array], out: Array
) -> ProductOfViews | None:
    """Return a contraction as one call on views of the arrays; None if it needs more than that."""
    part = _single_part(contraction, operands, out)
    if part is None or len(part.calls) > 1:
        return None
    ((function, views, owners),) = part.calls
    positions = tuple(contraction.positions[number] for number in owners[:-1])
    return ProductOfViews(function, positions, views[:-1], views[-1], part.is_matrix_product)


def _single_part(
    contraction: Contraction, operands: Sequence[Array], out: Array
) -> SinglePart | None:
    """Return how a contraction is computed if it is not split; None also if values decide."""
    if out.dtype.kind in "iu" or 0 in (extent for _, extent in contraction.extents):
        return None
    arrays = [*(operands[k] for k in contraction.positions), out]
    product_dtype = product_dtype_of(contraction, out.dtype, arrays[:-1])
    stored = tuple(map(stored_array, arrays))
    parts = list(split_to_fit_memory(contraction, stored, product_dtype, {}))
    if len(parts) > 1 or len(parts[0]) > 1:
        return None
    ((lowering, part),) = parts[0]
    views = []
    for array, index in zip(arrays, contraction.indices, strict=True):
        views.append(view_without_ones(array, index, part))
    shapes = copy_shapes(lowering, views)
    dtype = np.dtype(lowering.dtype)
    copies = temporary_arrays(shapes, dtype)
    calls = calls_of(lowering, views, copies, contraction.scale)
    return SinglePart(calls, arrays + copies, shapes, dtype, lowering.kernel == "matmul")
