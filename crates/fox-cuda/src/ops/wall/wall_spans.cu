// Wall attention, older spans by the Hopper kernels of forgetting attention; see wall.cuh. Grid (tiles, heads). Query
// heads have their own keys.
//
// Compile-time: HEAD_DIM, WIDE, GATES.
#include "wall.cuh"
#include "spans.cuh"

// A tile among the spans of its segment.
struct SpanTile {
    PathTile t;
    int tile, head;

    DEVICE SpanTile(const WallParams& p) : t(p.older_tiles[blockIdx.x]), tile(blockIdx.x), head(blockIdx.y) {}
    DEVICE bool has_older(const WallParams& p) const { return t.local >= p.sizes[0]; }
    // Whether queries of later spans see the block as part of a span of a level: those inside its span of the next one.
    DEVICE bool is_seen(const WallParams& p, int level) const {
        const int next = level + 1 < p.levels ? p.sizes[level + 1] : 1 << 30;
        const int end = (t.local / p.sizes[level] + 1) * p.sizes[level];
        return end % next != 0 && end * BLOCK < t.keys;
    }
    // Product of the decays of `count` blocks, the first `offset` blocks after this one.
    DEVICE float product(const WallParams& p, int offset, int count, int channel) const {
        float all = 1.f;
#pragma unroll 8
        for (int i = 0; i < count; ++i) {
            all *= p.decay[(size_t(tile + offset + i) * p.heads + head) * p.head_dim + channel];
        }
        return all;
    }
    DEVICE float newer_in_span(const WallParams& p, int level, int channel) const {
        return product(p, 1, p.sizes[level] - 1 - t.local % p.sizes[level], channel);
    }
    DEVICE float older_in_span(const WallParams& p, int channel) const {
        const int lane = t.local % p.sizes[0];
        return product(p, -lane, lane, channel);
    }
    // `row`: the first of the tile.
    DEVICE float of_span(const WallParams& p, const PathSpan& s, int row, int channel) const {
        return product(p, (s.row - row) / BLOCK, s.blocks, channel);
    }
};
// First element of the keys of a level.
DEVICE size_t level_element(const WallParams& p, int level) {
    return size_t(level) * p.all_rows * p.heads * p.head_dim;
}
DEVICE size_t virtual_element(const WallParams& p, int tile, int row, int head, int channel) {
    return element(p, tile * BLOCK + row, head, channel);
}

// Keys at the end of their span, virtual queries, and in the backward the gradients of their outputs, and gate prefix,
// delta and statistics. Rows beyond the tile have no weight.
extern "C" __global__ void __launch_bounds__(THREADS) wall_span_rows(const __grid_constant__ WallParams p) {
    constexpr int CHANNELS = HEAD_DIM <= 64 ? 64 : THREADS;
    const SpanTile own(p);
    const Block b = block_at(p, own.tile, own.head);
    const OlderSpans older(p, own.t);
    const int head = own.head, first = threadIdx.x / CHANNELS, step = THREADS / CHANNELS;
    for (int c = threadIdx.x % CHANNELS; c < p.head_dim; c += CHANNELS) {
        for (int level = 0; level < p.levels; ++level) {
            if (!own.is_seen(p, level)) continue;
            const float factor = own.newer_in_span(p, level, c);
            const size_t keys = level_element(p, level);
#pragma unroll 8
            for (int r = first; r < b.count; r += step) {
                const size_t at = element(p, b.row + r, head, c);
                const real v = p.vl ? p.v[at] : to_real(0.f);
                p.kl[keys + at] = to_real(to_float(p.far[at]) * factor);
                if (p.vl) p.vl[keys + at] = v;
            }
        }
        float factor = own.older_in_span(p, c);
        for (int n = older.count - 1; n >= 0; --n) {
            const PathSpan s = p.older_spans[older.at(n)];
            const int row = own.tile - s.tile0;
            const bool padded = row == s.tiles - 1 && s.tiles % 2 == 1;
            for (int r = first; r < BLOCK; r += step) {
                const size_t at = element(p, b.row + r, head, c), to = virtual_element(p, s.first + row, r, head, c);
                const size_t pad = virtual_element(p, s.first + row + 1, r, head, c);
                p.xs[to] = to_real(r < b.count ? to_float(p.x[at]) * factor : 0.f);
                if (padded) p.xs[pad] = to_real(0.f);
                if (p.ds == nullptr) continue;
                p.ds[to] = r < b.count ? p.d_out[at] : to_real(0.f);
                if (padded) p.ds[pad] = to_real(0.f);
            }
            factor *= own.of_span(p, s, b.row, c);
        }
    }
    const int r = threadIdx.x;
    if (p.ds == nullptr || r >= BLOCK) return;
    const float4 none = make_float4(0.f, 0.f, 0.f, -NEG_INF);
    float4 statistics = none;
    if (r < b.count) {
        const size_t row = size_t(b.row + r) * p.heads + head;
        const float2 c = GATES ? b.gates[b.first + r] : make_float2(0.f, 0.f);
        statistics = make_float4(c.x, c.y, p.delta[row], p.lse[row] * LOG2_E);
    }
    for (int n = 0; n < older.count; ++n) {
        const PathSpan s = p.older_spans[older.at(n)];
        const int row = own.tile - s.tile0;
        float4* rows = p.rows + (size_t(head) * p.virtual_tiles + s.first + row) * BLOCK;
        rows[r] = statistics;
        if (row == s.tiles - 1 && s.tiles % 2 == 1) rows[BLOCK + r] = none;
    }
}

// Adds the outputs of older spans to that of the own one. A span's statistics have the gate prefix of its last key in
// own of the query's.
extern "C" __global__ void __launch_bounds__(THREADS) wall_merge(const __grid_constant__ WallParams p) {
    const SpanTile own(p);
    const Block b = block_at(p, own.tile, own.head);
    if (!own.has_older(p)) return;
    const OlderSpans older(p, own.t);
    for (int r = threadIdx.x / 32; r < b.count; r += THREADS / 32) {
        const size_t row = size_t(b.row + r) * p.heads + b.head;
        auto statistic = [&](int n) {
            const PathSpan s = p.older_spans[older.at(n)];
            const int last = s.row - b.s.k_start + s.blocks * BLOCK - 1;
            const float decay = GATES ? gate_difference(b.gates[b.first + r], b.gates[last]) : 0.f;
            return p.lses[size_t((s.first + own.tile - s.tile0) * BLOCK + r) * p.heads + b.head] * LOG2_E + decay;
        };
        auto output = [&](int n) -> const real* {
            const PathSpan s = p.older_spans[older.at(n)];
            return p.os + virtual_element(p, s.first + own.tile - s.tile0, r, b.head, 0);
        };
        real* o = p.o + element(p, b.row + r, b.head, 0);
        const float lse = merge_spans(o, p.lse[row] * LOG2_E, older.count, p.head_dim, statistic, output);
        __syncwarp();
        if (threadIdx.x % 32 == 0) p.lse[row] = lse * LN_2;
    }
}

// Gradients from pairs of different spans, after those of the own span: of `x`, of `far` and of the summed log decays
// (f32), which wall_finish adds; values, and sums of rows and columns, are added here.
extern "C" __global__ void __launch_bounds__(THREADS, 3) wall_span_grads(const __grid_constant__ WallParams p) {
    // In shared memory, because registers hold two accumulators.
    __shared__ float factor[HEAD_DIM], newer[OlderSpans::LEVELS][HEAD_DIM];
    __shared__ PathSpan s;
    const SpanTile own(p);
    const Block b = block_at(p, own.tile, own.head);
    const int head = own.head, r = threadIdx.x;
    for (int c = threadIdx.x; c < HEAD_DIM; c += THREADS) {
        factor[c] = c < p.head_dim ? own.older_in_span(p, c) : 0.f;
    }
    float dx[HEAD_DIM / 2] = {}, difference[HEAD_DIM / 2] = {}, row_sum = 0.f;
    for (int n = OlderSpans(p, own.t).count - 1; n >= 0; --n) {
        if (threadIdx.x == 0) s = p.older_spans[OlderSpans(p, own.t).at(n)];
        __syncthreads();
        const int tile = s.first + own.tile - s.tile0;
        const size_t index = size_t(head) * p.virtual_tiles + tile;
#pragma unroll
        for (int g = 0; g < HEAD_DIM / 8; ++g) {
            const float* half = p.dq_tiles + (index * HALVES + g / 8) * HALF_FLOATS;
            const float4 part = reinterpret_cast<const float4*>(half)[g % 8 * 128 + threadIdx.x];
            const float all[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = fragment_row() + 8 * (e / 2), column = 8 * g + fragment_column() + e % 2;
                if (column >= p.head_dim) continue;
                const float gradient = p.scale * all[e];
                dx[4 * g + e] = fmaf(factor[column], gradient, dx[4 * g + e]);
                const float x = to_float(p.xs[virtual_element(p, tile, row, head, column)]);
                difference[4 * g + e] = fmaf(x, gradient, difference[4 * g + e]);
            }
        }
        if (GATES && r < b.count) {
            const int rows = b.count - r / QUERIES_PER_SUM * QUERIES_PER_SUM;
            row_sum += group_sum(p.dq_tiles, index, tile, r) / min(QUERIES_PER_SUM, rows);
        }
        __syncthreads();
        for (int c = threadIdx.x; c < p.head_dim; c += THREADS) factor[c] *= own.of_span(p, s, b.row, c);
        __syncthreads();
    }
    __syncthreads();
    int seen = 0;
    for (int level = 0; level < p.levels; ++level) {
        if (!own.is_seen(p, level)) continue;
        seen |= 1 << level;
        for (int c = threadIdx.x; c < p.head_dim; c += THREADS) newer[level][c] = own.newer_in_span(p, level, c);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) {
        const int row = fragment_row() + 8 * (i / 2 % 2), column = i / 4 * 8 + fragment_column() + i % 2;
        if (row >= b.count || column >= p.head_dim) continue;
        const size_t at = element(p, b.row + row, head, column);
        float dfar = 0.f, dv = 0.f;
        for (int level = 0; level < p.levels; ++level) {
            if ((seen >> level & 1) == 0) continue;
            const size_t key = level_element(p, level) + at;
            const float gradient = p.scale * to_float(p.dkl[key]);
            dfar = fmaf(newer[level][column], gradient, dfar);
            difference[i] -= to_float(p.kl[key]) * gradient;
            dv += to_float(p.dvl[key]);
        }
        if (seen != 0) p.dv[at] = to_real(to_float(p.dv[at]) + dv);
        p.dx_older[at] = dx[i], p.dfar_older[at] = dfar, p.difference_older[at] = difference[i];
    }
    if (!GATES || r >= BLOCK) return;
    if (own.has_older(p)) {
        float* to = p.row_sums + (size_t(head) * p.tile_count + own.tile) * BLOCK + r;
        *to = group_mean(*to + row_sum, b.count);
    }
    const size_t at = size_t(head) * p.gate_stride + b.s.c_base + b.first + r;
    for (int level = 0; level < p.levels; ++level) {
        if (seen >> level & 1) p.column_sums[at] += p.columns_older[size_t(level) * p.heads * p.gate_stride + at];
    }
}
