"""How threads of a GPU share the work of an EinSum: which way, which label is which loop. Only extents and strides
decide, never the device: equal work gives equal bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from einmpi.graph.scalar import OPS, Arg, Call, Const, Scalar, walk
from einmpi.runtime.cuda_text import kind_of, width_of
from einmpi.runtime.loop_plan import Access, Axis, Layout, Range, axes_of

THREADS = 256  # of a block, in every kernel
MANY = 2**18  # threads that keep a large GPU busy
BLOCKS = 512  # blocks that do so
SHARED = 48 * 2**10  # bytes of shared memory that every GPU gives to a block
EDGE = 32  # of a square in which a transposed array is read


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
    span: int  # values in a part

    def value(self, letter: str, x: int, y: int) -> int:
        """An argument that is no pointer."""
        if letter == "n":
            return self.axes[x].extent
        if letter in "mz":
            return _divider(self.axes[x].extent, self.nest.wide)[letter == "z"]
        if letter == "s":
            return self.axes[y].strides[x]
        if letter in "je":
            return self.jumps[x][y][letter == "e"]
        return {"c": self.span, "o": prod(a.extent for a in self.axes if not a.aggregated)}[letter]


def _divider(extent: int, wide: bool) -> tuple[int, int]:
    """What `quotient` of cuda_words divides by."""
    if wide:
        return extent, 0
    shift = 31 + (extent - 1).bit_length()
    return -(-(2**shift) // extent), shift


@lru_cache(maxsize=4096)
def make_plan(function: Scalar, layouts: tuple[Layout, ...], target: Layout, aggregation: str | None,
              extents: tuple[tuple[str, int], ...], counted: tuple[int, ...]) -> Plan:  # fmt: skip
    arrays = (*layouts, target)
    sizes = [np.dtype(layout.dtype).itemsize for layout in arrays]
    axes = [replace_strides(axis, sizes) for axis in axes_of(arrays, extents)]
    jumps = tuple(tuple((layout.strides[k] // size, layout.shape[k]) for k, entry in enumerate(layout.index)
                        if not isinstance(entry, str)) for layout, size in zip(layouts, sizes, strict=False))  # fmt: skip
    inner = [axis for axis in axes if axis.aggregated]
    draft = _Draft(function, layouts, target, aggregation if inner else None, tuple(axes), jumps, counted)
    return draft.tiled() or (draft.folded() if inner else draft.mapped())


def replace_strides(axis: Axis, sizes: Sequence[int]) -> Axis:
    return axis._replace(strides=tuple(s // size for s, size in zip(axis.strides, sizes, strict=True)))


@dataclass(frozen=True)
class _Draft:
    function: Scalar
    layouts: tuple[Layout, ...]
    target: Layout
    aggregation: str | None
    axes: tuple[Axis, ...]
    jumps: tuple[tuple[Range, ...], ...]
    counted: tuple[int, ...]

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(layout.dtype for layout in self.layouts)

    def plan(self, way: str, axes: Sequence[Axis], blocks: int, parts: int = 1, **shape: Any) -> Plan:
        accesses = []
        for m, layout in enumerate((*self.layouts, self.target)):
            gathers = tuple(entry for entry in layout.index if not isinstance(entry, str))
            loops = tuple(k for k, axis in enumerate(axes) if axis.strides[m])
            accesses.append(Access(layout.dtype, loops, False, gathers))
        outputs = sum(not axis.aggregated for axis in axes)
        function = shape.pop("function", self.function)
        nest = Nest(way, function, tuple(accesses[:-1]), accesses[-1], self.aggregation, outputs, len(axes),
                    self.wide(axes), self.counted, **shape)  # fmt: skip
        inner = prod(axis.extent for axis in axes[outputs:])
        return Plan(nest, tuple(axes), self.jumps, blocks, parts, -(-inner // parts))

    def wide(self, axes: Sequence[Axis]) -> bool:
        """Whether a place, or a count of threads, may be 2³¹ or more."""
        reach = [sum(abs(axis.strides[m]) * axis.extent for axis in axes) for m in range(len(self.layouts) + 1)]
        for m, jumps in enumerate(self.jumps):
            reach[m] += sum(abs(stride) * extent for stride, extent in jumps)
        counts = [prod(axis.extent for axis in axes if axis.aggregated == side) for side in (False, True)]
        return max(*reach, *counts) >= 2**30  # room for what rounding up to whole blocks adds

    # ---- no ⊕ ----

    def mapped(self) -> Plan:
        """A thread an element, or a few of them; in squares where an array lies across."""
        m = len(self.layouts)
        axes = sorted(self.axes, key=lambda axis: (-abs(axis.strides[m]), axis.extent))
        lane = axes[-1]
        turned: list[int] = []
        for read in range(len(self.layouts)):
            if abs(lane.strides[read]) > 1 and read not in self.counted and not self.jumps[read]:
                rows = [axis for axis in axes[:-1] if axis.strides[read] == 1 and axis.extent >= EDGE]
                turned += [read] * bool(rows and lane.extent >= EDGE)
                if turned == [read]:
                    axes = [*(axis for axis in axes[:-1] if axis is not rows[0]), rows[0], lane]
        turned = [read for read in turned if axes[-2].strides[read] == 1]
        if turned:
            squares = prod(-(-axis.extent // EDGE) for axis in axes[-2:]) * prod(axis.extent for axis in axes[:-2])
            return self.plan("turn", axes, squares, turned=tuple(turned))
        total = prod(axis.extent for axis in axes)
        each = 4 if total >= 4 * MANY else 1
        return self.plan("map", axes, -(-total // (THREADS * each)), each=each)

    # ---- ⊕ ----

    def folded(self) -> Plan:
        """A team of threads for each result, in parts where there are few results."""
        outer, inner = self.split()
        lane, along = self.lane(outer, inner)
        results, depth = (prod(axis.extent for axis in axes) for axes in (outer, inner))
        team = 1
        if along:
            while team < THREADS and team * 4 < depth:
                team *= 2
        else:
            while team < 32 and results * team < MANY and team * 8 < depth:
                team *= 2
        blocks = -(-results // (THREADS // team))
        parts = max(1, min(-(-BLOCKS // blocks), depth // (team * 16))) if blocks * 2 <= BLOCKS else 1
        axes = [*(a for a in outer if a is not lane), *([lane] * (lane in outer)),
                *(a for a in inner if a is not lane), *([lane] * (lane in inner))]  # fmt: skip
        return self.plan("fold", axes, blocks, parts, team=team, along=along)

    def split(self) -> tuple[list[Axis], list[Axis]]:
        """The loops of the output and the aggregated ones, from the longest stride to the shortest."""
        m = len(self.layouts)
        outer = sorted((a for a in self.axes if not a.aggregated), key=lambda a: (-abs(a.strides[m]), a.extent))
        inner = sorted((a for a in self.axes if a.aggregated), key=lambda a: (-max(map(abs, a.strides)), a.extent))
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
        pairs = [(a, b) for a in outer for b in outer if a is not b and min(a.extent, b.extent) >= 16]
        for row, column in sorted(pairs, key=lambda pair: (-pair[0].extent * pair[1].extent, -pair[0].extent)):
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
            parts = max(1, min(-(-BLOCKS // 2 // blocks), depth // 256)) if blocks * 4 <= BLOCKS else 1
            return self.plan("tile", axes, blocks, parts, tile=shape, terms=tuple(terms), function=function)
        return None

    def cut(self, node: Scalar, row: Axis, column: Axis, inner: Sequence[Axis], terms: list[Term]) -> Scalar | None:
        """⊗ over terms; None where an operand depends on rows and columns both."""
        if isinstance(node, Const):
            return node
        used = [self.reach(m) for m in {part.position for part in walk(node) if isinstance(part, Arg)}]
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
        return None if None in args else Call(node.op, tuple(arg for arg in args if arg is not None))

    def reach(self, m: int) -> list[Axis]:
        """The loops that an operand depends on, those of its indices included."""
        own = [axis for axis in self.axes if axis.strides[m]]
        for entry in self.layouts[m].index:
            if not isinstance(entry, str):
                for part in walk(entry):
                    own += self.reach(part.position) if isinstance(part, Arg) else []
        return own

    def tile_shape(self, row: Axis, column: Axis, batch: Sequence[Axis], function: Scalar,
                   terms: Sequence[Term]) -> tuple[int, int, int] | None:  # fmt: skip
        """Rows and columns of a thread: many, so that what is in registers is used often, where there are enough."""
        types = [term.dtype for term in terms]
        width = max(width_of(dtype) for dtype in [*types, np.dtype(kind_of(function, types)).name])
        nodes = walk(function)
        heavy = len(nodes) + 8 * sum(isinstance(node, Call) and not OPS[node.op].precedence for node in nodes) > 24
        each = [next(n for n in (8, 4, 2) if axis.extent >= 12 * n or n == 2) for axis in (row, column)]
        if width > 4 or heavy or self.wide(self.axes):
            each = [min(n, 4) for n in each]
        while min(each) > 2 and _tiles(row, column, batch, (*each, 0)) < BLOCKS // 4:
            each = [n // 2 for n in each]
        depth = 8
        while 2 * depth * sum(16 * each[not t.is_row] * width_of(t.dtype) + 16 for t in terms) > SHARED:
            depth //= 2
        return (each[0], each[1], depth) if depth >= 4 else None


def _tiles(row: Axis, column: Axis, batch: Sequence[Axis], shape: tuple[int, ...]) -> int:
    sides = -(-row.extent // (16 * shape[0])) * -(-column.extent // (16 * shape[1]))
    return sides * prod(axis.extent for axis in batch)


def _weight(axes: Sequence[Axis], m: int) -> float:
    """How much a read counts: large arrays do."""
    return float(prod(axis.extent for axis in axes if axis.strides[m]))
