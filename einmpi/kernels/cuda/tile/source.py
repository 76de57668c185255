"""The text of a CUDA kernel in tiles: ⊕ over values that rows and columns share.

Matrix products in any semiring, and distances. 16 × 16 threads compute a tile of the output, each
some rows and columns in registers; the operands pass through shared memory, a few steps at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from einmpi.kernels.cuda.nest import BLOCK_THREADS, CudaNest, Term
from einmpi.kernels.cuda.scalar_source import COMPUTED, Fold, Steps, stored, weight_of, width_of
from einmpi.kernels.cuda.source_parts import (
    KernelText,
    add_loop_indices,
    add_part_bounds,
    fold_of,
    output_offset_text,
    steps_of,
)

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
        if fold.repeats:  # beyond the end the last value is taken again, which changes nothing
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
