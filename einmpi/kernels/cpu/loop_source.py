"""The Python source of a kernel that numba compiles: ⊕ over ⊗ as one nest of loops, tiled and
unrolled (paper, section 3).

Names in the source: `p` has the parameters (see Nest.parameters), `i` and a number is the index of
an outer loop, `q` a counter of several outer loops, `e` and a number the extent of one of these,
`c` the first lane of a strip of `n` lanes, `rb` and `re` the start and stop of a tile of rows, `jb`
and `je` those of a block of steps.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Arg, Call, walk
from einmpi.kernels.cpu.scalar_source import Lanes, convert, number, operation
from einmpi.kernels.loop_nest import BLOCK_STEPS, MATCHES, Nest
from einmpi.kernels.scalar_text import FoldTypes

# ---- source lines --------------------------------------------------------------------------------
#
# Lines of source, nested loops, and how values are kept in memory: what the sources of all
# compiled CPU kernels share.


# Outer loops of the output, and as many aggregated ones, that are written one inside another. With
# the six loops of tiles and lanes these are 20, the most that Python allows.
MAX_NESTED_LOOPS = 7


@dataclass
class SourceLines:
    """Lines of source with their indentation."""

    lines: list[str] = field(default_factory=list)
    depth: int = 1

    def add(self, *lines: str) -> None:
        self.lines += ["    " * self.depth + line for line in lines]

    def open(self, line: str) -> None:
        """Add a line that begins a block."""
        self.add(line)
        self.depth += 1

    def close(self) -> None:
        """End the innermost block."""
        self.depth -= 1

    def add_lane_loop(self, count: str | int, *lines: str, group: int = 1) -> None:
        """Add a loop over lanes; {v} in its lines stands for the lane.

        Every loop has a variable of its own: numba compiles that fastest. With a group, so many
        lanes are written out one after another, and those left over have a loop of their own.
        """
        if count == 1:
            self.add(*(line.replace("{v}", "0") for line in lines))
            return
        bounds = f"{count}"
        if group > 1:
            variable = f"v{len(self.lines)}"
            self.open(f"for {variable} in range(0, {count} - {group - 1}, {group}):")
            for k in range(group):
                self.add(*(line.replace("{v}", f"({variable} + {k})") for line in lines))
            self.close()
            bounds = f"{count} - {count} % {group}, {count}"
        variable = f"v{len(self.lines)}"
        self.open(f"for {variable} in range({bounds}):")
        self.add(*(line.replace("{v}", variable) for line in lines))
        self.close()


def open_loops(loops: Sequence[int], text: SourceLines) -> None:
    """Open loops, one inside another; if there are too many, one loop counts for the outermost.

    The digits of its counter, in the mixed radix of the extents, are the indices of those loops.
    """
    surplus = len(loops) - MAX_NESTED_LOOPS
    counted = loops[: surplus + 1] if surplus > 0 else []
    nested = loops[len(counted) :]
    if counted:
        for loop in counted:
            text.add(f"e{loop} = stop{loop} - start{loop}")
        counter = f"q{counted[0]}"
        total = " * ".join(f"e{loop}" for loop in counted)
        text.open(f"for {counter} in range({total}):")
        text.add(f"{counter}_left = {counter}")
        for loop in reversed(counted):
            text.add(f"i{loop} = start{loop} + {counter}_left % e{loop}")
            text.add(f"{counter}_left //= e{loop}")
    for loop in nested:
        text.open(f"for i{loop} in range(start{loop}, stop{loop}):")


def stored_dtype(dtype: str) -> str:
    """Return the dtype in which numbers are kept in memory."""
    return DTYPES[dtype].numba_stored


def loaded(text: str, dtype: str) -> str:
    """Return a value from memory; truth values are kept as bytes."""
    return f"({text} != 0)" if dtype == "bool" else text


def stored(text: str, dtype: str) -> str:
    """Return a value as it is kept in memory."""
    return f"uint8({text})" if dtype == "bool" else text


# ---- scatter source ------------------------------------------------------------------------------
#
# The source of a compiled kernel that scatters: each value of ⊗ joins the total at its place.


def write_scatter(nest: Nest, text: SourceLines) -> None:
    """Write the loops: aggregated labels outside, in order, and the labels of the output inside.

    The place does not depend on the lane. Values whose place is not this kernel's are not computed.
    """
    assert nest.aggregation is not None and nest.place is not None
    rule = AGGREGATIONS[nest.aggregation]
    dtype = nest.out.dtype
    if nest.step is not None:
        open_loops(range(nest.output_loops, nest.step), text)
        text.open(f"for tj0 in range(start{nest.step}, stop{nest.step}):")
    open_loops([loop for loop in range(nest.output_loops) if loop != nest.lane], text)
    lanes = Lanes(nest, "t")
    place = lanes.value(Arg(nest.place), "int64")
    text.add(f"c = start{nest.lane}", f"n = stop{nest.lane} - c", *lanes.before)
    # One comparison: what is below first_place becomes a huge number.
    text.open(f"if uint64({place} - first_place) < uint64(end_place - first_place):")
    written = len(lanes.before)
    target, lane = lanes.pointer(len(nest.reads))
    value = lanes.value(nest.function, dtype)
    total = f"{target}[{lane}]"
    joined = operation(rule.operation, [loaded(total, dtype), value], [dtype])
    if "; " in joined:  # an operation of several statements needs names for its values
        joined = lanes.keep(joined, True)
    text.add(*lanes.before[written:])
    lane_count = 1 if nest.width == 1 else "n"
    text.add_lane_loop(lane_count, *lanes.inside, f"{total} = {stored(joined, dtype)}")


SEGMENT_LANES = 64  # of a segment that are computed all at once
TILE_ROWS = 64  # rows that share a tile of lanes
TRANSPOSE_EDGE = 32  # rows and lanes of the squares in which a transposed array is read
# How many lanes are written out where each is a long chain of steps that LLVM does not vectorise:
# the processor works on all of them at once. It vectorises them on x86, which has products of 64
# bits for several lanes; ARM has none.
CHAIN_LANES = 1 if platform.machine() in ("x86_64", "AMD64") else 4
HEAD = (
    "import math\n"
    "from numba import complex64, complex128, float32, float64, int8, int16, int32, int64\n"
    "from numba import uint8, uint16, uint32, uint64\n"
    "from einmpi.kernels.cpu.intrinsics import "
    "at, ceil, exp, floor, fmax, fmin, fmod, least, muladd, pick, random_normal, random_uniform, "
    "random_uniform32, rint, stack, tanh, whole\n"
    "\n\n"
    "def kernel(address):\n"
    "    p = at(int64, address)\n"
)


def kernel_source(nest: Nest) -> str:
    """Return the source of the function `kernel`, which takes the address of its parameters."""
    return write_kernel(nest, _write)


def write_kernel(nest: Nest, write: Callable[[Nest, SourceLines], None]) -> str:
    """Return the source of a kernel whose loops `write` adds.

    It begins by reading all parameters and ends by writing back the least and the greatest index
    of each gather.
    """
    names = nest.parameters()
    text = SourceLines()
    constants = dict(nest.constants)
    for position, name in enumerate(names):
        text.add(f"{name} = {constants.get(name, f'p[{position}]')}")
    write(nest, text)
    text.depth = 1
    for position, name in enumerate(names):
        if name.startswith(("lowest", "highest")):
            text.add(f"p[{position}] = {name}")
    return HEAD + "\n".join(text.lines) + "\n"


def _write(nest: Nest, text: SourceLines) -> None:
    if nest.matches is not None:
        _write_matches(nest, text)
    elif nest.segments is not None:
        _write_segments(nest, text)
    elif nest.place is not None:
        write_scatter(nest, text)
    elif nest.short_sum:
        _write_short_sums(nest, text)
    elif nest.aggregation is None:
        _write_map(nest, text)
    else:
        _write_reduction(nest, text)


def _open_output_loops(nest: Nest, text: SourceLines) -> None:
    """Open the loops of the output that are neither rows nor lanes."""
    loops = [loop for loop in range(nest.output_loops) if loop not in (nest.row, nest.lane)]
    open_loops(loops, text)


def _write_map(nest: Nest, text: SourceLines) -> None:
    """Write the loops of ⊗ without ⊕.

    Rows and lanes are computed in small squares: so an array that is contiguous along the rows is
    read by whole cache lines too.
    """
    lane = nest.lane
    row = nest.row
    _open_output_loops(nest, text)
    if row is None:
        text.add(f"c = start{lane}")
        text.add(f"n = stop{lane} - c")
    else:
        text.open(f"for c in range(start{lane}, stop{lane}, {TRANSPOSE_EDGE}):")
        text.add(f"n = least({TRANSPOSE_EDGE}, stop{lane} - c)")
        text.open(f"for rb in range(start{row}, stop{row}, {TRANSPOSE_EDGE}):")
        text.open(f"for tr0 in range(rb, least(rb + {TRANSPOSE_EDGE}, stop{row})):")
    lanes = Lanes(nest, "t")
    value = lanes.value(nest.function, nest.out.dtype)
    target, place = lanes.pointer(len(nest.reads))
    text.add(*lanes.before)
    store = f"{target}[{place}] = {stored(value, nest.out.dtype)}"
    is_chain = any(
        isinstance(node, Call) and OPERATIONS[node.op].cpu_is_chain for node in walk(nest.function)
    )
    text.add_lane_loop("n", *lanes.inside, store, group=CHAIN_LANES if is_chain else 1)


def _write_reduction(nest: Nest, text: SourceLines) -> None:
    """Write the loops of ⊕ over ⊗.

    The totals, one for each row and lane of a tile, are on the stack. A rounded ⊕ aggregates
    BLOCK_STEPS steps in a partial result and only then joins it to the total, in a wider dtype:
    long sums lose fewer digits.
    """
    lane = nest.lane
    width = nest.width
    aggregate = aggregate_of(nest)
    rows, _ = nest.unrolled
    tile_rows = TILE_ROWS + rows - 1 if nest.has_rows else 1
    text.add(f"total = stack({stored_dtype(aggregate.total)}, {tile_rows * width})")
    if aggregate.in_parts:
        text.add(f"part = stack({stored_dtype(aggregate.dtype)}, {rows * width})")
    _open_output_loops(nest, text)
    total_count: str | int = "n"
    partial_count: str | int = "n"
    if nest.aggregates_lanes:
        total_count = width
        partial_count = rows * width
    else:
        text.open(f"for c in range(start{lane}, stop{lane}, {width}):")
        text.add(f"n = least({width}, stop{lane} - c)")
    if nest.has_rows:
        total_count = f"(re - rb + {rows - 1}) * {width}"
        partial_count = rows * width
        text.open(f"for rb in range(start{nest.row}, stop{nest.row}, {TILE_ROWS}):")
        text.add(f"re = least(rb + {TILE_ROWS}, stop{nest.row})")
    tile_depth = text.depth
    text.add_lane_loop(total_count, f"total[{{v}}] = {aggregate.start(aggregate.total)}")
    open_loops(range(nest.output_loops, nest.loops - 1), text)
    block = BLOCK_STEPS * width if nest.aggregates_lanes else BLOCK_STEPS
    text.open(f"for jb in range(start{nest.step}, stop{nest.step}, {block}):")
    text.add(f"je = least(jb + {block}, stop{nest.step})")
    if nest.has_rows:
        text.open(f"for r in range(rb, re, {rows}):")
        text.add(f"base = (r - rb) * {width}")
    if aggregate.in_parts:
        text.add_lane_loop(partial_count, f"part[{{v}}] = {aggregate.start(aggregate.dtype)}")
    _write_steps(nest, aggregate, text)
    if aggregate.in_parts:
        write_parts(aggregate, partial_count, text)
    text.depth = tile_depth
    _write_results(nest, aggregate, text)


def _write_steps(nest: Nest, aggregate: Aggregate, text: SourceLines) -> None:
    """Write the loop over the steps of a block, several at a time, and one over those left.

    An idempotent ⊕ needs no second loop: it takes the last step several times instead. With an
    odd number of rows, the last row is computed twice and stored once.
    """
    rows, steps = nest.unrolled
    pace = nest.width if nest.aggregates_lanes else 1
    repeats_last = aggregate.rule.is_idempotent and not nest.aggregates_lanes
    passes = [("t", "jb", "je", steps)]  # prefix of new names, start, stop, steps at a time
    if steps > 1 and not repeats_last:
        text.add(f"jm = je - (je - jb) % {steps * pace}")
        passes = [("t", "jb", "jm", steps), ("u", "jm", "je", 1)]
    if nest.has_rows:
        for prefix, *_ in passes:
            for row in range(rows):
                text.add(f"{prefix}r{row} = least(r + {row}, re - 1)")
    for prefix, start, stop, count in passes:
        text.open(f"for {prefix}j0 in range({start}, {stop}, {count * pace}):")
        for step in range(1, count):
            index = f"({prefix}j0 + {step * pace})"
            if repeats_last:
                index = f"least({prefix}j0 + {step * pace}, je - 1)"
            text.add(f"{prefix}j{step} = {index}")
        lanes = Lanes(nest, prefix)
        for row in range(rows):
            aggregate.add_steps(lanes, row, count)
        text.add(*lanes.before)
        lane_count: str | int = "n"
        if nest.aggregates_lanes:
            is_full = count > 1
            lane_count = nest.width if is_full else f"least({nest.width}, je - {prefix}j0)"
        text.add_lane_loop(lane_count, *lanes.inside)
        text.close()


def _write_short_sums(nest: Nest, text: SourceLines) -> None:
    """Write the loops of ⊕ over so few lanes that they are one part, which is in registers."""
    aggregate = aggregate_of(nest)
    array = "part" if aggregate.in_parts else "total"
    text.add(f"{array} = stack({stored_dtype(aggregate.dtype)}, {nest.width})")
    open_loops(range(nest.output_loops), text)
    text.add_lane_loop(nest.width, f"{array}[{{v}}] = {aggregate.start(aggregate.dtype)}")
    text.open(f"for tj0 in range(0, {nest.short_sum}, {nest.width}):")
    text.add("c = tj0")
    lanes = Lanes(nest, "t")
    aggregate.add_steps(lanes, 0, 1)
    text.add(*lanes.before)
    text.add_lane_loop(nest.width, *lanes.inside)
    text.close()
    half = nest.width // 2
    while half:
        lanes = Lanes(nest, f"y{half}_")
        pair = [loaded(f"{array}[{{v}}{more}]", aggregate.dtype) for more in ("", f" + {half}")]
        joined = stored(aggregate.tree(lanes, pair, aggregate.dtype), aggregate.dtype)
        text.add_lane_loop(half, *lanes.inside, f"{array}[{{v}}] = {joined}")
        half //= 2
    lanes = Lanes(nest, "w")
    target, place = lanes.pointer(len(nest.reads))
    value = convert(loaded(f"{array}[0]", aggregate.dtype), aggregate.dtype, nest.out.dtype)
    text.add(*lanes.before, f"{target}[{place}] = {stored(value, nest.out.dtype)}")


def _write_segments(nest: Nest, text: SourceLines) -> None:
    """Write the loops of ⊕ over the values of each segment, whose total is in registers.

    Narrow lanes are computed all at once: how many there are is part of the source. The total of a
    segment that is no longer than one part is that part.
    """
    assert nest.segments is not None
    width = nest.width
    aggregate = aggregate_of(nest)
    count: str | int = 1 if width == 1 else "n"
    text.add(f"total = stack({stored_dtype(aggregate.total)}, {width})")
    is_in_parts = aggregate.total != aggregate.dtype
    if is_in_parts:
        text.add(f"part = stack({stored_dtype(aggregate.dtype)}, {width})")
    elif aggregate.in_parts:
        text.add("part = total")
    if nest.has_adjacent_segments:
        lanes = Lanes(nest, "f")
        first = lanes.value(Arg(nest.segments), "int64")
        text.add("i0 = start0", *lanes.before, f"stop = {first}")
    open_loops([loop for loop in range(nest.output_loops) if loop != nest.lane], text)
    if width <= SEGMENT_LANES:
        text.add("c = 0", f"n = {width}")
    else:
        text.open(f"for c in range(start{nest.lane}, stop{nest.lane}, {width}):")
        text.add(f"n = least({width}, stop{nest.lane} - c)")
    lanes = Lanes(nest, "s")
    start = "stop"
    if not nest.has_adjacent_segments:
        start = lanes.value(Arg(nest.segments), "int64")
    stop = lanes.value(Arg(nest.segments + 1), "int64")
    text.add(*lanes.before, f"start, stop = {start}, {stop}")
    start_part = f"part[{{v}}] = {aggregate.start(aggregate.dtype)}"
    if is_in_parts:
        if not nest.has_short_segments:
            text.open(f"if stop - start <= {BLOCK_STEPS}:")
        text.add_lane_loop(count, start_part)
        _write_values(aggregate, "start", "stop", count, text)
        _write_results(nest, aggregate, text, "part")
        if nest.has_short_segments:
            return
        text.close()
        text.open("else:")
    text.add_lane_loop(count, f"total[{{v}}] = {aggregate.start(aggregate.total)}")
    if is_in_parts:
        text.open(f"for qb in range(start, stop, {BLOCK_STEPS}):")
        text.add_lane_loop(count, start_part)
        _write_values(aggregate, "qb", f"least(qb + {BLOCK_STEPS}, stop)", count, text)
        write_parts(aggregate, count, text)
        text.close()
    else:
        _write_values(aggregate, "start", "stop", count, text)
    _write_results(nest, aggregate, text)


def _write_values(
    aggregate: Aggregate, start: str, stop: str, count: str | int, text: SourceLines
) -> None:
    """Write the loops of ⊕ over some values of a segment, and over what is inside of each value."""
    nest = aggregate.nest
    depth = text.depth
    if nest.step != nest.output_loops:
        text.open(f"for i{nest.output_loops} in range({start}, {stop}):")
        open_loops(range(nest.output_loops + 1, nest.loops - 1), text)
        start, stop = f"start{nest.step}", f"stop{nest.step}"
    text.add(f"end = {stop}")
    steps = 1 if nest.width == 1 else nest.unrolled[1]
    passes = [("t", start, "end", 1)]
    if steps > 1:
        text.add(f"middle = end - (end - {start}) % {steps}")
        passes = [("t", start, "middle", steps), ("u", "middle", "end", 1)]
    for prefix, begin, end, together in passes:
        lanes = Lanes(nest, prefix, walks=nest.width == 1)
        aggregate.add_steps(lanes, 0, together)
        for array, stride in lanes.walked.items():
            text.add(f"walk{array} = array{array} + {begin} * {stride}")
        text.open(f"for {prefix}j0 in range({begin}, {end}, {together}):")
        text.add(*[f"{prefix}j{step} = {prefix}j0 + {step}" for step in range(1, together)])
        text.add(*lanes.before)
        text.add_lane_loop(count, *lanes.inside)
        text.add(*[f"walk{array} += {stride}" for array, stride in lanes.walked.items()])
        text.close()
    text.depth = depth


def _write_matches(nest: Nest, text: SourceLines) -> None:
    """Write the loops over the rows of a product of matrices, and the pairs of elements of each.

    The sums of a row are where its results are, or in memory of a wider dtype if there may be more
    than one part in a sum.
    """
    assert nest.matches is not None
    aggregate = aggregate_of(nest)
    lists = dict(zip(MATCHES, range(nest.matches, len(nest.reads)), strict=False))
    dtype = aggregate.total if "sums" in lists else aggregate.dtype
    for name, array in lists.items():
        text.add(f"{name} = at({stored_dtype(nest.reads[array].dtype)}, array{array})")
    text.add(f"results = at({stored_dtype(nest.out.dtype)}, array{len(nest.reads)})")
    first = "first_p[i0]" if "sums" in lists else "0"
    if "sums" not in lists:
        text.add("sums = results")
    text.open("for i0 in range(start0, stop0):")
    text.add(f"first = int64({first})")
    text.open("for s in range(first_p[i0], first_p[i0 + 1]):")
    text.add("place[own_column[s]] = s - first", f"sums[s - first] = {aggregate.start(dtype)}")
    text.close()
    x = nest.output_loops
    text.open(f"for i{x} in range(int64(first_x[i0]), int64(first_x[i0 + 1])):")
    lanes = Lanes(nest, "t")
    for node in walk(nest.function):  # what depends on x alone is read once
        if isinstance(node, Arg) and lanes.uses(node) == {x}:
            lanes.value(node, nest.reads[node.position].dtype)
    text.add(*lanes.before, f"row = match[i{x}]")
    text.open("for tj0 in range(int64(first_y[row]), int64(first_y[row + 1])):")
    text.add("s = place[column[tj0]]")
    written = len(lanes.before)
    if aggregate.factors:
        left, right = (lanes.value(factor, dtype) for factor in aggregate.factors)
        joined = f"muladd({left}, {right}, sums[s])"
    else:
        value = convert(lanes.value(nest.function, aggregate.dtype), aggregate.dtype, dtype)
        joined = stored(aggregate.tree(lanes, [loaded("sums[s]", dtype), value], dtype), dtype)
    text.add(*lanes.before[written:], *lanes.inside, f"sums[s] = {joined}")
    text.depth -= 2
    if "sums" in lists:
        text.open("for s in range(first_p[i0], first_p[i0 + 1]):")
        text.add(f"results[s] = {convert('sums[s - first]', dtype, nest.out.dtype)}")


def write_parts(
    aggregate: Aggregate, count: str | int, text: SourceLines, result: str = ""
) -> None:
    """Write what joins partial results to totals: of all, or of one `result` by its number."""
    slot = aggregate.slot(f"total{result}", 0)
    lanes = Lanes(aggregate.nest, f"x{result}_")
    part = convert(f"part{result}[{{v}}]", aggregate.dtype, aggregate.total)
    joined = aggregate.join(lanes, [slot, part])
    text.add_lane_loop(count, *lanes.inside, f"{slot} = {joined}")


def write_halves(aggregate: Aggregate, text: SourceLines, result: str = "") -> None:
    """Write what combines the lanes of totals to one, by halves."""
    total = f"total{result}"
    text.add(f"h = {aggregate.nest.width // 2}")
    text.open("while h > 0:")
    lanes = Lanes(aggregate.nest, f"y{result}_")
    joined = aggregate.join(lanes, [f"{total}[{{v}}]", f"{total}[{{v}} + h]"])
    text.add_lane_loop("h", *lanes.inside, f"{total}[{{v}}] = {joined}")
    text.add("h //= 2")
    text.close()


def _write_results(
    nest: Nest, aggregate: Aggregate, text: SourceLines, array: str = "total"
) -> None:
    """Write what stores the totals; aggregated lanes are first combined to one, by halves.

    The `array` is "part" if there is no more than one.
    """
    if nest.aggregates_lanes:
        write_halves(aggregate, text)
    slot = f"{array}[{{v}}]"
    if nest.has_rows:
        slot = f"total[(wr0 - rb) * {nest.width} + {{v}}]"
        text.open("for wr0 in range(rb, re):")
    lanes = Lanes(nest, "w")
    target, place = lanes.pointer(len(nest.reads))
    text.add(*lanes.before)
    dtype = aggregate.total if array == "total" else aggregate.dtype
    value = convert(loaded(slot, dtype), dtype, nest.out.dtype)
    text.add_lane_loop(
        1 if nest.aggregates_lanes or nest.width == 1 else "n",
        f"{target}[{place}] = {stored(value, nest.out.dtype)}",
    )


@dataclass(frozen=True)
class Aggregate(FoldTypes):
    """The source of ⊕ in a nest."""

    nest: Nest

    def start(self, dtype: str) -> str:
        """Return the neutral element of ⊕."""
        return number(self.rule.neutral(np.dtype(dtype)), stored_dtype(dtype))

    def slot(self, array: str, row: int) -> str:
        """Return the element of `total` or `part` for a row of the unrolled ones and lane {v}."""
        terms = []
        if array == "total" and self.nest.has_rows:
            terms.append("base")
        if row > 0:
            terms.append(str(row * self.nest.width))
        terms.append("{v}")
        return f"{array}[{' + '.join(terms)}]"

    def join(self, lanes: Lanes, values: list[str]) -> str:
        """Return ⊕ of totals, as it is stored."""
        totals = [loaded(value, self.total) for value in values]
        return stored(self.tree(lanes, totals, self.total), self.total)

    def tree(self, lanes: Lanes, values: list[str], dtype: str) -> str:
        """Return ⊕ of values, combined in pairs: processors compute both sides at once."""
        if len(values) == 1:
            return values[0]
        half = len(values) // 2
        left = self.tree(lanes, values[:half], dtype)
        right = self.tree(lanes, values[half:], dtype)
        text = operation(self.rule.operation, [left, right], [dtype])
        # An operation of several statements needs names for its values.
        return lanes.keep(text, True) if "; " in text else f"({text})"

    def add_steps(self, lanes: Lanes, row: int, steps: int) -> None:
        """Add the lines that aggregate ⊗ of some steps for one of the unrolled rows."""
        dtype = self.dtype
        slot = self.slot("part" if self.in_parts else "total", row)
        factors = self.factors
        if not factors:
            values = [lanes.value(self.nest.function, dtype, row, step) for step in range(steps)]
            old = loaded(slot, dtype)
            total = self.tree(lanes, [old, self.tree(lanes, values, dtype)], dtype)
            lanes.inside.append(f"{slot} = {stored(total, dtype)}")
            return
        # The last product and the sum round only once: faster, and more precise.
        name = slot
        for step in range(steps):
            left = lanes.value(factors[0], dtype, row, step)
            right = lanes.value(factors[1], dtype, row, step)
            name = lanes.keep(f"muladd({left}, {right}, {name})", True)
        lanes.inside.append(f"{slot} = {name}")


def aggregate_of(nest: Nest) -> Aggregate:
    """Return the source of ⊕ in a nest that has one."""
    assert nest.aggregation is not None
    types = tuple(read.dtype for read in nest.reads)
    return Aggregate(nest.aggregation, nest.function, types, nest)
