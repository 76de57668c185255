"""An update and the aggregate that it needs, computed together, block by block."""

from __future__ import annotations

from collections.abc import Mapping

from einmpi.kernels.partial_updates import part_of_array, restricted_kernel
from einmpi.runtime.backend import Array
from einmpi.runtime.buffers import Buffers
from einmpi.schedule.blocked_updates import BlockedUpdate
from einmpi.schedule.regions import Runs, one_run
from einmpi.schedule.steps import Kernel


def compute_blocked_update(step: BlockedUpdate, buffers: Buffers) -> None:
    """Compute all blocks, one after another in the same memory."""
    target = buffers.make(step.update.target)
    product = step.product.target
    extent = product.shape[0]
    memory = buffers.backend.allocate(step.block_shape, product.dtype)
    with buffers.counted(memory):
        for start in range(0, extent, step.rows):
            stop = min(start + step.rows, extent)
            block = memory[: stop - start]
            _compute_rows(step.product, buffers, block, start, stop, {})
            rows = part_of_array(target, ("row",), {"row": slice(start, stop)})
            _compute_rows(step.update, buffers, rows, start, stop, {product.name: block})


def _compute_rows(
    kernel: Kernel,
    buffers: Buffers,
    target: Array,
    start: int,
    stop: int,
    blocks: Mapping[str, Array],
) -> None:
    """Compute some rows of a kernel. `blocks` has operands of which only these rows exist."""
    row = kernel.einsum.output[0]
    positions = {row: slice(start, stop)}
    operands = []
    for slot, entries in zip(kernel.operands, kernel.einsum.operands, strict=True):
        if slot.name in blocks:
            operands.append(blocks[slot.name])
        else:
            operands.append(part_of_array(buffers[slot], entries, positions))
    runs: dict[str, Runs] = {row: one_run(start, stop)}
    part = restricted_kernel(kernel, runs)
    buffers.backend.compute_kernel(part, operands, target)
