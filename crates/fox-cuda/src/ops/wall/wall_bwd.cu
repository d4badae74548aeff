// Wall attention, backward, after wall_prepare and wall_own_scores; see wall.cuh.
//
// One kernel over blocks of keys (gradients of `far`, dV, and of the scores inside blocks), one over blocks of queries
// (gradients of `x`), and wall_finish, which combines them with the pairs inside blocks. The gradient of the summed log
// decays is q dq - k dk per channel; its suffix sums are those of the log decays. Thread blocks share no output, so
// results are deterministic.
//
// Compile-time: HEAD_DIM, WIDE, GATES, SHARED_BYTES.
#include "wall.cuh"

constexpr int COLUMN_SPLITS = HEAD_DIM > 128 ? 2 : 1;  // thread blocks that share the columns of the keys' gradients
constexpr int SPLIT_COLUMNS = HEAD_DIM / COLUMN_SPLITS;
constexpr int CHANNELS = 32;                           // of a thread block of wall_finish

// delta[row, head] = <d_out, o>. Grid (rows / 4, heads), a warp per row.
extern "C" __global__ void __launch_bounds__(THREADS) wall_delta(const __grid_constant__ WallParams p) {
    const int row = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (row >= p.all_rows) return;
    float sum = 0.f;
    for (int c = threadIdx.x % 32; c < p.head_dim; c += 32) {
        const size_t at = element(p, row, blockIdx.y, c);
        sum = fmaf(to_float(p.d_out[at]), to_float(p.o[at]), sum);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) p.delta[size_t(row) * p.heads + blockIdx.y] = sum;
}

// Weights and gradients of scores, from scores and products of output gradients and values; both go to shared memory.
// Their sums over the thread's columns and rows are added to `rows` and `columns`.
DEVICE void score_gradients(Shared& sh, const WallParams& p, const Block& m, float (&s)[BLOCK / 2],
                            float (&dp)[BLOCK / 2], float (&rows)[2], float (&columns)[BLOCK / 4]) {
    float lse[2], delta[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const size_t at = size_t(m.row + min(fragment_row() + 8 * r, m.count - 1)) * p.heads + m.head;
        lse[r] = p.lse[at] * LOG2_E, delta[r] = p.delta[at];
    }
#pragma unroll
    for (int i = 0; i < BLOCK / 2; ++i) {
        const int r = i / 2 % 2;
        s[i] = power(s[i] - lse[r]);
        dp[i] = s[i] * (dp[i] - delta[r]);
        rows[r] += dp[i];
        columns[i / 4 * 2 + i % 2] += dp[i];
    }
#pragma unroll
    for (int i = 0; i < BLOCK / 2; i += 2) {
        const int row = fragment_row() + 8 * (i / 2 % 2), column = i / 4 * 8 + fragment_column();
        store_pair(sh.weights + row * WEIGHT_PITCH + column, s[i], s[i + 1]);
        store_pair(sh.grads + row * WEIGHT_PITCH + column, dp[i], dp[i + 1]);
    }
}

// Block-wide sums over the queries, from each thread's sums over its rows.
DEVICE void store_columns(Shared& sh, const float (&columns)[BLOCK / 4], float* out, int count) {
    __syncthreads();
#pragma unroll
    for (int c = 0; c < BLOCK / 4; ++c) {
        float sum = columns[c];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (threadIdx.x % 32 < 4) sh.columns[threadIdx.x / 32][c / 2 * 8 + fragment_column() + c % 2] = sum;
    }
    __syncthreads();
    const int c = threadIdx.x;
    if (c < count) out[c] = (sh.columns[0][c] + sh.columns[1][c]) + (sh.columns[2][c] + sh.columns[3][c]);
}

// Multiplies rows of x by the factors; in f32 they are multiplied where they are used. c += W^T (x factor), columns
// column0 .., of such rows.
#if WIDE
DEVICE void scale_rows(const Shared&, const Rows&) {}
DEVICE void scores_of_scaled(float (&s)[BLOCK / 2], const Shared& sh, const Rows& x, const Rows& far) {
    scaled_scores(s, sh, x, far);
}
template <int N>
DEVICE void add_scaled_product(float (&c)[N / 2], const Shared& sh, const real* w, const Rows& x, int column0) {
    for (int k = 0; k < BLOCK; ++k) {
        const float own[2] = {w[k * WEIGHT_PITCH + fragment_row()], w[k * WEIGHT_PITCH + fragment_row() + 8]};
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            const int column = column0 + i / 4 * 8 + fragment_column() + i % 2;
            c[i] = fmaf(own[i / 2 % 2], x.at(k, column) * sh.factor[column], c[i]);
        }
    }
}
#else
DEVICE void scale_rows(Shared& sh, const Rows& x) {
    for (int i = threadIdx.x; i < BLOCK * HEAD_DIM / 2; i += THREADS) {
        const int row = i / (HEAD_DIM / 2), c = i % (HEAD_DIM / 2) * 2;
        u32* pair = const_cast<u32*>(reinterpret_cast<const u32*>(x.x + row * PITCH + c));
        *pair = scale_pair(*pair, *reinterpret_cast<const float2*>(sh.factor + c));
    }
    __syncthreads();
}
DEVICE void scores_of_scaled(float (&s)[BLOCK / 2], const Shared&, const Rows& x, const Rows& far) {
    scores(s, x, far);
}
template <int N>
DEVICE void add_scaled_product(float (&c)[N / 2], const Shared&, const real* w, const Rows& x, int column0) {
    add_product<N, true>(c, w, x, column0);
}
#endif

// Stores an accumulator as f32 to columns column0 .. of rows of x[rows, heads * head_dim].
template <int N>
DEVICE void store_floats(float* x, const float (&c)[N / 2], const WallParams& p, const Block& b, int column0) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        const int row = fragment_row() + 8 * (i / 2 % 2), column = column0 + i / 4 * 8 + fragment_column() + i % 2;
        if (row < b.count && column < p.head_dim) x[element(p, b.row + row, b.head, column)] = c[i] * p.scale;
    }
}

// Gradients of `far` (f32, per query head) and of the values. Grid (tiles, key heads, COLUMN_SPLITS).
extern "C" __global__ void __launch_bounds__(THREADS) wall_bwd_keys(const __grid_constant__ WallParams p) {
    Shared& sh = shared_memory();
    const int kv_head = blockIdx.y, group = p.heads / p.kv_heads, column0 = blockIdx.z * SPLIT_COLUMNS;
    Block keys = block_at(p, blockIdx.x, kv_head * group);
    const int blocks = (keys.s.k_len + BLOCK - 1) / BLOCK;
    const Rows v = fetch_heads(sh, 1, p.v, p.kv_heads, kv_head, p.head_dim, keys.row, keys.count);
    float dv[SPLIT_COLUMNS / 2] = {};
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        keys = block_of(p, keys.s, keys.block, head);
        __syncthreads();
        const Rows far = fetch_heads(sh, 0, p.far, p.heads, head, p.head_dim, keys.row, keys.count);
        start_factor(sh);
        float dfar[SPLIT_COLUMNS / 2] = {}, columns[BLOCK / 4] = {}, rows[2] = {};
        for (int block = keys.block; block < blocks; ++block) {
            const Block m = block_of(p, keys.s, block, head);
            if (oldest_block(p, m) > keys.block) break;
            __syncthreads();
            const Rows x = fetch_heads(sh, 2, p.x, p.heads, head, p.head_dim, m.row, m.count);
            const Rows d_out = fetch_heads(sh, 3, p.d_out, p.heads, head, p.head_dim, m.row, m.count);
            Prefix frame[2] = {};
            load_gates(sh, m, keys.block, frame);
            wait_for_rows();
            float s[BLOCK / 2], dp[BLOCK / 2];
            if (block == keys.block) {
                load_own(s, p.own + own_tile(p, m), m);
            } else {
                scale_rows(sh, x);
                scores_of_scaled(s, sh, x, far);
            }
            finish_scores(s, sh, p, m, keys.block, frame);
            scores(dp, d_out, v);
            score_gradients(sh, p, m, s, dp, rows, columns);
            __syncthreads();
            add_product<SPLIT_COLUMNS, true>(dv, sh.weights, d_out, column0);
            if (block == keys.block) {
                if (blockIdx.z == 0) {
                    float* own = p.down + own_tile(p, m);
#pragma unroll
                    for (int i = 0; i < BLOCK / 2; ++i) {
                        const int row = fragment_row() + 8 * (i / 2 % 2);
                        own[row * BLOCK + i / 4 * 8 + fragment_column() + i % 2] = dp[i];
                    }
                }
            } else {
                add_scaled_product<SPLIT_COLUMNS>(dfar, sh, sh.grads, x, column0);
                __syncthreads();
                advance_factor(sh, p, m.tile, head);
            }
        }
        if (GATES && blockIdx.z == 0) {
            store_columns(sh, columns, p.column_sums + size_t(head) * p.gate_stride + keys.s.c_base + keys.first,
                          keys.count);
        }
        store_floats<SPLIT_COLUMNS>(p.dfar, dfar, p, keys, column0);
    }
    store_rows<SPLIT_COLUMNS>(p.dv, dv, p.kv_heads, kv_head, p.head_dim, keys.row, keys.count, column0, 1.f);
}

// Gradients of `x` (f32), and row sums. Grid (tiles, heads). Runs after wall_bwd_keys.
extern "C" __global__ void __launch_bounds__(THREADS) wall_bwd_queries(const __grid_constant__ WallParams p) {
    Shared& sh = shared_memory();
    const Block m = block_at(p, blockIdx.x, blockIdx.y);
    const int oldest = oldest_block(p, m);
    const Rows x = fetch_heads(sh, 0, p.x, p.heads, m.head, p.head_dim, m.row, m.count);
    const Rows d_out = fetch_heads(sh, 1, p.d_out, p.heads, m.head, p.head_dim, m.row, m.count);
    start_factor(sh);
    float dx[HEAD_DIM / 2] = {}, rows[2] = {}, columns[BLOCK / 4] = {};
    if (GATES) {
        // Of the own block.
        float ds[BLOCK / 2];
        load_own(ds, p.down + own_tile(p, m), m);
#pragma unroll
        for (int i = 0; i < BLOCK / 2; ++i) rows[i / 2 % 2] += ds[i];
    }
    for (int n = m.block - 1; n >= oldest; --n) {
        const Block keys = block_of(p, m.s, n, m.head);
        __syncthreads();
        const Rows far = fetch_heads(sh, 2, p.far, p.heads, m.head, p.head_dim, keys.row, keys.count);
        const Rows v = fetch_heads(sh, 3, p.v, p.kv_heads, m.kv_head, p.head_dim, keys.row, keys.count);
        Prefix frame[2] = {};
        load_gates(sh, m, n, frame);
        wait_for_rows();
        float s[BLOCK / 2], dp[BLOCK / 2];
        scores(dp, d_out, v);
        scaled_scores(s, sh, x, far);
        finish_scores(s, sh, p, m, n, frame);
        score_gradients(sh, p, m, s, dp, rows, columns);
        __syncwarp();
#pragma unroll
        for (int c0 = 0; c0 < HEAD_DIM; c0 += 32) {
            float part[16] = {};
            add_product<32, false>(part, sh.grads, far, c0);
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                dx[c0 / 2 + i] = fmaf(part[i], sh.factor[c0 + i / 4 * 8 + fragment_column() + i % 2], dx[c0 / 2 + i]);
            }
        }
        __syncthreads();
        advance_factor(sh, p, keys.tile, m.head);
    }
    store_floats<HEAD_DIM>(p.dx, dx, p, m, 0);
    if (GATES) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = quad_sum(rows[r]);
            const size_t tile = size_t(m.head) * p.tile_count + m.tile;
            if (threadIdx.x % 4 == 0) p.row_sums[tile * BLOCK + fragment_row() + 8 * r] = sum;
        }
    }
}

// dq, dk per query head (f32) and the gradient of the sums of log decays. Lanes are channels; warps share the rows.
// Grid (tiles, heads, channels / CHANNELS).
extern "C" __global__ void __launch_bounds__(THREADS) wall_finish(const __grid_constant__ WallParams p) {
    __shared__ float ds[BLOCK * BLOCK], qs[BLOCK][CHANNELS], ks[BLOCK][CHANNELS], es[BLOCK][CHANNELS];
    const Block b = block_at(p, blockIdx.x, blockIdx.y);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = blockIdx.z * CHANNELS + lane;
    const float* own = p.down + own_tile(p, b);
    for (int i = threadIdx.x; i < BLOCK * BLOCK; i += THREADS) {
        const int row = i / BLOCK, column = i % BLOCK;
        ds[i] = column <= row && row < b.count ? own[i] * p.scale : 0.f;
    }
    for (int i = warp; i < BLOCK; i += THREADS / 32) {
        const bool there = i < b.count && c < p.head_dim;
        const size_t at = there ? element(p, b.row + i, b.head, c) : 0;
        qs[i][lane] = there ? to_float(p.q[at]) : 0.f;
        ks[i][lane] = there ? to_float(p.k[key_element(p, b.row + i, b.kv_head, c)]) : 0.f;
        es[i][lane] = there ? p.e[at] : 1.f;
    }
    __syncthreads();
    if (c >= p.head_dim) return;
    for (int t = warp; t < b.count; t += THREADS / 32) {
        const size_t at = element(p, b.row + t, b.head, c);
        float dq = 0.f, factor = 1.f;
        for (int j = 0; j <= t; ++j) {
            factor *= es[j][lane];
            dq = fmaf(dq, es[j][lane], ds[t * BLOCK + j] * ks[j][lane]);
        }
        float dx = p.dx[at], dfar = p.dfar[at];
        const float lead = factor;
        float dk = 0.f;
        factor = 1.f;
        for (int i = b.count - 1; i > t; --i) {
            factor *= es[i][lane];
            dk = fmaf(ds[i * BLOCK + t], qs[i][lane], dk) * es[i][lane];
        }
        dk = fmaf(ds[t * BLOCK + t], qs[t][lane], dk);
        // The sums over queries and over keys are equal, and their difference is the result: both with the rounded
        // factors of the products.
        const float over_keys = to_float(p.x[at]) * dx + qs[t][lane] * dq;
        const float over_queries = to_float(p.far[at]) * dfar + ks[t][lane] * dk;
        float difference = over_keys - over_queries;
        if (p.dx_older) dx += p.dx_older[at], dfar += p.dfar_older[at], difference += p.difference_older[at];
        p.dq[at] = to_real(fmaf(dx, lead, dq));
        // In place of the gradients of `x` and `far`, which only this thread reads.
        p.dfar[at] = fmaf(dfar, factor, dk);
        p.dx[at] = difference;
    }
}

// dk[R, H_kv * d]: the sum over the query heads of a key head. Grid (rows / 4, key heads), a warp per row.
extern "C" __global__ void __launch_bounds__(THREADS) wall_sum_heads(const __grid_constant__ WallParams p) {
    const int group = p.heads / p.kv_heads, row = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (row >= p.all_rows) return;
    for (int c = threadIdx.x % 32; c < p.head_dim; c += 32) {
        float sum = 0.f;
        for (int h = 0; h < group; ++h) sum += p.dfar[element(p, row, blockIdx.y * group + h, c)];
        p.dk[key_element(p, row, blockIdx.y, c)] = to_real(sum);
    }
}

constexpr int BATCH = 16;  // values that a thread of the sums loads at once: stores would otherwise delay the next load

// Sums over each block of the gradient of the summed log decays, [tile][H * d]. Grid (tiles, heads).
extern "C" __global__ void __launch_bounds__(THREADS) wall_decay_totals(const __grid_constant__ WallParams p) {
    const Block b = block_at(p, blockIdx.x, blockIdx.y);
    for (int c = threadIdx.x; c < p.head_dim; c += THREADS) {
        double sum = 0.0;
#pragma unroll 16
        for (int t = 0; t < b.count; ++t) sum += p.dx[element(p, b.row + t, b.head, c)];
        p.totals[(size_t(b.tile) * p.heads + b.head) * p.head_dim + c] = sum;
    }
}

// Replaces the totals by the sums over the later blocks of the segment. Grid (segments, heads, channels / 32).
extern "C" __global__ void wall_decay_scan(const __grid_constant__ WallParams p) {
    const Segment s = p.segments[blockIdx.x];
    const int blocks = (s.k_len + BLOCK - 1) / BLOCK, head = blockIdx.y, c = blockIdx.z * 32 + threadIdx.x;
    if (c >= p.head_dim) return;
    double* totals = p.totals + (size_t(s.m_tile0) * p.heads + head) * p.head_dim + c;
    const size_t stride = size_t(p.heads) * p.head_dim;
    double later = 0.0;
    for (int last = blocks - 1; last >= 0; last -= BATCH) {
        double own[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) own[i] = last >= i ? totals[(last - i) * stride] : 0.0;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (last >= i) totals[(last - i) * stride] = later;
            later += own[i];
        }
    }
}

// dlog_decays: suffix sums; 0 for the first row of a segment, whose decay has no effect. Grid (tiles, heads).
extern "C" __global__ void __launch_bounds__(THREADS) wall_decay_gradient(const __grid_constant__ WallParams p) {
    const Block b = block_at(p, blockIdx.x, blockIdx.y);
    for (int c = threadIdx.x; c < p.head_dim; c += THREADS) {
        double sum = p.totals[(size_t(b.tile) * p.heads + b.head) * p.head_dim + c];
        for (int last = b.count - 1; last >= 0; last -= BATCH) {
            float own[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                own[i] = last >= i ? p.dx[element(p, b.row + last - i, b.head, c)] : 0.f;
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                if (last < i) break;
                sum += own[i];
                const bool is_first = b.first + last - i == 0;
                p.dlog_decays[element(p, b.row + last - i, b.head, c)] = is_first ? 0.f : float(sum);
            }
        }
    }
}
