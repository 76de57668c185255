"""Scans in two passes on CPUs: the total of each block, and the scan inside of blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Number
from einmpi.kernels.cpu.scan import lines_first, scan_lines
from einmpi.kernels.operands import Array


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
