"""Which kernels a CPU computes as a group, and how many rows at a time: a block must stay in the
cache while all kernels of the group work on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from einmpi.graph.dtypes import DTYPES
from einmpi.kernels.contraction import exact_contraction, recognise_contraction
from einmpi.kernels.cpu import compiled
from einmpi.kernels.cpu.dispatch import WORTH_COMPILING
from einmpi.kernels.distances import DISTANCE_DTYPES, recognise_distance
from einmpi.kernels.grouping import GroupingRule
from einmpi.kernels.weighted_differences import recognise_weighted_difference
from einmpi.schedule.steps import Group, Kernel, Slot

CACHE_BLOCK_BYTES = 2**21  # that a block of a group may use, all of its arrays together
MIN_PRODUCT_ROWS = 64  # of a block: with fewer, BLAS could not use the other factor often enough
MAX_PRODUCT_TERMS = 256  # of a sum: with more, the product takes longer than memory in any case
MIN_SAVED_RATIO = 8  # the size of a product, relative to all that its group writes
MIN_BLOCKS = 16  # with fewer, there would be too little for threads to share


def _accepts(kernel: Kernel, fast_math: bool) -> bool:
    """Return whether a kernel is compiled.

    A matrix product is faster as a whole, and so are distances and their gradients by one, which
    `fast_math` allows; a dot product of rows is not a matrix product.
    """
    einsum = kernel.einsum
    if einsum.has_special_form:
        return False
    if kernel.select or kernel.einsum.calls() < WORTH_COMPILING:
        return False
    if any(map(kernel.einsum.has_arithmetic, range(len(kernel.operands)))):
        return False  # alone, it reads these operands through views
    if is_product(kernel):
        return False
    if fast_math and kernel.target.dtype in DISTANCE_DTYPES:
        is_distance = recognise_distance(einsum) is not None
        if is_distance or recognise_weighted_difference(einsum) is not None:
            return False
    return compiled.supports_compiled_loops(kernel.einsum, kernel.operand_dtypes)


def is_product(kernel: Kernel) -> bool:
    """Return whether a kernel is a matrix product, which is computed by BLAS."""
    contraction = recognise_contraction(kernel.einsum)
    if contraction is None or len(contraction.positions) != 2:
        return False
    left, right, _ = contraction.indices
    return left != right


def _can_lead(kernel: Kernel, strict: bool) -> bool:
    """Return whether a kernel is a matrix product that memory slows down, if it is a large one.

    What follows it in a group may then read it from the cache.
    """
    einsum = kernel.einsum
    if not is_product(kernel) or kernel.select or einsum.calls() < WORTH_COMPILING:
        return False
    if DTYPES[kernel.target.dtype].kind not in "fc" or DTYPES[kernel.target.dtype].is_half:
        return False
    if exact_contraction(einsum, kernel.operand_dtypes, strict) is None:
        return False
    return prod(einsum.extent[label] for label in einsum.aggregated) <= MAX_PRODUCT_TERMS


def _choose_block(
    kernels: Sequence[Kernel], rows: Sequence[Sequence[str]], min_blocks: int
) -> tuple[int, ...] | None:
    """Return how many indices of each row make a block that fits into the cache.

    Rows are halved, the first one first, until a block fits. Return None if blocks of single
    indices are still too large, or if there are too few blocks for threads to share.
    """
    extents = [kernels[0].einsum.extent[labels[0]] for labels in rows]
    block = list(extents)
    for row in range(len(block)):
        while block[row] > 1 and _bytes_used(kernels, rows, block) > CACHE_BLOCK_BYTES:
            block[row] = -(-block[row] // 2)
    count = prod(-(-extent // size) for extent, size in zip(extents, block, strict=True))
    is_small = _bytes_used(kernels, rows, block) <= 2 * CACHE_BLOCK_BYTES
    if not is_small or count < min_blocks:
        return None
    if is_product(kernels[0]) and prod(block) < MIN_PRODUCT_ROWS:
        return None
    return tuple(block)


def _is_worthwhile(group: Group) -> bool:
    """Return whether a group that begins with a matrix product needs little of it in the end.

    Minima of its rows, for example, while the product itself is never whole in memory.
    """
    product = group.kernels[0]
    if not is_product(product):
        return True
    bytes_written = sum(slot.nbytes for slot in group.writes)
    return (
        product.target in group.inner and bytes_written * MIN_SAVED_RATIO <= product.target.nbytes
    )


def _bytes_used(
    kernels: Sequence[Kernel], rows: Sequence[Sequence[str]], block: Sequence[int]
) -> int:
    """Return the bytes of all arrays that a block of a group uses.

    An array that several kernels use counts once. A dimension along a row counts only as far as
    the block reaches; all others, gathered ones among them, count as a whole.
    """
    nbytes: dict[Slot, int] = {}
    for number, kernel in enumerate(kernels):
        einsum = kernel.einsum
        extent = einsum.extent
        for labels, size in zip(rows, block, strict=True):
            extent[labels[number]] = size
        slots = (*kernel.operands, kernel.target)
        indices = (*einsum.operands, einsum.output)
        for slot, index in zip(slots, indices, strict=True):
            elements = 1
            for entry, whole in zip(index, slot.shape, strict=False):
                elements *= extent[entry] if isinstance(entry, str) else whole
            nbytes[slot] = elements * np.dtype(slot.dtype).itemsize
    return sum(nbytes.values())


def cpu_grouping(
    fast_math: bool, strict: bool = False, min_blocks: int = MIN_BLOCKS
) -> GroupingRule:
    """Return the rule for groups on a CPU, each of at least `min_blocks` blocks."""
    return GroupingRule(
        accepts=lambda kernel: _accepts(kernel, fast_math),
        choose_block=lambda kernels, rows: _choose_block(kernels, rows, min_blocks),
        can_lead=lambda kernel: _can_lead(kernel, strict),
        is_worthwhile=_is_worthwhile,
    )
