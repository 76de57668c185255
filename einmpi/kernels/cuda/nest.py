"""What the text of a CUDA kernel depends on, and what the kernel is told when it is started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from einmpi.graph.scalar import Scalar
from einmpi.kernels.loop_nest import Access, Axis, Range

THREADS = 256  # of a block, in every kernel of one vertex
WARP = 32  # threads that can hand values to one another without a barrier
PACK = 16  # bytes that a thread reads at once


@dataclass(frozen=True)
class Term:
    """A part of ⊗ that depends on rows or on columns alone, but for the depth: computed once, kept in a tile."""

    expression: Scalar
    dtype: str
    is_row: bool
    deep: bool  # neighbours in memory go along the depth


@dataclass(frozen=True)
class Nest:
    """All that the text of a kernel depends on. Loops: the output's, then the aggregated ones; the last one of each is
    the fastest. A tile's rows and columns are the last two of the output."""

    way: str  # a key of cuda_source.WAYS
    function: Scalar  # over Args; in a tile over its terms
    reads: tuple[Access, ...]
    out: Access
    aggregation: str | None
    outputs: int
    loops: int
    wide: bool  # places need 64 bits
    counted: tuple[int, ...] = ()  # reads that are no arrays, but count a loop
    turned: tuple[int, ...] = ()  # reads that lie along the last but one loop of the output
    edge: int = 0  # of the squares in which they are read
    pack: int = 1  # neighbours that a thread takes at once, of the last aggregated loop if `along`, else of the output
    packed: tuple[
        int, ...
    ] = ()  # reads that have such neighbours; the others have one value for all of them
    team: int = 1  # threads that fold one result
    along: bool = False  # neighbours in a team go along the aggregated loops
    each: int = 1  # elements that a thread computes
    tile: tuple[int, int, int] = (0, 0, 0)  # rows and columns of a thread, depth
    terms: tuple[Term, ...] = ()

    @property
    def row(self) -> int:
        return self.outputs - 2

    @property
    def column(self) -> int:
        return self.outputs - 1

    @property
    def gathers(self) -> tuple[tuple[int, int], ...]:
        return tuple((m, g) for m, read in enumerate(self.reads) for g in range(len(read.gathers)))

    def parameters(self) -> Iterator[tuple[str, int, int]]:
        """The names of a kernel's arguments, in order: pointers p, with the output's last; t, what it tells; extents n
        of the loops and what divides by them, m and z; strides s; of a gather its stride j and extent e; first values b
        of what counts; c, how much of the aggregated loops a part takes, and o, how far apart parts of the output
        are."""
        for m in range(len(self.reads) + 1):
            if m not in self.counted:
                yield "p", m, 0
        if self.gathers:
            yield from (("t", 0, 0), ("r", 0, 0))
        for k in range(self.loops):
            yield from ((letter, k, 0) for letter in "nmz")
        for m, access in enumerate((*self.reads, self.out)):
            if m in self.counted:
                yield "b", m, 0
            else:
                yield from (("s", m, k) for k in access.loops)
            for g in range(len(access.gathers)):
                yield from (("j", m, g), ("e", m, g))
        yield from (("c", 0, 0), ("o", 0, 0))


@dataclass(frozen=True)
class Plan:
    nest: Nest
    axes: tuple[Axis, ...]  # strides in elements
    jumps: tuple[tuple[Range, ...], ...]  # stride and extent of each gathered dimension
    blocks: int
    parts: int  # of the aggregated loops; more than one: a second kernel joins them
    span: int  # values, or packs of them, in a part

    def value(self, letter: str, x: int, y: int) -> int:
        """An argument that is no pointer."""
        if letter == "n":
            return self.axes[x].extent
        if letter in "mz":
            return divider(self.axes[x].extent, self.nest.wide)[letter == "z"]
        if letter == "s":
            return self.axes[y].strides[x]
        if letter in "je":
            return self.jumps[x][y][letter == "e"]
        if letter == "c":
            return self.span
        results = prod(axis.extent for axis in self.axes if not axis.aggregated)
        return results if self.nest.along else results * self.nest.pack


def divider(extent: int, wide: bool) -> tuple[int, int]:
    """What `quotient` of cuda_words divides by."""
    if wide:
        return extent, 0
    shift = 31 + (extent - 1).bit_length()
    return -(-(2**shift) // extent), shift
