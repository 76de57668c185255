"""Sums of products with a large array of small numbers, such as quantised weights, and few rows.

Each number is read once, converted in registers and used for all rows. Several results are
computed at a time: each has a vector of lanes, whose sum it is in the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from einmpi.caches import bounded_cache
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.scalar import Call, Scalar, gathers_in, walk
from einmpi.kernels.cpu.loop_source import (
    Aggregate,
    SourceLines,
    aggregate_of,
    loaded,
    open_loops,
    stored,
    stored_dtype,
    write_halves,
    write_kernel,
    write_parts,
)
from einmpi.kernels.cpu.scalar_source import Lanes, convert
from einmpi.kernels.cpu.small_integers.narrow_integers import narrowed
from einmpi.kernels.loop_nest import (
    BLOCK_STEPS,
    COUNTER_STEP,
    Axis,
    BoundNest,
    IndexedArray,
    Nest,
    accesses_of,
    axes_of,
    outer_and_inner,
)
from einmpi.kernels.scalar_text import FoldTypes, kind_of

MOST_ROWS = 16  # results to which each of the small numbers contributes
LANE_BYTES = 64  # of the lanes of a result
MOST_LANES = 64  # that are written out
MOST_SHORT = 8  # values of other aggregated labels that are written out, in all
MOST_NODES = 24  # of ⊗, to compute several results at a time

# ---- choice --------------------------------------------------------------------------------------


@bounded_cache(4096)
def bind_row_products(
    function: Scalar,
    operands: tuple[IndexedArray, ...],
    target: IndexedArray,
    aggregation: str | None,
    extents: tuple[tuple[str, int], ...],
    strict: bool,
) -> BoundNest | None:
    """Return such loops for an EinSum, as `bind_nest` does; None if it is something else."""
    arrays = (*operands, target)
    if aggregation is None or any(gathers_in(array.index) for array in arrays):
        return None
    axes = axes_of(arrays, extents)
    types = tuple(operand.dtype for operand in operands)
    dtype = np.dtype(FoldTypes(aggregation, function, types).dtype)

    def elements(number: int) -> int:
        return prod(axis.extent for axis in axes if axis.strides[number])

    sizes = [np.dtype(kind).itemsize for kind in types]
    small = [k for k, size in enumerate(sizes) if size < min(dtype.itemsize, 4)]
    if not small:
        return None
    large = max(small, key=elements)
    found = _ordered(axes, large, LANE_BYTES // dtype.itemsize, sizes[large])
    if found is None:
        return None
    order, tiles = found
    if len(walk(function)) > MOST_NODES:
        one_by_one = [
            tile if axis.aggregated else 1 for tile, axis in zip(tiles, order, strict=True)
        ]
        tiles = tuple(one_by_one)
    *reads, out = accesses_of(arrays, order, order[-1])
    nest = Nest(
        function=narrowed(function, operands),
        reads=tuple(reads),
        out=out,
        aggregation=aggregation,
        output_loops=sum(not axis.aggregated for axis in order),
        loops=len(order),
        aggregates_lanes=True,
        has_rows=False,
        width=LANE_BYTES // dtype.itemsize,
        tiles=tiles,
        is_strict=strict,
        constants=_constants(operands, order, tiles),
    )
    return BoundNest(nest, order, (), ((),) * len(operands))


def _ordered(
    axes: Sequence[Axis], large: int, width: int, itemsize: int
) -> tuple[tuple[Axis, ...], tuple[int, ...]] | None:
    """Return the loops, and how many values of each are written out, 0 for none.

    Those of the large array come first, then the rows, then the aggregated ones: the large array
    is read from memory once, and by all rows from the cache.
    """
    outer, inner = outer_and_inner(axes)
    rows = [axis for axis in outer if not axis.strides[large]]
    columns = [axis for axis in outer if axis.strides[large]]
    lanes = [axis for axis in inner if axis.strides[large] == itemsize]
    if len(lanes) != 1 or prod(axis.extent for axis in rows) > MOST_ROWS:
        return None
    (lane,) = lanes
    own = next((n for n in range(MOST_LANES, 0, -width) if lane.extent % n == 0), None)
    if own is None or own % width:
        return None
    inner.remove(lane)
    short = [axis for axis in inner if not axis.strides[large]]
    steps = [axis for axis in inner if axis.strides[large]]
    if prod(axis.extent for axis in short) * own // width > MOST_SHORT:
        return None
    if lane.extent > own:
        steps.append(Axis(lane.extent // own, True, tuple(own * s for s in lane.strides)))
        lane = Axis(own, True, lane.strides)
    steps.sort(key=lambda axis: -abs(axis.strides[large]))
    columns.sort(key=lambda axis: -abs(axis.strides[large]))
    rows.sort(key=lambda axis: axis.extent)
    tiles = [1] * (len(columns) + len(rows))
    if rows:
        tiles[-1] = min(4, rows[-1].extent)
    if columns:
        tiles[len(columns) - 1] = min(columns[-1].extent, 4 if not rows or tiles[-1] < 3 else 2)
    written = [axis.extent for axis in (*short, lane)]
    return (*columns, *rows, *steps, *short, lane), (*tiles, *[0] * len(steps), *written)


def _constants(
    operands: Sequence[IndexedArray], order: Sequence[Axis], tiles: Sequence[int]
) -> tuple[tuple[str, int], ...]:
    """Return the parameters that are part of the source: strides of what is written out."""
    found = []
    for number, operand in enumerate(operands):
        loops = [loop for loop, axis in enumerate(order) if axis.strides[number]]
        written = [loop for loop in loops if order[loop].aggregated and tiles[loop]]
        found += [(f"stride{number}_{loop}", order[loop].strides[number]) for loop in written]
        if operand.first is not None and written == loops:
            found.append((f"array{number}", operand.first * operand.strides[0]))
    return tuple(found)


# ---- source --------------------------------------------------------------------------------------


@dataclass
class _Tile(Lanes):
    """The values of a tile: a row and a step are numbers of combinations of what is written out."""

    rows: list[dict[int, int]] = field(default_factory=list)  # the place in the tile by loop
    steps: list[dict[int, int]] = field(default_factory=list)

    def key(self, node: Scalar, row: int, step: int) -> Hashable:
        places = {**self.rows[row], **self.steps[step]}
        return node, tuple((loop, places[loop]) for loop in sorted(self.uses(node) & places.keys()))

    def pointer(self, array: int, row: int = 0, step: int = 0) -> tuple[str, str]:
        """Return a pointer, which all steps share, and the distance of a step's lane from it."""
        nest = self.nest
        access = (*nest.reads, nest.out)[array]
        itemsize = np.dtype(access.dtype).itemsize
        constants = dict(nest.constants)
        distance = 0
        lanes = ""
        steps = []
        places = []
        for loop in access.loops:
            stride = constants.get(f"stride{array}_{loop}", 0) // itemsize
            if loop in self.steps[step]:
                distance += self.steps[step][loop] * stride
                lanes = f"{{v}} * {stride} + " if loop == nest.lane else lanes
                continue
            place = f"_{self.rows[row][loop]}" if loop in self.rows[row] else ""
            places.append(place)
            steps += [f"i{loop}{place}", f"stride{array}_{loop}"]
        known = f"pointer {array}", tuple(places)
        if known not in self.known:
            arguments = [DTYPES[access.dtype].numba_stored, f"array{array}", *steps]
            self.known[known] = self.keep(f"at({', '.join(arguments)})", False)
        return self.known[known], f"{lanes}{distance}"

    def counted_value(self, array: int, row: int, step: int) -> str:
        places = {**self.rows[row], **self.steps[step]}
        constants = dict(self.nest.constants)
        terms = []
        for loop in self.nest.reads[array].loops:
            stride = constants.get(f"stride{array}_{loop}", f"stride{array}_{loop}")
            index = f"({places[loop]} + {{v}})" if loop == self.nest.lane else f"i{loop}"
            if loop in places and loop != self.nest.lane:
                index = (
                    f"i{loop}_{places[loop]}"
                    if loop < self.nest.output_loops
                    else str(places[loop])
                )
            terms.append(f"{index} * {stride}")
        return f"int64({' + '.join([f'array{array}', *terms])}) // {COUNTER_STEP}"


def row_products_source(nest: Nest) -> str:
    """Return the source of the kernel of such a nest."""
    return write_kernel(nest, _write)


def _tile(nest: Nest, prefix: str) -> _Tile:
    """Return the values of a tile, with the places of all that is written out."""
    tile = _Tile(nest, prefix)
    tile.rows = _places(nest, range(nest.output_loops))
    tile.steps = _places(
        nest, [loop for loop in range(nest.output_loops, nest.loops) if nest.tiles[loop]]
    )
    return tile


def _places(nest: Nest, loops: Sequence[int]) -> list[dict[int, int]]:
    """Return all combinations of the places of loops; lanes are computed together."""
    ranges = []
    for loop in loops:
        ranges.append(range(0, nest.tiles[loop], nest.width if loop == nest.lane else 1))
    return [dict(zip(loops, places, strict=True)) for places in itertools.product(*ranges)]


def _write(nest: Nest, text: SourceLines) -> None:
    aggregate = aggregate_of(nest)
    rows = len(_tile(nest, "").rows)
    width = nest.width
    arrays = {"total": aggregate.total}
    if aggregate.in_parts:
        arrays["part"] = aggregate.dtype
    # An array for each result: LLVM would ask whether parts of one array overlap.
    for array, dtype in arrays.items():
        text.add(*[f"{array}{row} = stack({stored_dtype(dtype)}, {width})" for row in range(rows)])
    for loop in range(nest.output_loops):
        tile = nest.tiles[loop]
        text.open(f"for q{loop} in range(start{loop}, stop{loop}, {tile}):")
        for place in range(tile):  # the last results may be computed twice
            text.add(f"i{loop}_{place} = least(q{loop} + {place}, stop{loop} - 1)")
    depth = text.depth
    _start(aggregate, "total", aggregate.total, rows, text)
    loops = [loop for loop in range(nest.output_loops, nest.loops) if not nest.tiles[loop]]
    open_loops(loops[:-1], text)
    each = len(_tile(nest, "").steps)
    for loop in loops[-1:]:
        block = max(1, BLOCK_STEPS // each)
        text.open(f"for jb in range(start{loop}, stop{loop}, {block}):")
        text.add(f"je = least(jb + {block}, stop{loop})")
    block_depth = text.depth
    if aggregate.in_parts:
        _start(aggregate, "part", aggregate.dtype, rows, text)
    for loop in loops[-1:]:
        text.open(f"for i{loop} in range(jb, je):")
    tile_values = _tile(nest, "t")
    for row in range(rows):
        _add_row(aggregate, tile_values, row)
    text.add(*tile_values.before)
    text.add_lane_loop(width, *tile_values.inside)
    text.depth = block_depth
    if aggregate.in_parts:
        for row in range(rows):
            write_parts(aggregate, width, text, f"{row}")
    text.depth = depth
    _write_results(aggregate, rows, text)


def _start(aggregate: Aggregate, array: str, dtype: str, rows: int, text: SourceLines) -> None:
    """Write what lets the totals or parts of all results begin."""
    starts = [f"{array}{row}[{{v}}] = {aggregate.start(dtype)}" for row in range(rows)]
    text.add_lane_loop(aggregate.nest.width, *starts)


def _add_row(aggregate: Aggregate, tile: _Tile, row: int) -> None:
    """Add the lines that aggregate all that is written out for one result of a tile."""
    nest = aggregate.nest
    dtype = aggregate.dtype
    array = "part" if aggregate.in_parts else "total"
    slot = f"{array}{row}[{{v}}]"
    steps = range(len(tile.steps))
    factors = _factors(aggregate)
    if not factors:
        values = [tile.value(nest.function, dtype, row, step) for step in steps]
        found = aggregate.tree(
            tile, [loaded(slot, dtype), aggregate.tree(tile, values, dtype)], dtype
        )
        tile.inside.append(f"{slot} = {stored(found, dtype)}")
        return
    written = {loop for loop in range(nest.output_loops, nest.loops) if nest.tiles[loop]}
    inner = [factor for factor in factors if tile.uses(factor) & written]
    outer = [factor for factor in factors if not tile.uses(factor) & written]
    if nest.is_strict or not inner:
        inner, outer = list(factors), []
    total = "" if outer else slot
    for step in steps:
        values = [tile.value(factor, dtype, row, step) for factor in inner]
        product = " * ".join(values[:-1])
        if len(values) > 2:
            product = tile.keep(product, True)
        if not product:
            total = tile.keep(f"{total} + {values[-1]}" if total else values[-1], True)
        elif total:
            total = tile.keep(f"muladd({product}, {values[-1]}, {total})", True)
        else:
            total = tile.keep(f"{product} * {values[-1]}", True)
    if outer:
        shared = " * ".join(tile.value(factor, dtype, row, 0) for factor in outer)
        total = f"muladd({total}, {tile.keep(shared, False)}, {slot})"
    tile.inside.append(f"{slot} = {total}")


def _factors(aggregate: Aggregate) -> list[Scalar]:
    """Return the factors of ⊗ if it is a real product in the dtype of its sum, else none."""
    if not aggregate.factors:
        return []
    found: list[Scalar] = []
    waiting = list(reversed(aggregate.factors))
    while waiting:
        node = waiting.pop()
        dtype = np.dtype(kind_of(node, aggregate.types)).name
        if isinstance(node, Call) and node.op == "*" and dtype == aggregate.dtype:
            waiting.extend(reversed(node.args))
        else:
            found.append(node)
    return found


def _write_results(aggregate: Aggregate, rows: int, text: SourceLines) -> None:
    """Write what combines the lanes of each result by halves, and stores it."""
    nest = aggregate.nest
    for row in range(rows):
        write_halves(aggregate, text, f"{row}")
    tile = _tile(nest, "w")
    stores = []
    for row in range(rows):
        target, _ = tile.pointer(len(nest.reads), row)
        slot = loaded(f"total{row}[0]", aggregate.total)
        value = convert(slot, aggregate.total, nest.out.dtype)
        stores.append(f"{target}[0] = {stored(value, nest.out.dtype)}")
    text.add(*tile.before, *stores)
