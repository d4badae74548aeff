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

// Continues a walk from the start of the tile's own span over older spans, storing the virtual queries of each. `tile`
// and `square` (D x D) are scratch in shared memory.
DEVICE void walk_older_spans(Rows& x, real* tile, real* square, const PathParams& p, const PathTile& t, int index,
                             int head) {
    const int kv_head = head / (p.heads / p.kv_heads);
    for (int n = t.local / p.span_blocks - 1; n >= 0; --n) {
        const PathSpan s = p.spans[t.spans + n];
        const int row = index - s.tile0;
        real* to = virtual_rows(p.xs, p, s.first + row, head);
        x.store_rows(to, BLOCK, size_t(p.heads) * p.head_dim, p.head_dim);
        // Virtual tiles are padded to an even number.
        if (row == s.tiles - 1 && row % 2 == 0) {
            Rows none = {};
            to = virtual_rows(p.xs, p, s.first + row + 1, head);
            none.store_rows(to, BLOCK, size_t(p.heads) * p.head_dim, p.head_dim);
        }
        if (n == 0) break;
        __syncthreads();
        x.store(tile, RP);
        copy_square<D>(square, block_scratch(p.es, p, t.spans + n, kv_head, D * D));
        wait();
        x.template add<D, RowMajor, RowMajor>(tile, RP, square, RP);
    }
}
