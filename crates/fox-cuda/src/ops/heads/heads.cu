// Token shift, per-head RMS norm and RoPE, and their gradients. Work decomposition: head_fragments.cuh.
//
// Compile-time: BF16, VEC, LANES (a power of two up to 32), CHUNKS.
#include "params.cuh"
#include "head_fragments.cuh"

// Rotates the pairs (x[m], x[m + d/2]) by the row's angles, or back with sign -1. The other element of a pair may be in
// another lane, so the head is exchanged through shared memory.
DEVICE void rotate(Fragment& x, const float2* table, float sign, int lane, int d) {
    extern __shared__ float heads_memory[];
    float* own = heads_memory + threadIdx.x / LANES * (CHUNKS * STRIDE);
    __syncwarp();
    FOR_FRAGMENT(c, i) own[column_of(lane, c) + i] = x[c][i];
    __syncwarp();
    const int half = d / 2;
    FOR_FRAGMENT(c, i) {
        const int m = column_of(lane, c) + i;
        if (m < half) {
            const float2 t = table[m];
            x[c][i] = x[c][i] * t.x - sign * own[m + half] * t.y;
        } else if (m < d) {
            const float2 t = table[m - half];
            x[c][i] = x[c][i] * t.x + sign * own[m - half] * t.y;
        }
    }
}

// The row of u before `row`: of its segment, or `prev`, or zeros.
DEVICE void fetch_before(PackedFragment& x, const HeadParams& p, const RowInfo& info, int row, const HeadLane& at) {
    const int width = p.heads * p.head_dim, column = at.head * p.head_dim;
    if (info.segment >= 0 && info.index > 0) {
        fetch(x, p.u + size_t(row - 1) * width + column, at.lane, p.head_dim);
    } else if (info.segment >= 0 && p.prev) {
        fetch(x, p.prev + size_t(info.segment) * width + column, at.lane, p.head_dim);
    } else {
        clear(x);
    }
}

// Rows in flight per thread.
constexpr int PREFETCH_ROWS = CHUNKS > 1 ? 1 : BF16 ? 4 : 2;

// Rows [first, last), at most PREFETCH_ROWS.
template <bool SHIFT>
DEVICE void prepare_rows(real* y, const HeadParams& p, int first, int last, const HeadLane& at) {
    const int d = p.head_dim, width = p.heads * d, column = at.head * d;
    int index[PREFETCH_ROWS];  // in the segment, -1 outside
    float logit[PREFETCH_ROWS];
    PackedFragment u[PREFETCH_ROWS], before;
#pragma unroll
    for (int n = 0; n < PREFETCH_ROWS; ++n) {
        const int row = min(first + n, last - 1);
        const RowInfo info = p.info[row];
        index[n] = info.segment < 0 ? -1 : info.index;
        if constexpr (SHIFT) logit[n] = p.shift[size_t(row) * p.heads + at.head];
        fetch(u[n], p.u + size_t(row) * width + column, at.lane, d);
    }
    // Speculates that the previous row belongs to the segment, to save a dependent load.
    if constexpr (SHIFT) {
        fetch(before, p.u + size_t(max(first - 1, 0)) * width + column, at.lane, d);
    }
#pragma unroll
    for (int n = 0; n < PREFETCH_ROWS; ++n) {
        const int row = first + n;
        if (row >= last) return;
        Fragment x, other;
        unpack(x, u[n]);
        if constexpr (SHIFT) {
            if (index[n] == 0) fetch_before(before, p, p.info[row], row, at);
            unpack(other, before);
            copy(before, u[n]);
            const float a = sigmoid(logit[n]);
            FOR_FRAGMENT(c, i) x[c][i] = a * other[c][i] + (1.f - a) * x[c][i];
        }
        if (p.norm) {
            load_fragment(other, p.norm + (p.shared_norm ? 0 : column), at.lane, d);
            const float scale = reciprocal_root(dot(x, x) * (1.f / d) + p.eps);
            FOR_FRAGMENT(c, i) x[c][i] *= scale * other[c][i];
        }
        if (index[n] < 0) clear_fragment(x);
        else if (p.rope) rotate(x, p.rope + size_t(p.info[row].position) * (d / 2), 1.f, at.lane, d);
        store_fragment(y + size_t(row) * width + column, x, at.lane, d, at.active);
    }
}
// Grid (slices, blocks of heads).
extern "C" __global__ void __launch_bounds__(256, CHUNKS > 1 ? 1 : 3)
    prepare_heads_fwd(PARAMS(HeadsForward)) {
    const HeadLane at = head_lane(p.heads);
    const int first = blockIdx.x * p.rows_per_slice, last = min(first + p.rows_per_slice, p.rows);
    for (int row = first; row < last; row += PREFETCH_ROWS) {
        if (p.shift) prepare_rows<true>(y, p, row, last, at);
        else prepare_rows<false>(y, p, row, last, at);
    }
}

// Prefetched operands of a row's gradient; all loads are independent.
enum { INSIDE = 1, FIRST = 2, FOLLOWS = 4 };
template <bool SHIFT>
struct GradientRow {
    int flags;    // INSIDE a segment, its FIRST row, FOLLOWS: not its last row
    float logit;  // of the shift
    PackedFragment g;        // gradient of the heads
    PackedFragment u;        // the previous row of u, of any segment; without a shift, the row itself
};
template <bool SHIFT>
DEVICE void fetch_row(GradientRow<SHIFT>& r, const HeadParams& p, const real* dy, int row, const HeadLane& at) {
    const int width = p.heads * p.head_dim, column = at.head * p.head_dim;
    const RowInfo info = p.info[row];
    r.flags = (info.segment >= 0 ? INSIDE : 0) | (info.index == 0 ? FIRST : 0) |
              (info.has_next ? FOLLOWS : 0);
    fetch(r.g, dy + size_t(row) * width + column, at.lane, p.head_dim);
    if (SHIFT) r.logit = p.shift[size_t(row) * p.heads + at.head];
    const int other = SHIFT ? max(row - 1, 0) : row;
    fetch(r.u, p.u + size_t(other) * width + column, at.lane, p.head_dim);
}

// From the gradient of a row's heads, g, to that of the shifted heads, in place; adds the gradient of the norm weights
// if `count`. `before` (with a shift only) and `now` are the rows of u.
template <bool SHIFT, bool NORM>
DEVICE void shifted_gradient(Fragment& g, Fragment& dnorm, const HeadParams& p, int row, const PackedFragment& before,
                             const PackedFragment& now, float a, const float* norm, const HeadLane& at, bool count) {
    const int d = p.head_dim;
    if (p.rope) rotate(g, p.rope + size_t(p.info[row].position) * (d / 2), -1.f, at.lane, d);
    if constexpr (!NORM) return;
    Fragment x, other;
    unpack(x, now);
    if constexpr (SHIFT) {
        unpack(other, before);
        FOR_FRAGMENT(c, i) x[c][i] = a * other[c][i] + (1.f - a) * x[c][i];
    }
    const float scale = reciprocal_root(dot(x, x) * (1.f / d) + p.eps);
    // Reloaded from L1 for every row, to lower register pressure.
    load_fragment(other, norm, at.lane, d);
    FOR_FRAGMENT(c, i) {
        x[c][i] *= scale;
        if (count) dnorm[c][i] += g[c][i] * x[c][i];
        g[c][i] *= other[c][i];
    }
    const float mean = dot(g, x) * (1.f / d);
    FOR_FRAGMENT(c, i) g[c][i] = scale * (g[c][i] - x[c][i] * mean);
}

// du and dshift of one row from the gradient of its shifted heads. `carry` is the contribution of the next row on
// entry, and that of this row to the previous one on exit.
DEVICE void unshift(real* du, float* dshift, const Fragment& g, Fragment& carry, const PackedFragment& before,
                    const PackedFragment& now, float a, bool has_next, const HeadLane& at, int d) {
    Fragment x, out;
    unpack(x, before);
    unpack(out, now);
    FOR_FRAGMENT(c, i) x[c][i] -= out[c][i];
    const float da = dot(g, x);
    if (at.lane == 0 && at.active) *dshift = da * a * (1.f - a);
    FOR_FRAGMENT(c, i) {
        out[c][i] = (1.f - a) * g[c][i] + (has_next ? carry[c][i] : 0.f);
        carry[c][i] = a * g[c][i];
    }
    store_fragment(du, out, at.lane, d, at.active);
}

// Rows from last to first, because the gradient of a row also flows to the previous one (carry).
// partial[slice][heads * d] are partial gradients of the norm weights.
template <bool SHIFT, bool NORM>
DEVICE void prepare_heads_gradient(real* du, float* dshift, float* partial, const real* dy,
                                   const HeadParams& p) {
    const HeadLane at = head_lane(p.heads);
    const int d = p.head_dim, width = p.heads * d, column = at.head * d;
    const int first = blockIdx.x * p.rows_per_slice, last = min(first + p.rows_per_slice, p.rows);
    const float* norm = NORM ? p.norm + (p.shared_norm ? 0 : column) : nullptr;
    Fragment dnorm = {}, carry = {};
    PackedFragment now;
    if constexpr (SHIFT) {
        fetch(now, p.u + size_t(last - 1) * width + column, at.lane, d);
        const RowInfo info = p.info[last - 1];
        if (last < p.rows && info.segment >= 0 && info.has_next) {
            // Contribution of the first row of the next slice.
            GradientRow<true> after;
            fetch_row(after, p, dy, last, at);
            PackedFragment own;
            fetch(own, p.u + size_t(last) * width + column, at.lane, d);
            const float a = sigmoid(after.logit);
            unpack(carry, after.g);
            shifted_gradient<true, NORM>(carry, dnorm, p, last, now, own, a, norm, at, false);
            FOR_FRAGMENT(c, i) carry[c][i] *= a;
        }
    }
    // With a shift fewer rows, to limit register pressure.
    constexpr int COUNT = SHIFT ? (PREFETCH_ROWS + 1) / 2 : PREFETCH_ROWS;
    for (int top = last - 1; top >= first; top -= COUNT) {
        GradientRow<SHIFT> rows[COUNT];
#pragma unroll
        for (int n = 0; n < COUNT; ++n) fetch_row(rows[n], p, dy, max(top - n, first), at);
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            const GradientRow<SHIFT>& r = rows[n];
            const int row = top - n;
            if (row < first) break;
            const size_t here = size_t(row) * width + column;
            float* da = SHIFT ? dshift + size_t(row) * p.heads + at.head : nullptr;
            Fragment g;
            unpack(g, r.g);
            if (!(r.flags & INSIDE)) {
                clear_fragment(g);
                store_fragment(du + here, g, at.lane, d, at.active);
                if (SHIFT && at.lane == 0 && at.active) *da = 0.f;
            } else if constexpr (SHIFT) {
                PackedFragment before;
                copy(before, r.u);
                if (r.flags & FIRST) fetch_before(before, p, p.info[row], row, at);
                const float a = sigmoid(r.logit);
                shifted_gradient<true, NORM>(g, dnorm, p, row, before, now, a, norm, at, true);
                unshift(du + here, da, g, carry, before, now, a, r.flags & FOLLOWS, at, d);
            } else {
                shifted_gradient<false, NORM>(g, dnorm, p, row, r.u, r.u, 0.f, norm, at, true);
                store_fragment(du + here, g, at.lane, d, at.active);
            }
            if constexpr (SHIFT) copy(now, r.u);
        }
    }
    if (NORM) store_fragment(partial + size_t(blockIdx.x) * width + column, dnorm, at.lane, d, at.active);
}

// One kernel per combination, or all would have the register count of the largest. The launch bounds allow 96 registers
// with a shift and 80 without.
#define PREPARE_HEADS_BWD(NAME, SHIFT, NORM)                                                         \
    extern "C" __global__ void                                                                       \
    __launch_bounds__(SHIFT ? 288 : 256, CHUNKS > 1 ? 1 : SHIFT ? 2 : 3)                             \
        prepare_heads_bwd##NAME(PARAMS(HeadsBackward)) {                                             \
        prepare_heads_gradient<SHIFT, NORM>(du, dshift, partial, dy, p);                             \
    }
PREPARE_HEADS_BWD(, false, false)
PREPARE_HEADS_BWD(_norm, false, true)
PREPARE_HEADS_BWD(_shift, true, false)
PREPARE_HEADS_BWD(_shift_norm, true, true)
