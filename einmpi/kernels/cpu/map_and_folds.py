"""A map and aggregates of its result by compiled loops, a few rows at a time: what is aggregated is
still in the cache. No bit differs from the same loops one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from threading import Lock
from typing import NamedTuple, TypeAlias

import numpy as np

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.einsum import EinSum
from einmpi.kernels.contraction import exact_contraction, recognise_contraction
from einmpi.kernels.cpu.compiled import (
    CompiledKernel,
    Jobs,
    JobTemplate,
    bind_to_arrays,
    chunk_count,
    is_addressable,
    shares_of,
    supports_compiled_loops,
)
from einmpi.kernels.cpu.dispatch import WORTH_COMPILING
from einmpi.kernels.distances import (
    DISTANCE_DTYPES,
    recognise_distance,
    recognise_weighted_difference,
)
from einmpi.kernels.loop_nest import BoundNest, Range
from einmpi.kernels.operands import Array
from einmpi.kernels.prepared import address_of
from einmpi.kernels.updates import changes_a_part
from einmpi.schedule.compute import Compute, Kernel
from einmpi.schedule.groups import GroupingRule
from einmpi.schedule.regions import Slot

VALUES_IN_CACHE = 2**15  # of a chunk: several operands of this size fit into the cache of a core
MOST_RESULTS_OF_CHUNKS = 2**10  # of all chunks together, so that they take little memory
MAX_KNOWN = 4  # addresses of arrays for which calls are kept


def is_map(kernel: Kernel) -> bool:
    """Return whether a kernel is an elementwise one that is compiled."""
    einsum = kernel.einsum
    if not einsum.is_elementwise or einsum.is_gathering or not einsum.output:
        return False
    if einsum.scan is not None or any(len(runs) != 1 for _, _, runs in kernel.select):
        return False
    return _is_compiled(kernel)


def _is_compiled(kernel: Kernel) -> bool:
    """Return whether a kernel is large enough to be compiled, and can be."""
    is_large = kernel.einsum.calls_in_program >= WORTH_COMPILING
    return is_large and supports_compiled_loops(kernel.einsum, kernel.operand_dtypes)


def is_fold(kernel: Kernel, of: Slot, strict: bool) -> bool:
    """Return whether a kernel is a compiled aggregate, in chunks, of what is in a slot."""
    einsum = kernel.einsum
    if of not in kernel.operands or kernel.select or chunk_count(einsum) == 1:
        return False
    if einsum.has_special_form or einsum.is_pass_of_scan or einsum.sums_blocks:
        return False  # it has a kernel of its own
    if einsum.is_gathering or any(map(einsum.has_arithmetic, range(len(einsum.operands)))):
        return False
    if exact_contraction(einsum, kernel.operand_dtypes, strict) is not None:
        return False  # it is left to BLAS
    return _is_compiled(kernel)


Given: TypeAlias = tuple[str, Array]  # an array that is given in each run, by its name


class _Loops:
    """An EinSum by compiled loops, prepared for arrays that are stored as these are.

    `given` has for each operand the array of which it is a view.
    """

    def __init__(
        self,
        einsum: EinSum,
        operands: Sequence[Array],
        out: Array,
        index: Mapping[str, Array],
        given: Sequence[Given],
    ) -> None:
        self.einsum = einsum
        self.out = out
        self.given = list(given)
        self.bound, self.views = bind_to_arrays(einsum, operands, out, index)
        are_addressable = all(map(is_addressable, (*operands, out)))
        is_plain = not self.bound.packed and not any(self.bound.gathered)
        self.is_possible = are_addressable and is_plain

    def jobs(self, position: int, ranges: Sequence[Range]) -> JobTemplate:
        """Return the parameters of one call for each part of a loop, but for the output."""
        found = JobTemplate(self.bound, position, ranges)
        found.place_views(self.views, [array for _, array in self.given])
        return found


class MapRows(_Loops):
    """A map, of which some rows are computed at a time.

    Rows are the first dimension of its output, `out`, which is a view of `target`: `first` is the
    number of its first row there.
    """

    def __init__(
        self,
        einsum: EinSum,
        operands: Sequence[Array],
        out: Array,
        index: Mapping[str, Array],
        given: Sequence[Given],
        target: Given,
        first: int,
    ) -> None:
        super().__init__(einsum, operands, out, index, given)
        self.target = target
        self.rows = first, first + len(out)
        found = row_loop(self.bound, out)
        self.is_possible = self.is_possible and found is not None
        self.loop, self.indices_a_row = found or (0, 0)

    def jobs_for(self, milestones: Sequence[int]) -> tuple[JobTemplate, list[int | None]]:
        """Return the parameters for rows between milestones, and which of them each one needs."""
        ranges: list[Range] = []
        numbers: list[int | None] = []
        done = 0
        first, end = self.rows
        for milestone in milestones:
            start = max(done, first)
            stop = min(milestone, end)
            done = max(done, milestone)
            if start >= stop:
                numbers.append(None)
                continue
            numbers.append(len(ranges))
            indices = (start - first) * self.indices_a_row, (stop - first) * self.indices_a_row
            ranges.append(indices)
        jobs = self.jobs(2 * self.loop, ranges)
        jobs.place(-1, self.out, self.target[1])
        return jobs, numbers


def row_loop(bound: BoundNest, out: Array) -> tuple[int, int] | None:
    """Return the loop over the rows of an output, and how many indices of it make a row.

    Rows may share a loop with what follows them in memory.
    """
    rows = len(out)
    if rows == 1:
        return 0, bound.axes[0].extent
    for loop in range(bound.nest.output_loops):
        axis = bound.axes[loop]
        if axis.extent % rows:
            continue
        indices = axis.extent // rows
        if axis.strides[-1] * indices == out.strides[0] and axis.strides[-1] > 0:
            return loop, indices
    return None


class ChunkedFold(_Loops):
    """An aggregate in chunks, as `compute_by_compiled_loops` computes it.

    An aggregate that does not depend on the order, as a maximum, has smaller chunks, which are
    still in the cache of a core. `sources` are the positions of the operands that the map computes.
    """

    def __init__(
        self,
        einsum: EinSum,
        given: Sequence[Given],
        target: Given,
        index: Mapping[str, Array],
        sources: Sequence[int],
    ) -> None:
        self.target, out = target
        self.rule = AGGREGATIONS[einsum.required_aggregation]
        chunks = chunk_count(einsum)
        if self.rule.is_idempotent:
            most = MOST_RESULTS_OF_CHUNKS // max(1, out.size)
            chunks = max(chunks, min(most, einsum.calls() // VALUES_IN_CACHE))
        self.results = np.empty((chunks, *out.shape), DTYPES[out.dtype.name].accumulator)
        operands = [array for _, array in given]
        super().__init__(einsum, operands, self.results[0, ...], index, given)
        box = self.bound.box
        self.position, self.shares = shares_of(self.bound, box, len(self.results), threads=1)
        self.milestones = []  # the rows of the map that each share needs, all before them too
        for _, stop in self.shares:
            needed = max(self._rows_before(stop, k, operands[k]) for k in sources)
            self.milestones.append(needed)

    def _rows_before(self, stop: int, operand: int, array: Array) -> int:
        """Return how many rows of an operand a share reads that ends here."""
        last = 0
        for loop, axis in enumerate(self.bound.axes):
            end = stop if 2 * loop == self.position else axis.extent
            last += (end - 1) * axis.strides[operand]
        return min(len(array), last // array.strides[0] + 1)

    def chunk_jobs(self) -> JobTemplate:
        """Return the parameters of all chunks."""
        jobs = self.jobs(self.position, self.shares)
        jobs.place(-1, self.results, None, np.arange(len(self.shares)) * self.results.strides[0])
        return jobs

    def finish(self, out: Array) -> None:
        """Combine the results of the chunks."""
        with np.errstate(all="ignore"):
            out[...] = self.rule.combine.reduce(self.results[: len(self.shares)], axis=0)


class MapAndFolds:
    """Parts of a map and aggregates of its result, computed in turns."""

    def __init__(self, parts: Sequence[MapRows], folds: Sequence[ChunkedFold]) -> None:
        self.folds = folds
        self.lock = Lock()
        turns = []  # the rows that a chunk of a fold needs, the fold, the chunk
        for number, fold in enumerate(folds, len(parts)):
            for chunk, milestone in enumerate(fold.milestones):
                turns.append((milestone, number, chunk))
        turns.sort()
        last_row = max((part.rows[1] for part in parts), default=0)
        milestones = [*(milestone for milestone, _, _ in turns), last_row]
        part_jobs = [part.jobs_for(milestones) for part in parts]
        # With the names of the arrays whose addresses they are to have.
        self.templates: list[tuple[JobTemplate, list[str]]] = []
        for part, (template, _) in zip(parts, part_jobs, strict=True):
            self.templates.append((template, [name for name, _ in (*part.given, part.target)]))
        for fold in folds:
            self.templates.append((fold.chunk_jobs(), [name for name, _ in fold.given]))
        self.names = sorted({name for _, names in self.templates for name in names})
        self.order: list[tuple[int, int]] = []  # templates and numbers of their calls
        for turn in range(len(milestones)):
            for number, (_, numbers) in enumerate(part_jobs):
                call = numbers[turn]
                if call is not None:
                    self.order.append((number, call))
            self.order += [(fold, chunk) for _, fold, chunk in turns[turn : turn + 1]]
        # By the addresses of the arrays: in a loop, two tensors take turns in the same memory.
        self.known: dict[tuple[int, ...], _BoundCalls] = {}

    def compute(self, arrays: Mapping[str, Array]) -> None:
        """Compute all of it on these arrays, given by name."""
        addresses = tuple([address_of(arrays[name]) for name in self.names])
        with self.lock:  # results of chunks are those of one call
            bound = self.known.get(addresses)
            if bound is None:
                if len(self.known) >= MAX_KNOWN:
                    self.known.clear()
                bound = self.known[addresses] = self._bind(addresses)
            for kernel, parameters in bound.calls:
                kernel(parameters)
            for fold in self.folds:
                fold.finish(arrays[fold.target])

    def _bind(self, addresses: Sequence[int]) -> _BoundCalls:
        """Return all calls, in order, for arrays at these addresses."""
        found = dict(zip(self.names, addresses, strict=True))
        jobs = []
        for template, names in self.templates:
            jobs.append(template.jobs_at([found[name] for name in names]))
        starts = [address_of(each) for each in jobs]
        calls = []
        for number, call in self.order:
            parameters = starts[number] + call * jobs[number].strides[0]
            calls.append((self.templates[number][0].kernel, parameters))
        return _BoundCalls(jobs, calls)


class _BoundCalls(NamedTuple):
    """Calls of kernels, each with the address of its parameters, which are in `jobs`."""

    jobs: list[Jobs]
    calls: list[tuple[CompiledKernel, int]]


# ---- grouping rule -------------------------------------------------------------------------------
#
# Which kernels a CPU computes as a group, and how many rows at a time: a block must stay in the
# cache while all kernels of the group work on it.


CACHE_BLOCK_BYTES = 2**21  # that a block of a group may use, all of its arrays together
MIN_PRODUCT_ROWS = 64  # of a block: with fewer, BLAS could not use the other factor often enough
MAX_PRODUCT_TERMS = 256  # of a sum: with more, the product takes longer than memory in any case
MIN_SAVED_RATIO = 8  # the size of a product, relative to all that its group writes
# Of a tensor that a block has in part, side by side in memory: with less, blocks of columns are
# slower than one pass over all rows after another.
MIN_BYTES_SIDE_BY_SIDE = 256
MIN_BLOCKS = 16  # with fewer, there would be too little for threads to share


def _accepts(kernel: Kernel, fast_math: bool) -> bool:
    """Return whether a kernel is compiled.

    A matrix product is faster as a whole, and so are distances and their gradients by one, which
    `fast_math` allows; a dot product of rows is not a matrix product.
    """
    einsum = kernel.einsum
    if einsum.has_special_form or einsum.sums_many_blocks:
        return False
    if kernel.select or is_product(kernel):
        return False
    if any(map(einsum.has_arithmetic, range(len(kernel.operands)))):
        return False  # alone, it reads these operands through views
    if fast_math and kernel.target.dtype in DISTANCE_DTYPES:
        is_distance = recognise_distance(einsum) is not None
        if is_distance or recognise_weighted_difference(einsum) is not None:
            return False
    return _is_compiled(kernel)


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
    if einsum.sums_blocks:
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
    indices are still too large, if there are too few blocks for threads to share, or if a block has
    only small pieces of a large tensor, as few columns of a matrix.
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
    for slot, shape in _shapes_in_block(kernels, rows, block).items():
        if slot.nbytes > CACHE_BLOCK_BYTES and _side_by_side(slot, shape) < MIN_BYTES_SIDE_BY_SIDE:
            return None
    return tuple(block)


def _side_by_side(slot: Slot, shape: Sequence[int]) -> int:
    """Return how many bytes of a tensor lie side by side in a block; all if it is one piece."""
    nbytes = np.dtype(slot.dtype).itemsize
    for dimension in reversed(range(len(shape))):
        nbytes *= shape[dimension]
        is_one_piece = prod(shape[:dimension]) == 1
        if shape[dimension] < slot.shape[dimension]:
            return slot.nbytes if is_one_piece else nbytes
    return nbytes


def _is_worthwhile(group: Compute) -> bool:
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
    """Return the bytes of all arrays that a block of a group uses, each once."""
    shapes = _shapes_in_block(kernels, rows, block)
    return sum(prod(shape) * np.dtype(slot.dtype).itemsize for slot, shape in shapes.items())


def _shapes_in_block(
    kernels: Sequence[Kernel], rows: Sequence[Sequence[str]], block: Sequence[int]
) -> dict[Slot, list[int]]:
    """Return the shapes of what a block of a group uses of each array.

    A dimension along a row counts only as far as the block reaches; all others, gathered ones among
    them, count as a whole.
    """
    shapes: dict[Slot, list[int]] = {}
    for number, kernel in enumerate(kernels):
        einsum = kernel.einsum
        extent = einsum.extent
        for labels, size in zip(rows, block, strict=True):
            extent[labels[number]] = size
        slots = (*kernel.operands, kernel.target)
        indices = (*einsum.operands, einsum.output)
        for slot, index in zip(slots, indices, strict=True):
            shape = []
            for entry, whole in zip(index, slot.shape, strict=False):
                shape.append(extent[entry] if isinstance(entry, str) else whole)
            shapes[slot] = shape
    return shapes


def cpu_grouping(
    fast_math: bool, strict: bool = False, min_blocks: int = MIN_BLOCKS
) -> GroupingRule:
    """Return the rule for groups on a CPU, each of at least `min_blocks` blocks."""
    return GroupingRule(
        accepts=lambda kernel: _accepts(kernel, fast_math),
        choose_block=lambda kernels, rows: _choose_block(kernels, rows, min_blocks),
        can_lead=lambda kernel: _can_lead(kernel, strict),
        is_worthwhile=_is_worthwhile,
        changes_a_part=changes_a_part,
    )
