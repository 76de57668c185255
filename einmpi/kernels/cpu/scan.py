"""Cumulative sums, products, maxima and minima in one pass over the values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from einmpi.graph.aggregations import AGGREGATIONS, Aggregation
from einmpi.graph.dtypes import DTYPES, computed_dtype
from einmpi.graph.einsum import EinSum, Scan
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
