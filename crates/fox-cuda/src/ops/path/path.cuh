// Building blocks of PaTH attention, s_ij = scale q_i^T M_i ... M_{j+1} k_j + c_i - c_j with M_t = I - u_t u_t^T, by
// blocks of 64 keys. With the reflections U, keys K and queries Q of a block as rows:
//
//     T  = (I + tril(U U^T, -1))^-1        N = tril(U K^T, -1)          path_prepare
//     kh = K - (T N)^T U                   keys at the end of the block
//     E  = -U^T T U                        the product of the block's reflections is I + E
//     R  = tril(Q U^T) T                   S = tril(Q K^T - R N)        scores inside the block
//     x  = Q - R U                         queries at the start of their block
//     x <- x + x E                         one step of the walk, over an older block with scores x kh^T
//
// A tile has the queries at the positions of one block. Its walk ends at the first block that all of them have
// forgotten. I + E can be singular and is never inverted: the backward stores x at every block (path_queries), walks
// from old to new with the gradient of x (path_bwd_walk), finishes the tile's own block (path_bwd_own), and adds up the
// gradients of each block of keys over the tiles that visited it (path_bwd_keys), in order. path_bwd_prepare turns
// those into the gradients of keys and reflections.
//
// Spans. Where there are kernels of wgmma, blocks form spans, and the walk above ends at the start of the tile's own
// span. Keys of an older span are carried to the span's end,
//
//     kl = kh (I + F)^T    with I + F the product of the newer blocks of the span        path_spans
//
// so that x is the same for all keys of a span: attention of virtual queries, a copy of x for each older span, which
// the kernels of forgetting attention compute; x <- x + x E_span once per span. path_merge adds up the outputs of the
// spans; the backward continues with the gradient of x (path_span_walk), sums up the gradient of E_span over the virtual
// queries (path_span_products) and takes it to the span's blocks (path_span_keys, path_span_bwd).
//
// Levels. Small spans shorten the walk over blocks, large ones need fewer virtual queries: spans of a level are parts of
// those of the next, and keys at the end of a span are carried on to the end of the larger one. A tile meets the older
// spans inside its own span of the next level, then those of that level, and so on. Every level has its own keys, and
// copies of values and gate prefixes, in one launch of the kernels of forgetting attention.
//
// Compile-time: BF16, VEC (8), HEAD_DIM (64 or 128), STAGES (blocks of keys in shared memory in the forward), the
// *_BYTES of shared memory that each kernel gets, and WARPS_ACROSS (set by the including file).
#pragma once
#include "params.cuh"
#include "spans.cuh"
#include "tiles.cuh"

constexpr int D = HEAD_DIM, BLOCK = 64;
constexpr int ROWS = tile_size(BLOCK, D), SQUARES = tile_size(BLOCK, BLOCK);  // elements of tiles
constexpr int RP = pitch(D), SP = pitch(BLOCK);                               // their pitches

typedef Accumulator<BLOCK, BLOCK> Square;
typedef Accumulator<BLOCK, D> Rows;

// The shared memory of a kernel.
#if EMULATED
#define SHARED(Type, name) static Type name
#else
#define SHARED(Type, name)                         \
    extern __shared__ __align__(16) u8 memory[];   \
    Type& name = *reinterpret_cast<Type*>(memory)
#endif

#if BF16
DEVICE float power(float x) { return exp2_fast(x); }
#else
DEVICE float power(float x) { return exp2f(x); }
#endif

// c_a - c_b, in base 2.
DEVICE float gate_difference(float2 a, float2 b) { return (a.x - b.x) + (a.y - b.y); }

// First row of a key head, and of a query head.
template <typename T>
DEVICE T* key_rows(T* x, const PathParams& p, int row, int kv_head) {
    return x + (size_t(row) * p.kv_heads + kv_head) * p.head_dim;
}
template <typename T>
DEVICE T* query_rows(T* x, const PathParams& p, int row, int head) {
    return x + (size_t(row) * p.heads + head) * p.head_dim;
}
DEVICE void copy_keys(real* tile, const real* x, const PathParams& p, const PathBlock& b, int kv_head) {
    copy_tile<BLOCK, D>(tile, key_rows(x, p, b.row, kv_head), b.rows, size_t(p.kv_heads) * p.head_dim, p.head_dim);
}
DEVICE void copy_queries(real* tile, const real* x, const PathParams& p, const PathTile& t, int head) {
    copy_tile<BLOCK, D>(tile, query_rows(x, p, t.row, head), t.rows, size_t(p.heads) * p.head_dim, p.head_dim);
}
// Reflections are f32 in memory.
DEVICE void load_reflections(real* tile, const PathParams& p, const PathBlock& b, int kv_head) {
    const float* u = key_rows(p.u, p, b.row, kv_head);
    for_each_in_block<BLOCK * D>([&](int i) {
        const int row = i / D, column = i % D;
        const bool valid = row < b.rows && column < p.head_dim;
        tile[row * RP + column] = to_real(valid ? u[size_t(row) * p.kv_heads * p.head_dim + column] : 0.f);
    });
}
// Scratch of block `block` (an index into p.blocks): tiles of `len` elements for each key head.
template <typename T>
DEVICE T* block_scratch(T* x, const PathParams& p, int block, int kv_head, int len) {
    return x + (size_t(block) * p.kv_heads + kv_head) * len;
}
template <int N>
DEVICE void copy_square(real* tile, const real* x) {
    copy_tile<N, N>(tile, x, N, N, N);
}
DEVICE void copy_scratch_rows(real* tile, const real* x) { copy_tile<BLOCK, D>(tile, x, BLOCK, D, D); }

DEVICE void wait() {
    copy_commit();
    copy_wait<0>();
    __syncthreads();
}

template <int M, int N>
DEVICE void negate(Accumulator<M, N>& c) {
    c.each([](int, int, float& x) { x = -x; });
}
// Keeps j <= i + lane, or j < i for STRICT.
template <bool STRICT>
DEVICE void keep_lower(Square& c, int lane) {
    c.each([&](int i, int j, float& x) {
        if (STRICT ? j >= i : j > i + lane) x = 0.f;
    });
}

// The first block of a tile's own span of the first level, counted in the segment.
DEVICE int own_span(const PathParams& p, const PathTile& t) { return t.local / p.sizes[0] * p.sizes[0]; }

// The tile of 64 virtual queries that tile number `tile` has at a span.
DEVICE int virtual_tile(const PathSpan& s, int tile) { return s.first + tile - s.tile0; }
// Keys, values, or their gradients at the end of the spans of a level.
template <typename T>
DEVICE T* level_rows(T* x, const PathParams& p, int level) {
    return x + size_t(level) * p.k_rows * p.kv_heads * p.head_dim;
}
// First element of a head of a virtual tile; rows are `heads * head_dim` apart.
template <typename T>
DEVICE T* virtual_rows(T* x, const PathParams& p, int tile, int head) {
    return x + (size_t(tile) * BLOCK * p.heads + head) * p.head_dim;
}
// The first half of a virtual tile.
DEVICE size_t first_half(const PathParams& p, int tile, int head) {
    return (size_t(head) * p.virtual_tiles + tile) * HALVES;
}

// The first block, counted in the segment, that a tile visits: sums of gates never increase, so it is found by
// bisection.
DEVICE int first_visited(const PathParams& p, const PathTile& t, int head) {
    if (!p.bounds) return 0;
    const float2* gates = p.gates + size_t(head) * p.gate_stride + t.gates;
    const double threshold =
        (double(p.log_tolerance) - 2.0 * p.bounds[t.segment * p.heads + head] - log(double(t.keys))) *
        1.4426950408889634;
    const float2 query = gates[t.local * BLOCK + t.lane];
    int low = 0, high = t.local;
    while (low < high) {
        const int middle = (low + high) / 2;
        const float2 c = gates[(middle + 1) * BLOCK - 1];
        const double decay = (double(query.x) - double(c.x)) + (double(query.y) - double(c.y));
        if (decay < threshold) low = middle + 1;
        else high = middle;
    }
    return low;
}
