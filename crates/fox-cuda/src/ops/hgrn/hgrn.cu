// HGRN2's gates and their lower bounds, with gradients.
//
// Compile-time: BF16, VEC.
#include "params.cuh"

// A thread owns VEC columns of a slice of rows. Grid (slices, blocks of columns).
DEVICE int hgrn_column() { return (blockIdx.y * blockDim.x + threadIdx.x) * VEC; }
DEVICE void load_lower(float (&lower)[VEC], const Hgrn& p, int column) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) lower[i] = p.lower ? p.lower[column + i] : 0.f;
}

// silu(q), 1 - f, ln f with f = lower + (1 - lower) sigmoid(z).
extern "C" __global__ void hgrn_gates_fwd(PARAMS(HgrnForward)) {
    const int column = hgrn_column(), first = blockIdx.x * p.rows_per_slice;
    if (column >= p.width) return;
    float lower[VEC], log_lower[VEC];
    load_lower(lower, p, column);
#pragma unroll
    for (int i = 0; i < VEC; ++i) log_lower[i] = logf(lower[i]);
    for (int row = first; row < min(first + p.rows_per_slice, p.rows); ++row) {
        const size_t here = size_t(row) * p.width + column;
        float x[VEC], z[VEC], key[VEC];
        load<VEC>(x, p.q + here);
        load<VEC>(z, p.z + here);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            x[i] *= sigmoid(x[i]);
            // sigmoid(-z) rather than 1 - sigmoid(z): no cancellation for gates near 1.
            key[i] = (1.f - lower[i]) * sigmoid(-z[i]);
            // f = (1 + lower e^-z) / (1 + e^-z), stable for either sign of z.
            const float shift = lower[i] == 0.f ? 0.f : log_sigmoid(z[i] - log_lower[i]);
            z[i] = log_sigmoid(z[i]) - shift;
        }
        store<VEC>(q + here, x);
        store<VEC>(k + here, key);
        store<VEC>(log_f + here, z);
    }
}

// Gradients of q and z; partial[slice][width] are partial gradients of the lower bounds, or null.
extern "C" __global__ void hgrn_gates_bwd(PARAMS(HgrnBackward)) {
    const int column = hgrn_column(), first = blockIdx.x * p.rows_per_slice;
    if (column >= p.width) return;
    float lower[VEC], dlower[VEC] = {};
    load_lower(lower, p, column);
    for (int row = first; row < min(first + p.rows_per_slice, p.rows); ++row) {
        const size_t here = size_t(row) * p.width + column;
        float x[VEC], z[VEC], d[VEC], dk[VEC], df[VEC];
        load<VEC>(x, p.q + here);
        load<VEC>(z, p.z + here);
        load<VEC>(d, dq_out + here);
        load<VEC>(dk, dk_out + here);
        load<VEC>(df, dlog_f + here);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            x[i] = d[i] * activation(ACT_SILU, x[i]).y;
            const float open = sigmoid(z[i]), shut = sigmoid(-z[i]), lb = lower[i];
            const float f = lb + (1.f - lb) * open;
            dlower[i] += (df[i] / f - dk[i]) * shut;
            // d ln f / dz = shut (1 - lower) open / f; the ratio is 1 without a bound.
            const float ratio = lb == 0.f ? 1.f : (1.f - lb) * open / f;
            z[i] = df[i] * ratio * shut - dk[i] * (1.f - lb) * open * shut;
        }
        store<VEC>(dq + here, x);
        store<VEC>(dz + here, z);
    }
    if (partial) store<VEC>(partial + size_t(blockIdx.x) * p.width + column, dlower);
}

// y[column] = sum of softmax_m(table[m][column]) over 1 <= m <= layer; with dy, the gradient of the table.
// One thread per column: tables have as many rows as the model has layers.
extern "C" __global__ void lower_bound(PARAMS(LowerBound)) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= width) return;
    float top = table[column], sum = 0.f, below = 0.f;
    for (int m = 1; m < layers; ++m) top = fmaxf(top, table[size_t(m) * width + column]);
    for (int m = 0; m < layers; ++m) {
        const float e = expf(table[size_t(m) * width + column] - top);
        sum += e;
        if (m >= 1 && m <= layer) below += e;
    }
    const float bound = below / sum;
    if (y) y[column] = bound;
    if (!dtable) return;
    for (int m = 0; m < layers; ++m) {
        const float e = expf(table[size_t(m) * width + column] - top) / sum;
        const float inside = m >= 1 && m <= layer ? 1.f : 0.f;
        dtable[size_t(m) * width + column] = e * (inside - bound) * dy[column];
    }
}
