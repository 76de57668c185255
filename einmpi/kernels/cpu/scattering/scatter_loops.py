"""Scattered aggregates by compiled loops, on several threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod

import numpy as np
import numpy.typing as npt

from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Call, Index, IndexEntries, Scalar, gathers_in, rebuild
from einmpi.graph.segments import Segments
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
    bound, views = bind_values(
        einsum, segments, operands, index, places, totals.dtype.name, totals.strides
    )
    extent = totals.shape[einsum.output.index(segments.labels[0])]
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
    einsum: EinSum,
    segments: Segments,
    operands: Sequence[Array],
    index: Mapping[str, Array],
    places: Sequence[Array],
    dtype: str,
    strides: tuple[int, ...],
) -> tuple[BoundNest, list[OperandView]]:
    """Return the loops of `add_by_loops` for totals stored like this, and the arrays they read."""
    lowered = _with_places(einsum, segments)
    numbers = {label: counted(indices) for label, indices in index.items()}
    views = operand_views(lowered, [*operands, *places], numbers)
    reads = tuple(indexed_array(*view) for view in views)
    entries = _target_entries(einsum, segments, len(operands))
    target = IndexedArray(dtype, einsum.bound, strides, entries)
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
