"""Scans as lines of segments, which a device scans one by one: whole scans, what a rank has of
them, and the second pass of scans in two passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.einsum import EinSum
from einmpi.graph.forms.scan_blocks import BlockedScan, BlockTotals
from einmpi.graph.scalar import Number

Ints: TypeAlias = npt.NDArray[np.int64]


class Segment(NamedTuple):
    """Values of a line that follow one another, and where their results go."""

    first_value: int
    first_result: int
    length: int  # of the values
    results: int
    offset: int = -1  # the index of what the segment begins with; −1 for nothing
    # How many of the values each result aggregates; None for 1, 2, 3, … up to all of them.
    counts: Ints | None = None


class LineScan(NamedTuple):
    """A scan: the labels of its lines, and the segments of a line."""

    lines: tuple[str, ...]
    segments: tuple[Segment, ...]
    values: int  # operands
    offsets: int  # the values where there are no offsets
    masked: Number  # takes the place of values after an index


def find_scan(einsum: EinSum, index: Mapping[str, Ints], dtype: str) -> LineScan | None:
    """Return an EinSum as a scan; None if it is none, or has parts of blocks.

    `index` has the global indices of a label's positions, for labels that do not start at 0. The
    aggregates have this dtype.
    """
    if einsum.scan is not None:
        along = einsum.scan.along
        taken = _indices(einsum, index, einsum.scan.scanned)
        wanted = _indices(einsum, index, along)
        counts = None
        if not np.array_equal(taken, wanted):
            counts = np.searchsorted(taken, wanted, side="right")
        segments = [Segment(0, 0, len(taken), len(wanted), counts=counts)]
        values, masked = 0, einsum.scan.masked
    else:
        form = einsum.blocked_scan
        if form is None or not has_whole_blocks(einsum, form, index, dtype):
            return None
        along = form.along
        segments = _segments_in_blocks(form, _indices(einsum, index, along))
        values, masked = 1, form.masked
    lines = tuple(label for label in einsum.output if label != along)
    return LineScan(lines, tuple(segments), values, 0, masked)


def _indices(einsum: EinSum, index: Mapping[str, Ints], label: str) -> Ints:
    return index.get(label, np.arange(einsum.extent[label]))


def has_whole_blocks(
    einsum: EinSum, form: BlockedScan | BlockTotals, index: Mapping[str, Any], dtype: str
) -> bool:
    """Return whether a pass of a scan in two passes has all positions inside of blocks.

    What takes the place of values that do not count must not change an aggregate.
    """
    record = AGGREGATIONS[einsum.required_aggregation]
    is_whole = einsum.extent[form.inside] == form.blocks.longest and form.inside not in index
    return is_whole and form.masked in (record.empty, record.neutral(np.dtype(dtype)))


def _segments_in_blocks(form: BlockedScan, wanted: Ints) -> list[Segment]:
    """Return a segment for each block at hand, which begins with the total before it."""
    block_of = wanted * form.blocks.count // form.blocks.extent
    starts = np.flatnonzero(np.diff(block_of, prepend=-1)).tolist()
    segments = []
    for start, stop in zip(starts, [*starts[1:], len(wanted)], strict=True):
        block = int(block_of[start])
        first = form.blocks.first(block)
        counts = wanted[start:stop] - first + 1
        length = int(counts[-1])
        offset = block - 1 - form.offset_start if block else -1
        is_whole = len(counts) == length
        own_counts = None if is_whole else counts
        segments.append(
            Segment(first - form.start, start, length, stop - start, offset, own_counts)
        )
    return segments


def scanned_dimension(entries: Sequence[object], lines: Sequence[str]) -> int:
    """Return the dimension of an array that is no line's."""
    (dimension,) = set(range(len(entries))) - {entries.index(label) for label in lines}
    return dimension
