"""An update and the aggregate that it needs, computed together, block by block."""

from __future__ import annotations

from einmpi.kernels.boxes import part_of_array
from einmpi.runtime.backend import Array
from einmpi.runtime.buffers import Buffers
from einmpi.schedule.blocked_updates import BlockedUpdate
from einmpi.schedule.steps import Kernel


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
