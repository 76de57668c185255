"""Which kernels go together on a CPU, and how many rows at a time, so that a block stays in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from einmpi.kernels.contraction import recognise_contraction
from einmpi.kernels.cpu import compiled
from einmpi.kernels.cpu.dispatch import WORTH_COMPILING
from einmpi.kernels.grouping import GroupingRule
from einmpi.schedule.steps import Kernel, Slot

BLOCK_BYTES = 2**21  # bytes that a block of a group may touch, all of its arrays together
MIN_BLOCKS = 16  # blocks: with fewer, threads would have nothing to share


def _suits(kernel: Kernel) -> bool:
    einsum, product = kernel.einsum, recognise_contraction(kernel.einsum)
    # A matrix product is quicker whole; a dot product of rows is no matrix product.
    is_matrix = (
        product is not None
        and len(product.positions) > 1
        and product.indices[0] != product.indices[1]
    )
    dtypes = [slot.dtype for slot in kernel.operands]
    return (
        not is_matrix
        and not kernel.select
        and einsum.calls() >= WORTH_COMPILING
        and compiled.supports_compiled_loops(einsum, dtypes)
    )


def _block(kernels: Sequence[Kernel], labels: Sequence[Sequence[str]]) -> tuple[int, ...] | None:
    """Blocks small enough for the cache, if there are enough of them."""
    extents = [kernels[0].einsum.extent[names[0]] for names in labels]
    block = list(extents)
    for row in range(len(block)):
        while block[row] > 1 and _touched(kernels, labels, block) > BLOCK_BYTES:
            block[row] = -(-block[row] // 2)
    count = prod(-(-extent // size) for extent, size in zip(extents, block, strict=True))
    small = count >= MIN_BLOCKS and _touched(kernels, labels, block) <= 2 * BLOCK_BYTES
    return tuple(block) if small else None


def _touched(kernels: Sequence[Kernel], rows: Sequence[Sequence[str]], block: Sequence[int]) -> int:
    """Bytes of all arrays that a block of a group uses."""
    sizes: dict[Slot, int] = {}
    for number, kernel in enumerate(kernels):
        size = {
            **kernel.einsum.extent,
            **{labels[number]: n for labels, n in zip(rows, block, strict=True)},
        }
        for slot, index in zip(
            (*kernel.operands, kernel.target),
            (*kernel.einsum.operands, kernel.einsum.output),
            strict=True,
        ):
            extents = [
                size[e] if isinstance(e, str) else n
                for e, n in zip(index, slot.shape, strict=False)
            ]
            sizes[slot] = prod(extents) * np.dtype(slot.dtype).itemsize
    return sum(sizes.values())


CPU_GROUPING = GroupingRule(_suits, _block)
