"""Cumulative sums, products, maxima and minima in one pass over the values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from einmpi.graph.aggregations import AGGREGATIONS, Aggregation
from einmpi.graph.dtypes import DTYPES, computed_dtype
from einmpi.graph.einsum import EinSum, Scan
from einmpi.graph.scalar import Number
from einmpi.kernels.operands import Array

BLOCK_ELEMENTS = 2**17  # of a temporary, so that it stays in the cache


def compute_scan(
    scan: Scan, einsum: EinSum, operand: Array, out: Array, index: Mapping[str, Array]
) -> None:
    """Compute a scan into `out`.

    Parameters
    ----------
    scan
        The labels of the scan, as `einsum.scan` has found them.
    einsum
        What to compute; its extents are those of the arrays.
    operand, out
        The arrays. The operand is never written to.
    index
        The global indices of a label's positions, for labels that do not start at 0.
    """
    lines = [label for label in einsum.output if label != scan.along]
    source = lines_first(operand, einsum.operands[0], lines)
    target = lines_first(out, einsum.output, lines)
    taken = index.get(scan.scanned)
    wanted = index.get(scan.along)
    counts = _counts(taken, wanted, source.shape[-1], target.shape[-1])
    with np.errstate(all="ignore"):
        scan_lines(
            AGGREGATIONS[einsum.required_aggregation], source, target, counts, scan.masked, None
        )


def _counts(taken: Array | None, wanted: Array | None, values: int, results: int) -> Array | None:
    """Return how many of the values at hand each result is the aggregate of.

    `taken` and `wanted` are the indices of the values and of the results, None if these start at
    0. Return None for the counts 1, 2, 3, … up to all values.
    """
    if taken is None and wanted is None and values == results:
        return None
    if taken is None:
        taken = np.arange(values)
    if wanted is None:
        wanted = np.arange(results)
    if np.array_equal(taken, wanted):
        return None
    return np.searchsorted(taken, wanted, side="right")


def lines_first(array: Array, entries: Sequence[object], lines: Sequence[str]) -> Array:
    """Return an array with the dimensions of the lines first, then the one that is scanned."""
    order = [entries.index(label) for label in lines]
    (scanned,) = set(range(len(entries))) - set(order)
    return array.transpose([*order, scanned])


def scan_lines(
    record: Aggregation,
    source: Array,
    target: Array,
    counts: Array | None,
    masked: Any,
    offsets: Array | None,
) -> None:
    """Scan along the last axis, a block of lines and a part of each line at a time.

    `offsets` are what the lines begin with, None for nothing.
    """
    dtype = computed_dtype(target.dtype)
    if record.is_rounded:
        dtype = np.dtype(DTYPES[target.dtype.name].accumulator)
    length = source.shape[-1]
    neutral = record.neutral(dtype)
    is_contiguous = length > 0 and source.strides[-1] == source.itemsize
    is_numpys = counts is None and offsets is None and masked == neutral
    if is_contiguous and is_numpys and source.dtype == target.dtype == dtype:
        record.combine.accumulate(source, axis=-1, out=target)
        return
    line_shape = source.shape[:-1]
    line_count = int(np.prod(line_shape, dtype=np.int64))
    max_lines = BLOCK_ELEMENTS // 64
    if is_contiguous:  # few long parts of lines are scanned faster than many short ones
        max_lines = max(1, BLOCK_ELEMENTS // length)
    if line_count > max_lines and line_shape[0] > 1:
        half = line_shape[0] // 2
        for lines in (slice(0, half), slice(half, None)):
            line_offsets = None if offsets is None else offsets[lines]
            scan_lines(record, source[lines], target[lines], counts, masked, line_offsets)
        return
    if line_count > max_lines and len(line_shape) > 1:
        line_offsets = None if offsets is None else offsets[0]
        scan_lines(record, source[0], target[0], counts, masked, line_offsets)
        return
    step = max(1, BLOCK_ELEMENTS // max(1, line_count))
    if length == 0 or counts is not None:
        target[...] = neutral if length == 0 else masked  # results before the first value
    total: Array = np.full(line_shape, neutral, dtype)
    if offsets is not None:
        total[...] = offsets
    for start in range(0, length, step):
        part = source[..., start : start + step].astype(dtype)
        part[..., 0] = record.combine(total, part[..., 0])
        record.combine.accumulate(part, axis=-1, out=part)
        total = part[..., -1]
        if counts is None:
            first = start
            last = start + part.shape[-1]
            is_partial = np.arange(first, last) < length - 1
            values = part
        else:
            first = int(np.searchsorted(counts, start, side="right"))
            last = int(np.searchsorted(counts, start + step, side="right"))
            is_partial = counts[first:last] < length
            values = part[..., counts[first:last] - start - 1]
        if masked != neutral:  # it takes the place of values after these indices
            with_masked = record.combine(values, dtype.type(masked))
            values = np.where(is_partial, with_masked, values)
        target[..., first:last] = values


# ---- scan blocks ---------------------------------------------------------------------------------
#
# Scans in two passes on CPUs: the total of each block, and the scan inside of blocks.


def is_in_whole_blocks(einsum: EinSum, index: Mapping[str, Array], dtype: str) -> bool:
    """Return whether this is a pass of a scan in two passes with all positions inside of blocks.

    What takes the place of values that do not count must not change an aggregate.
    """
    form = einsum.block_totals or einsum.blocked_scan
    if form is None or form.inside in index:
        return False
    is_whole = einsum.extent[form.inside] == form.blocks.longest
    return is_whole and _is_neutral(einsum, form.masked, dtype)


def _is_neutral(einsum: EinSum, masked: Number, dtype: str) -> bool:
    record = AGGREGATIONS[einsum.required_aggregation]
    return masked in (record.empty, record.neutral(np.dtype(dtype)))


def compute_in_blocks(
    einsum: EinSum, operands: Sequence[Array], out: Array, index: Mapping[str, Array]
) -> None:
    """Compute a pass of a scan in two passes into `out`."""
    with np.errstate(all="ignore"):
        if einsum.block_totals is not None:
            _compute_totals(einsum, operands[0], out, index)
        else:
            _compute_scan(einsum, operands, out, index)


def _compute_totals(einsum: EinSum, operand: Array, out: Array, index: Mapping[str, Array]) -> None:
    """Compute the total of each block at hand."""
    form = einsum.block_totals
    assert form is not None
    record = AGGREGATIONS[einsum.required_aggregation]
    neutral = record.neutral(out.dtype)
    lines = [label for label in einsum.output if label != form.block]
    source = lines_first(operand, einsum.operands[0], lines)
    target = lines_first(out, einsum.output, lines)
    numbers = index.get(form.block, np.arange(einsum.extent[form.block]))
    for place, block in enumerate(numbers.tolist()):
        first = form.blocks.first(block) - form.start
        end = form.blocks.first(block + 1) - form.start
        values = source[..., first:end]
        target[..., place] = record.combine.reduce(
            values, axis=-1, dtype=out.dtype, initial=neutral
        )


def _compute_scan(
    einsum: EinSum, operands: Sequence[Array], out: Array, index: Mapping[str, Array]
) -> None:
    """Compute the scan inside of each block at hand, which begins with the total before it."""
    form = einsum.blocked_scan
    assert form is not None
    record = AGGREGATIONS[einsum.required_aggregation]
    lines = [label for label in einsum.output if label != form.along]
    totals = lines_first(operands[0], einsum.operands[0], lines)
    source = lines_first(operands[1], einsum.operands[1], lines)
    target = lines_first(out, einsum.output, lines)
    wanted = index.get(form.along, np.arange(einsum.extent[form.along]))
    block_of = wanted * form.blocks.count // form.blocks.extent
    starts = np.flatnonzero(np.diff(block_of, prepend=-1)).tolist()
    for start, stop in zip(starts, [*starts[1:], len(wanted)], strict=True):
        block = int(block_of[start])
        first = form.blocks.first(block)
        counts = wanted[start:stop] - first + 1  # of the values that each result aggregates
        length = int(counts[-1])
        is_whole = len(counts) == length
        offsets = totals[..., block - 1 - form.offset_start] if block else None
        place = first - form.start
        scan_lines(
            record,
            source[..., place : place + length],
            target[..., start:stop],
            None if is_whole else counts,
            form.masked,
            offsets,
        )
