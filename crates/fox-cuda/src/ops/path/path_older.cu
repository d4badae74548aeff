// PaTH attention, older spans of a tile: the virtual queries of the backward, gradients along the walk over spans, and
// the sum of the outputs of all spans; see path.cuh. Grid (tiles, query heads); a warp has 16 queries.
#include "path_queries.cuh"

struct SpanQueriesShared {
    alignas(16) real x[ROWS];
    alignas(16) real both[ROWS];  // reflections, then gradients of the output; with `t` and `square` then a product
    alignas(16) real t[SQUARES], square[SQUARES];
    alignas(16) real e[tile_size(D, D)];
    float delta[BLOCK];
};

static_assert(sizeof(SpanQueriesShared) <= SPAN_QUERIES_BYTES && tile_size(D, D) <= ROWS + 2 * SQUARES);

// What the backward of forgetting attention reads of every virtual query: x, the gradient of the output, and gate
// prefix, delta and statistics. Those beyond the tile have no weight.
extern "C" __global__ void __launch_bounds__(THREADS) path_span_queries(const __grid_constant__ PathParams p) {
    SHARED(SpanQueriesShared, sh);
    const int tile = gridDim.x - 1 - blockIdx.x, head = blockIdx.y, kv_head = head / (p.heads / p.kv_heads);
    const PathTile t = p.tiles[tile];
    if (t.local < p.sizes[0]) return;
    const OlderSpans older(p, t);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = threadIdx.x;
    copy_queries(sh.x, p.q, p, t, head);
    copy_square<BLOCK>(sh.t, block_scratch(p.t, p, t.block, kv_head, BLOCK * BLOCK));
    load_reflections(sh.both, p, p.blocks[t.block], kv_head);
    for (int row = warp; row < t.rows; row += THREADS / 32) {
        const real *o = query_rows(p.o, p, t.row + row, head), *d = query_rows(p.d_out, p, t.row + row, head);
        float sum = 0.f;
        for (int c = lane; c < p.head_dim; c += 32) sum += to_float(o[c]) * to_float(d[c]);
        sum = warp_sum(sum);
        if (lane == 0) sh.delta[row] = sum;
    }
    wait();
    Rows x;
    start_queries(x, sh.square, sh.x, sh.both, sh.t, t.lane);
    __syncthreads();
    copy_queries(sh.both, p.d_out, p, t, head);
    for (int local = t.local - 1; local >= own_span(p, t); --local) {
        x.store(sh.x, RP);
        copy_square<D>(sh.e, block_scratch(p.e, p, t.block - t.local + local, kv_head, D * D));
        wait();
        x.template add<D, RowMajor, RowMajor>(sh.x, RP, sh.e, RP);
        __syncthreads();
    }
    wait();
    float4 statistics = make_float4(0.f, 0.f, 0.f, -NEG_INF);
    if (r < t.rows) {
        float2 c = make_float2(0.f, 0.f);
        if (p.gates) c = p.gates[size_t(head) * p.gate_stride + t.gates + t.local * BLOCK + t.lane + r];
        statistics = make_float4(c.x, c.y, sh.delta[r], p.lse[size_t(t.row + r) * p.heads + head] * LOG2_E);
    }
    for (int n = older.count - 1; n >= 0; --n) {
        const PathSpan s = p.spans[older.at(n)];
        const int row = tile - s.tile0, at = s.first + row;
        store_virtual(virtual_rows(p.ds, p, at, head), sh.both, p);
        pad_virtual(p.ds, p, s, row, head);
        float4* rows = p.rows + (size_t(head) * p.virtual_tiles + at) * BLOCK;
        if (r < BLOCK) rows[r] = statistics;
        if (r < BLOCK && row == s.tiles - 1 && s.tiles % 2 == 1) {
            rows[BLOCK + r] = make_float4(0.f, 0.f, 0.f, -NEG_INF);
        }
    }
    __syncthreads();
    walk_older_spans(x, sh.x, sh.e, sh.both, p, t, tile, head);
}

struct SpanWalkShared {
    alignas(16) real dx[ROWS];
    alignas(16) real e[tile_size(D, D)];
};

static_assert(sizeof(SpanWalkShared) <= SPAN_WALK_BYTES);

// Gradients along the walk from the oldest span on: those of x after each span replace the gradients of the output of
// the virtual queries; the last one, at the start of the tile's own span, is `dx_spans`. Adds up the sums of rows.
extern "C" __global__ void __launch_bounds__(THREADS) path_span_walk(const __grid_constant__ PathParams p) {
    SHARED(SpanWalkShared, sh);
    const int tile = gridDim.x - 1 - blockIdx.x, head = blockIdx.y, kv_head = head / (p.heads / p.kv_heads);
    const PathTile t = p.tiles[tile];
    const int r = threadIdx.x;
    const OlderSpans older(p, t);
    if (older.count == 0) return;
    float row_sum = 0.f;
    Rows dx = {};
    for (int n = 0; n < older.count; ++n) {
        const int span = older.at(n), at = virtual_tile(p.spans[span], tile);
        copy_square<D>(sh.e, block_scratch(p.es, p, span, kv_head, D * D));
        dx.store(sh.dx, RP);
        __syncwarp();
        store_virtual(virtual_rows(p.ds, p, at, head), sh.dx, p);
        const float* half = p.dq_tiles + first_half(p, at, head) * HALF_FLOATS;
        float4 part[Rows::FN];
#pragma unroll
        for (int g = 0; g < Rows::FN; ++g) {
            const float* from = half + g / 8 * HALF_FLOATS;
            part[g] = reinterpret_cast<const float4*>(from)[g % 8 * 128 + threadIdx.x];
        }
        if (r < t.rows) {
            const int rows = t.rows - r / QUERIES_PER_SUM * QUERIES_PER_SUM;
            row_sum += group_sum(p.dq_tiles, size_t(head) * p.virtual_tiles + at, at, r) / min(QUERIES_PER_SUM, rows);
        }
        wait();
        dx.template add<D, RowMajor, Transposed>(sh.dx, RP, sh.e, RP);
#pragma unroll
        for (int g = 0; g < Rows::FN; ++g) {
            const float more[4] = {part[g].x, part[g].y, part[g].z, part[g].w};
#pragma unroll
            for (int e = 0; e < 4; ++e) dx.c[0][g][e] += p.scale * more[e];
        }
        __syncthreads();
    }
    float* to = p.dx_spans + (size_t(tile) * p.heads + head) * BLOCK * D;
    dx.each([&](int i, int j, float x) { to[i * D + j] = x; });
    if (r < t.rows) p.row_sums[size_t(head) * p.row_sum_stride + t.sums + r] += row_sum;
}

// Adds the outputs of older spans to that of the own span, by their sums of weights. A span's statistics have the gate
// prefix of its last key in place of the query's.
extern "C" __global__ void __launch_bounds__(THREADS) path_merge(const __grid_constant__ PathParams p) {
    const int tile = gridDim.x - 1 - blockIdx.x, head = blockIdx.y;
    const PathTile t = p.tiles[tile];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const OlderSpans older(p, t);
    if (older.count == 0) return;
    const float2* gates = p.gates + size_t(head) * p.gate_stride;
    for (int r = warp; r < t.rows; r += THREADS / 32) {
        const size_t row = size_t(t.row + r) * p.heads + head;
        float2 query = make_float2(0.f, 0.f);
        if (p.gates) query = gates[t.gates + t.local * BLOCK + t.lane + r];
        auto statistic = [&](int n) {
            const PathSpan s = p.spans[older.at(n)];
            const size_t at = (size_t(virtual_tile(s, tile)) * BLOCK + r) * p.heads + head;
            const float decay = p.gates ? gate_difference(query, gates[s.gates + s.blocks * BLOCK - 1]) : 0.f;
            return p.lses[at] * LOG2_E + decay;
        };
        auto output = [&](int n) -> const real* {
            const int at = virtual_tile(p.spans[older.at(n)], tile);
            return virtual_rows(p.os, p, at, head) + size_t(r) * p.heads * p.head_dim;
        };
        real* o = query_rows(p.o, p, t.row + r, head);
        const float lse = merge_spans(o, p.lse[row] * LOG2_E, older.count, p.head_dim, statistic, output);
        __syncwarp();
        if (lane == 0) p.lse[row] = lse * LN_2;
    }
}
