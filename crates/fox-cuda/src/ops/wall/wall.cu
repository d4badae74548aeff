// Wall attention, forward; see wall.cuh.
//
// Compile-time: HEAD_DIM, WIDE, GATES, SHARED_BYTES.
#include "wall.cuh"

// e, x, far and the products of blocks. Grid (tiles, heads).
extern "C" __global__ void __launch_bounds__(THREADS) wall_prepare(const __grid_constant__ WallParams p) {
    if (is_closed(p, blockIdx.x)) return;
    const Block b = block_at(p, blockIdx.x, blockIdx.y);
    // Rows that a thread loads at once: stores would otherwise delay the next load.
    constexpr int BATCH = 8;
    for (int c = threadIdx.x; c < p.head_dim; c += THREADS) {
        float product = 1.f;
        for (int first = 0; first < b.count; first += BATCH) {
            float log_decay[BATCH], q[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const size_t at = element(p, b.row + min(first + i, b.count - 1), b.head, c);
                log_decay[i] = p.log_decays[at], q[i] = to_float(p.q[at]);
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                if (first + i >= b.count) break;
                const size_t at = element(p, b.row + first + i, b.head, c);
                const float e = expf(log_decay[i]);
                product *= e;
                p.e[at] = e;
                p.x[at] = to_real(q[i] * product);
            }
        }
        product = 1.f;
        for (int last = b.count - 1; last >= 0; last -= BATCH) {
            float e[BATCH], k[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int row = b.row + max(last - i, 0);
                e[i] = p.e[element(p, row, b.head, c)], k[i] = to_float(p.k[key_element(p, row, b.kv_head, c)]);
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                if (last < i) break;
                p.far[element(p, b.row + last - i, b.head, c)] = to_real(k[i] * product);
                product *= e[i];
            }
        }
        p.decay[(size_t(b.tile) * p.heads + b.head) * p.head_dim + c] = product;
    }
}

// far [64, H * d] and decay [H * d] of one block of keys, for decoding. Grid (heads).
extern "C" __global__ void __launch_bounds__(THREADS) wall_close(const __grid_constant__ WallParams p) {
    const int head = blockIdx.x, kv_head = head / (p.heads / p.kv_heads);
    for (int c = threadIdx.x; c < p.head_dim; c += THREADS) {
        float product = 1.f;
        for (int j = BLOCK - 1; j >= 0; --j) {
            const size_t at = element(p, j, head, c);
            p.far[at] = to_real(to_float(p.k[key_element(p, j, kv_head, c)]) * product);
            product *= expf(p.log_decays[at]);
        }
        p.decay[head * p.head_dim + c] = product;
    }
}

// Scores q . (k E) inside a block, not scaled. A warp takes four keys at a time, which decay from query to query; lanes
// share the channels. Grid (tiles, heads).
extern "C" __global__ void __launch_bounds__(THREADS) wall_own_scores(const __grid_constant__ WallParams p) {
    constexpr int KEYS = 4, PER_LANE = (HEAD_DIM + 31) / 32;
    if (is_closed(p, blockIdx.x)) return;
    const Block b = block_at(p, blockIdx.x, blockIdx.y);
    float* out = p.own + own_tile(p, b);
    const int lane = threadIdx.x % 32;
    for (int j0 = threadIdx.x / 32 * KEYS; j0 < b.count; j0 += THREADS / 32 * KEYS) {
        float k[KEYS][PER_LANE];
#pragma unroll
        for (int u = 0; u < KEYS; ++u) {
#pragma unroll
            for (int n = 0; n < PER_LANE; ++n) {
                const int c = 32 * n + lane;
                const bool there = j0 + u < b.count && c < p.head_dim;
                k[u][n] = there ? to_float(p.k[key_element(p, b.row + j0 + u, b.kv_head, c)]) : 0.f;
            }
        }
        for (int i = j0; i < b.count; ++i) {
            float sums[KEYS] = {};
#pragma unroll
            for (int n = 0; n < PER_LANE; ++n) {
                const int c = 32 * n + lane;
                if (c >= p.head_dim) continue;
                const size_t at = element(p, b.row + i, b.head, c);
                const float e = p.e[at], q = to_float(p.q[at]);
#pragma unroll
                for (int u = 0; u < KEYS; ++u) {
                    if (i > j0 + u) k[u][n] *= e;
                    sums[u] = fmaf(q, k[u][n], sums[u]);
                }
            }
            // Over the warp: every eight lanes have one of the sums in the end.
#pragma unroll
            for (int n = KEYS / 2, step = 16; n > 0; n /= 2, step /= 2) {
                const bool upper = lane & step;
#pragma unroll
                for (int u = 0; u < n; ++u) {
                    const float keep = upper ? sums[u + n] : sums[u], send = upper ? sums[u] : sums[u + n];
                    sums[u] = keep + __shfl_xor_sync(~0u, send, step);
                }
            }
#pragma unroll
            for (int step = 4; step > 0; step /= 2) sums[0] += __shfl_xor_sync(~0u, sums[0], step);
            const int j = j0 + lane / 8;
            if (lane % 8 == 0 && j <= i) out[i * BLOCK + j] = sums[0];
        }
    }
}

// Grid (tiles, heads).
extern "C" __global__ void __launch_bounds__(THREADS) wall_fwd(const __grid_constant__ WallParams p) {
    Shared& sh = shared_memory();
    if (is_closed(p, blockIdx.x)) return;
    const Block m = block_at(p, blockIdx.x, blockIdx.y);
    const int oldest = oldest_block(p, m);
    const Rows x = fetch_heads(sh, 0, p.x, p.heads, m.head, p.head_dim, m.row, m.count);
    start_factor(sh);
    float o[HEAD_DIM / 2] = {}, maximum[2] = {-1e30f, -1e30f}, sum[2] = {0.f, 0.f};
    Prefix frame[2] = {};
    for (int n = m.block; n >= oldest; --n) {
        const Block keys = block_of(p, m.s, n, m.head);
        __syncthreads();
        const Rows far = fetch_heads(sh, 2, p.far, p.heads, m.head, p.head_dim, keys.row, keys.count);
        const Rows v = fetch_heads(sh, 3, p.v, p.kv_heads, m.kv_head, p.head_dim, keys.row, keys.count);
        load_gates(sh, m, n, frame);
        wait_for_rows();
        float s[BLOCK / 2];
        if (n == m.block) {
            load_own(s, p.own + own_tile(p, m), m);
        } else {
            scaled_scores(s, sh, x, far);
        }
        finish_scores(s, sh, p, m, n, frame);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float top = maximum[r];
#pragma unroll
            for (int i = 0; i < BLOCK / 4; ++i) top = fmaxf(top, s[i / 2 * 4 + 2 * r + i % 2]);
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            const float fade = exp2f(maximum[r] - top);
            maximum[r] = top;
            float own = 0.f;
#pragma unroll
            for (int i = 0; i < BLOCK / 4; ++i) {
                float& x = s[i / 2 * 4 + 2 * r + i % 2];
                x = power(x - top);
                own += x;
            }
            sum[r] = fmaf(sum[r], fade, own);
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 4; ++i) o[i / 2 * 4 + 2 * r + i % 2] *= fade;
        }
#pragma unroll
        for (int i = 0; i < BLOCK / 2; i += 2) {
            const int row = fragment_row() + 8 * (i / 2 % 2), column = i / 4 * 8 + fragment_column();
            store_pair(sh.weights + row * WEIGHT_PITCH + column, s[i], s[i + 1]);
        }
        __syncwarp();
        add_product<HEAD_DIM, false>(o, sh.weights, v, 0);
        if (n < m.block) {
            __syncthreads();
            advance_factor(sh, p, keys.tile, m.head);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        const float inverse = sum[r] > 0.f ? 1.f / sum[r] : 0.f;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 4; ++i) o[i / 2 * 4 + 2 * r + i % 2] *= inverse;
        const int row = fragment_row() + 8 * r;
        if (threadIdx.x % 4 == 0 && row < m.count) {
            p.lse[size_t(m.row + row) * p.heads + m.head] = (maximum[r] + log2f(sum[r])) * LN_2;
        }
    }
    store_rows<HEAD_DIM>(p.o, o, p.heads, m.head, p.head_dim, m.row, m.count, 0, 1.f);
    if (threadIdx.x == 0) {
        atomicAdd(p.blocks + 2 * m.head, u64(m.block + 1 - oldest_visited(p, m)));
        atomicAdd(p.blocks + 2 * m.head + 1, u64(m.block + 1 - oldest_visible(p, m)));
    }
}
