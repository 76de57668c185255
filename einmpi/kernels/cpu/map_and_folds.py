"""A map and aggregates of its result by compiled loops, a few rows at a time: what is aggregated is
still in the cache. No bit differs from the same loops one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.einsum import EinSum
from einmpi.kernels.contraction import exact_contraction
from einmpi.kernels.cpu.compiled import (
    bind_to_arrays,
    chunk_count,
    is_addressable,
    kernel_of,
    operand_views,
    shares_of,
    supports_compiled_loops,
)
from einmpi.kernels.cpu.dispatch import WORTH_COMPILING
from einmpi.kernels.loop_nest import BoundNest, Counter, Range, counted
from einmpi.kernels.operands import Array
from einmpi.kernels.prepared import address_of
from einmpi.schedule.steps import Kernel

LabelValues: TypeAlias = Mapping[str, Array | Counter]
Jobs: TypeAlias = npt.NDArray[np.int64]  # the parameters of a kernel, a row for each call


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
        self,
        einsum: EinSum,
        operands: Sequence[Array],
        out: Array,
        index: Mapping[str, Array],
    ) -> None:
        self.einsum = einsum
        self.index: LabelValues = {label: counted(values) for label, values in index.items()}
        self.bound, views = bind_to_arrays(einsum, operands, out, self.index)
        self.kernel = kernel_of(self.bound.nest)
        are_addressable = all(map(is_addressable, (*operands, out)))
        self.is_possible = are_addressable and not self.bound.packed
        self.is_possible = self.is_possible and not any(self.bound.gathered)
        positions = range(len(views) + 1)
        self.addresses = [self.bound.position["A", array, 0] for array in positions]

    def jobs(self, loop: int, ranges: Sequence[Range]) -> Jobs:
        """Return the parameters of one call for each part of a loop, without addresses."""
        found = np.tile(self.bound.values, (len(ranges), 1))
        found[:, 2 * loop : 2 * loop + 2] = ranges
        return found

    def bind(self, jobs: Jobs, operands: Sequence[Array], out: Array) -> list[Array | Counter]:
        """Put the addresses of arrays into parameters; return what must be kept as long."""
        views = operand_views(self.einsum, operands, self.index)
        arrays = [*(view.array for view in views), out]
        jobs[:, self.addresses] = [address_of(array) for array in arrays]
        return arrays


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

    def jobs_for(self, milestones: Sequence[int]) -> tuple[Jobs, list[int | None]]:
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
        return self.jobs(self.loop, ranges), numbers


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
        shares = list(shares_of(self.bound, box, len(self.results), threads=1))
        self.loop = shares[0][0]
        self.shares = [share for _, share in shares]
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

    def chunk_jobs(self) -> Jobs:
        """Return the parameters of all chunks, without addresses."""
        return self.jobs(self.loop, self.shares)

    def bind(self, jobs: Jobs, operands: Sequence[Array], out: Array) -> list[Array | Counter]:
        arrays = super().bind(jobs, operands, self.results)
        jobs[:, self.addresses[-1]] += np.arange(len(jobs)) * self.results.strides[0]
        return arrays

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
        with self.lock:  # parameters and results of chunks are those of one call
            self._compute(part_arrays, fold_arrays)

    def _compute(
        self,
        part_arrays: Sequence[tuple[Sequence[Array], Array]],
        fold_arrays: Sequence[tuple[Sequence[Array], Array]],
    ) -> None:
        kept: list[Any] = []
        map_calls = []
        for part, (jobs, numbers), arrays in zip(
            self.parts, self.part_jobs, part_arrays, strict=True
        ):
            kept.append(part.bind(jobs, *arrays))
            map_calls.append((part.kernel, address_of(jobs), jobs.strides[0], numbers))
        fold_calls = []
        for fold, jobs, arrays in zip(self.folds, self.fold_jobs, fold_arrays, strict=True):
            kept.append(fold.bind(jobs, *arrays))
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
