"""A group of vertices that share rows, as one CUDA kernel: softmax reads once and writes once.

A team of threads owns a row. Tensors between the vertices of the group stay in its registers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import numpy as np

from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Scalar, rebuild
from einmpi.kernels.contraction import recognise_contraction
from einmpi.kernels.cuda import capture
from einmpi.kernels.cuda.driver import DeviceArray
from einmpi.kernels.cuda.group_source import GROUP_BLOCK_THREADS, GroupNest, Stage, group_source
from einmpi.kernels.cuda.nest import (
    PACK_BYTES,
    WARP_THREADS,
    WIDE_OFFSET,
    compile_kernel,
    is_in_place,
    prepare_launch,
)
from einmpi.kernels.loop_nest import Access
from einmpi.kernels.operands import number_operands
from einmpi.kernels.updates import changes_a_part
from einmpi.schedule.compute import Compute, Kernel
from einmpi.schedule.groups import GroupingRule
from einmpi.schedule.regions import names_of

# ---- group split ---------------------------------------------------------------------------------
#
# How the threads of a GPU share a group of vertices: teams, packs, and the arrays of the
# kernel.
#
# The dimensions of a group are its rows and, inside a row, those that all its vertices go over.


MAX_VALUES_PER_THREAD = 32  # values of a row that a thread keeps in registers


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


def team_size(values: int) -> int:
    """Return how many threads share a row with so many values."""
    team = WARP_THREADS
    while values > team * MAX_VALUES_PER_THREAD:
        team *= 2
    return team


@dataclass(frozen=True)
class _Read:
    """An array, or a loop counter, that a group reads."""

    slot: str  # "" for a counter
    dtype: str
    first: int  # the first value of a counter
    strides: tuple[int, ...]  # along rows and inside dimensions, in elements


@dataclass(frozen=True)
class GroupSplit:
    """The nest of a group with its arguments, and the number of thread blocks."""

    nest: GroupNest
    slots: tuple[str, ...]  # of the arrays, in the order of the kernel's pointers; "": a counter
    arguments: Mapping[str, int]  # without addresses
    blocks: int


@dataclass
class _GroupCollector:
    """Collects the stages, reads and outputs of a group, kernel by kernel."""

    kernels: Sequence[Kernel]
    rows: Sequence[Sequence[str]]
    dimensions: Sequence[Sequence[str]]
    slot_strides: Mapping[str, tuple[int, ...]]  # in bytes
    inner_slots: set[str]  # that only the group uses
    makers: dict[str, int] = field(default_factory=dict)  # slot → number of the kernel
    reads: dict[_Read, int] = field(default_factory=dict)  # with their numbers
    stages: list[Stage] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)  # kernels whose results are stored
    output_strides: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, number: int) -> None:
        """Add the kernel with this number, which must be the next one."""
        kernel = self.kernels[number]
        einsum = kernel.einsum
        function, indices, labels = number_operands(einsum)
        args = []
        for slot, index in zip(kernel.operands, indices, strict=False):
            if slot.name in self.makers:
                args.append(Arg(self.makers[slot.name]))
            else:
                strides = self.strides_of(number, index, slot.name, slot.dtype)
                args.append(self.arg_of(_Read(slot.name, slot.dtype, 0, strides)))
        for label in labels:
            runs = dict(kernel.index).get(label)
            first = runs[0][0] if runs else 0
            strides = tuple(int(name == label) for name in self.loop_labels(number))
            args.append(self.arg_of(_Read("", "int64", first, strides)))
        self.makers[kernel.target.name] = number
        self.stages.append(self.stage_of(number, einsum, function, args))
        if kernel.target.name not in self.inner_slots:
            target = kernel.target
            strides = self.strides_of(number, einsum.output, target.name, target.dtype)
            self.outputs.append(number)
            self.output_strides.append(strides)

    def stage_of(self, number: int, einsum: EinSum, function: Scalar, args: Sequence[Arg]) -> Stage:
        """Return the stage of a kernel, whose function reads `args` instead of its operands."""

        def renumbered(leaf: Scalar) -> Scalar:
            return args[leaf.position] if isinstance(leaf, Arg) else leaf

        row_labels = {labels[number] for labels in self.rows}
        return Stage(
            rebuild(function, renumbered),
            einsum.aggregation if einsum.aggregated else None,
            self.kernels[number].target.dtype,
            any(label not in row_labels for label in einsum.output),
        )

    def arg_of(self, read: _Read) -> Arg:
        """Return the Arg of a read; equal reads of several kernels are one."""
        return Arg(len(self.kernels) + self.reads.setdefault(read, len(self.reads)))

    def loop_labels(self, number: int) -> list[str]:
        """Return the labels of a kernel for the rows, then for the inside dimensions."""
        return [labels[number] for labels in (*self.rows, *self.dimensions)]

    def strides_of(
        self, number: int, index: Sequence[Any], slot: str, dtype: str
    ) -> tuple[int, ...]:
        """Return the strides of a slot along the loops, in elements."""
        itemsize = np.dtype(dtype).itemsize
        strides = []
        for name in self.loop_labels(number):
            dimensions = zip(self.slot_strides[slot], index, strict=True)
            step = sum(stride for stride, entry in dimensions if entry == name)
            strides.append(step // itemsize)
        return tuple(strides)


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
    inner_slots = set(names_of(step.inner))
    collector = _GroupCollector(kernels, rows, dimensions, slot_strides, inner_slots)
    for number in range(len(kernels)):
        collector.add(number)
    reads = list(collector.reads)
    counters = tuple(number for number, read in enumerate(reads) if not read.slot)
    extents = extents_of(kernels, [*rows, *dimensions])
    strides = [read.strides for read in reads] + collector.output_strides
    dtypes = [read.dtype for read in reads]
    dtypes += [collector.stages[number].dtype for number in collector.outputs]
    pack = 1
    if aligned:
        pack = _pack_size(strides, dtypes, counters, extents, len(rows))
    # From here on the last loop counts packs.
    extents[-1] //= pack
    for array, own in enumerate(strides):
        if array not in counters:
            strides[array] = (*own[:-1], own[-1] * pack)
    positions = prod(extents[len(rows) :])
    team = team_size(positions * pack)
    largest_offset = prod(extents)
    for own in strides:
        offset = 0
        for stride, extent in zip(own, extents, strict=True):
            offset += abs(stride) * extent
        largest_offset = max(largest_offset, offset)
    accesses = []
    for read in reads:
        loops = tuple(loop for loop, stride in enumerate(read.strides) if stride)
        accesses.append(Access(read.dtype, loops, False))
    writes = []
    for number in collector.outputs:
        stage = collector.stages[number]
        loops = tuple(range(len(extents) if stage.inside else len(rows)))
        writes.append(Access(stage.dtype, loops, False))
    nest = GroupNest(
        stages=tuple(collector.stages),
        reads=tuple(accesses),
        writes=tuple(writes),
        counters=counters,
        outputs=tuple(collector.outputs),
        row_loops=len(rows),
        loops=len(extents),
        team=team,
        values_per_thread=-(-positions // team) * pack,
        pack=pack,
        wide=largest_offset >= WIDE_OFFSET,
    )
    slots = [read.slot for read in reads]
    slots += [kernels[number].target.name for number in collector.outputs]
    first_values = {number: reads[number].first for number in counters}
    arguments = nest.arguments(extents, list(zip(*strides, strict=True)), first_values)
    blocks = -(-prod(extents[: len(rows)]) // nest.teams)
    return GroupSplit(nest, tuple(slots), arguments, blocks)


def _pack_size(
    strides: Sequence[Sequence[int]],
    dtypes: Sequence[str],
    counters: Sequence[int],
    extents: Sequence[int],
    row_loops: int,
) -> int:
    """Return how many neighbours a thread reads at once: 16 bytes, if every array has them."""
    used = []  # arrays with values inside a row
    for array, own in enumerate(strides):
        if array not in counters and any(own[row_loops:]):
            used.append(array)
    is_one_loop = len(extents) == row_loops + 1
    if not used or not is_one_loop or any(strides[array][-1] != 1 for array in used):
        return 1
    widest = max(np.dtype(dtypes[array]).itemsize for array in used)
    pack = min(8, PACK_BYTES // widest)
    # A pack must begin at a multiple of its size in every row.
    steps = [extents[-1]]
    for array in used:
        steps += strides[array][:-1]
    while pack > 1 and any(step % pack for step in steps):
        pack //= 2
    return pack


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


RULE = GroupingRule(_suits, _block, changes_a_part=changes_a_part)


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
