// Building blocks of attention kernels for bf16 and f32: blocks of 64 rows of a head, tiles of 64 x 64 weights, and their
// products, by mma.sync in bf16. In f32, a mode for comparison with the oracle, operands are read from device memory
// and every thread computes the same elements by FMA.
//
// A thread holds two rows (r and r + 8 of its warp's 16) of an accumulator, as in softmax.cuh.
//
// Compile-time: HEAD_DIM, WIDE.
#pragma once
#define BF16 !WIDE
#include "attention.cuh"
#include "mma.cuh"
#include "real.cuh"

constexpr int BLOCK = 64;
constexpr int THREADS = 128;
constexpr int PITCH = HEAD_DIM + 8;        // of a block of rows
constexpr int WEIGHT_PITCH = BLOCK + 8;    // of a tile of weights
constexpr int ROWS_LEN = WIDE ? 8 : BLOCK * PITCH;

DEVICE int warp_row() { return threadIdx.x / 32 * 16; }
DEVICE int fragment_row() { return warp_row() + threadIdx.x % 32 / 4; }  // and 8 more
DEVICE int fragment_column() { return 2 * (threadIdx.x % 4); }           // and 1 more, of every eight

// `count` rows of one head of x[rows, heads * head_dim].
struct HeadRows {
    const real* x;
    int heads, head, head_dim;

    DEVICE const real* row(int r) const { return x + (size_t(r) * heads + head) * head_dim; }
};

#if WIDE
struct Rows {
    const float* x;
    int count, stride, columns;

    DEVICE float at(int r, int c) const {
        return r < count && c < columns ? x[size_t(r) * stride + c] : 0.f;
    }
};

DEVICE Rows fetch(real*, const HeadRows& s, int row, int count) {
    return Rows{s.row(row), count, s.heads * s.head_dim, s.head_dim};
}
DEVICE void wait_for_rows() { __syncthreads(); }

// s = A[the warp's 16 rows] B^T.
DEVICE void scores(float (&s)[BLOCK / 2], const Rows& a, const Rows& b) {
#pragma unroll
    for (int i = 0; i < BLOCK / 2; ++i) s[i] = 0.f;
    for (int c = 0; c < a.columns; ++c) {
        const float own[2] = {a.at(fragment_row(), c), a.at(fragment_row() + 8, c)};
#pragma unroll
        for (int i = 0; i < BLOCK / 2; ++i) {
            s[i] = fmaf(own[i / 2 % 2], b.at(i / 4 * 8 + fragment_column() + i % 2, c), s[i]);
        }
    }
}

// c += W[the warp's 16 rows, or columns when TRANSPOSED] B[:, column0 ..].
template <int N, bool TRANSPOSED>
DEVICE void add_product(float (&c)[N / 2], const real* w, const Rows& b, int column0) {
    for (int k = 0; k < BLOCK; ++k) {
        const int row = fragment_row();
        const float own[2] = {
            TRANSPOSED ? w[k * WEIGHT_PITCH + row] : w[row * WEIGHT_PITCH + k],
            TRANSPOSED ? w[k * WEIGHT_PITCH + row + 8] : w[(row + 8) * WEIGHT_PITCH + k]};
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            const int column = column0 + i / 4 * 8 + fragment_column() + i % 2;
            c[i] = fmaf(own[i / 2 % 2], b.at(k, column), c[i]);
        }
    }
}

DEVICE void store_pair(real* p, float x, float y) { p[0] = x, p[1] = y; }
// Gate prefix of a key in a tile: the full pair, because relative to the last key of the block a strong gate in between
// would cancel all digits.
typedef float2 Prefix;
DEVICE Prefix prefix_from(float2 prefix, float2) { return prefix; }
DEVICE float decay_between(Prefix key, Prefix query) { return gate_difference(query, key); }
DEVICE float power(float x) { return exp2f(x); }
// log2(1 + x)
DEVICE float log2_above(float x) { return log1pf(x) * LOG2_E; }
#else
struct Rows {
    const u16* x;  // in shared memory
};

// Starts an asynchronous copy of the rows into `tile`.
DEVICE Rows fetch(real* tile, const HeadRows& s, int row, int count) {
    load_rows_async<BLOCK, HEAD_DIM, PITCH, THREADS>(tile, s.row(row), count, s.heads * s.head_dim,
                                                     s.head_dim);
    return Rows{tile};
}
DEVICE void wait_for_rows() {
    copy_commit();
    copy_wait<0>();
    __syncthreads();
}

DEVICE void scores(float (&s)[BLOCK / 2], const Rows& a, const Rows& b) {
#pragma unroll
    for (int i = 0; i < BLOCK / 2; ++i) s[i] = 0.f;
    mma_nt<BLOCK, HEAD_DIM, PITCH>(s, a.x + warp_row() * PITCH, b.x);
}

template <int N, bool TRANSPOSED>
DEVICE void add_product(float (&c)[N / 2], const real* w, const Rows& b, int column0) {
    if constexpr (TRANSPOSED) {
        mma_tn<N, BLOCK, WEIGHT_PITCH, PITCH>(c, w + warp_row(), b.x + column0);
    } else {
        mma_nn<N, BLOCK, WEIGHT_PITCH, PITCH>(c, w + warp_row() * WEIGHT_PITCH, b.x + column0);
    }
}

DEVICE void store_pair(real* p, float x, float y) { *reinterpret_cast<u32*>(p) = pack_bf16(x, y); }
// Gate prefix of a key in a tile: relative to the last key of the block.
typedef float Prefix;
DEVICE Prefix prefix_from(float2 prefix, float2 reference) { return gate_difference(prefix, reference); }
DEVICE float decay_between(Prefix key, Prefix query) { return query - key; }
DEVICE float power(float x) { return exp2_fast(x); }
DEVICE float log2_above(float x) { return log2_fast(1.f + x); }
#endif

// Stores an accumulator to columns column0 .. of `count` rows of x.
template <int N>
DEVICE void store_rows(real* x, const float (&c)[N / 2], int heads, int head, int head_dim, int row0,
                     int count, int column0, float factor) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = fragment_row() + 8 * r;
        if (row >= count) continue;
        real* out = x + (size_t(row0 + row) * heads + head) * head_dim + column0 + fragment_column();
#pragma unroll
        for (int g = 0; g < N / 8; ++g) {
            if (column0 + 8 * g < head_dim) {
                store_pair(out + 8 * g, c[4 * g + 2 * r] * factor, c[4 * g + 2 * r + 1] * factor);
            }
        }
    }
}
