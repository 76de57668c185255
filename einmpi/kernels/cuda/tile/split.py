"""The split into tiles: an aggregation over values that rows and columns share.

⊗ is cut into terms. Apart from the aggregated loops, a term depends only on the rows or only on
the columns, so that a value that is read serves a whole row, or column, of a tile.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from einmpi.graph.scalar import Arg, Call, Const, Scalar, walk
from einmpi.kernels.cuda.nest import Term, TileShape, WorkSplit
from einmpi.kernels.cuda.problem import (
    BUSY_BLOCKS,
    MAX_REPEATED_WEIGHT,
    SHARED_MEMORY_BYTES,
    Problem,
    size_of,
)
from einmpi.kernels.cuda.scalar_source import kind_of, weight_of, width_of
from einmpi.kernels.cuda.tile.source import TILE_THREADS
from einmpi.kernels.loop_nest import Axis

MIN_TILED_EXTENT = 16  # of rows and columns


def split_into_tiles(problem: Problem) -> WorkSplit | None:
    """Return a split into tiles; None if ⊗ has no parts for rows and parts for columns."""
    outer = problem.output_axes()
    aggregated = problem.aggregated_axes()
    for row, column in _pairs_by_size(outer):
        cutter = _TermCutter(problem, row, column, aggregated)
        function = cutter.cut(problem.function)
        if function is None or len({term.is_row for term in cutter.terms}) < 2:
            continue
        batch = []
        for axis in outer:
            if axis is not row and axis is not column:
                batch.append(axis)
        shape = _tile_shape(problem, row, column, batch, function, cutter.terms)
        if shape is None:
            return None
        aggregated.sort(key=lambda axis: 1 in axis.strides)  # neighbours in memory last
        axes = [*batch, row, column, *aggregated]
        blocks = _tile_count(row, column, batch, shape.rows, shape.columns)
        # Too few tiles to fill the GPU: sums are split, but each part still has 256 steps or more.
        parts = 1
        if blocks * 4 <= BUSY_BLOCKS:
            parts = max(1, min(-(-BUSY_BLOCKS // 2 // blocks), size_of(aggregated) // 256))
        terms = tuple(cutter.terms)
        return problem.work_split(
            "tile", axes, blocks, parts, function=function, tile=shape, terms=terms
        )
    return None


def _pairs_by_size(axes: Sequence[Axis]) -> list[tuple[Axis, Axis]]:
    """Return the pairs of axes that are long enough for rows and columns, the largest first."""
    long_axes = [axis for axis in axes if axis.extent >= MIN_TILED_EXTENT]
    pairs = list(itertools.permutations(long_axes, 2))
    return sorted(pairs, key=lambda pair: (-pair[0].extent * pair[1].extent, -pair[0].extent))


@dataclass
class _TermCutter:
    """Cuts ⊗ into terms for given rows and columns."""

    problem: Problem
    row: Axis
    column: Axis
    aggregated: Sequence[Axis]
    terms: list[Term] = field(default_factory=list)

    def cut(self, node: Scalar) -> Scalar | None:
        """Return an expression over terms; None if an operand depends on rows and columns."""
        if isinstance(node, Const):
            return node
        operands = [part.position for part in walk(node) if isinstance(part, Arg)]
        axes: list[Axis] = []
        for operand in operands:
            axes += self.problem.axes_of_operand(operand)
        uses_row = any(axis is self.row for axis in axes)
        uses_column = any(axis is self.column for axis in axes)
        if not (uses_row and uses_column):
            # A term that depends on neither counts as one of the rows.
            return self.arg_of(node, operands, is_row=not uses_column)
        if not isinstance(node, Call):
            return None
        args = []
        for arg in node.args:
            part = self.cut(arg)
            if part is None:
                return None
            args.append(part)
        return Call(node.op, tuple(args))

    def arg_of(self, node: Scalar, operands: Sequence[int], is_row: bool) -> Arg:
        """Return the Arg of a term; equal terms are one."""
        side = self.row if is_row else self.column
        dense_across = any(abs(side.strides[operand]) == 1 for operand in operands)
        dense_along_depth = False
        for axis in self.aggregated:
            if any(abs(axis.strides[operand]) == 1 for operand in operands):
                dense_along_depth = True
        dtype = np.dtype(kind_of(node, self.problem.types)).name
        term = Term(node, dtype, is_row, dense_along_depth and not dense_across)
        if term not in self.terms:
            self.terms.append(term)
        return Arg(self.terms.index(term))


def _tile_shape(
    problem: Problem,
    row: Axis,
    column: Axis,
    batch: Sequence[Axis],
    function: Scalar,
    terms: Sequence[Term],
) -> TileShape | None:
    """Choose how many rows and columns a thread computes; None if shared memory is too small.

    With many, a thread uses a value in a register often. With few, there are enough tiles for the
    whole GPU.
    """
    types = [term.dtype for term in terms]
    result_type = np.dtype(kind_of(function, types)).name
    width = max(width_of(dtype) for dtype in [*types, result_type])
    weight = weight_of(function)
    rows = _lines_of_thread(row)
    columns = _lines_of_thread(column)
    is_heavy = weight > MAX_REPEATED_WEIGHT // 16
    if width > 4 or is_heavy or problem.needs_wide_offsets(problem.axes):
        most = 4 if weight <= MAX_REPEATED_WEIGHT // 4 else 2
        rows = min(rows, most)
        columns = min(columns, most)
    enough = BUSY_BLOCKS // 4
    while min(rows, columns) > 2 and _tile_count(row, column, batch, rows, columns) < enough:
        rows //= 2
        columns //= 2
    bytes_per_step = 0
    for term in terms:
        lines = TILE_THREADS * (rows if term.is_row else columns)
        bytes_per_step += lines * width_of(term.dtype) + 16  # 16 for padding
    depth = 8
    while 2 * depth * bytes_per_step > SHARED_MEMORY_BYTES:  # there are two halves
        depth //= 2
    if depth < 4:
        return None
    return TileShape(rows, columns, depth)


def _lines_of_thread(axis: Axis) -> int:
    """Return how many rows, or columns, of a tile a thread computes if there are enough tiles."""
    if axis.extent >= 12 * 8:
        return 8
    if axis.extent >= 12 * 4:
        return 4
    return 2


def _tile_count(row: Axis, column: Axis, batch: Sequence[Axis], rows: int, columns: int) -> int:
    tiles_down = -(-row.extent // (TILE_THREADS * rows))
    tiles_across = -(-column.extent // (TILE_THREADS * columns))
    return tiles_down * tiles_across * size_of(batch)
