// Scores with a decay per channel, A_ij = sum_c q_ic k_jc a_{j+1,c} ... a_{i,c}.
//
// They factor into a matrix product only around a reference token between j and i, so a chunk is divided into blocks of
// 16 tokens. Across blocks, queries are decayed to the start of their block, keys to the end of theirs, and the blocks
// between contribute their total decays. Inside a block every term has its own running product. All factors are at most
// 1, so nothing overflows.
#pragma once
#include "scan_add.cuh"

constexpr int BLOCK = 16;
constexpr int BLOCKS = CHUNK / BLOCK;
constexpr int LANE_GROUPS = DK / 32;

// Total decays of the chunk's blocks, and partial sums of scores inside of blocks.
struct Channels {
    float whole[BLOCKS][DK];
    float inner[LANE_GROUPS][BLOCKS][BLOCK][BLOCK];
};

// Column c of a block of tokens, `missing` for padding. `x` points at the chunk's first row. All addresses are clamped
// to valid ones, so that the loads are unconditional and pipelined.
template <typename T>
DEVICE void block_column(T (&out)[BLOCK], const T* x, T missing, const ScanAddParams& p, const HeadGroup& u,
                         int block, int c) {
    const size_t stride = key_stride(p.x);
    x += min(c, p.x.key_dim - 1);
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) out[i] = x[min(block * BLOCK + i, u.tokens - 1) * stride];
#pragma unroll
    for (int i = 0; i < BLOCK; ++i)
        if (block * BLOCK + i >= u.tokens || c >= p.x.key_dim) out[i] = missing;
}
// Decays of channel c at the tokens of a block; 1 for padding.
DEVICE void block_decays(float (&a)[BLOCK], const ScanAddParams& p, const HeadGroup& u, int block, int c) {
    block_column(a, p.x.log_decay + key_at(p, u), 0.f, p, u, block, c);
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) a[i] = BF16 ? exp2_fast(LOG2_E * a[i]) : expf(a[i]);
}
// Channel c of queries or keys; 0 for padding.
DEVICE void block_rows(float (&x)[BLOCK], const real* from, const ScanAddParams& p, const HeadGroup& u, int block,
                       int c) {
    real raw[BLOCK];
    block_column(raw, from + key_at(p, u), to_real(0.f), p, u, block, c);
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) x[i] = to_float(raw[i]);
}

// Calls f(block, channel) for all; a warp has 32 channels of one block of tokens.
template <class F>
DEVICE void each_block_channel(F f) {
    for_each_in_block<BLOCKS * DK>([&](int i) { f(i / DK, i % DK); });
}

DEVICE void load_whole(Channels& channels, const ScanAddParams& p, const HeadGroup& u) {
    each_block_channel([&](int block, int c) {
        float a[BLOCK], product = 1.f;
        block_decays(a, p, u, block, c);
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) product *= a[i];
        channels.whole[block][c] = product;
    });
}

// Decay of channel c over the blocks [first, end).
DEVICE float between_blocks(const Channels& channels, int first, int end, int c) {
    float product = 1.f;
    for (int m = first; m < end; ++m) product *= channels.whole[m][c];
    return product;
}

// Loads queries decayed to the chunk's start.
DEVICE void load_far_queries(real* tile, const Channels& channels, const ScanAddParams& p, const HeadGroup& u) {
    each_block_channel([&](int block, int c) {
        float a[BLOCK], x[BLOCK];
        block_decays(a, p, u, block, c);
        block_rows(x, p.x.q, p, u, block, c);
        float product = between_blocks(channels, 0, block, c);
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) {
            product *= a[i];
            tile[(block * BLOCK + i) * pitch(DK) + c] = to_real(x[i] * product);
        }
    });
}

// Loads keys decayed to the chunk's end.
DEVICE void load_far_keys(real* tile, const Channels& channels, const ScanAddParams& p, const HeadGroup& u) {
    each_block_channel([&](int block, int c) {
        float a[BLOCK], x[BLOCK];
        block_decays(a, p, u, block, c);
        block_rows(x, p.x.k, p, u, block, c);
        float product = between_blocks(channels, block + 1, BLOCKS, c);
#pragma unroll
        for (int i = BLOCK - 1; i >= 0; --i) {
            tile[(block * BLOCK + i) * pitch(DK) + c] = to_real(x[i] * product);
            product *= a[i];
        }
    });
}

// Sums of 32 values over the 32 lanes of a warp: lane l gets the sum of value l.
template <int STEP = 16>
DEVICE float transposed_sum(float (&v)[32]) {
    const bool upper = threadIdx.x & STEP;
#pragma unroll
    for (int i = 0; i < STEP; ++i) {
        const float low = v[i], high = v[i + STEP];
        v[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, STEP);
    }
    if constexpr (STEP > 1) return transposed_sum<STEP / 2>(v);
    return v[0];
}

// Scores inside of a block, summed over the 32 channels of a warp, two rows at a time, to `inner`.
DEVICE void inner_scores(Channels& channels, const float (&a)[BLOCK], const float (&q)[BLOCK],
                         const float (&k)[BLOCK], int block, int group) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < BLOCK; i += 2) {
        float v[32], first = q[i], second = q[i + 1];
#pragma unroll
        for (int j = BLOCK - 1; j >= 0; --j) {
            v[j] = j <= i ? first * k[j] : 0.f;
            v[BLOCK + j] = j <= i + 1 ? second * k[j] : 0.f;
            if (j <= i) first *= a[j];
            if (j <= i + 1) second *= a[j];
        }
        channels.inner[group][block][i + lane / BLOCK][lane % BLOCK] = transposed_sum(v);
    }
}

// Everything local to a block: queries decayed to its start and keys to its end, scores inside, and its total decay.
DEVICE void load_blocks(real* queries, real* keys, Channels& channels, const ScanAddParams& p, const HeadGroup& u) {
    each_block_channel([&](int block, int c) {
        float a[BLOCK], q[BLOCK], k[BLOCK];
        block_decays(a, p, u, block, c);
        block_rows(q, p.x.q, p, u, block, c);
        block_rows(k, p.x.k, p, u, block, c);
        real* first = queries + block * BLOCK * pitch(DK) + c;
        float product = 1.f;
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) {
            product *= a[i];
            first[i * pitch(DK)] = to_real(q[i] * product);
        }
        channels.whole[block][c] = product;
        first = keys + block * BLOCK * pitch(DK) + c, product = 1.f;
#pragma unroll
        for (int i = BLOCK - 1; i >= 0; --i) {
            first[i * pitch(DK)] = to_real(k[i] * product);
            product *= a[i];
        }
        inner_scores(channels, a, q, k, block, c / 32);
    });
}

// Scores of the queries of one block with the keys of an earlier one, by one warp: 16 x 16 elements as two 16 x 8
// accumulators.
DEVICE void outer_scores(float (&c)[2][4], const real* queries, const real* keys, const Channels& channels,
                         int q_block, int k_block) {
    const int lane = threadIdx.x % 32;
    queries += q_block * BLOCK * pitch(DK), keys += k_block * BLOCK * pitch(DK);
#if BF16
    const u16* b = keys + (lane % 8 + lane / 16 * 8) * pitch(DK) + lane / 8 % 2 * 8;
#pragma unroll
    for (int k = 0; k < DK; k += 16) {
        u32 fa[4], fb[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i % 2 * 8, column = k + lane % 4 * 2 + i / 2 * 8;
            const u32 x = *reinterpret_cast<const u32*>(queries + row * pitch(DK) + column);
            fa[i] = pack_bf16(bf16_lo(x) * between_blocks(channels, k_block + 1, q_block, column),
                              bf16_hi(x) * between_blocks(channels, k_block + 1, q_block, column + 1));
        }
        ldmatrix(fb, b + k);
        mma(c[0], fa, fb[0], fb[1]);
        mma(c[1], fa, fb[2], fb[3]);
    }
#else
    for (int k = 0; k < DK; ++k) {
        const float factor = between_blocks(channels, k_block + 1, q_block, k);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = lane / 4 + e / 2 * 8, column = n * 8 + lane % 4 * 2 + e % 2;
                c[n][e] = fmaf(queries[row * pitch(DK) + k] * factor, keys[column * pitch(DK) + k], c[n][e]);
            }
    }
#endif
}

// tile[CHUNK][CHUNK] = factor(j) A_ij, zero above the diagonal, from the results of load_blocks after a
// __syncthreads().
template <class F>
DEVICE void channel_scores(real* tile, const real* queries, const real* keys, const Channels& channels,
                           F factor) {
    const int lane = threadIdx.x % 32;
    for (int item = threadIdx.x / 32; item < BLOCKS * BLOCKS; item += THREADS / 32) {
        const int q_block = item / BLOCKS, k_block = item % BLOCKS;
        float c[2][4] = {};
        if (k_block < q_block) outer_scores(c, queries, keys, channels, q_block, k_block);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int i = lane / 4 + e / 2 * 8, j = n * 8 + lane % 4 * 2 + e % 2;
                float x = c[n][e];
                if (k_block == q_block && j <= i)
                    for (int g = 0; g < LANE_GROUPS; ++g)
                        x += channels.inner[g][q_block][i][j];
                const int column = k_block * BLOCK + j;
                tile[(q_block * BLOCK + i) * pitch(CHUNK) + column] = to_real(factor(column) * x);
            }
    }
}
