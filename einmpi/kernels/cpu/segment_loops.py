"""Aggregates by sorted rows, as those of a sparse matrix: each total takes the values of one
segment, in a register, and is stored once. Products of sparse matrices, row by row."""

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
from einmpi.graph.scalar import Arg, Call, IndexEntries, walk
from einmpi.graph.segments import Segments, conjuncts
from einmpi.kernels.cpu.compiled import (
    MIN_THREADED_VALUES,
    JobTemplate,
    indexed_array,
    is_addressable,
    operand_views,
    supports_compiled_loops,
)
from einmpi.kernels.cpu.key_loops import key_dtype, starts_in, starts_of
from einmpi.kernels.cpu.known_indices import (
    KnownIndicesCall,
    Loops,
    dense_strides,
    index_lists,
    known_to_be_within,
    place_operands,
)
from einmpi.kernels.cpu.loop_source import SEGMENT_LANES
from einmpi.kernels.fixed_lists import fact, greatest_of, identity_of
from einmpi.kernels.loop_nest import (
    BLOCK_STEPS,
    Access,
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
    bounds: Any
    if numbers is None and first == 0 and identity_of(places) is not None:
        bounds = starts_in(places, extent)  # others may know them
    else:
        bounds = starts_of(own, first, extent + 1)
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


# ---- matches -------------------------------------------------------------------------------------
#
# Sums over pairs of stored elements that are found by their keys, as in a product of two sparse
# matrices: those of a row are aggregated where the columns of its results are (Gustavson).


MOST_PLACES = 2**24  # of columns, for all threads: 64 MiB


class _Matches(NamedTuple):
    """An EinSum as its values at pairs of two labels, and the lists of keys that have to be equal.

    `lists` are operands: of the pairs, of the first label and the result, of the second one and the
    result; for each, those with the keys of either.
    """

    values: EinSum  # of the operands in `taken`
    taken: tuple[int, ...]
    lists: tuple[tuple[int, int], ...]


@bounded_cache(1024)
def _matches_of(einsum: EinSum) -> _Matches:
    assert isinstance(einsum.function, Call)
    condition, body, _ = einsum.function.args
    keys: dict[IndexEntries, tuple[int, int]] = {}
    for each in conjuncts(condition):
        a, b = (part.position for part in walk(each) if isinstance(part, Arg))
        keys[einsum.operands[a] + einsum.operands[b]] = a, b
    x, y = einsum.aggregated
    (p,) = einsum.output
    taken = operands_read([body], einsum.operands)
    values = with_operands(replace(einsum, function=body, matches=None), taken)
    return _Matches(values, taken, (keys[x, y], keys[x, p], keys[y, p]))


def prepare_matches(
    einsum: EinSum, operands: Sequence[Array], out: Array, threads: int
) -> PreparedCall:
    """Return an EinSum over pairs that are found by their keys as a function of arrays.

    Its lists never change, and are sorted by rows. Each pair has a result, each result a pair.
    """
    found = _matches_of(einsum)

    def on_copies(operands: Sequence[Array], out: Array) -> None:
        copies = [
            np.require(array, array.dtype.newbyteorder("="), ["A", "C"]) for array in operands
        ]
        prepare_matches(einsum, copies, out, threads)(copies, out)

    if not all(map(is_addressable, operands)):
        return on_copies
    lists = [*np.ravel(found.lists).tolist(), *(found.taken[k] for k in index_lists(found.values))]
    make = partial(_row_loops, found, threads)
    return KnownIndicesCall(lists, make, threads, on_copies)


def _row_loops(found: _Matches, threads: int, operands: Sequence[Array], out: Array) -> Loops:
    """Return the loops for some lists."""
    keys = [(operands[a], operands[b]) for a, b in found.lists]
    (match, right_row), (left_row, own_row), (right_column, own_column) = keys
    between = 1 + max(greatest_of(match), int(right_row[-1]))
    rows = 1 + max(int(left_row[-1]), int(own_row[-1]))
    columns = 1 + greatest_of(right_column)
    first_x, first_p = starts_in(left_row, rows), starts_in(own_row, rows)
    lists = [match, starts_in(right_row, between), right_column, own_column, first_x, first_p]
    threads = max(1, min(threads, MOST_PLACES // columns))
    memory = [((threads, columns), key_dtype(out.size).__name__)]
    chosen = [operands[k] for k in found.taken]
    dtypes = tuple([array.dtype.name for array in chosen])
    types = FoldTypes(found.values.required_aggregation, found.values.function, dtypes)
    if types.total != types.dtype and np.diff(first_x).max() > BLOCK_STEPS:
        memory.append(((threads, int(np.diff(first_p).max())), types.total))
    views = operand_views(found.values, chosen, {})
    reads = tuple(indexed_array(*view) for view in views)
    kinds = (*(array.dtype.name for array in lists), *(dtype for _, dtype in memory))
    bound = _bind_rows(found.values, reads, kinds, out.dtype.name, rows)
    work = first_x.astype(np.int64) + first_p
    cuts = np.searchsorted(work, work[-1] * np.arange(1, threads) // threads).tolist()
    template = JobTemplate(bound, 0, list(pairwise([0, *cuts, rows])))
    gathered = [found.taken[k] for k in index_lists(found.values)]
    in_calls = place_operands(template, views, operands, found.taken, gathered)
    for k, array in enumerate(lists, len(views)):
        template.place(k, array, None)
    thread = np.arange(threads) if threads > 1 else 0
    for k, (shape, dtype) in enumerate(memory, len(views) + len(lists)):
        template.place(k, out, out, thread * shape[1] * np.dtype(dtype).itemsize)
    template.place(-1, out, out)
    return Loops(template, in_calls, memory=memory)


@bounded_cache(1024)
def _bind_rows(
    einsum: EinSum,
    reads: tuple[IndexedArray, ...],
    kinds: tuple[str, ...],
    dtype: str,
    rows: int,
) -> BoundNest:
    """Return the loops for values that are stored like these; `kinds` are dtypes of lists."""
    tables = [stride_by_entry(array.index, array.strides) for array in reads]
    others = (0,) * (len(kinds) + 1)
    axes = [
        Axis(rows, False, (0,) * len(reads) + others),
        Axis(1, False, (0,) * len(reads) + others),
    ]
    for label in einsum.aggregated:
        strides = tuple(table.get(label, 0) for table in tables)
        axes.append(Axis(einsum.extent[label], True, strides + others))
    accesses = [replace(each, is_checked=False) for each in accesses_of(reads, axes)]
    gathered = tuple(map(gathered_dimensions, reads))
    nest = Nest(
        function=einsum.function,
        reads=(*accesses, *(Access(kind, (), False) for kind in kinds)),
        out=Access(dtype, (), False),
        aggregation=einsum.aggregation,
        output_loops=2,
        loops=4,
        aggregates_lanes=False,
        has_rows=False,
        width=1,
        matches=len(reads),
        constants=dense_strides(reads, axes, gathered),
    )
    return BoundNest(nest, tuple(axes), (), gathered)
