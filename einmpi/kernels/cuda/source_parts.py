"""Building blocks of generated CUDA kernels: signature, loop indices, reads, totals of a team.

In the text, `i0`, `i1`, … are the indices of the loops, `array0`, `array1`, … the arrays; the
other arguments are named after their role, such as `extent2` or `stride0_2` (see Nest.parameters).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from textwrap import dedent

from einmpi.kernels.cuda.device_functions import device_source
from einmpi.kernels.cuda.nest import BLOCK_THREADS, WARP_THREADS, CudaNest, Nest, Term
from einmpi.kernels.cuda.scalar_source import (
    COMPUTED,
    STORED,
    Fold,
    Steps,
    stored,
    weight_of,
    width_of,
)
from einmpi.kernels.loop_nest import role_of

# Arguments that are not offsets into an array keep 64 bits.
LONG_ROLES = ("multiplier", "shift", "first", "wants_range", "gather_extent")


@dataclass
class KernelText:
    """The text of a kernel while it is written, line by line."""

    lines: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)  # lines in front of the kernel
    depth: int = 0

    def add(self, *texts: str) -> None:
        """Add lines; those of a text are indented relative to its first line."""
        for text in texts:
            lines = dedent(text).strip("\n").splitlines()
            self.lines += ["  " * self.depth + line for line in lines]

    @contextmanager
    def block(self, head: str, end: str = "}") -> Iterator[None]:
        """Write `head {`, then what the caller adds, indented, then `end`."""
        self.lines.append("  " * self.depth + head + " {")
        self.depth += 1
        yield
        self.depth -= 1
        self.add(end)


def whole_text(nest: Nest, text: KernelText, threads: int) -> str:
    """Return the text of a kernel: device functions, the type of indices, arguments, statements.

    Every number arrives in 64 bits, whatever it is used for, and is converted first of all.
    """
    arguments = []
    conversions = []
    for name in nest.parameters():
        role = role_of(name)
        if role == "array":
            array = int(name.removeprefix(role))
            const = "const " if array < len(nest.reads) else ""
            kind = STORED[nest.arrays[array].dtype]
            arguments.append(f"{const}{kind}* __restrict__ {name}")
        elif role == "report":
            arguments.append(f"Long* {name}")
        else:
            kind = "Long" if role in LONG_ROLES else "I"
            arguments.append(f"Long given_{name}")
            conversions.append(f"  const {kind} {name} = ({kind})given_{name};")
    index_type = "Long" if nest.wide else "int"
    lines = [
        *text.functions,
        f"typedef {index_type} I;  // of indices and offsets",
        f'extern "C" __global__ void __launch_bounds__({threads}) kernel(',
        "    " + ",\n    ".join(arguments) + ") {",
        *conversions,
        *("  " + line for line in text.lines),
        "}",
        "",
    ]
    return device_source() + "\n".join(lines)


def add_loop_indices(text: KernelText, flat: str, loops: Sequence[int]) -> None:
    """Split a flat index into the indices i0, i1, … of loops, of which the last is the fastest.

    `flat` is the name of a variable, which is used up.
    """
    for loop in reversed(loops[1:]):
        text.add(f"""
            const I quotient{loop} = quotient({flat}, multiplier{loop}, shift{loop});
            const I i{loop} = {flat} - quotient{loop} * extent{loop};
            {flat} = quotient{loop};
        """)
    if loops:
        text.add(f"const I i{loops[0]} = {flat};")


def extent_product(loops: Sequence[int]) -> str:
    """Return the product of the extents of loops, as text."""
    return " * ".join(f"extent{loop}" for loop in loops) or "(I)1"


def add_part_bounds(nest: CudaNest, text: KernelText) -> None:
    """Say which of the aggregated values belong to the part of this block."""
    text.add(f"""
        const I begin = (I)blockIdx.y * part_length;
        const I end = least(begin + part_length, {extent_product(nest.aggregated_loops)});
    """)


def steps_of(
    nest: CudaNest,
    prefix: str = "v",
    part: str = "",
    from_shared_memory: Callable[[int], str | None] = lambda read: None,
) -> Steps:
    """Return an empty list of statements that read operands at the indices i0, i1, …

    `part` is the position in a pack. `from_shared_memory` gives the text of reads that are in
    shared memory already, and None for the others.
    """
    lane = nest.loops - 1 if nest.lane_is_aggregated else nest.output_loops - 1

    def read_text(read: int) -> str:
        shared = from_shared_memory(read)
        if shared is not None:
            return shared
        if nest.reads[read].counts:
            return counter_text(read, nest.reads[read].loops, lane, nest.pack, part)
        if read in nest.packed:
            return f"load(pack{read}.at[{part}])"
        return f"load(array{read}[{offset_text(nest, read, steps)}])"

    steps = Steps([access.dtype for access in nest.reads], read_text, prefix)
    return steps


def counter_text(read: int, loops: Sequence[int], lane: int, pack: int, part: str) -> str:
    """Return the value of a read that counts a loop; the lane counts packs, not elements."""
    if not loops:
        return f"(first{read} + 0)"
    if lane in loops and pack > 1:
        return f"(first{read} + i{loops[0]} * {pack} + {part})"
    return f"(first{read} + i{loops[0]})"


def offset_text(nest: Nest, array: int, steps: Steps | None = None) -> str:
    """Return the offset of an array's element. An index out of range reads element 0 instead.

    Gathers need `steps`, to which the statements that compute and check the indices are added.
    """
    access = nest.arrays[array]
    terms = [f"i{loop} * stride{array}_{loop}" for loop in access.loops]
    for number, gather in enumerate(access.gathers):
        assert steps is not None, "only operands are gathered"
        index = steps.value(gather, "int64")
        if (array, number) not in nest.checked:
            terms.append(f"(I){index} * gather_stride{array}_{number}")
            continue
        in_range = steps.keep(f"0 <= {index} && {index} < gather_extent{array}_{number}", "bool")
        lowest = 1 + 2 * nest.checked.index((array, number))
        steps.lines += [
            f"if (!{in_range}) report[0] = 1;",
            f"if (wants_range) atomicMin(report + {lowest}, {index});",
            f"if (wants_range) atomicMax(report + {lowest + 1}, {index});",
        ]
        terms.append(f"(I)({in_range} ? {index} : 0) * gather_stride{array}_{number}")
    return " + ".join(terms) or "0"


def output_offset_text(nest: CudaNest) -> str:
    """Return the offset of a result in the output of this block's part."""
    return f"{offset_text(nest, len(nest.reads))} + (I)blockIdx.y * part_stride"


def fold_of(nest: CudaNest, types: Sequence[str]) -> Fold:
    assert nest.aggregation is not None
    return Fold(nest.aggregation, nest.function, tuple(types))


def add_team_total(
    text: KernelText, total: str, kind: str, fold: Fold, team: int, teams: int
) -> None:
    """Join the totals of a team of neighbouring threads, so that each thread has the result.

    Threads of a warp exchange their totals directly, warps through shared memory.
    """
    text.add(f"""
        // Join the totals of a team.
        #pragma unroll
        for (int half = {min(team, WARP_THREADS) // 2}; half; half /= 2) {{
          {total} = {fold.join(total, f"from_lane({total}, half)")};
        }}
    """)
    warps = team // WARP_THREADS
    if warps < 2:
        return
    first = f"threadIdx.x / {team} * {warps}"
    with text.block(""):
        text.add(f"""
            __shared__ {kind} warps[{warps * teams}];
            if (threadIdx.x % {WARP_THREADS} == 0) warps[threadIdx.x / {WARP_THREADS}] = {total};
            __syncthreads();
            {total} = warps[{first}];
            #pragma unroll
            for (int w = 1; w < {warps}; ++w) {{
              {total} = {fold.join(total, f"warps[{first} + w]")};
            }}
        """)


# ---- source --------------------------------------------------------------------------------------
#
# The text of a CUDA kernel in tiles: ⊕ over values that rows and columns share.
#
# Matrix products in any semiring, and distances. 16 × 16 threads compute a tile of the output,
# each some rows and columns in registers; the operands pass through shared memory, a few steps
# at a time.


TILE_THREADS = 16  # threads along each side of a tile
VECTOR_BYTES = 16  # of shared memory that a thread reads with one instruction
MAX_UNROLLED_WEIGHT = 2**13  # length of an unrolled inner loop, in the units of weight_of


def add_tile(nest: CudaNest, text: KernelText) -> None:
    """Write a kernel that reads the next step's operands while it computes this one's."""
    rows, columns, depth = nest.tile
    fold = fold_of(nest, [term.dtype for term in nest.terms])
    _add_take(nest, fold, text)
    _add_tile_start(nest, fold, text)
    _add_fetch(nest, text)
    _add_keep(nest, text)
    _add_multiply(nest, text)
    unrolled = MAX_UNROLLED_WEIGHT // (rows * columns * weight_of(nest.function))
    whole_step = f"""
        #pragma unroll {max(1, min(depth, unrolled))}
        for (int k = 0; k < {depth}; ++k) multiply(now, k);
    """
    text.add("""
        // Compute one side of the tile while the other one is filled.
        int now = 0;
        fetch(begin);
        keep(0);
        __syncthreads();
    """)
    with text.block(f"for (I j = begin; j < end; j += {depth})"):
        text.add(f"const bool goes_on = j + {depth} < end;", f"if (goes_on) fetch(j + {depth});")
        if (
            fold.rule.is_idempotent
        ):  # beyond the end the last value is taken again, which changes nothing
            text.add(whole_step)
        else:
            with text.block(f"if (j + {depth} <= end)"):
                text.add(whole_step)
            text.add("""
                else {
                  #pragma unroll 1
                  for (int k = 0; k < (int)(end - j); ++k) multiply(now, k);
                }
            """)
        text.add("if (goes_on) keep(now ^ 1);", "__syncthreads();", "now ^= 1;")
    _add_tile_store(nest, fold, text)


def _add_tile_start(nest: CudaNest, fold: Fold, text: KernelText) -> None:
    """Declare the shared memory, the place of the tile, and the totals of a thread."""
    rows, columns, depth = nest.tile
    down = TILE_THREADS * rows
    across = TILE_THREADS * columns
    text.add(f"// A block computes {down} by {across} results, {depth} values at a time.")
    for number, term in enumerate(nest.terms):
        kind = COMPUTED[term.dtype]
        line = _length(nest, term) + _padding(term)
        text.add(f"""
            alignas(16) __shared__ {kind} tile{number}[2][{depth}][{line}];
            {kind} fetched{number}[{_fetch_count(nest, term)}];
        """)
    text.add(f"""
        const int tx = threadIdx.x % {TILE_THREADS}, ty = threadIdx.x / {TILE_THREADS};
        const I tiles_across = (extent{nest.column_loop} + {across - 1}) / {across};
        const I tiles_down = (extent{nest.row_loop} + {down - 1}) / {down};
        I flat = blockIdx.x;
        const I first_column = flat % tiles_across * {across}; flat /= tiles_across;
        const I first_row = flat % tiles_down * {down}; flat /= tiles_down;
    """)
    add_loop_indices(text, "flat", range(nest.output_loops - 2))
    add_part_bounds(nest, text)
    text.add(f"""
        {COMPUTED[fold.dtype]} total[{rows}][{columns}];
        #pragma unroll
        for (int u = 0; u < {rows}; ++u)
          #pragma unroll
          for (int v = 0; v < {columns}; ++v) total[u][v] = {fold.start(fold.dtype)};
    """)


def _add_tile_store(nest: CudaNest, fold: Fold, text: KernelText) -> None:
    """Store the totals that are inside the output."""
    i = f"i{nest.row_loop}"
    j = f"i{nest.column_loop}"
    row_in_tile = _line_in_tile("u", "ty", nest.tile.rows, nest.terms, True)
    column_in_tile = _line_in_tile("v", "tx", nest.tile.columns, nest.terms, False)
    is_inside = f"{i} < extent{nest.row_loop} && {j} < extent{nest.column_loop}"
    target = f"array{len(nest.reads)}[{output_offset_text(nest)}]"
    value = stored("total[u][v]", fold.dtype, nest.out.dtype)
    text.add(f"""
        #pragma unroll
        for (int u = 0; u < {nest.tile.rows}; ++u) {{
          #pragma unroll
          for (int v = 0; v < {nest.tile.columns}; ++v) {{
            const I {i} = first_row + {row_in_tile}, {j} = first_column + {column_in_tile};
            if ({is_inside}) {target} = {value};
          }}
        }}
    """)


def _add_take(nest: CudaNest, fold: Fold, text: KernelText) -> None:
    """Write the function `take`: ⊕ of a total and of ⊗ over the terms."""
    types = [term.dtype for term in nest.terms]
    steps = Steps(types, lambda number: f"x{number}")
    taken = fold.take(steps, "total")
    arguments = ", ".join(f"{COMPUTED[dtype]} x{number}" for number, dtype in enumerate(types))
    kind = COMPUTED[fold.dtype]
    text.functions += [
        f"FN {kind} take({kind} total, {arguments}) {{",
        *("  " + line for line in steps.lines),
        f"  return {taken};",
        "}",
    ]


def _length(nest: CudaNest, term: Term) -> int:
    """Return the number of rows, or columns, of a whole tile."""
    return TILE_THREADS * (nest.tile.rows if term.is_row else nest.tile.columns)


def _padding(term: Term) -> int:
    """Return how many numbers follow each line of a tile without being used.

    Without them, values that are written along the depth would all go to one memory bank.
    """
    if not term.along_depth:
        return 0
    return max(1, VECTOR_BYTES // width_of(term.dtype))


def _pack(count: int, terms: Sequence[Term], is_row: bool) -> int:
    """Return how many neighbouring lines a thread reads at once: 16 bytes of the widest term."""
    widest = max(width_of(term.dtype) for term in terms if term.is_row == is_row)
    return min(count, max(1, VECTOR_BYTES // widest))


def _line_in_tile(number: str, thread: str, count: int, terms: Sequence[Term], is_row: bool) -> str:
    """Return which line of the tile is a thread's line `number`, as text.

    Threads own packs of neighbouring lines in turn, so that no memory bank is asked twice.
    """
    pack = _pack(count, terms, is_row)
    return f"{number} / {pack} * {TILE_THREADS * pack} + {thread} * {pack} + {number} % {pack}"


def _fetch_count(nest: CudaNest, term: Term) -> int:
    """Return how many values of a term each thread fetches for one step."""
    return max(1, -(-_length(nest, term) * nest.tile.depth // BLOCK_THREADS))


@contextmanager
def _fetch_loop(nest: CudaNest, term: Term, text: KernelText) -> Iterator[None]:
    """Write a loop over the values of a term that a thread fetches.

    In the loop, `line` is the line of the tile and `step` the position along the depth.
    """
    text.add("#pragma unroll")
    with text.block(f"for (int q = 0; q < {_fetch_count(nest, term)}; ++q)"):
        text.add(f"const int e = threadIdx.x + q * {BLOCK_THREADS};")
        if term.along_depth:
            inner, outer, length = "step", "line", nest.tile.depth
        else:
            inner, outer, length = "line", "step", _length(nest, term)
        text.add(f"const int {inner} = e % {length}, {outer} = e / {length};")
        yield


def _add_fetch(nest: CudaNest, text: KernelText) -> None:
    """Write the function `fetch`: global memory to registers."""
    text.add("// Read the values of one step into registers.")
    with text.block("auto fetch = [&](const I j)", end="};"):
        for number, term in enumerate(nest.terms):
            side = (nest.row_loop, "first_row"), (nest.column_loop, "first_column")
            loop, first = side[0 if term.is_row else 1]
            with _fetch_loop(nest, term, text):
                text.add(
                    f"const I i{loop} = least({first} + line, extent{loop} - 1);",
                    "I deep = least(j + step, end - 1);",
                )
                add_loop_indices(text, "deep", nest.aggregated_loops)
                steps = steps_of(nest)
                value = steps.value(term.expression, term.dtype)
                text.add(*steps.lines, f"fetched{number}[q] = {value};")


def _add_keep(nest: CudaNest, text: KernelText) -> None:
    """Write the function `keep`: registers to one of the two halves of shared memory."""
    text.add("// Write them to one side of the tile in shared memory.")
    with text.block("auto keep = [&](const int side)", end="};"):
        for number, term in enumerate(nest.terms):
            values = _length(nest, term) * nest.tile.depth
            with _fetch_loop(nest, term, text):
                text.add(f"if (e < {values}) tile{number}[side][step][line] = fetched{number}[q];")


def _add_multiply(nest: CudaNest, text: KernelText) -> None:
    """Write the function `multiply`: one position of the depth for all totals of a thread."""
    rows, columns, _ = nest.tile
    text.add("// Add the values at one position of the depth to all totals of this thread.")
    with text.block("auto multiply = [&](const int side, const int k)", end="};"):
        values = []
        for number, term in enumerate(nest.terms):
            count, thread, line = (rows, "ty", "u") if term.is_row else (columns, "tx", "v")
            pack = _pack(count, nest.terms, term.is_row)
            packs = count // pack
            kind = f"Pack<{COMPUTED[term.dtype]}, {pack}>"
            place = f"tile{number}[side][k][u * {TILE_THREADS * pack} + {thread} * {pack}]"
            read = f"*reinterpret_cast<const {kind}*>(&{place})"
            text.add(f"""
                {kind} x{number}[{packs}];
                #pragma unroll
                for (int u = 0; u < {packs}; ++u) x{number}[u] = {read};
            """)
            values.append(f"x{number}[{line} / {pack}].at[{line} % {pack}]")
        taken = f"take(total[u][v], {', '.join(values)})"
        text.add(f"""
            #pragma unroll
            for (int u = 0; u < {rows}; ++u)
              #pragma unroll
              for (int v = 0; v < {columns}; ++v) total[u][v] = {taken};
        """)
