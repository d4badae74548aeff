// y[rows, N] = x[rows, K] w[N, K]^T for up to 16 decode rows, batch-invariant. decode_matmul_tiled takes more rows.
//
// Weights are the left operand of the mma instructions and activations the right one, so a row is a column of the
// accumulators. K is divided into K_SPLITS ranges; a warp reduces one of them in order, and the partial sums are added in
// order. The reduction order of an element therefore depends on K alone.
//
// x lies in blocks [rows / 8][K / 32][8][32] (`blocked` in decode.cuh): the right operand of a step of 32 columns for 8
// rows is 512 contiguous bytes. A lane exchanges its eight weight columns for the operands of two k16 instructions
// (`exchange_k16`).
//
// Compile-time: NT tiles of 8 rows, K_SPLITS, DEPTH (weight steps prefetched into registers), GLU (pairs of weight rows
// become act(g) u), INT8 (matrices with scales are int8; they multiply as if they had been dequantized to bf16 before).
#include "decode.cuh"
#include "int8.cuh"
#include "mma.cuh"
#include "params.cuh"

constexpr int THREADS = 32 * K_SPLITS;
constexpr int TILE = 128;              // accumulators of 16 weight rows times 8 rows
constexpr int RESULTS = GLU ? 8 : 16;  // outputs of 16 weight rows

DEVICE uint4 load_weights(const u16* p) {
#if EMULATED
    return *reinterpret_cast<const uint4*>(p);
#else
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(p));
    return x;
#endif
}
DEVICE uint2 load_weights(const signed char* p) {
#if EMULATED
    return *reinterpret_cast<const uint2*>(p);
#else
    uint2 x;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p));
    return x;
#endif
}

// A weight row as a lane reads it; null beyond the last row.
struct Row {
    const u16* w;
#if INT8
    // Null if the matrix is bf16.
    const float* scales;
#endif

    DEVICE Row(const DecodeMatrix& matrix, int row, bool exists, int width) {
        w = exists ? matrix.w + size_t(row) * width : nullptr;
#if INT8
        const size_t first = size_t(row) * int8_blocks(width);
        scales = matrix.scales ? matrix.scales + first : nullptr;
        if (scales && exists) w = matrix.w + first * (INT8_BLOCK / 2);
#endif
    }
    // The lane's eight columns of a step: bf16, or int8 with their scale.
    DEVICE uint4 load(int step) const {
        const int column = 32 * step + 8 * (threadIdx.x % 4);
        if (!w) return make_uint4(0, 0, 0, 0);
#if INT8
        if (scales) {
            const uint2 q = load_weights(reinterpret_cast<const signed char*>(w) + column);
            return make_uint4(q.x, q.y, __float_as_uint(scales[column / INT8_BLOCK]), 0);
        }
#endif
        return load_weights(w + column);
    }
    // Loaded columns as bf16.
    DEVICE uint4 dequantized(const uint4& x) const {
#if INT8
        if (scales) {
            float y[8];
            int8_values(y, make_uint2(x.x, x.y), __uint_as_float(x.z));
            return make_uint4(pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3]), pack_bf16(y[4], y[5]),
                              pack_bf16(y[6], y[7]));
        }
#endif
        return x;
    }
};

// The upper and lower half of a tile of 16 weight rows.
struct Rows {
    Row top, bottom;

    DEVICE Rows(const DecodeMatrix& matrix, int row, int width)
        : top(matrix, row, row < matrix.rows, width),
          bottom(matrix, GLU ? matrix.rows + row : row + 8, (GLU ? row : row + 8) < matrix.rows, width) {}
    DEVICE void load(uint4 (&w)[2], int step) const { w[0] = top.load(step), w[1] = bottom.load(step); }
};

extern "C" __global__ void __launch_bounds__(THREADS) decode_matmul(const __grid_constant__ DecodeMatmul p) {
    __shared__ float sums[K_SPLITS * NT * TILE];
    let_successor_begin();
    const int split = threadIdx.x / 32, lane = threadIdx.x % 32;
    // The matrix of this block, and its tile of 16 weight rows.
    const DecodeMatrix matrix = matrix_of_block(p);
    const int tile = blockIdx.y - matrix.first_block;
    const int steps = p.width / 32;
    const int begin = split * steps / K_SPLITS, count = (split + 1) * steps / K_SPLITS - begin;

    const Rows rows(matrix, tile * RESULTS + lane / 4, p.width);
    uint4 w[DEPTH][2];
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
        if (i < count) rows.load(w[i], begin + i);
    }
    // Only weights may be read before the predecessor has ended.
    wait_for_predecessor();

    float c[NT][4] = {};
    const u16* x = p.x + (size_t(blockIdx.x) * NT * steps + begin) * 256 + 8 * lane;
    for (int base = 0; base < count; base += DEPTH) {
        uint4 b[DEPTH][NT];
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
#pragma unroll
            for (int t = 0; t < NT; ++t) {
                const u16* own = x + (size_t(t) * steps + base + i) * 256;
                if (base + i < count) b[i][t] = *reinterpret_cast<const uint4*>(own);
            }
        }
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            if (base + i >= count) break;
            const uint4 top = exchange_k16(rows.top.dequantized(w[i][0]));
            const uint4 bottom = exchange_k16(rows.bottom.dequantized(w[i][1]));
            const u32 left[4] = {top.x, bottom.x, top.y, bottom.y};
            const u32 right[4] = {top.z, bottom.z, top.w, bottom.w};
#pragma unroll
            for (int t = 0; t < NT; ++t) {
                mma(c[t], left, b[i][t].x, b[i][t].y);
                mma(c[t], right, b[i][t].z, b[i][t].w);
            }
            if (base + i + DEPTH < count) rows.load(w[i], begin + base + i + DEPTH);
        }
    }

    // Partial sums of the warps: [K_SPLITS][NT][4][32].
    constexpr int AREA = NT * TILE;
#pragma unroll
    for (int t = 0; t < NT; ++t) {
#pragma unroll
        for (int r = 0; r < 4; ++r) sums[split * AREA + (t * 4 + r) * 32 + lane] = c[t][r];
    }
    __syncthreads();
    constexpr int VALUES = GLU ? 2 : 4;  // outputs of a lane; with GLU those of the gates
    for (int e = threadIdx.x; e < NT * VALUES * 32; e += THREADS) {
        const int t = e / (VALUES * 32), r = e / 32 % VALUES, l = e % 32;
        const float* own = sums + (t * 4 + r) * 32 + l;
        float sum = own[0], up = GLU ? own[64] : 0.f;
#pragma unroll
        for (int s = 1; s < K_SPLITS; ++s) {
            sum += own[s * AREA];
            if (GLU) up += own[s * AREA + 64];
        }
        const int row = (blockIdx.x * NT + t) * 8 + 2 * (l % 4) + r % 2;
        const int result = tile * RESULTS + l / 4 + (!GLU && r >= 2 ? 8 : 0);
        if (result >= matrix.rows) continue;
        if (GLU) {
            p.inner[blocked(row, result, matrix.rows, gridDim.x * NT * 8)] = float_to_bf16(activation(p.act, sum).x * up);
        } else {
            if (matrix.bias) sum += matrix.bias[result];
            p.y[size_t(row) * p.stride + matrix.start + result] = sum;
        }
    }
}
