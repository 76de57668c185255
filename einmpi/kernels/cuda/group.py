"""A group of vertices that share rows, as one CUDA kernel: softmax reads once and writes once.

A team of threads owns a row. Tensors between the vertices of the group stay in its registers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from einmpi.kernels.contraction import recognise_contraction
from einmpi.kernels.cuda.capture import watch
from einmpi.kernels.cuda.driver import DeviceArray
from einmpi.kernels.cuda.group_source import GROUP_BLOCK_THREADS, group_source
from einmpi.kernels.cuda.group_split import (
    MAX_VALUES_PER_THREAD,
    extents_of,
    inside_dimensions,
    split_group,
    team_rows,
    team_size,
)
from einmpi.kernels.cuda.launch import (
    Launch,
    compile_kernel,
    is_in_place,
    key_of,
    prepare_launch,
)
from einmpi.kernels.cuda.nest import PACK_BYTES
from einmpi.kernels.grouping import GroupingRule
from einmpi.kernels.prepared import PreparedCalls
from einmpi.schedule.steps import Group, Kernel

MAX_TEAM_THREADS = 512
MIN_ROWS = 2**10  # with fewer rows, a kernel for each vertex has more work to share
MIN_MAP_VALUES = 2**8  # of a row of elementwise kernels: each thread of a team has eight
SECTOR_BYTES = 32  # the least that a GPU reads from memory


# ---- which kernels form a group -----------------------------------------------------------------


def _suits(kernel: Kernel) -> bool:
    """Tell whether a kernel can be in a group: no matrix product, scan or gather, nothing empty."""
    einsum = kernel.einsum
    if einsum.has_special_form or not einsum.is_indexed_by_labels:
        return False
    product = recognise_contraction(einsum)
    if product is not None and len(product.positions) > 1:
        left, right = product.indices[:2]
        if left != right:
            return False  # a matrix product
    if any(len(runs) != 1 for _, runs in kernel.index):
        return False
    return not kernel.select and 0 not in dict(einsum.extents).values()


def _block(kernels: Sequence[Kernel], rows: Sequence[Sequence[str]]) -> tuple[int, ...] | None:
    """Return one row at a time, if there are enough rows and each fits into registers."""
    shared_rows = team_rows(kernels, rows)
    dimensions = inside_dimensions(kernels, shared_rows)
    if dimensions is None:
        return None
    row_count = prod(extents_of(kernels, shared_rows))
    values = prod(extents_of(kernels, dimensions))
    if row_count < MIN_ROWS or values > MAX_VALUES_PER_THREAD * MAX_TEAM_THREADS:
        return None
    if len(shared_rows) < len(rows) and values < MIN_MAP_VALUES:
        return None
    teams = GROUP_BLOCK_THREADS // team_size(values)
    if _wastes_sectors(kernels, shared_rows, teams):
        return None
    return (1,) * len(rows)


def _wastes_sectors(kernels: Sequence[Kernel], rows: Sequence[Sequence[str]], teams: int) -> bool:
    """Tell whether the values of a row lie apart, and a block has too few rows to use the gaps.

    Neighbours in memory are then neighbouring rows, as in sums over the columns of a matrix.
    """
    made: set[str] = set()
    for number, kernel in enumerate(kernels):
        row_labels = {labels[number] for labels in rows}
        for slot, index in zip(kernel.operands, kernel.einsum.operands, strict=True):
            is_whole = set(index) == set(kernel.einsum.labels)
            if slot.name in made or not is_whole:
                continue
            is_apart = index[-1] in row_labels and slot.shape[-1] > 1
            if is_apart and teams * np.dtype(slot.dtype).itemsize < SECTOR_BYTES:
                return True
        made.add(kernel.target.name)
    return False


RULE = GroupingRule(_suits, _block)


# ---- the call -----------------------------------------------------------------------------------

CALLS = PreparedCalls()


def compute_group(step: Group, arrays: Mapping[str, DeviceArray], fast_math: bool = False) -> bool:
    """Compute a group on the arrays of its slots, without the inner ones.

    Return False if it has to be computed kernel by kernel.
    """
    names = sorted(arrays)
    in_place = _is_in_place(step, arrays)
    key = (*names, *(key_of(arrays[name]) for name in names), in_place, fast_math)
    prepared = CALLS.get(step, key, lambda: _prepare_group(step, arrays, fast_math))
    if prepared is None:
        return False
    launch, slots = prepared
    launch([arrays[slot].data.ptr if slot else 0 for slot in slots])
    return True


def _prepare_group(
    step: Group, arrays: Mapping[str, DeviceArray], fast_math: bool
) -> tuple[Launch, tuple[str, ...]] | None:
    """Return the launch of a group and the slots whose addresses it takes."""
    watch.prepare_calls()
    for array in arrays.values():
        if any(stride % array.itemsize for stride in array.strides):
            return None
    strides = {name: tuple(array.strides) for name, array in arrays.items()}
    aligned = not any(array.data.ptr % PACK_BYTES for array in arrays.values())
    split = split_group(step, strides, aligned)
    if split is None:
        return None
    nest = split.nest
    grid = (split.blocks, 1), (nest.team * nest.teams,)
    kernel = compile_kernel(group_source(nest), fast_math, _is_in_place(step, arrays))
    return prepare_launch(kernel, grid, nest.parameters(), split.arguments), split.slots


def _is_in_place(step: Group, arrays: Mapping[str, DeviceArray]) -> bool:
    """Return whether a group writes over an array that it reads."""
    read = [arrays[slot.name] for slot in step.reads]
    return any(is_in_place(read, arrays[slot.name]) for slot in step.writes)
