"""Cumulative sums, products, maxima and minima in one pass over the values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from einmpi.graph.aggregations import AGGREGATIONS, Aggregation
from einmpi.graph.dtypes import DTYPES, computed_dtype
from einmpi.graph.einsum import EinSum
from einmpi.graph.forms.scan_blocks import BlockTotals
from einmpi.kernels.operands import Array
from einmpi.kernels.prepared import PreparedCall
from einmpi.kernels.scans import find_scan, has_whole_blocks, scanned_dimension

BLOCK_ELEMENTS = 2**17  # of a temporary, so that it stays in the cache


def prepare_scan(einsum: EinSum, index: Mapping[str, Array], dtype: str) -> PreparedCall | None:
    """Return what computes a scan, or a pass of a scan in two passes; None for all else.

    `index` has the global indices of a label's positions, for labels that do not start at 0. The
    output has this dtype. The first pass aggregates blocks, the second one scans inside of them.
    """
    totals = einsum.block_totals
    if totals is not None and has_whole_blocks(einsum, totals, index, dtype):
        return lambda operands, out: _compute_totals(einsum, totals, operands[0], out, index)
    scan = find_scan(einsum, index, dtype)
    if scan is None:
        return None
    record = AGGREGATIONS[einsum.required_aggregation]

    def compute(operands: Sequence[Array], out: Array) -> None:
        source = lines_first(operands[scan.values], einsum.operands[scan.values], scan.lines)
        offsets = lines_first(operands[scan.offsets], einsum.operands[scan.offsets], scan.lines)
        target = lines_first(out, einsum.output, scan.lines)
        with np.errstate(all="ignore"):
            for value, result, length, results, offset, counts in scan.segments:
                scan_lines(
                    record,
                    source[..., value : value + length],
                    target[..., result : result + results],
                    counts,
                    scan.masked,
                    None if offset < 0 else offsets[..., offset],
                )

    return compute


def lines_first(array: Array, entries: Sequence[object], lines: Sequence[str]) -> Array:
    """Return an array with the dimensions of the lines first, then the one that is scanned."""
    order = [entries.index(label) for label in lines]
    return array.transpose([*order, scanned_dimension(entries, lines)])


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


def _compute_totals(
    einsum: EinSum, form: BlockTotals, operand: Array, out: Array, index: Mapping[str, Array]
) -> None:
    """Compute the total of each block at hand."""
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
        with np.errstate(all="ignore"):
            target[..., place] = record.combine.reduce(
                values, axis=-1, dtype=out.dtype, initial=neutral
            )
