// Heads of a row at a time: token shift, per-head RMS norm and RoPE; output norm and gate. With gradients.
//
// A thread block takes some heads (LANES lanes of a warp to a head, CHUNKS pieces of VEC columns to a
// lane) and walks over a slice of rows, one after the other: what the next row needs of this one stays in
// registers, and so do the sums for the norm's weights.
//
// Compile-time: BF16, VEC, LANES (a power of two up to 32), CHUNKS.
#include "real.cuh"

constexpr int STRIDE = LANES * VEC;
typedef float Piece[CHUNKS][VEC];

// Where a row stands in its segment: the segment's number (-1: outside every segment), the index of the
// row among the segment's queries, its position among the keys, and whether the next row belongs to it.
struct alignas(16) RowInfo {
    int segment, index, position, has_next;
};

struct HeadParams {
    const real* u;       // [rows, heads * d]
    const float* shift;  // [rows, heads] logits, or null
    const real* prev;    // [segments, heads * d], or null
    const float* norm;   // [heads * d] or [d], or null
    const float2* rope;  // [positions][d / 2] cos and sin, or null
    const RowInfo* info; // [rows]
    int rows, heads, head_dim, shared_norm;
    int rows_per_slice, unused;
    float eps;
};

struct Place {
    int head, lane;
    bool active;
};
DEVICE Place place(int heads) {
    const int per_block = blockDim.x / LANES, local = threadIdx.x / LANES;
    const int head = blockIdx.y * per_block + local;
    return Place{min(head, heads - 1), int(threadIdx.x) % LANES, head < heads};
}
DEVICE int column_of(int lane, int c) { return c * STRIDE + lane * VEC; }

DEVICE void clear_piece(Piece& x) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) x[c][i] = 0.f;
    }
}
template <typename T>
DEVICE void load_piece(Piece& x, const T* p, int lane, int d) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (column_of(lane, c) < d) {
            load<VEC>(x[c], p + column_of(lane, c));
        } else {
#pragma unroll
            for (int i = 0; i < VEC; ++i) x[c][i] = 0.f;
        }
    }
}
// A piece on its way from memory, in as few registers as it fits.
#if BF16 && VEC == 8
typedef uint4 Raw[CHUNKS];
DEVICE void fetch(Raw& x, const real* p, int lane, int d) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        x[c] = column_of(lane, c) < d ? *reinterpret_cast<const uint4*>(p + column_of(lane, c))
                                      : make_uint4(0, 0, 0, 0);
    }
}
DEVICE void clear(Raw& x) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) x[c] = make_uint4(0, 0, 0, 0);
}
DEVICE void copy(Raw& x, const Raw& from) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) x[c] = from[c];
}
DEVICE void unpack(Piece& x, const Raw& raw) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const u32 words[4] = {raw[c].x, raw[c].y, raw[c].z, raw[c].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) x[c][2 * i] = bf16_lo(words[i]), x[c][2 * i + 1] = bf16_hi(words[i]);
    }
}
#else
typedef Piece Raw;
DEVICE void fetch(Raw& x, const real* p, int lane, int d) { load_piece(x, p, lane, d); }
DEVICE void clear(Raw& x) { clear_piece(x); }
DEVICE void copy(Raw& x, const Raw& from) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) x[c][i] = from[c][i];
    }
}
DEVICE void unpack(Piece& x, const Raw& raw) { copy(x, raw); }
#endif
template <typename T>
DEVICE void store_piece(T* p, const Piece& x, int lane, int d, bool active) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (active && column_of(lane, c) < d) store<VEC>(p + column_of(lane, c), x[c]);
    }
}
DEVICE float dot(const Piece& a, const Piece& b) {
    float sum = 0.f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) sum += a[c][i] * b[c][i];
    }
    return lanes_sum<LANES>(sum);
}

// Rotates the pairs (x[m], x[m + d/2]) by the row's angles, or back by sign -1. The other half of a pair
// may lie in another lane, so the head goes through shared memory.
DEVICE void rotate(Piece& x, const float2* table, float sign, int lane, int d) {
    extern __shared__ float heads_memory[];
    float* own = heads_memory + threadIdx.x / LANES * (CHUNKS * STRIDE);
    __syncwarp();
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) own[column_of(lane, c) + i] = x[c][i];
    }
    __syncwarp();
    const int half = d / 2;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
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
}

DEVICE float shift_weight(const HeadParams& p, int row, int head) {
    return sigmoid(p.shift[size_t(row) * p.heads + head]);
}

// Raw row before `row`: of its segment, or handed in, or zeros.
DEVICE void fetch_before(Raw& x, const HeadParams& p, const RowInfo& info, int row, const Place& at) {
    const int width = p.heads * p.head_dim, column = at.head * p.head_dim;
    if (info.segment >= 0 && info.index > 0) {
        fetch(x, p.u + size_t(row - 1) * width + column, at.lane, p.head_dim);
    } else if (info.segment >= 0 && p.prev) {
        fetch(x, p.prev + size_t(info.segment) * width + column, at.lane, p.head_dim);
    } else {
        clear(x);
    }
}

// Rows that a thread has on their way from memory at once.
constexpr int AHEAD = CHUNKS > 1 ? 1 : BF16 ? 4 : 2;

// Rows `first` to `last`, AHEAD at most.
template <bool SHIFT>
DEVICE void prepare_some_heads(real* y, const HeadParams& p, int first, int last, const Place& at) {
    const int d = p.head_dim, width = p.heads * d, column = at.head * d;
    int index[AHEAD];  // in the segment, -1 outside
    float logit[AHEAD];
    Raw u[AHEAD], before;
#pragma unroll
    for (int n = 0; n < AHEAD; ++n) {
        const int row = min(first + n, last - 1);
        const RowInfo info = p.info[row];
        index[n] = info.segment < 0 ? -1 : info.index;
        if constexpr (SHIFT) logit[n] = p.shift[size_t(row) * p.heads + at.head];
        fetch(u[n], p.u + size_t(row) * width + column, at.lane, d);
    }
    // Most likely the row before; not worth waiting for its index.
    if constexpr (SHIFT) {
        fetch(before, p.u + size_t(max(first - 1, 0)) * width + column, at.lane, d);
    }
#pragma unroll
    for (int n = 0; n < AHEAD; ++n) {
        const int row = first + n;
        if (row >= last) return;
        Piece x, other;
        unpack(x, u[n]);
        if constexpr (SHIFT) {
            if (index[n] == 0) fetch_before(before, p, p.info[row], row, at);
            unpack(other, before);
            copy(before, u[n]);
            const float a = sigmoid(logit[n]);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) x[c][i] = a * other[c][i] + (1.f - a) * x[c][i];
            }
        }
        if (p.norm) {
            load_piece(other, p.norm + (p.shared_norm ? 0 : column), at.lane, d);
            const float scale = reciprocal_root(dot(x, x) * (1.f / d) + p.eps);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) x[c][i] *= scale * other[c][i];
            }
        }
        if (index[n] < 0) clear_piece(x);
        else if (p.rope) rotate(x, p.rope + size_t(p.info[row].position) * (d / 2), 1.f, at.lane, d);
        store_piece(y + size_t(row) * width + column, x, at.lane, d, at.active);
    }
}
// Grid (slices, blocks of heads).
extern "C" __global__ void __launch_bounds__(256, CHUNKS > 1 ? 1 : 3)
    prepare_heads_fwd(real* y, const HeadParams p) {
    const Place at = place(p.heads);
    const int first = blockIdx.x * p.rows_per_slice, last = min(first + p.rows_per_slice, p.rows);
    for (int row = first; row < last; row += AHEAD) {
        if (p.shift) prepare_some_heads<true>(y, p, row, last, at);
        else prepare_some_heads<false>(y, p, row, last, at);
    }
}

// What a row's gradient is made of, on its way from memory. Nothing waits for anything else.
enum { INSIDE = 1, FIRST = 2, FOLLOWS = 4 };
template <bool SHIFT>
struct Row {
    int flags;    // INSIDE a segment, FIRST of it, another row of it FOLLOWS
    float logit;  // of the shift
    Raw g;        // gradient of the heads
    Raw u;        // the row of u before it, whatever it belongs to; without a shift, the row itself
};
template <bool SHIFT>
DEVICE void fetch_row(Row<SHIFT>& r, const HeadParams& p, const real* dy, int row, const Place& at) {
    const int width = p.heads * p.head_dim, column = at.head * p.head_dim;
    const RowInfo info = p.info[row];
    r.flags = (info.segment >= 0 ? INSIDE : 0) | (info.index == 0 ? FIRST : 0) |
              (info.has_next ? FOLLOWS : 0);
    fetch(r.g, dy + size_t(row) * width + column, at.lane, p.head_dim);
    if (SHIFT) r.logit = p.shift[size_t(row) * p.heads + at.head];
    const int other = SHIFT ? max(row - 1, 0) : row;
    fetch(r.u, p.u + size_t(other) * width + column, at.lane, p.head_dim);
}

// From the gradient of a row's heads, g, to that of the shifted ones, in place, and with it the sums for
// the norm's weights (when `count`). `before` and `now` are the raw rows, the former for shifts alone.
template <bool SHIFT, bool NORM>
DEVICE void shifted_gradient(Piece& g, Piece& dnorm, const HeadParams& p, int row, const Raw& before,
                             const Raw& now, float a, const float* norm, const Place& at, bool count) {
    const int d = p.head_dim;
    if (p.rope) rotate(g, p.rope + size_t(p.info[row].position) * (d / 2), -1.f, at.lane, d);
    if constexpr (!NORM) return;
    Piece x, other;
    unpack(x, now);
    if constexpr (SHIFT) {
        unpack(other, before);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
            for (int i = 0; i < VEC; ++i) x[c][i] = a * other[c][i] + (1.f - a) * x[c][i];
        }
    }
    const float scale = reciprocal_root(dot(x, x) * (1.f / d) + p.eps);
    // Read again for every row, from the nearest cache: registers are worth more.
    load_piece(other, norm, at.lane, d);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            x[c][i] *= scale;
            if (count) dnorm[c][i] += g[c][i] * x[c][i];
            g[c][i] *= other[c][i];
        }
    }
    const float mean = dot(g, x) * (1.f / d);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) g[c][i] = scale * (g[c][i] - x[c][i] * mean);
    }
}

// du and dshift of one row from the gradient of its shifted heads; `carry` is the share of the row after
// it, and then that of this row for the one before.
DEVICE void unshift(real* du, float* dshift, const Piece& g, Piece& carry, const Raw& before,
                    const Raw& now, float a, bool has_next, const Place& at, int d) {
    Piece x, out;
    unpack(x, before);
    unpack(out, now);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) x[c][i] -= out[c][i];
    }
    const float da = dot(g, x);
    if (at.lane == 0 && at.active) *dshift = da * a * (1.f - a);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            out[c][i] = (1.f - a) * g[c][i] + (has_next ? carry[c][i] : 0.f);
            carry[c][i] = a * g[c][i];
        }
    }
    store_piece(du, out, at.lane, d, at.active);
}

// Rows from last to first, because a row also gets a share of the next row's gradient: carry.
// partial[slice][heads * d] are the sums for the norm's weights.
template <bool SHIFT, bool NORM>
DEVICE void prepare_heads_gradient(real* du, float* dshift, float* partial, const real* dy,
                                   const HeadParams& p) {
    const Place at = place(p.heads);
    const int d = p.head_dim, width = p.heads * d, column = at.head * d;
    const int first = blockIdx.x * p.rows_per_slice, last = min(first + p.rows_per_slice, p.rows);
    const float* norm = NORM ? p.norm + (p.shared_norm ? 0 : column) : nullptr;
    Piece dnorm = {}, carry = {};
    Raw now;
    if constexpr (SHIFT) {
        fetch(now, p.u + size_t(last - 1) * width + column, at.lane, d);
        const RowInfo info = p.info[last - 1];
        if (last < p.rows && info.segment >= 0 && info.has_next) {
            // The share of the first row of the next slice.
            Row<true> after;
            fetch_row(after, p, dy, last, at);
            Raw own;
            fetch(own, p.u + size_t(last) * width + column, at.lane, d);
            const float a = sigmoid(after.logit);
            unpack(carry, after.g);
            shifted_gradient<true, NORM>(carry, dnorm, p, last, now, own, a, norm, at, false);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) carry[c][i] *= a;
            }
        }
    }
    // A shift needs registers of its own.
    constexpr int COUNT = SHIFT ? (AHEAD + 1) / 2 : AHEAD;
    for (int top = last - 1; top >= first; top -= COUNT) {
        Row<SHIFT> rows[COUNT];
#pragma unroll
        for (int n = 0; n < COUNT; ++n) fetch_row(rows[n], p, dy, max(top - n, first), at);
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            const Row<SHIFT>& r = rows[n];
            const int row = top - n;
            if (row < first) break;
            const size_t here = size_t(row) * width + column;
            float* da = SHIFT ? dshift + size_t(row) * p.heads + at.head : nullptr;
            Piece g;
            unpack(g, r.g);
            if (!(r.flags & INSIDE)) {
                clear_piece(g);
                store_piece(du + here, g, at.lane, d, at.active);
                if (SHIFT && at.lane == 0 && at.active) *da = 0.f;
            } else if constexpr (SHIFT) {
                Raw before;
                copy(before, r.u);
                if (r.flags & FIRST) fetch_before(before, p, p.info[row], row, at);
                const float a = sigmoid(r.logit);
                shifted_gradient<true, NORM>(g, dnorm, p, row, before, now, a, norm, at, true);
                unshift(du + here, da, g, carry, before, now, a, r.flags & FOLLOWS, at, d);
            } else {
                shifted_gradient<false, NORM>(g, dnorm, p, row, r.u, r.u, 0.f, norm, at, true);
                store_piece(du + here, g, at.lane, d, at.active);
            }
            if constexpr (SHIFT) copy(now, r.u);
        }
    }
    if (NORM) store_piece(partial + size_t(blockIdx.x) * width + column, dnorm, at.lane, d, at.active);
}

// One kernel for each set of parts, or all would need the registers of the largest.
#define PREPARE_HEADS_BWD(NAME, SHIFT, NORM)                                                         \
    extern "C" __global__ void __launch_bounds__(SHIFT ? 288 : 256, CHUNKS > 1 ? 1 : SHIFT ? 2 : 3)         \
        prepare_heads_bwd##NAME(real* du, float* dshift, float* partial, const real* dy,             \
                                const HeadParams p) {                                                \
        prepare_heads_gradient<SHIFT, NORM>(du, dshift, partial, dy, p);                             \
    }
PREPARE_HEADS_BWD(, false, false)
PREPARE_HEADS_BWD(_norm, false, true)
PREPARE_HEADS_BWD(_shift, true, false)
PREPARE_HEADS_BWD(_shift_norm, true, true)

struct GatedParams {
    const real* x;      // [rows, groups * d]
    const float* norm;  // [groups * d], or null
    const real* gate;   // [rows, groups * d], or null
    int rows, groups, width, act;
    int rows_per_slice;
    float eps;
};

// y = rms(x) * act(gate). Grid (slices, blocks of groups).
extern "C" __global__ void gated_norm_fwd(real* y, const GatedParams p) {
    const Place at = place(p.groups);
    const int d = p.width / p.groups, column = at.head * d;
    const int first = blockIdx.x * p.rows_per_slice, last = min(first + p.rows_per_slice, p.rows);
    Piece weights;
    if (p.norm) load_piece(weights, p.norm + column, at.lane, d);
    Raw next_x, next_z;
    const size_t begin = size_t(first) * p.width + column;
    fetch(next_x, p.x + begin, at.lane, d);
    if (p.gate) fetch(next_z, p.gate + begin, at.lane, d);
    for (int row = first; row < last; ++row) {
        const size_t here = size_t(row) * p.width + column;
        Piece x, z;
        unpack(x, next_x);
        unpack(z, next_z);
        if (row + 1 < last) {
            fetch(next_x, p.x + here + p.width, at.lane, d);
            if (p.gate) fetch(next_z, p.gate + here + p.width, at.lane, d);
        }
        if (p.norm) {
            const float scale = reciprocal_root(dot(x, x) * (1.f / d) + p.eps);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) x[c][i] *= scale * weights[c][i];
            }
        }
        if (p.gate) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) x[c][i] *= activation(p.act, z[c][i]).x;
            }
        }
        store_piece(y + here, x, at.lane, d, at.active);
    }
}

// Operands of one row of the gradient, on their way from memory.
struct GatedRow {
    Raw x, g, z;
};
DEVICE void fetch_row(GatedRow& r, const GatedParams& p, const real* dy, size_t here, int lane, int d) {
    fetch(r.x, p.x + here, lane, d);
    fetch(r.g, dy + here, lane, d);
    if (p.gate) fetch(r.z, p.gate + here, lane, d);
}

// partial[slice][width] are the sums for the norm's weights. What the next row needs is on its way while
// this one is worked on. With `y`, the output once more, which may take the place of dy.
extern "C" __global__ void gated_norm_bwd(real* dx, real* dgate, real* y, float* partial,
                                          const real* dy, const GatedParams p) {
    const Place at = place(p.groups);
    const int d = p.width / p.groups, column = at.head * d;
    const int first = blockIdx.x * p.rows_per_slice, last = min(first + p.rows_per_slice, p.rows);
    Piece weights, dnorm = {};
    if (p.norm) load_piece(weights, p.norm + column, at.lane, d);
    GatedRow next;
    fetch_row(next, p, dy, size_t(first) * p.width + column, at.lane, d);
    for (int row = first; row < last; ++row) {
        const size_t here = size_t(row) * p.width + column;
        Piece x, g, z, out;
        unpack(x, next.x);
        unpack(g, next.g);
        unpack(z, next.z);
        if (row + 1 < last) fetch_row(next, p, dy, here + p.width, at.lane, d);
        float scale = 1.f;
        if (p.norm) {
            scale = reciprocal_root(dot(x, x) * (1.f / d) + p.eps);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) x[c][i] *= scale;
            }
        }
        if (p.gate) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) {
                    const float2 act = activation(p.act, z[c][i]);
                    const float scaled = x[c][i] * (p.norm ? weights[c][i] : 1.f);
                    z[c][i] = g[c][i] * scaled * act.y;
                    g[c][i] *= act.x;
                    out[c][i] = scaled * act.x;
                }
            }
            store_piece(dgate + here, z, at.lane, d, at.active);
        } else if (y) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) out[c][i] = x[c][i] * (p.norm ? weights[c][i] : 1.f);
            }
        }
        if (y) store_piece(y + here, out, at.lane, d, at.active);
        if (p.norm) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) {
                    dnorm[c][i] += g[c][i] * x[c][i];
                    g[c][i] *= weights[c][i];
                }
            }
            const float mean = dot(g, x) * (1.f / d);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) g[c][i] = scale * (g[c][i] - x[c][i] * mean);
            }
        }
        store_piece(dx + here, g, at.lane, d, at.active);
    }
    if (p.norm) store_piece(partial + size_t(blockIdx.x) * p.width + column, dnorm, at.lane, d, at.active);
}
