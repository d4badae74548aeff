// The kernels of forgetting attention on virtual queries, as far as PaTH and Wall attention depend on them: in f64, on
// the operands and in the layouts of `attention/spans.rs`. `Real` is the type of activations.
#pragma once
#include <vector>

struct VirtualSpan {
    int first, tiles;      // virtual tiles of 64 queries
    int k_row, gates;      // of the first key: row, and position in the gate prefixes
    int keys;
};

// A segment: queries and keys, the first row of keys, block, tile of queries, and position in the gate prefixes.
struct SpanSegment {
    int q_len, k_len, k_start, block, tile, gates;
};

// Spans of all levels, as `path/table.rs` cuts them, from the definition: those that queries in the same span of the next
// level see, and those inside them.
template <class Span>
struct SpanCut {
    static constexpr int LEVELS = 4, NONE = 1 << 30, BLOCK = 64;
    const std::vector<int>& sizes;
    std::vector<Span> spans = {};
    std::vector<int> levels = {0};  // spans before each level
    int virtual_tiles = 0, sums = 0;

    // Blocks with queries that see span i of a level inside the same span of the next.
    int2 later(const SpanSegment& s, int level, int i) const {
        const int size = sizes[level], outer = level + 1 < LEVELS ? sizes[level + 1] : NONE;
        const int first = (s.k_len - s.q_len) / BLOCK, count = (s.k_len + BLOCK - 1) / BLOCK;
        const int begin = max((i + 1) * size, first);
        return int2{begin, max(begin, min((i * size / outer + 1) * outer, count))};
    }
    bool is_needed(const SpanSegment& s, int level, int i) const {
        if (level == LEVELS || sizes[level] == NONE || s.q_len == 0) return false;
        if ((i + 1) * sizes[level] > s.k_len / BLOCK) return false;
        const int2 seen = later(s, level, i);
        return seen.x < seen.y || is_carried(s, level, i);
    }
    bool is_carried(const SpanSegment& s, int level, int i) const {
        return level + 1 < LEVELS && is_needed(s, level + 1, i * sizes[level] / sizes[level + 1]);
    }

    // `tiles` of all segments, each from `tile` on.
    template <class Tile>
    void cut(const std::vector<SpanSegment>& segments, int block_count, int sum_tiles, std::vector<Tile>& tiles) {
        std::vector<int> parts;
        for (const SpanSegment& s : segments) parts.push_back(s.block);
        for (int level = 0; level < LEVELS; ++level) {
            for (size_t n = 0; n < segments.size(); ++n) {
                const SpanSegment& s = segments[n];
                const int base = spans.size(), below = level == 0 ? 1 : sizes[level - 1], size = sizes[level];
                const size_t end = n + 1 < segments.size() ? segments[n + 1].tile : tiles.size();
                for (size_t t = s.tile; t < end; ++t) tiles[t].spans[level] = base;
                for (int i = 0; is_needed(s, level, i); ++i) {
                    const int2 seen = later(s, level, i);
                    const int count = seen.y - seen.x, start = i * size * BLOCK;
                    spans.push_back(Span{parts[n] + i * (size / below), s.gates + start,
                                         s.tile + seen.x - (s.k_len - s.q_len) / BLOCK, count, virtual_tiles,
                                         s.k_start + start, size, level, is_carried(s, level, i), sums});
                    virtual_tiles += (count + 1) / 2 * 2;
                    sums += (count + sum_tiles - 1) / sum_tiles;
                }
                parts[n] = block_count + base;
            }
            if (int(spans.size()) > levels.back()) levels.push_back(spans.size());
        }
    }
};

template <class Real>
struct SpanAttention {
    static constexpr int TILE = 64, WIDTH = HEAD_DIM, HALF = 64 * 64 + 32, HALVES = WIDTH == 64 ? 1 : 2;
    typedef std::vector<double> Doubles;

    std::vector<VirtualSpan> spans;
    int heads, kv_heads, d, gate_stride, virtual_tiles;
    double scale;
    const Real *xs, *kl, *v;
    const float2* gates;  // or null

    static double value(float x) { return x; }
    static double value(u16 x) { return bf16_to_float(x); }
    static void set(float& to, double x) { to = float(x); }
    static void set(u16& to, double x) { to = float_to_bf16(float(x)); }
    size_t key_at(int row, int h) const { return (size_t(row) * kv_heads + h / (heads / kv_heads)) * d; }

    // f(span, head, virtual row, its first element, logits in base 2 relative to the gate of the span's last key)
    template <class F>
    void each(F f) const {
        for (const VirtualSpan& s : spans)
            for (int h = 0; h < heads; ++h)
                for (int r = 0; r < s.tiles * TILE; ++r) {
                    const size_t row = size_t(s.first) * TILE + r, at = (row * heads + h) * d;
                    const float2* c = gates ? gates + size_t(h) * gate_stride + s.gates : nullptr;
                    const int keys = s.keys;
                    Doubles logits(keys);
                    for (int j = 0; j < keys; ++j) {
                        for (int e = 0; e < d; ++e) logits[j] += value(xs[at + e]) * value(kl[key_at(s.k_row + j, h) + e]);
                        logits[j] *= scale * 1.4426950408889634;
                        if (c) logits[j] += (double(c[keys - 1].x) - c[j].x) + (double(c[keys - 1].y) - c[j].y);
                    }
                    f(s, h, row, at, logits);
                }
    }

    void forward(std::vector<Real>& o, std::vector<float>& lse) const {
        each([&](const VirtualSpan& s, int h, size_t row, size_t at, const Doubles& logits) {
            double sum = 0.0;
            Doubles out(d);
            for (int j = 0; j < s.keys; ++j) {
                sum += exp2(logits[j]);
                for (int e = 0; e < d; ++e) out[e] += exp2(logits[j]) * value(v[key_at(s.k_row + j, h) + e]);
            }
            for (int e = 0; e < d; ++e) set(o[at + e], out[e] / sum);
            lse[row * heads + h] = log(sum);
        });
    }

    // Gradients without the scale, from statistics of rows and gradients of outputs.
    void backward(const float4* rows, const Real* d_out, std::vector<float>& dq, std::vector<Real>& dk,
                  std::vector<Real>& dv, std::vector<float>& columns) const {
        Doubles dk_sums(dk.size()), dv_sums(dv.size()), column_sums(columns.size()), dq_sums(dq.size());
        each([&](const VirtualSpan& s, int h, size_t row, size_t at, const Doubles& logits) {
            const float4 statistics = rows[size_t(h) * virtual_tiles * TILE + row];
            if (statistics.w == INFINITY) return;
            const size_t gate = size_t(h) * gate_stride + s.gates;
            double decay = 0.0;
            if (gates) {
                const float2 last = gates[gate + s.keys - 1];
                decay = (double(statistics.x) - last.x) + (double(statistics.y) - last.y);
            }
            const size_t first = (size_t(h) * virtual_tiles + row / TILE) * HALVES;
            const int r = row % TILE, eighth = HALVES == 1 ? row % 128 / 16 : r / 8;
            for (int j = 0; j < s.keys; ++j) {
                const size_t key = key_at(s.k_row + j, h);
                const double weight = exp2(logits[j] + decay - statistics.w);
                double dp = 0.0;
                for (int e = 0; e < d; ++e) dp += value(d_out[at + e]) * value(v[key + e]);
                const double ds = weight * (dp - statistics.z);
                for (int e = 0; e < d; ++e) {
                    dk_sums[key + e] += ds * value(xs[at + e]), dv_sums[key + e] += weight * value(d_out[at + e]);
                    const int c = e % 64, thread = r / 16 * 32 + r % 8 * 4 + c % 8 / 2;
                    const size_t element = (c / 8 * 128 + thread) * 4 + r % 16 / 8 * 2 + c % 2;
                    dq_sums[(first + e / 64) * HALF + element] += ds * value(kl[key + e]);
                }
                column_sums[gate + j] += ds;
                // Of the warpgroup and the warp with the key.
                const size_t half = (HALVES == 1 ? first / 2 * 2 : first) + j % 128 / 64;
                dq_sums[half * HALF + TILE * 64 + j % 64 / 16 * 8 + eighth] += ds;
            }
        });
        for (size_t i = 0; i < dq.size(); ++i) dq[i] = dq_sums[i];
        for (const VirtualSpan& s : spans) {
            for (size_t i = key_at(s.k_row, 0); i < key_at(s.k_row + s.keys, 0); ++i) {
                set(dk[i], dk_sums[i]), set(dv[i], dv_sums[i]);
            }
            for (int h = 0; h < heads; ++h)
                for (int j = 0; j < s.keys; ++j) {
                    const size_t i = size_t(h) * gate_stride + s.gates + j;
                    columns[i] = column_sums[i];
                }
        }
    }
};
