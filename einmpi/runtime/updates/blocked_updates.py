"""An update and the aggregate that it needs, computed together, block by block."""

from __future__ import annotations

from collections.abc import Mapping

from einmpi.kernels.updates.partial_updates import part_of_array
from einmpi.runtime.backend import Array
from einmpi.runtime.buffers import Buffers
from einmpi.schedule.blocked_updates import BlockedUpdate
from einmpi.schedule.steps import Kernel


def compute_blocked_update(step: BlockedUpdate, buffers: Buffers) -> None:
    """Compute all at once, where BLAS can, or all blocks, one after another in the same memory."""
    backend = buffers.backend
    arrays = {operand.name: buffers[operand] for operand in step.reads}
    if _compute_in_memory_of_operand(step, arrays, buffers):
        return
    target = buffers.make(step.update.target)
    if backend.compute_update(step, arrays, target):
        return
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


def _compute_in_memory_of_operand(
    step: BlockedUpdate, arrays: Mapping[str, Array], buffers: Buffers
) -> bool:
    """Compute all at once in the memory of an operand that is not needed any more, if possible."""
    operand = step.replaced
    target = step.update.target
    if operand is None or target.name in buffers:
        return False
    if operand.name in buffers.shared.arrays or target.name in buffers.shared.arrays:
        return False
    if not buffers.backend.compute_update(step, arrays, arrays[operand.name]):
        return False
    buffers.hand_over(operand, target)
    return True


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
