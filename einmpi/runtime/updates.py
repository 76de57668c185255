"""Updates of those rows of a tensor only that a scattered sum has values for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from einmpi.graph.scalar import Arg, walk
from einmpi.kernels.cpu.row_updates import changed_rows
from einmpi.kernels.cpu.scatter import Scatter, scatter_places
from einmpi.kernels.operands import operands_read, part_of_array
from einmpi.kernels.prepared import apply
from einmpi.runtime.backend import Array, HostArray
from einmpi.runtime.buffers import Buffers
from einmpi.schedule.blocked_updates import BlockedUpdate, SparseBlockedUpdate
from einmpi.schedule.regions import indices
from einmpi.schedule.steps import Kernel

# ---- blocked updates -----------------------------------------------------------------------------
#
# An update and the aggregate that it needs, computed together, block by block.


def compute_blocked_update(step: BlockedUpdate, buffers: Buffers) -> None:
    """Compute all at once, where BLAS can, or all blocks, one after another in the same memory."""
    backend = buffers.backend
    arrays = {operand.name: buffers[operand] for operand in step.reads}
    slot = step.update.target
    replaced = step.replaced
    if slot.name in buffers or slot.name in buffers.shared.arrays:
        replaced = None  # it has memory
    target = buffers.make(slot) if replaced is None else buffers[replaced]
    if backend.compute_update(step, arrays, target):
        if replaced is not None:
            buffers.hand_over(replaced, slot)
        return
    _compute_blocks(step, buffers.make(slot), buffers)


def _compute_blocks(step: BlockedUpdate, target: Array, buffers: Buffers) -> None:
    """Compute blocks of rows one after another; the product of each is in the same memory."""
    backend = buffers.backend
    slot = step.product.target
    memory = backend.allocate(step.block_shape, slot.dtype)
    with buffers.counted(memory):
        for rows, product, update in step.blocks:
            block = memory[: rows.stop - rows.start]
            backend.compute_kernel(product, _rows_of_operands(product, buffers, rows), block)
            operands = _rows_of_operands(update, buffers, rows)
            for position, operand in enumerate(update.operands):
                if operand == slot:
                    operands[position] = block
            backend.compute_kernel(update, operands, target[rows])


def _rows_of_operands(kernel: Kernel, buffers: Buffers, rows: slice) -> list[Array]:
    """Return what some rows of a kernel need of its operands; None for those without an array."""
    positions = {kernel.einsum.output[0]: rows}
    found: list[Array] = []
    for slot, entries in zip(kernel.operands, kernel.einsum.operands, strict=True):
        if slot.name in buffers:
            found.append(part_of_array(buffers[slot], entries, positions))
        else:
            found.append(None)
    return found


def compute_sparse_update(step: SparseBlockedUpdate, buffers: Buffers) -> None:
    """Add up the values of each row that gets any, and update these rows, block by block."""
    backend = buffers.backend
    target = buffers.make(step.update.target)
    old = buffers[step.update.operands[step.form.old]]
    if old is not target:
        target[...] = old
    places = _places(step, buffers)
    changes_all = _changes_without_values(step, buffers)
    if not changes_all:
        arrays = {slot.name: buffers[slot] for slot in step.reads}
        if backend.compute_scattered_update(step, arrays, places, target):
            return
    product, update = step.block_kernels
    product_operands = [buffers[slot] for slot in step.product.operands]
    update_operands = [_array_or_none(buffers, slot) for slot in step.update.operands]
    dtype = step.product.target.dtype
    changed_dtype = step.update.target.dtype
    with (
        buffers.counted(backend.allocate(step.block_shape, dtype)) as sums,
        buffers.counted(backend.allocate(step.block_shape, changed_dtype)) as changed,
        buffers.counted(backend.allocate(places.shape, "int64")) as block_places,
    ):
        update_operands[step.form.change] = sums
        update_operands[step.form.old] = changed
        for rows, numbers in _blocks_of_rows(step, places, changes_all):
            backend.from_host(numbers, block_places)
            backend.compute_kernel(product, [*product_operands, block_places], sums)
            backend.take_rows(target, step.dimension, rows, changed)
            backend.compute_kernel(update, update_operands, changed)
            backend.put_rows(changed, target, step.dimension, rows)


def _array_or_none(buffers: Buffers, slot: Any) -> Array:
    return buffers[slot] if slot.name in buffers else None


def _places(step: SparseBlockedUpdate, buffers: Buffers) -> HostArray:
    """Return the row of this rank that each value goes to; others are none of its rows."""
    kernel = step.product
    segments = kernel.einsum.required_segments
    needed = operands_read(segments.indices, segments.operands)
    operands: list[Any] = []
    for number, slot in enumerate(kernel.operands):
        operands.append(buffers.backend.to_host(buffers[slot]) if number in needed else None)
    for operand, dimension, runs in kernel.select:
        if operands[operand] is not None:
            operands[operand] = np.take(operands[operand], indices(runs), axis=dimension)
    index = {label: indices(runs) for label, runs in kernel.index}
    (places,) = scatter_places(Scatter(kernel.einsum, segments, tuple(operands), index))
    return np.asarray(places)


def _blocks_of_rows(
    step: SparseBlockedUpdate, places: HostArray, changes_all: bool
) -> Iterator[tuple[HostArray, HostArray]]:
    """Yield the rows of each block, and to which of these rows values go.

    These are the rows that get values. Only if the others change too, as by 0 × inf, all rows.
    """
    extent = step.product.target.shape[step.dimension]
    if changes_all:
        for start in range(0, extent, step.rows):
            yield np.arange(start, min(start + step.rows, extent)), places - start
        return
    changed = changed_rows(places, extent)
    rows = changed.rows
    flat_numbers = np.full(places.size, -1)
    flat_numbers[changed.order] = np.repeat(np.arange(len(rows)), np.diff(changed.starts))
    numbers = flat_numbers.reshape(places.shape)
    for start in range(0, len(rows), step.rows):
        yield rows[start : start + step.rows], numbers - start


def _changes_without_values(step: SparseBlockedUpdate, buffers: Buffers) -> bool:
    """Return whether the update changes a row whose sums are 0, if only the sign of a zero."""
    form = step.form
    values: list[Any] = [None] * len(step.update.operands)
    for node in walk(form.multiple):
        if isinstance(node, Arg) and node.position != form.change:
            array = buffers[step.update.operands[node.position]]
            values[node.position] = np.asarray(buffers.backend.to_host(array)).reshape(())
    values[form.change] = np.zeros((), step.product.target.dtype)
    negative_zero = -np.zeros((), step.update.target.dtype)
    with np.errstate(all="ignore"):
        multiple = apply(form.multiple, values, {})
        is_added = form.operation == "+"
        result = negative_zero + multiple if is_added else negative_zero - multiple
    result = np.asarray(result).astype(step.update.target.dtype)
    return bool(result.tobytes() != negative_zero.tobytes())
