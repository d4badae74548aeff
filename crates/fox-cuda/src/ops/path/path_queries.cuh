// Walks of the queries of a tile, shared by forward and backward; see path.cuh. A warp has 16 queries.
#pragma once
#define WARPS_ACROSS 1
#include "path.cuh"

// Queries `x` at the start of their block: Q - R U, with tril(Q U^T) in `square` first and R in the end. `q`, `u` and
// `t` are tiles. A warp reads and writes its own rows of `square` alone.
DEVICE void start_queries(Rows& x, real* square, const real* q, const real* u, const real* t, int lane) {
    Square along = {};
    along.template add<D, RowMajor, Transposed>(q, RP, u, RP);
    keep_lower<false>(along, lane);
    along.store(square, SP);
    __syncwarp();
    Square r = {};
    r.template add<BLOCK, RowMajor, RowMajor>(square, SP, t, SP);
    __syncwarp();
    r.store(square, SP);
    __syncwarp();
    x.clear();
    x.template add<BLOCK, RowMajor, RowMajor>(square, SP, u, RP);
    x.each([&](int i, int j, float& y) { y = to_float(q[i * RP + j]) - y; });
}

// Copies the warp's 16 rows of a tile into a virtual tile, in accesses of 16 bytes.
DEVICE void store_virtual(real* to, const real* tile, const PathParams& p) {
    constexpr int VECTORS = D / VECTOR;
    const size_t stride = size_t(p.heads) * p.head_dim;
    for (int i = threadIdx.x % 32; i < 16 * VECTORS; i += 32) {
        const int row = threadIdx.x / 32 * 16 + i / VECTORS, column = i % VECTORS * VECTOR;
        if (column >= p.head_dim) continue;
        *reinterpret_cast<uint4*>(to + row * stride + column) =
            *reinterpret_cast<const uint4*>(tile + row * RP + column);
    }
}
// Zeros for the virtual tile that makes their number even, after the last one of a span.
DEVICE void pad_virtual(real* x, const PathParams& p, const PathSpan& s, int row, int head) {
    if (row < s.tiles - 1 || s.tiles % 2 == 0) return;
    Rows none = {};
    none.store_rows(virtual_rows(x, p, s.first + s.tiles, head), BLOCK, size_t(p.heads) * p.head_dim, p.head_dim);
}

// Continues a walk from the start of the tile's own span over older spans, storing the virtual queries of each. `tile`,
// and `even` and `odd` for products of spans, are scratch in shared memory that is free.
DEVICE void walk_older_spans(Rows& x, real* tile, real* even, real* odd, const PathParams& p, const PathTile& t,
                             int index, int head) {
    const OlderSpans older(p, t);
    const int kv_head = head / (p.heads / p.kv_heads), last = older.count - 1;
    auto prefetch = [&](int n) {
        copy_square<D>(n % 2 ? odd : even, block_scratch(p.es, p, older.at(n), kv_head, D * D));
        copy_commit();
    };
    if (last > 0) prefetch(last);
    for (int n = last; n >= 0; --n) {
        const PathSpan s = p.spans[older.at(n)];
        __syncwarp();
        x.store(tile, RP);
        __syncwarp();
        store_virtual(virtual_rows(p.xs, p, virtual_tile(s, index), head), tile, p);
        pad_virtual(p.xs, p, s, index - s.tile0, head);
        if (n == 0) break;
        copy_wait<0>();
        __syncthreads();
        if (n > 1) prefetch(n - 1);
        x.template add<D, RowMajor, RowMajor>(tile, RP, n % 2 ? odd : even, RP);
    }
}
