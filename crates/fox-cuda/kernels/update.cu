// AdamW, and sums of squares in fixed order.
//
// Compile-time: BF16 (type of the tensor whose squares are summed), VEC.
#include "real.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;

struct AdamParams {
    float lr, beta1, beta2, eps, decay, scale;
    float correct1, correct2;  // 1 / (1 - beta^step)
};

DEVICE void adamw_one(float& p, float g, float& m, float& v, const AdamParams& a) {
    g *= a.scale;
    m = a.beta1 * m + (1.f - a.beta1) * g;
    v = a.beta2 * v + (1.f - a.beta2) * g * g;
    const float direction = m * a.correct1 / (sqrtf(v * a.correct2) + a.eps);
    p -= a.lr * (direction + a.decay * p);
}

// `copy` is the bf16 copy of the parameter, or null.
extern "C" __global__ void __launch_bounds__(THREADS)
    adamw(float* p, float* m, float* v, u16* copy, const float* grad, size_t count,
          const AdamParams a) {
    const size_t stride = size_t(gridDim.x) * THREADS * VEC;
    for (size_t i = (size_t(blockIdx.x) * THREADS + threadIdx.x) * VEC; i < count; i += stride) {
        float ps[VEC], ms[VEC], vs[VEC], gs[VEC];
        load<VEC>(ps, p + i);
        load<VEC>(ms, m + i);
        load<VEC>(vs, v + i);
        load<VEC>(gs, grad + i);
#pragma unroll
        for (int j = 0; j < VEC; ++j) adamw_one(ps[j], gs[j], ms[j], vs[j], a);
        store<VEC>(p + i, ps);
        store<VEC>(m + i, ms);
        store<VEC>(v + i, vs);
        if (copy) store<VEC>(copy + i, ps);
    }
}

DEVICE double block_sum_f64(double x) {
    __shared__ double parts[WARPS];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    double sum = 0.0;
    for (int w = 0; w < WARPS; ++w) sum += parts[w];
    return sum;
}

// partial[block] = sum of squares of the block's share of the elements.
extern "C" __global__ void __launch_bounds__(THREADS)
    sum_squares(double* partial, const real* x, size_t count) {
    double sum = 0.0;
    const size_t stride = size_t(gridDim.x) * THREADS * VEC;
    for (size_t i = (size_t(blockIdx.x) * THREADS + threadIdx.x) * VEC; i < count; i += stride) {
        float v[VEC], squares = 0.f;
        load<VEC>(v, x + i);
#pragma unroll
        for (int j = 0; j < VEC; ++j) squares += v[j] * v[j];
        sum += double(squares);
    }
    sum = block_sum_f64(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}
extern "C" __global__ void __launch_bounds__(THREADS)
    sum_f64(double* out, const double* x, int count) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < count; i += THREADS) sum += x[i];
    sum = block_sum_f64(sum);
    if (threadIdx.x == 0) *out = sum;
}
