// The short convolution: y = l2(act(conv(x) + bias)), every channel with its own TAPS taps, and its gradients.
//
// A warp owns a slice of rows and 32 / LANES heads (LANES lanes per head, for the norm; heads of VEC channels without
// one), a thread CHUNKS vectors of VEC channels. The window of TAPS rows and the filter gradients stay in registers. The
// backward goes from the last row to the first, because the gradient of a row also flows to the TAPS - 1 rows before it.
//
// Rows are loaded BATCH rows ahead, as they are in memory: addresses depend on the row number alone. Where segments
// begin and end is looked up for 32 rows at once, one per lane, and the inputs before a segment are loaded only there.
//
// The input may be a window of the columns of a wider matrix, and the outputs are divided over up to PARTS matrices.
//
// Compile-time: BF16, VEC, LANES (a power of two up to 32), CHUNKS, TAPS.
#include "params.cuh"
#include "head_fragments.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS, PARTS = 4;
constexpr int NO_ACTIVATION = -1;
constexpr int BATCH = CHUNKS > 2 ? 1 : sizeof(real) == 2 ? 4 : 2;

// A vector as it is in memory.
template <int BYTES>
struct Packed;
template <>
struct Packed<2> {
    typedef u16 Type;
};
template <>
struct Packed<4> {
    typedef float Type;
};
template <>
struct Packed<8> {
    typedef uint2 Type;
};
template <>
struct Packed<16> {
    typedef uint4 Type;
};
typedef Packed<VEC * int(sizeof(real))>::Type PackedVector;
typedef PackedVector PackedRow[CHUNKS];

// The heads and the slice of a warp. In lanes without a head, `head` is the last one.
struct ConvWarp {
    HeadLane at;
    int first, last;   // rows
    int column;        // of the head
    const real* x;     // of the head, row 0
    real* part;        // of the head in its output, row 0
    size_t part_width;

    DEVICE explicit ConvWarp(const ConvParams& p) {
        const int heads = p.width / p.head_dim, lane = threadIdx.x % 32;
        const int head = blockIdx.x * (32 / LANES) + lane / LANES;
        at = HeadLane{min(head, heads - 1), lane % LANES, head < heads};
        first = (blockIdx.y * WARPS + threadIdx.x / 32) * p.rows_per_slice;
        last = min(first + p.rows_per_slice, p.rows);
        column = at.head * p.head_dim;
        x = p.x + column;
        int start = 0;
        part = p.parts[0].at, part_width = p.parts[0].width;
#pragma unroll
        for (int n = 1; n < PARTS; ++n) {
            const ConvPart& next = p.parts[n];
            if (column >= next.first) start = next.first, part = next.at, part_width = next.width;
        }
        part += column - start;
    }
    DEVICE real* out(int row) const { return part + row * part_width; }
    DEVICE bool inside(const ConvParams& p, int c) const { return column_of(at.lane, c) < p.head_dim; }
};

// A row; null stands for zeros.
DEVICE void load_row(Fragment& x, const real* row, const ConvParams& p, const ConvWarp& w) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (row && w.inside(p, c)) {
            load<VEC>(x[c], row + column_of(w.at.lane, c));
        } else {
#pragma unroll
            for (int i = 0; i < VEC; ++i) x[c][i] = 0.f;
        }
    }
}
DEVICE void fetch_row(PackedRow& x, const real* row, const ConvParams& p, const ConvWarp& w) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        x[c] = PackedVector{};
        if (w.inside(p, c)) x[c] = *reinterpret_cast<const PackedVector*>(row + column_of(w.at.lane, c));
    }
}
DEVICE void unpack_row(Fragment& x, const PackedRow& row) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) load<VEC>(x[c], reinterpret_cast<const real*>(&row[c]));
}
template <typename T>
DEVICE void store_row(T* row, const Fragment& x, const ConvParams& p, const ConvWarp& w) {
    store_fragment(row, x, w.at.lane, p.head_dim, w.at.active);
}

// A thread's filters and biases.
struct Filter {
    Fragment taps[TAPS], bias;
};
DEVICE void load_filter(Filter& f, const ConvParams& p, const ConvWarp& w) {
    FOR_FRAGMENT(c, i) {
        const int own = column_of(w.at.lane, c) + i;
        const bool inside = own < p.head_dim;
#pragma unroll
        for (int k = 0; k < TAPS; ++k) {
            f.taps[k][c][i] = inside ? p.weight[size_t(w.column + own) * TAPS + k] : 0.f;
        }
        f.bias[c][i] = inside && p.bias ? p.bias[w.column + own] : 0.f;
    }
}

// What the lanes have looked up about 32 rows, a bit per row.
struct RowFlags {
    u32 inside;  // of a segment
    u32 begins;  // first of its segment
    u32 ends;    // last of its segment
    u32 early;   // has fewer than TAPS - 1 rows of its segment before it
};
// Of the rows `row`, `row + step`, ... that are in low..high.
DEVICE RowFlags row_flags(const ConvParams& p, int row, int step, int low, int high) {
    const int own = row + step * (int(threadIdx.x) % 32);
    bool inside = false, begins = false, ends = false, early = false;
    if (own >= low && own < high) {
        const RowInfo info = p.info[own];
        inside = info.segment >= 0;
        begins = inside && info.index == 0, ends = inside && !info.has_next, early = inside && info.index < TAPS - 1;
    }
    return {__ballot_sync(~0u, inside), __ballot_sync(~0u, begins), __ballot_sync(~0u, ends),
            __ballot_sync(~0u, early)};
}

// The input `back` rows before `row`: of its segment, or handed in; null stands for zeros.
DEVICE const real* input_row(const ConvParams& p, const ConvWarp& w, const RowInfo& info, int row, int back) {
    if (back <= info.index) return w.x + size_t(row - back) * p.stride;
    if (!p.before) return nullptr;
    return p.before + (size_t(info.segment) * (TAPS - 1) + TAPS - 1 - (back - info.index)) * p.width + w.column;
}

// y = conv(window) + bias. window[k] is the input of tap k; the current row is window[TAPS - 1].
DEVICE void convolve(Fragment& y, const Fragment (&window)[TAPS], const Filter& f) {
    FOR_FRAGMENT(c, i) {
        float sum = f.bias[c][i];
#pragma unroll
        for (int k = 0; k < TAPS; ++k) sum += f.taps[k][c][i] * window[k][c][i];
        y[c][i] = sum;
    }
}

// x = act(x) and its slope. Only the sigmoid makes something of the zeros beyond the head, which the norm must not see.
template <int ACT>
DEVICE void apply(Fragment& x, Fragment& slope) {
    FOR_FRAGMENT(c, i) {
        const float2 act = activation(ACT, x[c][i]);
        x[c][i] = act.x, slope[c][i] = act.y;
    }
}
DEVICE void activate(Fragment& x, Fragment& slope, const ConvParams& p, const ConvWarp& w) {
    if (p.act == ACT_SILU) {
        apply<ACT_SILU>(x, slope);
    } else if (p.act == NO_ACTIVATION) {
        FOR_FRAGMENT(c, i) slope[c][i] = 1.f;
    } else {
        apply<ACT_SIGMOID>(x, slope);
        FOR_FRAGMENT(c, i) x[c][i] = w.inside(p, c) ? x[c][i] : 0.f;
    }
}

// Grid (blocks of heads, slices).
extern "C" __global__ void __launch_bounds__(THREADS, CHUNKS * VEC <= 8 ? 3 : 1) short_conv_fwd(PARAMS(ConvForward)) {
    const ConvWarp w(p);
    if (w.first >= w.last) return;
    Filter f;
    load_filter(f, p, w);
    PackedRow ahead[BATCH];
#pragma unroll
    for (int n = 0; n < BATCH; ++n) fetch_row(ahead[n], w.x + size_t(min(w.first + n, w.last - 1)) * p.stride, p, w);
    Fragment window[TAPS] = {};
    for (int block = w.first; block < w.last; block += 32) {
        const RowFlags flags = row_flags(p, block, 1, w.first, w.last);
        const u32 unknown = flags.begins | u32(block == w.first);
        for (int batch = block; batch < min(block + 32, w.last); batch += BATCH) {
#pragma unroll
            for (int n = 0; n < BATCH; ++n) {
                const int row = batch + n, bit = row - block;
                if (row >= w.last) break;
                Fragment x, out = {}, slope;
                unpack_row(x, ahead[n]);
                if (row + BATCH < w.last) fetch_row(ahead[n], w.x + size_t(row + BATCH) * p.stride, p, w);
                if (flags.inside >> bit & 1) {
                    if (unknown >> bit & 1) {
                        const RowInfo info = p.info[row];
#pragma unroll
                        for (int k = 1; k < TAPS; ++k) load_row(window[k], input_row(p, w, info, row, TAPS - k), p, w);
                    }
#pragma unroll
                    for (int k = 0; k + 1 < TAPS; ++k) {
                        FOR_FRAGMENT(c, i) window[k][c][i] = window[k + 1][c][i];
                    }
                    FOR_FRAGMENT(c, i) window[TAPS - 1][c][i] = x[c][i];
                    convolve(out, window, f);
                    activate(out, slope, p, w);
                    if (p.l2_norm) {
                        const float scale = reciprocal_root(dot(out, out) + p.eps);
                        FOR_FRAGMENT(c, i) out[c][i] *= scale;
                    }
                }
                store_row(w.out(row), out, p, w);
            }
        }
    }
}

// The backward takes at most four channels per vector (mod.rs): eight do not fit the registers.
#if VEC <= 4
// From the gradient of a row's output, g, to that of the convolution output, in place.
DEVICE void filter_gradient(Fragment& g, const Fragment (&window)[TAPS], const Filter& f, const ConvParams& p,
                            const ConvWarp& w) {
    Fragment x, slope;
    convolve(x, window, f);
    activate(x, slope, p, w);
    if (p.l2_norm) {
        const float scale = reciprocal_root(dot(x, x) + p.eps), along = dot(x, g) * scale * scale;
        FOR_FRAGMENT(c, i) g[c][i] = scale * (g[c][i] - along * x[c][i]);
    }
    FOR_FRAGMENT(c, i) g[c][i] *= slope[c][i];
}

// to = the sum over the warps of a block, in their order; by the first warp.
DEVICE void store_block_sum(float* to, const Fragment& x, const ConvParams& p, const ConvWarp& w) {
    __shared__ float sums[WARPS][VEC][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < VEC; ++i) sums[warp][i][lane] = x[c][i];
        __syncthreads();
        if (warp > 0 || !w.at.active || !w.inside(p, c)) continue;
        float sum[VEC] = {};
#pragma unroll
        for (int n = 0; n < WARPS; ++n) {
#pragma unroll
            for (int i = 0; i < VEC; ++i) sum[i] += sums[n][i][lane];
        }
        store<VEC>(to + w.column + column_of(w.at.lane, c), sum);
    }
}

// Grid (blocks of heads, slices). partial[block of slices][TAPS + 1][width] are sums for filters and biases.
extern "C" __global__ void __launch_bounds__(THREADS, CHUNKS * VEC <= 4 && TAPS <= 4 ? 4 : 1)
    short_conv_bwd(PARAMS(ConvBackward)) {
    const ConvWarp w(p);
    Filter f;
    load_filter(f, p, w);
    // later[k] is the gradient of the convolution output k + 1 rows later, zero outside the segment.
    Fragment window[TAPS] = {}, dtaps[TAPS] = {}, dbias = {}, later[TAPS] = {};
    // Starts TAPS - 1 rows after the slice, whose gradients flow into its last rows.
    const int top = w.first < w.last ? min(w.last + TAPS - 2, p.rows - 1) : w.first - 1;
    PackedRow gradients[BATCH], oldest[BATCH];
    const auto fetch = [&](int n, int row) {
        fetch_row(gradients[n], w.out(row), p, w);
        fetch_row(oldest[n], w.x + size_t(max(row - (TAPS - 1), 0)) * p.stride, p, w);
    };
#pragma unroll
    for (int n = 0; n < BATCH; ++n) {
        if (top - n >= w.first) fetch(n, top - n);
    }
    for (int block = top; block >= w.first; block -= 32) {
        const RowFlags flags = row_flags(p, block, -1, w.first, p.rows);
        const u32 unknown = flags.ends | u32(block == top);
        for (int batch = block; batch >= max(block - 31, w.first); batch -= BATCH) {
#pragma unroll
            for (int n = 0; n < BATCH; ++n) {
                const int row = batch - n, bit = block - row;
                if (row < w.first) break;
                const bool own = row < w.last;
                Fragment g, out = {}, old;
                unpack_row(g, gradients[n]);
                unpack_row(old, oldest[n]);
                if (row - BATCH >= w.first) fetch(n, row - BATCH);
                if (flags.inside >> bit & 1) {
                    if (flags.ends >> bit & 1) {
#pragma unroll
                        for (int k = 0; k < TAPS; ++k) {
                            FOR_FRAGMENT(c, i) later[k][c][i] = 0.f;
                        }
                    }
                    if (unknown >> bit & 1) {
                        const RowInfo info = p.info[row];
#pragma unroll
                        for (int k = 1; k < TAPS; ++k) {
                            load_row(window[k], input_row(p, w, info, row, TAPS - 1 - k), p, w);
                        }
                    } else {
#pragma unroll
                        for (int k = TAPS - 1; k > 0; --k) {
                            FOR_FRAGMENT(c, i) window[k][c][i] = window[k - 1][c][i];
                        }
                    }
                    if (flags.early >> bit & 1) load_row(old, input_row(p, w, p.info[row], row, TAPS - 1), p, w);
                    FOR_FRAGMENT(c, i) window[0][c][i] = old[c][i];
                    filter_gradient(g, window, f, p, w);
                    if (own) {
                        FOR_FRAGMENT(c, i) {
                            dbias[c][i] += g[c][i];
                            float sum = g[c][i] * f.taps[TAPS - 1][c][i];
#pragma unroll
                            for (int k = 0; k < TAPS; ++k) dtaps[k][c][i] += g[c][i] * window[k][c][i];
#pragma unroll
                            for (int k = 0; k + 1 < TAPS; ++k) sum += later[k][c][i] * f.taps[TAPS - 2 - k][c][i];
                            out[c][i] = sum;
                        }
                    }
#pragma unroll
                    for (int k = TAPS - 1; k > 0; --k) {
                        FOR_FRAGMENT(c, i) later[k][c][i] = later[k - 1][c][i];
                    }
                    FOR_FRAGMENT(c, i) later[0][c][i] = g[c][i];
                }
                if (own) store_row(dx + size_t(row) * p.stride + w.column, out, p, w);
            }
        }
    }
    float* sums = partial + size_t(blockIdx.y) * (TAPS + 1) * p.width;
#pragma unroll
    for (int k = 0; k < TAPS; ++k) store_block_sum(sums + size_t(k) * p.width, dtaps[k], p, w);
    store_block_sum(sums + size_t(TAPS) * p.width, dbias, p, w);
}
#endif

// dweight[width, TAPS] from sums[TAPS, width].
extern "C" __global__ void short_conv_filters(PARAMS(ConvFilters)) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < width * TAPS) dweight[i] = sums[i % TAPS * width + i / TAPS];
}
