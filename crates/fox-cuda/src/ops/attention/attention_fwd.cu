// Forgetting attention forward with mma.sync, for GPUs other than Hopper: a thread block of four warps per tile of 64
// queries, 16 rows per warp.
//
// Compile-time: HEAD_DIM, BLOCK_N, GATES, MASK, WINDOW, SHARED_BYTES.
#include "mma.cuh"
#include "softmax.cuh"

constexpr int BLOCK_M = 64;
constexpr int THREADS = 128;
constexpr int PITCH = HEAD_DIM + 8;

struct Shared {
    alignas(16) u16 q[BLOCK_M * PITCH];
    alignas(16) u16 k[BLOCK_N * PITCH];
    alignas(16) u16 v[BLOCK_N * PITCH];
    alignas(16) float bias[BLOCK_N];
};
static_assert(sizeof(Shared) <= SHARED_BYTES);

DEVICE void store(const ForwardTile& t, const ForwardParams& p, const float (&o)[HEAD_DIM / 2],
                  const SoftmaxState& state, int row0) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float sum = quad_sum(state.sum[r]);
        const float inverse = sum > 0.f ? 1.f / sum : 0.f;
        const int row = row0 + 8 * r;
        if (row >= t.q_valid) continue;
        const size_t index = size_t(t.q_row + row) * p.heads + t.head;
#pragma unroll
        for (int g = 0; g < HEAD_DIM / 8; ++g) {
            if (8 * g < p.head_dim) {
                *reinterpret_cast<u32*>(p.o + index * p.head_dim + 8 * g + 2 * (lane % 4)) =
                    pack_bf16(o[4 * g + 2 * r] * inverse, o[4 * g + 2 * r + 1] * inverse);
            }
        }
        if (lane % 4 == 0) {
            p.lse[index] = sum > 0.f ? (state.maximum[r] + log2_fast(sum)) * LN_2 : NEG_INF;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_fwd(const PortableOperands x, const __grid_constant__ ForwardParams p) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& sh = *reinterpret_cast<Shared*>(memory);
    const ForwardTile t = p.tiles[p.order[blockIdx.x]];
    const int warp_row = threadIdx.x / 32 * 16, lane = threadIdx.x % 32;
    const int row = warp_row + lane / 4, position = t.position + row;
    const int q_stride = p.heads * p.head_dim, k_stride = x.kv_heads * p.head_dim;
    const u16* k = x.k + size_t(t.k_row) * k_stride + t.kv_head * p.head_dim;
    const u16* v = x.v + size_t(t.k_row) * k_stride + t.kv_head * p.head_dim;
    const float2* gates = p.gates + size_t(t.head) * p.gate_stride + t.c_base;
    float2 c0 = make_float2(0.f, 0.f), c1 = c0;
    if (GATES) {
        c0 = gates[min(position, t.k_len - 1)];
        c1 = gates[min(position + 8, t.k_len - 1)];
    }
    load_rows_async<BLOCK_M, HEAD_DIM, PITCH, THREADS>(
        sh.q, x.q + size_t(t.q_row) * q_stride + t.head * p.head_dim, t.q_valid, q_stride,
        p.head_dim);

    float o[HEAD_DIM / 2] = {}, rescale[2] = {1.f, 1.f};
    SoftmaxState state;
    for (int n = t.n_end - 1; n >= t.n_begin; --n) {
        const int first = n * BLOCK_N, rows = min(BLOCK_N, t.k_len - first);
        __syncthreads();
        load_rows_async<BLOCK_N, HEAD_DIM, PITCH, THREADS>(sh.k, k + size_t(first) * k_stride, rows,
                                                           k_stride, p.head_dim);
        copy_commit();
        load_rows_async<BLOCK_N, HEAD_DIM, PITCH, THREADS>(sh.v, v + size_t(first) * k_stride, rows,
                                                           k_stride, p.head_dim);
        copy_commit();
        float frame0 = 0.f, frame1 = 0.f;
        int sign = 1;
        if (GATES) {
            const float2 reference = gates[first + rows - 1];
            for (int j = threadIdx.x; j < BLOCK_N; j += THREADS) {
                sh.bias[j] = gate_difference(gates[first + min(j, rows - 1)], reference);
            }
            frame0 = gate_difference(c0, reference);
            frame1 = gate_difference(c1, reference);
            if (MASK == MASK_BIDIRECTIONAL) {
                const int row0 = t.position + warp_row;
                sign = first > row0 + 15 ? -1 : first + BLOCK_N - 1 > row0 ? 0 : 1;
            }
        }
        copy_wait<1>();
        __syncthreads();
        float s[BLOCK_N / 2] = {};
        mma_nt<BLOCK_N, HEAD_DIM, PITCH>(s, sh.q + warp_row * PITCH, sh.k);
        const Visible v0 = visible_columns<MASK, WINDOW>(position, t.k_len, first, p.window);
        const Visible v1 = visible_columns<MASK, WINDOW>(position + 8, t.k_len, first, p.window);
        const bool raised = softmax_block<BLOCK_N, GATES, true, MASK>(
            s, state, rescale, sh.bias, frame0, frame1, sign, p.scale, v0, v1);
        if (raised) {
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 2; ++i) o[i] *= rescale[i / 2 % 2];
        }
        u32 probabilities[BLOCK_N / 4];
        pack_fragments<BLOCK_N>(s, probabilities);
        copy_wait<0>();
        __syncthreads();
        mma_rn<HEAD_DIM, BLOCK_N, PITCH>(o, probabilities, sh.v);
    }
    store(t, p, o, state, row);
}
