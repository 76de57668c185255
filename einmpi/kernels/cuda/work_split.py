"""How the threads of a GPU share the work of one EinSum: the scheme, and which label is which loop.

Only extents, strides and alignment decide, never the device: equal work gives equal bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from einmpi.caches import bounded_cache
from einmpi.graph.scalar import Arg, Call, Const, Number, Scalar, walk
from einmpi.kernels.cuda.nest import (
    BLOCK_THREADS,
    PACK_BYTES,
    WARP_THREADS,
    Term,
    TileShape,
    WorkSplit,
)
from einmpi.kernels.cuda.problem import (
    BUSY_BLOCKS,
    BUSY_THREADS,
    MAX_REPEATED_WEIGHT,
    SHARED_MEMORY_BYTES,
    Problem,
    size_of,
)
from einmpi.kernels.cuda.scalar_source import weight_of, width_of
from einmpi.kernels.cuda.source_parts import TILE_THREADS
from einmpi.kernels.loop_nest import Axis, outer_and_inner
from einmpi.kernels.scalar_text import kind_of

# ---- split ---------------------------------------------------------------------------------------
#
# The split into tiles: an aggregation over values that rows and columns share.
#
# ⊗ is cut into terms. Apart from the aggregated loops, a term depends only on the rows or only
# on the columns, so that a value that is read serves a whole row, or column, of a tile.


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
        batch = [axis for axis in outer if axis is not row and axis is not column]
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


SQUARE_LINE_BYTES = 128  # of a line of a square in which a transposed array is read
MIN_SQUARE_EXTENT = 32  # of both loops of the squares


@bounded_cache(4096)
def split_work(problem: Problem) -> WorkSplit:
    """Choose a scheme and the order of the loops."""
    if problem.aggregation is None:
        return split_elements(problem)
    return split_into_tiles(problem) or split_results(problem)


# ---- without an aggregation ---------------------------------------------------------------------


def split_elements(problem: Problem) -> WorkSplit:
    """Give each thread a few elements; in squares if an operand is transposed."""
    axes = problem.output_axes()
    lane = axes[-1]
    squares = _split_into_squares(problem, axes, lane)
    if squares is not None:
        return squares
    axes, packs = _pack_lane(problem, axes, lane, range(len(problem.layouts) + 1))
    total = size_of(axes)
    count = 1  # of elements that each thread computes
    if total >= 4 * BUSY_THREADS:
        count = 4 if packs["pack"] == 1 else 2
    blocks = -(-total // (BLOCK_THREADS * count))
    return problem.work_split("map", axes, blocks, elements_per_thread=count, **packs)


def _split_into_squares(problem: Problem, axes: Sequence[Axis], lane: Axis) -> WorkSplit | None:
    """Use squares in shared memory for operands that are dense along another loop than the lane.

    Return None if no operand is, or if one of the two loops is short.
    """
    distant = []  # operands of which neighbouring threads would read distant elements
    for operand in range(len(problem.layouts)):
        is_plain = operand not in problem.counters and not problem.gathered[operand]
        if is_plain and abs(lane.strides[operand]) > 1:
            distant.append(operand)
    row = None
    for axis in axes[:-1]:
        if any(axis.strides[operand] == 1 for operand in distant):
            row = axis
    if row is None or min(row.extent, lane.extent) < MIN_SQUARE_EXTENT:
        return None
    candidates = [operand for operand in distant if row.strides[operand] == 1]
    widest = max(problem.itemsize(operand) for operand in candidates)
    edge = max(16, SQUARE_LINE_BYTES // widest)
    transposed = []
    shared_bytes = 0
    for operand in candidates:
        shared_bytes += edge * (edge + 1) * problem.itemsize(operand)
        if shared_bytes <= SHARED_MEMORY_BYTES:
            transposed.append(operand)
    others = [axis for axis in axes[:-1] if axis is not row]
    loops = [*others, row, lane]
    squares_down = -(-row.extent // edge)
    squares_across = -(-lane.extent // edge)
    blocks = squares_down * squares_across * size_of(others)
    return problem.work_split(
        "transpose", loops, blocks, transposed=tuple(transposed), square_edge=edge
    )


def _pack_lane(
    problem: Problem, axes: Sequence[Axis], lane: Axis, arrays: Sequence[int]
) -> tuple[list[Axis], dict[str, Any]]:
    """Let a thread process neighbours along the lane together, if all of these arrays allow it.

    Return the loops with the lane counted in packs, and what a nest has to know about packs.
    """
    arrays = [array for array in arrays if array not in problem.counters]
    dense = [array for array in arrays if lane.strides[array] == 1]
    # Operands that an index moves along the lane; a pack of 1 asks for nothing else.
    moved = [array for array in arrays if problem.moves_in_packs(array, lane, 1)]
    dense += moved
    pack = 1
    if problem.aligned and _is_regular(problem, lane, arrays, moved):
        widest = max((problem.itemsize(array) for array in dense), default=PACK_BYTES)
        pack = min(8, PACK_BYTES // widest)
    while pack > 1 and pack * weight_of(problem.function) > MAX_REPEATED_WEIGHT:
        pack //= 2
    # A pack must begin at a multiple of its size, wherever the other loops are.
    steps = [lane.extent]
    for array in dense:
        steps += [axis.strides[array] for axis in axes if axis is not lane]
        if array < len(problem.gathered) and array not in moved:
            steps += [dimension.stride for dimension in problem.gathered[array]]
    while pack > 1 and (
        any(step % pack for step in steps)
        or not all(problem.moves_in_packs(array, lane, pack) for array in moved)
    ):
        pack //= 2
    # From here on strides are those of packs, for counters too.
    strides = tuple(stride * pack for stride in lane.strides)
    lane_of_packs = Axis(lane.extent // pack, lane.aggregated, strides)
    packed = [array for array in dense if array < len(problem.layouts) and pack > 1]
    new_axes = [lane_of_packs if axis is lane else axis for axis in axes]
    return new_axes, {"pack": pack, "packed": tuple(packed)}


def _is_regular(problem: Problem, lane: Axis, arrays: Sequence[int], moved: Sequence[int]) -> bool:
    """Tell whether neighbours along the lane are neighbours in every array, or one element.

    The indices of `moved` arrays take care of that.
    """
    for array in arrays:
        if lane.strides[array] not in (0, 1):
            return False
        if array in moved:
            continue
        is_operand = array < len(problem.layouts)
        if is_operand and any(axis is lane for axis in problem.axes_of_gathers(array)):
            return False
    return True


# ---- with an aggregation ------------------------------------------------------------------------


def split_results(problem: Problem) -> WorkSplit:
    """Give each result to a team of threads, and split the sums if there are few results."""
    outer = problem.output_axes()
    inner = problem.aggregated_axes()
    lane = _best_lane(problem, [*reversed(inner), *reversed(outer)])
    outer = [axis for axis in outer if axis is not lane]
    inner = [axis for axis in inner if axis is not lane]
    if lane.aggregated:
        axes = [*outer, *inner, lane]
        arrays = range(len(problem.layouts))
    else:
        axes = [*outer, lane, *inner]
        arrays = range(len(problem.layouts) + 1)  # the output is stored in packs too
    axes, packs = _pack_lane(problem, axes, lane, arrays)
    results, depth = map(size_of, outer_and_inner(axes))
    team = _team_size(results, depth, lane.aggregated)
    blocks = -(-results // (BLOCK_THREADS // team))
    # Too few results to fill the GPU: sums are split, but each thread still adds 16 values or more.
    parts = 1
    if blocks * 2 <= BUSY_BLOCKS:
        parts = max(1, min(-(-BUSY_BLOCKS // blocks), depth // (team * 16)))
    return problem.work_split(
        "fold", axes, blocks, parts, team=team, lane_is_aggregated=lane.aggregated, **packs
    )


def split_runs(problem: Problem, runs: int, masked: Number, run_values: int) -> WorkSplit:
    """Give each scattered result to a team of threads, which folds a run of values.

    Operand `runs` has the starts of the runs along the first aggregated loop, the next one the
    stops, and the one before them depends on this loop alone. The expected length of a run decides
    how large a team is, not the runs themselves.
    """
    outer = problem.output_axes()
    values = [axis for axis in problem.aggregated_axes() if axis.strides[runs - 1]]
    inner = [axis for axis in problem.aggregated_axes() if not axis.strides[runs - 1]]
    results = size_of(outer)
    places = size_of(axis for axis in outer if axis.strides[runs])
    expected_length = -(-run_values // max(1, places)) * size_of(inner)
    # Neighbouring threads compute neighbouring results of a place, if there are enough of them.
    shares_runs = results // max(1, places) < 8
    team = _team_size(results, expected_length, shares_runs)
    return problem.work_split(
        "fold",
        [*outer, *values, *inner],
        -(-results // (BLOCK_THREADS // team)),
        run_values=run_values,
        team=team,
        lane_is_aggregated=shares_runs,
        runs=runs,
        masked=masked,
    )


def _best_lane(problem: Problem, axes: Sequence[Axis]) -> Axis:
    """Return the loop along which neighbouring threads read the nearest elements."""

    def cost(axis: Axis) -> tuple[float, int]:
        distance = 0.0
        for operand in range(len(problem.layouts)):
            if operand not in problem.counters:
                elements = size_of(other for other in problem.axes if other.strides[operand])
                # Beyond some elements apart, each thread reads a piece of memory of its own.
                distance += elements * min(abs(axis.strides[operand]), 8)
        # On a short loop some threads have nothing to do.
        return distance * (1 + 16 / axis.extent), -axis.extent

    return min(axes, key=cost)


def _team_size(results: int, depth: int, lane_is_aggregated: bool) -> int:
    """Return how many threads compute one result: a power of two.

    More threads for a result keep the GPU busy where there are few results, but each of them must
    have some values to aggregate. Where neighbouring threads read along an aggregated loop, up to
    a whole warp works on one result in any case.
    """
    team = 1
    if not lane_is_aggregated:
        while team < 8 and results * team < BUSY_THREADS and team * 8 < depth:
            team *= 2
        return team
    while team < WARP_THREADS and team < depth:
        team *= 2
    if team == WARP_THREADS:
        while team < BLOCK_THREADS and results * team < BUSY_THREADS and team * 4 < depth:
            team *= 2
    return team
