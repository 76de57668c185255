"""A group of kernels, computed one block of rows at a time. What depends on shapes and strides
alone is prepared once for all blocks of one shape; from block to block only addresses change.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from threading import Lock
from typing import TypeAlias

import numpy as np

from einmpi.errors import EinmpiError
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import IndexEntries
from einmpi.kernels.contraction import exact_contraction
from einmpi.kernels.cpu.blas_library.choice import one_blas_thread
from einmpi.kernels.cpu.compiled import (
    Jobs,
    JobTemplate,
    OperandView,
    bind_to_arrays,
    check_gathers,
    even_ranges,
    pool,
)
from einmpi.kernels.cpu.map_and_folds import is_product
from einmpi.kernels.cpu.prepared_products import prepare_by_blas
from einmpi.kernels.loop_nest import BoundNest, Counter, counted, stride_by_entry
from einmpi.kernels.operands import Array, Box, number_operands, part_of_array
from einmpi.kernels.prepared import bare_call
from einmpi.schedule.compute import Compute
from einmpi.schedule.regions import indices

Block: TypeAlias = tuple[tuple[int, int], ...]  # the start and the size of each row
ComputeBlock: TypeAlias = Callable[[int], None]  # called with the number of a block
# A kernel of a group, prepared for all blocks of one shape: called with the arrays of a run.
Stage: TypeAlias = Callable[[Mapping[str, Array]], ComputeBlock]


class PreparedGroup:
    """A group prepared for arrays that are stored as some are.

    Every thread takes its share of the blocks and has its own arrays for the inner slots, which it
    keeps. So of two calls at the same time one waits for the other.

    Parameters
    ----------
    group
        The kernels and their rows.
    arrays
        The arrays of all slots but the inner ones, by the name of the slot.
    threads
        How many threads to use.
    strict
        Whether inf and nan must be those of the program as written.
    """

    def __init__(
        self, group: Compute, arrays: Mapping[str, Array], threads: int, strict: bool
    ) -> None:
        extents = [group.kernels[0].einsum.extent[labels[0]] for labels in group.tiles.rows]
        cuts = []
        for extent, size in zip(extents, group.tiles.block, strict=True):
            cuts.append([(start, min(size, extent - start)) for start in range(0, extent, size)])
        blocks = list(itertools.product(*cuts))
        self.threads = threads
        self.lock = Lock()
        self.has_products = any(map(is_product, group.kernels))
        self.workers = []
        for start, stop in even_ranges(0, len(blocks), min(threads, len(blocks))):
            self.workers.append(_Worker(group, arrays, blocks[start:stop], strict))

    @property
    def is_possible(self) -> bool:
        """Whether all kernels can be computed block by block."""
        return all(worker.is_movable for worker in self.workers)

    def compute(self, arrays: Mapping[str, Array]) -> int:
        """Compute the group, one block of rows after another; it takes no memory that counts."""
        with self.lock:
            self._compute_blocks(arrays)
        return 0

    def _compute_blocks(self, arrays: Mapping[str, Array]) -> None:
        for worker in self.workers:
            worker.bind(arrays)
        if len(self.workers) == 1:
            self.workers[0].compute_blocks()
        else:
            # Each of the threads calls BLAS.
            with one_blas_thread() if self.has_products else nullcontext():
                list(pool(self.threads).map(_Worker.compute_blocks, self.workers))
        for worker in self.workers:
            worker.check_gathers()


class _Worker:
    """One thread of a group, with arrays of its own for the inner slots."""

    def __init__(
        self, group: Compute, arrays: Mapping[str, Array], blocks: Sequence[Block], strict: bool
    ) -> None:
        self.group = group
        self.strict = strict
        self.inner: dict[str, Array] = {}
        for number, kernel in enumerate(group.kernels):
            if kernel.target in group.inner:
                extent = self._block_extent(number, group.tiles.block)
                inner_shape = [extent[label] for label in kernel.einsum.output]
                self.inner[kernel.target.name] = np.empty(inner_shape, kernel.target.dtype)
        # Blocks at the end of a row may be smaller: their kernels are prepared apart.
        starts: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        self.order: list[tuple[tuple[int, ...], int]] = []  # the shape of a block and its number
        for block in blocks:
            shape = tuple(size for _, size in block)
            same = starts.setdefault(shape, [])
            self.order.append((shape, len(same)))
            same.append(tuple(start for start, _ in block))
        self.is_movable = True  # whether all kernels can be computed block by block
        self.stages: dict[tuple[int, ...], list[Stage]] = {}
        for shape, first in starts.items():
            self.stages[shape] = []
            for number, kernel in enumerate(group.kernels):
                prepare = self._prepare_product if is_product(kernel) else self._prepare_loops
                self.stages[shape].append(prepare(number, arrays, shape, first))
        self.calls: dict[tuple[int, ...], list[ComputeBlock]] = {}
        # The parameters of compiled kernels in this run, and the names of their vertices.
        self.jobs: list[tuple[str, BoundNest, Jobs]] = []

    def bind(self, arrays: Mapping[str, Array]) -> None:
        """Take the arrays of the next call."""
        self.jobs = []
        for shape, stages in self.stages.items():
            self.calls[shape] = [stage(arrays) for stage in stages]

    def compute_blocks(self) -> None:
        """Compute all blocks, all kernels on one block before the next."""
        with np.errstate(all="ignore"):
            for shape, number in self.order:
                for compute_block in self.calls[shape]:
                    compute_block(number)

    def check_gathers(self) -> None:
        """Raise EinmpiError if a kernel met an index that is out of range."""
        for located_name, bound, jobs in self.jobs:
            try:
                check_gathers(bound, jobs)
            except IndexError as error:
                raise EinmpiError(f"{located_name}: {error}") from error

    def _block_extent(self, number: int, shape: Sequence[int]) -> dict[str, int]:
        """Return the extents of a kernel's labels in a block of this shape."""
        extent = self.group.kernels[number].einsum.extent
        for labels, size in zip(self.group.tiles.rows, shape, strict=True):
            extent[labels[number]] = size
        return extent

    def _box(self, number: int, shape: Sequence[int], start: Sequence[int]) -> Box:
        """Return the rows of a kernel in the block of this shape that starts here."""
        found = {}
        for labels, size, first in zip(self.group.tiles.rows, shape, start, strict=True):
            found[labels[number]] = slice(first, first + size)
        return found

    def _first_block(
        self, number: int, arrays: Mapping[str, Array], shape: Sequence[int]
    ) -> tuple[EinSum, list[Array]]:
        """Return what a kernel computes in a block of this shape, and its arrays in the first."""
        kernel = self.group.kernels[number]
        einsum = replace(kernel.einsum, extents=tuple(self._block_extent(number, shape).items()))
        box = self._box(number, shape, [0] * len(shape))
        known = {**arrays, **self.inner}
        slots = (*kernel.operands, kernel.target)
        pairs = zip(slots, (*einsum.operands, einsum.output), strict=True)
        return einsum, [part_of_array(known[slot.name], index, box) for slot, index in pairs]

    def _prepare_product(
        self,
        number: int,
        arrays: Mapping[str, Array],
        shape: tuple[int, ...],
        starts: Sequence[tuple[int, ...]],
    ) -> Stage:
        """Prepare a matrix product for blocks of a shape."""
        kernel = self.group.kernels[number]
        einsum, (*operands, out) = self._first_block(number, arrays, shape)
        contraction = exact_contraction(einsum, kernel.operand_dtypes, self.strict)
        assert contraction is not None, f"{kernel} is no product"
        # An inner array is the same part for all blocks.
        used: list[tuple[str, IndexEntries] | Array] = []
        slots = (*kernel.operands, kernel.target)
        entries = (*einsum.operands, einsum.output)
        for slot, index, part in zip(slots, entries, (*operands, out), strict=True):
            used.append(part if slot.name in self.inner else (slot.name, index))
        boxes = [self._box(number, shape, start) for start in starts]
        call = bare_call(prepare_by_blas(contraction, operands, out))

        def stage(arrays: Mapping[str, Array]) -> ComputeBlock:
            blocks = []  # views made ahead: for small blocks they take as long as the product
            for box in boxes:
                parts: list[Array] = []
                for own in used:
                    if isinstance(own, tuple):
                        parts.append(part_of_array(arrays[own[0]], own[1], box))
                    else:
                        parts.append(own)
                blocks.append((parts[:-1], parts[-1]))
            return lambda number: call(*blocks[number])

        return stage

    def _prepare_loops(
        self,
        number: int,
        arrays: Mapping[str, Array],
        shape: tuple[int, ...],
        starts: Sequence[tuple[int, ...]],
    ) -> Stage:
        """Prepare a compiled kernel for blocks of a shape.

        The kernel is bound to the first block. From the strides of the arrays along the rows
        follow the addresses for all others.
        """
        kernel = self.group.kernels[number]
        rows = [labels[number] for labels in self.group.tiles.rows]
        einsum, (*operands, out) = self._first_block(number, arrays, shape)
        extent = einsum.extent
        known = {label: counted(indices(runs)) for label, runs in kernel.index}
        label_values: dict[str, Array | Counter] = {}
        for label in number_operands(einsum).labels:
            whole = known.get(label, Counter(0, kernel.einsum.extent[label]))
            if isinstance(whole, Counter):
                label_values[label] = Counter(whole.start, extent[label])
            else:
                label_values[label] = whole[: extent[label]]
        bound, views = bind_to_arrays(einsum, operands, out, label_values)
        template = JobTemplate(bound, 0, bound.box[:1] * len(starts))
        used = [*views, OperandView(out, einsum.output)]
        owners = [*kernel.operands, *[None] * len(label_values), kernel.target]
        names = []
        for k, (view, owner) in enumerate(zip(used, owners, strict=True)):
            if owner is not None and owner.name in self.inner:
                template.place(k, view.array, None)
                continue
            given = None
            if owner is not None:
                given = arrays[owner.name]
                names.append(owner.name)
            table = stride_by_entry(view.entries, view.array.strides)
            strides = [table.get(label, 0) for label in rows]
            template.place(k, view.array, given, np.array(starts, np.int64) @ strides)
        # A copy, packed or made to be addressable, would be of the first block only.
        for view, own in zip(views, operands, strict=False):
            assert not isinstance(view.array, Counter), "Counters come after the operands"
            if view.array.base is None and view.array is not own:
                self.is_movable = False
        if bound.packed:
            self.is_movable = False
        located_name = kernel.located_name or kernel.vertex

        def stage(arrays: Mapping[str, Array]) -> ComputeBlock:
            jobs, call = template.calls_for([arrays[name] for name in names])
            self.jobs.append((located_name, bound, jobs))
            return call

        return stage
