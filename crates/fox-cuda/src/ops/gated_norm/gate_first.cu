// The norm of gated rows, y = rms(x * act(gate)) * norm, and its gradients, without storing the gated rows.
//
// A thread block of WARPS warps processes a row at a time, in registers: a thread owns CHUNKS vectors of VEC columns,
// the same ones in every row.
//
// Compile-time: BF16, VEC, WARPS, CHUNKS.
#include "params.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int STRIDE = THREADS * VEC;

typedef float Row[CHUNKS][VEC];

// f(chunk, column) for a thread's vectors.
template <class F>
DEVICE void each_vector(int width, F f) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int column = c * STRIDE + threadIdx.x * VEC;
        if (column < width) f(c, column);
    }
}

// Sums of both over the block, for all threads.
DEVICE float2 block_sums(float x, float y) {
    x = lanes_sum<32>(x), y = lanes_sum<32>(y);
    __shared__ float2 parts[WARPS];
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = make_float2(x, y);
    __syncthreads();
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum.x += parts[w].x, sum.y += parts[w].y;
    return sum;
}

// Grid-stride over rows.
extern "C" __global__ void __launch_bounds__(THREADS) gate_first_fwd(PARAMS(GateFirstForward)) {
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const size_t base = size_t(row) * p.width;
        Row x, z;
        float squares = 0.f;
        each_vector(p.width, [&](int c, int column) {
            load<VEC>(x[c], p.x + base + column);
            load<VEC>(z[c], p.gate + base + column);
        });
        each_vector(p.width, [&](int c, int) {
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                x[c][i] *= activation(p.act, z[c][i]).x;
                squares += x[c][i] * x[c][i];
            }
        });
        const float scale = reciprocal_root(block_sum<WARPS>(squares) / p.width + p.eps);
        each_vector(p.width, [&](int c, int column) {
            float w[VEC];
            load<VEC>(w, p.norm + column);
#pragma unroll
            for (int i = 0; i < VEC; ++i) w[i] *= x[c][i] * scale;
            store<VEC>(y + base + column, w);
        });
    }
}

// With u = x act(gate), r = 1 / rms(u), uh = u r and g = norm dy: du = r (g - uh mean(uh g)), dx = du act(gate),
// dgate = du x act'(gate). Column sums of dy uh go to partial[block][width]. With `y`, recomputes the output; `y` may
// alias dy. Grid-stride over rows.
extern "C" __global__ void __launch_bounds__(THREADS) gate_first_bwd(PARAMS(GateFirstBackward)) {
    Row dnorm = {};
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const size_t base = size_t(row) * p.width;
        Row x, z, g;
        float squares = 0.f, along = 0.f;
        each_vector(p.width, [&](int c, int column) {
            load<VEC>(x[c], p.x + base + column);
            load<VEC>(z[c], p.gate + base + column);
            load<VEC>(g[c], dy + base + column);
        });
        each_vector(p.width, [&](int c, int column) {
            float w[VEC];
            load<VEC>(w, p.norm + column);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                const float u = x[c][i] * activation(p.act, z[c][i]).x;
                squares += u * u, along += u * g[c][i] * w[i];
            }
        });
        const float2 sums = block_sums(squares, along);
        const float scale = reciprocal_root(sums.x / p.width + p.eps), mean = sums.y / p.width * scale;
        each_vector(p.width, [&](int c, int column) {
            float w[VEC], out[VEC];
            load<VEC>(w, p.norm + column);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                const float2 act = activation(p.act, z[c][i]);
                const float normed = x[c][i] * act.x * scale;
                const float du = scale * (g[c][i] * w[i] - normed * mean);
                dnorm[c][i] += g[c][i] * normed;
                out[i] = normed * w[i];
                z[c][i] = du * x[c][i] * act.y;
                x[c][i] = du * act.x;
            }
            if (y) store<VEC>(y + base + column, out);
            store<VEC>(dx + base + column, x[c]);
            store<VEC>(dgate + base + column, z[c]);
        });
    }
    each_vector(p.width, [&](int c, int column) { store<VEC>(partial + size_t(blockIdx.x) * p.width + column, dnorm[c]); });
}
