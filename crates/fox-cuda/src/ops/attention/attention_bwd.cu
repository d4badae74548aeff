// Forgetting attention backward with mma.sync, for GPUs other than Hopper and for the cases the Hopper kernel does not
// cover: two passes, one over blocks of keys (dK, dV, column sums of dS), one over blocks of queries (dQ, row sums of
// dS). Thread blocks share no output, so the result is bitwise deterministic.
//
// Blocks of 64 x 64; the inner loop takes STEP rows at a time (16 for wide heads, limited by shared memory). Wide heads
// also split the columns of dK and dV over two thread blocks, to limit register pressure.
//
// Compile-time: HEAD_DIM, STEP, GATES, MASK, WINDOW, SHARED_BYTES.
#define BF16 1
#include "attention.cuh"
#include "mma.cuh"

constexpr int BLOCK = 64;
constexpr int THREADS = 128;
constexpr int PITCH = HEAD_DIM + 8;
constexpr int COLUMN_SPLITS = HEAD_DIM > 128 ? 2 : 1;
constexpr int SPLIT_COLUMNS = HEAD_DIM / COLUMN_SPLITS;

// Two operands of 64 resident rows, and of STEP streamed rows.
struct Shared {
    alignas(16) u16 resident[2][BLOCK * PITCH];
    alignas(16) u16 streamed[2][STEP * PITCH];
    alignas(16) float4 rows[STEP];
    alignas(16) float bias[STEP];
};
static_assert(sizeof(Shared) <= SHARED_BYTES);

// P_ij from s = q_i . k_j; u and w are the gate prefixes relative to one reference.
DEVICE float probability(const TwoPassParams& p, float s, float u, float w, float lse, int i, int j,
                         int k_len) {
    const Visible v = visible_columns<MASK, WINDOW>(i, k_len, 0, p.window);
    float x = fmaf(s, p.scale_log2, GATES ? -fabsf(u - w) : 0.f) - lse;
    return j >= v.lo && j < v.hi ? exp2_fast(x) : 0.f;
}

DEVICE const u16* head_rows(const u16* x, int row, int heads, int head, int head_dim) {
    return x + (size_t(row) * heads + head) * head_dim;
}

template <int COLUMNS>
DEVICE void store_rows(u16* out, const float (&x)[COLUMNS / 2], int column0, int rows, int stride,
                       int head_dim, float factor) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = int(threadIdx.x) / 32 * 16 + lane / 4 + 8 * r;
        if (row >= rows) continue;
#pragma unroll
        for (int g = 0; g < COLUMNS / 8; ++g) {
            if (column0 + 8 * g < head_dim) {
                *reinterpret_cast<u32*>(out + size_t(row) * stride + column0 + 8 * g +
                                        2 * (lane % 4)) =
                    pack_bf16(x[4 * g + 2 * r] * factor, x[4 * g + 2 * r + 1] * factor);
            }
        }
    }
}

// Grid (n_tiles, kv_heads, COLUMN_SPLITS).
extern "C" __global__ void __launch_bounds__(THREADS) attention_bwd_keys(const TwoPassParams p) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& sh = *reinterpret_cast<Shared*>(memory);
    const BlockRef ref = p.n_tiles[blockIdx.x];
    const Segment seg = p.segments[ref.segment];
    const int kv_head = blockIdx.y, column_first = blockIdx.z * SPLIT_COLUMNS, n = ref.block;
    const int offset = seg.k_len - seg.q_len, first = n * BLOCK;
    const int keys = min(BLOCK, seg.k_len - first);
    const int q_stride = p.heads * p.head_dim, k_stride = p.kv_heads * p.head_dim;
    const int warp_row = threadIdx.x / 32 * 16, lane = threadIdx.x % 32, column0 = 2 * (lane % 4);
    const int key = first + warp_row + lane / 4;  // and key + 8
    load_rows_async<BLOCK, HEAD_DIM, PITCH, THREADS>(
        sh.resident[0], head_rows(p.k, seg.k_start + first, p.kv_heads, kv_head, p.head_dim), keys,
        k_stride, p.head_dim);
    load_rows_async<BLOCK, HEAD_DIM, PITCH, THREADS>(
        sh.resident[1], head_rows(p.v, seg.k_start + first, p.kv_heads, kv_head, p.head_dim), keys,
        k_stride, p.head_dim);

    float dk[SPLIT_COLUMNS / 2] = {}, dv[SPLIT_COLUMNS / 2] = {};
    const int group = p.heads / p.kv_heads;
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        const float2* gates = p.gates + size_t(head) * p.gate_stride + seg.c_base;
        float2 reference = make_float2(0.f, 0.f);
        float w[2] = {0.f, 0.f}, sums[2] = {0.f, 0.f};
        if (GATES) {
            reference = gates[first + keys - 1];
            w[0] = gate_difference(gates[min(key, seg.k_len - 1)], reference);
            w[1] = gate_difference(gates[min(key + 8, seg.k_len - 1)], reference);
        }
        const int steps = (seg.q_len + STEP - 1) / STEP;
        for (int step = 0; step < steps; ++step) {
            const int q0 = step * STEP, m = q0 / BLOCK;
            const size_t tile = size_t(head) * p.m_tile_count + seg.m_tile0 + m;
            const int2 span = p.spans[tile];
            if (n < span.x || n >= span.y) continue;
            __syncthreads();
            const int count = min(STEP, seg.q_len - q0);
            load_rows_async<STEP, HEAD_DIM, PITCH, THREADS>(
                sh.streamed[0], head_rows(p.q, seg.q_start + q0, p.heads, head, p.head_dim), count,
                q_stride, p.head_dim);
            load_rows_async<STEP, HEAD_DIM, PITCH, THREADS>(
                sh.streamed[1], head_rows(p.d_out, seg.q_start + q0, p.heads, head, p.head_dim), count,
                q_stride, p.head_dim);
            copy_commit();
            for (int i = threadIdx.x; i < STEP; i += THREADS) {
                float4 x = p.rows[tile * BLOCK + q0 % BLOCK + i];
                x.x = gate_difference(make_float2(x.x, x.y), reference);
                sh.rows[i] = x;
            }
            copy_wait<0>();
            __syncthreads();
            float s[STEP / 2] = {}, dp[STEP / 2] = {};
            mma_nt<STEP, HEAD_DIM, PITCH>(s, sh.resident[0] + warp_row * PITCH, sh.streamed[0]);
            mma_nt<STEP, HEAD_DIM, PITCH>(dp, sh.resident[1] + warp_row * PITCH, sh.streamed[1]);
            u32 pf[STEP / 4], df[STEP / 4];
#pragma unroll
            for (int i = 0; i < STEP / 2; i += 2) {
                const int r = i / 2 % 2, query = i / 4 * 8 + column0, j = key + 8 * r;
                float pr[2], ds[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float4 x = sh.rows[query + e];
                    const int position = offset + q0 + query + e;
                    pr[e] = probability(p, s[i + e], x.x, w[r], x.w, position, j, seg.k_len);
                    ds[e] = pr[e] * (dp[i + e] - x.z);
                    sums[r] += j <= position ? ds[e] : -ds[e];
                }
                pf[i / 2] = pack_bf16(pr[0], pr[1]);
                df[i / 2] = pack_bf16(ds[0], ds[1]);
            }
            mma_rn<SPLIT_COLUMNS, STEP, PITCH>(dv, pf, sh.streamed[1] + column_first);
            mma_rn<SPLIT_COLUMNS, STEP, PITCH>(dk, df, sh.streamed[0] + column_first);
        }
        if (GATES && column_first == 0) {
            float* out = p.column_sums + size_t(head) * p.gate_stride + seg.c_base;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float sum = quad_sum(sums[r]);
                if (lane % 4 == 0 && key + 8 * r < seg.k_len) out[key + 8 * r] = sum;
            }
        }
    }
    u16* dk_out = p.dk + (size_t(seg.k_start + first) * p.kv_heads + kv_head) * p.head_dim;
    u16* dv_out = p.dv + (size_t(seg.k_start + first) * p.kv_heads + kv_head) * p.head_dim;
    store_rows<SPLIT_COLUMNS>(dk_out, dk, column_first, keys, k_stride, p.head_dim, p.scale);
    store_rows<SPLIT_COLUMNS>(dv_out, dv, column_first, keys, k_stride, p.head_dim, 1.f);
}

// Grid (m_tiles, heads).
extern "C" __global__ void __launch_bounds__(THREADS) attention_bwd_queries(const TwoPassParams p) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& sh = *reinterpret_cast<Shared*>(memory);
    const BlockRef ref = p.m_tiles[blockIdx.x];
    const Segment seg = p.segments[ref.segment];
    const int head = blockIdx.y, kv_head = head / (p.heads / p.kv_heads);
    const int q0 = ref.block * BLOCK, queries = min(BLOCK, seg.q_len - q0);
    const int q_stride = p.heads * p.head_dim, k_stride = p.kv_heads * p.head_dim;
    const int warp_row = threadIdx.x / 32 * 16, lane = threadIdx.x % 32, column0 = 2 * (lane % 4);
    const int row = warp_row + lane / 4;  // and row + 8
    const int position = seg.k_len - seg.q_len + q0 + row;
    const size_t tile = size_t(head) * p.m_tile_count + blockIdx.x;
    load_rows_async<BLOCK, HEAD_DIM, PITCH, THREADS>(
        sh.resident[0], head_rows(p.q, seg.q_start + q0, p.heads, head, p.head_dim), queries, q_stride,
        p.head_dim);
    load_rows_async<BLOCK, HEAD_DIM, PITCH, THREADS>(
        sh.resident[1], head_rows(p.d_out, seg.q_start + q0, p.heads, head, p.head_dim), queries,
        q_stride, p.head_dim);
    const float2* gates = p.gates + size_t(head) * p.gate_stride + seg.c_base;
    const float4 stats[2] = {p.rows[tile * BLOCK + row], p.rows[tile * BLOCK + row + 8]};
    const int2 span = p.spans[tile];

    float dq[HEAD_DIM / 2] = {}, sums[2] = {0.f, 0.f};
    for (int first = span.x * BLOCK; first < min(span.y * BLOCK, seg.k_len); first += STEP) {
        const int count = min(STEP, seg.k_len - first);
        __syncthreads();
        load_rows_async<STEP, HEAD_DIM, PITCH, THREADS>(
            sh.streamed[0], head_rows(p.k, seg.k_start + first, p.kv_heads, kv_head, p.head_dim), count,
            k_stride, p.head_dim);
        load_rows_async<STEP, HEAD_DIM, PITCH, THREADS>(
            sh.streamed[1], head_rows(p.v, seg.k_start + first, p.kv_heads, kv_head, p.head_dim), count,
            k_stride, p.head_dim);
        copy_commit();
        float u[2] = {0.f, 0.f};
        if (GATES) {
            const float2 reference = gates[first + count - 1];
            for (int j = threadIdx.x; j < STEP; j += THREADS) {
                sh.bias[j] = gate_difference(gates[first + min(j, count - 1)], reference);
            }
            u[0] = gate_difference(make_float2(stats[0].x, stats[0].y), reference);
            u[1] = gate_difference(make_float2(stats[1].x, stats[1].y), reference);
        }
        copy_wait<0>();
        __syncthreads();
        float s[STEP / 2] = {}, dp[STEP / 2] = {};
        mma_nt<STEP, HEAD_DIM, PITCH>(s, sh.resident[0] + warp_row * PITCH, sh.streamed[0]);
        mma_nt<STEP, HEAD_DIM, PITCH>(dp, sh.resident[1] + warp_row * PITCH, sh.streamed[1]);
        u32 df[STEP / 4];
#pragma unroll
        for (int i = 0; i < STEP / 2; i += 2) {
            const int r = i / 2 % 2, column = i / 4 * 8 + column0, at = position + 8 * r;
            float ds[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int j = first + column + e;
                const float w = GATES ? sh.bias[column + e] : 0.f;
                ds[e] = probability(p, s[i + e], u[r], w, stats[r].w, at, j, seg.k_len) *
                        (dp[i + e] - stats[r].z);
                sums[r] += j <= at ? ds[e] : -ds[e];
            }
            df[i / 2] = pack_bf16(ds[0], ds[1]);
        }
        mma_rn<HEAD_DIM, STEP, PITCH>(dq, df, sh.streamed[0]);
    }
    u16* out = p.dq + (size_t(seg.q_start + q0) * p.heads + head) * p.head_dim;
    store_rows<HEAD_DIM>(out, dq, 0, queries, q_stride, p.head_dim, p.scale);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = quad_sum(sums[r]);
        if (lane % 4 == 0) p.row_sums[tile * BLOCK + row + 8 * r] = sum;
    }
}
