// One output per element: conversions, sums, forget gates, gated linear units, embedding rows.
//
// Compile-time: BF16, VEC.
#include "real.cuh"

#define FOR_EACH(i, count)                                                                          \
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < (count);                     \
         i += size_t(gridDim.x) * blockDim.x)

// `count` elements in pieces of VEC.
extern "C" __global__ void narrow(u16* y, const float* x, size_t count) {
    FOR_EACH(i, count / VEC) {
        float v[VEC];
        load<VEC>(v, x + i * VEC);
        store<VEC>(y + i * VEC, v);
    }
}
extern "C" __global__ void widen(float* y, const u16* x, size_t count) {
    FOR_EACH(i, count / VEC) {
        float v[VEC];
        load<VEC>(v, x + i * VEC);
        store<VEC>(y + i * VEC, v);
    }
}
// All high halves, then all low ones.
extern "C" __global__ void to_halves_all(u16* y, const float* x, size_t count) {
    FOR_EACH(i, count) to_halves(x[i], y[i], y[count + i]);
}
extern "C" __global__ void from_halves_all(float* y, const u16* x, size_t count) {
    FOR_EACH(i, count) y[i] = from_halves(x[i], x[count + i]);
}
extern "C" __global__ void fill(real* x, float value, size_t count) {
    FOR_EACH(i, count) x[i] = to_real(value);
}
extern "C" __global__ void fill_i32(int* x, int value, size_t count) {
    FOR_EACH(i, count) x[i] = value;
}
// y = a + b; y may be either.
extern "C" __global__ void add(real* y, const real* a, const real* b, size_t count) {
    FOR_EACH(i, count / VEC) {
        float u[VEC], v[VEC];
        load<VEC>(u, a + i * VEC);
        load<VEC>(v, b + i * VEC);
#pragma unroll
        for (int j = 0; j < VEC; ++j) u[j] += v[j];
        store<VEC>(y + i * VEC, u);
    }
}

// Forget gates are f32 always. `z` or `bias` may be null.
DEVICE float gate_logit(const float* z, const float* bias, size_t i, int heads) {
    return (z ? z[i] : 0.f) + (bias ? bias[i % heads] : 0.f);
}
extern "C" __global__ void log_gate_fwd(float* y, const float* z, const float* bias, size_t count,
                                        int heads) {
    FOR_EACH(i, count) y[i] = log_sigmoid(gate_logit(z, bias, i, heads));
}
// sigmoid(-x) rather than 1 - sigmoid(x): no cancellation for gates near 1.
extern "C" __global__ void log_gate_bwd(float* dz, const float* dy, const float* z,
                                        const float* bias, size_t count, int heads) {
    FOR_EACH(i, count) dz[i] = dy[i] * sigmoid(-gate_logit(z, bias, i, heads));
}

// Where in x = [g | u] the gates of piece i lie; divided in 32 bits, which the caller sees to, because 64 cost
// as much as all the rest.
DEVICE size_t gate_of(size_t i, int inner) {
    const u32 pieces = u32(inner) / VEC, row = u32(i) / pieces;
    return size_t(row) * 2 * inner + (u32(i) - row * pieces) * VEC;
}
// y[row][c] = act(g) u for x = [g | u]; `inner` columns each, `count` = rows * inner.
extern "C" __global__ void glu_fwd(real* y, const real* x, size_t count, int inner, int act) {
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
// With `y`, the output once more. `dx` may be `x`, and `y` may be `dy`.
extern "C" __global__ void glu_bwd(real* dx, real* y, const real* dy, const real* x, size_t count,
                                   int inner, int act) {
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

// y[row] = table[ids[row]], `count` = rows * width.
extern "C" __global__ void embedding_fwd(real* y, const float* table, const int* ids, size_t count,
                                         int width) {
    FOR_EACH(i, count / VEC) {
        const size_t row = i * VEC / width, column = i * VEC % width;
        float v[VEC];
        load<VEC>(v, table + size_t(ids[row]) * width + column);
        store<VEC>(y + i * VEC, v);
    }
}

// dtable[id] += sum of dy over the rows of that id, in ascending order: `groups` lists (id, first, end)
// into `order`. Grid (groups, pieces of the width).
extern "C" __global__ void embedding_bwd(float* dtable, const real* dy, const int* groups,
                                         const int* order, int width) {
    const int column = (blockIdx.y * blockDim.x + threadIdx.x) * VEC;
    if (column >= width) return;
    const int id = groups[3 * blockIdx.x], end = groups[3 * blockIdx.x + 2];
    float sum[VEC] = {};
#pragma unroll 4
    for (int i = groups[3 * blockIdx.x + 1]; i < end; ++i) {
        float v[VEC];
        load<VEC>(v, dy + size_t(order[i]) * width + column);
#pragma unroll
        for (int j = 0; j < VEC; ++j) sum[j] += v[j];
    }
    float* out = dtable + size_t(id) * width + column;
    float old[VEC];
    load<VEC>(old, out);
#pragma unroll
    for (int j = 0; j < VEC; ++j) sum[j] += old[j];
    store<VEC>(out, sum);
}
