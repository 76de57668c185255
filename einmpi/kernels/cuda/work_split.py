"""How threads of a GPU share the work of an EinSum: which way, which label is which loop. Only extents and strides
decide, never the device: equal work gives equal bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from einmpi.graph.scalar import Arg, Call, Const, Scalar, walk
from einmpi.kernels.cuda.nest import PACK, THREADS, WARP, Nest, Plan, Term
from einmpi.kernels.cuda.scalar_source import kind_of, weight_of, width_of
from einmpi.kernels.loop_nest import Access, Axis, IndexedArray, Range, axes_of

MANY = 2**18  # threads that keep a large GPU busy
BLOCKS = 1024  # blocks that do so
SHARED = 48 * 2**10  # bytes of shared memory that every GPU gives to a block
LONG = (
    400  # weight of the text that a thread repeats, at the most: a longer one takes long to compile
)
EDGE = 128  # bytes of a line of a square in which a transposed array is read


@lru_cache(maxsize=4096)
def make_plan(
    function: Scalar,
    layouts: tuple[IndexedArray, ...],
    target: IndexedArray,
    aggregation: str | None,
    extents: tuple[tuple[str, int], ...],
    counted: tuple[int, ...],
    aligned: bool,
) -> Plan:
    """`counted` are operands that count a label; `aligned`: every array begins where a pack may lie."""
    arrays = (*layouts, target)
    sizes = [np.dtype(layout.dtype).itemsize for layout in arrays]
    axes = [_in_elements(axis, sizes) for axis in axes_of(arrays, extents)]
    jumps = tuple(_jumps(layout, size) for layout, size in zip(layouts, sizes, strict=False))
    inner = [axis for axis in axes if axis.aggregated]
    draft = _Draft(
        function,
        layouts,
        target,
        aggregation if inner else None,
        tuple(axes),
        jumps,
        counted,
        aligned,
    )
    return draft.tiled() or (draft.folded() if inner else draft.mapped())


def _jumps(layout: IndexedArray, size: int) -> tuple[Range, ...]:
    """Stride and extent of each gathered dimension."""
    dimensions = zip(layout.index, layout.strides, layout.shape, strict=True)
    return tuple(
        (stride // size, extent)
        for entry, stride, extent in dimensions
        if not isinstance(entry, str)
    )


def _in_elements(axis: Axis, sizes: Sequence[int]) -> Axis:
    return axis._replace(
        strides=tuple(s // size for s, size in zip(axis.strides, sizes, strict=True))
    )


@dataclass(frozen=True)
class _Draft:
    function: Scalar
    layouts: tuple[IndexedArray, ...]
    target: IndexedArray
    aggregation: str | None
    axes: tuple[Axis, ...]
    jumps: tuple[tuple[Range, ...], ...]
    counted: tuple[int, ...]
    aligned: bool

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(layout.dtype for layout in self.layouts)

    def plan(
        self, way: str, axes: Sequence[Axis], blocks: int, parts: int = 1, **shape: Any
    ) -> Plan:
        accesses = []
        for m, layout in enumerate((*self.layouts, self.target)):
            gathers = tuple(entry for entry in layout.index if not isinstance(entry, str))
            loops = tuple(k for k, axis in enumerate(axes) if axis.strides[m])
            accesses.append(Access(layout.dtype, loops, False, gathers))
        outputs = sum(not axis.aggregated for axis in axes)
        function = shape.pop("function", self.function)
        nest = Nest(
            way,
            function,
            tuple(accesses[:-1]),
            accesses[-1],
            self.aggregation,
            outputs,
            len(axes),
            self.wide(axes),
            self.counted,
            **shape,
        )
        inner = prod(axis.extent for axis in axes[outputs:])
        return Plan(nest, tuple(axes), self.jumps, blocks, parts, -(-inner // parts))

    def wide(self, axes: Sequence[Axis]) -> bool:
        """Whether a place, or a count of threads, may be 2³¹ or more."""
        reach = [
            sum(abs(axis.strides[m]) * axis.extent for axis in axes)
            for m in range(len(self.layouts) + 1)
        ]
        for m, jumps in enumerate(self.jumps):
            reach[m] += sum(abs(stride) * extent for stride, extent in jumps)
        counts = [
            prod(axis.extent for axis in axes if axis.aggregated == side) for side in (False, True)
        ]
        return max(*reach, *counts) >= 2**30  # room for what rounding up to whole blocks adds

    # ---- no ⊕ ----

    def mapped(self) -> Plan:
        """A thread a few elements; in squares where an array lies across."""
        m = len(self.layouts)
        axes = sorted(self.axes, key=lambda axis: (-abs(axis.strides[m]), axis.extent))
        lane = axes[-1]
        across = [
            read
            for read in range(m)
            if abs(lane.strides[read]) > 1 and read not in self.counted and not self.jumps[read]
        ]
        rows = [axis for axis in axes[:-1] if any(axis.strides[read] == 1 for read in across)]
        if rows and min(rows[-1].extent, lane.extent) >= 32:
            row = rows[-1]
            turned = [read for read in across if row.strides[read] == 1]
            edge = max(16, EDGE // max(np.dtype(self.types[read]).itemsize for read in turned))
            sizes = [edge * (edge + 1) * np.dtype(self.types[read]).itemsize for read in turned]
            turned = [read for k, read in enumerate(turned) if sum(sizes[: k + 1]) <= SHARED]
            others = [axis for axis in axes[:-1] if axis is not row]
            squares = prod(-(-axis.extent // edge) for axis in (row, lane)) * prod(
                axis.extent for axis in others
            )
            return self.plan("turn", [*others, row, lane], squares, turned=tuple(turned), edge=edge)
        axes, shape = self.packed(axes, lane, range(m + 1))
        total = prod(axis.extent for axis in axes)
        each = 1 if total < 4 * MANY else 4 if shape["pack"] == 1 else 2
        return self.plan("map", axes, -(-total // (THREADS * each)), each=each, **shape)

    def packed(
        self, axes: Sequence[Axis], lane: Axis, arrays: Sequence[int]
    ) -> tuple[list[Axis], dict[str, Any]]:
        """The loops with neighbours along the lane taken together, if every array allows it, and what a Nest says of
        it."""
        reads = [m for m in arrays if m not in self.counted]
        dense = [m for m in reads if lane.strides[m] == 1]
        size = {m: np.dtype((*self.types, self.target.dtype)[m]).itemsize for m in dense}
        pack = min(8, PACK // max(size.values(), default=PACK))
        while pack > 1 and pack * weight_of(self.function) > LONG:
            pack //= 2
        steps = [axis.strides[m] for m in dense for axis in axes if axis is not lane]
        steps += [stride for m in dense if m < len(self.jumps) for stride, _ in self.jumps[m]]
        while pack > 1 and (lane.extent % pack or any(step % pack for step in steps)):
            pack //= 2
        follows = any(
            axis is lane for m in reads if m < len(self.layouts) for axis in self.index_reach(m)
        )
        if not self.aligned or follows or any(lane.strides[m] not in (0, 1) for m in reads):
            pack = 1
        whole = Axis(
            lane.extent // pack, lane.aggregated, tuple(step * pack for step in lane.strides)
        )
        # What counts is told how far a pack is.
        shape = {
            "pack": pack,
            "packed": tuple(m for m in dense if m < len(self.layouts)) if pack > 1 else (),
        }
        return [whole if axis is lane else axis for axis in axes], shape

    def index_reach(self, m: int) -> list[Axis]:
        """The loops that the indices of a gather depend on."""
        entries = [entry for entry in self.layouts[m].index if not isinstance(entry, str)]
        parts = [part for entry in entries for part in walk(entry) if isinstance(part, Arg)]
        return [axis for part in parts for axis in self.reach(part.position)]

    # ---- ⊕ ----

    def folded(self) -> Plan:
        """A team of threads for each result, in parts where there are few results."""
        outer, inner = self.split()
        lane, along = self.lane(outer, inner)
        axes = [
            *(a for a in outer if a is not lane),
            *([lane] * (not along)),
            *(a for a in inner if a is not lane),
            *([lane] * along),
        ]
        # Where threads go along the output, this has to have neighbours too.
        axes, shape = self.packed(axes, lane, range(len(self.layouts) + (not along)))
        results, depth = (
            prod(axis.extent for axis in axes if axis.aggregated == side) for side in (False, True)
        )
        team = 1
        if along:
            while team < WARP and team < depth:
                team *= 2
            while WARP <= team < THREADS and results * team < MANY and team * 4 < depth:
                team *= 2
        else:
            while team < 8 and results * team < MANY and team * 8 < depth:
                team *= 2
        blocks = -(-results // (THREADS // team))
        parts = (
            max(1, min(-(-BLOCKS // blocks), depth // (team * 16))) if blocks * 2 <= BLOCKS else 1
        )
        return self.plan("fold", axes, blocks, parts, team=team, along=along, **shape)

    def split(self) -> tuple[list[Axis], list[Axis]]:
        """The loops of the output and the aggregated ones, from the longest stride to the shortest."""
        m = len(self.layouts)
        outer = sorted(
            (a for a in self.axes if not a.aggregated), key=lambda a: (-abs(a.strides[m]), a.extent)
        )
        inner = sorted(
            (a for a in self.axes if a.aggregated),
            key=lambda a: (-max(map(abs, a.strides)), a.extent),
        )
        return outer, inner

    def lane(self, outer: Sequence[Axis], inner: Sequence[Axis]) -> tuple[Axis, bool]:
        """The loop along which neighbouring threads read neighbours, as far as can be; whether it is aggregated."""

        def cost(axis: Axis) -> tuple[float, int]:
            reads = [m for m in range(len(self.layouts)) if m not in self.counted]
            far = sum(_weight(self.axes, m) * min(abs(axis.strides[m]), 8) for m in reads)
            return far * (1 + 16 / axis.extent), -axis.extent

        best = min([*reversed(inner), *reversed(outer)], key=cost)
        return best, best.aggregated

    # ---- ⊕ over what two sides share ----

    def tiled(self) -> Plan | None:
        """Rows and columns in tiles, each value that is read being used many times; None where there are none."""
        outer, inner = self.split()
        pairs = [
            (a, b) for a in outer for b in outer if a is not b and min(a.extent, b.extent) >= 16
        ]
        for row, column in sorted(
            pairs, key=lambda pair: (-pair[0].extent * pair[1].extent, -pair[0].extent)
        ):
            terms: list[Term] = []
            function = self.cut(self.function, row, column, inner, terms) if inner else None
            if function is None or len({term.is_row for term in terms}) < 2:
                continue
            inner.sort(key=lambda axis: 1 in axis.strides)  # neighbours in memory last
            batch = [axis for axis in outer if axis is not row and axis is not column]
            shape = self.tile_shape(row, column, batch, function, terms)
            if shape is None:
                return None
            axes = [*batch, row, column, *inner]
            blocks = _tiles(row, column, batch, shape)
            depth = prod(axis.extent for axis in inner)
            parts = (
                max(1, min(-(-BLOCKS // 2 // blocks), depth // 256)) if blocks * 4 <= BLOCKS else 1
            )
            return self.plan(
                "tile", axes, blocks, parts, tile=shape, terms=tuple(terms), function=function
            )
        return None

    def cut(
        self, node: Scalar, row: Axis, column: Axis, inner: Sequence[Axis], terms: list[Term]
    ) -> Scalar | None:
        """⊗ over terms; None where an operand depends on rows and columns both."""
        if isinstance(node, Const):
            return node
        used = [
            self.reach(m) for m in {part.position for part in walk(node) if isinstance(part, Arg)}
        ]
        sides = {axis is row for axes in used for axis in axes if axis is row or axis is column}
        if len(sides) < 2:
            is_row = True in sides or not sides
            reads = [m for part in walk(node) if isinstance(part, Arg) for m in [part.position]]
            across = row if is_row else column
            deep = not any(abs(across.strides[m]) == 1 for m in reads) and any(
                abs(axis.strides[m]) == 1 for m in reads for axis in inner
            )
            term = Term(node, np.dtype(kind_of(node, self.types)).name, is_row, deep)
            if term not in terms:
                terms.append(term)
            return Arg(terms.index(term))
        if not isinstance(node, Call):
            return None
        args = [self.cut(arg, row, column, inner, terms) for arg in node.args]
        return (
            None if None in args else Call(node.op, tuple(arg for arg in args if arg is not None))
        )

    def reach(self, m: int) -> list[Axis]:
        """The loops that an operand depends on, those of its indices included."""
        return [axis for axis in self.axes if axis.strides[m]] + self.index_reach(m)

    def tile_shape(
        self,
        row: Axis,
        column: Axis,
        batch: Sequence[Axis],
        function: Scalar,
        terms: Sequence[Term],
    ) -> tuple[int, int, int] | None:
        """Rows and columns of a thread: many, so that what is in registers is used often, where there are enough."""
        types = [term.dtype for term in terms]
        width = max(width_of(dtype) for dtype in [*types, np.dtype(kind_of(function, types)).name])
        weight = weight_of(function)
        each = [
            next(n for n in (8, 4, 2) if axis.extent >= 12 * n or n == 2) for axis in (row, column)
        ]
        if width > 4 or weight > LONG // 16 or self.wide(self.axes):
            each = [min(n, 4 if weight <= LONG // 4 else 2) for n in each]
        while min(each) > 2 and _tiles(row, column, batch, (*each, 0)) < BLOCKS // 4:
            each = [n // 2 for n in each]
        depth = 8
        while (
            2 * depth * sum(16 * each[not t.is_row] * width_of(t.dtype) + 16 for t in terms)
            > SHARED
        ):
            depth //= 2
        return (each[0], each[1], depth) if depth >= 4 else None


def _tiles(row: Axis, column: Axis, batch: Sequence[Axis], shape: tuple[int, ...]) -> int:
    sides = -(-row.extent // (16 * shape[0])) * -(-column.extent // (16 * shape[1]))
    return sides * prod(axis.extent for axis in batch)


def _weight(axes: Sequence[Axis], m: int) -> float:
    """How much a read counts: large arrays do."""
    return float(prod(axis.extent for axis in axes if axis.strides[m]))
