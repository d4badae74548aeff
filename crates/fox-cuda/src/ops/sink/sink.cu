// Attention sinks: a learned logit per head in the softmax denominator, and its gradient.
//
// Compile-time: BF16 (type of outputs and their gradients), VEC, which divides the head dim.
#include "flat.cuh"
#include "params.cuh"

// o' = o sigmoid(lse - b), lse' = log(exp(lse) + exp(b)). A unit is a head of a row; units without visible keys are
// unchanged.
extern "C" __global__ void sink_fwd(PARAMS(SinkForward)) {
    FOR_EACH(i, units * (head_dim / VEC)) {
        const size_t at = i * VEC, unit = at / head_dim;
        const float sum = lse[unit], sink = sinks[unit % heads];
        const bool seen = sum != NEG_INF;
        const float kept_fraction = seen ? 1.f / (1.f + expf(sink - sum)) : 1.f;
        float x[VEC];
        load<VEC>(x, o + at);
#pragma unroll
        for (int c = 0; c < VEC; ++c) x[c] *= kept_fraction;
        store<VEC>(new_o + at, x);
        if (at % head_dim == 0) {
            new_lse[unit] = seen ? fmaxf(sum, sink) + log1pf(expf(-fabsf(sum - sink))) : sum;
        }
    }
}

// Gradient of the sink per unit, -exp(b - lse') (o' . do); a warp per unit.
extern "C" __global__ void sink_bwd(PARAMS(SinkBackward)) {
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (size_t unit = size_t(blockIdx.x) * warps + threadIdx.x / 32; unit < units;
         unit += size_t(gridDim.x) * warps) {
        float sum = 0.f;
        for (int c = lane * VEC; c < head_dim; c += 32 * VEC) {
            float x[VEC], g[VEC];
            load<VEC>(x, o + unit * head_dim + c);
            load<VEC>(g, d_out + unit * head_dim + c);
#pragma unroll
            for (int i = 0; i < VEC; ++i) sum += x[i] * g[i];
        }
        sum = lanes_sum<32>(sum);
        const float seen = lse[unit];
        if (lane == 0) partial[unit] = seen == NEG_INF ? 0.f : -expf(sinks[unit % heads] - seen) * sum;
    }
}
