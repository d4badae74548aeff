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
DEVICE void unpack(Piece& x, const Raw& raw) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) x[c][i] = raw[c][i];
    }
}
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

// Grid (slices, blocks of heads).
extern "C" __global__ void prepare_heads_fwd(real* y, const HeadParams p) {
    const Place at = place(p.heads);
    const int d = p.head_dim, width = p.heads * d, column = at.head * d;
    const int first = blockIdx.x * p.rows_per_slice, last = min(first + p.rows_per_slice, p.rows);
    Piece weights, before;
    if (p.norm) load_piece(weights, p.norm + (p.shared_norm ? 0 : column), at.lane, d);
    for (int row = first; row < last; ++row) {
        const RowInfo info = p.info[row];
        Piece now, x = {};
        if (info.segment < 0) {
            store_piece(y + size_t(row) * width + column, x, at.lane, d, at.active);
            continue;
        }
        load_piece(now, p.u + size_t(row) * width + column, at.lane, d);
        if (p.shift) {
            if (row == first || info.index == 0) {
                Raw raw;
                fetch_before(raw, p, info, row, at);
                unpack(before, raw);
            }
            const float a = shift_weight(p, row, at.head);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) {
                    x[c][i] = a * before[c][i] + (1.f - a) * now[c][i];
                    before[c][i] = now[c][i];
                }
            }
        } else {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) x[c][i] = now[c][i];
            }
        }
        if (p.norm) {
            const float scale = 1.f / sqrtf(dot(x, x) / d + p.eps);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) x[c][i] *= scale * weights[c][i];
            }
        }
        if (p.rope) rotate(x, p.rope + size_t(info.position) * (d / 2), 1.f, at.lane, d);
        store_piece(y + size_t(row) * width + column, x, at.lane, d, at.active);
    }
}

// From the gradient of a row's heads, g, to that of the shifted ones, in place, and with it the sums for
// the norm's weights (when `count`). `before` and `now` are the raw rows; without a shift, `now` alone
// counts.
DEVICE void shifted_gradient(Piece& g, Piece& dnorm, const HeadParams& p, const RowInfo& info,
                             const Piece& before, const Piece& now, float a, const Piece& weights,
                             const Place& at, bool count) {
    const int d = p.head_dim;
    if (p.rope) rotate(g, p.rope + size_t(info.position) * (d / 2), -1.f, at.lane, d);
    if (!p.norm) return;
    Piece x;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            x[c][i] = p.shift ? a * before[c][i] + (1.f - a) * now[c][i] : now[c][i];
        }
    }
    const float scale = 1.f / sqrtf(dot(x, x) / d + p.eps);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            x[c][i] *= scale;
            if (count) dnorm[c][i] += g[c][i] * x[c][i];
            g[c][i] *= weights[c][i];
        }
    }
    const float mean = dot(g, x) / d;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) g[c][i] = scale * (g[c][i] - x[c][i] * mean);
    }
}

// Rows from last to first, because a row also gets a share of the next row's gradient: carry.
// partial[slice][heads * d] are the sums for the norm's weights.
extern "C" __global__ void prepare_heads_bwd(real* du, float* dshift, float* partial, const real* dy,
                                             const HeadParams p) {
    const Place at = place(p.heads);
    const int d = p.head_dim, width = p.heads * d, column = at.head * d;
    const int first = blockIdx.x * p.rows_per_slice, last = min(first + p.rows_per_slice, p.rows);
    Piece weights, dnorm = {}, carry = {}, now, before;
    if (p.norm) load_piece(weights, p.norm + (p.shared_norm ? 0 : column), at.lane, d);
    bool known = false;  // whether `now` already holds the row
    if (p.shift && last < p.rows && p.info[last - 1].segment >= 0 && p.info[last - 1].has_next) {
        // The share of the first row of the next slice.
        const RowInfo info = p.info[last];
        const float a = shift_weight(p, last, at.head);
        Piece g, next;
        load_piece(next, p.u + size_t(last) * width + column, at.lane, d);
        load_piece(now, p.u + size_t(last - 1) * width + column, at.lane, d);
        known = true;
        load_piece(g, dy + size_t(last) * width + column, at.lane, d);
        shifted_gradient(g, dnorm, p, info, now, next, a, weights, at, false);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
            for (int i = 0; i < VEC; ++i) carry[c][i] = a * g[c][i];
        }
    }
    // What the next row needs is on its way while this one is worked on.
    Raw next_g, next_before;
    RowInfo next_info = p.info[last - 1];
    fetch(next_g, dy + size_t(last - 1) * width + column, at.lane, d);
    if (p.shift) fetch_before(next_before, p, next_info, last - 1, at);
    for (int row = last - 1; row >= first; --row) {
        const RowInfo info = next_info;
        Piece g;
        unpack(g, next_g);
        if (p.shift) unpack(before, next_before);
        if (row > first) {
            next_info = p.info[row - 1];
            fetch(next_g, dy + size_t(row - 1) * width + column, at.lane, d);
            if (p.shift) fetch_before(next_before, p, next_info, row - 1, at);
        }
        const size_t here = size_t(row) * width + column;
        if (info.segment < 0) {
            clear_piece(g);
            store_piece(du + here, g, at.lane, d, at.active);
            if (p.shift && at.lane == 0 && at.active) dshift[size_t(row) * p.heads + at.head] = 0.f;
            known = false;
            continue;
        }
        if (!known) load_piece(now, p.u + here, at.lane, d);
        float a = 0.f;
        if (p.shift) a = shift_weight(p, row, at.head);
        shifted_gradient(g, dnorm, p, info, before, now, a, weights, at, true);
        if (!p.shift) {
            store_piece(du + here, g, at.lane, d, at.active);
            continue;
        }
        const float da = dot(g, before) - dot(g, now);
        if (at.lane == 0 && at.active) dshift[size_t(row) * p.heads + at.head] = da * a * (1.f - a);
        Piece out;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                out[c][i] = (1.f - a) * g[c][i] + (info.has_next ? carry[c][i] : 0.f);
                carry[c][i] = a * g[c][i];
                now[c][i] = before[c][i];
            }
        }
        store_piece(du + here, out, at.lane, d, at.active);
        known = info.index > 0;
    }
    if (p.norm) store_piece(partial + size_t(blockIdx.x) * width + column, dnorm, at.lane, d, at.active);
}

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
    for (int row = first; row < last; ++row) {
        const size_t here = size_t(row) * p.width + column;
        Piece x;
        load_piece(x, p.x + here, at.lane, d);
        if (p.norm) {
            const float scale = 1.f / sqrtf(dot(x, x) / d + p.eps);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) x[c][i] *= scale * weights[c][i];
            }
        }
        if (p.gate) {
            Piece z;
            load_piece(z, p.gate + here, at.lane, d);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) x[c][i] *= activation(p.act, z[c][i]).x;
            }
        }
        store_piece(y + here, x, at.lane, d, at.active);
    }
}

// partial[slice][width] are the sums for the norm's weights.
extern "C" __global__ void gated_norm_bwd(real* dx, real* dgate, float* partial, const real* dy,
                                          const GatedParams p) {
    const Place at = place(p.groups);
    const int d = p.width / p.groups, column = at.head * d;
    const int first = blockIdx.x * p.rows_per_slice, last = min(first + p.rows_per_slice, p.rows);
    Piece weights, dnorm = {};
    if (p.norm) load_piece(weights, p.norm + column, at.lane, d);
    for (int row = first; row < last; ++row) {
        const size_t here = size_t(row) * p.width + column;
        Piece x, g;
        load_piece(x, p.x + here, at.lane, d);
        load_piece(g, dy + here, at.lane, d);
        float scale = 1.f;
        if (p.norm) {
            scale = 1.f / sqrtf(dot(x, x) / d + p.eps);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) x[c][i] *= scale;
            }
        }
        if (p.gate) {
            Piece z;
            load_piece(z, p.gate + here, at.lane, d);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) {
                    const float2 act = activation(p.act, z[c][i]);
                    z[c][i] = g[c][i] * x[c][i] * (p.norm ? weights[c][i] : 1.f) * act.y;
                    g[c][i] *= act.x;
                }
            }
            store_piece(dgate + here, z, at.lane, d, at.active);
        }
        if (p.norm) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) {
                    dnorm[c][i] += g[c][i] * x[c][i];
                    g[c][i] *= weights[c][i];
                }
            }
            const float mean = dot(g, x) / d;
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
