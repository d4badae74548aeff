// Spans of keys older than a query, whose attention the Hopper kernels of forgetting attention compute for virtual
// queries: a copy of the query for each span. Used by PaTH (path.cuh) and Wall attention.
#pragma once
#include "real.cuh"

// Halves of 64 x 64 in which the backward kernel leaves the gradients of a tile of 64 virtual queries: each has an
// accumulator of 128 threads, and eight sums of the gradients of scores, each over a group of queries, for each of four
// warps.
constexpr int HALF_FLOATS = 64 * 64 + 4 * 8;
constexpr int QUERIES_PER_SUM = HEAD_DIM == 64 ? 16 : 8, HALVES = HEAD_DIM == 64 ? 1 : 2;

// The older spans that a tile meets, from the oldest one on: of the last level first.
struct OlderSpans {
    static constexpr int LEVELS = 4;
    int firsts[LEVELS], counts[LEVELS], count = 0;

    template <class Params, class Tile>
    DEVICE OlderSpans(const Params& p, const Tile& t) {
        static_assert(sizeof(p.sizes) == LEVELS * sizeof(int) && sizeof(t.spans) == sizeof(p.sizes), "one for each level");
#pragma unroll
        for (int level = 0; level < LEVELS; ++level) {
            const int own = t.local / p.sizes[level];
            int outer = 0;
            if (level + 1 < LEVELS) {
                const int next = p.sizes[(level + 1) % LEVELS];
                outer = t.local / next * (next / p.sizes[level]);
            }
            firsts[level] = t.spans[level] + outer;
            counts[level] = own - outer;
            count += counts[level];
        }
    }
    // The index of span n.
    DEVICE int at(int n) const {
        int index = 0;
#pragma unroll
        for (int level = LEVELS - 1; level >= 0; --level) {
            if (n >= 0 && n < counts[level]) index = firsts[level] + n;
            n -= counts[level];
        }
        return index;
    }
};

// Sum of the gradients of scores over a query's group, of row `row` of virtual tile `tile`: `index` counts the tiles of
// all heads. Both halves have sums of 64 keys: at head dim 64 of two tiles of queries, else of one.
DEVICE float group_sum(const float* dq_tiles, size_t index, int tile, int row) {
    const size_t first = HALVES == 1 ? index - tile % 2 : 2 * index;
    const float* sums = dq_tiles + first * HALF_FLOATS + 64 * 64;
    const int column = row / QUERIES_PER_SUM + (HALVES == 1 ? tile % 2 * 4 : 0);
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < 8; ++w) sum += sums[w / 4 * HALF_FLOATS + w % 4 * 8 + column];
    return sum;
}
// The mean of `sum` over the group of row threadIdx.x, of whole warps; `rows` are valid. Sums of a row over all keys
// differ from 0 by rounding alone. Those over older spans are known for groups only: so is the difference, and it is
// distributed evenly.
DEVICE float group_mean(float sum, int rows) {
    const int row = threadIdx.x;
    if (row >= rows) sum = 0.f;
#pragma unroll
    for (int step = 1; step < QUERIES_PER_SUM; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum / max(1, min(QUERIES_PER_SUM, rows - row / QUERIES_PER_SUM * QUERIES_PER_SUM));
}

// Adds the outputs of `older` spans to a row o of the own one, by a warp. `own` and statistic(n) are logs of the sums
// of weights in base 2; the result is that of all.
template <class Statistic, class Output>
DEVICE float merge_spans(real* o, float own, int older, int head_dim, Statistic statistic, Output output) {
    const int lane = threadIdx.x % 32;
    float top = own, sum = 0.f;
    for (int n = lane; n < older; n += 32) top = fmaxf(top, statistic(n));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    for (int n = lane; n < older; n += 32) sum += exp2f(statistic(n) - top);
    const float lse = top + log2f(warp_sum(sum) + exp2f(own - top));
    constexpr int PAIRS = (HEAD_DIM + 63) / 64;  // of a lane
    float2 out[PAIRS] = {};
    auto add = [&](const real* x, float weight) {
#pragma unroll
        for (int c = 0; c < PAIRS; ++c) {
            const int column = 64 * c + 2 * lane;
            if (column >= head_dim) continue;
#if BF16
            const u32 pair = *reinterpret_cast<const u32*>(x + column);
            const float2 y = make_float2(bf16_lo(pair), bf16_hi(pair));
#else
            const float2 y = make_float2(x[column], x[column + 1]);
#endif
            out[c].x = fmaf(weight, y.x, out[c].x), out[c].y = fmaf(weight, y.y, out[c].y);
        }
    };
    add(o, exp2f(own - lse));
#pragma unroll 4
    for (int n = 0; n < older; ++n) add(output(n), exp2f(statistic(n) - lse));
#pragma unroll
    for (int c = 0; c < PAIRS; ++c) {
        const int column = 64 * c + 2 * lane;
        if (column >= head_dim) continue;
#if BF16
        *reinterpret_cast<u32*>(o + column) = pack_bf16(out[c].x, out[c].y);
#else
        o[column] = out[c].x, o[column + 1] = out[c].y;
#endif
    }
    return lse;
}
