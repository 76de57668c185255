"""The text of the CUDA kernel that computes one vertex.

A scheme says how threads share the work: each computes a few elements (map, transpose), a team
folds the values of one result (fold), or a block computes a tile of rows and columns (tile).
"""

from __future__ import annotations

from collections.abc import Callable

from einmpi.caches import bounded_cache
from einmpi.kernels.cuda.nest import BLOCK_THREADS, CudaNest
from einmpi.kernels.cuda.scalar_source import COMPUTED, STORED, Fold, Steps, number, stored
from einmpi.kernels.cuda.source_parts import (
    KernelText,
    add_loop_indices,
    add_part_bounds,
    add_team_total,
    add_tile,
    extent_product,
    fold_of,
    offset_text,
    output_offset_text,
    steps_of,
    whole_text,
)

# Values that a thread adds up before it adds their sum to its total, which may be of a wider type.
SUMMED_TOGETHER = 128


@bounded_cache(1024)
def kernel_source(nest: CudaNest) -> str:
    """Return the whole text, whose entry point is the function `kernel`.

    It contains no text of the user's, only what a checked expression tree says.
    """
    text = KernelText()
    SCHEMES[nest.scheme](nest, text)
    return whole_text(nest, text, BLOCK_THREADS)


def _pack_type(nest: CudaNest, array: int) -> str:
    return f"Pack<{STORED[nest.arrays[array].dtype]}, {nest.pack}>"


def _add_pack_reads(nest: CudaNest, text: KernelText) -> None:
    """Read the packs of all operands that have them, each with one instruction."""
    steps = steps_of(nest, "g", "0")  # an index that moves along with a pack is that of its start
    for read in nest.packed:
        kind = _pack_type(nest, read)
        address = f"array{read} + {offset_text(nest, read, steps)}"
        steps.lines.append(
            f"const {kind} pack{read} = *reinterpret_cast<const {kind}*>({address});"
        )
    text.add(*steps.lines)


# ---- without an aggregation ---------------------------------------------------------------------


def _add_map(nest: CudaNest, text: KernelText) -> None:
    """Let neighbouring threads compute neighbouring elements.

    A thread beyond the end computes the last element too, but does not store it.
    """
    count = nest.elements_per_thread
    loops = range(nest.output_loops)
    unit = "elements" if nest.pack == 1 else f"packs of {nest.pack} elements"
    text.add(f"""
        // Each thread computes {count} {unit}.
        const I total = {extent_product(loops)};
        const I first = (I)blockIdx.x * {BLOCK_THREADS * count} + threadIdx.x;
        #pragma unroll
    """)
    with text.block(f"for (int u = 0; u < {count}; ++u)"):
        text.add(f"const I own = first + u * {BLOCK_THREADS};", "I flat = least(own, total - 1);")
        add_loop_indices(text, "flat", loops)
        if nest.pack == 1:
            _add_element(nest, text, steps_of(nest), "own < total")
        else:
            _add_pack(nest, text)


def _add_element(nest: CudaNest, text: KernelText, steps: Steps, condition: str) -> None:
    """Compute the element at the loop indices, and store it under a condition."""
    out = len(nest.reads)
    dtype = nest.out.dtype
    value = steps.value(nest.function, dtype)
    text.add(*steps.lines)
    target = f"array{out}[{offset_text(nest, out)}]"
    text.add(f"if ({condition}) {target} = {stored(value, dtype, dtype)};")


def _add_pack(nest: CudaNest, text: KernelText) -> None:
    """Compute a pack of neighbouring elements, and store it with one instruction."""
    out = len(nest.reads)
    dtype = nest.out.dtype
    kind = _pack_type(nest, out)
    _add_pack_reads(nest, text)
    text.add(f"{kind} result;")
    for part in range(nest.pack):
        steps = steps_of(nest, f"v{part}_", str(part))
        value = steps.value(nest.function, dtype)
        text.add(*steps.lines, f"result.at[{part}] = {stored(value, dtype, dtype)};")
    address = f"array{out} + {offset_text(nest, out)}"
    text.add(f"if (own < total) *reinterpret_cast<{kind}*>({address}) = result;")


def _add_transpose(nest: CudaNest, text: KernelText) -> None:
    """Compute squares of elements. Transposed operands go through shared memory.

    Threads read a transposed operand along its own lines, and use it along the output's.
    """
    row = nest.row_loop
    column = nest.column_loop
    edge = nest.square_edge
    lines = BLOCK_THREADS // edge
    for read in nest.transposed:
        kind = STORED[nest.reads[read].dtype]
        # One more column than needed: a column is then spread over all banks of the memory.
        text.add(f"__shared__ {kind} transposed{read}[{edge}][{edge + 1}];")
    text.add(f"""
        const int tx = threadIdx.x % {edge}, ty = threadIdx.x / {edge};
        const I squares_across = (extent{column} + {edge - 1}) / {edge}, \
squares_down = (extent{row} + {edge - 1}) / {edge};
        I flat = blockIdx.x;
        const I first_column = flat % squares_across * {edge}; flat /= squares_across;
        const I first_row = flat % squares_down * {edge}; flat /= squares_down;
    """)
    add_loop_indices(text, "flat", range(nest.output_loops - 2))
    text.add("// Load the square of each transposed array.", "#pragma unroll")
    with text.block(f"for (int u = 0; u < {edge}; u += {lines})"):
        text.add(_square_indices(nest, "ty + u", "tx"))
        for read in nest.transposed:
            text.add(f"transposed{read}[ty + u][tx] = array{read}[{offset_text(nest, read)}];")
    text.add("__syncthreads();", "// Compute the square of the output.", "#pragma unroll")

    def from_shared_memory(read: int) -> str | None:
        return f"load(transposed{read}[tx][ty + u])" if read in nest.transposed else None

    with text.block(f"for (int u = 0; u < {edge}; u += {lines})"):
        text.add(_square_indices(nest, "tx", "ty + u"))
        steps = steps_of(nest, "v", "", from_shared_memory)
        inside = f"first_column + tx < extent{column} && first_row + ty + u < extent{row}"
        _add_element(nest, text, steps, inside)


def _square_indices(nest: CudaNest, across: str, down: str) -> str:
    """Return the line with the column and the row at a place in a square."""
    column = nest.column_loop
    row = nest.row_loop
    return (
        f"const I i{column} = least(first_column + {across}, extent{column} - 1), "
        f"i{row} = least(first_row + {down}, extent{row} - 1);"
    )


# ---- with an aggregation ------------------------------------------------------------------------


def _add_fold(nest: CudaNest, text: KernelText) -> None:
    """Let a team of threads fold the values of one result, and then join their totals.

    A thread has one total, or one for each result of a pack where packs go along the output.
    """
    fold = fold_of(nest, [access.dtype for access in nest.reads])
    results = BLOCK_THREADS // nest.team
    totals = 1 if nest.lane_is_aggregated else nest.pack
    total_type = COMPUTED[fold.total]
    _add_fold_start(nest, text, fold, totals)
    _add_fold_loop(nest, text, fold, totals)
    if nest.lane_is_aggregated:
        add_team_total(text, "total[0]", total_type, fold, nest.team, results)
    elif nest.team > 1:
        _add_member_totals(nest, fold, text, total_type, totals)
    if nest.runs is not None:
        _add_masked(nest, text, fold)
    out = len(nest.reads)
    for position in range(totals):
        value = stored(f"total[{position}]", fold.total, nest.out.dtype)
        target = f"array{out}[{output_offset_text(nest)} + {position}]"
        text.add(f"if (member == 0 && own < results) {target} = {value};")


def _add_fold_start(nest: CudaNest, text: KernelText, fold: Fold, totals: int) -> None:
    """Declare what a thread works on, its totals, and its share of the aggregated loops."""
    team = nest.team
    results = BLOCK_THREADS // team
    output_loops = range(nest.output_loops)
    if nest.lane_is_aggregated:
        member = f"threadIdx.x % {team}, slot = threadIdx.x / {team}"
    else:
        member = f"threadIdx.x / {results}, slot = threadIdx.x % {results}"
    text.add(f"""
        // A team of {team} threads computes a result; a block has {results} teams.
        const int member = {member};
        const I results = {extent_product(output_loops)};
        const I own = (I)blockIdx.x * {results} + slot;
        I flat = least(own, results - 1);
    """)
    add_loop_indices(text, "flat", output_loops)
    if nest.runs is None:
        add_part_bounds(nest, text)
    else:
        inner = extent_product(nest.aggregated_loops[1:])
        start = f"array{nest.runs}[{offset_text(nest, nest.runs)}]"
        stop = f"array{nest.runs + 1}[{offset_text(nest, nest.runs + 1)}]"
        text.add(f"""
            // The values of a result follow one another.
            const I begin = (I){start} * {inner}, end = (I){stop} * {inner};
        """)
    text.add(f"""
        {COMPUTED[fold.total]} total[{totals}];
        #pragma unroll
        for (int c = 0; c < {totals}; ++c) total[c] = {fold.start(fold.total)};
    """)


def _add_fold_loop(nest: CudaNest, text: KernelText, fold: Fold, totals: int) -> None:
    """Fold a thread's values, every team-th one, a limited number of them at a time."""
    pack = nest.pack
    step = nest.team * SUMMED_TOGETHER
    text.add(f"// Each part of a total is made of at most {SUMMED_TOGETHER} values.")
    with text.block(f"for (I from = begin + member; from < end; from += {step})"):
        text.add(f"""
            const I to = least(from + {step}, end);
            {COMPUTED[fold.dtype]} part[{pack}];
            #pragma unroll
            for (int c = 0; c < {pack}; ++c) part[c] = {fold.start(fold.dtype)};
            #pragma unroll 4
        """)
        with text.block(f"for (I j = from; j < to; j += {nest.team})"):
            text.add("I deep = j;")
            add_loop_indices(text, "deep", nest.aggregated_loops)
            _add_pack_reads(nest, text)
            for position in range(pack):
                steps = steps_of(nest, f"v{position}_", str(position))
                taken = fold.take(steps, f"part[{position}]")
                text.add(*steps.lines, f"part[{position}] = {taken};")
        total = "total[c]" if totals > 1 else "total[0]"
        joined = fold.join(total, f"Cast<{COMPUTED[fold.total]}>::of(part[c])")
        text.add("#pragma unroll", f"for (int c = 0; c < {pack}; ++c) {total} = {joined};")


def _add_masked(nest: CudaNest, text: KernelText, fold: Fold) -> None:
    """Take the number that stands for the values of other results, if there are any."""
    inner = extent_product(nest.aggregated_loops[1:])
    joined = fold.join("total[0]", number(nest.masked, fold.total))
    text.add(f"if (end - begin < run_values * {inner}) total[0] = {joined};")


def _add_member_totals(
    nest: CudaNest, fold: Fold, text: KernelText, total_type: str, totals: int
) -> None:
    """Join the totals of a team whose threads are not neighbours, in a tree in shared memory."""
    results = BLOCK_THREADS // nest.team
    pair = fold.join("joined[threadIdx.x]", f"joined[threadIdx.x + half * {results}]")
    text.add(f"""
        // Join the totals of a team.
        __shared__ {total_type} joined[{BLOCK_THREADS}];
        #pragma unroll
        for (int c = 0; c < {totals}; ++c) {{
          __syncthreads();
          joined[threadIdx.x] = total[c];
          #pragma unroll
          for (int half = {nest.team // 2}; half; half /= 2) {{
            __syncthreads();
            if (member < half) joined[threadIdx.x] = {pair};
          }}
          total[c] = joined[threadIdx.x];
        }}
    """)


SCHEMES: dict[str, Callable[[CudaNest, KernelText], None]] = {
    "map": _add_map,
    "transpose": _add_transpose,
    "fold": _add_fold,
    "tile": add_tile,
}
