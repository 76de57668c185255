"""Scattered aggregates by compiled loops, on several threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy as np

from einmpi.graph.einsum import EinSum, einsum_over
from einmpi.graph.scalar import Arg, Call, Index, IndexEntries, Scalar, rebuild
from einmpi.graph.segments import Segments
from einmpi.kernels.boxes import Box, part_of_array
from einmpi.kernels.cpu.compiled import (
    MIN_SHARED_LANES,
    MIN_THREADED_VALUES,
    OperandView,
    check_gathers,
    even_ranges,
    indexed_array,
    jobs_of,
    kernel_of,
    operand_views,
    run_jobs,
    supports_compiled_loops,
)
from einmpi.kernels.loop_choice import gathered_dimensions
from einmpi.kernels.loop_nest import (
    Axis,
    BoundNest,
    IndexedArray,
    Nest,
    accesses_of,
    axes_of,
    counted,
)
from einmpi.kernels.operands import Array, number_operands
from einmpi.kernels.prepared import address_of

MANY_LANES = 2  # the width of a nest with more than one lane, all of which are computed at a time


@dataclass(frozen=True)
class Scatter:
    """A scattered EinSum and its arrays, or a part of it.

    The extents of the EinSum are those of the arrays. `index` has the global indices of a label's
    positions, for labels that do not start at 0.
    """

    einsum: EinSum
    segments: Segments
    operands: tuple[Array, ...]
    index: Mapping[str, Array]

    @property
    def values(self) -> int:
        """How many values are aggregated."""
        extent = self.einsum.extent
        return prod(extent[x] for x in self.einsum.labels if x not in self.segments.labels)

    def part(self, box: Box) -> Scatter:
        """Return the part in which labels have these positions."""
        extents = []
        index = dict(self.index)
        for label, extent in self.einsum.extents:
            positions = box.get(label, slice(0, extent))
            extents.append((label, positions.stop - positions.start))
            if label in self.index:
                index[label] = self.index[label][positions]
            elif positions.start > 0:
                index[label] = np.arange(positions.start, positions.stop)
        pairs = zip(self.operands, self.segments.operands, strict=True)
        operands = [part_of_array(operand, entries, box) for operand, entries in pairs]
        einsum = replace(self.einsum, extents=tuple(extents))
        return Scatter(einsum, self.segments, tuple(operands), index)


def supports_scatter_loops(scatter: Scatter) -> bool:
    """Return whether the values can be computed by compiled loops."""
    dtypes = [array.dtype for array in scatter.operands]
    places = [np.dtype(np.int64)] * len(scatter.segments.labels)
    values = _with_places(scatter.einsum, scatter.segments)
    return supports_compiled_loops(values, [*dtypes, *places])


@lru_cache(maxsize=1024)
def _with_places(einsum: EinSum, segments: Segments) -> EinSum:
    """Return an EinSum of the values alone: the positions of scattered labels are more operands.

    A scattered label in the index of an operand becomes a gather by them. Used as a number, it is
    the index that is left of = in the program.
    """
    place = {}
    number = {}
    for k, (label, index) in enumerate(zip(segments.labels, segments.indices, strict=True)):
        place[label] = Arg(len(einsum.operands) + k)
        number[label] = Call("int64", (index,))

    def leaf(node: Scalar) -> Scalar:
        return number.get(node.label, node) if isinstance(node, Index) else node

    operands: list[IndexEntries] = []
    for entries in segments.operands:
        changed: list[str | Scalar] = []
        for entry in entries:
            if isinstance(entry, str):
                changed.append(place.get(entry, entry))
            else:
                changed.append(rebuild(entry, leaf))
        operands.append(tuple(changed))
    operands += [segments.index_labels] * len(segments.labels)
    output = [label for label in einsum.output if label not in place]
    body = rebuild(segments.body, leaf)
    return einsum_over(output, operands, body, einsum.aggregation, einsum.aggregated, einsum.extent)


def add_by_loops(scatter: Scatter, places: Sequence[Array], totals: Array, threads: int) -> None:
    """Aggregate values into totals that typed pointers can reach.

    Threads share the lanes, or the places: each total is the work of one thread, which takes its
    values in order.

    Parameters
    ----------
    scatter
        What to compute; operands are never written to.
    places
        For each scattered label the positions to which values go. Values for which the first of
        them is none of the label's go nowhere.
    totals
        The results.
    threads
        How many threads to use; the result does not depend on it.
    """
    bound, views = bind_values(scatter, places, totals.dtype.name, totals.strides)
    extent = totals.shape[scatter.einsum.output.index(scatter.segments.labels[0])]
    for dimensions in bound.gathered[:-1]:
        is_empty = any(dimension.extent == 0 for dimension in dimensions)
        if is_empty and ((places[0] >= 0) & (places[0] < extent)).any():
            raise IndexError("an index is out of range; this dimension has extent 0")
    parameters = bound.values.copy()
    parameters[bound.position["K", 0, 1]] = extent
    parameters[bound.addresses] = [address_of(view.array) for view in views] + [address_of(totals)]
    values = prod(axis.extent for axis in bound.axes)
    used_threads = threads if values >= MIN_THREADED_VALUES else 1
    lane = bound.nest.lane
    lanes = bound.axes[lane].extent
    if lanes >= used_threads * MIN_SHARED_LANES:
        jobs = jobs_of(parameters, 2 * lane, even_ranges(0, lanes, used_threads))
    else:
        pieces = max(1, min(used_threads, extent))
        jobs = jobs_of(parameters, bound.position["K", 0, 0], even_ranges(0, extent, pieces))
    run_jobs(kernel_of(bound.nest), jobs, threads)
    check_gathers(bound, jobs)


def bind_values(
    scatter: Scatter, places: Sequence[Array], dtype: str, strides: tuple[int, ...]
) -> tuple[BoundNest, list[OperandView]]:
    """Return the loops of `add_by_loops` for totals stored like this, and the arrays they read."""
    einsum = scatter.einsum
    count = len(scatter.operands)
    lowered = _with_places(einsum, scatter.segments)
    numbers = {label: counted(indices) for label, indices in scatter.index.items()}
    views = operand_views(lowered, [*scatter.operands, *places], numbers)
    reads = tuple(indexed_array(*view) for view in views)
    entries: list[str | Scalar] = []  # of the totals: labels, and the operands with places
    for label in einsum.output:
        if label in scatter.segments.labels:
            entries.append(Arg(count + scatter.segments.labels.index(label)))
        else:
            entries.append(label)
    target = IndexedArray(dtype, einsum.bound, strides, tuple(entries))
    return _bind_scatter(lowered, reads, target, range(count, count + len(places))), views


@lru_cache(maxsize=4096)
def _bind_scatter(
    einsum: EinSum, reads: tuple[IndexedArray, ...], target: IndexedArray, places: range
) -> BoundNest:
    """Return the loops for arrays with these strides; `places` are the operands with positions.

    Along the lanes the place is the same. They are the label along which most arrays are
    contiguous.
    """
    arrays = (*reads, target)
    itemsizes = [np.dtype(array.dtype).itemsize for array in arrays]
    axes = axes_of(arrays, einsum.extents)
    aggregated = [axis for axis in axes if axis.aggregated]
    outer = [axis for axis in axes if not axis.aggregated]
    lane = Axis(1, False, (0,) * len(arrays))
    for axis in outer:
        has_one_place = not any(axis.strides[k] for k in places)
        if has_one_place and _dense_arrays(axis, itemsizes) >= _dense_arrays(lane, itemsizes):
            lane = axis
    outer = [axis for axis in outer if axis is not lane]
    outer.sort(key=lambda axis: -abs(axis.strides[-1]))
    ordered = (*outer, lane, *aggregated)
    *read_accesses, out = accesses_of(arrays, ordered, lane)
    nest = Nest(
        function=number_operands(einsum).function,
        reads=tuple(read_accesses),
        out=out,
        aggregation=einsum.aggregation,
        output_loops=len(outer) + 1,
        loops=len(ordered),
        aggregates_lanes=False,
        has_rows=False,
        width=1 if lane.extent == 1 else MANY_LANES,
        place=places.start,
    )
    return BoundNest(nest, ordered, (), tuple(map(gathered_dimensions, arrays)))


def _dense_arrays(axis: Axis, itemsizes: Sequence[int]) -> int:
    """Return how many arrays are contiguous along an axis."""
    return sum(stride == size for stride, size in zip(axis.strides, itemsizes, strict=True))
