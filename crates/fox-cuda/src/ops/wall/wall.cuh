// Wall attention: with E_ij = prod_{j < t <= i} e_t per channel, e = exp(log_decay),
//   s_ij = scale sum_c q_ic k_jc E_ijc + c_i - c_j,   o_i = sum_{j <= i} softmax_j(s_ij) v_j.
//
// Queries and keys have the same rows. Blocks of 64: wall_prepare decays every key to the end of its block (`far`) and
// every query to the start of its block (`x`). A block of queries iterates over older blocks of keys from newest to
// oldest and carries, per channel, the product `factor` of the decays of the blocks between: s = (x factor) . far. Scores
// inside a block come from wall_own_scores, where keys decay step by step. No factor exceeds 1, so nothing overflows.
//
// Where there are kernels of wgmma, blocks form spans of several sizes (levels, see path.cuh), and a block of queries
// iterates over the blocks of the smallest span that it is in, of `span_blocks`. Keys are decayed to the end of their
// spans (`kl`) and queries to the start of the span after each older one (`xs`): attention of these virtual queries by
// the kernels of forgetting attention, see wall_spans.cu.
//
// Compile-time: HEAD_DIM, WIDE, GATES, SHARED_BYTES.
#pragma once
#include "head_tiles.cuh"

struct Shared {
    alignas(16) real rows[4][ROWS_LEN];
    alignas(16) real weights[BLOCK * WEIGHT_PITCH];
    alignas(16) real grads[BLOCK * WEIGHT_PITCH];
    Prefix prefixes[BLOCK];
    float columns[THREADS / 32][BLOCK];
    alignas(8) float factor[HEAD_DIM];
};
static_assert(sizeof(Shared) <= SHARED_BYTES);

DEVICE Shared& shared_memory() {
#if EMULATED
    static __align__(16) u8 memory[SHARED_BYTES];
#else
    extern __shared__ __align__(16) u8 memory[];
#endif
    return *reinterpret_cast<Shared*>(memory);
}

// A block of rows of one head.
struct Block {
    Segment s;
    int head, kv_head;
    int block;         // in the segment
    int tile;          // in the tables of all segments
    int first, count;  // position of the first row, and rows
    int row;           // of the first
    const float2* gates;
};

DEVICE Block block_of(const WallParams& p, const Segment& s, int block, int head) {
    Block b;
    b.s = s;
    b.head = head, b.kv_head = head / (p.heads / p.kv_heads);
    b.block = block, b.tile = s.m_tile0 + block;
    b.first = block * BLOCK, b.count = min(BLOCK, s.k_len - b.first);
    b.row = s.k_start + b.first;
    b.gates = p.gates + size_t(head) * p.gate_stride + s.c_base;
    return b;
}
DEVICE Block block_at(const WallParams& p, int tile, int head) {
    const BlockRef ref = p.tiles[tile];
    return block_of(p, p.segments[ref.segment], ref.block, head);
}
// The oldest block that a block of queries sees.
DEVICE int oldest_visible(const WallParams& p, const Block& m) {
    return p.window == 0 ? 0 : max(m.first - p.window + 1, 0) / BLOCK;
}
// The oldest block that it visits: with pruning, older ones are forgotten by the gates.
DEVICE int oldest_visited(const WallParams& p, const Block& m) {
    return p.spans == nullptr ? oldest_visible(p, m) : p.spans[size_t(m.head) * p.tile_count + m.tile].x;
}
// The oldest of these in its own span. It never decreases from block to block.
DEVICE int oldest_block(const WallParams& p, const Block& m) {
    return max(oldest_visited(p, m), m.block / p.span_blocks * p.span_blocks);
}
// Whether the block's keys are given decayed to its end, and have no queries.
DEVICE bool is_closed(const WallParams& p, int tile) {
    const BlockRef ref = p.tiles[tile];
    return p.closed != nullptr && ref.block < p.closed[ref.segment];
}
// Offset of the tile [64, 64] of a block in `own` and `down`.
DEVICE size_t own_tile(const WallParams& p, const Block& b) {
    return (size_t(b.head) * p.tile_count + b.tile) * BLOCK * BLOCK;
}
DEVICE size_t element(const WallParams& p, int row, int head, int channel) {
    return (size_t(row) * p.heads + head) * p.head_dim + channel;
}
DEVICE size_t key_element(const WallParams& p, int row, int kv_head, int channel) {
    return (size_t(row) * p.kv_heads + kv_head) * p.head_dim + channel;
}

// The gate prefixes of block n's keys, in shared memory, and of the thread's rows of block m.
DEVICE void load_gates(Shared& sh, const Block& m, int n, Prefix (&frame)[2]) {
    if (!GATES) return;
    const int first = n * BLOCK, count = min(BLOCK, m.s.k_len - first);
    const float2 reference = m.gates[first + count - 1];
    for (int j = threadIdx.x; j < BLOCK; j += THREADS) {
        sh.prefixes[j] = prefix_from(m.gates[first + min(j, count - 1)], reference);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = min(fragment_row() + 8 * r, m.count - 1);
        frame[r] = prefix_from(m.gates[m.first + row], reference);
    }
}

// Scores in base 2 of the thread's rows of block m and the keys of block n, from products; -inf where masked.
DEVICE void finish_scores(float (&s)[BLOCK / 2], const Shared& sh, const WallParams& p, const Block& m, int n,
                          const Prefix (&frame)[2]) {
#pragma unroll
    for (int i = 0; i < BLOCK / 2; ++i) {
        const int r = i / 2 % 2, column = i / 4 * 8 + fragment_column() + i % 2;
        const int position = m.first + fragment_row() + 8 * r, key = n * BLOCK + column;
        const bool near = p.window == 0 || position - key < p.window;
        const float decay = GATES ? decay_between(sh.prefixes[column], frame[r]) : 0.f;
        s[i] = key <= position && position < m.s.k_len && near ? fmaf(s[i], p.scale * LOG2_E, decay) : NEG_INF;
    }
}

// The thread's elements of a tile [64, 64] of block m; those after a query are 0.
DEVICE void load_own(float (&s)[BLOCK / 2], const float* own, const Block& m) {
#pragma unroll
    for (int i = 0; i < BLOCK / 2; ++i) {
        const int row = fragment_row() + 8 * (i / 2 % 2), column = i / 4 * 8 + fragment_column() + i % 2;
        s[i] = column <= row && row < m.count ? own[row * BLOCK + column] : 0.f;
    }
}

// s = (x factor) . far, of the warp's rows and the keys of a block.
#if WIDE
DEVICE void scaled_scores(float (&s)[BLOCK / 2], const Shared& sh, const Rows& x, const Rows& far) {
#pragma unroll
    for (int i = 0; i < BLOCK / 2; ++i) s[i] = 0.f;
    for (int c = 0; c < x.columns; ++c) {
        const float f = sh.factor[c], own[2] = {x.at(fragment_row(), c) * f, x.at(fragment_row() + 8, c) * f};
#pragma unroll
        for (int i = 0; i < BLOCK / 2; ++i) {
            s[i] = fmaf(own[i / 2 % 2], far.at(i / 4 * 8 + fragment_column() + i % 2, c), s[i]);
        }
    }
}
#else
DEVICE u32 scale_pair(u32 pair, float2 factor) {
    return pack_bf16(bf16_lo(pair) * factor.x, bf16_hi(pair) * factor.y);
}
// mma_nt whose left operand is multiplied in registers.
DEVICE void scaled_scores(float (&s)[BLOCK / 2], const Shared& sh, const Rows& x, const Rows& far) {
    const int lane = threadIdx.x % 32;
    const u16* a = x.x + (warp_row() + lane % 16) * PITCH + lane / 16 * 8;
    const u16* b = far.x + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 8;
#pragma unroll
    for (int i = 0; i < BLOCK / 2; ++i) s[i] = 0.f;
#pragma unroll
    for (int k = 0; k < HEAD_DIM; k += 16) {
        u32 fa[4];
        ldmatrix(fa, a + k);
        const float2 low = *reinterpret_cast<const float2*>(sh.factor + k + fragment_column());
        const float2 high = *reinterpret_cast<const float2*>(sh.factor + k + 8 + fragment_column());
        fa[0] = scale_pair(fa[0], low), fa[1] = scale_pair(fa[1], low);
        fa[2] = scale_pair(fa[2], high), fa[3] = scale_pair(fa[3], high);
#pragma unroll
        for (int n = 0; n < BLOCK; n += 16) {
            u32 fb[4];
            ldmatrix(fb, b + n * PITCH + k);
            mma(s + n / 2, fa, fb[0], fb[1]);
            mma(s + n / 2 + 4, fa, fb[2], fb[3]);
        }
    }
}
#endif

DEVICE void start_factor(Shared& sh) {
    for (int c = threadIdx.x; c < HEAD_DIM; c += THREADS) sh.factor[c] = 1.f;
}
// Multiplies by the decay of a block.
DEVICE void advance_factor(Shared& sh, const WallParams& p, int tile, int head) {
    const float* decay = p.decay + (size_t(tile) * p.heads + head) * p.head_dim;
    for (int c = threadIdx.x; c < p.head_dim; c += THREADS) sh.factor[c] *= decay[c];
}

DEVICE Rows fetch_heads(Shared& sh, int slot, const real* x, int heads, int head, int head_dim, int row, int count) {
    return fetch(sh.rows[slot], HeadRows{x, heads, head, head_dim}, row, count);
}
