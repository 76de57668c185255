"""A group of kernels, computed one block of rows at a time. The parameters of each kernel are
prepared once for all blocks of one shape; from block to block only addresses change.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.errors import EinmpiError
from einmpi.graph.scalar import IndexEntries, Scalar
from einmpi.kernels.cpu.compiled import (
    CompiledKernel,
    OperandView,
    Parameters,
    bind_to_arrays,
    check_gathers,
    kernel_of,
    pool,
)
from einmpi.kernels.loop_nest import BoundNest, Counter, counted
from einmpi.kernels.operands import Array, number_operands
from einmpi.kernels.prepared import address_of
from einmpi.schedule.regions import indices
from einmpi.schedule.steps import Group, Kernel, Slot

Block: TypeAlias = tuple[tuple[int, int], ...]  # the start and the size of each row


def compute_group(group: Group, arrays: Mapping[str, Array], threads: int) -> bool:
    """Compute a group, one block of rows after another.

    Every thread takes its share of the blocks and has its own arrays for the inner slots.

    Parameters
    ----------
    group
        The kernels and their rows.
    arrays
        The arrays of all slots but the inner ones, by the name of the slot.
    threads
        How many threads to use.

    Returns
    -------
    bool
        False, with nothing computed, if the kernels must be computed one by one.
    """
    extents = [group.kernels[0].einsum.extent[labels[0]] for labels in group.rows]
    cuts = []
    for extent, size in zip(extents, group.block, strict=True):
        cuts.append([(start, min(size, extent - start)) for start in range(0, extent, size)])
    blocks = list(itertools.product(*cuts))
    workers = [_Worker(group, arrays) for _ in range(min(threads, len(blocks)))]
    if not all(stage.is_movable for stage in workers[0].stages_for(group.block)):
        return False
    bounds = [len(blocks) * k // len(workers) for k in range(len(workers) + 1)]
    shares = [blocks[start:stop] for start, stop in itertools.pairwise(bounds)]
    if len(workers) == 1:
        workers[0].compute_blocks(shares[0])
    else:
        list(pool(threads).map(_Worker.compute_blocks, workers, shares))
    for worker in workers:
        worker.check_gathers()
    return True


@dataclass
class _Stage:
    """One kernel of a group, prepared for blocks of one shape.

    The address of each array is that for the block at 0 plus, for each row, the block's start
    times the array's stride along that row. Arrays of inner slots do not move.
    """

    located_name: str  # of the vertex, for messages
    bound: BoundNest
    kernel: CompiledKernel
    parameters: Parameters
    parameters_address: int
    positions: npt.NDArray[np.intp]  # of the arrays' addresses among the parameters
    first_addresses: npt.NDArray[np.int64]
    row_strides: npt.NDArray[np.int64]  # in bytes, of each row and array
    arrays: list[Array | Counter]  # kept alive as long as their addresses are in use
    is_movable: bool

    def compute_block(self, start: npt.NDArray[np.int64]) -> None:
        """Compute the block that starts here."""
        self.parameters[self.positions] = self.first_addresses + start @ self.row_strides
        self.kernel(self.parameters_address)

    def check_gathers(self) -> None:
        """Raise EinmpiError if the kernel met an index that is out of range."""
        try:
            check_gathers(self.bound, [self.parameters])
        except IndexError as error:
            raise EinmpiError(f"{self.located_name}: {error}") from error


class _Worker:
    """One thread of a group, with arrays of its own for the inner slots."""

    def __init__(self, group: Group, arrays: Mapping[str, Array]) -> None:
        self.group = group
        self.arrays = arrays
        self.inner: dict[str, Array] = {}
        for number, kernel in enumerate(group.kernels):
            if kernel.target in group.inner:
                extent = self._block_extent(number, group.block)
                shape = [extent[label] for label in kernel.einsum.output]
                self.inner[kernel.target.name] = np.empty(shape, kernel.target.dtype)
        self.stages: dict[tuple[int, ...], list[_Stage]] = {}

    def compute_blocks(self, blocks: Sequence[Block]) -> None:
        """Compute some blocks, all kernels on one block before the next."""
        for block in blocks:
            start = np.array([first for first, _ in block])
            for stage in self.stages_for(tuple(size for _, size in block)):
                stage.compute_block(start)

    def check_gathers(self) -> None:
        """Raise EinmpiError if a kernel met an index that is out of range."""
        for stage in itertools.chain.from_iterable(self.stages.values()):
            stage.check_gathers()

    def stages_for(self, shape: tuple[int, ...]) -> list[_Stage]:
        """Return the kernels for blocks of a shape; those at the end of a row may be smaller."""
        if shape not in self.stages:
            numbered = enumerate(self.group.kernels)
            self.stages[shape] = [self._prepare(number, k, shape) for number, k in numbered]
        return self.stages[shape]

    def _block_extent(self, number: int, shape: Sequence[int]) -> dict[str, int]:
        """Return the extents of a kernel's labels in a block of this shape."""
        extent = self.group.kernels[number].einsum.extent
        for labels, size in zip(self.group.rows, shape, strict=True):
            extent[labels[number]] = size
        return extent

    def _prepare(self, number: int, kernel: Kernel, shape: tuple[int, ...]) -> _Stage:
        """Prepare a kernel for blocks of a shape.

        The kernel is bound to the first block. From the strides of the arrays along the rows
        follow the addresses for all others.
        """
        rows = [labels[number] for labels in self.group.rows]
        extent = self._block_extent(number, shape)
        einsum = replace(kernel.einsum, extents=tuple(extent.items()))
        operands = []
        for slot, entries in zip(kernel.operands, einsum.operands, strict=True):
            operands.append(self._first_block(slot, entries, rows, shape))
        out = self._first_block(kernel.target, einsum.output, rows, shape)
        known = {label: counted(indices(runs)) for label, runs in kernel.index}
        label_values: dict[str, Array | Counter] = {}
        for label in number_operands(einsum).labels:
            whole = known.get(label, Counter(0, kernel.einsum.extent[label]))
            if isinstance(whole, Counter):
                label_values[label] = Counter(whole.start, extent[label])
            else:
                label_values[label] = whole[: extent[label]]
        bound, views = bind_to_arrays(einsum, operands, out, label_values)
        used = [*views, OperandView(out, einsum.output)]
        is_inner = [slot.name in self.inner for slot in kernel.operands]
        is_inner += [False] * len(label_values)
        is_inner.append(kernel.target.name in self.inner)
        row_strides = np.zeros((len(rows), len(used)), np.int64)
        for (row, label), (k, view) in itertools.product(enumerate(rows), enumerate(used)):
            if not is_inner[k]:
                row_strides[row, k] = _stride_along(label, view)
        # A copy, packed or made to be addressable, would be of the first block only.
        all_views = True
        for view, own in zip(views, operands, strict=False):
            assert not isinstance(view.array, Counter), "Counters come after the operands"
            if view.array.base is None and view.array is not own:
                all_views = False
        parameters = bound.values.copy()
        return _Stage(
            located_name=kernel.located_name or kernel.vertex,
            bound=bound,
            kernel=kernel_of(bound.nest),
            parameters=parameters,
            parameters_address=address_of(parameters),
            positions=np.array([bound.position["A", k, 0] for k in range(len(used))]),
            first_addresses=np.array([address_of(view.array) for view in used], np.int64),
            row_strides=row_strides,
            arrays=[view.array for view in used],
            is_movable=all_views and not bound.packed,
        )

    def _first_block(
        self, slot: Slot, entries: IndexEntries, rows: Sequence[str], shape: Sequence[int]
    ) -> Array:
        """Return the part of a slot's array that belongs to the first block."""
        array = self.inner[slot.name] if slot.name in self.inner else self.arrays[slot.name]
        size: dict[str | Scalar, int] = dict(zip(rows, shape, strict=True))
        region: Any = [slice(0, size.get(entry)) for entry in entries]
        return array[(*region, ...)]


def _stride_along(label: str, view: OperandView) -> int:
    """Return the bytes from one index of a label to the next; on a diagonal strides add up."""
    pairs = zip(view.array.strides, view.entries, strict=True)
    return sum(stride for stride, entry in pairs if entry == label)
