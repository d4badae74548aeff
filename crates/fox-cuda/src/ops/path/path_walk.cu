// PaTH attention, walks of queries: forward, the stored queries of the backward, and the gradients of queries at older
// blocks; see path.cuh. Grid (tiles, query heads); a warp has 16 queries.
#include "path_queries.cuh"

// The two queries of a thread.
struct Pair {
    float2 gates[2];
    DEVICE Pair(const PathParams& p, const PathTile& t, int head) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = Square::row_of(0, 2 * i);
            gates[i] = make_float2(0.f, 0.f);
            if (p.gates && row < t.rows) {
                gates[i] = p.gates[size_t(head) * p.gate_stride + t.gates + t.local * BLOCK + t.lane + row];
            }
        }
    }
};
// Gates of a block of keys.
DEVICE void load_gates(float2* to, const PathParams& p, const PathTile& t, int head, int local) {
    if (p.gates && threadIdx.x < BLOCK) {
        to[threadIdx.x] = p.gates[size_t(head) * p.gate_stride + t.gates + local * BLOCK + threadIdx.x];
    }
}
// Scores in base 2, with their decay. `limit`: keys that row 0 sees, one more for each row; all for an older block.
DEVICE void finish_scores(Square& s, const PathParams& p, const Pair& q, const float2* keys, int limit) {
    const float scale = p.scale * LOG2_E;
#pragma unroll
    for (int n = 0; n < Square::FN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = Square::row_of(0, e), column = Square::column_of(n, e);
            float x = s.c[0][n][e] * scale;
            if (p.gates) x += gate_difference(q.gates[e / 2], keys[column]);
            s.c[0][n][e] = column < limit + row ? x : NEG_INF;
        }
}

struct WalkShared {
    struct Stage {
        alignas(16) real kh[ROWS], v[ROWS], e[tile_size(D, D)];
        float2 gates[BLOCK];
    } stages[STAGES];
    alignas(16) real x[ROWS];
    alignas(16) real t[SQUARES], n[SQUARES], square[SQUARES];
};

// Keys and values have room for a product of the walk over spans.
static_assert(sizeof(WalkShared) <= FORWARD_BYTES && tile_size(D, D) <= 2 * ROWS);

// Maxima and sums of a thread's two rows, in base 2.
struct Statistics {
    float top[2] = {-1e30f, -1e30f}, sum[2] = {0.f, 0.f};

    // Turns scores into weights relative to the new maxima, and rescales earlier results.
    DEVICE void soften(Square& s, Rows& o) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float most = top[i];
#pragma unroll
            for (int n = 0; n < Square::FN; ++n) most = fmaxf(most, fmaxf(s.c[0][n][2 * i], s.c[0][n][2 * i + 1]));
            most = quad_max(most);
            const float factor = power(top[i] - most);
            top[i] = most;
            sum[i] *= factor;
#pragma unroll
            for (int n = 0; n < Square::FN; ++n)
#pragma unroll
                for (int e = 2 * i; e < 2 * i + 2; ++e) {
                    s.c[0][n][e] = power(s.c[0][n][e] - most);
                    sum[i] += s.c[0][n][e];
                }
#pragma unroll
            for (int n = 0; n < Rows::FN; ++n) o.c[0][n][2 * i] *= factor, o.c[0][n][2 * i + 1] *= factor;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) path_fwd(const __grid_constant__ PathParams p) {
    SHARED(WalkShared, sh);
    // The longest tiles first.
    const int tile = gridDim.x - 1 - blockIdx.x;
    const PathTile t = p.tiles[tile];
    const int head = blockIdx.y, kv_head = head / (p.heads / p.kv_heads), first_block = t.block - t.local;
    const PathBlock own = p.blocks[t.block];
    const int visited = first_visited(p, t, head), older = t.local - max(visited, own_span(p, t));
    if (threadIdx.x == 0) {
        atomicAdd(p.counts + 2 * head, u64(t.local - visited + 1));
        atomicAdd(p.counts + 2 * head + 1, u64(t.local + 1));
    }
    const Pair q(p, t, head);
    Rows x, o = {};
    Statistics rows;
    {
        WalkShared::Stage& stage = sh.stages[0];
        copy_queries(sh.x, p.q, p, t, head);
        copy_keys(stage.e, p.k, p, own, kv_head);
        copy_keys(stage.v, p.v, p, own, kv_head);
        copy_square<BLOCK>(sh.t, block_scratch(p.t, p, t.block, kv_head, BLOCK * BLOCK));
        copy_square<BLOCK>(sh.n, block_scratch(p.n, p, t.block, kv_head, BLOCK * BLOCK));
        load_reflections(stage.kh, p, own, kv_head);
        load_gates(stage.gates, p, t, head, t.local);
        wait();
        start_queries(x, sh.square, sh.x, stage.kh, sh.t, t.lane);
        Square s = {};
        s.template add<BLOCK, RowMajor, RowMajor>(sh.square, SP, sh.n, SP);
        negate(s);
        s.template add<D, RowMajor, Transposed>(sh.x, RP, stage.e, RP);
        finish_scores(s, p, q, stage.gates, t.lane + 1);
        rows.soften(s, o);
        __syncwarp();
        s.store(sh.square, SP);
        __syncwarp();
        o.template add<BLOCK, RowMajor, RowMajor>(sh.square, SP, stage.v, RP);
        __syncthreads();
    }
    auto prefetch = [&](int n) {
        const int local = t.local - 1 - n, block = first_block + local;
        WalkShared::Stage& stage = sh.stages[n % STAGES];
        copy_scratch_rows(stage.kh, block_scratch(p.kh, p, block, kv_head, BLOCK * D));
        copy_keys(stage.v, p.v, p, p.blocks[block], kv_head);
        copy_square<D>(stage.e, block_scratch(p.e, p, block, kv_head, D * D));
        load_gates(stage.gates, p, t, head, local);
        copy_commit();
    };
    if (STAGES > 1 && older > 0) prefetch(0);
    for (int n = 0; n < older; ++n) {
        x.store(sh.x, RP);
        if (STAGES == 1) prefetch(n);
        copy_wait<0>();
        __syncthreads();
        if (STAGES > 1 && n + 1 < older) prefetch(n + 1);
        const WalkShared::Stage& stage = sh.stages[n % STAGES];
        Square s = {};
        s.template add<D, RowMajor, Transposed>(sh.x, RP, stage.kh, RP);
        x.template add<D, RowMajor, RowMajor>(sh.x, RP, stage.e, RP);
        finish_scores(s, p, q, stage.gates, BLOCK);
        rows.soften(s, o);
        s.store(sh.square, SP);
        __syncwarp();
        o.template add<BLOCK, RowMajor, RowMajor>(sh.square, SP, stage.v, RP);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float sum = quad_sum(rows.sum[i]);
        const int row = Square::row_of(0, 2 * i);
        const float factor = 1.f / sum;
#pragma unroll
        for (int n = 0; n < Rows::FN; ++n) o.c[0][n][2 * i] *= factor, o.c[0][n][2 * i + 1] *= factor;
        if (threadIdx.x % 4 == 0 && row < t.rows) {
            p.lse[size_t(t.row + row) * p.heads + head] = (rows.top[i] + log2f(sum)) * LN_2;
        }
    }
    o.store_rows(query_rows(p.o, p, t.row, head), t.rows, size_t(p.heads) * p.head_dim, p.head_dim);
    walk_older_spans(x, sh.x, sh.stages[0].e, sh.stages[0].kh, p, t, tile, head);
}

struct QueriesShared {
    alignas(16) real x[ROWS], u[ROWS];
    alignas(16) real t[SQUARES], square[SQUARES];
    alignas(16) real e[tile_size(D, D)];
};

static_assert(sizeof(QueriesShared) <= QUERIES_BYTES);

// Scratch of a tile at older block `local`: 64 x D elements.
DEVICE real* slot(real* x, const PathParams& p, const PathTile& t, int head, int local) {
    const size_t n = size_t(t.slots - p.slot0) + local - own_span(p, t);
    return x + ((head - p.head0) * size_t(p.slot_count) + n) * BLOCK * D;
}
// Scratch of a tile: 64 x D elements.
DEVICE real* tile_scratch(real* x, const PathParams& p, int tile, int head) {
    return x + (size_t(tile - p.tile0) * p.head_count + head - p.head0) * BLOCK * D;
}

// Queries as they meet each older block, and <d_out, o> of every query.
extern "C" __global__ void __launch_bounds__(THREADS) path_queries(const __grid_constant__ PathParams p) {
    SHARED(QueriesShared, sh);
    const int tile = p.tile0 + gridDim.x - 1 - blockIdx.x, head = p.head0 + blockIdx.y;
    const PathTile t = p.tiles[tile];
    const int kv_head = head / (p.heads / p.kv_heads), first_block = t.block - t.local;
    const int first = max(first_visited(p, t, head), own_span(p, t));
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) p.first[size_t(head) * p.tile_count + tile] = first;
    for (int r = warp; r < t.rows; r += THREADS / 32) {
        const real *o = query_rows(p.o, p, t.row + r, head), *d = query_rows(p.d_out, p, t.row + r, head);
        float sum = 0.f;
        for (int c = lane; c < p.head_dim; c += 32) sum += to_float(o[c]) * to_float(d[c]);
        sum = warp_sum(sum);
        if (lane == 0) p.delta[size_t(t.row + r) * p.heads + head] = sum;
    }
    if (first == t.local) return;
    copy_queries(sh.x, p.q, p, t, head);
    copy_square<BLOCK>(sh.t, block_scratch(p.t, p, t.block, kv_head, BLOCK * BLOCK));
    load_reflections(sh.u, p, p.blocks[t.block], kv_head);
    wait();
    Rows x;
    start_queries(x, sh.square, sh.x, sh.u, sh.t, t.lane);
    for (int local = t.local - 1; local >= first; --local) {
        x.store(slot(p.x, p, t, head, local), D);
        if (local == first) break;
        __syncwarp();
        x.store(sh.x, RP);
        __syncthreads();
        copy_square<D>(sh.e, block_scratch(p.e, p, first_block + local, kv_head, D * D));
        wait();
        x.template add<D, RowMajor, RowMajor>(sh.x, RP, sh.e, RP);
    }
}

struct BackWalkShared {
    alignas(16) real d_out[ROWS], kh[ROWS], dx[ROWS];
    // Queries and values, then E.
    alignas(16) real both[2 * ROWS];
    alignas(16) real g[SQUARES];
    float2 gates[BLOCK];
};
static_assert(sizeof(BackWalkShared) <= BACK_WALK_BYTES && tile_size(D, D) <= 2 * ROWS);

// Turns scores into weights `s`, and gradients of weights `g` into those of scores times the scale; returns the sums of
// the gradients of scores of both rows.
DEVICE void score_gradients(Square& s, Square& g, const PathParams& p, const float (&lse)[2], const float (&delta)[2],
                            float (&sums)[2]) {
#pragma unroll
    for (int n = 0; n < Square::FN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float weight = power(s.c[0][n][e] - lse[e / 2]);
            const float ds = weight * (g.c[0][n][e] - delta[e / 2]);
            sums[e / 2] += ds;
            s.c[0][n][e] = weight;
            g.c[0][n][e] = ds * p.scale;
        }
}

// Gradients of the queries at older blocks, from the oldest one on: `dx` of each slot is the gradient of the query that
// the next older block meets, and `dx_start` that of the query at the start of its block.
extern "C" __global__ void __launch_bounds__(THREADS) path_bwd_walk(const __grid_constant__ PathParams p) {
    SHARED(BackWalkShared, sh);
    const int tile = p.tile0 + gridDim.x - 1 - blockIdx.x, head = p.head0 + blockIdx.y;
    const PathTile t = p.tiles[tile];
    const int kv_head = head / (p.heads / p.kv_heads), first_block = t.block - t.local;
    const int first = p.first[size_t(head) * p.tile_count + tile];
    const Pair q(p, t, head);
    float lse[2], delta[2], sums[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = Square::row_of(0, 2 * i);
        const size_t at = size_t(t.row + row) * p.heads + head;
        // Rows beyond the tile have no weight.
        lse[i] = row < t.rows ? p.lse[at] * LOG2_E : -NEG_INF;
        delta[i] = row < t.rows ? p.delta[at] : 0.f;
    }
    copy_queries(sh.d_out, p.d_out, p, t, head);
    Rows dx = {};
    if (t.local >= p.sizes[0]) {
        const float* from = p.dx_spans + (size_t(tile) * p.heads + head) * BLOCK * D;
        dx.each([&](int i, int j, float& y) { y = from[i * D + j]; });
    }
    for (int local = first; local < t.local; ++local) {
        const int block = first_block + local;
        copy_scratch_rows(sh.both, slot(p.x, p, t, head, local));
        copy_keys(sh.both + ROWS, p.v, p, p.blocks[block], kv_head);
        copy_scratch_rows(sh.kh, block_scratch(p.kh, p, block, kv_head, BLOCK * D));
        load_gates(sh.gates, p, t, head, local);
        dx.store(sh.dx, RP);
        dx.store(slot(p.dx, p, t, head, local), D);
        wait();
        Square s = {}, g = {};
        s.template add<D, RowMajor, Transposed>(sh.both, RP, sh.kh, RP);
        g.template add<D, RowMajor, Transposed>(sh.d_out, RP, sh.both + ROWS, RP);
        finish_scores(s, p, q, sh.gates, BLOCK);
        score_gradients(s, g, p, lse, delta, sums);
        g.store(sh.g, SP);
        __syncthreads();
        copy_square<D>(sh.both, block_scratch(p.e, p, block, kv_head, D * D));
        wait();
        dx.template add<BLOCK, RowMajor, RowMajor>(sh.g, SP, sh.kh, RP);
        dx.template add<D, RowMajor, Transposed>(sh.dx, RP, sh.both, RP);
        __syncthreads();
    }
    copy_wait<0>();
    dx.store(tile_scratch(p.dx_start, p, tile, head), D);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float sum = quad_sum(sums[i]);
        const int row = Square::row_of(0, 2 * i);
        if (threadIdx.x % 4 == 0 && row < t.rows) p.row_sums[size_t(head) * p.row_sum_stride + t.sums + row] += sum;
    }
}
