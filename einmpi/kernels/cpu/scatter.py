"""Scattered aggregates, such as sums over the edges of each node, in one pass over the values.

Every total takes its values in the order of the aggregated labels, whatever the threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from einmpi.caches import bounded_cache
from einmpi.graph.aggregations import AGGREGATIONS, Aggregation
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.einsum import EinSum, einsum_over
from einmpi.graph.scalar import (
    Arg,
    Call,
    Const,
    Index,
    IndexEntries,
    Scalar,
    rebuild,
    with_gathers,
)
from einmpi.graph.segments import Segments
from einmpi.kernels.cpu.broadcast import label_values, operand_values
from einmpi.kernels.cpu.compiled import (
    MIN_SHARED_LANES,
    MIN_THREADED_VALUES,
    JobTemplate,
    OperandView,
    check_gathers,
    even_ranges,
    indexed_array,
    is_addressable,
    operand_views,
    run_jobs,
    supports_compiled_loops,
)
from einmpi.kernels.loop_nest import (
    BoundNest,
    Counter,
    IndexedArray,
    Nest,
    accesses_of,
    axes_of,
    counted,
    densest,
    gathered_dimensions,
    outer_and_inner,
)
from einmpi.kernels.operands import (
    Array,
    Box,
    boxes,
    halve_step,
    number_operands,
    operands_read,
    part_of_array,
)
from einmpi.kernels.prepared import apply

# ---- scatter loops -------------------------------------------------------------------------------
#
# Scattered aggregates by compiled loops, on several threads.


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


@bounded_cache(1024)
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
        operands.append(with_gathers(entries, lambda gather: rebuild(gather, leaf), place))
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
    values = prod(axis.extent for axis in bound.axes)
    used_threads = threads if values >= MIN_THREADED_VALUES else 1
    lane = bound.nest.lane
    lanes = bound.axes[lane].extent
    own_places = bound.position["first_place"]
    if lanes >= used_threads * MIN_SHARED_LANES:
        template = JobTemplate(bound, 2 * lane, even_ranges(0, lanes, used_threads))
        template.jobs[:, own_places + 1] = extent
    else:
        pieces = max(1, min(used_threads, extent))
        template = JobTemplate(bound, own_places, even_ranges(0, extent, pieces))
    template.place_views(views, ())
    template.place(-1, totals, None)
    run_jobs(template.kernel, template.jobs, threads)
    check_gathers(bound, template.jobs)


def bind_values(
    scatter: Scatter, places: Sequence[Array], dtype: str, strides: tuple[int, ...]
) -> tuple[BoundNest, list[OperandView]]:
    """Return the loops of `add_by_loops` for totals stored like this, and the arrays they read."""
    einsum = scatter.einsum
    count = len(scatter.operands)
    lowered = _with_places(einsum, scatter.segments)
    views = operand_views(lowered, [*scatter.operands, *places], scatter.index)
    reads = tuple(indexed_array(*view) for view in views)
    entries: list[str | Scalar] = []  # of the totals: labels, and the operands with places
    for label in einsum.output:
        if label in scatter.segments.labels:
            entries.append(Arg(count + scatter.segments.labels.index(label)))
        else:
            entries.append(label)
    target = IndexedArray(dtype, einsum.bound, strides, tuple(entries))
    return _bind_scatter(lowered, reads, target, range(count, count + len(places))), views


@bounded_cache(4096)
def _bind_scatter(
    einsum: EinSum, reads: tuple[IndexedArray, ...], target: IndexedArray, places: range
) -> BoundNest:
    """Return the loops for arrays with these strides; `places` are the operands with positions.

    Along the lanes the place is the same. They are the label along which most arrays are
    contiguous.
    """
    arrays = (*reads, target)
    outer, aggregated = outer_and_inner(axes_of(arrays, einsum.extents))
    at_one_place = [axis for axis in outer if not any(axis.strides[k] for k in places)]
    lane = densest(at_one_place, arrays)
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


CHUNK_PLACES = 2**19  # places that are computed at a time: 4 MiB for each scattered label
BLOCK_ELEMENTS = 2**17  # of a temporary of numpy's, so that it stays in the cache
TOTAL_BYTES = 2**24  # of totals that are wider than the result
MIN_CUT_EXTENT = 64  # a label that is not scattered is cut down to this before a scattered one


def compute_scatter(
    scatter: Scatter, out: Array, threads: int = 1, min_compiled_values: int = 0
) -> None:
    """Compute a scattered EinSum into `out`.

    Parameters
    ----------
    scatter
        What to compute, with its arrays. Operands are never written to.
    out
        The array of results.
    threads
        How many threads a compiled kernel may use; the result does not depend on it.
    min_compiled_values
        With fewer values, numpy is done before a compiler has even started.

    Raises
    ------
    IndexError
        If an index of a gather is out of range.
    ValueError
        If an aggregation of no values has no result.
    """
    einsum = scatter.einsum
    if out.size == 0:
        return
    rule = AGGREGATIONS[einsum.required_aggregation]
    if any(einsum.extent[label] == 0 for label in einsum.aggregated):
        if rule.empty is None:
            raise ValueError(f"{einsum.required_aggregation} of nothing has no value")
        out[...] = rule.empty
        return
    is_compiled = scatter.values >= min_compiled_values
    if is_compiled:
        is_compiled = supports_scatter_loops(scatter)
    used_threads = threads if is_compiled else 0
    dtype = out.dtype
    if rule.is_rounded:
        dtype = np.dtype(DTYPES[out.dtype.name].accumulator)
    with np.errstate(all="ignore"):
        if dtype == out.dtype and is_addressable(out):
            _fill_totals(scatter, rule, out, used_threads)
            return
        for box in _output_boxes(scatter, dtype.itemsize):
            place = tuple(box[label] for label in einsum.output)
            totals = np.empty([where.stop - where.start for where in place], dtype)
            _fill_totals(scatter.part(box), rule, totals, used_threads)
            out[place] = totals


def _output_boxes(scatter: Scatter, itemsize: int) -> Iterator[Box]:
    """Yield parts of the output whose totals stay small."""
    einsum = scatter.einsum
    steps = {label: einsum.extent[label] for label in einsum.output}
    scattered = scatter.segments.labels
    free = [label for label in einsum.output if label not in scattered]
    for label in (*free, *scattered, *free):
        least = MIN_CUT_EXTENT if label in free and steps[scattered[-1]] > 1 else 1
        halve_step(steps, label, TOTAL_BYTES // itemsize, least)
    return boxes(einsum.extent, steps)


def _fill_totals(scatter: Scatter, rule: Aggregation, totals: Array, threads: int) -> None:
    """Aggregate all values into totals, by numpy if the number of threads is 0."""
    neutral = rule.neutral(totals.dtype)
    totals[...] = neutral if rule.empty is None else rule.empty
    extent = scatter.einsum.extent
    steps = {label: extent[label] for label in scatter.segments.index_labels}
    for label in steps:
        halve_step(steps, label, CHUNK_PLACES)
    for box in boxes(extent, steps):
        chunk = scatter.part(box)
        places = scatter_places(chunk)
        target = part_of_array(totals, chunk.einsum.output, box)
        if threads > 0:
            add_by_loops(chunk, places, target, threads)
        else:
            _add_by_numpy(chunk, rule, places, target)
    masked = totals.dtype.type(scatter.segments.masked)
    if rule.is_idempotent and masked != neutral:
        _take_masked(scatter, rule, totals, masked)


def _take_masked(scatter: Scatter, rule: Aggregation, totals: Array, masked: Any) -> None:
    """Let totals take the number that stands for values with other places, if there are any."""
    einsum = scatter.einsum
    segments = scatter.segments
    own_labels = (*segments.labels, *segments.index_labels)
    output = tuple(label for label in einsum.output if label in own_labels)
    aggregated = tuple(label for label in einsum.aggregated if label in own_labels)
    extents = tuple((label, einsum.extent[label]) for label in (*output, *aggregated))
    counted = replace(
        einsum, output=output, aggregated=aggregated, aggregation="sum", extents=extents
    )
    ones = replace(segments, body=Const(1), masked=0)
    counts = np.empty([einsum.extent[label] for label in output], np.int64)
    _fill_totals(replace(scatter, einsum=counted, segments=ones), AGGREGATIONS["sum"], counts, 0)
    axes = tuple(slice(None) if label in output else None for label in einsum.output)
    has_others = counts < prod(einsum.extent[label] for label in aggregated)
    totals[...] = np.where(has_others[axes], rule.combine(totals, masked), totals)


# ---- places -------------------------------------------------------------------------------------


def scatter_places(scatter: Scatter) -> list[Array]:
    """Return where values go: for each scattered label the positions, with an axis for each label
    that indices depend on. A value for which the first position is none of the label's goes
    nowhere.
    """
    segments = scatter.segments
    labels = segments.index_labels
    extent = scatter.einsum.extent
    shape = [extent[label] for label in labels]
    box = {label: slice(0, extent[label]) for label in labels}
    positions, numbers = label_values(labels, scatter.index, box)
    needed = operands_read(segments.indices, segments.operands)
    values = operand_values(
        scatter.operands, segments.operands, needed, labels, box, positions, numbers
    )
    if len(segments.labels) == 1:
        (label,) = segments.labels
        wanted = np.broadcast_to(np.asarray(apply(segments.indices[0], values, numbers)), shape)
        own = scatter.index.get(label)
        is_whole = np.can_cast(wanted.dtype, np.int64)
        if is_whole and (own is None or isinstance(counted(own), Counter)):
            whole = wanted.astype(np.int64, copy=False)
            # A difference of arrays without dimensions is no array: kernels could not read it.
            return [whole if own is None else np.asarray(whole - own[0])]
    found = []
    is_inside: Any = True
    for label, index in zip(segments.labels, segments.indices, strict=True):
        wanted = np.broadcast_to(np.asarray(apply(index, values, numbers)), shape)
        place, is_here = _local_places(wanted, scatter.index.get(label), extent[label])
        found.append(np.asarray(place))
        is_inside = is_inside & is_here
    if np.all(is_inside):
        return found
    places = [np.where(is_inside, place, 0) for place in found]
    places[0][~is_inside] = -1
    return places


def _local_places(wanted: Array, own: Array | None, extent: int) -> tuple[Array, Array | bool]:
    """Return positions for global indices, and which of these indices are a position's at all.

    True stands for all of them.
    """
    whole = wanted
    if wanted.dtype.kind not in "biu":
        whole = wanted.real.astype(np.int64)
    whole = whole.astype(np.int64, copy=False)
    is_signed = wanted.dtype.kind in "bi"
    is_whole: Any = True if is_signed else whole == wanted
    first = 0 if own is None else int(own[0])
    if own is None or isinstance(counted(own), Counter):
        # Most often every value has its place here; to find that out takes no temporary.
        if is_whole is True and whole.min() >= first and whole.max() < first + extent:
            return (whole if first == 0 else whole - first), True
        return whole - first, is_whole & (whole >= first) & (whole < first + extent)
    place = np.minimum(np.searchsorted(own, whole), extent - 1)
    return place, is_whole & (own[place] == whole)


# ---- by numpy -----------------------------------------------------------------------------------


def _add_by_numpy(
    scatter: Scatter, rule: Aggregation, places: Sequence[Array], totals: Array
) -> None:
    """Aggregate values into totals, block by block: slow, small in memory, for every dtype.

    A block has an axis for the values that go somewhere, and one for each label that their places
    do not depend on.
    """
    segments = scatter.segments
    einsum = scatter.einsum
    extent = einsum.extent
    needed = operands_read([segments.body], segments.operands)
    known = (*segments.labels, *segments.index_labels)
    others = [label for label in einsum.labels if label not in known]
    place = np.atleast_1d(places[0])
    chosen = np.nonzero((place >= 0) & (place < extent[segments.labels[0]]))
    steps = {label: max(1, extent[label]) for label in others}
    for label in steps:
        halve_step(steps, label, BLOCK_ELEMENTS)
    rows = max(1, BLOCK_ELEMENTS // prod(steps.values()))
    for start in range(0, len(chosen[0]), rows):
        taken = tuple(axis[start : start + rows] for axis in chosen)
        column = (len(taken[0]), *[1] * len(others))
        positions: dict[str, Array] = {}
        for label, places_of_label in zip(segments.labels, places, strict=True):
            positions[label] = np.atleast_1d(places_of_label)[taken].reshape(column)
        for axis, label in enumerate(segments.index_labels):
            positions[label] = taken[axis].reshape(column)
        for box in boxes(extent, steps):
            for axis, label in enumerate(others, 1):
                along = [1] * len(column)
                along[axis] = -1
                positions[label] = np.arange(box[label].start, box[label].stop).reshape(along)
            numbers = dict(positions)
            for label in positions:
                if label in scatter.index:
                    numbers[label] = scatter.index[label][positions[label]]
            shape = (column[0], *[box[label].stop - box[label].start for label in others])
            values = operand_values(
                scatter.operands, segments.operands, needed, (), None, positions, numbers
            )
            body = np.asarray(apply(segments.body, values, numbers))
            converted = np.broadcast_to(body, shape).astype(totals.dtype)
            targets = [positions[label] for label in einsum.output]
            _combine_at(rule.combine, totals, targets, converted)


def _combine_at(combine: np.ufunc, totals: Array, targets: Sequence[Array], values: Array) -> None:
    """Combine values with the totals at their places, one after another.

    numpy is ten times as fast with one dimension as with several.
    """
    if not totals.flags.c_contiguous:
        places = [np.broadcast_to(targets[0], values.shape), *targets[1:]]
        combine.at(totals, tuple(places), values)
        return
    flat: Any = 0
    for extent, target in zip(totals.shape, targets, strict=True):
        flat = flat * extent + target
    combine.at(totals.reshape(-1), np.broadcast_to(flat, values.shape).ravel(), values.ravel())
