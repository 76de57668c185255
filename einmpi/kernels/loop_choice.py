"""The fastest loops for an EinSum: which label becomes the vector lanes, which the rows, which the
outer loops. Only extents and strides decide, so every run gets the same loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from einmpi.graph.scalar import Scalar, gathers_in
from einmpi.kernels.loop_nest import (
    Axis,
    BoundNest,
    GatheredDimension,
    IndexedArray,
    Nest,
    accesses_of,
    axes_of,
)

PACKED_BYTES = 2**22  # of an operand that are copied at a time, to be contiguous along the lanes
MIN_PACKED_LANES = 512  # that such a copy has, if there are so many
MIN_PACKED_READS = 8  # how often such a copy must be read to be worth it
STRIP_BYTES = 2**15  # of lanes without rows: memory streams, and they fit into the first cache
AGGREGATED_LANES_BYTES = 2**7  # of lanes aggregated into one result: they fit into registers
NARROW_TILE_LANES = 32  # of a tile, if there are no more
TILE_LANES = 128


@lru_cache(maxsize=4096)
def bind_nest(
    function: Scalar,
    operands: tuple[IndexedArray, ...],
    target: IndexedArray,
    aggregation: str | None,
    extents: tuple[tuple[str, int], ...],
) -> BoundNest:
    """Return the fastest loops for an EinSum on arrays with these strides.

    Parameters
    ----------
    function
        ⊗ over Args, one for each operand.
    operands, target
        The arrays that the loops read, and the one that they write.
    aggregation
        The name of ⊕, or None if there is no aggregation.
    extents
        The extent of every label.
    """
    arrays = (*operands, target)
    choice = _LoopChoice(
        axes=axes_of(arrays, extents),
        itemsizes=[np.dtype(array.dtype).itemsize for array in arrays],
        is_gathered=[bool(gathers_in(array.index)) for array in arrays],
    )
    # Of equally good axes the last one: its label is the last of an index.
    lane = min(reversed(choice.axes), key=choice.cost_of_lanes)
    axes, has_rows = choice.loop_order(lane)
    packed = tuple(k for k in range(len(operands)) if choice.is_packed(k, lane))
    *reads, out = accesses_of(arrays, axes, lane, packed)
    if has_rows:
        width = NARROW_TILE_LANES if lane.extent <= NARROW_TILE_LANES else TILE_LANES
    elif lane.aggregated:
        width = AGGREGATED_LANES_BYTES // max(choice.itemsizes)
    else:
        width = STRIP_BYTES // max(choice.itemsizes)
    nest = Nest(
        function=function,
        reads=tuple(reads),
        out=out,
        aggregation=aggregation if choice.aggregates else None,
        output_loops=sum(not axis.aggregated for axis in axes),
        loops=len(axes),
        aggregates_lanes=lane.aggregated,
        has_rows=has_rows,
        width=width,
    )
    return BoundNest(nest, axes, packed, tuple(map(gathered_dimensions, operands)))


def gathered_dimensions(array: IndexedArray) -> tuple[GatheredDimension, ...]:
    """Return the dimensions of an array that are indexed by expressions."""
    dimensions = []
    for entry, stride, extent in zip(array.index, array.strides, array.shape, strict=True):
        if not isinstance(entry, str):
            dimensions.append(GatheredDimension(stride, extent))
    return tuple(dimensions)


@dataclass(frozen=True)
class _LoopChoice:
    """The axes and arrays among which the lanes and the order of loops are chosen."""

    axes: Sequence[Axis]
    itemsizes: Sequence[int]  # of the operands, then of the output
    is_gathered: Sequence[bool]

    @property
    def aggregates(self) -> bool:
        """Whether there is anything to aggregate."""
        return any(axis.aggregated for axis in self.axes)

    def cost_of_lanes(self, lane: Axis) -> float:
        """Return the cost of a step with these lanes, relative to a load of a contiguous vector.

        Short lanes fill vectors badly, and aggregated lanes must be combined in the end. Only the
        order of the costs matters.
        """
        output = len(self.itemsizes) - 1
        reads = sum(self._access_cost(array, lane) for array in range(output))
        if lane.aggregated:
            return (reads + 0.5) * (1 + 64 / lane.extent)
        # With aggregation, the output is written only once for many steps.
        writes = (0.25 if self.aggregates else 1.0) * self._access_cost(output, lane)
        return (reads + writes) * (1 + 8 / lane.extent)

    def _access_cost(self, array: int, lane: Axis) -> float:
        """Return the cost of one vector of an array.

        A value that is the same for all lanes is loaded once for many vectors. Lanes that are
        apart in memory are loaded one by one, unless the operand is packed beforehand.
        """
        stride = lane.strides[array]
        if stride == 0:
            return 0.25
        if stride == self.itemsizes[array]:
            return 1.0
        return 1.3 if self.is_packed(array, lane) else 4.0

    def is_packed(self, array: int, lane: Axis) -> bool:
        """Return whether an operand is copied to be contiguous along the lanes.

        It pays for an operand that is not contiguous yet, if the copy is read often enough: once
        for each position of the axes that the operand does not depend on. The copy must fit into
        PACKED_BYTES with all aggregated positions and a minimum of lanes.
        """
        is_output = array == len(self.itemsizes) - 1
        is_contiguous = lane.strides[array] in (0, self.itemsizes[array])
        if is_output or is_contiguous or lane.aggregated or self.is_gathered[array]:
            return False
        own_axes = [axis for axis in self.axes if axis.strides[array]]
        other_axes = [axis for axis in self.axes if not axis.strides[array]]
        reads = prod(axis.extent for axis in other_axes)
        depth = prod(axis.extent for axis in own_axes if axis.aggregated)
        lanes = min(MIN_PACKED_LANES, lane.extent)
        fits = depth * self.itemsizes[array] * lanes <= PACKED_BYTES
        return self.aggregates and reads >= MIN_PACKED_READS and fits

    def loop_order(self, lane: Axis) -> tuple[tuple[Axis, ...], bool]:
        """Return the axes from the outermost loop inwards, and whether there are rows.

        Loops with long strides in the output come first. The steps are the longest aggregated
        loop. The rows are the longest loop that makes use of the same loads.
        """
        outer = []
        inner = []
        for axis in self.axes:
            if axis is lane:
                continue
            if axis.aggregated:
                inner.append(axis)
            else:
                outer.append(axis)
        outer.sort(key=lambda axis: -abs(axis.strides[-1]))
        inner.sort(key=lambda axis: axis.extent)
        if lane.aggregated:
            return (*outer, *inner, lane), False
        suitable = [axis for axis in outer if self._suits_as_rows(axis, lane, bool(inner))]
        if not suitable:
            return (*outer, lane, *inner), False
        row = max(suitable, key=lambda axis: axis.extent)
        before = [axis for axis in outer if axis is not row]
        return (*before, row, lane, *inner), True

    def _suits_as_rows(self, row: Axis, lane: Axis, has_steps: bool) -> bool:
        """Return whether rows along this axis save loads.

        With steps, it must use a vector of an operand again that the lanes have loaded. Without,
        it pays to walk in squares through an array that is contiguous along the rows.
        """
        arrays = list(zip(lane.strides, row.strides, self.itemsizes, strict=True))
        if has_steps:
            return any(along and not across for along, across, _ in arrays[:-1])
        return any(across == size and along not in (0, size) for along, across, size in arrays)
