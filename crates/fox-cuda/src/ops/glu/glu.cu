// Gated linear units, with gradients.
//
// Compile-time: BF16, VEC.
#include "flat.cuh"
#include "params.cuh"

// Offset in x = [g | u] of the gates of vector i. Divides in 32 bits (the caller checks the range): a 64-bit division
// would cost as much as the rest of the kernel.
DEVICE size_t gate_of(size_t i, int inner) {
    const u32 vectors = u32(inner) / VEC, row = u32(i) / vectors;
    return size_t(row) * 2 * inner + (u32(i) - row * vectors) * VEC;
}
// y[row][c] = act(g) u for x = [g | u]; `inner` columns each, `count` = rows * inner.
extern "C" __global__ void glu_fwd(PARAMS(GluForward)) {
    FOR_EACH(i, count / VEC) {
        const size_t at = gate_of(i, inner);
        float g[VEC], u[VEC];
        load<VEC>(g, x + at);
        load<VEC>(u, x + at + inner);
#pragma unroll
        for (int j = 0; j < VEC; ++j) u[j] *= activation(act, g[j]).x;
        store<VEC>(y + i * VEC, u);
    }
}
// With `y`, recomputes the output. `dx` may alias `x`, `y` may alias `dy`.
extern "C" __global__ void glu_bwd(PARAMS(GluBackward)) {
    FOR_EACH(i, count / VEC) {
        const size_t at = gate_of(i, inner);
        float g[VEC], u[VEC], d[VEC];
        load<VEC>(g, x + at);
        load<VEC>(u, x + at + inner);
        load<VEC>(d, dy + i * VEC);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            const float2 a = activation(act, g[j]);
            const float out = a.x * u[j];
            g[j] = d[j] * u[j] * a.y;
            u[j] = d[j] * a.x;
            d[j] = out;
        }
        store<VEC>(dx + at, g);
        store<VEC>(dx + at + inner, u);
        if (y) store<VEC>(y + i * VEC, d);
    }
}
