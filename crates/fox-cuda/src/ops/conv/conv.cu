// The short convolution: y = l2(act(conv(x) + bias)), every channel with its own TAPS taps, and its gradients.
//
// A thread owns CHUNKS vectors of VEC channels of one head (LANES lanes of a warp per head, for the norm; heads of VEC
// channels without a norm) and iterates over a slice of rows. The window of TAPS rows and the filter gradients stay in
// registers. The backward goes from the last row to the first, because the gradient of a row also flows to the TAPS - 1
// rows before it. BATCH rows are loaded together to hide memory latency.
//
// Compile-time: BF16, VEC, LANES (a power of two up to 32), CHUNKS, TAPS.
#include "params.cuh"
#include "head_fragments.cuh"

constexpr int THREADS = 64;
constexpr int NO_ACTIVATION = -1;
constexpr int BATCH = CHUNKS <= 2 ? 4 : 1;

DEVICE int first_column(const ConvParams& p, const HeadLane& at) { return at.head * p.head_dim; }

// A row of [rows, width]; null stands for zeros.
template <typename T>
DEVICE void load_row(Fragment& x, const T* row, const ConvParams& p, const HeadLane& at) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (row && column_of(at.lane, c) < p.head_dim) {
            load<VEC>(x[c], row + first_column(p, at) + column_of(at.lane, c));
        } else {
#pragma unroll
            for (int i = 0; i < VEC; ++i) x[c][i] = 0.f;
        }
    }
}
template <typename T>
DEVICE void store_row(T* row, const Fragment& x, const ConvParams& p, const HeadLane& at) {
    store_fragment(row + first_column(p, at), x, at.lane, p.head_dim, at.active);
}

// A thread's filters and biases.
struct Filter {
    Fragment taps[TAPS], bias;
};
DEVICE void load_filter(Filter& f, const ConvParams& p, const HeadLane& at) {
    FOR_FRAGMENT(c, i) {
        const int own = column_of(at.lane, c) + i;
        const bool inside = own < p.head_dim;
#pragma unroll
        for (int k = 0; k < TAPS; ++k) {
            f.taps[k][c][i] = inside ? p.weight[size_t(first_column(p, at) + own) * TAPS + k] : 0.f;
        }
        f.bias[c][i] = inside && p.bias ? p.bias[first_column(p, at) + own] : 0.f;
    }
}

// The input `back` rows before `row`: of its segment, or handed in; null stands for zeros.
DEVICE const real* input_row(const ConvParams& p, const RowInfo& info, int row, int back) {
    if (back <= info.index) return p.x + size_t(row - back) * p.width;
    if (!p.before) return nullptr;
    return p.before + (size_t(info.segment) * (TAPS - 1) + TAPS - 1 - (back - info.index)) * p.width;
}

// window[k] is the input of tap k; the current row is window[TAPS - 1].
DEVICE void load_window(Fragment (&window)[TAPS], const ConvParams& p, const RowInfo& info, int row,
                        const HeadLane& at) {
#pragma unroll
    for (int k = 0; k < TAPS; ++k) {
        load_row(window[k], input_row(p, info, row, TAPS - 1 - k), p, at);
    }
}

DEVICE void convolve(Fragment& y, const Fragment (&window)[TAPS], const Filter& f) {
    FOR_FRAGMENT(c, i) {
        float sum = f.bias[c][i];
#pragma unroll
        for (int k = 0; k < TAPS; ++k) sum += f.taps[k][c][i] * window[k][c][i];
        y[c][i] = sum;
    }
}

// The nonlinearity and its slope; columns beyond the head stay zero.
DEVICE void activate(Fragment& x, Fragment& slope, const ConvParams& p, const HeadLane& at) {
    FOR_FRAGMENT(c, i) {
        const bool inside = column_of(at.lane, c) < p.head_dim;
        const float2 act = p.act == NO_ACTIVATION ? make_float2(x[c][i], 1.f) : activation(p.act, x[c][i]);
        x[c][i] = inside ? act.x : 0.f, slope[c][i] = act.y;
    }
}

// Grid (slices, blocks of heads).
extern "C" __global__ void __launch_bounds__(THREADS) short_conv_fwd(PARAMS(ConvForward)) {
    const HeadLane at = head_lane(p.width / p.head_dim);
    const int first = blockIdx.x * p.rows_per_slice, last = min(first + p.rows_per_slice, p.rows);
    Filter f;
    load_filter(f, p, at);
    Fragment window[TAPS];
    bool known = false;  // whether the window holds the previous row of the same segment
    for (int batch = first; batch < last; batch += BATCH) {
        RowInfo infos[BATCH];
        Fragment rows[BATCH];
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
            const int row = min(batch + n, last - 1);
            infos[n] = p.info[row];
            load_row(rows[n], p.x + size_t(row) * p.width, p, at);
        }
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
            const int row = batch + n;
            if (row >= last) break;
            Fragment out = {}, slope;
            if (infos[n].segment < 0) {
                store_row(y + size_t(row) * p.width, out, p, at);
                known = false;
                continue;
            }
            if (known && infos[n].index > 0) {
#pragma unroll
                for (int k = 0; k + 1 < TAPS; ++k) {
                    FOR_FRAGMENT(c, i) window[k][c][i] = window[k + 1][c][i];
                }
                FOR_FRAGMENT(c, i) window[TAPS - 1][c][i] = rows[n][c][i];
            } else {
                load_window(window, p, infos[n], row, at);
            }
            known = true;
            convolve(out, window, f);
            activate(out, slope, p, at);
            if (p.l2_norm) {
                const float scale = reciprocal_root(dot(out, out) + p.eps);
                FOR_FRAGMENT(c, i) out[c][i] *= scale;
            }
            store_row(y + size_t(row) * p.width, out, p, at);
        }
    }
}

// From the gradient of a row's output, g, to that of the convolution output, in place.
DEVICE void filter_gradient(Fragment& g, const Fragment (&window)[TAPS], const Filter& f, const ConvParams& p,
                            const HeadLane& at) {
    Fragment x, slope;
    convolve(x, window, f);
    activate(x, slope, p, at);
    if (p.l2_norm) {
        const float scale = reciprocal_root(dot(x, x) + p.eps), along = dot(x, g) * scale * scale;
        FOR_FRAGMENT(c, i) g[c][i] = scale * (g[c][i] - along * x[c][i]);
    }
    FOR_FRAGMENT(c, i) g[c][i] *= slope[c][i];
}

// Grid (slices, blocks of heads). partial[slice][TAPS + 1][width] are the slices' sums for filters and biases.
extern "C" __global__ void __launch_bounds__(THREADS)
    short_conv_bwd(PARAMS(ConvBackward)) {
    const HeadLane at = head_lane(p.width / p.head_dim);
    const int first = blockIdx.x * p.rows_per_slice, last = min(first + p.rows_per_slice, p.rows);
    Filter f;
    load_filter(f, p, at);
    // later[k] is the gradient of the convolution output k + 1 rows later, zero outside the segment.
    Fragment window[TAPS], dtaps[TAPS] = {}, dbias = {}, later[TAPS] = {};
    bool known = false;  // whether the window holds the next row of the same segment
    // Starts TAPS - 1 rows after the slice, whose gradients flow into its last rows.
    for (int batch = min(last + TAPS - 2, p.rows - 1); batch >= first; batch -= BATCH) {
        RowInfo infos[BATCH];
        Fragment gradients[BATCH], oldest[BATCH];
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
            const int row = max(batch - n, first);
            infos[n] = p.info[row];
            load_row(gradients[n], dy + size_t(row) * p.width, p, at);
        }
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
            const bool inside = infos[n].segment >= 0;
            const real* from = inside ? input_row(p, infos[n], max(batch - n, first), TAPS - 1) : nullptr;
            load_row(oldest[n], from, p, at);
        }
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
            const int row = batch - n;
            if (row < first) break;
            const RowInfo info = infos[n];
            const bool own = row < last;
            Fragment& g = gradients[n];
            if (info.segment < 0) {
                FOR_FRAGMENT(c, i) g[c][i] = 0.f;
                if (own) store_row(dx + size_t(row) * p.width, g, p, at);
                known = false;
                continue;
            }
            if (!info.has_next) {
#pragma unroll
                for (int k = 0; k < TAPS; ++k) {
                    FOR_FRAGMENT(c, i) later[k][c][i] = 0.f;
                }
            }
            if (known && info.has_next) {
#pragma unroll
                for (int k = TAPS - 1; k > 0; --k) {
                    FOR_FRAGMENT(c, i) window[k][c][i] = window[k - 1][c][i];
                }
                FOR_FRAGMENT(c, i) window[0][c][i] = oldest[n][c][i];
            } else {
                load_window(window, p, info, row, at);
            }
            known = true;
            filter_gradient(g, window, f, p, at);
            if (own) {
                Fragment out;
                FOR_FRAGMENT(c, i) {
                    dbias[c][i] += g[c][i];
                    float sum = g[c][i] * f.taps[TAPS - 1][c][i];
#pragma unroll
                    for (int k = 0; k < TAPS; ++k) dtaps[k][c][i] += g[c][i] * window[k][c][i];
#pragma unroll
                    for (int k = 0; k + 1 < TAPS; ++k) sum += later[k][c][i] * f.taps[TAPS - 2 - k][c][i];
                    out[c][i] = sum;
                }
                store_row(dx + size_t(row) * p.width, out, p, at);
            }
#pragma unroll
            for (int k = TAPS - 1; k > 0; --k) {
                FOR_FRAGMENT(c, i) later[k][c][i] = later[k - 1][c][i];
            }
            FOR_FRAGMENT(c, i) later[0][c][i] = g[c][i];
        }
    }
    float* sums = partial + size_t(blockIdx.x) * (TAPS + 1) * p.width;
#pragma unroll
    for (int k = 0; k < TAPS; ++k) store_row(sums + size_t(k) * p.width, dtaps[k], p, at);
    store_row(sums + size_t(TAPS) * p.width, dbias, p, at);
}

// dweight[width, TAPS] from sums[TAPS, width].
extern "C" __global__ void short_conv_filters(PARAMS(ConvFilters)) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < width * TAPS) dweight[i] = sums[i % TAPS * width + i / TAPS];
}
