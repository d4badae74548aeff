// PaTH attention, spans of blocks: keys and products of the spans of a level, and their backward; see path.cuh. A span
// has parts: blocks, or the spans of the level below.
#define WARPS_ACROSS 2
#include "path.cuh"

typedef Accumulator<D, D> Product;

// Blocks of a part of a span.
DEVICE int blocks_of_part(const PathParams& p, const PathSpan& s) { return s.level == 0 ? 1 : p.sizes[s.level - 1]; }
// Copies 64 rows of a head of keys or values.
DEVICE void copy_span_rows(real* tile, const real* x, const PathParams& p) {
    copy_tile<BLOCK, D>(tile, x, BLOCK, size_t(p.kv_heads) * p.head_dim, p.head_dim);
}

struct SpansShared {
    alignas(16) real f[tile_size(D, D)], e[tile_size(D, D)];
    alignas(16) real kh[ROWS];
};

static_assert(sizeof(SpansShared) <= SPANS_BYTES);

// Keys at the end of their span, a copy of their values, and the span's product, from the newest part to the oldest.
// Grid (spans of a level, key heads, blocks of a part): each takes one block of every part.
extern "C" __global__ void __launch_bounds__(THREADS) path_spans(const __grid_constant__ PathParams p) {
    SHARED(SpansShared, sh);
    const int span = p.span0 + blockIdx.x, kv_head = blockIdx.y;
    const PathSpan s = p.spans[span];
    const int length = blocks_of_part(p, s);
    const size_t stride = size_t(p.kv_heads) * p.head_dim;
    Product f = {};
    for (int n = s.blocks / length - 1; n >= 0; --n) {
        const int part = s.part + n, row = s.row + (n * length + blockIdx.z) * BLOCK;
        copy_square<D>(sh.e, block_scratch(p.e, p, part, kv_head, D * D));
        if (s.level == 0) copy_scratch_rows(sh.kh, block_scratch(p.kh, p, part, kv_head, BLOCK * D));
        else copy_span_rows(sh.kh, key_rows(level_rows(p.kl, p, s.level - 1), p, row, kv_head), p);
        if (p.vl) {
            const real* from = key_rows(p.v, p, row, kv_head);
            real* to = key_rows(level_rows(p.vl, p, s.level), p, row, kv_head);
            for_each_in_block<BLOCK * D / VECTOR>([&](int i) {
                const int column = i % (D / VECTOR) * VECTOR;
                const size_t at = i / (D / VECTOR) * stride + column;
                if (column >= p.head_dim) return;
                *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(from + at);
            });
        }
        f.store(sh.f, RP);
        if (p.f && blockIdx.z == 0) f.store(block_scratch(p.f, p, part, kv_head, D * D), D);
        wait();
        Rows kl = {};
        kl.template add<D, RowMajor, Transposed>(sh.kh, RP, sh.f, RP);
        kl.each([&](int i, int j, float& x) { x += to_float(sh.kh[i * RP + j]); });
        kl.store_rows(key_rows(level_rows(p.kl, p, s.level), p, row, kv_head), BLOCK, stride, p.head_dim);
        f.template add<D, RowMajor, RowMajor>(sh.f, RP, sh.e, RP);
        f.each([&](int i, int j, float& x) { x += to_float(sh.e[i * RP + j]); });
        __syncthreads();
    }
    if (blockIdx.z == 0) f.store(block_scratch(p.es, p, span, kv_head, D * D), D);
}

struct ProductsShared {
    struct Stage {
        alignas(16) real x[ROWS], dx[ROWS];
    } stages[2];
};

static_assert(sizeof(ProductsShared) <= SPAN_PRODUCTS_BYTES);

// The gradient of a span's product: sums over `sum_tiles` virtual tiles of the group's query heads each. Grid (spans, key
// heads, most sums of a span).
extern "C" __global__ void __launch_bounds__(THREADS) path_span_products(const __grid_constant__ PathParams p) {
    SHARED(ProductsShared, sh);
    const PathSpan s = p.spans[blockIdx.x];
    const int kv_head = blockIdx.y, group = p.heads / p.kv_heads;
    const int begin = blockIdx.z * p.sum_tiles, end = min(begin + p.sum_tiles, s.tiles);
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
    float* to = block_scratch(p.de_parts, p, s.sums + blockIdx.z, kv_head, D * D);
    de.each([&](int i, int j, float x) { to[i * D + j] = x; });
}

struct SpanKeysShared {
    alignas(16) real f[tile_size(D, D)];
    alignas(16) real k[ROWS], dkl[ROWS];
};

static_assert(sizeof(SpanKeysShared) <= SPAN_KEYS_BYTES);

// Adds the gradients of keys and values at the end of their span to those at the end of its parts, which are spans, and
// sums what these keys add to the gradient of F. Grid (spans of a level, key heads, parts).
extern "C" __global__ void __launch_bounds__(THREADS) path_span_keys(const __grid_constant__ PathParams p) {
    SHARED(SpanKeysShared, sh);
    const PathSpan s = p.spans[p.span0 + blockIdx.x];
    const int kv_head = blockIdx.y, part = s.part + blockIdx.z, span = part - p.block_count;
    const PathSpan own = p.spans[span];
    const size_t stride = size_t(p.kv_heads) * p.head_dim;
    copy_square<D>(sh.f, block_scratch(p.f, p, part, kv_head, D * D));
    Product sum = {};
    for (int block = 0; block < own.blocks; ++block) {
        const int row = own.row + block * BLOCK;
        const real* dkl = key_rows(level_rows(p.dkl, p, s.level), p, row, kv_head);
        const real* dvl = key_rows(level_rows(p.dvl, p, s.level), p, row, kv_head);
        real* dk = key_rows(level_rows(p.dkl, p, own.level), p, row, kv_head);
        real* dv = key_rows(level_rows(p.dvl, p, own.level), p, row, kv_head);
        copy_span_rows(sh.k, key_rows(level_rows(p.kl, p, own.level), p, row, kv_head), p);
        copy_span_rows(sh.dkl, dkl, p);
        // A part that no virtual queries see has no gradients yet.
        for_each_in_block<BLOCK * D / 8>([&](int i) {
            const int column = i % (D / 8) * 8;
            const size_t at = i / (D / 8) * stride + column;
            if (column >= p.head_dim) return;
            float x[8], y[8] = {};
            load(x, dvl + at);
            if (own.tiles > 0) load(y, dv + at);
#pragma unroll
            for (int e = 0; e < 8; ++e) x[e] += y[e];
            store(dv + at, x);
        });
        wait();
        sum.template add<BLOCK, Transposed, RowMajor>(sh.dkl, RP, sh.k, RP);
        Rows more = {};
        more.template add<D, RowMajor, RowMajor>(sh.dkl, RP, sh.f, RP);
        more.each([&](int i, int j, float& x) {
            x += to_float(sh.dkl[i * RP + j]);
            if (own.tiles > 0 && j < p.head_dim) x += to_float(dk[i * stride + j]);
        });
        more.store_rows(dk, BLOCK, stride, p.head_dim);
        __syncthreads();
    }
    float* to = block_scratch(p.df_keys, p, span, kv_head, D * D);
    sum.each([&](int i, int j, float x) { to[i * D + j] = x; });
}

struct SpanBwdShared {
    alignas(16) real df[tile_size(D, D)];
    alignas(16) real both[tile_size(D, D)];  // F, then E
    alignas(16) real kh[ROWS], dkl[ROWS];
};

static_assert(sizeof(SpanBwdShared) <= SPAN_BWD_BYTES);

// Gradients of a span's product, and at the first level of its keys and values, to those of its parts, from the oldest
// part to the newest. Grid (spans of a level, key heads of this launch).
extern "C" __global__ void __launch_bounds__(THREADS) path_span_bwd(const __grid_constant__ PathParams p) {
    SHARED(SpanBwdShared, sh);
    const int span = p.span0 + blockIdx.x;
    const PathSpan s = p.spans[span];
    const int group = p.heads / p.kv_heads, kv_count = p.head_count / group, kv_head = p.head0 / group + blockIdx.y;
    const size_t stride = size_t(p.kv_heads) * p.head_dim;
    const bool is_first = s.level == 0;
    Product df = {};
    for (int n = 0; n * p.sum_tiles < s.tiles; ++n) {
        const float* x = block_scratch(p.de_parts, p, s.sums + n, kv_head, D * D);
        df.each([&](int i, int j, float& y) { y += x[i * D + j]; });
    }
    if (s.carried) {
        const float* x = block_scratch(p.de_spans, p, span, kv_head, D * D);
        df.each([&](int i, int j, float& y) { y += x[i * D + j]; });
    }
    const int parts = s.blocks / blocks_of_part(p, s);
    for (int n = 0; n < parts; ++n) {
        const int part = s.part + n, row = s.row + n * BLOCK;
        const size_t at = size_t(part) * kv_count + blockIdx.y;
        copy_square<D>(sh.both, block_scratch(p.f, p, part, kv_head, D * D));
        df.store(sh.df, RP);
        if (is_first) {
            copy_scratch_rows(sh.kh, block_scratch(p.kh, p, part, kv_head, BLOCK * D));
            copy_span_rows(sh.dkl, key_rows(p.dkl, p, row, kv_head), p);
            const real* dv = key_rows(p.dvl, p, row, kv_head);
            for_each_in_block<BLOCK * D>([&](int i) {
                const int row = i / D, column = i % D;
                p.dv_sums[at * BLOCK * D + i] = column < p.head_dim ? to_float(dv[row * stride + column]) : 0.f;
            });
        }
        wait();
        // kl = kh + kh F^T, and F of the next older part is F + E + F E.
        if (is_first) {
            Rows dkh = {};
            dkh.template add<D, RowMajor, RowMajor>(sh.dkl, RP, sh.both, RP);
            float* to = p.dkh_sums + at * BLOCK * D;
            dkh.each([&](int i, int j, float x) { to[i * D + j] = x + to_float(sh.dkl[i * RP + j]); });
        }
        {
            Product de = {};
            de.template add<D, Transposed, RowMajor>(sh.both, RP, sh.df, RP);
            de.plus(df);
            float* to = is_first ? p.de_sums + at * D * D
                                 : block_scratch(p.de_spans, p, part - p.block_count, kv_head, D * D);
            de.each([&](int i, int j, float x) { to[i * D + j] = x; });
        }
        __syncthreads();
        copy_square<D>(sh.both, block_scratch(p.e, p, part, kv_head, D * D));
        wait();
        df.template add<D, RowMajor, Transposed>(sh.df, RP, sh.both, RP);
        if (is_first) {
            // Gradients of keys are still without the scale; a separate sum would spill.
            df.each([&](int, int, float& x) { x *= 1.f / p.scale; });
            df.template add<BLOCK, Transposed, RowMajor>(sh.dkl, RP, sh.kh, RP);
            df.each([&](int, int, float& x) { x *= p.scale; });
        } else {
            const float* x = block_scratch(p.df_keys, p, part - p.block_count, kv_head, D * D);
            df.each([&](int i, int j, float& y) { y = fmaf(p.scale, x[i * D + j], y); });
        }
        __syncthreads();
    }
}
