"""CUDA text of the gradients of softmax attention, which computes the weights once more.

One kernel owns rows and gives dQ, the other owns columns and gives dK and dV: no sum has two
writers, so that results are the same in every run.
"""

from __future__ import annotations

from einmpi.kernels.cuda.attention.forward import (
    MASK,
    ROW_BLOCK_START,
    batch_offsets,
    number_offsets,
    number_parameters,
    stride_parameters,
)
from einmpi.kernels.cuda.attention.tiles import TileSizes, shared_text

# Where the sum of weight * slope of a row comes from; names of constants in the text.
PRODUCTS_GIVEN = "PRODUCTS_GIVEN"
PRODUCTS_OF_RESULTS = "PRODUCTS_OF_RESULTS"
PRODUCTS_IN_A_PASS = "PRODUCTS_IN_A_PASS"

PARAMETERS = """{tensors},
    float* statistics, float* products, i64 batches_1, i64 batches_2, i64 all_rows,
    i64 all_columns, i64 row_blocks, i64 together, i64 lowest, i64 highest, i64 skips,
    double scale, double fill_value, double slope_scale"""

# The slope of a score is its weight times (slope of the weight - sum of weight * slope in the
# row). That sum may be given in `products`. If O is given, it is the product of the row of O with
# the row of dO; else a pass of its own computes it. It is left in `products` for the other kernel.
ROW_GRADIENTS = """
__device__ __forceinline__ float chunk_product(const value_t* left, const value_t* right) {
    const uint4 a = *(const uint4*)left;
    const uint4 b = *(const uint4*)right;
    const u32 left_pairs[4] = {a.x, a.y, a.z, a.w};
    const u32 right_pairs[4] = {b.x, b.y, b.z, b.w};
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum = fmaf(float_of(left_pairs[i] & 0xffff), float_of(right_pairs[i] & 0xffff), sum);
        sum = fmaf(float_of(left_pairs[i] >> 16), float_of(right_pairs[i] >> 16), sum);
    }
    return sum;
}
"""
ROW_GRADIENTS += ROW_BLOCK_START
ROW_GRADIENTS += """\
    const u32 tile_do = tile_q + OWN_TILE;
    const u32 buffers = tile_do + OWN_TILE;  // twice a tile of K and a tile of V
    copy_tile<ROWS>(tile_q, q, q_row, first_row, rows);
    copy_tile<ROWS>(tile_do, d_o, d_o_row, first_row, rows);
    if (tile < end) {
        copy_tile<COLUMNS>(buffers, k, k_row, tile * COLUMNS, columns);
        copy_tile<COLUMNS>(buffers + OTHER_TILE, v, v_row, tile * COLUMNS, columns);
    }
    commit_copies();

    float logarithm[2], product[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
        const bool inside = row < rows;
        logarithm[half] = inside ? statistics[batch * all_rows + row] : 0;
        if (inside && PRODUCTS == PRODUCTS_GIVEN) product[half] = products[batch * all_rows + row];
        if (inside && PRODUCTS == PRODUCTS_OF_RESULTS) {
            for (int chunk = threadIdx.x % 4; chunk < HEAD_CHUNKS; chunk += 4)
                product[half] += chunk_product(o + row * o_row + chunk * 8,
                                               d_o + row * d_o_row + chunk * 8);
        }
    }
    // Weights, and the slopes of weights, of one tile; copies of tile `next` begin, if it is one.
    u32 buffer = 1;
    const auto weigh_tile = [&](float (&weights)[COLUMNS / 8][4], float (&slopes)[COLUMNS / 8][4],
                                int number, int next) {
        await_copies<0>();
        buffer ^= 1;
        if (next < end) {
            const u32 target = buffers + (buffer ^ 1) * 2 * OTHER_TILE;
            copy_tile<COLUMNS>(target, k, k_row, next * COLUMNS, columns);
            copy_tile<COLUMNS>(target + OTHER_TILE, v, v_row, next * COLUMNS, columns);
        }
        commit_copies();
        begin_products();
        multiply_tiles<COLUMNS>(weights, tile_q, buffers + buffer * 2 * OTHER_TILE);
        commit_products();
        multiply_tiles<COLUMNS>(slopes, tile_do, buffers + buffer * 2 * OTHER_TILE + OTHER_TILE);
        commit_products();
        await_products<1>();
        pin(weights);
        if (crosses_mask(first_row, number * COLUMNS, columns, lower, upper))
            mask_scores(weights, first_row, number * COLUMNS, columns, lower, upper, fill,
                        NEGATIVE_INFINITY);
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                weights[n][e] = exp2_of(fmaf(weights[n][e], factor, -logarithm[e / 2]));
        }
        await_products<0>();
        pin(slopes);
    };
    float weights[COLUMNS / 8][4];
    float slopes[COLUMNS / 8][4];
    if (PRODUCTS == PRODUCTS_IN_A_PASS) {
        for (int number = tile; number < end; ++number) {
            // The other pass begins with the first tile again.
            weigh_tile(weights, slopes, number, number + 1 < end ? number + 1 : tile);
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    product[e / 2] = fmaf(weights[n][e], slopes[n][e], product[e / 2]);
            }
        }
    }
    if (PRODUCTS != PRODUCTS_GIVEN) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
            product[half] += __shfl_xor_sync(0xffffffff, product[half], 1);
            product[half] += __shfl_xor_sync(0xffffffff, product[half], 2);
            if (row < rows && threadIdx.x % 4 == 0)
                products[batch * all_rows + row] = product[half];
        }
    }

    float results[PADDED / 8][4] = {};
    for (; tile < end; ++tile) {
        weigh_tile(weights, slopes, tile, tile + 1);
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                slopes[n][e] = weights[n][e] * (slopes[n][e] - product[e / 2]);
        }
        if (crosses_mask(first_row, tile * COLUMNS, columns, lower, upper))
            mask_scores(slopes, first_row, tile * COLUMNS, columns, lower, upper, 0, 0);
        u32 fragments[COLUMNS / 16][4];
        pack_rows<COLUMNS>(fragments, slopes);
        begin_products();
        add_product<COLUMNS>(results, fragments, buffers + buffer * 2 * OTHER_TILE);
        commit_products();
        await_products<0>();
        pin(results);
    }
    await_copies<0>();
    store_rows(tile_q, results, slope_scale, slope_scale, d_q, d_q_row, first_row, rows);
}
"""

# Here the own rows are columns of the scores, and tiles pass over rows of the scores: scores are
# transposed. Batches of the third dimension share K and V, and are summed over.
COLUMN_GRADIENTS = """
__device__ __forceinline__ float2 pair_of(u32 address) {
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(pair.x), "=f"(pair.y) : "r"(address) : "memory");
    return pair;
}

extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void kernel(
    PARAMETERS) {
    extern __shared__ char memory[];
    const int row_block = blockIdx.x % (u32)row_blocks;
    const u32 batch = blockIdx.x / (u32)row_blocks;
    const i64 batch_2 = 0;
    const i64 batch_1 = batch % (u32)batches_1;
    const i64 batch_0 = batch / (u32)batches_1;
    const bool has_d_k = d_k != nullptr, has_d_v = d_v != nullptr;
BATCH_OFFSETS
    statistics += batch * batches_2 * all_rows;
    products += batch * batches_2 * all_rows;
    const int rows = all_columns, columns = all_rows, lower = -highest, upper = -lowest;
    const int first_row = row_block * ROWS;
    const float factor = scale * LOG2_E;
    const float fill = fill_value;
    int begin, end;
    seen_tiles(begin, end, first_row, columns, lower, upper, skips);

    const u32 tile_k = shared_start(memory);
    const u32 tile_v = tile_k + OWN_TILE;
    const u32 buffers = tile_v + OWN_TILE;
    constexpr u32 BUFFER = 2 * OTHER_TILE;  // a tile of Q and a tile of dO
    const u32 numbers = buffers + 2 * BUFFER;
    constexpr u32 NUMBERS = 2 * COLUMNS * 4;  // a statistic and a product for each row of them
    const auto copy_step = [&](int tile, u32 buffer) {
        const int first = tile * COLUMNS;
        copy_tile<COLUMNS>(buffers + buffer * BUFFER, q, q_row, first, columns);
        copy_tile<COLUMNS>(buffers + buffer * BUFFER + OTHER_TILE, d_o, d_o_row, first, columns);
        const int place = first + threadIdx.x;
        const u32 target = numbers + buffer * NUMBERS + threadIdx.x * 4;
        if (threadIdx.x < COLUMNS) {
            const bool inside = place < columns;
            copy_float(target, inside ? statistics + place : statistics, inside);
            copy_float(target + COLUMNS * 4, inside ? products + place : products, inside);
        }
        commit_copies();
    };
    float results_k[PADDED / 8][4] = {};
    float results_v[PADDED / 8][4] = {};
    copy_tile<ROWS>(tile_k, k, k_row, first_row, rows);
    copy_tile<ROWS>(tile_v, v, v_row, first_row, rows);
    commit_copies();
    int member = 0, tile = begin;
    if (begin < end) copy_step(tile, 0);
    for (u32 buffer = 0; begin < end && member < batches_2; buffer ^= 1) {
        const int first_column = tile * COLUMNS;
        if (++tile == end) {
            tile = begin;
            ++member;
            q += q_2;
            d_o += d_o_2;
            statistics += all_rows;
            products += all_rows;
        }
        await_copies<0>();
        if (member < batches_2) copy_step(tile, buffer ^ 1);
        const u32 tile_q = buffers + buffer * BUFFER;
        const u32 tile_do = tile_q + OTHER_TILE;
        const u32 row_numbers = numbers + buffer * NUMBERS + threadIdx.x % 4 * 8;
        float weights[COLUMNS / 8][4];
        float slopes[COLUMNS / 8][4];
        u32 fragments[COLUMNS / 16][4];
        u32 slope_fragments[COLUMNS / 16][4];
        const bool masked = crosses_mask(first_row, first_column, columns, lower, upper);
        begin_products();
        multiply_tiles<COLUMNS>(weights, tile_k, tile_q);
        commit_products();
        multiply_tiles<COLUMNS>(slopes, tile_v, tile_do);
        commit_products();
        await_products<1>();
        pin(weights);
        if (masked)
            mask_scores(weights, first_row, first_column, columns, lower, upper, fill,
                        NEGATIVE_INFINITY);
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n) {
            const float2 logarithm = pair_of(row_numbers + n * 32);
            weights[n][0] = exp2_of(fmaf(weights[n][0], factor, -logarithm.x));
            weights[n][1] = exp2_of(fmaf(weights[n][1], factor, -logarithm.y));
            weights[n][2] = exp2_of(fmaf(weights[n][2], factor, -logarithm.x));
            weights[n][3] = exp2_of(fmaf(weights[n][3], factor, -logarithm.y));
        }
        pack_rows<COLUMNS>(fragments, weights);
        await_products<0>();
        pin(slopes);
        begin_products();
        add_product<COLUMNS>(results_v, fragments, tile_do);
        commit_products();
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n) {
            const float2 product = pair_of(row_numbers + COLUMNS * 4 + n * 32);
            slopes[n][0] = weights[n][0] * (slopes[n][0] - product.x);
            slopes[n][1] = weights[n][1] * (slopes[n][1] - product.y);
            slopes[n][2] = weights[n][2] * (slopes[n][2] - product.x);
            slopes[n][3] = weights[n][3] * (slopes[n][3] - product.y);
        }
        if (masked)
            mask_scores(slopes, first_row, first_column, columns, lower, upper, 0, 0);
        pack_rows<COLUMNS>(slope_fragments, slopes);
        begin_products();
        add_product<COLUMNS>(results_k, slope_fragments, tile_q);
        commit_products();
        await_products<0>();
        pin(results_k);
        pin(results_v);
    }
    await_copies<0>();
    if (has_d_k)
        store_rows(tile_k, results_k, slope_scale, slope_scale, d_k, d_k_row, first_row, rows);
    if (has_d_v) store_rows(tile_v, results_v, 1, 1, d_v, d_v_row, first_row, rows);
}
"""

# What a program keeps of its softmax, as the other kernels take it: in float32, with logarithms.
ROW_NUMBERS = """
extern "C" __global__ __launch_bounds__(THREADS) void kernel(
    {numbers},
    i64 wide_numbers, float* statistics, float* products, i64 batches_1, i64 batches_2,
    i64 all_rows, i64 count) {{
    const i64 place = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (place >= count) return;
    const i64 row = place % all_rows;
    const i64 batch = place / all_rows;
    const i64 batch_2 = batch % batches_2;
    const i64 batch_1 = batch / batches_2 % batches_1;
    const i64 batch_0 = batch / batches_2 / batches_1;
{offsets}
    const float maximum = read_number(maxima, maxima_offset + row * maxima_row, wide_numbers);
    const float total = read_number(totals, totals_offset + row * totals_row, wide_numbers);
    statistics[place] = fmaf(maximum, (float)LOG2_E, log2f(total));
    if (given)
        products[place] = read_number(given, given_offset + row * given_row, wide_numbers);
}}
"""


def row_numbers_text(sizes: TileSizes) -> str:
    """Return the text of the kernel that reads maxima, totals and products, if they are given."""
    arrays = "maxima totals given"
    kernel = ROW_NUMBERS.format(numbers=number_parameters(arrays), offsets=number_offsets(arrays))
    return shared_text(sizes) + kernel


def _gradient_text(kernel: str, tensors: str, sizes: TileSizes) -> str:
    kernel = kernel.replace("PARAMETERS", PARAMETERS.format(tensors=stride_parameters(tensors)))
    kernel = kernel.replace("BATCH_OFFSETS", batch_offsets(tensors))
    return shared_text(sizes) + MASK + kernel


def row_gradients_text(sizes: TileSizes, products: str = PRODUCTS_OF_RESULTS) -> str:
    """Return the text of the kernel that computes dQ, and the sums of weight * slope of rows."""
    choices = (PRODUCTS_GIVEN, PRODUCTS_OF_RESULTS, PRODUCTS_IN_A_PASS)
    lines = [f"constexpr int {choice} = {number};\n" for number, choice in enumerate(choices)]
    lines.append(f"constexpr int PRODUCTS = {products};\n")
    return _gradient_text("".join(lines) + ROW_GRADIENTS, "q k v o d_o d_q", sizes)


def column_gradients_text(sizes: TileSizes) -> str:
    """Return the text of the kernel that computes dK and dV from those products."""
    return _gradient_text(COLUMN_GRADIENTS, "q k v d_o d_k d_v", sizes)


def gradient_bytes(sizes: TileSizes) -> int:
    """Return the bytes of shared memory of a block: two own tiles and twice two others."""
    tiles = 2 * sizes.tile_bytes(sizes.rows) + 4 * sizes.tile_bytes(sizes.columns)
    return tiles + 4 * 4 * sizes.columns + 1024
