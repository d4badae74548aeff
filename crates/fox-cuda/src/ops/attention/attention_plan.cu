// Tile scheduler: which key blocks each query block visits (mask, window, pruning), and in which order tiles run.
//
// Compile-time: WIDE, whether operands are f32 rather than bf16.
#define BF16 !WIDE
#include "attention.cuh"
#include "real.cuh"

struct Range {
    int begin, end;
};

// Blocks of keys that the mask leaves to the queries of block m.
DEVICE Range mask_range(const PlanParams& p, const Segment& s, int m) {
    const int offset = s.k_len - s.q_len;
    const int first = offset + m * p.block_m;
    const int last = min(first + p.block_m, s.k_len) - 1;
    int begin = 0, end = s.k_len;
    if (p.mask == MASK_CAUSAL) end = last + 1;
    if (p.window > 0) {
        begin = max(0, first - p.window + 1);
        if (p.mask == MASK_BIDIRECTIONAL) end = min(end, last + p.window);
    }
    return Range{begin / p.block_n, (end + p.block_n - 1) / p.block_n};
}

// Adaptive computation pruning: skips blocks whose largest gate bias is below the threshold. The gate prefix is
// monotone, so the remaining blocks are contiguous and found by two binary searches.
DEVICE Range prune(const PlanParams& p, const Segment& s, int segment, int m, int head, Range r) {
    if (!p.bounds) return r;
    const float2* gates = p.gates + size_t(head) * p.gate_stride + s.c_base;
    const double threshold =
        (double(p.log_tolerance) - 2.0 * p.bounds[segment * p.heads + head] - log(double(s.k_len))) *
        1.4426950408889634;
    const int first = s.k_len - s.q_len + m * p.block_m;
    const int last = min(first + p.block_m, s.k_len) - 1;
    const float2 c_first = gates[first], c_last = gates[last];
    int lo = r.begin, hi = min(r.end - 1, first / p.block_n);  // the block of `first` stays
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        float2 c = gates[min((mid + 1) * p.block_n, s.k_len) - 1];
        if (gate_difference_f64(c_first, c) < threshold) lo = mid + 1;
        else hi = mid;
    }
    r.begin = lo;
    if (p.mask == MASK_BIDIRECTIONAL) {
        lo = last / p.block_n + 1, hi = r.end;
        while (lo < hi) {
            int mid = (lo + hi) / 2;
            if (gate_difference_f64(gates[mid * p.block_n], c_last) < threshold) hi = mid;
            else lo = mid + 1;
        }
        r.end = lo;
    }
    return r;
}

// Tiles of the forward, and a histogram of their sort keys: groups of heads whose keys share the L2
// cache stay together, longest tiles first inside a group.
extern "C" __global__ void plan_forward(PARAMS(PlanForward)) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= p.heads * p.m_tile_count) return;
    const int head = index / p.m_tile_count;
    const BlockRef ref = p.m_tiles[index % p.m_tile_count];
    const Segment s = p.segments[ref.segment];
    const Range all = mask_range(p, s, ref.block);
    const Range r = prune(p, s, ref.segment, ref.block, head, all);
    ForwardTile t;
    t.head = head;
    t.kv_head = head / (p.heads / p.kv_heads);
    t.q_row = s.q_start + ref.block * p.block_m;
    t.q_valid = min(p.block_m, s.q_len - ref.block * p.block_m);
    t.position = s.k_len - s.q_len + ref.block * p.block_m;
    t.k_row = s.k_start;
    t.k_len = s.k_len;
    t.c_base = s.c_base;
    t.n_begin = r.begin;
    t.n_end = r.end;
    t.unused[0] = t.unused[1] = 0;
    tiles[index] = t;
    atomicAdd(blocks + 2 * head, u64(r.end - r.begin));
    atomicAdd(blocks + 2 * head + 1, u64(all.end - all.begin));
    int length = min(r.end - r.begin, sort.longest) * (sort.bins - 1) / sort.longest;
    int key = t.kv_head / sort.group_heads * sort.bins + sort.bins - 1 - length;
    sort.keys[index] = key;
    atomicAdd(sort.histogram + key, 1);
}

// Exclusive scan of the histogram, one block of 1024 threads.
extern "C" __global__ void plan_scan(PARAMS(PlanScan)) {
    __shared__ int warps[32];
    __shared__ int carry;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) carry = 0;
    for (int base = 0; base < count; base += 1024) {
        int i = base + threadIdx.x;
        int value = i < count ? histogram[i] : 0;
        int x = value;
        for (int step = 1; step < 32; step *= 2) {
            int y = __shfl_up_sync(~0u, x, step);
            if (lane >= step) x += y;
        }
        __syncthreads();
        if (lane == 31) warps[warp] = x;
        __syncthreads();
        int before = carry;
        for (int w = 0; w < warp; ++w) before += warps[w];
        if (i < count) histogram[i] = before + x - value;
        __syncthreads();
        if (threadIdx.x == 1023) carry = before + x;
    }
}

// The order within a bin depends on the atomics: it affects when a tile runs, not its result.
extern "C" __global__ void plan_scatter(PARAMS(PlanScatter)) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= count) return;
    sort.order[atomicAdd(sort.histogram + sort.keys[index], 1)] = index;
}

// Key blocks of each query block, for the backward: spans[head][m_tile].
extern "C" __global__ void plan_backward_spans(PARAMS(PlanSpans)) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= p.heads * p.m_tile_count) return;
    const int head = index / p.m_tile_count;
    const BlockRef ref = p.m_tiles[index % p.m_tile_count];
    const Segment s = p.segments[ref.segment];
    const Range r = prune(p, s, ref.segment, ref.block, head, mask_range(p, s, ref.block));
    spans[index] = make_int2(r.begin, r.end);
}

// Query blocks of each key block, ranges[head][n_tile]: those whose keys end in it or before; with a bidirectional mask
// ranges[head][n_tile][2], then those with later keys in it. Spans are monotone along a segment, so that their other ends
// are found by binary search.
extern "C" __global__ void plan_backward_ranges(PARAMS(PlanRanges)) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= p.heads * n_tile_count) return;
    const int head = index / n_tile_count;
    const BlockRef ref = n_tiles[index % n_tile_count];
    const Segment s = p.segments[ref.segment];
    const int2* segment_spans = spans + size_t(head) * p.m_tile_count + s.m_tile0;
    const int m_count = (s.q_len + p.block_m - 1) / p.block_m;
    const int first = max(0, ref.block * p.block_n - (s.k_len - s.q_len)) / p.block_m;
    int lo = first, hi = m_count;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (segment_spans[mid].x <= ref.block) lo = mid + 1;
        else hi = mid;
    }
    const int2 causal = make_int2(first, max(first, lo));
    if (p.mask == MASK_CAUSAL) {
        ranges[index] = causal;
        return;
    }
    // A query has later keys here if its position is before the block's last key.
    const int positions = (ref.block + 1) * p.block_n - 1 - (s.k_len - s.q_len);
    const int end = min(m_count, max(0, positions + p.block_m - 1) / p.block_m);
    lo = 0, hi = end;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (segment_spans[mid].y > ref.block) hi = mid;
        else lo = mid + 1;
    }
    ranges[2 * index] = causal;
    ranges[2 * index + 1] = make_int2(lo, end);
}

// bounds[segment][head] = scale * max|q| max|k| over the segment's rows. Grid (heads + kv_heads, blocks of NORM_ROWS
// rows, segments), heads first because they are adjacent in memory; block 256, eight lanes per row. `largest` is
// zeroed: the largest squared norms [segments][heads + kv_heads] as bits of non-negative floats, which order like
// integers, so that the atomic maximum is deterministic; then the count of finished thread blocks.
constexpr int NORM_ROWS = 256;

DEVICE float largest_norm(const NormParams& p, const Segment& s, int column) {
    const bool queries = column < p.heads;
    const int heads = queries ? p.heads : p.kv_heads, head = queries ? column : column - p.heads;
    const int len = queries ? s.q_len : s.k_len;
    const real* x = (queries ? p.q : p.k) +
                    (size_t(queries ? s.q_start : s.k_start) * heads + head) * p.head_dim;
    const int first = blockIdx.y * NORM_ROWS + threadIdx.x / 8;
    float sums[NORM_ROWS / 32] = {};
    // All rows in flight at once, to hide memory latency.
    for (int c = 8 * (threadIdx.x % 8); c < p.head_dim; c += 64) {
        float v[NORM_ROWS / 32][8];
#pragma unroll
        for (int i = 0; i < NORM_ROWS / 32; ++i) {
            const int row = min(first + 32 * i, len - 1);
            load<8>(v[i], x + size_t(row) * heads * p.head_dim + c);
        }
#pragma unroll
        for (int i = 0; i < NORM_ROWS / 32; ++i) {
#pragma unroll
            for (int j = 0; j < 8; ++j) sums[i] += v[i][j] * v[i][j];
        }
    }
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < NORM_ROWS / 32; ++i) {
        const float sum = quad_sum(sums[i]);
        most = fmaxf(most, sum + __shfl_xor_sync(~0u, sum, 4));
    }
    return most;
}

extern "C" __global__ void logit_bounds(const NormParams p) {
    const int columns = p.heads + p.kv_heads, column = blockIdx.x;
    const Segment s = p.segments[blockIdx.z];
    float most = 0.f;
    if (blockIdx.y * NORM_ROWS < (column < p.heads ? s.q_len : s.k_len)) {
        most = largest_norm(p, s, column);
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 8));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 16));
    if (threadIdx.x % 32 == 0) {
        atomicMax(p.largest + blockIdx.z * columns + column, __float_as_uint(most));
    }
    // The thread block that finishes last combines the norms.
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        u32* ended = p.largest + gridDim.z * columns;
        last = atomicAdd(ended, 1) == gridDim.x * gridDim.y * gridDim.z - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int i = threadIdx.x; i < gridDim.z * p.heads; i += blockDim.x) {
        const u32* norms = p.largest + i / p.heads * columns;
        const int head = i % p.heads, kv_head = head / (p.heads / p.kv_heads);
        const float q = __uint_as_float(__ldcg(norms + head));
        const float k = __uint_as_float(__ldcg(norms + p.heads + kv_head));
        // The factor covers the rounding of the sums.
        p.bounds[i] = sqrtf(q) * sqrtf(k) * fabsf(p.scale) * 1.0001f;
    }
}

// Bound on the growth of the product of norms by rounding queries and keys to bf16: each norm grows by at most a factor
// 1 + u, u = 2^-8. Rounding to nearest changes an element by at most u / (1 + u) of it, which leaves a margin of 1 in
// 30,000 for the f32 arithmetic before.
constexpr float ROUNDED_NORMS = WIDE ? 1.f : (1.f + 1.f / 256) * (1.f + 1.f / 256);

// Bounds from the QK-norm weights: scale d max|w_q| max|w_k|, after rounding to bf16. Grid (heads, segments), block 32.
extern "C" __global__ void bounds_from_weights(PARAMS(BoundsFromWeights)) {
    const int head = blockIdx.x, kv_head = head / (heads / kv_heads);
    float q_top = 0.f, k_top = 0.f;
    for (int c = threadIdx.x; c < head_dim; c += 32) {
        q_top = fmaxf(q_top, fabsf(q[(q_shared ? 0 : head * head_dim) + c]));
        k_top = fmaxf(k_top, fabsf(k[(k_shared ? 0 : kv_head * head_dim) + c]));
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        q_top = fmaxf(q_top, __shfl_xor_sync(~0u, q_top, step));
        k_top = fmaxf(k_top, __shfl_xor_sync(~0u, k_top, step));
    }
    if (threadIdx.x == 0) {
        bounds[blockIdx.y * heads + head] =
            q_top * k_top * float(head_dim) * fabsf(scale) * ROUNDED_NORMS;
    }
}
