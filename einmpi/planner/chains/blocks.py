"""The blocks of rows in which a chain is computed: how large they are, and the memory they take."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

from einmpi.graph.einsum import EinSum

# Of all blocks of a chain, so that they stay in the cache of a CPU: two large tensors with a power
# of two as the number of rows, and what there is for each row.
CHAIN_BLOCK_BYTES = 9 * 2**20
OPERATIONS_OF_A_BYTE = 8  # that take as long on a CPU as to read or write a byte of memory
MIN_MATRIX_ROWS = 64  # of a block: with fewer, a matrix product would take longer


@dataclass(frozen=True)
class Member:
    """A vertex of a chain on one rank."""

    name: str  # of its result
    inputs: tuple[str, ...]
    einsum: EinSum  # with the extents that the rank has
    itemsize: int  # of its result


def bytes_of_blocks(
    members: Sequence[Member],
    inner: Collection[str],
    rows: Sequence[Sequence[str]],
    block: Sequence[int],
) -> int:
    """Return the most memory that the blocks of a chain's inner tensors take at once.

    A result that aggregates rows of several blocks needs memory for what one block adds to it.
    """
    last_use: dict[str, int] = {}
    for number, member in enumerate(members):
        for name in (*member.inputs, member.name):
            last_use[name] = number
    in_use: dict[str, int] = {}
    peak = 0
    for number, member in enumerate(members):
        extent = member.einsum.extent
        is_partial = False
        for labels, size in zip(rows, block, strict=True):
            label = labels[number]
            if label in member.einsum.aggregated and size < extent[label]:
                is_partial = True
            extent[label] = min(size, extent[label])
        nbytes = prod(extent[label] for label in member.einsum.output) * member.itemsize
        added = 0
        if member.name in inner:
            in_use[member.name] = nbytes
        elif is_partial:
            added = nbytes
        peak = max(peak, sum(in_use.values()) + added)
        for name in (*member.inputs, member.name):
            if last_use[name] == number:
                in_use.pop(name, None)
    return peak


def choose_block(
    members: Sequence[Member],
    inner: Collection[str],
    rows: Sequence[Sequence[str]],
    least_sizes: Sequence[int],
    budget: int,
) -> tuple[int, ...]:
    """Return how many indices of each row make a block of at most `budget` bytes.

    Rows are halved one after another, the first one first, but not below their least size.
    """
    block = [members[0].einsum.extent[labels[0]] for labels in rows]
    for row, least in enumerate(least_sizes):
        while block[row] > least and bytes_of_blocks(members, inner, rows, block) > budget:
            block[row] = max(least, -(-block[row] // 2))
    return tuple(block)
