// The backward of forgetting attention on Hopper, from the plan to the gradients, against its definition in f64.
// Several thread blocks run at once, so that the order of the sums of dQ is enforced by semaphores.
#define WIDE 0
#define BF16 !WIDE
#include "attention_gates.cu"
#include "attention_plan.cu"
#include "attention_rows.cu"
#include "attention_bwd_sm90.cu"

typedef std::vector<double> Doubles;
typedef std::vector<float> Floats;
typedef std::vector<u16> Reals;
constexpr double BOUND = 8.0, LOG_TOLERANCE = -10.0;

double value(float x) { return x; }
double value(u16 x) { return bf16_to_float(x); }

// The norm of the difference over the norm of what should come out.
template <class T>
void check(const std::vector<T>& got, const Doubles& want, double tolerance, const char* what) {
    double error = 0.0, size = 1e-30;
    for (size_t i = 0; i < want.size(); ++i) {
        const double d = value(got[i]) - want[i];
        error += d * d, size += want[i] * want[i];
    }
    const double relative = sqrt(error / size);
    printf("%s %.1e ", what, relative);
    if (relative <= tolerance) return;
    printf("differs\n");
    exit(1);
}

struct Extent {
    int q_start, q_len, k_start, k_len;
};

// Operands, tables and results of the definition.
struct Case {
    int heads, kv_heads, d;
    std::vector<Extent> extents;
    float strength;  // nats per token that gates forget
    int window;
    bool pruned;
    int reversed_heads;

    int q_rows = 0, k_rows = 0, stride = 0;
    float scale = 0.f;
    Reals q, k, v, d_out, o;
    Floats log_gates, lse;
    Doubles exact_o, dq, dk, dv, dlog_gates;
    std::vector<Segment> segments;
    std::vector<BlockRef> m_tiles, n_tiles;
    std::vector<ChunkRef> chunks;

    void prepare() {
        for (int n = 0; n < int(extents.size()); ++n) {
            const Extent& x = extents[n];
            q_rows = max(q_rows, x.q_start + x.q_len), k_rows = max(k_rows, x.k_start + x.k_len);
            segments.push_back({x.q_start, x.q_len, x.k_start, x.k_len, stride, int(m_tiles.size()), int(n_tiles.size()), 0});
            for (int b = 0; b * BLOCK_M < x.q_len; ++b) m_tiles.push_back({n, b});
            for (int b = (x.k_len - 1) / BLOCK_N; b >= 0; --b) n_tiles.push_back({n, b});
            const int first = chunks.size(), count = (x.k_len + CHUNK - 1) / CHUNK;
            for (int c = 0; c < count; ++c) chunks.push_back({n, c, first, count});
            stride += (x.k_len + 127) / 128 * 128;
        }
        stride += 256;
        scale = 1.0 / sqrt(double(d));
        q = narrow_numbers(size_t(q_rows) * heads * d), d_out = narrow_numbers(q.size());
        k = narrow_numbers(size_t(k_rows) * kv_heads * d), v = narrow_numbers(k.size());
        log_gates = numbers(size_t(k_rows) * heads);
        for (float& g : log_gates) g = -strength * fabsf(g);
        define();
    }

    void define() {
        exact_o.resize(q.size()), dq.resize(q.size()), dk.resize(k.size()), dv.resize(k.size());
        dlog_gates.resize(log_gates.size()), lse.assign(size_t(q_rows) * heads, 0.f);
        for (const Extent& x : extents) {
            for (int h = 0; h < heads; ++h) head(x, h);
        }
        o.resize(q.size());
        for (size_t i = 0; i < o.size(); ++i) o[i] = float_to_bf16(float(exact_o[i]));
    }
    void head(const Extent& x, int h) {
        const int offset = x.k_len - x.q_len, kv_head = h / (heads / kv_heads);
        Doubles c(x.k_len), dc(x.k_len);
        for (int t = 0; t < x.k_len; ++t) {
            c[t] = (t ? c[t - 1] : 0.0) + (GATES ? log_gates[size_t(x.k_start + t) * heads + h] : 0.0);
        }
        for (int r = 0; r < x.q_len; ++r) {
            const int i = offset + r;
            const size_t at = (size_t(x.q_start + r) * heads + h) * d;
            auto key = [&](int j) { return (size_t(x.k_start + j) * kv_heads + kv_head) * d; };
            Doubles p(x.k_len), dp(x.k_len);
            double top = -INFINITY, sum = 0.0, delta = 0.0;
            for (int j = 0; j < x.k_len; ++j) {
                const bool seen = (MASK || j <= i) && (!WINDOW || abs(i - j) < window);
                double dot = 0.0;
                for (int e = 0; e < d; ++e) {
                    dot += value(q[at + e]) * value(k[key(j) + e]), dp[j] += value(d_out[at + e]) * value(v[key(j) + e]);
                }
                p[j] = seen ? dot * scale + (j <= i ? c[i] - c[j] : c[j] - c[i]) : -INFINITY;
                top = fmax(top, p[j]);
            }
            for (double& s : p) sum += exp(s - top);
            for (double& s : p) s = exp(s - top) / sum;
            lse[size_t(x.q_start + r) * heads + h] = top + log(sum);
            for (int j = 0; j < x.k_len; ++j) {
                delta += p[j] * dp[j];
                for (int e = 0; e < d; ++e) exact_o[at + e] += p[j] * value(v[key(j) + e]);
            }
            for (int j = 0; j < x.k_len; ++j) {
                const double ds = p[j] * (dp[j] - delta);
                for (int e = 0; e < d; ++e) {
                    dq[at + e] += scale * ds * value(k[key(j) + e]), dk[key(j) + e] += scale * ds * value(q[at + e]);
                    dv[key(j) + e] += p[j] * value(d_out[at + e]);
                }
                dc[i] += j <= i ? ds : -ds, dc[j] -= j <= i ? ds : -ds;
            }
        }
        double sum = 0.0;
        for (int t = x.k_len - 1; t >= 0; --t) dlog_gates[size_t(x.k_start + t) * heads + h] = sum += dc[t];
    }
};

void test(Case x) {
    x.prepare();
    const unsigned m_count = x.m_tiles.size(), n_count = x.n_tiles.size(), chunk_count = x.chunks.size(), heads = x.heads;
    const Segment* segments = x.segments.data();
    std::vector<double> totals(heads * chunk_count);
    std::vector<float2> gates(size_t(heads) * x.stride, float2{NAN, NAN});
    launch({chunk_count, heads, 1}, CHUNK,
           [&] { gate_totals(totals.data(), x.log_gates.data(), segments, x.chunks.data(), heads); });
    launch({chunk_count, heads, 1}, CHUNK, [&] {
        gate_prefix(gates.data(), totals.data(), x.log_gates.data(), segments, x.chunks.data(), heads, x.stride);
    });
    const float2* own_gates = GATES ? gates.data() : nullptr;

    Floats bounds(x.segments.size() * heads, float(BOUND));
    PlanParams plan = {};
    plan.segments = segments, plan.m_tiles = x.m_tiles.data(), plan.gates = own_gates;
    plan.bounds = x.pruned ? bounds.data() : nullptr;
    plan.m_tile_count = m_count, plan.heads = heads, plan.kv_heads = x.kv_heads, plan.gate_stride = x.stride;
    plan.block_m = BLOCK_M, plan.block_n = BLOCK_N, plan.mask = MASK, plan.window = WINDOW ? x.window : 0;
    plan.log_tolerance = LOG_TOLERANCE;
    std::vector<int2> spans(heads * m_count), ranges(heads * n_count * (1 + MASK));
    launch({(heads * m_count + 127) / 128, 1, 1}, 128, [&] { plan_backward_spans(plan, spans.data()); });
    launch({(heads * n_count + 127) / 128, 1, 1}, 128,
           [&] { plan_backward_ranges(plan, spans.data(), x.n_tiles.data(), n_count, ranges.data()); });

    std::vector<int> counters(COUNTER_INTS + DQ_PARTS * heads * m_count, -7);
    std::vector<float4> rows(size_t(heads) * m_count * BLOCK_M);
    launch({m_count, heads, 1}, 4 * BLOCK_M, [&] {
        backward_rows(rows.data(), counters.data(), x.o.data(), x.d_out.data(), x.lse.data(), own_gates, segments,
                      x.m_tiles.data(), DQ_PARTS, heads, x.d, x.stride);
    });

    const u16 nan = 0x7fff;
    Reals dq(x.q.size()), dk(x.k.size()), dv(x.k.size());
    // Every row of a segment is written.
    for (const Segment& s : x.segments) {
        std::fill_n(dq.begin() + size_t(s.q_start) * heads * x.d, size_t(s.q_len) * heads * x.d, nan);
        for (Reals* out : {&dk, &dv}) {
            std::fill_n(out->begin() + size_t(s.k_start) * x.kv_heads * x.d, size_t(s.k_len) * x.kv_heads * x.d, nan);
        }
    }
    Floats column_sums(size_t(heads) * x.stride, NAN), scratch(size_t(heads) * m_count * DQ_PARTS * DQ_FLOATS, NAN);
    BackwardParams p = {};
    p.dk = dk.data(), p.dv = dv.data(), p.column_sums = column_sums.data(), p.dq = scratch.data();
    p.semaphores = counters.data() + COUNTER_INTS, p.gates = own_gates, p.rows = rows.data(), p.segments = segments;
    p.n_tiles = x.n_tiles.data(), p.ranges = ranges.data(), p.spans = spans.data(), p.next_tile = counters.data();
    p.n_tile_count = n_count, p.m_tile_count = m_count, p.heads = heads, p.kv_heads = x.kv_heads;
    p.group_heads = 1, p.reversed_heads = MASK ? 0 : x.reversed_heads, p.head_dim = x.d, p.gate_stride = x.stride;
    p.window = x.window, p.scale = x.scale, p.scale_log2 = x.scale * LOG2_E;
    const auto map = [&](const Reals& data, int heads, int rows, int box) {
        return TensorMap{data.data(), x.d, heads, rows, box};
    };
    const TensorMap q = map(x.q, heads, x.q_rows, BLOCK_M), d_out = map(x.d_out, heads, x.q_rows, BLOCK_M);
    const TensorMap k = map(x.k, x.kv_heads, x.k_rows, BLOCK_N), v = map(x.v, x.kv_heads, x.k_rows, BLOCK_N);
    launch_together(3, THREADS, [&] { attention_bwd(q, k, v, d_out, p); });

    constexpr int SUMS_PER_TILE = MASK ? BLOCK_M : SUMS;
    Floats row_sums(heads * m_count * SUMS_PER_TILE);
    launch({m_count, heads, 1}, 128 * DQ_PARTS, [&] {
        finish_dq(dq.data(), row_sums.data(), scratch.data(), segments, x.m_tiles.data(), heads, x.d, BLOCK_M, MASK,
                  x.scale);
    });
    check(dq, x.dq, 0.008, "dq");
    check(dk, x.dk, 0.008, "dk");
    check(dv, x.dv, 0.008, "dv");
    if (GATES) {
        Floats dlog_gates(x.log_gates.size());
        GradientInputs in = {};
        in.column_sums = column_sums.data(), in.row_sums = row_sums.data(), in.rows = &rows.data()->x;
        in.gate_stride = x.stride, in.m_tile_count = m_count, in.block_m = BLOCK_M, in.rows_per_sum = BLOCK_M / SUMS_PER_TILE;
        launch({chunk_count, heads, 1}, CHUNK,
               [&] { gate_gradient_totals(totals.data(), in, segments, x.chunks.data()); });
        launch({chunk_count, heads, 1}, CHUNK, [&] {
            gate_gradient(dlog_gates.data(), totals.data(), in, segments, x.chunks.data(), heads);
        });
        check(dlog_gates, x.dlog_gates, 0.02, "dlog_gates");
    }
    int visited = 0, total = 0;
    for (const int2& span : spans) visited += span.y - span.x, total += (x.k_rows + BLOCK_N - 1) / BLOCK_N;
    u64 checksum = 0;
    for (const Reals* out : {&dq, &dk, &dv}) {
        for (u16 x : *out) checksum = checksum * 6364136223846793005ull + x;
    }
    printf("%d of %d tiles, bits %llx\n", visited, total, checksum);
}

int main() {
    test({1, 1, HEAD_DIM, {{0, 200, 0, 200}}, 0.05f, 70, false, 0});
    test({2, 1, HEAD_DIM - 8, {{1, 130, 2, 300}, {140, 3, 310, 100}, {150, 70, 420, 70}}, 0.02f, 90, false, 0});
    // Some heads from the first keys on, some pruned.
    test({2, 2, HEAD_DIM, {{0, 450, 0, 450}}, 0.3f, 200, GATES, 1});
}
