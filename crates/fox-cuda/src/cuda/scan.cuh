// Operands and decays of the scans.
//
// Compile-time: as in tiles.cuh.
#pragma once
#include "params.cuh"
#include "tiles.cuh"

// Row strides of queries and keys, and of values.
DEVICE size_t key_stride(const ScanOperands& x) { return size_t(x.key_heads) * x.key_dim; }
DEVICE size_t value_stride(const ScanOperands& x) { return size_t(x.heads) * x.value_dim; }

// Prefix sums of log decays of a chunk of up to 64 tokens, by one warp, in the log2 domain as float pairs (hi + lo), so
// that differences of large sums stay exact.
DEVICE void decay_sums(float2* sums, const float* log_decay, int tokens, int count, size_t stride) {
    const int lane = threadIdx.x % 32;
    double x[2], sum = 0.0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int t = 2 * lane + e;
        sum += t < tokens && log_decay ? double(log_decay[t * stride]) * 1.4426950408889634 : 0.0;
        x[e] = sum;
    }
    double before = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const double other = __shfl_up_sync(~0u, before, step);
        if (lane >= step) before += other;
    }
    before -= sum;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const double total = before + x[e];
        const float high = float(total);
        if (2 * lane + e < count) sums[2 * lane + e] = make_float2(high, float(total - high));
    }
}
// Decay from token `from` to token `to >= from`.
DEVICE float decay_between(float2 from, float2 to) {
    return exp2_fast((to.x - from.x) + (to.y - from.y));
}
