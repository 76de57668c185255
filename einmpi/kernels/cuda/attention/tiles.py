"""CUDA text that the attention kernels share: tiles in shared memory and products of tiles.

Products are mma.sync with ldmatrix from compute capability 8.0 on, and wgmma on 9.0.
"""

from __future__ import annotations

from dataclasses import dataclass

PANEL_COLUMNS = 64  # values of 16 bits that one row of a tile's panel holds: 128 bytes
MAX_HEAD = 128
FRACTION_TYPES = {"float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class TileSizes:
    """The parameters of one attention kernel's text."""

    dtype: str  # float16 or bfloat16
    head: int  # the extent of the contracted label, a multiple of 8
    rows: int  # of a block's own tiles; each warp owns 16 of them
    columns: int  # of the tiles that a block passes over
    warpgroups: bool  # products by wgmma
    blocks: int = 1  # that should fit on a multiprocessor

    @property
    def threads(self) -> int:
        return 2 * self.rows

    @property
    def padded_head(self) -> int:
        """The columns of a tile: the head padded with zeros to whole panels."""
        return -(-self.head // PANEL_COLUMNS) * PANEL_COLUMNS

    def tile_bytes(self, rows: int) -> int:
        return 2 * rows * self.padded_head


def constants(sizes: TileSizes) -> str:
    """Return the definitions that the text of every attention kernel starts with."""
    return f"""
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short value_t;  // the bits of a {sizes.dtype}
typedef long long i64;
constexpr int HEAD = {sizes.head};
constexpr int PADDED = {sizes.padded_head};
constexpr int ROWS = {sizes.rows};
constexpr int COLUMNS = {sizes.columns};
constexpr int THREADS = {sizes.threads};
constexpr int BLOCKS = {sizes.blocks};
constexpr int HEAD_CHUNKS = HEAD / 8;           // 16 bytes each
constexpr int CHUNKS = PADDED / 8;
constexpr int HEAD_STEPS = (HEAD + 15) / 16;    // of products that contract the head
constexpr u32 OWN_TILE = ROWS * PADDED * 2;     // bytes
constexpr u32 OTHER_TILE = COLUMNS * PADDED * 2;
constexpr double LOG2_E = 1.4426950408889634;   // exp(x) is exp2(LOG2_E * x)
#define NEGATIVE_INFINITY __int_as_float(0xff800000)
#define NOT_A_NUMBER __int_as_float(0x7fffffff)
"""


# A tile has panels of 64 columns. A row of a panel is 128 bytes, and its chunks of 16 bytes are
# swapped by the row's number, so that reading a column of chunks meets all banks.
TILES = """
__device__ __forceinline__ u32 chunk_offset(int tile_rows, int row, int chunk) {
    return (chunk >> 3) * (tile_rows * 128) + row * 128 + (((chunk ^ row) & 7) << 4);
}

__device__ __forceinline__ u32 shared_start(void* memory) {
    return ((u32)__cvta_generic_to_shared(memory) + 1023) & ~1023u;
}

__device__ __forceinline__ void copy_chunk(u32 target, const void* source, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(target), "l"(source), "r"(inside ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copy_float(u32 target, const float* source, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :: "r"(target), "l"(source), "r"(inside ? 4 : 0) : "memory");
}

// Begin to copy rows from `first` on; rows from `count` on, and columns past the head, become 0.
template <int TILE_ROWS>
__device__ __forceinline__ void copy_tile(u32 tile, const value_t* source, i64 stride, int first,
                                          int count) {
    const int chunk = threadIdx.x % CHUNKS;
    const int row = threadIdx.x / CHUNKS;
    constexpr int STEP = THREADS / CHUNKS;
    const value_t* from = source + (first + row) * stride + chunk * 8;
#pragma unroll
    for (int i = 0; i < TILE_ROWS; i += STEP) {
        if (TILE_ROWS % STEP != 0 && row + i >= TILE_ROWS) break;
        const bool inside = first + row + i < count && chunk < HEAD_CHUNKS;
        copy_chunk(tile + chunk_offset(TILE_ROWS, row + i, chunk), inside ? from : source, inside);
        from += STEP * stride;
    }
}

__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Wait until at most PENDING groups of copies are under way, for all threads of the block.
template <int PENDING>
__device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
    SHARE_WITH_TENSOR_CORES;
    __syncthreads();
}

__device__ __forceinline__ float exp2_of(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

__device__ __forceinline__ u32 packed(float low, float high) {
    u32 result;
    asm("cvt.rn.FRACTIONx2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

// Accumulators [n][e] of a warp: row lane / 4 + 8 * (e / 2), column 8n + 2 * (lane % 4) + e % 2.
// Two neighbours n are the left operand of a product over 16 columns.
template <int N>
__device__ __forceinline__ void pack_rows(u32 (&fragments)[N / 16][4], float (&values)[N / 8][4]) {
#pragma unroll
    for (int k = 0; k < N / 16; ++k) {
        fragments[k][0] = packed(values[2 * k][0], values[2 * k][1]);
        fragments[k][1] = packed(values[2 * k][2], values[2 * k][3]);
        fragments[k][2] = packed(values[2 * k + 1][0], values[2 * k + 1][1]);
        fragments[k][3] = packed(values[2 * k + 1][2], values[2 * k + 1][3]);
    }
}

// Write a warp's 16 rows of results, times a factor for each row half, through its own part of a
// tile that no thread reads any more: stores are of 16 bytes.
__device__ __forceinline__ void store_rows(u32 tile, float (&values)[PADDED / 8][4], float low,
                                           float high, value_t* target, i64 stride, int first,
                                           int count) {
    const int lane = threadIdx.x % 32;
    const int row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < PADDED / 8; ++n) {
        const u32 upper = packed(values[n][0] * low, values[n][1] * low);
        const u32 lower = packed(values[n][2] * high, values[n][3] * high);
        const u32 column = lane % 4 * 4;
        asm volatile("st.shared.b32 [%0], %1;"
                     :: "r"(tile + chunk_offset(ROWS, row, n) + column), "r"(upper) : "memory");
        asm volatile("st.shared.b32 [%0], %1;"
                     :: "r"(tile + chunk_offset(ROWS, row + 8, n) + column), "r"(lower)
                     : "memory");
    }
    __syncwarp();
    const int start = threadIdx.x / 32 * 16;
#pragma unroll
    for (int i = lane; i < 16 * CHUNKS; i += 32) {
        const int place = start + i / CHUNKS;
        const int chunk = i % CHUNKS;
        uint4 bits;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                     : "r"(tile + chunk_offset(ROWS, place, chunk)) : "memory");
        if (first + place < count && chunk < HEAD_CHUNKS)
            *(uint4*)(target + (first + place) * stride + chunk * 8) = bits;
    }
}
"""

# The same two products in both texts:
# multiply_tiles: rows of this warp in tile `left` times rows of tile `right`, over the head;
# add_product: fragments times tile `right`, over the rows of `right`.
# Products of the second text run on until they are awaited.
WARP_PRODUCTS = """
__device__ __forceinline__ void read_matrices(u32 (&found)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3])
                 : "r"(address) : "memory");
}

__device__ __forceinline__ void read_transposed(u32 (&found)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3])
                 : "r"(address) : "memory");
}

__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&left)[4], u32 right0,
                                         u32 right1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.FRACTION.FRACTION.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0),
                   "r"(right1));
}

template <int N>
__device__ __forceinline__ void multiply_tiles(float (&sums)[N / 8][4], u32 left, u32 right) {
    const int lane = threadIdx.x % 32;
    const int row = threadIdx.x / 32 * 16 + lane % 16;
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
        sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0;
#pragma unroll
    for (int k = 0; k < HEAD_STEPS; ++k) {
        u32 a[4];
        read_matrices(a, left + chunk_offset(ROWS, row, 2 * k + lane / 16));
#pragma unroll
        for (int n = 0; n < N / 16; ++n) {
            u32 b[4];
            const int place = 16 * n + lane % 8 + lane / 16 * 8;
            read_matrices(b, right + chunk_offset(N, place, 2 * k + lane / 8 % 2));
            multiply(sums[2 * n], a, b[0], b[1]);
            multiply(sums[2 * n + 1], a, b[2], b[3]);
        }
    }
}

template <int K>
__device__ __forceinline__ void add_product(float (&sums)[PADDED / 8][4],
                                            const u32 (&fragments)[K / 16][4], u32 right) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < K / 16; ++k) {
#pragma unroll
        for (int n = 0; n < PADDED / 16; ++n) {
            u32 b[4];
            read_transposed(b, right + chunk_offset(K, 16 * k + lane % 16, 2 * n + lane / 16));
            multiply(sums[2 * n], fragments[k], b[0], b[1]);
            multiply(sums[2 * n + 1], fragments[k], b[2], b[3]);
        }
    }
}

template <int N>
__device__ __forceinline__ void pin(float (&)[N][4]) {}
__device__ __forceinline__ void begin_products() {}
__device__ __forceinline__ void commit_products() {}
template <int PENDING>
__device__ __forceinline__ void await_products() {}
"""

# A descriptor of a tile: its address, the bytes from panel to panel, and those from eight rows to
# the next eight, all in units of 16 bytes; the highest bits say how chunks are swapped.
WARPGROUP_PRODUCTS = """
__device__ __forceinline__ u64 descriptor(u32 address, u32 panel_bytes) {
    return ((u64)1 << 62) | ((u64)(1024 >> 4) << 32) | ((u64)(panel_bytes >> 4) << 16)
           | (u64)((address & 0x3ffff) >> 4);
}

template <int N>
__device__ __forceinline__ void multiply_tiles(float (&sums)[N / 8][4], u32 left, u32 right) {
    const u32 rows = left + threadIdx.x / 128 * (64 * 128);
#pragma unroll
    for (int k = 0; k < HEAD_STEPS; ++k) {
        const u32 inside = k % 4 * 32;
        multiply_step(sums, descriptor(rows + k / 4 * (ROWS * 128) + inside, 16),
                      descriptor(right + k / 4 * (N * 128) + inside, 16), k > 0);
    }
}

template <int K>
__device__ __forceinline__ void add_product(float (&sums)[PADDED / 8][4],
                                            const u32 (&fragments)[K / 16][4], u32 right) {
#pragma unroll
    for (int k = 0; k < K / 16; ++k)
        add_step(sums, fragments[k], descriptor(right + k * 2048, K * 128));
}

// Tensor cores use these registers: the compiler keeps other uses of them on the right side.
template <int N>
__device__ __forceinline__ void pin(float (&values)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(values[n][e]) :: "memory");
    }
}

__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}
"""


FLOAT_OF = {
    "float16": """
__device__ __forceinline__ float float_of(u32 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((value_t)bits));
    return value;
}
""",
    "bfloat16": """
__device__ __forceinline__ float float_of(u32 bits) {
    return __int_as_float(bits << 16);
}
""",
}

# Numbers of rows are float32 where the program computes its softmax so, else of the values' dtype.
WRITE_NUMBER = """
__device__ __forceinline__ float rounded(float number, bool wide) {
    return wide ? number : float_of(packed(number, 0) & 0xffff);
}

__device__ __forceinline__ void write_number(void* target, i64 place, float number, bool wide) {
    if (wide) ((float*)target)[place] = number;
    else ((value_t*)target)[place] = packed(number, 0) & 0xffff;
}

__device__ __forceinline__ float read_number(const void* source, i64 place, bool wide) {
    return wide ? ((const float*)source)[place] : float_of(((const value_t*)source)[place]);
}
"""


def _accumulators(count: int) -> tuple[str, str]:
    """Return the names of accumulators in an asm text, and the list of its outputs."""
    names = ", ".join([f"%{number}" for number in range(count)])
    outputs = ", ".join([f'"+f"(sums[{n // 4}][{n % 4}])' for n in range(count)])
    return "{" + names + "}", outputs


def _warpgroup_steps(sizes: TileSizes) -> str:
    """Return the functions around one wgmma instruction each, of which all operands are listed."""
    fraction = FRACTION_TYPES[sizes.dtype]
    types = f"k16.f32.{fraction}.{fraction}"
    scores = sizes.columns // 2
    names, outputs = _accumulators(scores)
    multiply = f"""
__device__ __forceinline__ void multiply_step(float (&sums)[{scores // 4}][4], u64 left, u64 right,
                                              int add) {{
    asm volatile("{{.reg .pred add; setp.ne.b32 add, %{scores + 2}, 0;\\n"
                 "wgmma.mma_async.sync.aligned.m64n{sizes.columns}{types} "
                 "{names}, %{scores}, %{scores + 1}, add, 1, 1, 0, 0;}}"
                 : {outputs}
                 : "l"(left), "l"(right), "r"(add));
}}
"""
    count = sizes.padded_head // 2
    names, outputs = _accumulators(count)
    left = ", ".join([f"%{count + number}" for number in range(4)])
    add = f"""
__device__ __forceinline__ void add_step(float (&sums)[{count // 4}][4], const u32 (&left)[4],
                                         u64 right) {{
    asm volatile("{{.reg .pred add; setp.ne.b32 add, %{count + 5}, 0;\\n"
                 "wgmma.mma_async.sync.aligned.m64n{sizes.padded_head}{types} "
                 "{names}, {{{left}}}, %{count + 4}, add, 1, 1, 1;}}"
                 : {outputs}
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right),
                   "n"(1));
}}
"""
    return multiply + add


def shared_text(sizes: TileSizes) -> str:
    """Return constants, tiles and products of an attention kernel."""
    if sizes.warpgroups:
        # Tensor cores read shared memory by a way of their own, which does not see plain writes.
        fence = 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory")'
        products = _warpgroup_steps(sizes) + WARPGROUP_PRODUCTS
    else:
        fence = ""
        products = WARP_PRODUCTS
    text = constants(sizes) + f"#define SHARE_WITH_TENSOR_CORES {fence}\n" + TILES + products
    text += FLOAT_OF[sizes.dtype] + WRITE_NUMBER
    return text.replace("FRACTION", FRACTION_TYPES[sizes.dtype])
