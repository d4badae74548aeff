// Forgetting attention forward for Hopper.
//
// Warp-specialized persistent kernel: thread blocks take tiles of queries from a list, longest first. One producer
// warpgroup has a thread that issues TMA loads of Q, K and V and a warp that converts gate prefixes to per-key biases.
// Each consumer warpgroup owns 64 query rows; its main loop is in forward_half_blocks.cuh (head dims to 128) or
// forward_full_blocks.cuh. The epilogue is ConsumerBase::store.
//
// Lost: ping-pong scheduling of the warpgroups by named barriers (2 % slower at head dim 64, 3 % at 128).
//
// Compile-time: HEAD_DIM, BLOCK_N, STAGES, WARPGROUPS, HALF_BLOCKS, GATES, MASK, WINDOW (see tiles.rs).
#include "softmax.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int BLOCK_M = 64 * WARPGROUPS;
constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int SLABS = (HEAD_DIM + 63) / 64;
constexpr u32 Q_SLAB = BLOCK_M * SLAB_ROW_BYTES;
constexpr u32 KV_SLAB = BLOCK_N * SLAB_ROW_BYTES;
constexpr int BIAS_STAGES = 4;

struct alignas(1024) Shared {
    u8 q[SLABS * Q_SLAB];
    u8 k[STAGES][SLABS * KV_SLAB];
    u8 v[STAGES][SLABS * KV_SLAB];
    float bias[BIAS_STAGES][BLOCK_N];
    float2 reference[BIAS_STAGES];
    ForwardTile tile[2];
    u64 q_full, q_empty;
    u64 k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    u64 bias_full[BIAS_STAGES], bias_empty[BIAS_STAGES];
    u64 tile_full[2], tile_empty[2];
};
static_assert(sizeof(Shared) <= SHARED_BYTES);

DEVICE void init_barriers(Shared& sh) {
    const int readers = 4 * WARPGROUPS * WARP_ARRIVALS;
    mbarrier_init(&sh.q_full, 1);
    mbarrier_init(&sh.q_empty, readers);
    for (int i = 0; i < STAGES; ++i) {
        mbarrier_init(&sh.k_full[i], 1);
        mbarrier_init(&sh.k_empty[i], readers);
        mbarrier_init(&sh.v_full[i], 1);
        mbarrier_init(&sh.v_empty[i], readers);
    }
    for (int i = 0; i < BIAS_STAGES; ++i) {
        mbarrier_init(&sh.bias_full[i], 32);
        mbarrier_init(&sh.bias_empty[i], readers);
    }
    for (int i = 0; i < 2; ++i) {
        mbarrier_init(&sh.tile_full[i], 1);
        mbarrier_init(&sh.tile_empty[i], readers + GATES * WARP_ARRIVALS);
    }
    mbarrier_init_fence();
}

// Producer thread: takes tiles from the list and issues TMA loads.
DEVICE void load_tiles(Shared& sh, const ForwardParams& p, const TensorMap* q_map,
                       const TensorMap* k_map, const TensorMap* v_map) {
    Ring<2> slot;
    Ring<1> q_ring;
    Ring<STAGES> k_ring, v_ring;
    auto load_k = [&](const ForwardTile& t, int n) {
        mbarrier_wait(&sh.k_empty[k_ring.stage], k_ring.phase ^ 1);
        mbarrier_expect(&sh.k_full[k_ring.stage], SLABS * KV_SLAB);
        for (int i = 0; i < SLABS; ++i) {
            tma_load(sh.k[k_ring.stage] + i * KV_SLAB, k_map, 64 * i, t.kv_head,
                     t.k_row + n * BLOCK_N, &sh.k_full[k_ring.stage]);
        }
        k_ring.next();
    };
    auto load_v = [&](const ForwardTile& t, int n) {
        mbarrier_wait(&sh.v_empty[v_ring.stage], v_ring.phase ^ 1);
        mbarrier_expect(&sh.v_full[v_ring.stage], SLABS * KV_SLAB);
        for (int i = 0; i < SLABS; ++i) {
            tma_load(sh.v[v_ring.stage] + i * KV_SLAB, v_map, 64 * i, t.kv_head,
                     t.k_row + n * BLOCK_N, &sh.v_full[v_ring.stage]);
        }
        v_ring.next();
    };
    while (true) {
        mbarrier_wait(&sh.tile_empty[slot.stage], slot.phase ^ 1);
        int index = atomicAdd(p.next_tile, 1);
        ForwardTile t = {};
        t.head = -1;
        if (index < p.tile_count) t = p.tiles[p.order[index]];
        sh.tile[slot.stage] = t;
        mbarrier_arrive(&sh.tile_full[slot.stage]);
        slot.next();
        if (t.head < 0) return;

        mbarrier_wait(&sh.q_empty, q_ring.phase ^ 1);
        mbarrier_expect(&sh.q_full, SLABS * Q_SLAB);
        for (int i = 0; i < SLABS; ++i) {
            tma_load(sh.q + i * Q_SLAB, q_map, 64 * i, t.head, t.q_row, &sh.q_full);
        }
        q_ring.next();
        load_k(t, t.n_end - 1);
        for (int n = t.n_end - 1; n > t.n_begin; --n) {
            load_k(t, n - 1);
            load_v(t, n);
        }
        load_v(t, t.n_begin);
    }
}

// Bias warp: per-key biases relative to the last key of each block.
DEVICE void load_biases(Shared& sh, const ForwardParams& p) {
    const int lane = threadIdx.x % 32;
    Ring<2> slot;
    Ring<BIAS_STAGES> ring;
    while (true) {
        mbarrier_wait(&sh.tile_full[slot.stage], slot.phase);
        ForwardTile t = sh.tile[slot.stage];
        __syncwarp();
        mbarrier_arrive_warp(&sh.tile_empty[slot.stage]);
        slot.next();
        if (t.head < 0) return;
        const float2* gates = p.gates + size_t(t.head) * p.gate_stride + t.c_base;
        for (int n = t.n_end - 1; n >= t.n_begin; --n) {
            float2 last = gates[min((n + 1) * BLOCK_N, t.k_len) - 1];
            float w[BLOCK_N / 32];
#pragma unroll
            for (int i = 0; i < BLOCK_N / 32; ++i) {
                w[i] = gate_difference(gates[n * BLOCK_N + 32 * i + lane], last);
            }
            mbarrier_wait(&sh.bias_empty[ring.stage], ring.phase ^ 1);
#pragma unroll
            for (int i = 0; i < BLOCK_N / 32; ++i) sh.bias[ring.stage][32 * i + lane] = w[i];
            if (lane == 0) sh.reference[ring.stage] = last;
            mbarrier_arrive(&sh.bias_full[ring.stage]);
            ring.next();
        }
    }
}

// State and epilogue shared by both main loops: a warpgroup and its 64 query rows.
struct ConsumerBase {
    Shared& sh;
    const ForwardParams& p;
    const int warpgroup;  // broadcast by a shuffle, so that the compiler knows it to be uniform
    u32 block = 0;  // key blocks consumed so far: determines stage and phase of every ring

    static DEVICE int lane() { return threadIdx.x % 32; }
    // Row of the tile that this thread's first accumulator row is.
    static DEVICE int row() { return int(threadIdx.x) / 32 * 16 - 64 + lane() / 4; }

    static DEVICE void release(u64* bar) { mbarrier_arrive_warp(bar); }

    DEVICE const u8* queries() const { return sh.q + warpgroup * 64 * SLAB_ROW_BYTES; }

    // Gate prefixes of this thread's two rows.
    DEVICE void load_prefixes(const ForwardTile& t, float2& c0, float2& c1) const {
        c0 = c1 = make_float2(0.f, 0.f);
        if (!GATES) return;
        const float2* gates = p.gates + size_t(t.head) * p.gate_stride + t.c_base;
        c0 = gates[min(t.position + row(), t.k_len - 1)];
        c1 = gates[min(t.position + row() + 8, t.k_len - 1)];
    }

    // Range of blocks of `width` keys that all 64 rows see, so that no mask is needed.
    DEVICE void find_unmasked(const ForwardTile& t, int width, int& begin, int& end) const {
        const int row0 = t.position + 64 * warpgroup;
        begin = WINDOW ? (row0 + 64 - p.window + width - 1) / width : 0;
        end = (MASK == MASK_CAUSAL ? min(row0 + 1, t.k_len)
               : WINDOW            ? min(row0 + p.window, t.k_len)
                                   : t.k_len) /
              width;
    }

    // Sign of the gate bias for `width` keys from `first` on: 1 for keys before the rows, -1 after, 0 for a mix.
    DEVICE int gate_sign(const ForwardTile& t, int first, int width) const {
        if (MASK != MASK_BIDIRECTIONAL) return 1;
        const int row0 = t.position + 64 * warpgroup;
        return first > row0 + 63 ? -1 : first + width - 1 > row0 ? 0 : 1;
    }

    DEVICE void store(const ForwardTile& t, float (&o)[HEAD_DIM / 2], SoftmaxState& state) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float sum = quad_sum(state.sum[r]);
            float inverse = sum > 0.f ? 1.f / sum : 0.f;
            int tile_row = row() + 8 * r;
            if (tile_row >= t.q_valid) continue;
            size_t out_row = size_t(t.q_row + tile_row) * p.heads + t.head;
            u16* o_row = p.o + out_row * p.head_dim;
#pragma unroll
            for (int g = 0; g < HEAD_DIM / 8; ++g) {
                if (8 * g < p.head_dim) {
                    *reinterpret_cast<u32*>(o_row + 8 * g + 2 * (lane() % 4)) =
                        pack_bf16(o[4 * g + 2 * r] * inverse, o[4 * g + 2 * r + 1] * inverse);
                }
            }
            if (lane() % 4 == 0) {
                p.lse[out_row] = sum > 0.f ? (state.maximum[r] + log2_fast(sum)) * LN_2 : NEG_INF;
            }
        }
    }
};

#if HALF_BLOCKS
#include "forward_half_blocks.cuh"
#else
#include "forward_full_blocks.cuh"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_fwd(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                  const __grid_constant__ TensorMap v_map, const __grid_constant__ ForwardParams p) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& sh = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) init_barriers(sh);
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_shrink<WARPGROUPS == 3 ? 32 : 40>();
        if (threadIdx.x == 0) load_tiles(sh, p, &q_map, &k_map, &v_map);
        if (GATES && threadIdx.x / 32 == 1) load_biases(sh, p);
    } else {
        registers_grow<WARPGROUPS == 3 ? 160 : 232>();
        Consumer consumer{{sh, p, __shfl_sync(~0u, int(threadIdx.x) / 128 - 1, 0)}};
        for (u32 count = 0;; ++count) {
            const int slot = count % 2;
            mbarrier_wait(&sh.tile_full[slot], count / 2 % 2);
            if (sh.tile[slot].head < 0) return;
            consumer.tile(sh.tile[slot], count % 2);
            __syncwarp();
            consumer.release(&sh.tile_empty[slot]);
        }
    }
}
