"""Which label becomes which loop of a kernel: rows, vectors of lanes, steps. Only extents and strides decide."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np

from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Call, Scalar, walk

PACKED_BYTES = 2**22  # bytes of an operand that are copied at a time, to lie dense along the lanes
MIN_PACKED_READS = 8  # how often such a copy must be read
STRIP_BYTES = (
    2**15
)  # bytes of lanes without rows: long enough for memory to stream, short enough for the first cache
AGGREGATED_LANES_BYTES = (
    2**7
)  # bytes of lanes that are folded into one result: as many as fit into registers

Range: TypeAlias = tuple[int, int]
Index: TypeAlias = tuple[str | Scalar, ...]


@dataclass(frozen=True)
class Access:
    """How a kernel reaches an array: its dtype, the loops it depends on, whether it lies dense along the lanes."""

    dtype: str
    loops: tuple[int, ...]
    dense: bool
    gathers: tuple[Scalar, ...] = ()  # one index expression a gathered dimension


@dataclass(frozen=True)
class Nest:
    """Loops from the outermost inwards, the output's before the aggregated ones, and what is computed in them.

    Lanes run innermost, in vectors: they are the last loop of the output, or the last one of all. Rows, the loop of the
    output before them, and steps, the last aggregated loop, are unrolled, so that what was loaded is used again.
    """

    function: Scalar  # over Args: the values of a label are an array too
    reads: tuple[Access, ...]
    out: Access
    aggregation: str | None
    outputs: int  # loops of the output
    loops: int
    folds: bool  # the lanes are aggregated
    tiled: bool  # there are rows
    width: int  # lanes worked on at a time

    @property
    def lane(self) -> int:
        return self.loops - 1 if self.folds else self.outputs - 1

    @property
    def row(self) -> int | None:
        return self.outputs - 2 if self.tiled else None

    @property
    def step(self) -> int | None:
        return self.loops - 1 if self.loops > self.outputs else None

    @property
    def unrolled(self) -> tuple[int, int]:
        """How many rows and steps at a time. A long function is not repeated: it would take long to compile."""
        nodes = walk(self.function)
        weight = len(nodes) + 8 * sum(
            isinstance(n, Call) and OPERATIONS[n.op].cpu_is_long for n in nodes
        )
        weight *= 3 if any(read.dtype.startswith("complex") for read in self.reads) else 1
        return (2 if self.tiled and weight <= 16 else 1), (
            4 if weight <= 8 else 2 if weight <= 16 else 1
        )

    def parameters(self) -> Iterator[tuple[str, int, int]]:
        """The names of what a kernel is told, in this order: the range from a to b of every loop; of every array the
        address A and a stride S for each of its loops, the output being the last one; of every gather its stride J and
        extent N. L and H, the least and the greatest index of a gather, are what it tells."""
        for loop in range(self.loops):
            yield from (("a", loop, 0), ("b", loop, 0))
        for array, access in enumerate((*self.reads, self.out)):
            yield "A", array, 0
            yield from (("S", array, loop) for loop in access.loops)
            for k in range(len(access.gathers)):
                yield from (("J", array, k), ("N", array, k), ("L", array, k), ("H", array, k))


@dataclass(frozen=True)
class IndexedArray:
    """An array and what indexes its dimensions: labels, or expressions over Args."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    index: Index


class Axis(NamedTuple):
    """A loop to be. Labels that lie behind one another in every array are one. Strides in bytes, the output's last."""

    extent: int
    aggregated: bool
    strides: tuple[int, ...]


@dataclass(frozen=True)
class BoundNest:
    """A nest, the axes of its loops, the arrays that are packed, and stride and extent of each gathered dimension."""

    nest: Nest
    axes: tuple[Axis, ...]
    packed: tuple[int, ...]
    jumps: tuple[tuple[Range, ...], ...]

    @cached_property
    def position(self) -> dict[tuple[str, int, int], int]:
        """Where a parameter stands."""
        return {name: k for k, name in enumerate(self.nest.parameters())}

    @cached_property
    def values(self) -> np.ndarray:
        """The parameters of the whole nest; the addresses are missing."""
        first = {"a": 0, "A": 0, "L": 2**63 - 1, "H": -(2**63)}

        def value(letter: str, x: int, y: int) -> int:
            if letter == "b":
                return self.axes[x].extent
            if letter == "S":
                return self.axes[y].strides[x]
            return self.jumps[x][y]["JN".index(letter)] if letter in "JN" else first[letter]

        return np.array([value(*name) for name in self.position], np.int64)


@lru_cache(maxsize=4096)
def bind_nest(
    function: Scalar,
    layouts: tuple[IndexedArray, ...],
    target: IndexedArray,
    aggregation: str | None,
    extents: tuple[tuple[str, int], ...],
) -> BoundNest:
    arrays = (*layouts, target)
    axes = axes_of(arrays, extents)
    sizes = [np.dtype(layout.dtype).itemsize for layout in arrays]
    gathers = [
        tuple(entry for entry in layout.index if not isinstance(entry, str)) for layout in arrays
    ]
    jumps = [
        tuple(
            (layout.strides[k], layout.shape[k])
            for k, entry in enumerate(layout.index)
            if not isinstance(entry, str)
        )
        for layout in layouts
    ]
    fixed = [bool(gather) for gather in gathers]
    lane = min(reversed(axes), key=lambda axis: _lane_cost(axis, axes, sizes, fixed))
    order, tiled = _order(lane, axes, sizes)
    packed = tuple(m for m in range(len(layouts)) if _is_packed(m, lane, axes, sizes, fixed))
    reduces = any(axis.aggregated for axis in axes)
    accesses = [
        Access(
            layout.dtype,
            tuple(k for k, axis in enumerate(order) if axis.strides[m]),
            lane.strides[m] == sizes[m] or m in packed,
            gathers[m],
        )
        for m, layout in enumerate(arrays)
    ]
    widths = (
        (32 if lane.extent <= 32 else 128)
        if tiled
        else (AGGREGATED_LANES_BYTES if lane.aggregated else STRIP_BYTES) // max(sizes)
    )
    nest = Nest(
        function,
        tuple(accesses[:-1]),
        accesses[-1],
        aggregation if reduces else None,
        sum(not axis.aggregated for axis in axes),
        len(axes),
        lane.aggregated,
        tiled,
        widths,
    )
    return BoundNest(nest, order, packed, tuple(jumps))


def axes_of(arrays: Sequence[IndexedArray], extents: Sequence[tuple[str, int]]) -> list[Axis]:
    """The labels with more than one value; where there is none, one axis that goes nowhere."""
    tables = []
    for layout in arrays:
        strides: dict[str | Scalar, int] = {}
        for entry, stride in zip(layout.index, layout.strides, strict=True):
            strides[entry] = (
                strides.get(entry, 0) + stride
            )  # a diagonal goes along both dimensions at once
        tables.append(strides)
    output = arrays[-1].index
    axes = [
        Axis(extent, label not in output, tuple(strides.get(label, 0) for strides in tables))
        for label, extent in extents
        if extent > 1
    ]
    return _merged(axes or [Axis(1, False, (0,) * len(arrays))])


def _merged(axes: list[Axis]) -> list[Axis]:
    for p, q in itertools.permutations(range(len(axes)), 2):
        a, b = axes[p], axes[q]
        if a.aggregated == b.aggregated and a.strides == tuple(s * b.extent for s in b.strides):
            rest = [axis for k, axis in enumerate(axes) if k not in (p, q)]
            return _merged([*rest, Axis(a.extent * b.extent, a.aggregated, b.strides)])
    return axes


def _lane_cost(
    lane: Axis, axes: Sequence[Axis], sizes: Sequence[int], fixed: Sequence[bool]
) -> float:
    """What a step costs with these lanes, a load of neighbours being 1. Only which lanes cost least matters."""

    def access(array: int) -> float:
        if lane.strides[array] in (0, sizes[array]):
            return 1.0 if lane.strides[array] else 0.25
        return 1.3 if _is_packed(array, lane, axes, sizes, fixed) else 4.0

    reads = sum(access(array) for array in range(len(sizes) - 1))
    if lane.aggregated:
        return (reads + 0.5) * (1 + 64 / lane.extent)  # in the end the lanes are folded
    rare = 0.25 if any(axis.aggregated for axis in axes) else 1.0
    return (reads + rare * access(len(sizes) - 1)) * (1 + 8 / lane.extent)


def _is_packed(
    array: int, lane: Axis, axes: Sequence[Axis], sizes: Sequence[int], fixed: Sequence[bool]
) -> bool:
    """Whether an operand is copied to lie dense along the lanes: if it does not, and is read often enough."""
    if (
        array == len(sizes) - 1
        or lane.strides[array] in (0, sizes[array])
        or lane.aggregated
        or fixed[array]
    ):
        return False
    times = prod(axis.extent for axis in axes if not axis.strides[array])
    deep = prod(axis.extent for axis in axes if axis.strides[array] and axis.aggregated)
    reduces = any(axis.aggregated for axis in axes)
    return (
        reduces
        and times >= MIN_PACKED_READS
        and deep * sizes[array] * min(512, lane.extent) <= PACKED_BYTES
    )


def _order(lane: Axis, axes: Sequence[Axis], sizes: Sequence[int]) -> tuple[tuple[Axis, ...], bool]:
    """The axes from the outermost loop inwards, and whether the one before the lanes becomes rows."""
    outer = sorted(
        (a for a in axes if not a.aggregated and a is not lane), key=lambda a: -abs(a.strides[-1])
    )
    inner = sorted((a for a in axes if a.aggregated and a is not lane), key=lambda a: a.extent)
    if lane.aggregated:
        return (*outer, *inner, lane), False

    def suits(row: Axis) -> bool:
        pairs = zip(lane.strides, row.strides, sizes, strict=True)
        if inner:  # it uses once more what the lanes load
            return any(along and not across for along, across, _ in list(pairs)[:-1])
        return any(
            across == size and along not in (0, size) for along, across, size in pairs
        )  # a transposed array

    row = max(filter(suits, outer), key=lambda a: a.extent, default=None)
    if row is None:
        return (*outer, lane, *inner), False
    return (*(a for a in outer if a is not row), row, lane, *inner), True
