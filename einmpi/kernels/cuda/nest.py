"""The description of one CUDA kernel: its loop nest, and the arguments of a launch.

A nest holds all that the text of a kernel depends on: which loops there are and how threads share
them. Extents, strides and addresses are arguments, so one compiled text serves every size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from einmpi.graph.scalar import Number, Scalar
from einmpi.kernels.loop_nest import Access, Axis

BLOCK_THREADS = 256  # threads of a block, in every kernel that computes one vertex
WARP_THREADS = 32  # threads that exchange values without a barrier
PACK_BYTES = 16  # the most that a thread reads or writes with one instruction
WIDE_OFFSET = 2**30  # offsets from here on take 64 bits; rounding up to whole blocks adds some


class Parameter(NamedTuple):
    """One argument of a kernel: its role, and the array, loop or gather that it belongs to.

    Roles: `array` is a pointer; `extent`, `multiplier` and `shift` belong to a loop (see
    `divider`); `stride` to an array and a loop; `gather_stride` and `gather_extent` to an array and
    one of its gathered dimensions; `first` is where a loop counter that is read begins. `report` is
    the buffer that tells of indices out of range, `wants_range` asks for the range of these
    indices, `part_length` is the share of the aggregated loops of one part, and `part_stride` the
    distance between the outputs of two parts. `run_values` is how many values of the first
    aggregated loop there are, in the runs of all results together and in none.
    """

    role: str
    numbers: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.role + "_".join(str(number) for number in self.numbers)


class TileShape(NamedTuple):
    """The part of a tile that one thread computes, and how deep a tile reaches into the sum."""

    rows: int
    columns: int
    depth: int


NO_TILE = TileShape(0, 0, 0)


@dataclass(frozen=True)
class Term:
    """A part of ⊗ that depends, apart from the depth, only on the rows or only on the columns.

    A tile computes it once for each row or column, and keeps it in shared memory.
    """

    expression: Scalar
    dtype: str
    is_row: bool
    along_depth: bool  # neighbours in memory are neighbours along the depth


class KernelGather(NamedTuple):
    """A gathered dimension of an operand, as a CUDA kernel takes it."""

    stride: int  # in elements
    extent: int


@dataclass(frozen=True)
class CudaNest:
    """All that the text of a kernel for one vertex depends on.

    The loops of the output come first, then the aggregated ones; in both groups the last loop is
    the fastest. The rows and columns of a tile are the last two loops of the output.
    """

    scheme: str  # how threads share the work: a key of source.SCHEMES
    function: Scalar  # over the operands; in a tile over its terms
    reads: tuple[Access, ...]
    out: Access
    aggregation: str | None
    output_loops: int
    loops: int
    wide: bool  # offsets need 64 bits
    counters: tuple[int, ...] = ()  # reads that are not arrays: the value of a loop counter
    checked: tuple[tuple[int, int], ...] = ()  # those of `gathers` that may be out of range
    transposed: tuple[int, ...] = ()  # reads that are dense along the last but one output loop
    square_edge: int = 0  # edge of the squares in which the transposed reads are loaded
    # Neighbours that a thread processes at once: along the last aggregated loop if
    # `lane_is_aggregated`, else along the last loop of the output.
    pack: int = 1
    packed: tuple[int, ...] = ()  # reads with such neighbours; others have one value for the pack
    team: int = 1  # threads that compute one result together
    lane_is_aggregated: bool = False  # neighbouring threads of a team share the aggregated loops
    elements_per_thread: int = 1
    tile: TileShape = NO_TILE
    terms: tuple[Term, ...] = ()
    # If results are scattered: the read with the start of each result's run along the first
    # aggregated loop; the next read has the stops.
    runs: int | None = None
    masked: Number = 0  # stands for the values that are not in a run

    @property
    def row_loop(self) -> int:
        return self.output_loops - 2

    @property
    def column_loop(self) -> int:
        return self.output_loops - 1

    @property
    def gathers(self) -> tuple[tuple[int, int], ...]:
        """Every gathered dimension as (read, number among the gathers of that read)."""
        found = []
        for read, access in enumerate(self.reads):
            found += [(read, number) for number in range(len(access.gathers))]
        return tuple(found)

    def parameters(self) -> Iterator[Parameter]:
        """Yield the arguments of the kernel in order. The output is the last array."""
        for array in range(len(self.reads) + 1):
            if array not in self.counters:
                yield Parameter("array", (array,))
        if self.checked:
            yield Parameter("report")
            yield Parameter("wants_range")
        yield from loop_parameters(self.loops)
        for array, access in enumerate((*self.reads, self.out)):
            if array in self.counters:
                yield Parameter("first", (array,))
            else:
                yield from (Parameter("stride", (array, loop)) for loop in access.loops)
            for number in range(len(access.gathers)):
                yield Parameter("gather_stride", (array, number))
                if (array, number) in self.checked:
                    yield Parameter("gather_extent", (array, number))
        yield Parameter("part_length")
        yield Parameter("part_stride")
        if self.runs is not None:
            yield Parameter("run_values")


def loop_parameters(loops: int) -> Iterator[Parameter]:
    """Yield the arguments that describe loops: their extents, and how to divide by these."""
    for loop in range(loops):
        yield Parameter("extent", (loop,))
        yield Parameter("multiplier", (loop,))
        yield Parameter("shift", (loop,))


@dataclass(frozen=True)
class WorkSplit:
    """A nest with its sizes, and the number of thread blocks that share the work."""

    nest: CudaNest
    axes: tuple[Axis, ...]  # one for each loop; strides in elements
    gathered: tuple[tuple[KernelGather, ...], ...]  # of each operand
    blocks: int
    parts: int  # of the aggregated loops; if there are several, a second kernel joins them
    part_length: int  # values of the aggregated loops, or packs of values, in a part
    run_values: int = 0

    def argument(self, parameter: Parameter) -> int:
        """Return the value of a parameter that depends on neither addresses nor label ranges."""
        role, numbers = parameter
        if role == "extent":
            return self.axes[numbers[0]].extent
        if role in ("multiplier", "shift"):
            multiplier, shift = divider(self.axes[numbers[0]].extent, self.nest.wide)
            return multiplier if role == "multiplier" else shift
        if role == "stride":
            array, loop = numbers
            return self.axes[loop].strides[array]
        if role in ("gather_stride", "gather_extent"):
            array, number = numbers
            dimension = self.gathered[array][number]
            return dimension.stride if role == "gather_stride" else dimension.extent
        if role == "part_length":
            return self.part_length
        if role == "run_values":
            return self.run_values
        assert role == "part_stride", role
        results = prod(axis.extent for axis in self.axes[: self.nest.output_loops])
        return results if self.nest.lane_is_aggregated else results * self.nest.pack


def divider(extent: int, wide: bool) -> tuple[int, int]:
    """Return the two numbers with which the device function `quotient` divides by an extent.

    A product and a shift are faster than a division, and exact for dividends below 2³¹. Wide
    offsets are divided by the extent itself.
    """
    if wide:
        return extent, 0
    shift = 31 + (extent - 1).bit_length()
    return -(-(2**shift) // extent), shift
