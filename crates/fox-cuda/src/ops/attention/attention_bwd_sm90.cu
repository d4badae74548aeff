// Forgetting attention backward for Hopper: dK, dV, dQ and the column sums of dS in one pass.
//
// A thread block owns BLOCK_N keys of one key head and iterates over the query blocks that see them, from the
// diagonal on. Each of two consumer warpgroups owns 64 keys: it computes S^T and dP^T, so that P^T and dS^T are
// already the left operands of dV += P^T dO and dK += dS^T Q, in registers. Only dS crosses warpgroups, through
// shared memory, for dQ = dS K.
//
// The warpgroups alternate on the tensor cores (named barriers): one runs its products while the other runs its
// exponentials. dQ is pipelined one step later, so that neither warpgroup stalls on the other's dS.
//
// dQ accumulates contributions from many key blocks. They are added in f32 by bulk reductions in a fixed order: for
// a query block the diagonal key block first, then its predecessors one by one, each gated by a semaphore. Tiles are
// scheduled in the same order (last keys first), so a thread block only waits for one that is already running; and
// as each starts at its diagonal, its predecessor is one step ahead. No float atomics: bitwise deterministic.
//
// Last keys first ends with the longest tiles, a tail of 8 % of the time. The last heads therefore run reversed:
// first keys first, from the last queries to the diagonal, dQ summed from the first keys on. Their tiles start
// staggered, as earlier tiles finish, so their semaphores do not stall; and the shortest tiles come last.
//
// A bidirectional mask has two sides, with opposite signs of the gates: a tile first visits the queries before its keys
// (`mirrored` steps), then those at and after them. A block of queries on the diagonal is visited on both sides. All tiles
// take as long, so that those of a head, staggered by their first semaphores, stay so. The gate gradient needs signed
// sums of dS per query: products of dS with ones, so dS passes through registers, and with it the other left operands.
//
// Lost: first keys first for all heads, longest tiles first (14 % slower: all tiles of a head start on the same
// queries and serialize on the semaphores, wave after wave); all heads reversed (better than none at head dim 128,
// worse at 64 and with pruning: tiles run in lockstep, and the first one always misses the L2 cache).
//
// The consumers' main loop is in backward_consumer.cuh for head dims to 128. Compile-time: HEAD_DIM (64, 96, 128, 192,
// 256), BLOCK_M (128 for 64, else 64), GATES, MASK (0 for 192 and 256), WINDOW.
//
// Head dims 192 and 256 (backward_wide_consumers.cuh): dK and dV of 128 keys do not fit the registers. A thread block
// owns 64 keys, of which one warpgroup accumulates dV and the other dK.
#include "attention.cuh"
#include "mma.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr bool WIDE_HEADS = HEAD_DIM > 128;
constexpr int BLOCK_N = WIDE_HEADS ? 64 : 128;
constexpr int STAGES = 2;
constexpr int DO_STAGES = HEAD_DIM > 192 ? 1 : STAGES;  // of dO: shared memory has no room for two of 32 KiB
constexpr int THREADS = 384;
constexpr int SLABS = (HEAD_DIM + 63) / 64;
constexpr u32 Q_SLAB = BLOCK_M * SLAB_ROW_BYTES;
constexpr u32 KV_SLAB = BLOCK_N * SLAB_ROW_BYTES;
constexpr int DS_SLABS = BLOCK_M / 64;
constexpr int DQ_PARTS = DS_SLABS * SLABS;  // of 64 x 64; the first FIRST_DQ_PARTS are warpgroup 0's
constexpr int FIRST_DQ_PARTS = (DQ_PARTS + 1) / 2;
static_assert(DQ_PARTS == 2 || WIDE_HEADS, "two warpgroups compute dQ as two 64 x 64 halves");

constexpr bool TWO_SIDES = MASK == MASK_BIDIRECTIONAL;
static_assert(!(TWO_SIDES && WIDE_HEADS), "no kernel for wide heads with two sides");
// With two sides dP = V dO^T takes fragments of DP_STEPS x 16 columns of V through registers, between parts of the
// exponentials: as many cycles of products as of exponentials.
constexpr int DP_STEPS = SLABS;
constexpr int DP_PARTS = TWO_SIDES ? HEAD_DIM / 16 / DP_STEPS : 1;

// A 64 x 64 part of dQ of a tile in accumulator order, then the sums of dS over each eighth of the queries, per warp:
// finer sums would spill at head dim 64. With two sides, the sum per query.
constexpr int SUMS = 8;
constexpr int GROUPS_PER_SUM = BLOCK_M / 8 / SUMS;
constexpr int DQ_TILE = 64 * 64;
constexpr int DQ_FLOATS = DQ_TILE + (TWO_SIDES ? 64 : 4 * SUMS);
constexpr int DS_STAGES = WIDE_HEADS ? 2 : 3;

// Work description of one block of keys.
struct alignas(16) BackwardTile {
    int kv_head;  // < 0: no more work
    int n, n_index;
    int q_start, offset, m_tile0;
    int k_start, k_len;
    int c_base;
    int reversed;  // last query block first
    int unused[2];
};

struct alignas(1024) Shared {
    u8 k[SLABS * KV_SLAB];
    u8 v[SLABS * KV_SLAB];
    u8 q[STAGES][SLABS * Q_SLAB];
    u8 d_out[DO_STAGES][SLABS * Q_SLAB];
    u8 ds[DS_STAGES][DS_SLABS * KV_SLAB];  // dS^T: a row per key, 64 queries per slab
    float dq[2][DQ_FLOATS];
    float row_base[STAGES][BLOCK_M];
    float row_delta[STAGES][BLOCK_M];
    float probabilities[WIDE_HEADS ? DQ_TILE : 4];  // P^T of a step, from one warpgroup to the other
    BackwardTile tile[2];
    u64 kv_full, kv_empty;
    u64 q_full[STAGES], q_empty[STAGES], do_full[DO_STAGES], do_empty[DO_STAGES];
    u64 rows_full[STAGES], rows_empty[STAGES];
    u64 ds_full[DS_STAGES], ds_empty[DS_STAGES];
    u64 p_full, p_empty;
    u64 dq_full[2], dq_empty[2];  // one for each warpgroup's part
    u64 tile_full[2], tile_empty[2];
};
static_assert(sizeof(Shared) <= SHARED_BYTES);

constexpr int CONSUMERS = 8 * WARP_ARRIVALS;  // arrivals of eight consumer warps
constexpr int TURN_BARRIER = 1;  // and 2: named barriers that alternate the warpgroups on the tensor cores

DEVICE void init_barriers(Shared& sh) {
    mbarrier_init(&sh.kv_full, 1);
    mbarrier_init(&sh.kv_empty, CONSUMERS);
    for (int i = 0; i < STAGES; ++i) {
        mbarrier_init(&sh.q_full[i], 1);
        mbarrier_init(&sh.q_empty[i], CONSUMERS);
        mbarrier_init(&sh.rows_full[i], 32);
        mbarrier_init(&sh.rows_empty[i], CONSUMERS);
    }
    for (int i = 0; i < DO_STAGES; ++i) {
        mbarrier_init(&sh.do_full[i], 1);
        mbarrier_init(&sh.do_empty[i], CONSUMERS);
    }
    for (int i = 0; i < DS_STAGES; ++i) {
        mbarrier_init(&sh.ds_full[i], WIDE_HEADS ? CONSUMERS / 2 : CONSUMERS);
        if (WIDE_HEADS) mbarrier_init(&sh.ds_empty[i], CONSUMERS);
    }
    if (WIDE_HEADS) {
        mbarrier_init(&sh.p_full, CONSUMERS / 2);
        mbarrier_init(&sh.p_empty, CONSUMERS / 2);
    }
    for (int i = 0; i < 2; ++i) {
        mbarrier_init(&sh.dq_full[i], CONSUMERS / 2);
        mbarrier_init(&sh.dq_empty[i], 1);
        mbarrier_init(&sh.tile_full[i], 1);
        mbarrier_init(&sh.tile_empty[i], CONSUMERS + WARP_ARRIVALS + 2);
    }
    mbarrier_init_fence();
}

DEVICE BackwardTile fetch_tile(const BackwardParams& p) {
    BackwardTile t = {};
    t.kv_head = -1;
    int index = atomicAdd(p.next_tile, 1);
    if (index >= p.n_tile_count * p.kv_heads) return t;
    const int forward_heads = p.kv_heads - p.reversed_heads;
    const int rest = index - forward_heads * p.n_tile_count;
    t.reversed = rest >= 0;
    if (t.reversed) {
        t.kv_head = forward_heads + rest % p.reversed_heads;
        t.n_index = p.n_tile_count - 1 - rest / p.reversed_heads;
    } else {
        int per_group = p.n_tile_count * p.group_heads;
        int group = index / per_group;
        int heads = min(p.group_heads, forward_heads - group * p.group_heads);
        int rest = index - group * per_group;
        t.kv_head = group * p.group_heads + rest % heads;
        t.n_index = rest / heads;
    }
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

// Query blocks of a tile on one side of its keys.
DEVICE int2 query_range(const BackwardParams& p, const BackwardTile& t, int head, bool mirrored) {
    return p.ranges[(head * p.n_tile_count + t.n_index) * (1 + TWO_SIDES) + mirrored];
}

// Calls f(head, m, mirrored, step) for all query blocks of a tile, in order. `step` counts over the life of the thread
// block and selects stage and phase of the rings.
template <typename F>
DEVICE void for_each_step(const BackwardParams& p, const BackwardTile& t, u32& step, F f) {
    const int group = p.heads / p.kv_heads;
    for (int head = t.kv_head * group; head < (t.kv_head + 1) * group; ++head) {
        for (int side = TWO_SIDES; side >= 0; --side) {
            int2 range = query_range(p, t, head, side);
            for (int i = 0; i < range.y - range.x; ++i, ++step) {
                f(head, t.reversed ? range.y - 1 - i : range.x + i, side, step);
            }
        }
    }
}

// Producer thread: takes tiles and issues TMA loads.
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
        for_each_step(p, t, step, [&](int head, int m, bool, u32 step) {
            const int stage = step % STAGES;
            const int row = t.q_start + m * BLOCK_M;
            mbarrier_wait(&sh.q_empty[stage], step / STAGES % 2 ^ 1);
            mbarrier_expect(&sh.q_full[stage], SLABS * Q_SLAB);
            for (int i = 0; i < SLABS; ++i) {
                tma_load(sh.q[stage] + i * Q_SLAB, q_map, 64 * i, head, row, &sh.q_full[stage]);
            }
            const int do_stage = step % DO_STAGES;
            mbarrier_wait(&sh.do_empty[do_stage], step / DO_STAGES % 2 ^ 1);
            mbarrier_expect(&sh.do_full[do_stage], SLABS * Q_SLAB);
            for (int i = 0; i < SLABS; ++i) {
                tma_load(sh.d_out[do_stage] + i * Q_SLAB, do_map, 64 * i, head, row, &sh.do_full[do_stage]);
            }
        });
    }
}

// Row-statistics warp: base = c_i - c_reference - lse_i per query, so that P = 2^(s + base - w_j); mirrored, with the
// opposite sign of the gates.
DEVICE void load_rows(Shared& sh, const BackwardParams& p) {
    const int lane = threadIdx.x % 32;
    u32 step = 0;
    for (u32 count = 0;; ++count) {
        const int slot = count % 2;
        mbarrier_wait(&sh.tile_full[slot], count / 2 % 2);
        const BackwardTile& t = sh.tile[slot];
        if (t.kv_head < 0) return;
        const int last = min((t.n + 1) * BLOCK_N, t.k_len) - 1;
        for_each_step(p, t, step, [&](int head, int m, bool mirrored, u32 step) {
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
                const float gate = gate_difference(make_float2(x[i].x, x[i].y), reference);
                sh.row_base[stage][32 * i + lane] = (mirrored ? -gate : gate) - x[i].w;
                sh.row_delta[stage][32 * i + lane] = x[i].z;
            }
            mbarrier_arrive(&sh.rows_full[stage]);
        });
        __syncwarp();
        mbarrier_arrive_warp(&sh.tile_empty[slot]);
    }
}

// One thread of each of two warps, one per warpgroup: adds that half of dQ to device memory when its turn has come, a
// part of 64 x 64 at a time. Lost: one buffer for both halves (2 % slower, the warpgroups stall on each other).
DEVICE void store_dq(Shared& sh, const BackwardParams& p, int half) {
    const int begin = half * FIRST_DQ_PARTS, end = half ? DQ_PARTS : FIRST_DQ_PARTS;
    u32 step = 0, stored = 0;
    for (u32 count = 0;; ++count) {
        const int slot = count % 2;
        mbarrier_wait(&sh.tile_full[slot], count / 2 % 2);
        const BackwardTile& t = sh.tile[slot];
        if (t.kv_head < 0) return;
        for_each_step(p, t, step, [&](int head, int m, bool mirrored, u32 step) {
            const size_t tile = size_t(head) * p.m_tile_count + t.m_tile0 + m;
            // Number of steps that add to this dQ tile before this one: of later key blocks, and the mirrored one of this.
            const int position = t.offset + m * BLOCK_M;
            const int diagonal = min(position + BLOCK_M - 1, t.k_len - 1) / BLOCK_N;
            int turn = t.reversed ? t.n - p.spans[tile].x : diagonal - t.n;
            if (TWO_SIDES) {
                const int first_mirrored = (position + 1) / BLOCK_N;
                turn = max(0, turn) + p.spans[tile].y - max(t.n + mirrored, first_mirrored);
            }
            for (int part = begin; part < end; ++part, ++stored) {
                const size_t index = DQ_PARTS * tile + part;
                float* dst = p.dq + index * DQ_FLOATS;
                mbarrier_wait(&sh.dq_full[half], stored % 2);
                if (turn == 0) {
                    bulk_store(dst, sh.dq[half], sizeof(sh.dq[half]));
                } else {
                    while (load_acquire(p.semaphores + index) != turn) {
                    }
                    fence_async_proxies();
                    bulk_add_f32(dst, sh.dq[half], sizeof(sh.dq[half]));
                }
                bulk_commit();
                bulk_wait_read();
                mbarrier_arrive(&sh.dq_empty[half]);
                bulk_wait();
                fence_async_proxies();
                store_release(p.semaphores + index, turn + 1);
            }
        });
        mbarrier_arrive(&sh.tile_empty[slot]);
    }
}

#include "backward_fragments.cuh"
#if HEAD_DIM > 128
#include "backward_wide_consumers.cuh"
#else
#include "backward_consumer.cuh"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_bwd(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                  const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap do_map,
                  const __grid_constant__ BackwardParams p) {
#if EMULATED
    u8* memory = block_memory(SHARED_BYTES);
#else
    extern __shared__ __align__(1024) u8 memory[];
#endif
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
        const int warpgroup = __shfl_sync(~0u, int(threadIdx.x) / 128 - 1, 0);
#if HEAD_DIM > 128
        if (warpgroup == 0) {
            ScoreConsumer{{{sh, p, 0, 0}}}.run();
        } else {
            GradientConsumer{{{sh, p, 0, 1}}}.run();
        }
#else
        Consumer{{sh, p, 0, warpgroup}}.run();
#endif
    }
}
