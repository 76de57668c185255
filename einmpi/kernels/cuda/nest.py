"""The description of one CUDA kernel: its loop nest, and the arguments of a launch.

A nest holds all that the text of a kernel depends on: which loops there are and how threads share
them. Extents, strides and addresses are arguments, so one compiled text serves every size.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from einmpi.caches import bounded_cache
from einmpi.graph.scalar import Number, Scalar
from einmpi.kernels.cuda import driver
from einmpi.kernels.cuda.driver import DeviceArray
from einmpi.kernels.index_sets import LabelRuns
from einmpi.kernels.loop_nest import Access, Axis, GatheredDimension, loop_arguments
from einmpi.process.startup import COMPILING, first_use

BLOCK_THREADS = 256  # threads of a block, in every kernel that computes one vertex
WARP_THREADS = 32  # threads that exchange values without a barrier
PACK_BYTES = 16  # the most that a thread reads or writes with one instruction
WIDE_OFFSET = 2**30  # offsets from here on take 64 bits; rounding up to whole blocks adds some


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


@dataclass(frozen=True, kw_only=True)
class Nest:
    """The loops of a kernel, and the arrays that it goes through.

    The arrays that it reads are numbered first, then those that it writes.
    """

    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    loops: int
    wide: bool  # offsets need 64 bits
    checked: tuple[tuple[int, int], ...] = ()  # gathers whose index may be out of range

    @property
    def arrays(self) -> tuple[Access, ...]:
        return (*self.reads, *self.writes)

    def parameters(self) -> list[str]:
        """Return the names of the kernel's arguments in order.

        `array0` is the address of an array, `first0` where a loop counter that is read begins.
        `multiplier0` and `shift0` belong to a loop (see `divider`). `report` is the buffer that
        tells of indices out of range, and `wants_range` asks for the range of these indices. The
        other names are those of `loop_arguments`.
        """
        names = [f"array{k}" for k, access in enumerate(self.arrays) if not access.counts]
        if self.checked:
            names += ["report", "wants_range"]
        for loop in range(self.loops):
            names += [f"extent{loop}", f"multiplier{loop}", f"shift{loop}"]
        for array, access in enumerate(self.arrays):
            if access.counts:
                names.append(f"first{array}")
            else:
                names += [f"stride{array}_{loop}" for loop in access.loops]
            for number in range(len(access.gathers)):
                names.append(f"gather_stride{array}_{number}")
                if (array, number) in self.checked:
                    names.append(f"gather_extent{array}_{number}")
        return names

    def arguments(
        self,
        axes: Sequence[Axis],
        first_values: Mapping[int, int],
        gathered: Sequence[Sequence[GatheredDimension]] = (),
    ) -> dict[str, int]:
        """Return the arguments by name, without addresses.

        `first_values` belong to the counters. All strides are in elements.
        """
        found = loop_arguments(axes, gathered) | {"report": 0, "wants_range": 0}
        for loop, axis in enumerate(axes):
            found[f"multiplier{loop}"], found[f"shift{loop}"] = divider(axis.extent, self.wide)
        for array, first in first_values.items():
            found[f"first{array}"] = first
        return found


@dataclass(frozen=True, kw_only=True)
class CudaNest(Nest):
    """All that the text of a kernel for one vertex depends on.

    The loops of the output come first, then the aggregated ones; in both groups the last loop is
    the fastest. The rows and columns of a tile are the last two loops of the output.
    """

    scheme: str  # how threads share the work: a key of source.SCHEMES
    function: Scalar  # over the operands; in a tile over its terms
    aggregation: str | None
    output_loops: int
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
    def aggregated_loops(self) -> range:
        return range(self.output_loops, self.loops)

    @property
    def out(self) -> Access:
        return self.writes[0]

    def parameters(self) -> list[str]:
        """Return the names of the arguments; those that only these kernels have are the last.

        `part_length` is the share of the aggregated loops of one part, and `part_stride` the
        distance between the outputs of two parts. `run_values` is how many values of the first
        aggregated loop there are, in the runs of all results together and in none.
        """
        names = [*super().parameters(), "part_length", "part_stride"]
        if self.runs is not None:
            names.append("run_values")
        return names


@dataclass(frozen=True)
class WorkSplit:
    """A nest with its arguments, and the number of thread blocks that share the work."""

    nest: CudaNest
    arguments: Mapping[str, int]  # without addresses
    blocks: int
    parts: int  # of the aggregated loops; if there are several, a second kernel joins them


def divider(extent: int, wide: bool) -> tuple[int, int]:
    """Return the two numbers with which the device function `quotient` divides by an extent.

    A product and a shift are faster than a division, and exact for dividends below 2³¹. Wide
    offsets are divided by the extent itself.
    """
    if wide:
        return extent, 0
    shift = 31 + (extent - 1).bit_length()
    return -(-(2**shift) // extent), shift


# ---- launch --------------------------------------------------------------------------------------
#
# Compiled kernels, and calls that are prepared once and then repeated.
#
# A repeated call only fills in addresses: everything else about it was worked out the first
# time.


# numpy rounds after every operation. A product fused with a sum would round once, and a·b − a·b
# would not be 0. Kernels ask for a fused operation where they want one.
EXACT_OPTIONS = ("-std=c++17", "--fmad=false")
FAST_OPTIONS = ("-std=c++17", "--use_fast_math")

Grid = tuple[tuple[int, int], tuple[int]]  # blocks in both directions, threads of a block


class Options(NamedTuple):
    """What an EinSum means here besides its arrays, and what its method may do."""

    runs: LabelRuns = ()
    fast_math: bool = False  # methods that round more
    tf32: bool = False  # float32 products with a fraction of ten bits
    strict: bool = False  # only methods that give inf and nan where the program as written does


@bounded_cache(1024)
def compile_kernel(text: str, fast: bool, in_place: bool = False) -> Any:
    """Compile the function `kernel` of a CUDA text.

    With `in_place`, the kernel may write over an array that it reads, element by element.
    CuPy caches compiled kernels on disk, and several processes may compile at the same time.
    """
    options = FAST_OPTIONS if fast else EXACT_OPTIONS
    if in_place:
        text = f"#define __restrict__\n{text}"
    with first_use(COMPILING):
        return driver.cupy().RawModule(code=text, options=options).get_function("kernel")


@dataclass(frozen=True)
class Launch:
    """A kernel with all of its arguments except the addresses of arrays."""

    kernel: Any
    grid: Grid
    names: Sequence[str]  # of the arguments
    values: tuple[int, ...]
    pointers: tuple[tuple[int, int], ...]  # (position of an argument, the array it points to)

    def __call__(self, addresses: Sequence[int], **changed: int) -> None:
        """Launch the kernel; some arguments may be others than usual."""
        values = list(self.values)
        for position, array in self.pointers:
            values[position] = addresses[array]
        for name, value in changed.items():
            values[self.names.index(name)] = value
        self.kernel(*self.grid, tuple(values))


def prepare_launch(
    kernel: Any, grid: Grid, names: Sequence[str], arguments: Mapping[str, int]
) -> Launch:
    """Return a launch; `names` are those of all arguments, of which array0, … are addresses."""
    values = []
    pointers = []
    for position, name in enumerate(names):
        if name.startswith("array"):
            pointers.append((position, int(name.removeprefix("array"))))
            values.append(0)
        else:
            values.append(arguments[name])
    return Launch(kernel, grid, names, tuple(values), tuple(pointers))


def is_in_place(operands: Iterable[DeviceArray], target: DeviceArray) -> bool:
    """Return whether a target is one of the operands."""
    return target.data.ptr in [array.data.ptr for array in operands]


def key_of(array: DeviceArray) -> Hashable:
    """Return everything about an array that a prepared call depends on.

    The alignment is part of it: a view into an array may be aligned although the array is not.
    """
    return array.dtype, array.shape, array.strides, array.data.ptr % PACK_BYTES
