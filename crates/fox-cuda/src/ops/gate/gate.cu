// Forget gates, with gradients; f32 always.
//
// Compile-time: BF16 (not used), VEC (not used).
#include "flat.cuh"
#include "params.cuh"
#include "real.cuh"

// `z` or `bias` may be null.
DEVICE float gate_logit(const float* z, const float* bias, size_t i, int heads) {
    return (z ? z[i] : 0.f) + (bias ? bias[i % heads] : 0.f);
}
extern "C" __global__ void log_gate_fwd(PARAMS(LogGateForward)) {
    FOR_EACH(i, count) y[i] = factor * log_sigmoid(gate_logit(z, bias, i, heads));
}
// sigmoid(-x) rather than 1 - sigmoid(x): no cancellation for gates near 1.
extern "C" __global__ void log_gate_bwd(PARAMS(LogGateBackward)) {
    FOR_EACH(i, count) dz[i] = factor * dy[i] * sigmoid(-gate_logit(z, bias, i, heads));
}
