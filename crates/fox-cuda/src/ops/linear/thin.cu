// y[batch, rows] = x[batch, width] w[rows, width]^T for a batch of up to 8: bound by the memory bandwidth of the
// weights. These are loaded before griddepcontrol.wait, so the preceding launch must not be the one that writes them.
//
// Compile-time: CHUNKS (chunks of 256 columns that a thread block loads at once).
#define BF16 1
#define VEC 8
#include "mma.cuh"
#include "overlap.cuh"
#include "params.cuh"
#include "real.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int BATCH = 8;   // columns of a matrix instruction
constexpr int TILE = 16;   // its rows

// Rows lane / 4 of a tile's upper and lower half, or null beyond the last.
struct WeightTile {
    int row;
    const u16 *top, *bottom;
};
DEVICE WeightTile find_tile(const ThinProduct& p, int n) {
    const int row = n * TILE, top = row + threadIdx.x % 32 / 4, bottom = top + TILE / 2;
    return WeightTile{row, top < p.rows ? p.w + size_t(top) * p.width : nullptr,
                bottom < p.rows ? p.w + size_t(bottom) * p.width : nullptr};
}

// First of the eight columns that a lane reads in iteration k: the warps of a block split a row, 32 columns each.
DEVICE int column_of(int k) {
    return 32 * (k * WARPS + int(threadIdx.x) / 32) + 8 * (threadIdx.x % 4);
}

// Loads the weights of CHUNKS iterations from `first` on.
DEVICE void load_weights(uint4 (&w)[CHUNKS][2], const WeightTile& t, int first, int width) {
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        const int column = column_of(first + k);
        const uint4 zero = make_uint4(0, 0, 0, 0);
        const bool inside = column < width;
        w[k][0] = inside && t.top ? __ldcs(reinterpret_cast<const uint4*>(t.top + column)) : zero;
        w[k][1] = inside && t.bottom ? __ldcs(reinterpret_cast<const uint4*>(t.bottom + column)) : zero;
    }
}

// c[16 rows][8 sequences] += w x^T. The sum over columns may be permuted: the eight columns that a lane has loaded
// serve as fragments of two mma, with the same permutation in the right operand.
DEVICE void multiply(float (&c)[4], const uint4 (&w)[CHUNKS][2], const u16* x, int first,
                     const ThinProduct& p) {
    const int sequence = threadIdx.x % 32 / 4;
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        const int column = column_of(first + k);
        uint4 b = make_uint4(0, 0, 0, 0);
        if (sequence < p.batch && column < p.width) {
            b = *reinterpret_cast<const uint4*>(x + sequence * p.width + column);
        }
        const u32 left[4] = {w[k][0].x, w[k][1].x, w[k][0].y, w[k][1].y};
        const u32 right[4] = {w[k][0].z, w[k][1].z, w[k][0].w, w[k][1].w};
        mma(c, left, b.x, b.y);
        mma(c, right, b.z, b.w);
    }
}

// Split-K epilogue: adds the warps' sums of one tile and stores them.
DEVICE void finish_tile(float* sums, const float (&c)[4], const WeightTile& t, const ThinProduct& p) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* own = sums + warp * TILE * BATCH + lane / 4 * BATCH + 2 * (lane % 4);
    __syncthreads();
    own[0] = c[0], own[1] = c[1];
    own[TILE / 2 * BATCH] = c[2], own[TILE / 2 * BATCH + 1] = c[3];
    __syncthreads();
    const int row = threadIdx.x / BATCH, b = threadIdx.x % BATCH;
    if (row >= TILE || b >= p.batch || t.row + row >= p.rows) return;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += sums[(w * TILE + row) * BATCH + b];
    const size_t at = size_t(b) * p.rows + t.row + row;
    if (p.wide) static_cast<float*>(p.y)[at] = sum;
    else static_cast<u16*>(p.y)[at] = float_to_bf16(sum);
}

// A thread block iterates over tiles of 16 rows; its warps split K. The first weights are prefetched before anything
// else.
extern "C" __global__ void __launch_bounds__(THREADS, 2) thin_product(const __grid_constant__ ThinProduct p) {
    extern __shared__ __align__(16) u16 x[];
    __shared__ float sums[WARPS * TILE * BATCH];
    uint4 w[CHUNKS][2];
    WeightTile t = find_tile(p, blockIdx.x);
    load_weights(w, t, 0, p.width);
    wait_for_predecessor();
    for (int i = 8 * threadIdx.x; i < p.batch * p.width; i += 8 * THREADS) {
        *reinterpret_cast<uint4*>(x + i) = *reinterpret_cast<const uint4*>(p.x + i);
    }
    __syncthreads();
    const int tiles = (p.rows + TILE - 1) / TILE;
    for (int n = blockIdx.x; n < tiles;) {
        float c[4] = {};
        multiply(c, w, x, 0, p);
        for (int k = CHUNKS; 32 * WARPS * k < p.width; k += CHUNKS) {
            load_weights(w, t, k, p.width);
            multiply(c, w, x, k, p);
        }
        const WeightTile done = t;
        n += gridDim.x;
        if (n < tiles) {
            t = find_tile(p, n);
            load_weights(w, t, 0, p.width);
        }
        finish_tile(sums, c, done, p);
    }
}
