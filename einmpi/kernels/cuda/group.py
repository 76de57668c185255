"""A group of vertices that share rows, as one CUDA kernel: softmax reads once and writes once.

A team of threads owns a row. Tensors between the vertices of the group stay in its registers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np

from einmpi.graph.scalar import Arg, IndexEntries, Scalar, rebuild
from einmpi.kernels.contraction import Contraction, recognise_contraction
from einmpi.kernels.cuda import capture
from einmpi.kernels.cuda.driver import DeviceArray
from einmpi.kernels.cuda.group_source import (
    GROUP_BLOCK_THREADS,
    MAX_VALUES_PER_THREAD,
    GroupNest,
    Stage,
    group_source,
)
from einmpi.kernels.cuda.nest import (
    PACK_BYTES,
    WARP_THREADS,
    WIDE_OFFSET,
    compile_kernel,
    is_in_place,
    prepare_launch,
)
from einmpi.kernels.loop_nest import Access, Axis, stride_by_entry
from einmpi.kernels.operands import number_operands
from einmpi.kernels.updates import changes_a_part
from einmpi.schedule.compute import Compute, Kernel
from einmpi.schedule.groups import GroupingRule
from einmpi.schedule.regions import Slot, names_of

# ---- group split ---------------------------------------------------------------------------------
#
# How the threads of a GPU share a group of vertices: teams, packs, and the arrays of the
# kernel.
#
# The dimensions of a group are its rows and, inside a row, those that all its vertices go over.


FEW_VALUES = 8  # of a row for a thread, which it reads at once
MAX_TEAM_THREADS = 512
BUSY_THREADS = 2**17  # of all teams: about as many as a large GPU runs at once


def inside_dimensions(
    kernels: Sequence[Kernel], rows: Sequence[Sequence[str]]
) -> list[tuple[str, ...]] | None:
    """Return the dimensions inside a row: the labels of every kernel, "" if it has but one value.

    Return None if kernels do not go over the same positions in the same order: a thread would need
    values that another thread keeps.
    """
    made: set[str] = set()  # slots that kernels of the group write
    orders: list[tuple[str, ...]] = []  # the labels inside a row, for each kernel
    extents: tuple[int, ...] | None = None
    for number, kernel in enumerate(kernels):
        einsum = kernel.einsum
        row_labels = {labels[number] for labels in rows}
        inside = tuple(label for label in einsum.labels if label not in row_labels)
        if einsum.aggregated and any(label in einsum.output for label in inside):
            return None
        # What the group has made must be read in the order in which it was made.
        operand_orders = set()
        for slot, index in zip(kernel.operands, einsum.operands, strict=True):
            labels = [entry for entry in index if isinstance(entry, str)]
            order = tuple(label for label in labels if label not in row_labels)
            if slot.name in made and order:
                operand_orders.add(order)
        if len(operand_orders) > 1:
            return None
        order = operand_orders.pop() if operand_orders else inside
        if sorted(order) != sorted(inside):
            return None
        if order:
            own_extents = tuple(einsum.extent[label] for label in order)
            if extents is not None and extents != own_extents:
                return None
            extents = own_extents
        orders.append(order)
        made.add(kernel.target.name)
    if not extents:
        return None
    dimensions = []
    for position in range(len(extents)):
        dimensions.append(tuple(order[position] if order else "" for order in orders))
    return dimensions


def extents_of(kernels: Sequence[Kernel], loops: Sequence[Sequence[str]]) -> list[int]:
    """Return the extents of rows or inside dimensions, given by the labels of every kernel."""
    found = []
    for labels in loops:
        pairs = zip(kernels, labels, strict=True)
        found.append(next(kernel.einsum.extent[label] for kernel, label in pairs if label))
    return found


def team_rows(kernels: Sequence[Kernel], rows: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
    """Return the rows that teams of threads share.

    Where all kernels are elementwise, every label is a row. The last one is then what a team goes
    over.
    """
    are_maps = all(len(kernel.einsum.labels) == len(rows) for kernel in kernels)
    return rows[:-1] if are_maps else rows


def team_size(rows: int, values: int, keeps_values: bool) -> int:
    """Return how many threads share a row with so many values.

    A team is large enough to keep the values in registers, and larger where few rows leave threads
    without work. Rows that are shorter than what a warp reads at once share a warp.
    """
    team = WARP_THREADS
    while team > 1 and values <= team // 2 * FEW_VALUES:
        team //= 2
    while keeps_values and values > team * MAX_VALUES_PER_THREAD:
        team *= 2
    while rows * team < BUSY_THREADS and values > team * FEW_VALUES and team < MAX_TEAM_THREADS:
        team *= 2
    return team


def keeps_values(kernels: Sequence[Kernel], dimensions: Sequence[Sequence[str]]) -> bool:
    """Return whether threads keep results: those that have a value for every position of a row."""
    for number, kernel in enumerate(kernels):
        inside = {labels[number] for labels in dimensions}
        if not inside.isdisjoint(kernel.einsum.output):
            return True
    return False


class _GroupArray(NamedTuple):
    """An array that a group reads or writes, or a loop counter that it reads."""

    slot: str  # "" for a counter
    dtype: str
    strides: tuple[int, ...]  # along rows and inside dimensions, in elements
    first: int | None = None  # the first value of a counter


@dataclass(frozen=True)
class GroupSplit:
    """The nest of a group with its arguments, and the number of thread blocks."""

    nest: GroupNest
    slots: tuple[str, ...]  # of the arrays, in the order of the kernel's pointers; "": a counter
    arguments: Mapping[str, int]  # without addresses
    blocks: int


class _GroupParts(NamedTuple):
    """The stages of a group, and its arrays."""

    stages: list[Stage]
    reads: dict[_GroupArray, int]  # with their numbers; equal reads of several kernels are one
    writes: dict[int, _GroupArray]  # by the numbers of the kernels whose results are stored


def _parts_of(
    kernels: Sequence[Kernel],
    rows: Sequence[Sequence[str]],
    dimensions: Sequence[Sequence[str]],
    slot_strides: Mapping[str, tuple[int, ...]],
    inner_slots: Sequence[str],
) -> _GroupParts:
    """Return stages and arrays; `slot_strides` are in bytes, `inner_slots` only the group uses."""
    makers: dict[str, int] = {}  # slot → number of the kernel
    parts = _GroupParts([], {}, {})
    for number, kernel in enumerate(kernels):
        einsum = kernel.einsum
        loops = [labels[number] for labels in (*rows, *dimensions)]
        function, indices, labels = number_operands(einsum)
        args: list[Arg] = []
        for slot, index in zip(kernel.operands, indices, strict=False):
            if slot.name in makers:
                args.append(Arg(makers[slot.name]))
                continue
            read = _array_along(slot, index, loops, slot_strides)
            args.append(Arg(len(kernels) + parts.reads.setdefault(read, len(parts.reads))))
        for label in labels:
            runs = dict(kernel.index).get(label)
            strides = tuple(int(name == label) for name in loops)
            read = _GroupArray("", "int64", strides, runs[0][0] if runs else 0)
            args.append(Arg(len(kernels) + parts.reads.setdefault(read, len(parts.reads))))
        makers[kernel.target.name] = number
        stage = Stage(
            _with_args(function, args),
            einsum.aggregation if einsum.aggregated else None,
            kernel.target.dtype,
            any(label not in loops[: len(rows)] for label in einsum.output),
        )
        parts.stages.append(stage)
        if kernel.target.name not in inner_slots:
            parts.writes[number] = _array_along(kernel.target, einsum.output, loops, slot_strides)
    return parts


def _with_args(function: Scalar, args: Sequence[Arg]) -> Scalar:
    """Return a function that reads `args` instead of its operands."""

    def renumbered(leaf: Scalar) -> Scalar:
        return args[leaf.position] if isinstance(leaf, Arg) else leaf

    return rebuild(function, renumbered)


def _array_along(
    slot: Slot, entries: IndexEntries, loops: Sequence[str], strides: Mapping[str, tuple[int, ...]]
) -> _GroupArray:
    """Return the array of a slot, with its strides along loops."""
    table = stride_by_entry(entries, strides[slot.name])
    itemsize = np.dtype(slot.dtype).itemsize
    along = tuple(table.get(label, 0) // itemsize for label in loops)
    return _GroupArray(slot.name, slot.dtype, along)


def split_group(
    step: Compute, slot_strides: Mapping[str, tuple[int, ...]], aligned: bool
) -> GroupSplit | None:
    """Choose how threads share a group; None if it has to be computed kernel by kernel.

    `aligned` says that every slot begins at a multiple of PACK_BYTES.
    """
    kernels = step.kernels
    rows = team_rows(kernels, step.tiles.rows)
    dimensions = inside_dimensions(kernels, rows)
    if dimensions is None:
        return None
    parts = _parts_of(kernels, rows, dimensions, slot_strides, names_of(step.inner))
    extents, arrays = _with_merged_loops(
        extents_of(kernels, [*rows, *dimensions]), [*parts.reads, *parts.writes.values()], len(rows)
    )
    pack = _pack_size(arrays, extents, len(rows)) if aligned else 1
    # From here on the last loop counts packs.
    extents[-1] //= pack
    positions = prod(extents[len(rows) :])
    has_kept = keeps_values(kernels, dimensions)
    team = team_size(prod(extents[: len(rows)]), positions * pack, has_kept)
    largest_offset = prod(extents)
    strides = []
    accesses = []
    for array in arrays:
        is_counter = array.first is not None
        *others, last = array.strides
        own = (*others, last if is_counter else last * pack)
        strides.append(own)
        reach = sum(abs(stride) * extent for stride, extent in zip(own, extents, strict=True))
        largest_offset = max(largest_offset, reach)
        loops = tuple(loop for loop, stride in enumerate(own) if stride)
        accesses.append(Access(array.dtype, loops, False, counts=is_counter))
    nest = GroupNest(
        stages=tuple(parts.stages),
        reads=tuple(accesses[: len(parts.reads)]),
        writes=tuple(accesses[len(parts.reads) :]),
        outputs=tuple(parts.writes),
        row_loops=len(rows),
        loops=len(extents),
        team=team,
        values_per_thread=-(-positions // team) * pack,
        pack=pack,
        wide=largest_offset >= WIDE_OFFSET,
    )
    slots = [array.slot for array in arrays]
    first_values = {k: array.first for k, array in enumerate(arrays) if array.first is not None}
    axes = []
    for extent, along in zip(extents, zip(*strides, strict=True), strict=True):
        axes.append(Axis(extent, False, along))
    arguments = nest.arguments(axes, first_values)
    blocks = -(-prod(extents[: len(rows)]) // nest.teams)
    return GroupSplit(nest, tuple(slots), arguments, blocks)


def _with_merged_loops(
    extents: Sequence[int], arrays: Sequence[_GroupArray], row_loops: int
) -> tuple[list[int], list[_GroupArray]]:
    """Return one loop for those inside a row that go over neighbours in every array."""
    merged = list(extents)
    arrays = list(arrays)
    for loop in range(len(extents) - 2, row_loops - 1, -1):
        inner = loop + 1
        follows = all(
            array.strides[loop] == array.strides[inner] * merged[inner] for array in arrays
        )
        if not follows and merged[loop] > 1 and merged[inner] > 1:
            continue
        # A loop of one step has no stride of its own.
        kept = loop if merged[inner] == 1 else inner
        arrays = [
            array._replace(
                strides=(*array.strides[:loop], array.strides[kept], *array.strides[inner + 1 :])
            )
            for array in arrays
        ]
        merged[loop : inner + 1] = [merged[loop] * merged[inner]]
    return merged, arrays


def _pack_size(arrays: Sequence[_GroupArray], extents: Sequence[int], row_loops: int) -> int:
    """Return how many neighbours a thread reads at once: 16 bytes, if every array has them."""
    used = []  # arrays with values inside a row
    for array in arrays:
        if array.first is None and any(array.strides[row_loops:]):
            used.append(array)
    is_one_loop = len(extents) == row_loops + 1
    if not used or not is_one_loop or any(array.strides[-1] != 1 for array in used):
        return 1
    widest = max(np.dtype(array.dtype).itemsize for array in used)
    pack = min(8, PACK_BYTES // widest)
    # A pack must begin at a multiple of its size in every row.
    steps = [extents[-1]]
    for array in used:
        steps += array.strides[:-1]
    while pack > 1 and any(step % pack for step in steps):
        pack //= 2
    return pack


MOST_KERNELS_OUTSIDE = 2  # after a group, which later ones may join to it
MIN_MAP_VALUES = 2**8  # of a row of elementwise kernels: each thread of a team has eight
SECTOR_BYTES = 32  # the least that a GPU reads from memory


# ---- which kernels form a group -----------------------------------------------------------------


def _suits(kernel: Kernel) -> bool:
    """Tell whether a kernel can be in a group: no matrix product, scan or gather, nothing empty."""
    einsum = kernel.einsum
    if einsum.has_special_form or not einsum.is_indexed_by_labels:
        return False
    product = recognise_contraction(einsum)
    if product is not None and len(product.positions) > 1 and not _reads_rows_once(product):
        return False
    if any(len(runs) != 1 for _, runs in kernel.index):
        return False
    return not kernel.select and 0 not in dict(einsum.extents).values()


def _reads_rows_once(product: Contraction) -> bool:
    """Return whether each row of a factor makes one number: vectors' products do, and a matrix's
    with a vector, but not those of two matrices, which share what they read."""
    left, right, output = product.indices
    if left == right:
        return True
    extent = dict(product.extents)
    needed = {label for label in (*left, *right, *output) if extent[label] > 1}
    return any(
        factor and needed <= {*factor} and factor[-1] not in output for factor in (left, right)
    )


def _block(kernels: Sequence[Kernel], rows: Sequence[Sequence[str]]) -> tuple[int, ...] | None:
    """Return one row at a time, if what threads keep of it fits into registers."""
    shared_rows = team_rows(kernels, rows)
    dimensions = inside_dimensions(kernels, shared_rows)
    if dimensions is None:
        return None
    row_count = prod(extents_of(kernels, shared_rows))
    values = prod(extents_of(kernels, dimensions))
    has_kept = keeps_values(kernels, dimensions)
    if has_kept and values > MAX_VALUES_PER_THREAD * MAX_TEAM_THREADS:
        return None
    if len(shared_rows) < len(rows) and values < MIN_MAP_VALUES:
        return None
    teams = GROUP_BLOCK_THREADS // team_size(row_count, values, keeps_values=True)
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
            if slot.name in made or not is_whole or row_labels.issuperset(index):
                continue
            is_apart = index[-1] in row_labels and slot.shape[-1] > 1
            if is_apart and teams * np.dtype(slot.dtype).itemsize < SECTOR_BYTES:
                return True
        made.add(kernel.target.name)
    return False


RULE = GroupingRule(
    _suits, _block, changes_a_part=changes_a_part, most_outside=MOST_KERNELS_OUTSIDE
)


# ---- the call -----------------------------------------------------------------------------------

Arrays: TypeAlias = Mapping[str, DeviceArray]  # of the slots of a step but the inner ones, by name


def prepare_group(
    step: Compute, arrays: Arrays, fast_math: bool = False
) -> Callable[[Arrays], int] | None:
    """Return a group as one launch; None if it has to be computed kernel by kernel."""
    capture.prepare_calls()
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
    launch = prepare_launch(kernel, grid, nest.parameters(), split.arguments)
    slots = split.slots

    def compute(arrays: Arrays) -> int:
        launch([arrays[slot].data.ptr if slot else 0 for slot in slots])
        return 0

    return compute


def _is_in_place(step: Compute, arrays: Arrays) -> bool:
    """Return whether a group writes over an array that it reads."""
    read = [arrays[slot.name] for slot in step.reads]
    return any(is_in_place(read, arrays[slot.name]) for slot in step.writes)
