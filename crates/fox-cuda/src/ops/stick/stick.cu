// Stick-breaking attention: with b_ij = sigmoid(scale q_i . k_j) and c the gate prefixes,
//   o_i = sum_{j < i} w_ij v_j,   w_ij = b_ij prod_{j < l < i} (1 - b_il) exp(c_i - c_j).
//
// A block of 64 queries iterates over its blocks of 64 keys from newest to oldest and carries, per row, the logarithm
// of the remaining stick; it stops when that is below the tolerance for every row. All logarithms are in base 2.
//
// Backward: with g_ij = w_ij <do_i, v_j>, the gradient of ln w_ij, a score has the gradient
// g_ij - b_ij sum_{l <= j} g_il. Three kernels, deterministic because thread blocks share no output: a first pass
// repeats the forward and records, at every tile, the remaining stick and the sum of g over newer keys; then one kernel
// over blocks of keys (dK, dV, sums over queries) and one over blocks of queries (dQ) can start at any tile.
//
// Compile-time: HEAD_DIM, WIDE, GATES, SHARED_BYTES.
#include "head_tiles.cuh"

constexpr int COLUMN_SPLITS = HEAD_DIM > 128 ? 2 : 1;  // thread blocks that share the columns of dK and dV
constexpr int SPLIT_COLUMNS = HEAD_DIM / COLUMN_SPLITS;

struct Shared {
    alignas(16) real rows[4][ROWS_LEN];
    alignas(16) real weights[BLOCK * WEIGHT_PITCH];
    alignas(16) real grads[BLOCK * WEIGHT_PITCH];
    Prefix prefixes[BLOCK];
    float columns[THREADS / 32][BLOCK];
    u32 visiting[THREADS / 32];
};
static_assert(sizeof(Shared) <= SHARED_BYTES);

// A block of queries of one head, and the key blocks [begin, end) visible to it.
struct QueryBlock {
    Segment s;
    int head, kv_head;
    int first, count;  // in the segment
    int position;      // of the first query
    int begin, end;
    const float2* gates;
};

DEVICE QueryBlock query_block(const StickParams& p, BlockRef ref, int head) {
    QueryBlock m;
    m.s = p.segments[ref.segment];
    m.head = head, m.kv_head = head / (p.heads / p.kv_heads);
    m.first = ref.block * BLOCK, m.count = min(BLOCK, m.s.q_len - m.first);
    m.position = m.s.k_len - m.s.q_len + m.first;
    const int oldest = p.window ? max(m.position - p.window + 1, 0) : 0;
    const int newest = p.window == 1 ? 0 : m.position + m.count - 1;  // exclusive
    m.begin = oldest / BLOCK, m.end = newest > oldest ? (newest - 1) / BLOCK + 1 : m.begin;
    m.gates = GATES ? p.gates + size_t(head) * p.gate_stride + m.s.c_base : nullptr;
    return m;
}

// Rows of two operands.
struct OperandPair {
    Rows first, second;
};
// The block's queries and their gradients of the output.
DEVICE OperandPair fetch_queries(Shared& sh, const StickParams& p, const QueryBlock& m, int slot) {
    const int row = m.s.q_start + m.first;
    return OperandPair{fetch(sh.rows[slot], HeadRows{p.q, p.heads, m.head, p.head_dim}, row, m.count),
                fetch(sh.rows[slot + 1], HeadRows{p.d_out, p.heads, m.head, p.head_dim}, row, m.count)};
}
// `count` keys and values of a key head, from `row` on.
DEVICE OperandPair fetch_keys(Shared& sh, const StickParams& p, int kv_head, int row, int count, int slot) {
    return OperandPair{fetch(sh.rows[slot], HeadRows{p.k, p.kv_heads, kv_head, p.head_dim}, row, count),
                fetch(sh.rows[slot + 1], HeadRows{p.v, p.kv_heads, kv_head, p.head_dim}, row, count)};
}
// Key block n of a query block.
DEVICE OperandPair fetch_keys(Shared& sh, const StickParams& p, const QueryBlock& m, int n, int slot) {
    return fetch_keys(sh, p, m.kv_head, m.s.k_start + n * BLOCK, min(BLOCK, m.s.k_len - n * BLOCK), slot);
}

// Carry of a thread's two rows from newer keys to older ones.
struct Carry {
    float rest[2] = {0.f, 0.f};   // log2 of the remaining stick
    float newer[2] = {0.f, 0.f};  // sum of g
};

// Sum over the later lanes of a quad, and over all four.
DEVICE float2 quad_after(float x) {
    const int lane = threadIdx.x % 4;
    const float neighbour = __shfl_xor_sync(~0u, x, 1);
    const float other = __shfl_xor_sync(~0u, x + neighbour, 2);
    const float after = (lane % 2 ? 0.f : neighbour) + (lane < 2 ? other : 0.f);
    return make_float2(after, x + neighbour + other);
}

// log2 of b and of 1 - b from a score in base 2.
DEVICE float2 log_beta(float x) {
    const float m = log2_above(power(-fabsf(x)));
    return make_float2(fminf(x, 0.f) - m, -fmaxf(x, 0.f) - m);
}

// Gate prefixes of a block of keys go to shared memory; `frame` gets those of the thread's rows.
DEVICE void gate_frame(Shared& sh, const QueryBlock& m, int n, Prefix (&frame)[2]) {
    if (!GATES) return;
    const int first = n * BLOCK, last = min(first + BLOCK, m.s.k_len) - 1;
    const float2 reference = m.gates[last];
    if (threadIdx.x < BLOCK) {
        sh.prefixes[threadIdx.x] = prefix_from(m.gates[min(first + int(threadIdx.x), last)], reference);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int i = min(m.position + fragment_row() + 8 * r, m.s.k_len - 1);
        frame[r] = prefix_from(m.gates[i], reference);
    }
}

enum Mode { WEIGHTS, SUMS, GRADIENTS };

// One tile: s are the products q.k, dp those of do and v. Leaves the weights (WEIGHTS, GRADIENTS) and the
// gradients of the scores (GRADIENTS; `total` is the sum of g over the whole row) in shared memory, and
// adds g to `columns`, the sums over the thread's rows.
template <Mode MODE>
DEVICE void stick_tile(Shared& sh, const StickParams& p, const QueryBlock& m, int n, const float (&s)[BLOCK / 2],
                         const float (&dp)[BLOCK / 2], Carry& carry, const Prefix (&frame)[2],
                         const float (&total)[2], float (&columns)[BLOCK / 4]) {
    const int first = n * BLOCK;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = fragment_row() + 8 * r, i = m.position + row;
        const int hi = row < m.count ? i - first : 0, lo = p.window ? i - p.window + 1 - first : 0;
        // The tile's sums, separate from the carry for precision.
        float taken = 0.f, newer = 0.f;
#pragma unroll
        for (int g = BLOCK / 8 - 1; g >= 0; --g) {
            const int column = 8 * g + fragment_column();
            float2 share[2];
            bool seen[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                seen[e] = column + e >= lo && column + e < hi;
                share[e] = log_beta(s[4 * g + 2 * r + e] * p.scale * LOG2_E);
                if (!seen[e]) share[e] = make_float2(NEG_INF, 0.f);
            }
            const float2 after = quad_after(share[0].y + share[1].y);
            const float rest = carry.rest[r] + (taken + after.x);
            taken += after.y;
            float w[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float decay = GATES ? decay_between(sh.prefixes[column + e], frame[r]) : 0.f;
                const float left = e ? rest : rest + share[1].y;
                w[e] = seen[e] ? power(share[e].x + left + decay) : 0.f;
            }
            if (MODE != SUMS) store_pair(sh.weights + row * WEIGHT_PITCH + column, w[0], w[1]);
            if (MODE == WEIGHTS) continue;
            const float g0 = w[0] * dp[4 * g + 2 * r], g1 = w[1] * dp[4 * g + 2 * r + 1];
            const float2 after_g = quad_after(g0 + g1);
            if (MODE == GRADIENTS) {
                // Sum of g over this key and all older ones.
                const float ahead = total[r] - carry.newer[r] - (newer + after_g.x);
                store_pair(sh.grads + row * WEIGHT_PITCH + column,
                         seen[0] ? g0 - power(share[0].x) * (ahead - g1) : 0.f,
                         seen[1] ? g1 - power(share[1].x) * ahead : 0.f);
                columns[2 * g] += g0, columns[2 * g + 1] += g1;
            }
            newer += after_g.y;
        }
        carry.rest[r] += taken;
        carry.newer[r] += newer;
    }
}

// Whether no key before block n can reach the tolerance for any row of the query block.
DEVICE bool stick_exhausted(const StickParams& p, const QueryBlock& m, int n, const Carry& carry) {
    bool done = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = fragment_row() + 8 * r;
        if (row >= m.count) continue;
        double left = carry.rest[r];
        if (GATES) {
            left += gate_difference_f64(m.gates[m.position + row], m.gates[max(n * BLOCK - 1, 0)]);
        }
        done &= left < double(p.tolerance);
    }
    return __syncthreads_and(done);
}

// Grid (m_tiles, heads).
extern "C" __global__ void __launch_bounds__(THREADS) stick_fwd(const __grid_constant__ StickParams p) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& sh = *reinterpret_cast<Shared*>(memory);
    const QueryBlock m = query_block(p, p.m_tiles[blockIdx.x], blockIdx.y);
    const Rows q = fetch(sh.rows[0], HeadRows{p.q, p.heads, m.head, p.head_dim}, m.s.q_start + m.first,
                         m.count);
    float o[HEAD_DIM / 2] = {}, none[BLOCK / 2], total[2] = {}, columns[BLOCK / 4];
    Prefix frame[2] = {};
    Carry carry;
    int n = m.end;
    while (n > m.begin) {
        --n;
        const OperandPair kv = fetch_keys(sh, p, m, n, 1);
        gate_frame(sh, m, n, frame);
        wait_for_rows();
        float s[BLOCK / 2];
        scores(s, q, kv.first);
        stick_tile<WEIGHTS>(sh, p, m, n, s, none, carry, frame, total, columns);
        __syncwarp();
        add_product<HEAD_DIM, false>(o, sh.weights, kv.second, 0);
        if (stick_exhausted(p, m, n, carry)) break;
    }
    store_rows<HEAD_DIM>(p.o, o, p.heads, m.head, p.head_dim, m.s.q_start + m.first, m.count, 0, 1.f);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = fragment_row() + 8 * r;
        if (threadIdx.x % 4 == 0 && row < m.count) {
            p.lse[size_t(m.s.q_start + m.first + row) * p.heads + m.head] = carry.rest[r] * LN_2;
        }
    }
    if (threadIdx.x == 0) {
        atomicAdd(p.blocks + 2 * m.head, u64(m.end - n));
        atomicAdd(p.blocks + 2 * m.head + 1, u64(m.end - m.begin));
    }
}

// The first pass of the backward. Grid (m_tiles, heads from head0 on).
extern "C" __global__ void __launch_bounds__(THREADS) stick_carries(const __grid_constant__ StickParams p) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& sh = *reinterpret_cast<Shared*>(memory);
    const QueryBlock m = query_block(p, p.m_tiles[blockIdx.x], p.head0 + blockIdx.y);
    const OperandPair own = fetch_queries(sh, p, m, 0);
    float total[2] = {}, columns[BLOCK / 4];
    Prefix frame[2] = {};
    Carry carry;
    float2* carries = p.carries + (size_t(blockIdx.y) * gridDim.x + blockIdx.x) * p.key_blocks * BLOCK;
    const size_t tile = size_t(m.head) * p.m_tile_count + blockIdx.x;
    int n = m.end;
    while (n > m.begin) {
        --n;
        const OperandPair kv = fetch_keys(sh, p, m, n, 2);
        gate_frame(sh, m, n, frame);
        wait_for_rows();
        if (threadIdx.x % 4 == 0) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                carries[n * BLOCK + fragment_row() + 8 * r] = make_float2(carry.rest[r], carry.newer[r]);
            }
        }
        float s[BLOCK / 2], dp[BLOCK / 2];
        scores(s, own.first, kv.first);
        scores(dp, own.second, kv.second);
        stick_tile<SUMS>(sh, p, m, n, s, dp, carry, frame, total, columns);
        if (stick_exhausted(p, m, n, carry)) break;
    }
    if (threadIdx.x % 4 == 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) p.row_sums[tile * BLOCK + fragment_row() + 8 * r] = carry.newer[r];
    }
    if (threadIdx.x == 0) p.oldest[tile] = n;
}

// The recorded carry of the thread's rows at a tile, and the sums of g over their full rows.
DEVICE Carry load_carry(const StickParams& p, int head, int m_tile, int n, float (&total)[2]) {
    Carry carry;
    const size_t at = (size_t(head - p.head0) * p.m_tile_count + m_tile) * p.key_blocks + n;
    const size_t tile = size_t(head) * p.m_tile_count + m_tile;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float2 x = p.carries[at * BLOCK + fragment_row() + 8 * r];
        carry.rest[r] = x.x, carry.newer[r] = x.y;
        total[r] = p.row_sums[tile * BLOCK + fragment_row() + 8 * r];
    }
    return carry;
}

// Block-wide sums over the queries of a tile, from each thread's sums over its rows.
DEVICE void add_columns(Shared& sh, float (&columns)[BLOCK / 4], float* out, int count) {
#pragma unroll
    for (int c = 0; c < BLOCK / 4; ++c) {
        float sum = columns[c];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (threadIdx.x % 32 < 4) {
            sh.columns[threadIdx.x / 32][c / 2 * 8 + fragment_column() + c % 2] = sum;
        }
        columns[c] = 0.f;
    }
    __syncthreads();
    const int c = threadIdx.x;
    if (c < count) out[c] = (sh.columns[0][c] + sh.columns[1][c]) + (sh.columns[2][c] + sh.columns[3][c]);
    __syncthreads();
}

// Bit mask of those of THREADS query blocks from `base` on that visited key block n.
DEVICE void find_query_blocks(Shared& sh, const StickParams& p, const Segment& s, int head, int base, int n) {
    const int m_block = base + threadIdx.x, count = min(m_block * BLOCK + BLOCK, s.q_len);
    bool visits = false;
    if (m_block * BLOCK < s.q_len && s.k_len - s.q_len + count - 1 > n * BLOCK) {
        visits = p.oldest[size_t(head) * p.m_tile_count + s.m_tile0 + m_block] <= n;
    }
    const u32 bits = __ballot_sync(~0u, visits);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sh.visiting[threadIdx.x / 32] = bits;
    __syncthreads();
}

// Adds the contribution of a query block to the gradients of a key block.
DEVICE void add_query_block(Shared& sh, const StickParams& p, const QueryBlock& m, int n, int m_tile,
                            const OperandPair& kv, float (&dk)[SPLIT_COLUMNS / 2], float (&dv)[SPLIT_COLUMNS / 2], float (&columns)[BLOCK / 4],
                        int column0) {
    __syncthreads();
    const OperandPair own = fetch_queries(sh, p, m, 2);
    float total[2];
    Prefix frame[2] = {};
    gate_frame(sh, m, n, frame);
    Carry carry = load_carry(p, m.head, m_tile, n, total);
    wait_for_rows();
    float x[BLOCK / 2], dp[BLOCK / 2];
    scores(x, own.first, kv.first);
    scores(dp, own.second, kv.second);
    stick_tile<GRADIENTS>(sh, p, m, n, x, dp, carry, frame, total, columns);
    __syncthreads();
    add_product<SPLIT_COLUMNS, true>(dv, sh.weights, own.second, column0);
    add_product<SPLIT_COLUMNS, true>(dk, sh.grads, own.first, column0);
}

// dK, dV and the sums of g over queries. Grid (n_tiles, key heads from that of head0 on, COLUMN_SPLITS).
extern "C" __global__ void __launch_bounds__(THREADS) stick_bwd_keys(const __grid_constant__ StickParams p) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& sh = *reinterpret_cast<Shared*>(memory);
    const BlockRef ref = p.n_tiles[blockIdx.x];
    const Segment s = p.segments[ref.segment];
    const int group = p.heads / p.kv_heads, kv_head = p.head0 / group + blockIdx.y;
    const int n = ref.block, first = n * BLOCK, count = min(BLOCK, s.k_len - first);
    const int column0 = blockIdx.z * SPLIT_COLUMNS;
    const OperandPair kv = fetch_keys(sh, p, kv_head, s.k_start + first, count, 0);
    float dk[SPLIT_COLUMNS / 2] = {}, dv[SPLIT_COLUMNS / 2] = {}, columns[BLOCK / 4] = {};
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        for (int base = 0; base * BLOCK < s.q_len; base += THREADS) {
            find_query_blocks(sh, p, s, head, base, n);
            for (int w = 0; w < THREADS / 32; ++w) {
                for (u32 left = sh.visiting[w]; left; left &= left - 1) {
                    const int m_block = base + 32 * w + __ffs(left) - 1;
                    add_query_block(sh, p, query_block(p, BlockRef{ref.segment, m_block}, head), n,
                                s.m_tile0 + m_block, kv, dk, dv, columns, column0);
                }
            }
        }
        if (GATES && blockIdx.z == 0) {
            float* out = p.column_sums + size_t(head) * p.gate_stride + s.c_base + first;
            add_columns(sh, columns, out, count);
        }
    }
    store_rows<SPLIT_COLUMNS>(p.dk, dk, p.kv_heads, kv_head, p.head_dim, s.k_start + first, count, column0, p.scale);
    store_rows<SPLIT_COLUMNS>(p.dv, dv, p.kv_heads, kv_head, p.head_dim, s.k_start + first, count, column0, 1.f);
}

// dQ. Grid (m_tiles, heads from head0 on).
extern "C" __global__ void __launch_bounds__(THREADS) stick_bwd_queries(const __grid_constant__ StickParams p) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& sh = *reinterpret_cast<Shared*>(memory);
    const QueryBlock m = query_block(p, p.m_tiles[blockIdx.x], p.head0 + blockIdx.y);
    const OperandPair own = fetch_queries(sh, p, m, 0);
    const int oldest = p.oldest[size_t(m.head) * p.m_tile_count + blockIdx.x];
    float dq[HEAD_DIM / 2] = {}, columns[BLOCK / 4] = {};
    for (int n = m.end - 1; n >= oldest; --n) {
        __syncthreads();
        const OperandPair kv = fetch_keys(sh, p, m, n, 2);
        float total[2];
        Prefix frame[2] = {};
        gate_frame(sh, m, n, frame);
        Carry carry = load_carry(p, m.head, blockIdx.x, n, total);
        wait_for_rows();
        float s[BLOCK / 2], dp[BLOCK / 2];
        scores(s, own.first, kv.first);
        scores(dp, own.second, kv.second);
        stick_tile<GRADIENTS>(sh, p, m, n, s, dp, carry, frame, total, columns);
        __syncwarp();
        add_product<HEAD_DIM, false>(dq, sh.grads, kv.first, 0);
    }
    store_rows<HEAD_DIM>(p.dq, dq, p.heads, m.head, p.head_dim, m.s.q_start + m.first, m.count, 0, p.scale);
}
