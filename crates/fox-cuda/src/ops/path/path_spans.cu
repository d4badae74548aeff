// PaTH attention, spans of blocks: keys and products of a span, and their backward; see path.cuh. Grid (spans, key
// heads).
#define WARPS_ACROSS 2
#include "path.cuh"

typedef Accumulator<D, D> Product;

struct SpansShared {
    alignas(16) real f[tile_size(D, D)], e[tile_size(D, D)];
    alignas(16) real kh[ROWS];
};

static_assert(sizeof(SpansShared) <= SPANS_BYTES);

// Keys at the end of their span, and the span's product, from the newest block to the oldest.
extern "C" __global__ void __launch_bounds__(THREADS) path_spans(const __grid_constant__ PathParams p) {
    SHARED(SpansShared, sh);
    const int kv_head = blockIdx.y, first = p.spans[blockIdx.x].block;
    Product f = {};
    for (int block = first + p.span_blocks - 1; block >= first; --block) {
        const PathBlock b = p.blocks[block];
        copy_square<D>(sh.e, block_scratch(p.e, p, block, kv_head, D * D));
        copy_scratch_rows(sh.kh, block_scratch(p.kh, p, block, kv_head, BLOCK * D));
        f.store(sh.f, RP);
        if (p.f) f.store(block_scratch(p.f, p, block, kv_head, D * D), D);
        wait();
        Rows kl = {};
        kl.template add<D, RowMajor, Transposed>(sh.kh, RP, sh.f, RP);
        kl.each([&](int i, int j, float& x) { x += to_float(sh.kh[i * RP + j]); });
        kl.store_rows(key_rows(p.kl, p, b.row, kv_head), BLOCK, size_t(p.kv_heads) * p.head_dim, p.head_dim);
        f.template add<D, RowMajor, RowMajor>(sh.f, RP, sh.e, RP);
        f.each([&](int i, int j, float& x) { x += to_float(sh.e[i * RP + j]); });
        __syncthreads();
    }
    f.store(block_scratch(p.es, p, blockIdx.x, kv_head, D * D), D);
}

struct ProductsShared {
    struct Stage {
        alignas(16) real x[ROWS], dx[ROWS];
    } stages[2];
};

static_assert(sizeof(ProductsShared) <= SPAN_PRODUCTS_BYTES);

// Parts of the gradient of a span's product: the sum over `part_tiles` virtual tiles of the group's query heads. Grid
// (spans, key heads, parts).
extern "C" __global__ void __launch_bounds__(THREADS) path_span_products(const __grid_constant__ PathParams p) {
    SHARED(ProductsShared, sh);
    const PathSpan s = p.spans[blockIdx.x];
    const int kv_head = blockIdx.y, group = p.heads / p.kv_heads;
    const int begin = blockIdx.z * p.part_tiles, end = min(begin + p.part_tiles, s.tiles);
    if (begin >= end) return;
    const int count = (end - begin) * group;
    auto prefetch = [&](int i) {
        const int tile = s.first + begin + i / group, head = kv_head * group + i % group;
        const size_t stride = size_t(p.heads) * p.head_dim;
        copy_tile<BLOCK, D>(sh.stages[i % 2].x, virtual_rows(p.xs, p, tile, head), BLOCK, stride, p.head_dim);
        copy_tile<BLOCK, D>(sh.stages[i % 2].dx, virtual_rows(p.ds, p, tile, head), BLOCK, stride, p.head_dim);
        copy_commit();
    };
    Product de = {};
    prefetch(0);
    for (int i = 0; i < count; ++i) {
        copy_wait<0>();
        __syncthreads();
        if (i + 1 < count) prefetch(i + 1);
        de.template add<BLOCK, Transposed, RowMajor>(sh.stages[i % 2].x, RP, sh.stages[i % 2].dx, RP);
    }
    float* to = p.de_parts + ((size_t(blockIdx.x) * p.kv_heads + kv_head) * gridDim.z + blockIdx.z) * D * D;
    de.each([&](int i, int j, float x) { to[i * D + j] = x; });
}

struct SpanBwdShared {
    alignas(16) real df[tile_size(D, D)];
    alignas(16) real both[tile_size(D, D)];  // F, then E
    alignas(16) real kh[ROWS], dkl[ROWS];
};

static_assert(sizeof(SpanBwdShared) <= SPAN_BWD_BYTES);

// Gradients of a span's keys, values and products to those of its blocks, from the oldest block to the newest. Grid
// (spans, key heads of this launch).
extern "C" __global__ void __launch_bounds__(THREADS) path_span_bwd(const __grid_constant__ PathParams p) {
    SHARED(SpanBwdShared, sh);
    const PathSpan s = p.spans[blockIdx.x];
    const int group = p.heads / p.kv_heads, kv_count = p.head_count / group, kv_head = p.head0 / group + blockIdx.y;
    const size_t stride = size_t(p.kv_heads) * p.head_dim;
    Product df = {};
    for (int part = 0; part * p.part_tiles < s.tiles; ++part) {
        const float* x = p.de_parts + ((size_t(blockIdx.x) * p.kv_heads + kv_head) * p.parts + part) * D * D;
        df.each([&](int i, int j, float& y) { y += x[i * D + j]; });
    }
    for (int block = s.block; block < s.block + p.span_blocks; ++block) {
        const PathBlock b = p.blocks[block];
        const size_t at = size_t(block) * kv_count + blockIdx.y;
        copy_square<D>(sh.both, block_scratch(p.f, p, block, kv_head, D * D));
        copy_scratch_rows(sh.kh, block_scratch(p.kh, p, block, kv_head, BLOCK * D));
        copy_tile<BLOCK, D>(sh.dkl, key_rows(p.dkl, p, b.row, kv_head), BLOCK, stride, p.head_dim);
        df.store(sh.df, RP);
        const real* dv = key_rows(p.dvl, p, b.row, kv_head);
        for_each_in_block<BLOCK * D>([&](int i) {
            const int row = i / D, column = i % D;
            p.dv_sums[at * BLOCK * D + i] = column < p.head_dim ? to_float(dv[row * stride + column]) : 0.f;
        });
        wait();
        // kl = kh + kh F^T, and F of the next older block is F + E + F E.
        {
            Rows dkh = {};
            dkh.template add<D, RowMajor, RowMajor>(sh.dkl, RP, sh.both, RP);
            float* to = p.dkh_sums + at * BLOCK * D;
            dkh.each([&](int i, int j, float x) { to[i * D + j] = x + to_float(sh.dkl[i * RP + j]); });
            Product de = {};
            de.template add<D, Transposed, RowMajor>(sh.both, RP, sh.df, RP);
            de.plus(df);
            to = p.de_sums + at * D * D;
            de.each([&](int i, int j, float x) { to[i * D + j] = x; });
        }
        __syncthreads();
        copy_square<D>(sh.both, block_scratch(p.e, p, block, kv_head, D * D));
        wait();
        df.template add<D, RowMajor, Transposed>(sh.df, RP, sh.both, RP);
        // Gradients of keys are still without the scale; a separate sum would spill.
        df.each([&](int, int, float& x) { x *= 1.f / p.scale; });
        df.template add<BLOCK, Transposed, RowMajor>(sh.dkl, RP, sh.kh, RP);
        df.each([&](int, int, float& x) { x *= p.scale; });
        __syncthreads();
    }
}
