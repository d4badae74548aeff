// h' = h + delta and its RMS norm, with gradients.
//
// A thread block of WARPS warps processes a row at a time, in registers: a thread owns CHUNKS vectors of VEC columns,
// the same ones in every row.
//
// Compile-time: BF16, VEC, WARPS, CHUNKS.
#include "params.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int STRIDE = THREADS * VEC;

// Grid-stride over rows. `delta` and `sum` may be null together.
extern "C" __global__ void __launch_bounds__(THREADS)
    add_rms_norm_fwd(PARAMS(NormForward)) {
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        const size_t base = size_t(row) * width;
        float x[CHUNKS][VEC], squares = 0.f;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int column = c * STRIDE + threadIdx.x * VEC;
            if (column >= width) continue;
            load<VEC>(x[c], h + base + column);
            if (delta) {
                float d[VEC];
                load<VEC>(d, delta + base + column);
#pragma unroll
                for (int i = 0; i < VEC; ++i) x[c][i] = to_float(to_real(x[c][i] + d[i]));
                store<VEC>(sum + base + column, x[c]);
            }
#pragma unroll
            for (int i = 0; i < VEC; ++i) squares += x[c][i] * x[c][i];
        }
        const float scale = reciprocal_root(block_sum<WARPS>(squares) / width + eps);
        if (threadIdx.x == 0) rstd[row] = scale;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int column = c * STRIDE + threadIdx.x * VEC;
            if (column >= width) continue;
            float g[VEC];
            load<VEC>(g, w + column);
#pragma unroll
            for (int i = 0; i < VEC; ++i) g[i] *= x[c][i] * scale;
            store<VEC>(y + base + column, g);
        }
    }
}

// dh = r (g - xh mean(xh g)) + dh_out with g = w dy, xh = h r. `dh_out` may be null, or `dh` itself.
// With `y`, recomputes the output. Column sums of dy xh go to partial[block][width].
extern "C" __global__ void __launch_bounds__(THREADS)
    add_rms_norm_bwd(PARAMS(NormBackward)) {
    float dw[CHUNKS][VEC] = {};
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        const size_t base = size_t(row) * width;
        const float scale = rstd[row];
        float x[CHUNKS][VEC], g[CHUNKS][VEC], d[CHUNKS][VEC] = {}, mean = 0.f;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int column = c * STRIDE + threadIdx.x * VEC;
            if (column >= width) continue;
            // Used last, loaded first: its latency hides behind the reduction over the row.
            if (dh_out) load<VEC>(d[c], dh_out + base + column);
            load<VEC>(x[c], h + base + column);
            load<VEC>(g[c], dy + base + column);
            float weight[VEC];
            load<VEC>(weight, w + column);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                x[c][i] *= scale;
                dw[c][i] += g[c][i] * x[c][i];
                g[c][i] *= weight[i];
                mean += g[c][i] * x[c][i];
                weight[i] *= x[c][i];
            }
            if (y) store<VEC>(y + base + column, weight);
        }
        mean = block_sum<WARPS>(mean) / width;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int column = c * STRIDE + threadIdx.x * VEC;
            if (column >= width) continue;
#pragma unroll
            for (int i = 0; i < VEC; ++i) d[c][i] += scale * (g[c][i] - x[c][i] * mean);
            store<VEC>(dh + base + column, d[c]);
        }
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int column = c * STRIDE + threadIdx.x * VEC;
        if (column < width) store<VEC>(partial + size_t(blockIdx.x) * width + column, dw[c]);
    }
}
