// Register fragments of heads: a thread block owns some heads (LANES lanes of a warp per head, CHUNKS vectors of VEC
// columns per lane) and iterates over a slice of rows. Gradient sums of norm weights stay in registers.
//
// Compile-time: BF16, VEC, LANES (a power of two up to 32), CHUNKS.
#pragma once
#include "real.cuh"

constexpr int STRIDE = LANES * VEC;
typedef float Fragment[CHUNKS][VEC];

struct HeadLane {
    int head, lane;
    bool active;
};
DEVICE HeadLane head_lane(int heads) {
    const int per_block = blockDim.x / LANES, local = threadIdx.x / LANES;
    const int head = blockIdx.y * per_block + local;
    return HeadLane{min(head, heads - 1), int(threadIdx.x) % LANES, head < heads};
}
DEVICE int column_of(int lane, int c) { return c * STRIDE + lane * VEC; }

#define FOR_FRAGMENT(c, i)                  \
    _Pragma("unroll") for (int c = 0; c < CHUNKS; ++c) _Pragma("unroll") for (int i = 0; i < VEC; ++i)

DEVICE void clear_fragment(Fragment& x) {
    FOR_FRAGMENT(c, i) x[c][i] = 0.f;
}
template <typename T>
DEVICE void load_fragment(Fragment& x, const T* p, int lane, int d) {
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
// A prefetched fragment, still packed as bf16 to keep register pressure low.
#if BF16 && VEC == 8
typedef uint4 PackedFragment[CHUNKS];
DEVICE void fetch(PackedFragment& x, const real* p, int lane, int d) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        x[c] = column_of(lane, c) < d ? *reinterpret_cast<const uint4*>(p + column_of(lane, c))
                                      : make_uint4(0, 0, 0, 0);
    }
}
DEVICE void clear(PackedFragment& x) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) x[c] = make_uint4(0, 0, 0, 0);
}
DEVICE void copy(PackedFragment& x, const PackedFragment& from) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) x[c] = from[c];
}
DEVICE void unpack(Fragment& x, const PackedFragment& raw) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const u32 words[4] = {raw[c].x, raw[c].y, raw[c].z, raw[c].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) x[c][2 * i] = bf16_lo(words[i]), x[c][2 * i + 1] = bf16_hi(words[i]);
    }
}
#else
typedef Fragment PackedFragment;
DEVICE void fetch(PackedFragment& x, const real* p, int lane, int d) { load_fragment(x, p, lane, d); }
DEVICE void clear(PackedFragment& x) { clear_fragment(x); }
DEVICE void copy(PackedFragment& x, const PackedFragment& from) {
    FOR_FRAGMENT(c, i) x[c][i] = from[c][i];
}
DEVICE void unpack(Fragment& x, const PackedFragment& raw) { copy(x, raw); }
#endif
template <typename T>
DEVICE void store_fragment(T* p, const Fragment& x, int lane, int d, bool active) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (active && column_of(lane, c) < d) store<VEC>(p + column_of(lane, c), x[c]);
    }
}
DEVICE float dot(const Fragment& a, const Fragment& b) {
    float sum = 0.f;
    FOR_FRAGMENT(c, i) sum += a[c][i] * b[c][i];
    return lanes_sum<LANES>(sum);
}
