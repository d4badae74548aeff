// Reflections of PaTH attention, with gradients: u = sqrt(2 sigmoid(z)) y / sqrt(sum y^2 + eps). One warp for each row
// and head.
//
// Compile-time: BF16, VEC (not used).
#include "params.cuh"
#include "real.cuh"

DEVICE float strength(float z) { return sqrtf(2.f * sigmoid(z)); }

extern "C" __global__ void reflection_fwd(PARAMS(ReflectionForward)) {
    const size_t head = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (head >= p.count) return;
    const real* own = p.y + head * p.head_dim;
    float sum = 0.f;
    for (int c = threadIdx.x % 32; c < p.head_dim; c += 32) sum += to_float(own[c]) * to_float(own[c]);
    const float factor = strength(p.z[head]) / sqrtf(lanes_sum<32>(sum) + p.eps);
    for (int c = threadIdx.x % 32; c < p.head_dim; c += 32) u[head * p.head_dim + c] = factor * to_float(own[c]);
}

// The slope of sqrt(2 sigmoid(z)) is half of it times 1 - sigmoid(z).
extern "C" __global__ void reflection_bwd(PARAMS(ReflectionBackward)) {
    const size_t head = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (head >= p.count) return;
    const real* own = p.y + head * p.head_dim;
    const float* d = du + head * p.head_dim;
    float sum = 0.f, along = 0.f;
    for (int c = threadIdx.x % 32; c < p.head_dim; c += 32) {
        const float x = to_float(own[c]);
        sum += x * x, along += x * d[c];
    }
    const float r = 1.f / sqrtf(lanes_sum<32>(sum) + p.eps), z = p.z[head], s = strength(z);
    along = lanes_sum<32>(along) * r;
    for (int c = threadIdx.x % 32; c < p.head_dim; c += 32) {
        dy[head * p.head_dim + c] = to_real(s * r * (d[c] - along * r * to_float(own[c])));
    }
    if (threadIdx.x % 32 == 0) dz[head] = 0.5f * sigmoid(-z) * s * along;
}
