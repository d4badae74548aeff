// PaTH attention against its definition in f64, token by token: outputs, statistics, counts and all gradients.
#include "attention_spans.h"
namespace prepare {
#include "path_prepare.cu"
}
#undef WARPS_ACROSS
#undef GUARD_params
#undef GUARD_real
#undef GUARD_tiles
#undef GUARD_triangular
#undef GUARD_path
#undef GUARD_spans
namespace walk {
#include "path_walk.cu"
}
#undef WARPS_ACROSS
#undef GUARD_params
#undef GUARD_real
#undef GUARD_tiles
#undef GUARD_path
#undef GUARD_spans
namespace bwd {
#include "path_bwd.cu"
}
#undef WARPS_ACROSS
#undef GUARD_params
#undef GUARD_real
#undef GUARD_tiles
#undef GUARD_path
#undef GUARD_spans
#undef GUARD_path_queries
namespace older {
#include "path_older.cu"
}
#undef WARPS_ACROSS
#undef GUARD_params
#undef GUARD_real
#undef GUARD_tiles
#undef GUARD_path
#undef GUARD_spans
namespace spans {
#include "path_spans.cu"
}
using walk::PathBlock;
using walk::PathParams;
using walk::PathSpan;
using walk::PathTile;
using walk::real;

typedef std::vector<double> Doubles;
typedef std::vector<float> Floats;
typedef std::vector<real> Reals;
constexpr int C = 64, WIDTH = HEAD_DIM, LEVELS = 4, NONE = 1 << 30, SUM_TILES = 2;
constexpr double BASE_2 = 1.4426950408889634, LOG_TOLERANCE = -4.0, BOUND = 1.0;

struct Segment {
    int q_start, q_len, k_start, k_len;
};

double value(float x) { return x; }
#if BF16
double value(real x) { return walk::to_float(x); }
#endif
Reals activations(size_t count) {
    Reals all(count);
    for (real& x : all) x = walk::to_real(number());
    return all;
}

// The norm of the difference over the norm of what should come out, or over that of small numbers if larger.
template <class T>
void check(const std::vector<T>& got, const Doubles& want, double tolerance, const char* what) {
    double error = 0.0, size = 0.01 * want.size();
    for (size_t i = 0; i < want.size(); ++i) {
        const double d = value(got[i]) - want[i];
        error += d * d, size += want[i] * want[i];
    }
    if (sqrt(error) <= tolerance * sqrt(size)) return;
    printf("%s differs by %g\n", what, sqrt(error / size));
    exit(1);
}

// The same parameters in another namespace.
template <class P>
const P& as(const PathParams& p) {
    static_assert(sizeof(P) == sizeof(PathParams), "one definition");
    return reinterpret_cast<const P&>(p);
}

// Operands and tables.
struct Case {
    int heads, kv_heads, d;
    std::vector<Segment> segments;
    float strength;  // nats per token that gates forget, 0 without gates
    bool pruned;
    int chunk;  // tiles whose queries the backward stores at once
    std::vector<int> sizes = {};  // blocks of a span at each level

    int q_rows = 0, k_rows = 0, stride = 0, slots = 0, sums = 0;
    double scale = 0.0;
    Reals q, k, v, d_out;
    Floats u;
    std::vector<float2> prefix;
    std::vector<PathBlock> blocks;
    std::vector<PathTile> tiles;
    std::vector<PathSpan> spans;
    std::vector<int> levels = {0};  // spans before each level
    int virtual_tiles = 0, span_sums = 0;

    void draw() {
        sizes.resize(LEVELS, NONE);
        for (const Segment& s : segments) {
            q_rows = max(q_rows, s.q_start + s.q_len);
            k_rows = max(k_rows, s.k_start + s.k_len);
        }
        scale = 1.0 / sqrt(double(d));
        q = activations(size_t(q_rows) * heads * d), d_out = activations(q.size());
        k = activations(size_t(k_rows) * kv_heads * d), v = activations(k.size());
        u = numbers(k.size());
        for (size_t i = 0; i < u.size(); i += d) {
            // Squared lengths from 0 to nearly 2.
            double sum = 0.0;
            for (int c = 0; c < d; ++c) sum += u[i + c] * u[i + c];
            const double factor = sqrt(2.0 * (i / d % 7) / 6.0 / sum) * 0.998;
            for (int c = 0; c < d; ++c) u[i + c] = value(walk::to_real(float(u[i + c] * factor)));
        }
        cut();
    }

    void cut() {
        std::vector<int> bases;
        std::vector<SpanSegment> starts;
        for (const Segment& s : segments) {
            const int offset = s.k_len - s.q_len, first = offset / C, count = (s.k_len + C - 1) / C;
            const int block0 = blocks.size(), tile0 = tiles.size();
            const int end = s.q_len ? tile0 + count - first : tile0;
            starts.push_back({s.q_len, s.k_len, s.k_start, block0, tile0, stride});
            auto tile_at = [&](int b) { return min(tile0 + max(b - first, 0), end); };
            for (int b = 0; b < count; ++b) {
                const int begin = tile_at(b + 1), rows = min(C, s.k_len - b * C);
                const int last = tile_at((b / sizes[0] + 1) * sizes[0]);
                blocks.push_back(PathBlock{s.k_start + b * C, rows, stride + b * C, b, begin, last});
                if (s.q_len == 0 || b < first) continue;
                const int position = max(b * C, offset), query = position - offset;
                tiles.push_back(PathTile{s.q_start + query, b * C + rows - position, position - b * C, block0 + b, b,
                                         stride, int(bases.size()), s.k_len, slots, sums + query, {}});
                slots += b % sizes[0];
            }
            bases.push_back(stride);
            stride += (s.k_len + 127) / 128 * 128;
            sums += (s.q_len + C - 1) / C * C;
        }
        stride += 256;
        SpanCut<PathSpan> of_spans{sizes};
        of_spans.cut(starts, int(blocks.size()), SUM_TILES, tiles);
        spans = of_spans.spans, levels = of_spans.levels;
        virtual_tiles = of_spans.virtual_tiles, span_sums = of_spans.sums;
        // Undefined beyond the segments.
        prefix.assign(size_t(heads) * stride, make_float2(NAN, NAN));
        for (size_t n = 0; n < segments.size(); ++n)
            for (int h = 0; h < heads; ++h) {
                double c = 0.0;
                for (int t = 0; t < segments[n].k_len; ++t) {
                    c -= strength * fabsf(number()) * BASE_2;
                    prefix[size_t(h) * stride + bases[n] + t] = make_float2(float(c), float(c - float(c)));
                }
            }
    }
    size_t query_at(int row, int h) const { return (size_t(row) * heads + h) * d; }
    size_t key_at(int row, int h) const { return (size_t(row) * kv_heads + h / (heads / kv_heads)) * d; }
};

// Results of the definition.
struct Definition {
    const Case& x;
    Doubles o, lse, dq, dk, dv, du, rows, columns;
    u64 visited = 0, total = 0;

    Definition(const Case& x) : x(x) {
        for (Doubles* like_q : {&o, &dq}) like_q->resize(x.q.size());
        for (Doubles* like_k : {&dk, &dv, &du}) like_k->resize(x.k.size());
        lse.resize(size_t(x.q_rows) * x.heads);
        rows.resize(size_t(x.heads) * x.sums), columns.resize(size_t(x.heads) * x.stride);
        for (const PathTile& t : x.tiles)
            for (int h = 0; h < x.heads; ++h) tile(t, h);
    }

    void tile(const PathTile& t, int h) {
        const float2* c = x.prefix.data() + size_t(h) * x.stride + t.gates;
        auto decay = [&](int i, int j) { return (double(c[i].x) - c[j].x) + (double(c[i].y) - c[j].y); };
        const double threshold = (LOG_TOLERANCE - 2.0 * BOUND - log(double(t.keys))) * BASE_2;
        int first = 0;
        while (x.pruned && first < t.local && decay(t.local * C + t.lane, first * C + C - 1) < threshold) ++first;
        visited += t.local - first + 1, total += t.local + 1;
        for (int r = 0; r < t.rows; ++r) query(t, h, r, first * C, decay);
    }

    template <class F>
    void query(const PathTile& t, int h, int r, int first, F decay) {
        const int d = x.d, i = t.local * C + t.lane + r, k_start = x.segments[t.segment].k_start;
        const size_t at = x.query_at(t.row + r, h);
        auto key = [&](int j) { return x.key_at(k_start + j, h); };
        std::vector<Doubles> met(i + 1);
        Doubles y(d), score(i + 1);
        for (int e = 0; e < d; ++e) y[e] = value(x.q[at + e]);
        double top = -INFINITY, sum = 0.0;
        for (int j = i; j >= first; --j) {
            met[j] = y;
            double dot = 0.0, along = 0.0;
            for (int e = 0; e < d; ++e) dot += y[e] * value(x.k[key(j) + e]), along += y[e] * x.u[key(j) + e];
            score[j] = x.scale * dot + decay(i, j) / BASE_2;
            top = fmax(top, score[j]);
            for (int e = 0; e < d; ++e) y[e] -= along * x.u[key(j) + e];
        }
        for (int j = first; j <= i; ++j) sum += exp(score[j] - top);
        const double l = lse[size_t(t.row + r) * x.heads + h] = top + log(sum);
        double delta = 0.0;
        for (int e = 0; e < d; ++e) {
            for (int j = first; j <= i; ++j) o[at + e] += exp(score[j] - l) * value(x.v[key(j) + e]);
            delta += o[at + e] * value(x.d_out[at + e]);
        }
        Doubles dx(d);
        for (int j = first; j <= i; ++j) {
            const size_t n = key(j);
            double ux = 0.0, ud = 0.0, dp = 0.0;
            for (int e = 0; e < d; ++e) {
                ux += x.u[n + e] * met[j][e], ud += x.u[n + e] * dx[e];
                dp += value(x.d_out[at + e]) * value(x.v[n + e]);
            }
            const double p = exp(score[j] - l), ds = p * (dp - delta);
            for (int e = 0; e < d; ++e) {
                du[n + e] -= ux * dx[e] + ud * met[j][e];
                dx[e] += ds * x.scale * value(x.k[n + e]) - ud * x.u[n + e];
                dv[n + e] += p * value(x.d_out[at + e]);
                dk[n + e] += ds * x.scale * met[j][e];
            }
            rows[size_t(h) * x.sums + t.sums + r] += ds;
            columns[size_t(h) * x.stride + t.gates + j] += ds;
        }
        for (int e = 0; e < d; ++e) dq[at + e] = dx[e];
    }
};

Reals unset(size_t count) { return Reals(count, walk::to_real(NAN)); }

void test(Case x) {
    x.draw();
    const Definition want(x);
    const unsigned blocks = x.blocks.size(), tiles = x.tiles.size(), heads = x.heads, kv_heads = x.kv_heads;
    const size_t scratch = size_t(blocks) * kv_heads;
    Reals t = unset(scratch * C * C), n = unset(scratch * C * C);
    const unsigned span_count = x.spans.size(), levels = x.levels.size() - 1;
    const size_t product = WIDTH * WIDTH, products = scratch + span_count * kv_heads;
    Reals kh = unset(scratch * C * WIDTH), e = unset(products * product);
    Reals o(x.q.size()), dq(x.q.size()), dk(x.k.size()), dv(x.k.size());
    Floats lse(want.lse.size()), delta(lse.size()), du(x.k.size());
    Floats rows(want.rows.size()), columns(want.columns.size() * max(1, levels));
    // Every row of a segment is written.
    for (const PathTile& tile : x.tiles) {
        std::fill_n(o.begin() + x.query_at(tile.row, 0), x.query_at(tile.rows, 0), walk::to_real(NAN));
        std::fill_n(dq.begin() + x.query_at(tile.row, 0), x.query_at(tile.rows, 0), walk::to_real(NAN));
    }
    for (const PathBlock& block : x.blocks) {
        for (Reals* out : {&dk, &dv}) {
            std::fill_n(out->begin() + x.key_at(block.row, 0), x.key_at(block.rows, 0), walk::to_real(NAN));
        }
        std::fill_n(du.begin() + x.key_at(block.row, 0), x.key_at(block.rows, 0), NAN);
    }
    Floats bounds(x.segments.size() * heads, float(BOUND));
    std::vector<u64> counts(2 * heads);
    std::vector<int> first(size_t(heads) * tiles);
    PathParams p = {};
    p.q = x.q.data(), p.k = x.k.data(), p.v = x.v.data(), p.u = x.u.data(), p.d_out = x.d_out.data();
    p.o = o.data(), p.lse = lse.data(), p.delta = delta.data(), p.counts = counts.data(), p.first = first.data();
    p.gates = x.strength > 0.f ? x.prefix.data() : nullptr, p.bounds = x.pruned ? bounds.data() : nullptr;
    p.blocks = x.blocks.data(), p.tiles = x.tiles.data();
    p.t = t.data(), p.n = n.data(), p.kh = kh.data(), p.e = e.data();
    p.row_sums = rows.data(), p.column_sums = columns.data();
    p.dq = dq.data(), p.dk = dk.data(), p.dv = dv.data(), p.du = du.data();
    p.heads = heads, p.kv_heads = kv_heads, p.head_dim = x.d, p.gate_stride = x.stride, p.row_sum_stride = x.sums;
    p.tile_count = tiles, p.scale = x.scale, p.log_tolerance = LOG_TOLERANCE;
    const size_t virtual_rows = size_t(x.virtual_tiles) * C;
    Reals f = unset(products * product), kl = unset(levels * x.k.size()), vl = kl;
    Reals xs = unset(virtual_rows * heads * x.d), os = xs, ds = xs, dkl = kl, dvl = kl;
    Floats lses(virtual_rows * heads, NAN), dx_spans(size_t(tiles) * heads * C * WIDTH, NAN);
    Floats dq_tiles(virtual_rows / C * heads * (WIDTH / 64) * walk::HALF_FLOATS, NAN);
    Floats de_parts(x.span_sums * kv_heads * product, NAN), de_spans(span_count * kv_heads * product, NAN);
    Floats df_keys = de_spans;
    std::vector<float4> statistics(virtual_rows * heads, make_float4(NAN, NAN, NAN, NAN));
    std::vector<float2> gates;
    for (unsigned level = 0; level < levels; ++level) gates.insert(gates.end(), x.prefix.begin(), x.prefix.end());
    p.spans = x.spans.data(), p.virtual_tiles = x.virtual_tiles, p.sum_tiles = SUM_TILES;
    std::copy(x.sizes.begin(), x.sizes.end(), p.sizes);
    p.levels = levels, p.block_count = blocks, p.k_rows = x.k_rows;
    p.f = f.data(), p.es = p.e + scratch * product, p.kl = kl.data(), p.vl = levels > 1 ? vl.data() : nullptr;
    p.xs = xs.data(), p.os = os.data(), p.ds = ds.data();
    p.lses = lses.data(), p.rows = statistics.data(), p.dq_tiles = dq_tiles.data(), p.dkl = dkl.data();
    p.dvl = dvl.data(), p.dx_spans = dx_spans.data(), p.de_parts = de_parts.data();
    p.de_spans = de_spans.data(), p.df_keys = df_keys.data();
    SpanAttention<real> attention = {{}, x.heads, x.kv_heads, x.d, x.stride, x.virtual_tiles,
                                     p.scale, p.xs, p.kl, levels > 1 ? p.vl : p.v, p.gates ? gates.data() : nullptr};
    for (const PathSpan& s : x.spans) {
        if (s.tiles == 0) continue;
        attention.spans.push_back(VirtualSpan{s.first, s.tiles, s.level * x.k_rows + s.row,
                                              s.level * x.heads * x.stride + s.gates, s.blocks * C});
    }
    auto of_level = [&](unsigned level) {
        p.span0 = x.levels[level];
        return unsigned(x.levels[level + 1] - x.levels[level]);
    };
    auto below = [&](unsigned level) { return unsigned(level ? x.sizes[level - 1] : 1); };
    const auto& of_older = as<older::PathParams>(p);
    const auto& of_spans = as<spans::PathParams>(p);
    const auto& prepared = as<prepare::PathParams>(p);
    const auto& backward = as<bwd::PathParams>(p);
    launch({blocks, kv_heads, 1}, prepare::THREADS, [&] { prepare::path_prepare(prepared); });
    for (unsigned level = 0; level < levels; ++level) {
        launch({of_level(level), kv_heads, below(level)}, spans::THREADS, [&] { spans::path_spans(of_spans); });
    }
    launch({tiles, heads, 1}, walk::THREADS, [&] { walk::path_fwd(p); });
    attention.forward(os, lses);
    launch({tiles, heads, 1}, older::THREADS, [&] { older::path_merge(of_older); });
    check(o, want.o, BF16 ? 0.01 : 2e-6, "o");
    check(lse, want.lse, BF16 ? 0.003 : 1e-6, "lse");
    u64 visited = 0, total = 0;
    for (unsigned h = 0; h < heads; ++h) visited += counts[2 * h], total += counts[2 * h + 1];
    if (visited != want.visited || total != want.total || x.pruned == (visited == total)) {
        printf("%llu of %llu tiles, not %llu of %llu\n", visited, total, want.visited, want.total);
        exit(1);
    }
    std::fill(xs.begin(), xs.end(), walk::to_real(NAN));
    launch({tiles, heads, 1}, older::THREADS, [&] { older::path_span_queries(of_older); });
    attention.backward(p.rows, p.ds, dq_tiles, dkl, dvl, columns);
    launch({tiles, heads, 1}, older::THREADS, [&] { older::path_span_walk(of_older); });
    const unsigned most = (tiles + SUM_TILES - 1) / SUM_TILES;
    launch({span_count, kv_heads, most}, spans::THREADS, [&] { spans::path_span_products(of_spans); });
    p.head0 = 0, p.head_count = heads;
    for (unsigned level = levels; level-- > 1;) {
        const unsigned count = of_level(level), parts = x.sizes[level] / below(level);
        launch({count, kv_heads, parts}, spans::THREADS, [&] { spans::path_span_keys(of_spans); });
        launch({count, kv_heads, 1}, spans::THREADS, [&] { spans::path_span_bwd(of_spans); });
    }
    const unsigned smallest = levels ? of_level(0) : 0;
    // Half of the heads at a time.
    const unsigned kv_count = max(1, kv_heads / 2), head_count = kv_count * heads / kv_heads;
    for (unsigned kv_head = 0; kv_head < kv_heads; kv_head += kv_count) {
        p.head0 = kv_head * heads / kv_heads, p.head_count = head_count;
        const size_t own = size_t(blocks) * head_count, shared = size_t(blocks) * kv_count;
        Floats dkh_sums(shared * C * WIDTH), dv_sums(shared * C * WIDTH), de_sums(shared * WIDTH * WIDTH);
        Floats dt_own(own * C * C), dn_own(own * C * C);
        Floats dk_own(own * C * WIDTH), du_own(own * C * WIDTH), dv_own(own * C * WIDTH);
        p.dkh_sums = dkh_sums.data(), p.dv_sums = dv_sums.data(), p.de_sums = de_sums.data();
        p.dt_own = dt_own.data(), p.dn_own = dn_own.data();
        p.dk_own = dk_own.data(), p.du_own = du_own.data(), p.dv_own = dv_own.data();
        launch({smallest, kv_count, 1}, spans::THREADS, [&] { spans::path_span_bwd(of_spans); });
        for (unsigned tile = 0; tile < tiles; tile += x.chunk) {
            const unsigned step = min(x.chunk, tiles - tile);
            p.tile0 = tile, p.tile_step = step, p.slot0 = x.tiles[tile].slots;
            p.slot_count = (tile + step < tiles ? x.tiles[tile + step].slots : x.slots) - p.slot0;
            Reals met = unset(size_t(head_count) * p.slot_count * C * WIDTH), dx = met;
            Reals start = unset(size_t(head_count) * step * C * WIDTH);
            p.x = met.data(), p.dx = dx.data(), p.dx_start = start.data();
            launch({step, head_count, 1}, walk::THREADS, [&] { walk::path_queries(p); });
            launch({step, head_count, 1}, walk::THREADS, [&] { walk::path_bwd_walk(p); });
            launch({step, head_count, 1}, bwd::THREADS, [&] { bwd::path_bwd_own(backward); });
            launch({blocks, kv_count, 1}, bwd::THREADS, [&] { bwd::path_bwd_keys(backward); });
        }
        launch({blocks, kv_count, 1}, prepare::THREADS, [&] { prepare::path_bwd_prepare(prepared); });
    }
    const double tolerance = BF16 ? 0.015 : 4e-6;
    check(dq, want.dq, tolerance, "dq");
    check(dk, want.dk, tolerance, "dk");
    check(dv, want.dv, tolerance, "dv");
    check(du, want.du, tolerance, "du");
    columns.resize(want.columns.size());
    if (x.strength > 0.f) check(columns, want.columns, tolerance, "column sums");
    // They add up to 0 where the output is not rounded.
    if (!BF16) check(rows, want.rows, 1e-4, "row sums");
}

int main() {
    test({1, 1, WIDTH == 64 ? 40 : WIDTH, {{0, 70, 0, 70}}, 0.1f, false, 9});
    test({2, 1, WIDTH, {{0, 150, 0, 150}}, 0.f, false, 2});
    const int rest = WIDTH == 64 ? 40 : 104;
    test({2, 1, WIDTH, {{0, 450, 0, 450}}, 0.f, false, 3, {2}});
    test({2, 1, WIDTH, {{0, 600, 0, 600}}, 0.2f, false, 3, {1, 2, 4}});
    test({4, 2, rest, {{2, 140, 0, 290}, {142, 0, 290, 5}, {142, 200, 300, 200}}, 0.3f, false, 4, {1, 2}});
    test({4, 2, rest, {{2, 140, 0, 430}, {142, 0, 430, 5}, {142, 200, 440, 200}}, 0.3f, false, 4, {2, 4}});
    if (WIDTH > 64) return 0;
    test({4, 2, 16, {{2, 60, 0, 130}, {62, 0, 130, 5}, {62, 1, 140, 129}, {64, 66, 270, 66}}, 0.3f, false, 3});
    test({2, 2, WIDTH, {{0, 300, 0, 300}}, 1.5f, true, 4});
}
