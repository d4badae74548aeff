// The short convolution: y = l2(act(conv(x) + bias)), every channel with its own TAPS taps, and its gradients.
//
// A thread has CHUNKS pieces of VEC channels of one head (LANES lanes of a warp to a head, for the norm; heads
// of VEC channels where there is none) and walks over a slice of rows. The last rows stay in registers, and so
// do the sums for the filters; backward it walks from the last row to the first, because a row's gradient goes
// to TAPS - 1 rows before it too. Rows are read BATCH at a time, so that they are on their way together.
//
// Compile-time: BF16, VEC, LANES (a power of two up to 32), CHUNKS, TAPS.
#include "real.cuh"

constexpr int STRIDE = LANES * VEC;
constexpr int THREADS = 64;
constexpr int NO_ACTIVATION = -1;
constexpr int BATCH = CHUNKS <= 2 ? 4 : 1;
typedef float Piece[CHUNKS][VEC];

// As in heads.cu: segment (-1: none), index of the row in it, position, whether the next row belongs to it.
struct alignas(16) RowInfo {
    int segment, index, position, has_next;
};

struct ConvParams {
    const real* x;        // [rows, width]
    const float* weight;  // [width, TAPS], the last tap for the current row
    const float* bias;    // [width], or null
    const real* before;   // [segments * (TAPS - 1), width], oldest first, or null
    const RowInfo* info;  // [rows]
    int rows, width, head_dim;
    int act;              // NO_ACTIVATION for none
    int l2_norm;          // whether heads are divided by their norm
    int rows_per_slice;
    float eps;
};

struct Place {
    int head, lane, column;  // the head's first column
    bool active;
};
DEVICE Place place(const ConvParams& p) {
    const int per_block = blockDim.x / LANES, heads = p.width / p.head_dim;
    const int own = blockIdx.y * per_block + threadIdx.x / LANES, head = min(own, heads - 1);
    return Place{head, int(threadIdx.x) % LANES, head * p.head_dim, own < heads};
}
DEVICE int column_of(int lane, int c) { return c * STRIDE + lane * VEC; }

#define FOR_PIECE(c, i)                  \
    _Pragma("unroll") for (int c = 0; c < CHUNKS; ++c) _Pragma("unroll") for (int i = 0; i < VEC; ++i)

template <typename T>
DEVICE void load_piece(Piece& x, const T* row, const Place& at, int d) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (row && column_of(at.lane, c) < d) {
            load<VEC>(x[c], row + at.column + column_of(at.lane, c));
        } else {
#pragma unroll
            for (int i = 0; i < VEC; ++i) x[c][i] = 0.f;
        }
    }
}
template <typename T>
DEVICE void store_piece(T* row, const Piece& x, const Place& at, int d) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (at.active && column_of(at.lane, c) < d) {
            store<VEC>(row + at.column + column_of(at.lane, c), x[c]);
        }
    }
}
DEVICE float dot(const Piece& a, const Piece& b) {
    float sum = 0.f;
    FOR_PIECE(c, i) sum += a[c][i] * b[c][i];
    return lanes_sum<LANES>(sum);
}

// A thread's filters and biases.
struct Filter {
    Piece taps[TAPS], bias;
};
DEVICE void load_filter(Filter& f, const ConvParams& p, const Place& at) {
    FOR_PIECE(c, i) {
        const int own = column_of(at.lane, c) + i;
        const bool inside = own < p.head_dim;
#pragma unroll
        for (int k = 0; k < TAPS; ++k) {
            f.taps[k][c][i] = inside ? p.weight[size_t(at.column + own) * TAPS + k] : 0.f;
        }
        f.bias[c][i] = inside && p.bias ? p.bias[at.column + own] : 0.f;
    }
}

// The input `back` rows before `row`: of its segment, or handed in; null stands for zeros.
DEVICE const real* input_row(const ConvParams& p, const RowInfo& info, int row, int back) {
    if (back <= info.index) return p.x + size_t(row - back) * p.width;
    if (!p.before) return nullptr;
    return p.before + (size_t(info.segment) * (TAPS - 1) + TAPS - 1 - (back - info.index)) * p.width;
}

// window[k] is the input that tap k meets: the row itself is window[TAPS - 1].
DEVICE void load_window(Piece (&window)[TAPS], const ConvParams& p, const RowInfo& info, int row, const Place& at) {
#pragma unroll
    for (int k = 0; k < TAPS; ++k) {
        load_piece(window[k], input_row(p, info, row, TAPS - 1 - k), at, p.head_dim);
    }
}

DEVICE void filtered(Piece& y, const Piece (&window)[TAPS], const Filter& f) {
    FOR_PIECE(c, i) {
        float sum = f.bias[c][i];
#pragma unroll
        for (int k = 0; k < TAPS; ++k) sum += f.taps[k][c][i] * window[k][c][i];
        y[c][i] = sum;
    }
}

// The nonlinearity and its slope; columns beyond the head stay zero.
DEVICE void activate(Piece& x, Piece& slope, const ConvParams& p, const Place& at) {
    FOR_PIECE(c, i) {
        const bool inside = column_of(at.lane, c) < p.head_dim;
        const float2 act = p.act == NO_ACTIVATION ? make_float2(x[c][i], 1.f) : activation(p.act, x[c][i]);
        x[c][i] = inside ? act.x : 0.f, slope[c][i] = act.y;
    }
}

// Grid (slices, blocks of heads).
extern "C" __global__ void __launch_bounds__(THREADS) short_conv_fwd(real* y, const ConvParams p) {
    const Place at = place(p);
    const int first = blockIdx.x * p.rows_per_slice, last = min(first + p.rows_per_slice, p.rows);
    Filter f;
    load_filter(f, p, at);
    Piece window[TAPS];
    bool known = false;  // whether the window stands at the row before, in the same segment
    for (int batch = first; batch < last; batch += BATCH) {
        RowInfo infos[BATCH];
        Piece rows[BATCH];
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
            const int row = min(batch + n, last - 1);
            infos[n] = p.info[row];
            load_piece(rows[n], p.x + size_t(row) * p.width, at, p.head_dim);
        }
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
            const int row = batch + n;
            if (row >= last) break;
            Piece out = {}, slope;
            if (infos[n].segment < 0) {
                store_piece(y + size_t(row) * p.width, out, at, p.head_dim);
                known = false;
                continue;
            }
            if (known && infos[n].index > 0) {
#pragma unroll
                for (int k = 0; k + 1 < TAPS; ++k) {
                    FOR_PIECE(c, i) window[k][c][i] = window[k + 1][c][i];
                }
                FOR_PIECE(c, i) window[TAPS - 1][c][i] = rows[n][c][i];
            } else {
                load_window(window, p, infos[n], row, at);
            }
            known = true;
            filtered(out, window, f);
            activate(out, slope, p, at);
            if (p.l2_norm) {
                const float scale = reciprocal_root(dot(out, out) + p.eps);
                FOR_PIECE(c, i) out[c][i] *= scale;
            }
            store_piece(y + size_t(row) * p.width, out, at, p.head_dim);
        }
    }
}

// From the gradient of a row's output, g, to that of the filtered input, in place.
DEVICE void filter_gradient(Piece& g, const Piece (&window)[TAPS], const Filter& f, const ConvParams& p,
                            const Place& at) {
    Piece x, slope;
    filtered(x, window, f);
    activate(x, slope, p, at);
    if (p.l2_norm) {
        const float scale = reciprocal_root(dot(x, x) + p.eps), along = dot(x, g) * scale * scale;
        FOR_PIECE(c, i) g[c][i] = scale * (g[c][i] - along * x[c][i]);
    }
    FOR_PIECE(c, i) g[c][i] *= slope[c][i];
}

// Grid (slices, blocks of heads). partial[slice][TAPS + 1][width] are the slices' sums for filters and biases.
extern "C" __global__ void __launch_bounds__(THREADS)
    short_conv_bwd(real* dx, float* partial, const real* dy, const ConvParams p) {
    const Place at = place(p);
    const int first = blockIdx.x * p.rows_per_slice, last = min(first + p.rows_per_slice, p.rows);
    Filter f;
    load_filter(f, p, at);
    // later[k] is the gradient of the filtered row k + 1 rows further on, zero outside the segment.
    Piece window[TAPS], dtaps[TAPS] = {}, dbias = {}, later[TAPS] = {};
    bool known = false;  // whether the window stands at the row after, in the same segment
    // From the rows after the slice on, as far as its last rows reach.
    for (int batch = min(last + TAPS - 2, p.rows - 1); batch >= first; batch -= BATCH) {
        RowInfo infos[BATCH];
        Piece gradients[BATCH], oldest[BATCH];
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
            const int row = max(batch - n, first);
            infos[n] = p.info[row];
            load_piece(gradients[n], dy + size_t(row) * p.width, at, p.head_dim);
        }
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
            const bool inside = infos[n].segment >= 0;
            const real* from = inside ? input_row(p, infos[n], max(batch - n, first), TAPS - 1) : nullptr;
            load_piece(oldest[n], from, at, p.head_dim);
        }
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
            const int row = batch - n;
            if (row < first) break;
            const RowInfo info = infos[n];
            const bool own = row < last;
            Piece& g = gradients[n];
            if (info.segment < 0) {
                FOR_PIECE(c, i) g[c][i] = 0.f;
                if (own) store_piece(dx + size_t(row) * p.width, g, at, p.head_dim);
                known = false;
                continue;
            }
            if (!info.has_next) {
#pragma unroll
                for (int k = 0; k < TAPS; ++k) {
                    FOR_PIECE(c, i) later[k][c][i] = 0.f;
                }
            }
            if (known && info.has_next) {
#pragma unroll
                for (int k = TAPS - 1; k > 0; --k) {
                    FOR_PIECE(c, i) window[k][c][i] = window[k - 1][c][i];
                }
                FOR_PIECE(c, i) window[0][c][i] = oldest[n][c][i];
            } else {
                load_window(window, p, info, row, at);
            }
            known = true;
            filter_gradient(g, window, f, p, at);
            if (own) {
                Piece out;
                FOR_PIECE(c, i) {
                    dbias[c][i] += g[c][i];
                    float sum = g[c][i] * f.taps[TAPS - 1][c][i];
#pragma unroll
                    for (int k = 0; k < TAPS; ++k) dtaps[k][c][i] += g[c][i] * window[k][c][i];
#pragma unroll
                    for (int k = 0; k + 1 < TAPS; ++k) sum += later[k][c][i] * f.taps[TAPS - 2 - k][c][i];
                    out[c][i] = sum;
                }
                store_piece(dx + size_t(row) * p.width, out, at, p.head_dim);
            }
#pragma unroll
            for (int k = TAPS - 1; k > 0; --k) {
                FOR_PIECE(c, i) later[k][c][i] = later[k - 1][c][i];
            }
            FOR_PIECE(c, i) later[0][c][i] = g[c][i];
        }
    }
    float* sums = partial + size_t(blockIdx.x) * (TAPS + 1) * p.width;
#pragma unroll
    for (int k = 0; k < TAPS; ++k) store_piece(sums + size_t(k) * p.width, dtaps[k], at, p.head_dim);
    store_piece(sums + size_t(TAPS) * p.width, dbias, at, p.head_dim);
}

// dweight[width, TAPS] from sums[TAPS, width].
extern "C" __global__ void short_conv_filters(float* dweight, const float* sums, int width) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < width * TAPS) dweight[i] = sums[i % TAPS * width + i / TAPS];
}
