// PaTH attention, backward: the own block of each tile, and the sums over tiles; see path.cuh.
#define WARPS_ACROSS 2
#include "path.cuh"

// Statistics of the rows of a tile, and gates of its queries and of a block of keys.
struct RowShared {
    float lse[BLOCK], delta[BLOCK];
    float2 queries[BLOCK], keys[BLOCK];
    float sums[4 * BLOCK];  // partial sums of rows, or of columns
};

DEVICE void load_row(RowShared& sh, const PathParams& p, const PathTile& t, int head) {
    const int r = threadIdx.x;
    if (r >= BLOCK) return;
    const size_t at = size_t(t.row + r) * p.heads + head;
    // Rows beyond the tile have no weight.
    sh.lse[r] = r < t.rows ? p.lse[at] * LOG2_E : -NEG_INF;
    sh.delta[r] = r < t.rows ? p.delta[at] : 0.f;
    sh.queries[r] = make_float2(0.f, 0.f);
    if (p.gates && r < t.rows) {
        sh.queries[r] = p.gates[size_t(head) * p.gate_stride + t.gates + t.local * BLOCK + t.lane + r];
    }
}
DEVICE void load_keys(RowShared& sh, const PathParams& p, const PathTile& t, int head, int local) {
    if (p.gates && threadIdx.x < BLOCK) {
        sh.keys[threadIdx.x] = p.gates[size_t(head) * p.gate_stride + t.gates + local * BLOCK + threadIdx.x];
    }
}
// Turns products of queries and keys into weights `s`, and gradients `g` of weights into those of scores, without the
// scale. `limit`: keys that row 0 sees, one more for each row. Rows beyond the tile would see keys beyond the segment,
// whose gates are undefined: both are 0 there.
DEVICE void score_gradients(Square& s, Square& g, const PathParams& p, const RowShared& sh, int rows, int limit) {
    const float scale = p.scale * LOG2_E;
    if (!Square::active()) return;
#pragma unroll
    for (int m = 0; m < Square::FM; ++m)
#pragma unroll
        for (int n = 0; n < Square::FN; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int i = Square::row_of(m, e), j = Square::column_of(n, e);
                float x = s.c[m][n][e] * scale - sh.lse[i];
                if (p.gates) x += gate_difference(sh.queries[i], sh.keys[j]);
                const bool visible = i < rows && j < limit + i;
                const float weight = visible ? power(x) : 0.f;
                s.c[m][n][e] = weight;
                g.c[m][n][e] = visible ? weight * (g.c[m][n][e] - sh.delta[i]) : 0.f;
            }
}

struct OwnShared {
    alignas(16) real q[ROWS], u[ROWS];
    alignas(16) real keys[ROWS];  // keys, values, then keys
    alignas(16) real d[ROWS];     // gradients of the output, then of the query at the start of the block
    alignas(16) real t[SQUARES], m[SQUARES], r[SQUARES];
    alignas(16) real n[SQUARES];  // N, then the gradient of R
    alignas(16) real a[SQUARES];  // weights, gradients of scores, then of tril(Q U^T)
    RowShared rows;
};

static_assert(sizeof(OwnShared) <= OWN_BYTES);

// Stores an accumulator for the tile's block and head.
template <int M, int N>
DEVICE void store_own(float* out, Accumulator<M, N>& c, const PathParams& p, int block, int head) {
    float* to = out + (size_t(block) * p.head_count + head - p.head0) * M * N;
    c.each([&](int i, int j, float x) { to[i * N + j] = x; });
}

// Grid (tiles, heads of this launch): gradients of queries, and what the own block of a tile contributes to others.
extern "C" __global__ void __launch_bounds__(THREADS) path_bwd_own(const __grid_constant__ PathParams p) {
    SHARED(OwnShared, sh);
    const int tile = p.tile0 + blockIdx.x, head = p.head0 + blockIdx.y, kv_head = head / (p.heads / p.kv_heads);
    const PathTile t = p.tiles[tile];
    const PathBlock own = p.blocks[t.block];
    copy_queries(sh.q, p.q, p, t, head);
    copy_keys(sh.keys, p.k, p, own, kv_head);
    copy_queries(sh.d, p.d_out, p, t, head);
    copy_square<BLOCK>(sh.t, block_scratch(p.t, p, t.block, kv_head, BLOCK * BLOCK));
    copy_square<BLOCK>(sh.n, block_scratch(p.n, p, t.block, kv_head, BLOCK * BLOCK));
    load_reflections(sh.u, p, own, kv_head);
    load_row(sh.rows, p, t, head);
    load_keys(sh.rows, p, t, head, t.local);
    wait();
    Square along = {};
    along.template add<D, RowMajor, Transposed>(sh.q, RP, sh.u, RP);
    keep_lower<false>(along, t.lane);
    along.store(sh.m, SP);
    __syncthreads();
    Square r = {};
    r.template add<BLOCK, RowMajor, RowMajor>(sh.m, SP, sh.t, SP);
    r.store(sh.r, SP);
    __syncthreads();
    Square s = {}, g = {};
    s.template add<BLOCK, RowMajor, RowMajor>(sh.r, SP, sh.n, SP);
    negate(s);
    s.template add<D, RowMajor, Transposed>(sh.q, RP, sh.keys, RP);
    __syncthreads();
    copy_keys(sh.keys, p.v, p, own, kv_head);
    wait();
    g.template add<D, RowMajor, Transposed>(sh.d, RP, sh.keys, RP);
    score_gradients(s, g, p, sh.rows, t.rows, t.lane + 1);
    s.store(sh.a, SP);
    g.row_sums(sh.rows.sums, [](int, int, float x) { return x; });
    __syncthreads();
    if (threadIdx.x < BLOCK) {
        const bool valid = threadIdx.x < t.rows;
        float* to = p.row_sums + size_t(head) * p.row_sum_stride + t.sums + threadIdx.x;
        float sum = valid ? *to + Square::finish_row_sum(sh.rows.sums, threadIdx.x) : 0.f;
        if (t.local >= p.sizes[0]) sum = group_mean(sum, t.rows);
        if (valid) *to = sum;
    }
    Rows dv = {};
    dv.template add<BLOCK, Transposed, RowMajor>(sh.a, SP, sh.d, RP);
    store_own(p.dv_own, dv, p, t.block, head);
    __syncthreads();
    // From here on, `keys` are keys, `d` is the gradient of x, and `a` that of the scores.
    copy_keys(sh.keys, p.k, p, own, kv_head);
    copy_scratch_rows(sh.d, p.dx_start + (size_t(tile - p.tile0) * p.head_count + head - p.head0) * BLOCK * D);
    // Sums of rows and columns are of the same f32 values: what rounding adds would not cancel in the gradient of gates.
    if (p.gates) g.column_sums(sh.rows.sums);
    g.each([&](int, int, float& x) { x *= p.scale; });
    g.store(sh.a, SP);
    wait();
    if (p.gates && threadIdx.x < BLOCK) {
        p.column_sums[size_t(head) * p.gate_stride + t.gates + t.local * BLOCK + threadIdx.x] +=
            Square::finish_column_sum(sh.rows.sums, threadIdx.x);
    }
    // S = Q K^T - R N and x = Q - R U.
    Rows dq = {};
    dq.template add<BLOCK, RowMajor, RowMajor>(sh.a, SP, sh.keys, RP);
    dq.each([&](int i, int j, float& x) { x += to_float(sh.d[i * RP + j]); });
    Rows dk = {};
    dk.template add<BLOCK, Transposed, RowMajor>(sh.a, SP, sh.q, RP);
    store_own(p.dk_own, dk, p, t.block, head);
    Square dn = {};
    dn.template add<BLOCK, Transposed, RowMajor>(sh.r, SP, sh.a, SP);
    negate(dn);
    store_own(p.dn_own, dn, p, t.block, head);
    Square dr = {};
    dr.template add<BLOCK, RowMajor, Transposed>(sh.a, SP, sh.n, SP);
    dr.template add<D, RowMajor, Transposed>(sh.d, RP, sh.u, RP);
    negate(dr);
    Rows du = {};
    du.template add<BLOCK, Transposed, RowMajor>(sh.r, SP, sh.d, RP);
    negate(du);
    __syncthreads();
    dr.store(sh.n, SP);
    __syncthreads();
    // R = tril(Q U^T) T.
    Square dt = {};
    dt.template add<BLOCK, Transposed, RowMajor>(sh.m, SP, sh.n, SP);
    store_own(p.dt_own, dt, p, t.block, head);
    Square dm = {};
    dm.template add<BLOCK, RowMajor, Transposed>(sh.n, SP, sh.t, SP);
    keep_lower<false>(dm, t.lane);
    dm.store(sh.a, SP);
    __syncthreads();
    dq.template add<BLOCK, RowMajor, RowMajor>(sh.a, SP, sh.u, RP);
    du.template add<BLOCK, Transposed, RowMajor>(sh.a, SP, sh.q, RP);
    store_own(p.du_own, du, p, t.block, head);
    dq.store_rows(query_rows(p.dq, p, t.row, head), t.rows, size_t(p.heads) * p.head_dim, p.head_dim);
}

struct KeysShared {
    alignas(16) real kh[ROWS], v[ROWS], x[ROWS], d_out[ROWS], dx[ROWS];
    alignas(16) real w[SQUARES], g[SQUARES];
    RowShared rows;
};

static_assert(sizeof(KeysShared) <= KEYS_BYTES);

// Grid (blocks, key heads of this launch): adds the gradients of the block over the tiles of this launch that visited
// it.
extern "C" __global__ void __launch_bounds__(THREADS) path_bwd_keys(const __grid_constant__ PathParams p) {
    SHARED(KeysShared, sh);
    const int group = p.heads / p.kv_heads, first_head = p.head0 / group;
    const int block = blockIdx.x, kv_head = first_head + blockIdx.y;
    const PathBlock b = p.blocks[block];
    const int begin = max(b.tile_begin, p.tile0), end = min(b.tile_end, p.tile0 + p.tile_step);
    if (begin >= end) return;
    const size_t at = size_t(block) * (p.head_count / group) + blockIdx.y;
    float *dkh_sums = p.dkh_sums + at * BLOCK * D, *dv_sums = p.dv_sums + at * BLOCK * D;
    float* de_sums = p.de_sums + at * D * D;
    Rows dkh = {}, dv = {};
    Accumulator<D, D> de = {};
    dkh.each([&](int i, int j, float& x) { x = dkh_sums[i * D + j]; });
    dv.each([&](int i, int j, float& x) { x = dv_sums[i * D + j]; });
    de.each([&](int i, int j, float& x) { x = de_sums[i * D + j]; });
    copy_scratch_rows(sh.kh, block_scratch(p.kh, p, block, kv_head, BLOCK * D));
    copy_keys(sh.v, p.v, p, b, kv_head);
    for (int h = 0; h < group; ++h) {
        const int head = kv_head * group + h;
        float column = 0.f;
        for (int tile = begin; tile < end; ++tile) {
            if (p.first[size_t(head) * p.tile_count + tile] > b.local) continue;
            const PathTile t = p.tiles[tile];
            const size_t n = size_t(t.slots - p.slot0) + b.local - own_span(p, t);
            const size_t slot = ((head - p.head0) * size_t(p.slot_count) + n) * BLOCK * D;
            copy_scratch_rows(sh.x, p.x + slot);
            copy_scratch_rows(sh.dx, p.dx + slot);
            copy_queries(sh.d_out, p.d_out, p, t, head);
            load_row(sh.rows, p, t, head);
            load_keys(sh.rows, p, t, head, b.local);
            wait();
            Square s = {}, g = {};
            s.template add<D, RowMajor, Transposed>(sh.x, RP, sh.kh, RP);
            g.template add<D, RowMajor, Transposed>(sh.d_out, RP, sh.v, RP);
            score_gradients(s, g, p, sh.rows, t.rows, BLOCK);
            s.store(sh.w, SP);
            g.store(sh.g, SP);
            if (p.gates) g.column_sums(sh.rows.sums);
            __syncthreads();
            if (p.gates && threadIdx.x < BLOCK) column += Square::finish_column_sum(sh.rows.sums, threadIdx.x);
            dv.template add<BLOCK, Transposed, RowMajor>(sh.w, SP, sh.d_out, RP);
            // path_bwd_prepare applies the scale of the scores.
            dkh.template add<BLOCK, Transposed, RowMajor>(sh.g, SP, sh.x, RP);
            de.template add<BLOCK, Transposed, RowMajor>(sh.x, RP, sh.dx, RP);
            __syncthreads();
        }
        if (p.gates && threadIdx.x < BLOCK) {
            p.column_sums[size_t(head) * p.gate_stride + b.gates + threadIdx.x] += column;
        }
    }
    copy_wait<0>();
    dkh.each([&](int i, int j, float x) { dkh_sums[i * D + j] = x; });
    dv.each([&](int i, int j, float x) { dv_sums[i * D + j] = x; });
    de.each([&](int i, int j, float x) { de_sums[i * D + j] = x; });
}
