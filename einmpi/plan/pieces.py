"""A vertex in pieces, where it does not fit into memory whole: how large they are (docs/planner.md)."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

from einmpi.graph.einsum import EinSum, OperandIndex

MOST_CUTS = 64  # of one label: smaller pieces would take more time than they are worth
LONG, MOST_WAYS = 6, 10_000  # labels that are cut one by one; ways to do so that are looked at


def block_sizes(einsum: EinSum) -> Iterator[dict[str, int]]:
    """How much of each label at a time: all ways to halve the long ones again and again; the others are left whole, or
    are all cut as small as can be.

    Those come first that cut the first labels: their pieces lie in fewer runs of memory.
    """
    extent, least = einsum.extent, smallest(einsum)
    long = sorted(einsum.labels, key=lambda label: -extent[label])[:LONG]
    step = 1
    while prod(len(_halves(extent[label], step)) for label in long) > MOST_WAYS:
        step += 1
    order = [label for label in reversed(einsum.labels) if label in long]
    rest = [{label: size[label] for label in extent if label not in long} for size in (extent, least)]
    for others in rest if rest[0] else rest[:1]:
        for sizes in itertools.product(*(_halves(extent[label], step) for label in order)):
            yield {label: max(size, 1) for label, size in (*others.items(), *zip(order, sizes, strict=True))}


def _halves(extent: int, step: int) -> list[int]:
    """The extent, cut into 1, 2, 4, … parts, or every `step`-th of these; the smallest always."""
    counts = [2**k for k in range(0, MOST_CUTS.bit_length(), step)]
    sizes = [-(-extent // count) for count in (*counts, MOST_CUTS)]
    return sorted({max(size, 1) for size in sizes}, reverse=True)


def smallest(einsum: EinSum) -> dict[str, int]:
    return {label: max(1, -(-extent // MOST_CUTS)) for label, extent in einsum.extents}


def piece_elements(entries: OperandIndex, shape: Sequence[int], size: Mapping[str, int]) -> int:
    """Of an operand's piece: of a dimension that is gathered from, all."""
    return prod(size[e] if isinstance(e, str) else n for e, n in zip(entries, shape, strict=True))


def pieces_bytes(einsum: EinSum, size: Mapping[str, int], shapes: Sequence[Sequence[int]], itemsizes: Sequence[int],
                 inside: Collection[int], ahead: bool) -> int:  # fmt: skip
    """Bytes of the pieces that are in memory at once. Shapes and item sizes are those of the operands and the target.

    With `ahead` there are two of each piece that changes: one in use, one on its way. Where an aggregation is cut, a
    part of it is computed beside what has been aggregated so far. Operands `inside` are in memory anyhow.
    """
    cut = {label for label, extent in einsum.extents if size[label] < extent}
    total = 0
    for operand, (entries, shape, itemsize) in enumerate(zip(einsum.operands, shapes, itemsizes, strict=False)):
        if operand not in inside:
            twice = ahead and any(entry in cut for entry in entries if isinstance(entry, str))
            total += piece_elements(entries, shape, size) * itemsize * (2 if twice else 1)
    made = piece_elements(einsum.output, shapes[-1], size) * itemsizes[-1]
    total += made * (2 if ahead and cut & set(einsum.output) else 1)
    return total + made * bool(cut & set(einsum.aggregated))
