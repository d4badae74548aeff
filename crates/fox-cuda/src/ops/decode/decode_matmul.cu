// y[rows, N] = x[rows, K] w[N, K]^T for decode rows, with the same bits for a row in any company.
//
// For few rows; decode_matmul_tiled does the same for many. Weights are the left operand of the matrix instructions and rows the
// right one, so a row is a column of the accumulators. The columns of K are divided into PARTS runs; a warp adds up one
// run in order, and the runs are added in order. So an element's order of additions depends on K alone.
//
// x lies in blocks [rows / 8][K / 32][8][32] (`blocked` in decode.cuh): the right operand of a step of 32 columns for
// 8 rows is 512 bytes in a row. What a lane has read of the weights, eight columns, is exchanged for the operands of two
// instructions of 16 columns each (`exchange_k16`).
//
// Compile-time: NT tiles of 8 rows, PARTS, DEPTH (steps of weights on their way), GLU (pairs of rows become act(g) u), INT8
// (matrices with scales are in 8 bits; what is multiplied is the same as if they had been unpacked before).
#include "decode.cuh"
#include "int8.cuh"
#include "mma.cuh"
#include "params.cuh"

constexpr int THREADS = 32 * PARTS;
constexpr int TILE = 128;  // values of 16 weights times 8 rows
// Rows of weights of a tile that are results.
constexpr int RESULTS = GLU ? 8 : 16;

DEVICE uint4 device_weights(const u16* p) {
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
DEVICE uint2 device_weights(const signed char* p) {
#if EMULATED
    return *reinterpret_cast<const uint2*>(p);
#else
    uint2 x;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p));
    return x;
#endif
}

// Where a lane reads a row of weights; null beyond the last row.
struct Row {
    const u16* w;
#if INT8
    // Null where the matrix is in bf16.
    const float* scales;
#endif

    DEVICE Row(const DecodeMatrix& part, int row, bool exists, int width) {
        w = exists ? part.w + size_t(row) * width : nullptr;
#if INT8
        const size_t first = size_t(row) * int8_blocks(width);
        scales = part.scales ? part.scales + first : nullptr;
        if (scales && exists) w = part.w + first * (INT8_BLOCK / 2);
#endif
    }
    // The lane's eight columns of a step: in bf16, or in 8 bits and their scale.
    DEVICE uint4 load(int step) const {
        const int column = 32 * step + 8 * (threadIdx.x % 4);
        if (!w) return make_uint4(0, 0, 0, 0);
#if INT8
        if (scales) {
            const uint2 q = device_weights(reinterpret_cast<const signed char*>(w) + column);
            return make_uint4(q.x, q.y, __float_as_uint(scales[column / INT8_BLOCK]), 0);
        }
#endif
        return device_weights(w + column);
    }
    // What was loaded, in bf16.
    DEVICE uint4 unpacked(const uint4& x) const {
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

// The upper and the lower half of a tile.
struct Rows {
    Row top, bottom;

    DEVICE Rows(const DecodeMatrix& part, int row, int width)
        : top(part, row, row < part.rows, width),
          bottom(part, GLU ? part.rows + row : row + 8, (GLU ? row : row + 8) < part.rows, width) {}
    DEVICE void load(uint4 (&w)[2], int step) const { w[0] = top.load(step), w[1] = bottom.load(step); }
};

extern "C" __global__ void __launch_bounds__(THREADS) decode_matmul(const __grid_constant__ DecodeMatmul p) {
    __shared__ float sums[PARTS * NT * TILE];
    let_successor_begin();
    const int run = threadIdx.x / 32, lane = threadIdx.x % 32;
    // The part that this block's weights belong to, and its tile in it.
    const DecodeMatrix part = part_of_block(p);
    const int tile = blockIdx.y - part.first_block;
    const int steps = p.width / 32;
    const int begin = run * steps / PARTS, count = (run + 1) * steps / PARTS - begin;

    const Rows rows(part, tile * RESULTS + lane / 4, p.width);
    uint4 w[DEPTH][2];
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
        if (i < count) rows.load(w[i], begin + i);
    }
    // The weights do not depend on what came before; all else does.
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
            const uint4 top = exchange_k16(rows.top.unpacked(w[i][0])), bottom = exchange_k16(rows.bottom.unpacked(w[i][1]));
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

    // The runs of an element lie at the same place of the areas of the warps: [NT][4][32] each.
    constexpr int AREA = NT * TILE;
#pragma unroll
    for (int t = 0; t < NT; ++t) {
#pragma unroll
        for (int r = 0; r < 4; ++r) sums[run * AREA + (t * 4 + r) * 32 + lane] = c[t][r];
    }
    __syncthreads();
    constexpr int VALUES = GLU ? 2 : 4;  // of a lane that are results: with GLU, those of the gates
    for (int e = threadIdx.x; e < NT * VALUES * 32; e += THREADS) {
        const int t = e / (VALUES * 32), r = e / 32 % VALUES, l = e % 32;
        const float* own = sums + (t * 4 + r) * 32 + l;
        float sum = own[0], up = GLU ? own[64] : 0.f;
#pragma unroll
        for (int s = 1; s < PARTS; ++s) {
            sum += own[s * AREA];
            if (GLU) up += own[s * AREA + 64];
        }
        const int row = (blockIdx.x * NT + t) * 8 + 2 * (l % 4) + r % 2;
        const int result = tile * RESULTS + l / 4 + (!GLU && r >= 2 ? 8 : 0);
        if (result >= part.rows) continue;
        if (GLU) {
            p.inner[blocked(row, result, part.rows, gridDim.x * NT * 8)] = float_to_bf16(activation(p.act, sum).x * up);
        } else {
            if (part.bias) sum += part.bias[result];
            p.y[size_t(row) * p.stride + part.start + result] = sum;
        }
    }
}
