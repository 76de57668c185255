"""The pieces in which a vertex is computed where it does not fit into memory whole."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import IndexEntries

# A row for each way to cut, a column for each label: how many of its indices a piece has.
Sizes = npt.NDArray[np.int64]
# A number for each way to cut. Whole numbers, exact as far as memory reaches.
Amounts = npt.NDArray[np.float64]

MOST_PASSES = 4096  # of a vertex: smaller pieces would take more time than they are worth
MOST_LABELS_CUT = 6  # labels for which all numbers of parts are tried: the longest
# 1, 2, 3, 4, 6, 8, 12, 16, … 4096
PART_COUNTS = [1, *(part for k in range(1, 13) for part in (2**k, 3 * 2 ** (k - 1)))][:-1]


def block_sizes(einsum: EinSum) -> Sizes:
    """Return the sizes of pieces, for all ways to cut that make at most MOST_PASSES passes.

    Long labels are cut into 1, 2, 3, 4, 6, 8, 12, … parts in all combinations; of the other labels
    the first few are cut into single indices. Ways that cut the first labels come first: their
    pieces lie in fewer runs of memory.
    """
    extent = {label: max(1, n) for label, n in einsum.extents}
    longest = sorted(extent, key=lambda label: -extent[label])[:MOST_LABELS_CUT]
    long_labels = [label for label in reversed(einsum.labels) if label in longest]
    short_labels = [label for label in einsum.labels if label not in longest]
    step = 1 if len(long_labels) < 5 else 2
    ways = _ways_to_cut([extent[label] for label in long_labels], step)
    columns = dict(zip(long_labels, ways.T, strict=True))
    found = []
    for single in range(len(short_labels) + 1):  # how many short labels are cut
        for position, label in enumerate(short_labels):
            size = 1 if position < single else extent[label]
            columns[label] = np.full(len(ways), size)
        table = np.array([columns[label] for label in einsum.labels], np.int64)
        found.append(table.reshape(-1, len(ways)))
    sizes = np.concatenate(found, axis=1).T
    few_passes: Sizes = sizes[counts(einsum, sizes).prod(axis=1) <= MOST_PASSES]
    return few_passes


def _ways_to_cut(extents: Sequence[int], step: int) -> Sizes:
    """Return the sizes of pieces for all combinations of every `step`-th number of parts.

    There are at most 20,475 ways for four labels, or 18,564 for six. A way for one extent makes as
    many passes with a smaller one, which matters because shares on ranks differ by one.
    """
    sizes = np.empty((1, 0), np.int64)
    passes = np.ones(1, np.int64)
    for extent in extents:
        parts = list(dict.fromkeys(min(extent, part) for part in PART_COUNTS[::step]))
        size = np.array([-(-extent // part) for part in parts], np.int64)
        # Every way so far with every number of parts of this label.
        passes = np.outer(passes, parts).reshape(-1)
        sizes = np.column_stack([np.repeat(sizes, len(parts), axis=0), np.tile(size, len(sizes))])
        few = passes <= MOST_PASSES
        sizes = sizes[few]
        passes = passes[few]
    return sizes


def counts(einsum: EinSum, sizes: Sizes) -> Sizes:
    """Return the number of parts of each label."""
    extents = np.array([max(extent, 1) for _, extent in einsum.extents], np.int64)
    return -(-extents // sizes)


def pieces_bytes(
    einsum: EinSum,
    sizes: Sizes,
    shapes: Sequence[Sequence[int]],
    itemsizes: Sequence[int],
    inside: Collection[int],
    ahead: bool,
) -> Amounts:
    """Return the bytes of the pieces that are in memory at once, for each way to cut.

    `shapes` and `itemsizes` are those of the operands, then of the result. The operands `inside`
    are in memory anyway. With `ahead` there are two of each piece that changes, one in use and one
    on its way. Where an aggregated label is cut, memory holds both the result so far and the next
    summand.
    """
    is_cut = counts(einsum, sizes) > 1
    column = {label: k for k, label in enumerate(einsum.labels)}
    total = np.zeros(len(sizes))
    for operand, entries in enumerate(einsum.operands):
        if operand in inside:
            continue
        own_columns = [column[entry] for entry in entries if isinstance(entry, str)]
        twice = is_cut[:, own_columns].any(axis=1) & ahead
        elements = _elements(entries, shapes[operand], sizes, column)
        total += elements * itemsizes[operand] * (1 + twice)

    result_bytes = _elements(einsum.output, shapes[-1], sizes, column) * itemsizes[-1]
    outputs = len(einsum.output)
    result_twice = is_cut[:, :outputs].any(axis=1) & ahead
    aggregation_is_cut = is_cut[:, outputs:].any(axis=1)
    return total + result_bytes * (1 + result_twice) + result_bytes * aggregation_is_cut


def _elements(
    entries: IndexEntries, shape: Sequence[int], sizes: Sizes, column: dict[str, int]
) -> Amounts:
    """Return the elements of a tensor's piece; a gathered dimension is needed whole."""
    total = np.ones(len(sizes))
    for entry, extent in zip(entries, shape, strict=True):
        total *= sizes[:, column[entry]] if isinstance(entry, str) else extent
    return total


@lru_cache(maxsize=1024)  # layers repeat
def least_bytes(
    einsum: EinSum, shapes: tuple[tuple[int, ...], ...], itemsizes: tuple[int, ...]
) -> int:
    """Return the bytes of the smallest pieces of a vertex, when nothing of it stays in memory."""
    sizes = block_sizes(einsum)
    return int(pieces_bytes(einsum, sizes, shapes, itemsizes, (), ahead=False).min())
