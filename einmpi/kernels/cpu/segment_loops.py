"""Scattered aggregates whose places are sorted, as the rows of a sparse matrix: each total takes
the values of one segment, in a register, and is stored once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from einmpi.caches import bounded_cache
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.einsum import EinSum, einsum_over
from einmpi.graph.scalar import Arg
from einmpi.graph.segments import Segments
from einmpi.kernels.cpu.compiled import (
    MIN_THREADED_VALUES,
    JobTemplate,
    indexed_array,
    is_addressable,
    operand_views,
    supports_compiled_loops,
)
from einmpi.kernels.cpu.key_loops import starts_of
from einmpi.kernels.cpu.known_indices import (
    KnownIndicesCall,
    Loops,
    dense_strides,
    index_lists,
    known_to_be_within,
    place_operands,
)
from einmpi.kernels.cpu.loop_source import SEGMENT_LANES
from einmpi.kernels.fixed_lists import fact, identity_of
from einmpi.kernels.loop_nest import (
    BLOCK_STEPS,
    Axis,
    BoundNest,
    Counter,
    IndexedArray,
    Nest,
    Range,
    accesses_of,
    axes_of,
    counted,
    densest,
    gathered_dimensions,
    outer_and_inner,
    stride_by_entry,
)
from einmpi.kernels.operands import Array, number_operands, operands_read, with_operands
from einmpi.kernels.prepared import PreparedCall
from einmpi.kernels.scalar_text import FoldTypes

LONG_SEGMENT = 2**15  # values of a piece of a longer segment
MOST_BYTES_IN_PIECES = 2**25  # of a result that is first computed in pieces
STRIP_LANES = 512  # of many lanes that are computed at a time: their totals stay in the first cache


class Ends(NamedTuple):
    """Where the segment of each total begins and ends in a list of places."""

    first: npt.NDArray[np.unsignedinteger[Any]]
    end: npt.NDArray[np.unsignedinteger[Any]]
    are_adjacent: bool = False  # each segment begins where the one before ends


def ends_of(places: Array, first: int, extent: int) -> Ends | None:
    """Return the segments of so many places from a first one on; None if they are not sorted.

    Other places may lie in between: those of empty places at the ends of blocks.
    """
    extent_end = first + extent
    is_sorted = len(places) > 0 and not (places[1:] < places[:-1]).any()
    numbers = None
    own = places
    if not is_sorted or places[0] < first or places[-1] >= extent_end:
        taken: Any = (places >= first) & (places < extent_end)
        numbers = np.flatnonzero(taken)
        own = places[numbers]
        if (own[1:] < own[:-1]).any():
            return None
    dtype = np.uint32 if len(places) < 2**32 else np.uint64
    bounds: Any = starts_of(own, first, extent + 1)
    if numbers is None or not len(numbers):
        bounds = bounds.astype(dtype, copy=False)
        return Ends(bounds[:-1], bounds[1:], are_adjacent=True)
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        bounds = (bounds + numbers[0]).astype(dtype)
        return Ends(bounds[:-1], bounds[1:], are_adjacent=True)
    begin = numbers[np.minimum(bounds[:-1], len(numbers) - 1)]
    lengths = np.diff(bounds)
    end = np.where(lengths > 0, numbers[bounds[1:] - 1] + 1, begin)
    if ((end - begin) != lengths).any():
        return None
    return Ends(begin.astype(dtype), end.astype(dtype))


# ---- preparation ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sorted:
    """A scattered EinSum as segments: over its values alone, with the label of totals as one."""

    einsum: EinSum  # of the operands in `taken`
    taken: tuple[int, ...]
    places: int  # the operand with places
    label: str  # of totals
    values: str  # the label of values

    @property
    def lists(self) -> list[int]:
        """The operands whose elements are indices of others."""
        return [self.taken[k] for k in index_lists(self.einsum)]

    @property
    def can_be_cut(self) -> bool:
        """Whether the values of a segment do not depend on which one it is."""
        is_read = any(self.label in entries for entries in self.einsum.operands)
        return not is_read and self.label not in self.einsum.labels_as_numbers

    @property
    def calls(self) -> int:
        """How many values are aggregated."""
        return prod(extent for label, extent in self.einsum.extents if label != self.label)


@bounded_cache(1024)
def _as_sorted(einsum: EinSum, segments: Segments) -> _Sorted | None:
    """Return an EinSum with one scattered label as segments; None if places are computed."""
    match segments.labels, segments.indices:
        case (label,), (Arg(places),) if len(segments.operands[places]) == 1:
            (values,) = segments.operands[places]
        case _:
            return None
    if not isinstance(values, str) or values not in einsum.aggregated:
        return None
    whole = einsum_over(
        einsum.output,
        segments.operands,
        segments.body,
        einsum.aggregation,
        einsum.aggregated,
        einsum.extent,
    )
    taken = operands_read([segments.body], segments.operands)
    return _Sorted(with_operands(whole, taken), taken, places, label, values)


def prepare_segments(
    einsum: EinSum,
    operands: Sequence[Array],
    out: Array,
    index: Mapping[str, Array],
    threads: int,
    min_calls: int,
    otherwise: PreparedCall,
) -> PreparedCall:
    """Return a scattered EinSum as loops over segments.

    `otherwise` is called if places may change from call to call, or are not sorted.
    """
    segments = einsum.required_segments
    found = _as_sorted(einsum, segments)
    if found is None or found.calls < max(1, min_calls) or not out.size:
        return otherwise
    chosen = [operands[k] for k in found.taken]
    dtypes = tuple([array.dtype.name for array in chosen])
    rule = AGGREGATIONS[einsum.required_aggregation]
    own = index.get(found.label)
    rows = Counter(0, out.shape[einsum.output.index(found.label)])
    if own is not None:
        rows_or_list = counted(own)
        if not isinstance(rows_or_list, Counter):
            return otherwise
        rows = rows_or_list
    if not supports_compiled_loops(found.einsum, dtypes):
        return otherwise
    number_types = ("int64",) * len(number_operands(found.einsum).labels)
    function = number_operands(found.einsum).function
    types = FoldTypes(einsum.required_aggregation, function, (*dtypes, *number_types))
    masked = out.dtype.type(segments.masked)
    is_usual = types.dtype == out.dtype.name and masked == rule.neutral(out.dtype)
    if not is_usual or not all(map(is_addressable, (*chosen, out))):
        return otherwise
    used_threads = threads if found.calls >= MIN_THREADED_VALUES else 1
    make = partial(_segment_loops, found, index, rows, used_threads)
    return KnownIndicesCall([found.places, *found.lists], make, used_threads, otherwise)


def _segment_loops(
    found: _Sorted,
    index: Mapping[str, Array],
    rows: Counter,
    threads: int,
    operands: Sequence[Array],
    out: Array,
) -> Loops | None:
    """Return the loops for some places; None if they may change, or are not sorted."""
    places = operands[found.places]
    if identity_of(places) is None:
        return None
    ends = fact(
        places,
        ("ends", rows.start, rows.extent),
        lambda: ends_of(places, rows.start, rows.extent),
    )
    chosen = [operands[k] for k in found.taken]
    within = known_to_be_within(found.einsum, chosen)
    others = [array for k, array in enumerate(chosen) if k not in within]
    if ends is None or not all(array.size for array in others):
        return None
    finish = None
    lengths = ends.end - ends.first
    longest = int(lengths.max())
    if longest > LONG_SEGMENT and found.can_be_cut and out.nbytes <= MOST_BYTES_IN_PIECES:
        counts = np.maximum(1, -(-lengths.astype(np.int64) // LONG_SEGMENT))
        longest = LONG_SEGMENT
        ends = _in_pieces(ends, counts)
        extents = {**found.einsum.extent, found.label: len(ends.first)}
        found = replace(found, einsum=replace(found.einsum, extents=tuple(extents.items())))
        rule = AGGREGATIONS[found.einsum.required_aggregation]
        axis = found.einsum.output.index(found.label)
        finish = partial(_join_pieces, rule.combine, counts, axis)
        out = np.empty([extents[label] for label in found.einsum.output], out.dtype)
    views = operand_views(found.einsum, chosen, index)
    reads = [indexed_array(*view) for view in views]
    for array in ends[:2]:
        reads.append(indexed_array(array, (found.label,)))
    bound = _bind_segments(
        found,
        tuple(reads),
        indexed_array(out, found.einsum.output),
        within,
        longest <= BLOCK_STEPS,
        ends.are_adjacent,
    )
    template = JobTemplate(bound, 0, _equal_shares(ends, threads))
    in_calls = place_operands(template, views, operands, found.taken, found.lists)
    for k, array in enumerate(ends[:2]):
        template.place(len(views) + k, array, None)
    template.place(-1, out, out)
    return Loops(template, in_calls, out.shape, finish)


def _in_pieces(ends: Ends, counts: npt.NDArray[np.int64]) -> Ends:
    """Return segments in pieces, so many of each, which threads may share."""
    segment = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = ends.first[segment] + number * LONG_SEGMENT
    end = np.minimum(first + LONG_SEGMENT, ends.end[segment])
    dtype = ends.first.dtype
    return Ends(first.astype(dtype), end.astype(dtype))


def _join_pieces(
    combine: np.ufunc, counts: npt.NDArray[np.int64], axis: int, pieces: Array, out: Array
) -> None:
    """Aggregate the pieces of each segment, in order."""
    pieces = np.moveaxis(pieces, axis, 0)
    totals = np.moveaxis(out, axis, 0)
    first = np.cumsum(counts) - counts
    totals[...] = pieces[first]
    with np.errstate(all="ignore"):
        for segment in np.flatnonzero(counts > 1):
            start = first[segment]
            totals[segment] = combine.reduce(pieces[start : start + counts[segment]], axis=0)


def _equal_shares(ends: Ends, threads: int) -> list[Range]:
    """Return ranges of totals with about the same number of values, one for each thread.

    A total counts as a value, too.
    """
    count = len(ends.end)
    if threads == 1:
        return [(0, count)]
    work = ends.end.astype(np.int64) + np.arange(count)
    pieces = max(1, min(threads, count))
    goals = work[-1] * np.arange(1, pieces) // pieces
    cuts = [0, *np.searchsorted(work, goals).tolist(), count]
    return list(pairwise(cuts))


@bounded_cache(4096)
def _bind_segments(
    found: _Sorted,
    reads: tuple[IndexedArray, ...],
    target: IndexedArray,
    within: tuple[int, ...],
    are_short: bool,
    are_adjacent: bool,
) -> BoundNest:
    """Return the loops for arrays with these strides; the last two reads are the segments' ends."""
    einsum = found.einsum
    own = (found.label, found.values)
    arrays = (*reads, target)
    tables = [stride_by_entry(array.index, array.strides) for array in arrays]
    extent = einsum.extent
    segment, value = (
        Axis(extent[each], each == found.values, tuple(table.get(each, 0) for table in tables))
        for each in own
    )
    others = [(each, n) for each, n in einsum.extents if each not in own]
    outer, inner = outer_and_inner(axes_of(arrays, others))
    lane = densest(outer, arrays)
    outer = sorted([axis for axis in outer if axis is not lane], key=lambda a: -abs(a.strides[-1]))
    inner.sort(key=lambda axis: axis.extent)
    axes = (segment, *outer, lane, value, *inner)
    *accesses, out = accesses_of(arrays, axes, lane)
    for k in within:
        accesses[k] = replace(accesses[k], is_checked=False)
    gathered = tuple(map(gathered_dimensions, arrays))
    nest = Nest(
        function=number_operands(einsum).function,
        reads=tuple(accesses),
        out=out,
        aggregation=einsum.aggregation,
        output_loops=len(outer) + 2,
        loops=len(axes),
        aggregates_lanes=False,
        has_rows=False,
        width=lane.extent if lane.extent <= SEGMENT_LANES else STRIP_LANES,
        segments=len(reads) - 2,
        has_short_segments=are_short,
        has_adjacent_segments=are_adjacent and not outer and lane.extent <= SEGMENT_LANES,
        constants=dense_strides(arrays, axes, gathered),
    )
    return BoundNest(nest, axes, (), gathered)
