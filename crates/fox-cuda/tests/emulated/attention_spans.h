// The kernels of forgetting attention on virtual queries, as far as PaTH and Wall attention depend on them: in f64, on
// the operands and in the layouts of `attention/spans.rs`. `Real` is the type of activations.
#pragma once
#include <vector>

struct VirtualSpan {
    int first, tiles;      // virtual tiles of 64 queries
    int k_row, gates;      // of the first key: row, and position in the gate prefixes
    int keys;
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
