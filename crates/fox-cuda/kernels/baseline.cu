// What the recurrent baselines need beside convolution and scan: columns cut and joined, time steps, HGRN2's
// gates and their lower bounds.
//
// Compile-time: BF16, VEC.
#include "real.cuh"

// to[r][0..width] = from[r][0..width], in rows of these strides: a part of a matrix to a matrix of its own,
// or the other way round. `pieces` is rows * width / VEC.
extern "C" __global__ void copy_columns(real* to, const real* from, size_t pieces, int width, int to_stride,
                                        int from_stride) {
    const size_t step = size_t(gridDim.x) * blockDim.x;
    const int per_row = width / VEC;
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < pieces; i += step) {
        const size_t row = i / per_row;
        const int column = int(i % per_row) * VEC;
        float x[VEC];
        load<VEC>(x, from + row * from_stride + column);
        store<VEC>(to + row * to_stride + column, x);
    }
}

struct TimeStep {
    const float* z;      // [rows, heads]
    const float* bias;   // [heads]
    const float* a_log;  // [heads]
    size_t count;        // rows * heads
    int heads;
    float low, high;     // limits of the step
};

// dt = clamp(softplus(z + bias)), log_decay = -exp(a_log) dt, all [rows, heads].
extern "C" __global__ void time_step_fwd(float* dt, float* log_decay, const TimeStep p) {
    const size_t step = size_t(gridDim.x) * blockDim.x;
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < p.count; i += step) {
        const int head = i % p.heads;
        const float raw = -log_sigmoid(-(p.z[i] + p.bias[head]));
        const float clamped = fminf(fmaxf(raw, p.low), p.high);
        dt[i] = clamped;
        log_decay[i] = -expf(p.a_log[head]) * clamped;
    }
}

// dz, and each row's share of da_log. The gradients of dt and of the log decay may be null.
extern "C" __global__ void time_step_bwd(float* dz, float* da_log, const float* ddt, const float* ddecay,
                                         const TimeStep p) {
    const size_t step = size_t(gridDim.x) * blockDim.x;
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < p.count; i += step) {
        const int head = i % p.heads;
        const float logit = p.z[i] + p.bias[head], raw = -log_sigmoid(-logit);
        const float rate = -expf(p.a_log[head]), d = ddecay ? ddecay[i] : 0.f;
        da_log[i] = d * rate * fminf(fmaxf(raw, p.low), p.high);
        const bool inside = raw >= p.low && raw <= p.high;
        dz[i] = inside ? ((ddt ? ddt[i] : 0.f) + d * rate) * sigmoid(logit) : 0.f;
    }
}

struct Hgrn {
    const real* q;       // [rows, width]
    const real* z;       // [rows, width]
    const float* lower;  // [width], or null
    int rows, width, rows_per_slice, unused;
};

// Where a thread works: VEC columns over a slice of rows. Grid (slices, blocks of columns).
DEVICE int hgrn_column() { return (blockIdx.y * blockDim.x + threadIdx.x) * VEC; }
DEVICE void load_lower(float (&lower)[VEC], const Hgrn& p, int column) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) lower[i] = p.lower ? p.lower[column + i] : 0.f;
}

// silu(q), 1 - f, ln f with f = lower + (1 - lower) sigmoid(z).
extern "C" __global__ void hgrn_gates_fwd(real* q, real* k, float* log_f, const Hgrn p) {
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
            // f = (1 + lower e^-z) / (1 + e^-z), whatever the sign of z.
            const float shift = lower[i] == 0.f ? 0.f : log_sigmoid(z[i] - log_lower[i]);
            z[i] = log_sigmoid(z[i]) - shift;
        }
        store<VEC>(q + here, x);
        store<VEC>(k + here, key);
        store<VEC>(log_f + here, z);
    }
}

// Gradients of q and z; partial[slice][width] are the slices' sums for the lower bounds, if there are any.
extern "C" __global__ void hgrn_gates_bwd(real* dq, real* dz, float* partial, const real* dq_out,
                                          const real* dk_out, const float* dlog_f, const Hgrn p) {
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
// One thread to a column: tables have as many rows as the model has layers.
extern "C" __global__ void lower_bound(float* y, float* dtable, const float* dy, const float* table, int layers,
                                       int width, int layer) {
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
