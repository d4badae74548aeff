// What decode steps do row by row: the residual stream and its norms.
//
// Compile-time: ITEMS (1024 columns of the stream each), SLABS (`blocked`).
#include "stream.cuh"
#include "params.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int MAX_PARTS = 8;  // runs of delta, at most

// h = the embedded token, or h + delta; x = rms(h) * w, blocked. One thread block for each row. A product that was split
// left the runs of delta behind one another.
extern "C" __global__ void __launch_bounds__(THREADS) stream_norm(const __grid_constant__ StreamNorm p) {
    let_successor_begin();
    const int row = blockIdx.x, token = p.rows[row].token;
    float w[ITEMS][4], h[ITEMS][4];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int column = 4 * (threadIdx.x + i * THREADS);
        if (column < p.width) load<4>(w[i], p.norm + column);
    }
    wait_for_predecessor();
    // Everything is on its way before anything is added.
    float runs[ITEMS][MAX_PARTS][4];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int column = 4 * (threadIdx.x + i * THREADS);
        if (column >= p.width) continue;
        const size_t at = size_t(row) * p.width + column;
        if (p.embeddings) {
            load<4>(h[i], p.embeddings + size_t(token) * p.width + column);
            continue;
        }
        load<4>(h[i], p.h + at);
#pragma unroll
        for (int run = 0; run < MAX_PARTS; ++run) {
            if (run < p.runs) load<4>(runs[i][run], p.delta + size_t(run) * gridDim.x * p.width + at);
        }
    }
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int column = 4 * (threadIdx.x + i * THREADS);
        if (column >= p.width) continue;
#pragma unroll
        for (int run = 1; run < MAX_PARTS; ++run) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if (!p.embeddings && run < p.runs) runs[i][0][k] += runs[i][run][k];
            }
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (!p.embeddings) h[i][k] += runs[i][0][k];
            squares += h[i][k] * h[i][k];
        }
        store<4>(p.h + size_t(row) * p.width + column, h[i]);
    }
    const float scale = 1.f / sqrtf(block_sum<WARPS>(squares) / p.width + p.eps);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int column = 4 * (threadIdx.x + i * THREADS);
        if (column >= p.width) continue;
        float x[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) x[k] = h[i][k] * scale * w[i][k];
        store<4>(p.x + blocked(row, column, p.width, gridDim.x), x);
    }
}

// Rows of a tensor as a product wants them.
extern "C" __global__ void __launch_bounds__(THREADS) stream_block(const __grid_constant__ StreamBlocked p) {
    for (size_t i = blockIdx.x * size_t(THREADS) + threadIdx.x; i < size_t(p.rows) * p.width;
         i += size_t(gridDim.x) * THREADS) {
        p.to[blocked(i / p.width, i % p.width, p.width, p.padded)] = p.from[i];
    }
}
