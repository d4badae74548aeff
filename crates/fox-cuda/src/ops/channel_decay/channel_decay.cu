// Log decays per channel of Kimi Delta Attention, with gradients. Grid (slices of rows, heads).
//
// Compile-time: BF16, VEC (not used).
#include "params.cuh"
#include "real.cuh"

// log_decay = -exp(a_log) softplus(u), or bound sigmoid(exp(a_log) u), with u = z + bias.
extern "C" __global__ void channel_decay_fwd(PARAMS(ChannelDecayForward)) {
    const int head = blockIdx.y, first = blockIdx.x * p.rows_per_slice;
    const float rate = expf(p.a_log[head]);
    for (int row = first; row < min(first + p.rows_per_slice, p.rows); ++row) {
        for (int c = threadIdx.x; c < p.channels; c += blockDim.x) {
            const int column = head * p.channels + c;
            const size_t here = size_t(row) * p.heads * p.channels + column;
            const float u = to_float(p.z[here]) + p.bias[column];
            log_decay[here] = p.bound < 0.f ? p.bound * sigmoid(rate * u) : rate * log_sigmoid(-u);
        }
    }
}

// dz, and partial[slice][head], the terms of da_log.
extern "C" __global__ void channel_decay_bwd(PARAMS(ChannelDecayBackward)) {
    const int head = blockIdx.y, first = blockIdx.x * p.rows_per_slice;
    const float rate = expf(p.a_log[head]);
    float sum = 0.f;
    for (int row = first; row < min(first + p.rows_per_slice, p.rows); ++row) {
        for (int c = threadIdx.x; c < p.channels; c += blockDim.x) {
            const int column = head * p.channels + c;
            const size_t here = size_t(row) * p.heads * p.channels + column;
            const float u = to_float(p.z[here]) + p.bias[column], d = dlog_decay[here];
            float slope;
            if (p.bound < 0.f) {
                slope = d * p.bound * rate * sigmoid(rate * u) * sigmoid(-rate * u);
                sum += slope * u;
            } else {
                slope = -d * rate * sigmoid(u);
                sum += d * rate * log_sigmoid(-u);
            }
            dz[here] = to_real(slope);
        }
    }
    sum = block_sum<4>(sum);
    if (threadIdx.x == 0) partial[size_t(blockIdx.x) * p.heads + head] = sum;
}
