// Forgetting attention backward for Hopper, causal: dK, dV, dQ and the column sums of dS in one pass.
//
// A block of threads owns BLOCK_N keys of one key head and walks over the blocks of queries that see
// them, from the diagonal on. Each of two consumer warpgroups holds 64 keys: it computes S^T and dP^T,
// so that P^T and dS^T are already the left operands of dV += P^T dO and dK += dS^T Q, in registers.
// Only dS crosses warpgroups, through shared memory, for dQ = dS K.
//
// The warpgroups take turns at the tensor cores: one has its products while the other has its
// exponentials, half a step apart. So that neither waits for the other's dS, dQ follows one step later.
//
// dQ needs contributions from many blocks of keys. They are added in f32 by the copy engine, in a fixed
// order: for a block of queries the diagonal block of keys first, then its predecessors one by one,
// each waiting for a semaphore. Tiles are handed out in that same order (last keys first), so whoever
// waits, waits for somebody who is already running; and as everybody starts at its diagonal, the one
// before is naturally one step ahead. No float atomics, same bits every time. (The opposite order, first
// keys first, would start the longest tiles first, but then all tiles of a head meet at the same queries
// and wait for each other, wave after wave: 14 % slower.)
//
// Compile-time: HEAD_DIM (64, 96, 128), BLOCK_M (128 for 64, else 64), GATES, WINDOW.
#include "attention.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int BLOCK_N = 128;
constexpr int STAGES = 2;
constexpr int THREADS = 384;
constexpr int SLABS = (HEAD_DIM + 63) / 64;
constexpr u32 Q_SLAB = BLOCK_M * SLAB_ROW_BYTES;
constexpr u32 KV_SLAB = BLOCK_N * SLAB_ROW_BYTES;
constexpr int DS_SLABS = BLOCK_M / 64;
static_assert(DS_SLABS * SLABS == 2, "two warpgroups share dQ as two 64 x 64 pieces");

// dQ of a tile in the order of the accumulators, then the sums of dS over each eighth of the
// queries, per warp: more of them would not fit the registers of head dim 64.
constexpr int SUMS = 8;
constexpr int GROUPS_PER_SUM = BLOCK_M / 8 / SUMS;
constexpr int DQ_PIECES = 2 * 64 * 64;
constexpr int DQ_FLOATS = DQ_PIECES + 8 * SUMS;

// Everything about one block of keys.
struct alignas(16) BackwardTile {
    int kv_head;  // < 0: no more work
    int n, n_index;
    int q_start, offset, m_tile0;
    int k_start, k_len;
    int c_base;
    int unused[3];
};

struct BackwardParams {
    u16* dk;             // [rows, kv_heads * head_dim]
    u16* dv;
    float* column_sums;  // [heads][gate_stride]
    float* dq;           // [heads][m_tiles][DQ_FLOATS]
    int* semaphores;     // [heads][m_tiles]
    const float2* gates;  // [heads][gate_stride]
    const float4* rows;   // [heads][m_tiles * BLOCK_M]: gate prefix hi, lo, delta, lse
    const Segment* segments;
    const BlockRef* n_tiles;  // in the order of work
    const int2* ranges;       // [heads][n_tiles]: blocks of queries that see the keys
    int* next_tile;
    int n_tile_count, m_tile_count;
    int heads, kv_heads, group_heads;  // heads that are worked on together, for the L2 cache
    int head_dim;
    int gate_stride;
    int window;
    float scale, scale_log2;
};

struct alignas(1024) Shared {
    u8 k[SLABS * KV_SLAB];
    u8 v[SLABS * KV_SLAB];
    u8 q[STAGES][SLABS * Q_SLAB];
    u8 d_out[STAGES][SLABS * Q_SLAB];
    u8 ds[3][DS_SLABS * KV_SLAB];  // dS^T: keys down, 64 queries to a slab
    float dq[DQ_FLOATS];
    float row_base[STAGES][BLOCK_M];
    float row_delta[STAGES][BLOCK_M];
    BackwardTile tile[2];
    u64 kv_full, kv_empty;
    u64 q_full[STAGES], q_empty[STAGES], do_full[STAGES], do_empty[STAGES];
    u64 rows_full[STAGES], rows_empty[STAGES];
    u64 ds_full[3];
    u64 dq_full[2], dq_empty;  // one for each of the two writers
    u64 tile_full[2], tile_empty[2];
};
static_assert(sizeof(Shared) <= SHARED_BYTES);

constexpr int CONSUMER_WARPS = 8;
constexpr int TURN_BARRIER = 1;  // and 2: for taking turns at the tensor cores

DEVICE void init_barriers(Shared& sh) {
    mbarrier_init(&sh.kv_full, 1);
    mbarrier_init(&sh.kv_empty, CONSUMER_WARPS);
    for (int i = 0; i < STAGES; ++i) {
        mbarrier_init(&sh.q_full[i], 1);
        mbarrier_init(&sh.q_empty[i], CONSUMER_WARPS);
        mbarrier_init(&sh.do_full[i], 1);
        mbarrier_init(&sh.do_empty[i], CONSUMER_WARPS);
        mbarrier_init(&sh.rows_full[i], 32);
        mbarrier_init(&sh.rows_empty[i], CONSUMER_WARPS);
    }
    for (int i = 0; i < 3; ++i) mbarrier_init(&sh.ds_full[i], CONSUMER_WARPS);
    mbarrier_init(&sh.dq_full[0], CONSUMER_WARPS);
    mbarrier_init(&sh.dq_full[1], CONSUMER_WARPS);
    mbarrier_init(&sh.dq_empty, 1);
    for (int i = 0; i < 2; ++i) {
        mbarrier_init(&sh.tile_full[i], 1);
        mbarrier_init(&sh.tile_empty[i], CONSUMER_WARPS + 3);
    }
    mbarrier_init_fence();
}

DEVICE BackwardTile fetch_tile(const BackwardParams& p) {
    BackwardTile t = {};
    t.kv_head = -1;
    int index = atomicAdd(p.next_tile, 1);
    if (index >= p.n_tile_count * p.kv_heads) return t;
    int per_group = p.n_tile_count * p.group_heads;
    int group = index / per_group;
    int heads = min(p.group_heads, p.kv_heads - group * p.group_heads);
    int rest = index - group * per_group;
    t.kv_head = group * p.group_heads + rest % heads;
    t.n_index = rest / heads;
    BlockRef ref = p.n_tiles[t.n_index];
    Segment s = p.segments[ref.segment];
    t.n = ref.block;
    t.q_start = s.q_start;
    t.offset = s.k_len - s.q_len;
    t.m_tile0 = s.m_tile0;
    t.k_start = s.k_start;
    t.k_len = s.k_len;
    t.c_base = s.c_base;
    return t;
}

// Calls f(head, m, step) for all the blocks of queries of a tile, in the order of work. `step` counts
// over the life of the thread block and addresses the rings.
template <typename F>
DEVICE void for_each_step(const BackwardParams& p, const BackwardTile& t, u32& step, F f) {
    const int group = p.heads / p.kv_heads;
    for (int head = t.kv_head * group; head < (t.kv_head + 1) * group; ++head) {
        int2 range = p.ranges[head * p.n_tile_count + t.n_index];
        for (int m = range.x; m < range.y; ++m, ++step) f(head, m, step);
    }
}

// One thread: takes tiles and keeps the copy engine busy.
DEVICE void load_tiles(Shared& sh, const BackwardParams& p, const TensorMap* q_map,
                       const TensorMap* k_map, const TensorMap* v_map, const TensorMap* do_map) {
    u32 step = 0;
    for (u32 count = 0;; ++count) {
        const int slot = count % 2;
        mbarrier_wait(&sh.tile_empty[slot], count / 2 % 2 ^ 1);
        sh.tile[slot] = fetch_tile(p);
        mbarrier_arrive(&sh.tile_full[slot]);
        const BackwardTile& t = sh.tile[slot];
        if (t.kv_head < 0) return;

        mbarrier_wait(&sh.kv_empty, count % 2 ^ 1);
        mbarrier_expect(&sh.kv_full, 2 * SLABS * KV_SLAB);
        for (int i = 0; i < SLABS; ++i) {
            int row = t.k_start + t.n * BLOCK_N;
            tma_load(sh.k + i * KV_SLAB, k_map, 64 * i, t.kv_head, row, &sh.kv_full);
            tma_load(sh.v + i * KV_SLAB, v_map, 64 * i, t.kv_head, row, &sh.kv_full);
        }
        for_each_step(p, t, step, [&](int head, int m, u32 step) {
            const int stage = step % STAGES;
            const u32 free = step / STAGES % 2 ^ 1;
            const int row = t.q_start + m * BLOCK_M;
            mbarrier_wait(&sh.q_empty[stage], free);
            mbarrier_expect(&sh.q_full[stage], SLABS * Q_SLAB);
            for (int i = 0; i < SLABS; ++i) {
                tma_load(sh.q[stage] + i * Q_SLAB, q_map, 64 * i, head, row, &sh.q_full[stage]);
            }
            mbarrier_wait(&sh.do_empty[stage], free);
            mbarrier_expect(&sh.do_full[stage], SLABS * Q_SLAB);
            for (int i = 0; i < SLABS; ++i) {
                tma_load(sh.d_out[stage] + i * Q_SLAB, do_map, 64 * i, head, row,
                         &sh.do_full[stage]);
            }
        });
    }
}

// One warp: per-query numbers. base = c_i - c_reference - lse_i, so that P = 2^(s + base - w_j).
DEVICE void load_rows(Shared& sh, const BackwardParams& p) {
    const int lane = threadIdx.x % 32;
    u32 step = 0;
    for (u32 count = 0;; ++count) {
        const int slot = count % 2;
        mbarrier_wait(&sh.tile_full[slot], count / 2 % 2);
        const BackwardTile& t = sh.tile[slot];
        if (t.kv_head < 0) return;
        const int last = min((t.n + 1) * BLOCK_N, t.k_len) - 1;
        for_each_step(p, t, step, [&](int head, int m, u32 step) {
            const int stage = step % STAGES;
            float2 reference = make_float2(0.f, 0.f);
            if (GATES) reference = p.gates[size_t(head) * p.gate_stride + t.c_base + last];
            const float4* rows =
                p.rows + (size_t(head) * p.m_tile_count + t.m_tile0 + m) * BLOCK_M + lane;
            float4 x[BLOCK_M / 32];
#pragma unroll
            for (int i = 0; i < BLOCK_M / 32; ++i) x[i] = rows[32 * i];
            mbarrier_wait(&sh.rows_empty[stage], step / STAGES % 2 ^ 1);
#pragma unroll
            for (int i = 0; i < BLOCK_M / 32; ++i) {
                sh.row_base[stage][32 * i + lane] =
                    gate_difference(make_float2(x[i].x, x[i].y), reference) - x[i].w;
                sh.row_delta[stage][32 * i + lane] = x[i].z;
            }
            mbarrier_arrive(&sh.rows_full[stage]);
        });
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&sh.tile_empty[slot]);
    }
}

// One thread of each of two warps, for even and odd steps: adds dQ of finished tiles to device memory, in
// turn. Two, because an addition takes longer to arrive than to leave.
DEVICE void store_dq(Shared& sh, const BackwardParams& p, u32 parity) {
    u32 step = 0;
    for (u32 count = 0;; ++count) {
        const int slot = count % 2;
        mbarrier_wait(&sh.tile_full[slot], count / 2 % 2);
        const BackwardTile& t = sh.tile[slot];
        if (t.kv_head < 0) return;
        for_each_step(p, t, step, [&](int head, int m, u32 step) {
            if (step % 2 != parity) return;
            const size_t index = size_t(head) * p.m_tile_count + t.m_tile0 + m;
            // Blocks of keys that come before this one for these queries: those nearer the diagonal.
            const int diagonal = min(t.offset + m * BLOCK_M + BLOCK_M - 1, t.k_len - 1) / BLOCK_N;
            const int turn = diagonal - t.n;
            float* dst = p.dq + index * DQ_FLOATS;
            mbarrier_wait(&sh.dq_full[parity], step / 2 % 2);
            if (turn == 0) {
                bulk_store(dst, sh.dq, sizeof(sh.dq));
            } else {
                while (load_acquire(p.semaphores + index) != turn) {
                }
                asm volatile("fence.proxy.async;" ::: "memory");
                bulk_add_f32(dst, sh.dq, sizeof(sh.dq));
            }
            bulk_commit();
            bulk_wait_read();
            mbarrier_arrive(&sh.dq_empty);
            bulk_wait();
            asm volatile("fence.proxy.async;" ::: "memory");
            store_release(p.semaphores + index, turn + 1);
        });
        mbarrier_arrive(&sh.tile_empty[slot]);
    }
}

// A warpgroup's 64 keys.
struct Consumer {
    Shared& sh;
    const BackwardParams& p;
    u32 step = 0;
    int warpgroup;

    static DEVICE int lane() { return threadIdx.x % 32; }
    // Key of the tile that this thread's first accumulator row is.
    static DEVICE int row() { return int(threadIdx.x) / 32 * 16 - 64 + lane() / 4; }
    static DEVICE void release(u64* bar) {
        if (lane() == 0) mbarrier_arrive(bar);
    }

    // S^T of this tile becomes P^T.
    template <bool MASKED>
    DEVICE void probabilities(float (&s)[BLOCK_M / 2], int stage, float w0, float w1, int key0,
                              int position) {
        const int column0 = 2 * (lane() % 4);
#pragma unroll
        for (int g = 0; g < BLOCK_M / 8; ++g) {
            float2 base = *reinterpret_cast<const float2*>(&sh.row_base[stage][8 * g + column0]);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float x = fmaf(s[4 * g + e], p.scale_log2, e & 1 ? base.y : base.x);
                x = exp2_fast(x - (e / 2 ? w1 : w0));
                if (MASKED) {
                    int i = position + 8 * g + column0 + (e & 1);
                    int j = key0 + 8 * (e / 2);
                    if (i < j || (WINDOW && i - j >= p.window)) x = 0.f;
                }
                s[4 * g + e] = x;
            }
        }
    }

    // dS = P (dP - delta); both factors packed as left operands. Returns the sums over the queries, and
    // in `sums` this thread's part of those over keys and an eighth of the queries each.
    DEVICE float2 gradient(const float (&s)[BLOCK_M / 2], const float (&dp)[BLOCK_M / 2],
                           u32 (&pf)[BLOCK_M / 4], u32 (&df)[BLOCK_M / 4], float (&sums)[SUMS],
                           int stage) {
        const int column0 = 2 * (lane() % 4);
        float2 total = make_float2(0.f, 0.f);
#pragma unroll
        for (int g = 0; g < BLOCK_M / 8; ++g) {
            float2 delta = *reinterpret_cast<const float2*>(&sh.row_delta[stage][8 * g + column0]);
            float d0 = s[4 * g] * (dp[4 * g] - delta.x);
            float d1 = s[4 * g + 1] * (dp[4 * g + 1] - delta.y);
            float d2 = s[4 * g + 2] * (dp[4 * g + 2] - delta.x);
            float d3 = s[4 * g + 3] * (dp[4 * g + 3] - delta.y);
            pf[2 * g] = pack_bf16(s[4 * g], s[4 * g + 1]);
            pf[2 * g + 1] = pack_bf16(s[4 * g + 2], s[4 * g + 3]);
            df[2 * g] = pack_bf16(d0, d1);
            df[2 * g + 1] = pack_bf16(d2, d3);
            const float sum0 = d0 + d1, sum1 = d2 + d3;
            total.x += sum0;
            total.y += sum1;
            if (g % GROUPS_PER_SUM == 0) sums[g / GROUPS_PER_SUM] = 0.f;
            sums[g / GROUPS_PER_SUM] += sum0 + sum1;
        }
        return total;
    }

    // dS^T to shared memory, swizzled as the copy engine would.
    DEVICE void share_ds(const u32 (&df)[BLOCK_M / 4], u8* ds) {
        const int matrix = lane() / 8;
        const int key = row() - lane() / 4 + (matrix % 2) * 8 + lane() % 8;
        const u32 base = smem_address(ds) + key * SLAB_ROW_BYTES;
#pragma unroll
        for (int k = 0; k < BLOCK_M / 16; ++k) {
            int chunk = 2 * k + matrix / 2;
            u32 address = base + chunk / 8 * KV_SLAB + (chunk % 8 ^ key % 8) * 16;
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                             address),
                         "r"(df[4 * k]), "r"(df[4 * k + 1]), "r"(df[4 * k + 2]), "r"(df[4 * k + 3])
                         : "memory");
        }
    }

    // Sums over the warp, one of them in each group of 32 / SUMS lanes.
    static DEVICE float spread_sum(float (&x)[SUMS]) {
        int step = 16;
#pragma unroll
        for (int n = SUMS; n > 1; n /= 2, step /= 2) {
            const bool upper = lane() & step;
#pragma unroll
            for (int i = 0; i < n / 2; ++i) {
                float keep = upper ? x[i + n / 2] : x[i];
                float send = upper ? x[i] : x[i + n / 2];
                x[i] = keep + __shfl_xor_sync(~0u, send, step);
            }
        }
#pragma unroll
        for (; step > 0; step /= 2) x[0] += __shfl_xor_sync(~0u, x[0], step);
        return x[0];
    }

    // dQ of the step that `index` counts, from everybody's dS; committed, not waited for.
    DEVICE void multiply_dq(float (&dq)[32], u32 index) {
        const u8* ds = sh.ds[index % 3];
        wgmma_fence();
        gemm_tn<64, BLOCK_N>(dq, matrix_descriptor(ds + (DS_SLABS == 2 ? warpgroup * KV_SLAB : 0), 0),
                             matrix_descriptor(sh.k + (SLABS == 2 ? warpgroup * KV_SLAB : 0), 0));
        wgmma_commit();
    }

    DEVICE void hand_over_dq(const float (&dq)[32], float sum, u32 index) {
        mbarrier_wait(&sh.dq_empty, index % 2 ^ 1);
        float4* dst = reinterpret_cast<float4*>(sh.dq) + warpgroup * 8 * 128 + threadIdx.x % 128;
#pragma unroll
        for (int g = 0; g < 8; ++g) {
            dst[g * 128] = make_float4(dq[4 * g], dq[4 * g + 1], dq[4 * g + 2], dq[4 * g + 3]);
        }
        const int warp = int(threadIdx.x) / 32 - 4, lanes = 32 / SUMS;
        if (lane() % lanes == 0) sh.dq[DQ_PIECES + warp * SUMS + lane() / lanes] = sum;
        fence_async_proxy();
        __syncwarp();
        release(&sh.dq_full[index % 2]);
    }

    DEVICE void wait_ds(u32 index) { mbarrier_wait(&sh.ds_full[index % 3], index / 3 % 2); }

    DEVICE void store(const BackwardTile& t, const float (&x)[HEAD_DIM / 2], u16* out, float factor) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int key = t.n * BLOCK_N + row() + 8 * r;
            if (key >= t.k_len) continue;
            u16* out_row = out + (size_t(t.k_start + key) * p.kv_heads + t.kv_head) * p.head_dim;
#pragma unroll
            for (int g = 0; g < HEAD_DIM / 8; ++g) {
                if (8 * g < p.head_dim) {
                    *reinterpret_cast<u32*>(out_row + 8 * g + 2 * (lane() % 4)) =
                        pack_bf16(x[4 * g + 2 * r] * factor, x[4 * g + 2 * r + 1] * factor);
                }
            }
        }
    }

    DEVICE void store_column_sums(const BackwardTile& t, int head, float2 sums) {
        float* out = p.column_sums + size_t(head) * p.gate_stride + t.c_base;
        sums.x = quad_sum(sums.x);
        sums.y = quad_sum(sums.y);
        int key = t.n * BLOCK_N + row();
        if (lane() % 4 == 0) {
            if (key < t.k_len) out[key] = sums.x;
            if (key + 8 < t.k_len) out[key + 8] = sums.y;
        }
    }

    // s = S^T of the step that `index` counts; committed, not waited for.
    DEVICE void multiply_scores(float (&s)[BLOCK_M / 2], u32 index) {
        const int stage = index % STAGES;
        mbarrier_wait(&sh.q_full[stage], index / STAGES % 2);
        wgmma_fence();
        gemm_nt<BLOCK_M, HEAD_DIM, KV_SLAB, Q_SLAB>(
            s, matrix_descriptor(sh.k + warpgroup * 64 * SLAB_ROW_BYTES, 0),
            matrix_descriptor(sh.q[stage], 0));
        wgmma_commit();
    }

    // One block of queries. S^T is there when it begins, and that of the next block when it ends. dQ is
    // that of the block before, whose dS the other warpgroup has had time to write. All the products but
    // dP need nothing from this step's arithmetic and run in one go. `sums` are the sums of dS over the
    // queries, `tile_sum` those that go with dQ.
    template <bool FIRST, bool LAST>
    DEVICE void block(const BackwardTile& t, int m, float w0, float w1, float (&s)[BLOCK_M / 2],
                      float (&dk)[HEAD_DIM / 2], float (&dv)[HEAD_DIM / 2], float2& sums,
                      float& tile_sum) {
        const int stage = step % STAGES;
        const u32 phase = step / STAGES % 2;
        float dp[BLOCK_M / 2], dq[32], part[SUMS];
        u32 pf[BLOCK_M / 4], df[BLOCK_M / 4];

        mbarrier_wait(&sh.do_full[stage], phase);
        wgmma_fence();
        gemm_nt<BLOCK_M, HEAD_DIM, KV_SLAB, Q_SLAB>(
            dp, matrix_descriptor(sh.v + warpgroup * 64 * SLAB_ROW_BYTES, 0),
            matrix_descriptor(sh.d_out[stage], 0));
        wgmma_commit();
        mbarrier_wait(&sh.rows_full[stage], phase);
        const int position = t.offset + m * BLOCK_M;
        const int key0 = t.n * BLOCK_N + warpgroup * 64;
        const bool masked =
            key0 + 63 > position || (WINDOW && position + BLOCK_M - 1 - key0 >= p.window);
        if (masked) {
            probabilities<true>(s, stage, w0, w1, t.n * BLOCK_N + row(), position);
        } else {
            probabilities<false>(s, stage, w0, w1, 0, 0);
        }
        wgmma_wait<0>();
        float2 column_sums = gradient(s, dp, pf, df, part, stage);
        __syncwarp();
        release(&sh.rows_empty[stage]);

        // The buffer was read for dQ two steps ago. Who has written dS of the last step has done with
        // that, so waiting for the last step's dS suffices for both.
        if (!FIRST) wait_ds(step - 1);
        share_ds(df, sh.ds[step % 3]);
        fence_async_proxy();
        __syncwarp();
        release(&sh.ds_full[step % 3]);
        barrier_sync(TURN_BARRIER + warpgroup, 256);
        wgmma_fence();
        gemm_rn<HEAD_DIM, BLOCK_M>(dv, pf, matrix_descriptor(sh.d_out[stage], Q_SLAB), true);
        gemm_rn<HEAD_DIM, BLOCK_M>(dk, df, matrix_descriptor(sh.q[stage], Q_SLAB), true);
        wgmma_commit();
        if (!LAST) multiply_scores(s, step + 1);
        // dV and dK are done, and leave their operands' registers to dQ.
        wgmma_wait<LAST ? 0 : 1>();
        release(&sh.do_empty[stage]);
        release(&sh.q_empty[stage]);
        if (!FIRST) multiply_dq(dq, step - 1);
        wgmma_wait<0>();
        barrier_arrive(TURN_BARRIER + (warpgroup ^ 1), 256);
        if (!FIRST) hand_over_dq(dq, tile_sum, step - 1);
        tile_sum = spread_sum(part);
        sums.x += column_sums.x;
        sums.y += column_sums.y;
        ++step;
    }

    // What is left of the last step of a run of blocks.
    DEVICE void finish_dq(float tile_sum) {
        float dq[32];
        wait_ds(step - 1);
        multiply_dq(dq, step - 1);
        wgmma_wait<0>();
        hand_over_dq(dq, tile_sum, step - 1);
    }

    DEVICE void tile(const BackwardTile& t) {
        float dk[HEAD_DIM / 2], dv[HEAD_DIM / 2];
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) dk[i] = dv[i] = 0.f;
        const int group = p.heads / p.kv_heads;
        for (int head = t.kv_head * group; head < (t.kv_head + 1) * group; ++head) {
            const int2 range = p.ranges[head * p.n_tile_count + t.n_index];
            float w0 = 0.f, w1 = 0.f;
            if (GATES) {
                const float2* gates = p.gates + size_t(head) * p.gate_stride + t.c_base;
                const int key = t.n * BLOCK_N + row(), last = t.k_len - 1;
                float2 reference = gates[min(t.n * BLOCK_N + BLOCK_N - 1, last)];
                w0 = gate_difference(gates[min(key, last)], reference);
                w1 = gate_difference(gates[min(key + 8, last)], reference);
            }
            float2 sums = make_float2(0.f, 0.f);
            float s[BLOCK_M / 2], tile_sum = 0.f;
            int m = range.x;
            if (m < range.y) {
                multiply_scores(s, step);
                wgmma_wait<0>();
                if (m == range.y - 1) {
                    block<true, true>(t, m, w0, w1, s, dk, dv, sums, tile_sum);
                } else {
                    block<true, false>(t, m, w0, w1, s, dk, dv, sums, tile_sum);
                    for (++m; m < range.y - 1; ++m) {
                        block<false, false>(t, m, w0, w1, s, dk, dv, sums, tile_sum);
                    }
                    block<false, true>(t, m, w0, w1, s, dk, dv, sums, tile_sum);
                }
                finish_dq(tile_sum);
            }
            if (GATES) store_column_sums(t, head, sums);
        }
        release(&sh.kv_empty);
        store(t, dk, p.dk, p.scale);
        store(t, dv, p.dv, 1.f);
    }

    DEVICE void run() {
        if (warpgroup == 1) barrier_arrive(TURN_BARRIER, 256);
        for (u32 count = 0;; ++count) {
            const int slot = count % 2;
            mbarrier_wait(&sh.tile_full[slot], count / 2 % 2);
            if (sh.tile[slot].kv_head < 0) return;
            mbarrier_wait(&sh.kv_full, count % 2);
            tile(sh.tile[slot]);
            __syncwarp();
            release(&sh.tile_empty[slot]);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_bwd(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                  const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap do_map,
                  const __grid_constant__ BackwardParams p) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& sh = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) init_barriers(sh);
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_shrink<40>();
        if (threadIdx.x == 0) load_tiles(sh, p, &q_map, &k_map, &v_map, &do_map);
        if (threadIdx.x == 32) store_dq(sh, p, 0);
        if (threadIdx.x == 64) store_dq(sh, p, 1);
        if (threadIdx.x / 32 == 3) load_rows(sh, p);
    } else {
        registers_grow<232>();
        Consumer{sh, p, 0, __shfl_sync(~0u, int(threadIdx.x) / 128 - 1, 0)}.run();
    }
}
