"""A map and aggregates of its result by compiled loops, a few rows at a time: what is aggregated is
still in the cache. No bit differs from the same loops one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock

import numpy as np

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.einsum import EinSum
from einmpi.kernels.contraction import exact_contraction
from einmpi.kernels.cpu.compiled import (
    JobTemplate,
    bind_to_arrays,
    chunk_count,
    is_addressable,
    kernel_of,
    shares_of,
    supports_compiled_loops,
)
from einmpi.kernels.cpu.dispatch import WORTH_COMPILING
from einmpi.kernels.loop_nest import BoundNest, Range, counted
from einmpi.kernels.operands import Array
from einmpi.kernels.prepared import address_of
from einmpi.schedule.steps import Kernel


def is_map(kernel: Kernel) -> bool:
    """Return whether a kernel is an elementwise one that is compiled."""
    einsum = kernel.einsum
    if not einsum.is_elementwise or einsum.is_gathering or not einsum.output:
        return False
    if einsum.scan is not None or any(len(runs) != 1 for _, _, runs in kernel.select):
        return False
    dtypes = kernel.operand_dtypes
    return einsum.calls() >= WORTH_COMPILING and supports_compiled_loops(einsum, dtypes)


def is_fold(kernel: Kernel, of: Kernel, strict: bool) -> bool:
    """Return whether a kernel is a compiled aggregate, in chunks, of what another one computes."""
    einsum = kernel.einsum
    if of.target not in kernel.operands or kernel.select or chunk_count(einsum) == 1:
        return False
    if einsum.has_special_form or einsum.is_pass_of_scan:
        return False  # it has a kernel of its own
    if einsum.is_gathering or any(map(einsum.has_arithmetic, range(len(einsum.operands)))):
        return False
    dtypes = kernel.operand_dtypes
    if exact_contraction(einsum, dtypes, strict) is not None:
        return False  # it is left to BLAS
    return einsum.calls() >= WORTH_COMPILING and supports_compiled_loops(einsum, dtypes)


class _Loops:
    """An EinSum by compiled loops, prepared for arrays that are stored as these are."""

    def __init__(
        self, einsum: EinSum, operands: Sequence[Array], out: Array, index: Mapping[str, Array]
    ) -> None:
        self.einsum = einsum
        self.operands = operands
        self.out = out
        values = {label: counted(indices) for label, indices in index.items()}
        self.bound, self.views = bind_to_arrays(einsum, operands, out, values)
        self.kernel = kernel_of(self.bound.nest)
        are_addressable = all(map(is_addressable, (*operands, out)))
        is_plain = not self.bound.packed and not any(self.bound.gathered)
        self.is_possible = are_addressable and is_plain

    def jobs(self, loop: int, ranges: Sequence[Range]) -> JobTemplate:
        """Return the parameters of one call for each part of a loop, but for the output."""
        found = JobTemplate(self.bound, loop, ranges)
        found.place_views(self.views, self.operands)
        return found


class MapRows(_Loops):
    """A map, of which some rows are computed at a time.

    Rows are the first dimension of its output, `out`, which may be a part of an array: `first` is
    the number of its first row there.
    """

    def __init__(
        self,
        einsum: EinSum,
        operands: Sequence[Array],
        out: Array,
        index: Mapping[str, Array],
        first: int,
    ) -> None:
        super().__init__(einsum, operands, out, index)
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
        jobs = self.jobs(self.loop, ranges)
        jobs.place(-1, self.out, self.out)
        return jobs, numbers


def row_loop(bound: BoundNest, out: Array) -> tuple[int, int] | None:
    """Return the loop over the rows of an output, and how many indices of it make a row.

    Rows may share a loop with what follows them in memory.
    """
    rows = len(out)
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

    `sources` are the positions of the operands that the map computes.
    """

    def __init__(
        self,
        einsum: EinSum,
        operands: Sequence[Array],
        out: Array,
        index: Mapping[str, Array],
        sources: Sequence[int],
    ) -> None:
        accumulator = DTYPES[out.dtype.name].accumulator
        self.results = np.empty((chunk_count(einsum), *out.shape), accumulator)
        super().__init__(einsum, operands, self.results[0, ...], index)
        box = tuple((0, axis.extent) for axis in self.bound.axes)
        self.loop, self.shares = shares_of(self.bound, box, len(self.results), threads=1)
        self.milestones = []  # the rows of the map that each share needs, all before them too
        for _, stop in self.shares:
            needed = max(self._rows_before(stop, k, operands[k]) for k in sources)
            self.milestones.append(needed)

    def _rows_before(self, stop: int, operand: int, array: Array) -> int:
        """Return how many rows of an operand a share reads that ends here."""
        last = 0
        for loop, axis in enumerate(self.bound.axes):
            end = stop if loop == self.loop else axis.extent
            last += (end - 1) * axis.strides[operand]
        return min(len(array), last // array.strides[0] + 1)

    def chunk_jobs(self) -> JobTemplate:
        """Return the parameters of all chunks."""
        jobs = self.jobs(self.loop, self.shares)
        jobs.place(-1, self.results, None, np.arange(len(self.shares)) * self.results.strides[0])
        return jobs

    def finish(self, out: Array) -> None:
        """Combine the results of the chunks."""
        rule = AGGREGATIONS[self.einsum.required_aggregation]
        with np.errstate(all="ignore"):
            out[...] = rule.combine.reduce(self.results[: len(self.shares)], axis=0)


class MapAndFolds:
    """Parts of a map and aggregates of its result, computed in turns."""

    def __init__(self, parts: Sequence[MapRows], folds: Sequence[ChunkedFold]) -> None:
        self.parts = parts
        self.folds = folds
        self.lock = Lock()
        turns = []  # the rows that a chunk of a fold needs, the fold, the chunk
        for number, fold in enumerate(folds):
            for chunk, milestone in enumerate(fold.milestones):
                turns.append((milestone, number, chunk))
        turns.sort()
        self.turns = turns
        last_row = max((part.rows[1] for part in parts), default=0)
        milestones = [*(milestone for milestone, _, _ in turns), last_row]
        self.part_jobs = [part.jobs_for(milestones) for part in parts]
        self.fold_jobs = [fold.chunk_jobs() for fold in folds]

    def compute(
        self,
        part_arrays: Sequence[tuple[Sequence[Array], Array]],
        fold_arrays: Sequence[tuple[Sequence[Array], Array]],
    ) -> None:
        """Compute all of it on these arrays: for each part and each fold, operands and output."""
        with self.lock:  # results of chunks are those of one call
            self._compute(part_arrays, fold_arrays)

    def _compute(
        self,
        part_arrays: Sequence[tuple[Sequence[Array], Array]],
        fold_arrays: Sequence[tuple[Sequence[Array], Array]],
    ) -> None:
        map_calls = []
        kept = []
        for part, (template, numbers), (operands, out) in zip(
            self.parts, self.part_jobs, part_arrays, strict=True
        ):
            jobs = template.jobs_for((*operands, out))
            kept.append(jobs)
            map_calls.append((part.kernel, address_of(jobs), jobs.strides[0], numbers))
        fold_calls = []
        for fold, template, (operands, _) in zip(
            self.folds, self.fold_jobs, fold_arrays, strict=True
        ):
            jobs = template.jobs_for(operands)
            kept.append(jobs)
            fold_calls.append((fold.kernel, address_of(jobs), jobs.strides[0]))
        for turn in range(len(self.turns) + 1):
            for kernel, address, step, numbers in map_calls:
                number = numbers[turn]
                if number is not None:
                    kernel(address + number * step)
            if turn < len(self.turns):
                _, which, chunk = self.turns[turn]
                kernel, address, step = fold_calls[which]
                kernel(address + chunk * step)
        for fold, (_, out) in zip(self.folds, fold_arrays, strict=True):
            fold.finish(out)
