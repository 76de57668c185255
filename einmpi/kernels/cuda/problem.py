"""The work of one EinSum that threads are to share: its loops, and what its operands depend on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from einmpi.graph.index_arithmetic import Interval, interval_of
from einmpi.graph.scalar import Arg, Call, Const, Index, Scalar, gathers_in, rebuild, walk
from einmpi.kernels.cuda.nest import WIDE_OFFSET, CudaNest, WorkSplit
from einmpi.kernels.loop_nest import (
    Axis,
    GatheredDimension,
    IndexedArray,
    accesses_of,
    axes_of,
    gathered_dimensions,
    outer_and_inner,
)

BUSY_THREADS = 2**18  # threads that keep a large GPU busy
BUSY_BLOCKS = 1024  # blocks that do so
SHARED_MEMORY_BYTES = 48 * 2**10  # that every GPU gives to a block
# The most that a thread repeats, in the units of weight_of: a longer text compiles slowly.
MAX_REPEATED_WEIGHT = 400


def size_of(axes: Iterable[Axis]) -> int:
    """Return the number of positions of several loops."""
    return prod(axis.extent for axis in axes)


@dataclass(frozen=True)
class Problem:
    """An EinSum with the layouts of its arrays, strides in elements. The output is the last."""

    function: Scalar
    layouts: tuple[IndexedArray, ...]  # of the operands
    target: IndexedArray
    aggregation_as_written: str | None
    extents: tuple[tuple[str, int], ...]
    aligned: bool  # every array begins at a multiple of PACK_BYTES

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The loops."""
        return tuple(axes_of((*self.layouts, self.target), self.extents))

    @cached_property
    def aggregation(self) -> str | None:
        """The aggregation; None if there is nothing to aggregate."""
        has_aggregated = any(axis.aggregated for axis in self.axes)
        return self.aggregation_as_written if has_aggregated else None

    @cached_property
    def gathered(self) -> tuple[tuple[GatheredDimension, ...], ...]:
        """The dimensions of each operand that an expression indexes."""
        return tuple(map(gathered_dimensions, self.layouts))

    @cached_property
    def counters(self) -> dict[int, int]:
        """The operands that are not arrays but count values of a label, and where these begin."""
        found = {}
        for operand, layout in enumerate(self.layouts):
            if layout.first is not None:
                found[operand] = layout.first
        return found

    @cached_property
    def types(self) -> tuple[str, ...]:
        return tuple(layout.dtype for layout in self.layouts)

    def itemsize(self, array: int) -> int:
        dtypes = (*self.types, self.target.dtype)
        return np.dtype(dtypes[array]).itemsize

    def work_split(
        self,
        scheme: str,
        axes: Sequence[Axis],
        blocks: int,
        parts: int = 1,
        run_values: int = 0,
        **special: Any,
    ) -> WorkSplit:
        """Return the split of these loops into blocks and, of the aggregated ones, into parts.

        `special` is what the nest has in this scheme alone.
        """
        outer, inner = outer_and_inner(axes)
        *reads, out = accesses_of((*self.layouts, self.target), axes)
        fields = {"function": self.function, **special}
        nest = CudaNest(
            scheme=scheme,
            reads=tuple(reads),
            writes=(out,),
            aggregation=self.aggregation,
            output_loops=len(outer),
            loops=len(axes),
            wide=self.needs_wide_offsets(axes),
            checked=self.checked_gathers,
            **fields,
        )
        arguments = nest.arguments(axes, self.counters, self.gathered)
        results = size_of(outer)
        arguments["part_length"] = -(-size_of(inner) // parts)
        arguments["part_stride"] = results if nest.lane_is_aggregated else results * nest.pack
        arguments["run_values"] = run_values
        return WorkSplit(nest, arguments, blocks, parts)

    @cached_property
    def checked_gathers(self) -> tuple[tuple[int, int], ...]:
        """The gathered dimensions, as (operand, number), whose index may be out of range."""
        ranges = {}
        for operand, first in self.counters.items():
            (extent,) = self.layouts[operand].shape
            ranges[operand] = first, first + extent - 1
        checked = []
        for operand, layout in enumerate(self.layouts):
            for number, entry in enumerate(gathers_in(layout.index)):
                reached = range_of(entry, ranges)
                extent = self.gathered[operand][number].extent
                if reached is None or reached[0] < 0 or reached[1] >= extent:
                    checked.append((operand, number))
        return tuple(checked)

    def moves_in_packs(self, operand: int, lane: Axis, pack: int) -> bool:
        """Tell whether an operand is read in packs along the lane because an index moves so.

        The operand does not depend on the lane otherwise, and its index is never out of range.
        """
        if operand >= len(self.layouts) or len(self.gathered[operand]) != 1:
            return False
        if lane.strides[operand] or self.gathered[operand][0].stride != 1:
            return False
        if (operand, 0) in self.checked_gathers:
            return False
        (entry,) = gathers_in(self.layouts[operand].index)
        for counter, first in self.counters.items():
            if lane.strides[counter] and moves_in_packs(entry, counter, first, pack):
                return True
        return False

    def needs_wide_offsets(self, axes: Sequence[Axis]) -> bool:
        """Tell whether an offset, or a number of threads, may not fit into 32 bits."""
        outer, inner = outer_and_inner(axes)
        largest = max(size_of(outer), size_of(inner))
        for array in range(len(self.layouts) + 1):
            reach = sum(abs(axis.strides[array]) * axis.extent for axis in axes)
            if array < len(self.gathered):
                reach += sum(abs(stride) * extent for stride, extent in self.gathered[array])
            largest = max(largest, reach)
        return largest >= WIDE_OFFSET

    def output_axes(self) -> list[Axis]:
        """Return the loops of the output, from its longest stride to its shortest."""
        outer, _ = outer_and_inner(self.axes)
        return sorted(outer, key=lambda axis: (-abs(axis.strides[-1]), axis.extent))

    def aggregated_axes(self) -> list[Axis]:
        """Return the aggregated loops, from the longest stride to the shortest."""
        _, inner = outer_and_inner(self.axes)
        return sorted(inner, key=lambda axis: (-max(map(abs, axis.strides)), axis.extent))

    def axes_of_operand(self, operand: int) -> list[Axis]:
        """Return the loops that an operand depends on, including those of its indices."""
        own = [axis for axis in self.axes if axis.strides[operand]]
        return own + self.axes_of_gathers(operand)

    def axes_of_gathers(self, operand: int) -> list[Axis]:
        """Return the loops that the indices of an operand's gathers depend on."""
        axes: list[Axis] = []
        for entry in self.layouts[operand].index:
            if isinstance(entry, str):
                continue
            for node in walk(entry):
                if isinstance(node, Arg):
                    axes += self.axes_of_operand(node.position)
        return axes


# ---- indices that are arithmetic on counters, such as u[(d+64)%128] -----------------------------


def range_of(entry: Scalar, counters: Mapping[int, Interval]) -> Interval | None:
    """Return bounds of an index, given those of counters by their operands; None if unknown."""
    for node in walk(entry):
        if isinstance(node, Arg) and node.position not in counters:
            return None

    def leaf(node: Scalar) -> Scalar:
        return Index(str(node.position)) if isinstance(node, Arg) else node

    labels = {str(operand): interval for operand, interval in counters.items()}
    return interval_of(rebuild(entry, leaf), labels)


def moves_in_packs(entry: Scalar, counter: int, first: int, pack: int) -> bool:
    """Tell whether an index grows by 1 inside of a pack, and begins at a multiple of its size.

    `counter` is the operand that counts the lane, from `first` on, and the index depends on nothing
    else. `pack` is a power of two.
    """
    match entry:
        case Arg(position):
            return position == counter and first % pack == 0
        case Call("+", (moved, Const(int(number)))) | Call("+", (Const(int(number)), moved)):
            pass
        case Call("-", (moved, Const(int(number)))):
            pass
        case Call("%", (moved, Const(int(number)))) if number > 0:
            pass
        case _:
            return False
    return number % pack == 0 and moves_in_packs(moved, counter, first, pack)
