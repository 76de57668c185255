"""CUDA text of softmax attention: scores of a block of rows exist only as tiles in registers.

A pass over the columns keeps each row's maximum and sum, and scales the result when they grow.
"""

from __future__ import annotations

from einmpi.kernels.cuda.attention.tiles import TileSizes, shared_text

BATCH_DIMENSIONS = 3


def stride_parameters(tensors: str) -> str:
    """Return the parameters of tensors: an address, strides of batches and of rows for each."""
    return _parameters("value_t*", tensors)


def number_parameters(arrays: str) -> str:
    """Return the parameters of arrays with one number for each row; an address of 0 means none."""
    return _parameters("void*", arrays)


def _parameters(kind: str, names: str) -> str:
    """Return the parameters of tensors or arrays whose addresses are of a kind."""
    found = []
    for name in names.split():
        strides = [f"i64 {name}_{number}" for number in range(BATCH_DIMENSIONS)]
        found.append(f"{kind} {name}, {', '.join(strides)}, i64 {name}_row")
    return ",\n    ".join(found)


def batch_offsets(tensors: str) -> str:
    """Return the statements that move the addresses of tensors to the batch of this block."""
    lines = [f"    {tensor} += {_batch_offset(tensor)};\n" for tensor in tensors.split()]
    return "".join(lines)


def number_offsets(arrays: str) -> str:
    """Return the statements that say where the numbers of this block's batch begin."""
    lines = []
    for array in arrays.split():
        lines.append(f"    const i64 {array}_offset = {_batch_offset(array)};\n")
    return "".join(lines)


def _batch_offset(name: str) -> str:
    """Return the number of elements from the start of a tensor to the batch of this block."""
    terms = [f"batch_{number} * {name}_{number}" for number in range(BATCH_DIMENSIONS)]
    return " + ".join(terms)


# A score is seen where lower <= column - row <= upper; others are `fill`, and those past the last
# column are minus infinity, so that their weights are 0.
MASK = """
__device__ __forceinline__ bool crosses_mask(int first_row, int first_column, int columns,
                                             int lower, int upper) {
    return first_column + COLUMNS > columns || first_column + COLUMNS - 1 - first_row > upper
           || first_column - (first_row + ROWS - 1) < lower;
}

__device__ __forceinline__ void mask_scores(float (&scores)[COLUMNS / 8][4], int first_row,
                                            int first_column, int columns, int lower, int upper,
                                            float fill, float outside) {
    const int lane = threadIdx.x % 32;
    const int row = first_row + threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int column = first_column + 8 * n + lane % 4 * 2 + e % 2;
            const int distance = column - (row + e / 2 * 8);
            if (distance < lower || distance > upper) scores[n][e] = fill;
            if (column >= columns) scores[n][e] = outside;
        }
    }
}

// The tiles of columns that a block of rows sees: all of them if others have a finite score.
__device__ __forceinline__ void seen_tiles(int& begin, int& end, int first_row, int columns,
                                           int lower, int upper, int skip) {
    i64 first = 0;
    i64 last = columns;
    if (skip) {
        const i64 from = (i64)first_row + lower;
        const i64 to = (i64)first_row + ROWS + upper;
        if (from > first) first = from;
        if (to < last) last = to;
    }
    begin = (int)(first / COLUMNS);
    end = last > first ? (int)((last + COLUMNS - 1) / COLUMNS) : begin;
}
"""

SOFTMAX = """
// Replace scores by exp2(factor * (score - maximum)); update maxima and sums of the thread's two
// rows, and return in `rescale` by what earlier results shrink.
__device__ __forceinline__ void weigh(float (&scores)[COLUMNS / 8][4], float (&maximum)[2],
                                      float (&sum)[2], float (&rescale)[2], float factor) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float found = maximum[half];
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n)
            found = fmaxf(found, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
        found = fmaxf(found, __shfl_xor_sync(0xffffffff, found, 1));
        found = fmaxf(found, __shfl_xor_sync(0xffffffff, found, 2));
        const float shift = found == NEGATIVE_INFINITY ? 0 : found * factor;
        rescale[half] = exp2_of(fmaf(maximum[half], factor, -shift));
        maximum[half] = found;
        float total = 0;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n) {
            scores[n][2 * half] = exp2_of(fmaf(scores[n][2 * half], factor, -shift));
            scores[n][2 * half + 1] = exp2_of(fmaf(scores[n][2 * half + 1], factor, -shift));
            total += scores[n][2 * half] + scores[n][2 * half + 1];
        }
        sum[half] = sum[half] * rescale[half] + total;
    }
}
"""

PARAMETERS = """{tensors},
    {numbers},
    i64 wide_numbers, i64 divides, float* statistics, i64 batches_1, i64 batches_2,
    i64 all_rows, i64 all_columns, i64 row_blocks, i64 together, i64 lowest, i64 highest, i64 skips,
    double scale, double fill_value"""

# The start of a kernel whose blocks of threads each have some rows of Q, in one batch.
ROW_BLOCK_START = """
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void kernel(
    PARAMETERS) {
    extern __shared__ char memory[];
    // Among the batches that are computed together, the blocks that see most columns come first.
    const u32 number = blockIdx.x % ((u32)together * (u32)row_blocks);
    const int row_block = row_blocks - 1 - number / (u32)together;
    const u32 batch = blockIdx.x / ((u32)together * (u32)row_blocks) * (u32)together
                      + number % (u32)together;
    const i64 batch_2 = batch % (u32)batches_2;
    const i64 batch_1 = batch / (u32)batches_2 % (u32)batches_1;
    const i64 batch_0 = batch / (u32)batches_2 / (u32)batches_1;
BATCH_OFFSETS
    const int rows = all_rows, columns = all_columns, lower = lowest, upper = highest;
    const int first_row = row_block * ROWS;
    const float factor = scale * LOG2_E;
    const float fill = fill_value;
    int tile, end;
    seen_tiles(tile, end, first_row, columns, lower, upper, skips);

    const u32 tile_q = shared_start(memory);
"""

# While tensor cores multiply the weights of one tile by V, they also compute the scores of the
# next, whose weights are computed at the same time. A tile of K is therefore one ahead of V.
FORWARD = (
    ROW_BLOCK_START
    + """\
    const u32 tiles_k = tile_q + OWN_TILE;
    const u32 tiles_v = tiles_k + 2 * OTHER_TILE;
    float results[PADDED / 8][4] = {};
    float maximum[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY};
    float sum[2] = {};
    if (tile < end) {
        float scores[COLUMNS / 8][4] = {};
        u32 weights[COLUMNS / 16][4];
        float rescale[2];
        int buffer = 0;
        copy_tile<ROWS>(tile_q, q, q_row, first_row, rows);
        copy_tile<COLUMNS>(tiles_k, k, k_row, tile * COLUMNS, columns);
        commit_copies();
        copy_tile<COLUMNS>(tiles_v, v, v_row, tile * COLUMNS, columns);
        if (tile + 1 < end)
            copy_tile<COLUMNS>(tiles_k + OTHER_TILE, k, k_row, (tile + 1) * COLUMNS, columns);
        commit_copies();
        await_copies<1>();
        begin_products();
        multiply_tiles<COLUMNS>(scores, tile_q, tiles_k);
        commit_products();
        await_products<0>();
        pin(scores);
        if (crosses_mask(first_row, tile * COLUMNS, columns, lower, upper))
            mask_scores(scores, first_row, tile * COLUMNS, columns, lower, upper, fill,
                        NEGATIVE_INFINITY);
        weigh(scores, maximum, sum, rescale, factor);
        pack_rows<COLUMNS>(weights, scores);
        for (; tile + 1 < end; ++tile) {
            const u32 v_now = tiles_v + buffer * OTHER_TILE;
            const u32 k_now = tiles_k + buffer * OTHER_TILE;
            buffer ^= 1;
            await_copies<0>();
            copy_tile<COLUMNS>(tiles_v + buffer * OTHER_TILE, v, v_row, (tile + 1) * COLUMNS,
                               columns);
            if (tile + 2 < end)
                copy_tile<COLUMNS>(k_now, k, k_row, (tile + 2) * COLUMNS, columns);
            commit_copies();
            pin(results);
            begin_products();
            multiply_tiles<COLUMNS>(scores, tile_q, tiles_k + buffer * OTHER_TILE);
            commit_products();
            add_product<COLUMNS>(results, weights, v_now);
            commit_products();
            await_products<1>();
            pin(scores);
            if (crosses_mask(first_row, (tile + 1) * COLUMNS, columns, lower, upper))
                mask_scores(scores, first_row, (tile + 1) * COLUMNS, columns, lower, upper, fill,
                            NEGATIVE_INFINITY);
            weigh(scores, maximum, sum, rescale, factor);
            await_products<0>();
            pin(results);
#pragma unroll
            for (int n = 0; n < PADDED / 8; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) results[n][e] *= rescale[e / 2];
            }
            pack_rows<COLUMNS>(weights, scores);
        }
        await_copies<0>();
        pin(results);
        begin_products();
        add_product<COLUMNS>(results, weights, tiles_v + buffer * OTHER_TILE);
        commit_products();
        await_products<0>();
        pin(results);
    }
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        sum[half] += __shfl_xor_sync(0xffffffff, sum[half], 1);
        sum[half] += __shfl_xor_sync(0xffffffff, sum[half], 2);
        if (sum[half] == 0) sum[half] = NOT_A_NUMBER;  // the row sees no column
        // Sums are relative to the maximum as it is stored.
        const float largest = maximum[half] * (float)scale;
        const float shown = maxima ? rounded(largest, wide_numbers) : largest;
        const float shift = maxima ? exp2_of((largest - shown) * (float)LOG2_E) : 1;
        inverse[half] = divides ? 1 / sum[half] : shift * (sum[half] / sum[half]);
        const i64 row = first_row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
        if (threadIdx.x % 4 == 0 && row < rows) {
            if (maxima) write_number(maxima, maxima_offset + row * maxima_row, shown, wide_numbers);
            if (totals)
                write_number(totals, totals_offset + row * totals_row, sum[half] * shift,
                             wide_numbers);
            if (statistics)
                statistics[batch * all_rows + row] =
                    fmaf(maximum[half], factor, log2f(sum[half]));
        }
    }
    __syncthreads();
    store_rows(tile_q, results, inverse[0], inverse[1], o, o_row, first_row, rows);
}
"""
)


def forward_text(sizes: TileSizes) -> str:
    """Return the text of the kernel that computes attention and the statistics of its rows."""
    parameters = PARAMETERS.format(
        tensors=stride_parameters("q k v o"), numbers=number_parameters("maxima totals")
    )
    kernel = FORWARD.replace("PARAMETERS", parameters)
    kernel = kernel.replace(
        "BATCH_OFFSETS", batch_offsets("q k v o") + number_offsets("maxima totals")
    )
    return shared_text(sizes) + MASK + SOFTMAX + kernel


def forward_bytes(sizes: TileSizes) -> int:
    """Return the bytes of shared memory of a block: Q, and two tiles of K and of V."""
    return sizes.tile_bytes(sizes.rows) + 4 * sizes.tile_bytes(sizes.columns) + 1024
