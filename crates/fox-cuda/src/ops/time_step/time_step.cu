// Time steps of Mamba-2 and the gated delta rule, with gradients; f32 always.
//
// Compile-time: BF16 (not used), VEC (not used).
#include "flat.cuh"
#include "params.cuh"
#include "real.cuh"

// dt = clamp(softplus(z + bias)), log_decay = -exp(a_log) dt, all [rows, heads].
extern "C" __global__ void time_step_fwd(PARAMS(TimeStepForward)) {
    FOR_EACH(i, p.count) {
        const int head = i % p.heads;
        const float raw = -log_sigmoid(-(p.z[i] + p.bias[head]));
        const float clamped = fminf(fmaxf(raw, p.low), p.high);
        dt[i] = clamped;
        log_decay[i] = -expf(p.a_log[head]) * clamped;
    }
}

// dz, and the terms of da_log per row. The gradients of dt and of the log decay may be null.
extern "C" __global__ void time_step_bwd(PARAMS(TimeStepBackward)) {
    FOR_EACH(i, p.count) {
        const int head = i % p.heads;
        const float logit = p.z[i] + p.bias[head], raw = -log_sigmoid(-logit);
        const float rate = -expf(p.a_log[head]), d = ddecay ? ddecay[i] : 0.f;
        da_log[i] = d * rate * fminf(fmaxf(raw, p.low), p.high);
        const bool inside = raw >= p.low && raw <= p.high;
        dz[i] = inside ? ((ddt ? ddt[i] : 0.f) + d * rate) * sigmoid(logit) : 0.f;
    }
}
