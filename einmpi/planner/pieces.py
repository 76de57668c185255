"""A vertex in pieces, where it does not fit into memory whole: how large they are (docs/planner.md)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from einmpi.graph.einsum import EinSum, OperandIndex

Sizes = npt.NDArray[
    np.int64
]  # a row for each way to cut, a column for each label: how much of it at a time
Amounts = npt.NDArray[np.float64]  # one for each way; whole numbers, exact as far as memory reaches

MOST_PASSES = 4096  # of a vertex: smaller pieces would take more time than they are worth
LONG = 6  # labels that are cut one by one
_CUTS = [1, *(part for k in range(1, 13) for part in (2**k, 3 * 2 ** (k - 1)))][:-1]


def block_sizes(einsum: EinSum) -> Sizes:
    """How much of each label at a time: all ways to cut the long ones into 1, 2, 3, 4, 6, 8, 12, … parts that make few
    passes; of other labels the first few into single elements.

    Those come first that cut the first labels: their pieces lie in fewer runs of memory.
    """
    extent = {label: max(1, n) for label, n in einsum.extents}
    long = sorted(extent, key=lambda label: -extent[label])[:LONG]
    order = [label for label in reversed(einsum.labels) if label in long]
    rest = [label for label in einsum.labels if label not in long]
    ways = _ways([extent[label] for label in order], 1 if len(order) < 5 else 2)
    columns = dict(zip(order, ways.T, strict=True))
    found = []
    for few in range(len(rest) + 1):
        others = {
            label: np.full(len(ways), 1 if k < few else extent[label])
            for k, label in enumerate(rest)
        }
        found.append(
            np.array([(columns | others)[label] for label in einsum.labels], np.int64).reshape(
                -1, len(ways)
            )
        )
    sizes = np.concatenate(found, axis=1).T
    few_passes: Sizes = sizes[counts(einsum, sizes).prod(axis=1) <= MOST_PASSES]
    return few_passes


def _ways(extents: Sequence[int], step: int) -> Sizes:
    """All combinations of every `step`-th number of parts: at most 20,475, which four labels have, or 18,564 of six.

    What can be done with one extent can be done with a smaller one in as many passes: shares on ranks differ by one.
    """
    sizes, passes = np.empty((1, 0), np.int64), np.ones(1, np.int64)
    for extent in extents:
        parts = list(dict.fromkeys(min(extent, part) for part in _CUTS[::step]))
        size = np.array([-(-extent // part) for part in parts], np.int64)
        passes = np.outer(passes, parts).reshape(-1)
        sizes = np.column_stack([np.repeat(sizes, len(parts), axis=0), np.tile(size, len(sizes))])
        few = passes <= MOST_PASSES
        sizes, passes = sizes[few], passes[few]
    return sizes


def counts(einsum: EinSum, sizes: Sizes) -> Sizes:
    """Into how many parts each label is cut."""
    return -(-np.array([max(extent, 1) for _, extent in einsum.extents], np.int64) // sizes)


def pieces_bytes(
    einsum: EinSum,
    sizes: Sizes,
    shapes: Sequence[Sequence[int]],
    itemsizes: Sequence[int],
    inside: Collection[int],
    ahead: bool,
) -> Amounts:
    """Bytes of the pieces that are in memory at once. Shapes and item sizes are those of the operands and the target.

    With `ahead` there are two of each piece that changes: one in use, one on its way. Where an aggregation is cut, a
    part of it is computed beside what has been aggregated so far. Operands `inside` are in memory anyhow.
    """
    cut = counts(einsum, sizes) > 1
    column = {label: k for k, label in enumerate(einsum.labels)}
    total = np.zeros(len(sizes))
    for operand, (entries, shape, itemsize) in enumerate(
        zip(einsum.operands, shapes, itemsizes, strict=False)
    ):
        if operand not in inside:
            own = [column[entry] for entry in entries if isinstance(entry, str)]
            twice = cut[:, own].any(axis=1) & ahead
            total += _elements(entries, shape, sizes, column) * itemsize * (1 + twice)
    made = _elements(einsum.output, shapes[-1], sizes, column) * itemsizes[-1]
    results = len(einsum.output)
    return (
        total
        + made * (1 + (cut[:, :results].any(axis=1) & ahead))
        + made * cut[:, results:].any(axis=1)
    )


def _elements(
    entries: OperandIndex, shape: Sequence[int], sizes: Sizes, column: dict[str, int]
) -> Amounts:
    """Of an operand's piece: of a dimension that is gathered from, all."""
    total = np.ones(len(sizes))
    for entry, extent in zip(entries, shape, strict=True):
        total *= sizes[:, column[entry]] if isinstance(entry, str) else extent
    return total


@lru_cache(maxsize=1024)  # layers repeat
def least_bytes(
    einsum: EinSum, shapes: tuple[tuple[int, ...], ...], itemsizes: tuple[int, ...]
) -> int:
    """Of the pieces of a vertex, when nothing of it stays in memory."""
    return int(pieces_bytes(einsum, block_sizes(einsum), shapes, itemsizes, (), ahead=False).min())
