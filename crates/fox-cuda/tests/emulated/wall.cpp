// Wall attention, forward and backward, against the definition in f64.
#include "attention_spans.h"
#include "wall.cu"
#include "wall_bwd.cu"
#include "wall_spans.cu"

#if WIDE
typedef float Element;
constexpr double TOLERANCE = 2e-5;
static Element narrow(double x) { return float(x); }
#else
typedef u16 Element;
constexpr double TOLERANCE = 3e-2;
static Element narrow(double x) { return float_to_bf16(float(x)); }
#endif
constexpr double FLOOR = 0.1;
#include "compare.h"

struct Problem {
    std::vector<int> lengths;
    int heads, kv_heads, d, window;
    float rate;  // mean log decay of a step
    std::vector<int> sizes = {};  // blocks of a span at each level
};

// Everything that the kernels read and write.
struct Memory {
    std::vector<Element> q, k, v, d_out, o, x, far, dq, dk, dv;
    std::vector<float> log_decays, log_gates, e, decay, own, down, lse, delta, dfar, dx, dlog_decays, column_sums, row_sums;
    std::vector<float2> gates;
    std::vector<double> totals, c;
    std::vector<u64> blocks;
    std::vector<Segment> segments;
    std::vector<BlockRef> tiles;
    std::vector<int2> spans;
    std::vector<PathTile> older_tiles;
    std::vector<PathSpan> older_spans;
    int rows, tile_count, gate_stride, virtual_tiles = 0, levels = 0;
    float scale;
};

static std::vector<Element> elements(size_t count) {
    std::vector<Element> all(count);
    for (Element& x : all) x = narrow(number());
    return all;
}

static Memory prepare(const Problem& t) {
    Memory m;
    std::vector<SpanSegment> segments;
    m.rows = 0, m.gate_stride = 0;
    for (size_t n = 0; n < t.lengths.size(); ++n) {
        Segment s = {};
        s.q_start = s.k_start = m.rows, s.q_len = s.k_len = t.lengths[n];
        s.c_base = m.gate_stride, s.m_tile0 = s.n_tile0 = m.tiles.size();
        const int first = m.tiles.size(), count = (t.lengths[n] + 63) / 64;
        segments.push_back({t.lengths[n], t.lengths[n], m.rows, first, first, m.gate_stride});
        for (int block = 0; block < count; ++block) {
            m.tiles.push_back(BlockRef{int(n), block});
            PathTile tile = {};
            tile.row = m.rows + block * 64, tile.rows = min(64, t.lengths[n] - block * 64), tile.local = block;
            tile.keys = t.lengths[n];
            m.older_tiles.push_back(tile);
        }
        m.segments.push_back(s);
        m.rows += t.lengths[n], m.gate_stride += (t.lengths[n] + 127) / 128 * 128;
    }
    m.tile_count = m.tiles.size();
    SpanCut<PathSpan> spans{t.sizes};
    spans.cut(segments, m.tile_count, 2, m.older_tiles);
    m.older_spans = spans.spans, m.virtual_tiles = spans.virtual_tiles, m.levels = int(spans.levels.size()) - 1;
    for (int h = 0; h < t.heads; ++h) {
        for (BlockRef tile : m.tiles) {
            m.spans.push_back(int2{t.window ? max(0, tile.block * 64 - t.window + 1) / 64 : 0, tile.block + 1});
        }
    }
    const size_t width = t.heads * t.d, kv_width = t.kv_heads * t.d;
    m.q = elements(m.rows * width), m.d_out = elements(m.rows * width);
    m.k = elements(m.rows * kv_width), m.v = elements(m.rows * kv_width);
    for (size_t i = 0; i < m.rows * width; ++i) m.log_decays.push_back(-2.f * t.rate * (number() * 0.25f + 0.5f));
    for (float& x : m.log_decays) x = fminf(x, 0.f);
    for (int i = 0; i < m.rows * t.heads; ++i) m.log_gates.push_back(-0.1f * fabsf(number()));
    m.gates.assign(t.heads * m.gate_stride, float2{NAN, NAN});
    m.c.assign(m.rows * t.heads, 0.0);
    for (const Segment& s : m.segments) {
        for (int h = 0; h < t.heads; ++h) {
            double sum = 0.0;
            for (int i = 0; i < s.k_len; ++i) {
                if (GATES) sum += m.log_gates[(s.k_start + i) * t.heads + h];
                m.c[(s.k_start + i) * t.heads + h] = sum;
                const double in_base_2 = sum * 1.4426950408889634;
                const float high = in_base_2;
                m.gates[h * m.gate_stride + s.c_base + i] = float2{high, float(in_base_2 - high)};
            }
        }
    }
    const Element blank = narrow(NAN);
    for (auto* x : {&m.o, &m.x, &m.far, &m.dq}) x->assign(m.rows * width, blank);
    for (auto* x : {&m.dk, &m.dv}) x->assign(m.rows * kv_width, blank);
    for (auto* x : {&m.e, &m.dfar, &m.dx, &m.dlog_decays}) x->assign(m.rows * width, NAN);
    for (auto* x : {&m.lse, &m.delta}) x->assign(m.rows * t.heads, NAN);
    m.decay.assign(m.tile_count * width, NAN), m.totals.assign(m.tile_count * width, NAN);
    for (auto* x : {&m.own, &m.down}) x->assign(size_t(t.heads) * m.tile_count * 4096, NAN);
    m.column_sums.assign(t.heads * m.gate_stride, NAN), m.row_sums.assign(t.heads * m.tile_count * 64, NAN);
    m.blocks.assign(2 * t.heads, 0);
    m.scale = 1.f / sqrtf(t.d);
    return m;
}

static void run(const Problem& t, Memory& m) {
    WallParams p = {};
    p.q = m.q.data(), p.k = m.k.data(), p.v = m.v.data(), p.log_decays = m.log_decays.data();
    p.d_out = m.d_out.data(), p.o = m.o.data(), p.lse = m.lse.data(), p.delta = m.delta.data();
    p.x = m.x.data(), p.far = m.far.data(), p.e = m.e.data(), p.decay = m.decay.data(), p.own = m.own.data(), p.down = m.down.data();
    p.dq = m.dq.data(), p.dk = m.dk.data(), p.dv = m.dv.data(), p.dx = m.dx.data(), p.dfar = m.dfar.data();
    p.dlog_decays = m.dlog_decays.data(), p.totals = m.totals.data();
    p.column_sums = m.column_sums.data(), p.row_sums = m.row_sums.data(), p.blocks = m.blocks.data();
    p.gates = m.gates.data(), p.segments = m.segments.data(), p.tiles = m.tiles.data();
    // As with pruning, or from the window alone.
    p.spans = t.window % 2 == 0 ? nullptr : m.spans.data();
    p.tile_count = m.tile_count, p.heads = t.heads, p.kv_heads = t.kv_heads, p.head_dim = t.d;
    p.gate_stride = m.gate_stride, p.window = t.window, p.scale = m.scale;
    const unsigned tiles = m.tile_count, heads = t.heads, rows = m.rows, kv_heads = t.kv_heads;
    p.older_tiles = m.older_tiles.data(), p.older_spans = m.older_spans.data();
    p.span_blocks = t.sizes[0], p.levels = m.levels, p.all_rows = m.rows;
    std::copy(t.sizes.begin(), t.sizes.end(), p.sizes);
    p.virtual_tiles = m.virtual_tiles;
    // Of spans.
    const size_t virtual_rows = size_t(m.virtual_tiles) * 64, halves = virtual_rows / 64 * HALVES;
    const bool older = !m.older_spans.empty();
    std::vector<Element> kl(max(1, m.levels) * m.q.size(), narrow(NAN)), vl(kl), dkl(kl), dvl(kl);
    std::vector<float2> gates;
    for (int level = 0; level < m.levels; ++level) gates.insert(gates.end(), m.gates.begin(), m.gates.end());
    std::vector<Element> xs(virtual_rows * heads * t.d, narrow(NAN)), os(xs), ds(xs);
    std::vector<float> lses(virtual_rows * heads, NAN), dq_tiles(halves * heads * HALF_FLOATS, NAN);
    std::vector<float> columns(max(1, m.levels) * m.column_sums.size(), NAN), sums[3];
    std::vector<float4> statistics(virtual_rows * heads, make_float4(NAN, NAN, NAN, NAN));
    for (auto& x : sums) x.assign(m.q.size(), NAN);
    p.kl = kl.data(), p.vl = m.levels > 1 ? vl.data() : nullptr, p.xs = xs.data(), p.os = os.data(), p.lses = lses.data();
    SpanAttention<Element> attention = {{}, t.heads, t.heads, t.d, m.gate_stride, m.virtual_tiles,
                                        m.scale, xs.data(), kl.data(), p.vl ? p.vl : m.v.data(),
                                        GATES ? gates.data() : nullptr};
    for (const PathSpan& s : m.older_spans) {
        if (s.tiles == 0) continue;
        attention.spans.push_back(VirtualSpan{s.first, s.tiles, s.level * m.rows + s.row,
                                              s.level * t.heads * m.gate_stride + s.gates, s.blocks * 64});
    }
    launch({tiles, heads, 1}, THREADS, [&] { wall_prepare(p); });
    launch({tiles, heads, 1}, THREADS, [&] { wall_own_scores(p); });
    launch({tiles, heads, 1}, THREADS, [&] { wall_fwd(p); });
    if (older) {
        launch({tiles, heads, 1}, THREADS, [&] { wall_span_rows(p); });
        attention.forward(os, lses);
        launch({tiles, heads, 1}, THREADS, [&] { wall_merge(p); });
    }
    launch({(rows + 3) / 4, heads, 1}, THREADS, [&] { wall_delta(p); });
    launch({tiles, kv_heads, COLUMN_SPLITS}, THREADS, [&] { wall_bwd_keys(p); });
    launch({tiles, heads, 1}, THREADS, [&] { wall_bwd_queries(p); });
    if (older) {
        p.ds = ds.data(), p.rows = statistics.data(), p.dq_tiles = dq_tiles.data(), p.dkl = dkl.data();
        p.dvl = dvl.data(), p.columns_older = columns.data();
        p.dx_older = sums[0].data(), p.dfar_older = sums[1].data(), p.difference_older = sums[2].data();
        launch({tiles, heads, 1}, THREADS, [&] { wall_span_rows(p); });
        attention.backward(p.rows, ds.data(), dq_tiles, dkl, dvl, columns);
        launch({tiles, heads, 1}, THREADS, [&] { wall_span_grads(p); });
    }
    launch({tiles, heads, unsigned(t.d + CHANNELS - 1) / CHANNELS}, THREADS, [&] { wall_finish(p); });
    launch({(rows + 3) / 4, kv_heads, 1}, THREADS, [&] { wall_sum_heads(p); });
    launch({tiles, heads, 1}, THREADS, [&] { wall_decay_totals(p); });
    launch({unsigned(m.segments.size()), heads, unsigned(t.d + 31) / 32}, 32, [&] { wall_decay_scan(p); });
    launch({tiles, heads, 1}, THREADS, [&] { wall_decay_gradient(p); });
}

static double wide(Element x) { return to_float(x); }

static void check(Problem t) {
    t.sizes.resize(4, 1 << 30);
    Memory m = prepare(t);
    run(t, m);
    const int d = t.d, group = t.heads / t.kv_heads, width = t.heads * d, kv_width = t.kv_heads * d;
    std::vector<double> o(m.rows * width), dq(o), decays(o), dk(m.rows * kv_width), dv(dk);
    std::vector<double> columns(t.heads * m.gate_stride), rows(t.heads * m.tile_count * 64);
    for (const Segment& s : m.segments) {
        for (int h = 0; h < t.heads; ++h) {
            std::vector<double> dg(s.k_len * d);
            for (int i = 0; i < s.k_len; ++i) {
                const int row = s.k_start + i, from = t.window ? max(0, i - t.window + 1) : 0;
                std::vector<double> score(i + 1), factor((i + 1) * d, 1.0);
                double top = -1e300, sum = 0.0, delta = 0.0;
                for (int j = i; j >= from; --j) {
                    const int key = s.k_start + j;
                    double dot = 0.0;
                    for (int c = 0; c < d; ++c) {
                        if (j < i) {
                            const double e = exp(double(m.log_decays[(key + 1) * width + h * d + c]));
                            factor[j * d + c] = factor[(j + 1) * d + c] * e;
                        }
                        dot += wide(m.q[row * width + h * d + c]) * wide(m.k[key * kv_width + h / group * d + c]) *
                               factor[j * d + c];
                    }
                    score[j] = dot * m.scale + m.c[row * t.heads + h] - m.c[key * t.heads + h];
                    top = fmax(top, score[j]);
                }
                for (int j = from; j <= i; ++j) sum += exp(score[j] - top);
                for (int j = from; j <= i; ++j) {
                    score[j] = exp(score[j] - top) / sum;
                    for (int c = 0; c < d; ++c) {
                        o[row * width + h * d + c] += score[j] * wide(m.v[(s.k_start + j) * kv_width + h / group * d + c]);
                    }
                }
                for (int c = 0; c < d; ++c) delta += wide(m.d_out[row * width + h * d + c]) * o[row * width + h * d + c];
                for (int j = from; j <= i; ++j) {
                    const int key = s.k_start + j, at = key * kv_width + h / group * d;
                    double dp = 0.0;
                    for (int c = 0; c < d; ++c) dp += wide(m.d_out[row * width + h * d + c]) * wide(m.v[at + c]);
                    const double ds = score[j] * (dp - delta);
                    columns[h * m.gate_stride + s.c_base + j] += ds;
                    rows[(size_t(h) * m.tile_count + s.m_tile0) * 64 + i] += ds;
                    for (int c = 0; c < d; ++c) {
                        const double q = wide(m.q[row * width + h * d + c]), k = wide(m.k[at + c]);
                        const double x = ds * m.scale * factor[j * d + c];
                        dv[at + c] += score[j] * wide(m.d_out[row * width + h * d + c]);
                        dk[at + c] += x * q, dq[row * width + h * d + c] += x * k;
                        dg[i * d + c] += x * q * k, dg[j * d + c] -= x * q * k;
                    }
                }
            }
            for (int c = 0; c < d; ++c) {
                double later = 0.0;
                for (int i = s.k_len - 1; i >= 0; --i) {
                    later += dg[i * d + c];
                    decays[(s.k_start + i) * width + h * d + c] = i == 0 ? 0.0 : later;
                }
            }
        }
    }
    compare("o", m.o, o), compare("dq", m.dq, dq), compare("dk", m.dk, dk), compare("dv", m.dv, dv);
    compare("dlog_decays", m.dlog_decays, decays);
    if (!GATES) return;
    // Positions without a key are never written. The exact row sums are 0.
    for (size_t i = 0; i < columns.size(); ++i) {
        if (m.column_sums[i] != m.column_sums[i]) m.column_sums[i] = 0.f;
    }
    compare("column sums", m.column_sums, columns), compare("row sums", m.row_sums, rows, 1.0);
}

int main() {
    check({{1, 70, 200}, 2, 1, HEAD_DIM - 24, 0, 0.05f});
    check({{150}, 2, 2, HEAD_DIM, 0, 2.f});
    check({{130}, 1, 1, 8, 0, 5.f});
    check({{64, 129}, 2, 1, 16, 70, 0.f});
    check({{200}, 1, 1, 16, 65, 0.1f});
    if (HEAD_DIM > 128) return 0;
    check({{450, 30, 300}, 2, 2, HEAD_DIM - 24, 0, 0.003f, {2}});
    check({{450, 30, 300}, 2, 2, HEAD_DIM - 24, 0, 0.003f, {1, 2, 4}});
    check({{270}, 1, 1, HEAD_DIM, 0, 1.f, {2}});
}
