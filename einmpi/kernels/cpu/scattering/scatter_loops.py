"""Scattered aggregates by compiled loops, on several threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Call, Index, IndexEntries, Scalar, gathers_in, rebuild
from einmpi.graph.segments import Segments
from einmpi.kernels.cpu.compiled import (
    MIN_SHARED_LANES,
    MIN_THREADED_VALUES,
    OperandView,
    Parameters,
    check_gathers,
    indexed_array,
    kernel_of,
    operand_views,
    pool,
    supports_compiled_loops,
)
from einmpi.kernels.loop_choice import gathered_dimensions
from einmpi.kernels.loop_nest import (
    Access,
    Axis,
    BoundNest,
    IndexedArray,
    Nest,
    axes_of,
    counted,
)
from einmpi.kernels.operands import Array, number_operands
from einmpi.kernels.prepared import address_of

MANY_LANES = 2  # the width of a nest with more than one lane, all of which are computed at a time


def supports_scatter_loops(
    einsum: EinSum, segments: Segments, dtypes: Sequence[npt.DTypeLike]
) -> bool:
    """Return whether the values can be computed by compiled loops for operands of these dtypes."""
    places = [np.dtype(np.int64)] * len(segments.labels)
    return supports_compiled_loops(_with_places(einsum, segments), [*dtypes, *places])


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
    extents = []
    for label, extent in einsum.extents:
        if label not in place:
            extents.append((label, extent))
    return EinSum(
        tuple(output),
        tuple(operands),
        rebuild(segments.body, leaf),
        einsum.aggregation,
        einsum.aggregated,
        tuple(extents),
    )


def add_by_loops(
    einsum: EinSum,
    segments: Segments,
    operands: Sequence[Array],
    index: Mapping[str, Array],
    places: Sequence[Array],
    totals: Array,
    threads: int,
) -> None:
    """Aggregate values into totals that typed pointers can reach.

    Threads share the lanes, or the places: each total is the work of one thread, which takes its
    values in order.

    Parameters
    ----------
    einsum, segments
        What to compute; the extents are those of the arrays.
    operands, totals
        The arrays. Operands are never written to.
    index
        The global indices of a label's positions, for labels that do not start at 0.
    places
        For each scattered label the positions to which values go. Values for which the first of
        them is none of the label's go nowhere.
    threads
        How many threads to use; the result does not depend on it.
    """
    lowered = _with_places(einsum, segments)
    numbers = {label: counted(indices) for label, indices in index.items()}
    views = operand_views(lowered, [*operands, *places], numbers)
    target_entries = _target_entries(einsum, segments, len(operands))
    place_operands = range(len(operands), len(operands) + len(places))
    reads = tuple(indexed_array(*view) for view in views)
    target = indexed_array(totals, target_entries)
    bound = _bind_scatter(lowered, reads, target, place_operands)
    places_extent = totals.shape[einsum.output.index(segments.labels[0])]
    for dimensions in bound.gathered[:-1]:
        is_empty = any(dimension.extent == 0 for dimension in dimensions)
        if is_empty and ((places[0] >= 0) & (places[0] < places_extent)).any():
            raise IndexError("an index is out of range; this dimension has extent 0")
    parameters = bound.values.copy()
    parameters[bound.position["K", 0, 1]] = places_extent
    for position, array in enumerate([*(view.array for view in views), totals]):
        parameters[bound.position["A", position, 0]] = address_of(array)
    used_threads = threads if lowered.calls() >= MIN_THREADED_VALUES else 1
    jobs = _shares(bound, parameters, places_extent, used_threads)
    kernel = kernel_of(bound.nest)
    if len(jobs) > 1:
        list(pool(threads).map(kernel, map(address_of, jobs)))
    else:
        kernel(address_of(jobs[0]))
    check_gathers(bound, jobs)


def bind_values(
    einsum: EinSum,
    segments: Segments,
    operands: Sequence[Array],
    index: Mapping[str, Array],
    places: Sequence[Array],
    dtype: str,
) -> tuple[BoundNest, list[OperandView]]:
    """Return the loops of `add_by_loops` for totals of a dtype, and the arrays that they read."""
    shape = [einsum.extent[label] for label in einsum.output]
    strides = np.empty(0, dtype).itemsize * np.cumprod([1, *reversed(shape[1:])])[::-1]
    lowered = _with_places(einsum, segments)
    numbers = {label: counted(indices) for label, indices in index.items()}
    views = operand_views(lowered, [*operands, *places], numbers)
    reads = tuple(indexed_array(*view) for view in views)
    entries = _target_entries(einsum, segments, len(operands))
    target = IndexedArray(dtype, tuple(shape), tuple(map(int, strides)), entries)
    place_operands = range(len(operands), len(operands) + len(places))
    return _bind_scatter(lowered, reads, target, place_operands), views


def _target_entries(einsum: EinSum, segments: Segments, operands: int) -> IndexEntries:
    """Return what indexes the totals: labels, and the operands with places after the others."""
    entries: list[str | Scalar] = []
    for label in einsum.output:
        if label in segments.labels:
            entries.append(Arg(operands + segments.labels.index(label)))
        else:
            entries.append(label)
    return tuple(entries)


def _shares(
    bound: BoundNest, parameters: Parameters, places: int, threads: int
) -> list[Parameters]:
    """Return the parameters of each thread."""
    lane = bound.nest.lane
    lanes = bound.axes[lane].extent
    if lanes >= threads * MIN_SHARED_LANES:
        first = bound.position["a", lane, 0]
        last = bound.position["b", lane, 0]
        pieces = threads
        extent = lanes
    else:
        first = bound.position["K", 0, 0]
        last = bound.position["K", 0, 1]
        pieces = max(1, min(threads, places))
        extent = places
    jobs = []
    cuts = [extent * k // pieces for k in range(pieces + 1)]
    for start, stop in pairwise(cuts):
        job = parameters.copy()
        job[first] = start
        job[last] = stop
        jobs.append(job)
    return jobs


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
    accesses = []
    for k, array in enumerate(arrays):
        loops = tuple(loop for loop, axis in enumerate(ordered) if axis.strides[k])
        is_dense = lane.strides[k] == itemsizes[k]
        gathers = gathers_in(array.index)
        accesses.append(Access(array.dtype, loops, is_dense, gathers, array.counts))
    nest = Nest(
        function=number_operands(einsum).function,
        reads=tuple(accesses[:-1]),
        out=accesses[-1],
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
