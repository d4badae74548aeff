// The delta rule, forward and backward, against its recurrence in f64.
#include "scan_delta.cu"
#include "scan_delta_bwd.cu"
#if CHANNEL
#include "scan_delta_channel.cu"
#endif

constexpr double TOLERANCE = BF16 ? 4e-2 : 5e-5;
constexpr double FLOOR = 1e-3;
#include "compare.h"

struct Problem {
    std::vector<int> lengths;
    int heads, key_heads, key_dim, value_dim;
    float rate;  // mean log decay of a step
};

static real narrow(double x) { return to_real(float(x)); }

// Everything that the kernels read and write.
struct Memory {
    std::vector<real> q, k, v, d_out, o, dq, dk, dv, states, errors, y, inverse, d_states, d_errors, reading_keys,
        writing_keys, reading_queries;
    std::vector<float> log_decay, write, skip, state, d_last, last_state, d_first, dlog_decay, dwrite, dskip, factors,
        dq_parts, dk_parts, overlaps, scores, whole, d_reading_keys, d_writing_keys, d_reading_queries, d_overlaps, d_scores;
    std::vector<Chunk> chunks;
    std::vector<ChunkedSegment> segments;
    int rows = 0, channels = 0;
};

static std::vector<real> reals(size_t count, double scale) {
    std::vector<real> all(count);
    for (real& x : all) x = narrow(scale * number());
    return all;
}

static Memory prepare(const Problem& t) {
    Memory m;
    for (int length : t.lengths) {
        ChunkedSegment s = {};
        s.first = m.chunks.size(), s.count = (length + CHUNK - 1) / CHUNK, s.row = m.rows, s.rows = length;
        for (int n = 0; n < s.count; ++n) m.chunks.push_back(chunk_of(s, n));
        m.segments.push_back(s);
        m.rows += length;
    }
    m.channels = CHANNEL ? t.heads * t.key_dim : t.heads;
    const size_t rows = m.rows, keys = t.key_heads * t.key_dim, values = t.heads * t.value_dim;
    const size_t tiles = m.chunks.size() * t.heads, states = m.segments.size() * t.heads * t.key_dim * t.value_dim;
    m.q = reals(rows * keys, 1.0), m.k = reals(rows * keys, 1.0 / sqrt(double(t.key_dim)));
    m.v = reals(rows * values, 1.0), m.d_out = reals(rows * values, 1.0);
    for (size_t i = 0; i < rows * m.channels; ++i) m.log_decay.push_back(-2.f * t.rate * fabsf(number()));
    m.write = numbers(rows * t.heads, 0.5f, 0.1f), m.skip = numbers(t.heads);
    m.state = numbers(states, 0.f, 0.1f), m.d_last = numbers(states, 0.f, 0.1f);
    const real blank = narrow(NAN);
    for (auto* x : {&m.o, &m.dv}) x->assign(rows * values, blank);
    for (auto* x : {&m.dq, &m.dk}) x->assign(rows * keys, blank);
    for (auto* x : {&m.states, &m.d_states}) x->assign(tiles * DK * DV, blank);
    for (auto* x : {&m.errors, &m.d_errors}) x->assign(tiles * CHUNK * DV, blank);
    for (auto* x : {&m.y, &m.reading_keys, &m.writing_keys, &m.reading_queries}) x->assign(tiles * CHUNK * DK, blank);
    m.inverse.assign(tiles * CHUNK * CHUNK, blank);
    for (auto* x : {&m.last_state, &m.d_first}) x->assign(states, NAN);
    for (auto* x : {&m.dq_parts, &m.dk_parts}) x->assign(rows * t.heads * t.key_dim, NAN);
    for (auto* x : {&m.overlaps, &m.scores, &m.d_overlaps, &m.d_scores}) x->assign(tiles * CHUNK * CHUNK, NAN);
    for (auto* x : {&m.d_reading_keys, &m.d_writing_keys, &m.d_reading_queries}) x->assign(tiles * CHUNK * DK, NAN);
    m.dlog_decay.assign(rows * m.channels, NAN), m.dwrite.assign(rows * t.heads, NAN), m.dskip.assign(tiles, NAN);
    m.factors.assign(tiles * 5 * CHUNK, NAN), m.whole.assign(tiles * DK, NAN);
    return m;
}

static void run(const Problem& t, Memory& m) {
    DeltaParams p = {};
    p.x.q = m.q.data(), p.x.k = m.k.data(), p.x.v = m.v.data(), p.x.d_out = m.d_out.data();
    p.x.log_decay = m.log_decay.data(), p.x.write = m.write.data(), p.x.skip = m.skip.data(), p.x.state = m.state.data();
    p.x.heads = t.heads, p.x.key_heads = t.key_heads, p.x.key_dim = t.key_dim, p.x.value_dim = t.value_dim;
    p.x.scale = 1.f / sqrtf(t.key_dim);
    p.last_state = m.last_state.data(), p.d_last = m.d_last.data(), p.d_first = m.d_first.data(), p.o = m.o.data();
    p.states = m.states.data(), p.errors = m.errors.data(), p.y = m.y.data(), p.inverse = m.inverse.data();
    p.factors = m.factors.data(), p.d_states = m.d_states.data(), p.d_errors = m.d_errors.data();
    p.reading_keys = m.reading_keys.data(), p.writing_keys = m.writing_keys.data();
    p.reading_queries = m.reading_queries.data(), p.overlaps = m.overlaps.data(), p.scores = m.scores.data();
    p.whole = m.whole.data(), p.d_reading_keys = m.d_reading_keys.data(), p.d_writing_keys = m.d_writing_keys.data();
    p.d_reading_queries = m.d_reading_queries.data(), p.d_overlaps = m.d_overlaps.data(), p.d_scores = m.d_scores.data();
    p.dq = m.dq.data(), p.dk = m.dk.data(), p.dv = m.dv.data();
    if (t.heads != t.key_heads) p.dq_parts = m.dq_parts.data(), p.dk_parts = m.dk_parts.data();
    p.dlog_decay = m.dlog_decay.data(), p.dwrite = m.dwrite.data(), p.dskip = m.dskip.data();
    p.chunks = m.chunks.data(), p.segments = m.segments.data(), p.group = t.heads / t.key_heads;
    const unsigned chunks = m.chunks.size(), heads = t.heads, segments = m.segments.size();
    const auto start = [&](Index grid, std::function<void()> body) {
        // What a kernel does not write is NaN.
        memset(emulated_memory, 0xff, sizeof emulated_memory);
        launch(grid, THREADS, body);
    };
    for (int pass = 0; pass < 2; ++pass) {
#if CHANNEL
        start({chunks, heads, 1}, [&] { delta_channel(p); });
#endif
        if (pass == 0) {
            start({chunks, heads, 1}, [&] { delta_prepare(p); });
            start({DV / STATE_COLUMNS, heads, segments}, [&] { delta_states(p); });
            start({chunks, heads, 1}, [&] { delta_output(p); });
        }
    }
    start({chunks, heads, 1}, [&] { delta_prepare_bwd(p); });
    start({DV / STATE_COLUMNS, heads, segments}, [&] { delta_states_bwd(p); });
    start({chunks, heads, 1}, [&] { delta_gradients(p); });
#if CHANNEL
    start({chunks, heads, DK / 32}, [&] { delta_channel_gradients(p); });
#endif
    if (t.heads == t.key_heads) return;
    start({1, 1, 1}, [&] { delta_share_keys(p.dq, p.dq_parts, m.q.size(), p); });
    start({1, 1, 1}, [&] { delta_share_keys(p.dk, p.dk_parts, m.k.size(), p); });
}

static void check(const Problem& t) {
    Memory m = prepare(t);
    run(t, m);
    const int K = t.key_dim, V = t.value_dim, group = t.heads / t.key_heads;
    const double scale = 1.0 / sqrt(double(K));
    std::vector<double> o(m.o.size()), dq(m.q.size()), dk(dq), dv(o), dlog(m.dlog_decay.size()), dwrite(m.dwrite.size());
    std::vector<double> last(m.state.size()), first(last), dskip(t.heads), skips(t.heads);
    for (size_t n = 0; n < m.segments.size(); ++n) {
        for (int h = 0; h < t.heads; ++h) {
            const ChunkedSegment& s = m.segments[n];
            const size_t at = (n * t.heads + h) * K * V;
            const auto row = [&](int i) { return size_t(s.row + i); };
            const auto key = [&](int i, int c) { return (row(i) * t.key_heads + h / group) * K + c; };
            const auto value = [&](int i, int j) { return (row(i) * t.heads + h) * V + j; };
            const auto gate = [&](int i, int c) { return CHANNEL ? (row(i) * t.heads + h) * K + c : row(i) * t.heads + h; };
            // States before every token, and after the last.
            std::vector<std::vector<double>> S(s.rows + 1, std::vector<double>(K * V));
            std::vector<std::vector<double>> errors(s.rows, std::vector<double>(V));
            for (int x = 0; x < K * V; ++x) S[0][x] = m.state[at + x];
            const auto decayed = [&](int i, int c, int j) { return exp(double(m.log_decay[gate(i, c)])) * S[i][c * V + j]; };
            for (int i = 0; i < s.rows; ++i) {
                for (int j = 0; j < V; ++j) {
                    double e = to_float(m.v[value(i, j)]), out = 0.0;
                    for (int c = 0; c < K; ++c) e -= decayed(i, c, j) * to_float(m.k[key(i, c)]);
                    errors[i][j] = e;
                    for (int c = 0; c < K; ++c) {
                        S[i + 1][c * V + j] = decayed(i, c, j) + to_float(m.k[key(i, c)]) * m.write[row(i) * t.heads + h] * e;
                        out += scale * S[i + 1][c * V + j] * to_float(m.q[key(i, c)]);
                    }
                    o[value(i, j)] = out + m.skip[h] * to_float(m.v[value(i, j)]);
                    skips[h] += double(to_float(m.d_out[value(i, j)])) * to_float(m.v[value(i, j)]);
                }
            }
            std::vector<double> G(K * V);
            for (int x = 0; x < K * V; ++x) last[at + x] = S[s.rows][x], G[x] = m.d_last[at + x];
            for (int i = s.rows - 1; i >= 0; --i) {
                const double b = m.write[row(i) * t.heads + h];
                for (int j = 0; j < V; ++j) {
                    const double d = to_float(m.d_out[value(i, j)]);
                    double dbe = 0.0;
                    for (int c = 0; c < K; ++c) {
                        G[c * V + j] += scale * to_float(m.q[key(i, c)]) * d;
                        dq[key(i, c)] += scale * S[i + 1][c * V + j] * d;
                        dbe += G[c * V + j] * to_float(m.k[key(i, c)]);
                        dk[key(i, c)] += G[c * V + j] * b * errors[i][j];
                    }
                    dwrite[row(i) * t.heads + h] += dbe * errors[i][j];
                    const double de = b * dbe;
                    dv[value(i, j)] = de + m.skip[h] * d;
                    for (int c = 0; c < K; ++c) {
                        dk[key(i, c)] -= decayed(i, c, j) * de;
                        G[c * V + j] -= to_float(m.k[key(i, c)]) * de;
                        dlog[gate(i, c)] += G[c * V + j] * decayed(i, c, j);
                        G[c * V + j] *= exp(double(m.log_decay[gate(i, c)]));
                    }
                }
            }
            for (int x = 0; x < K * V; ++x) first[at + x] = G[x];
        }
    }
    for (size_t n = 0; n < m.dskip.size(); ++n) dskip[n % t.heads] += m.dskip[n];
    compare("o", m.o, o), compare("last state", m.last_state, last), compare("dq", m.dq, dq), compare("dk", m.dk, dk);
    compare("dv", m.dv, dv), compare("dwrite", m.dwrite, dwrite), compare("dlog_decay", m.dlog_decay, dlog);
    compare("dstate", m.d_first, first), compare("dskip", dskip, skips);
}

int main() {
    // Widths whose rows are read in vectors only where the variant does so.
    const int less = VEC == 8 ? 8 : 3, K = DK - less, V = DV - less;
    check({{1, 130}, 2, 1, K, V, 0.05f});
    check({{70}, 1, 1, DK, DV, 2.f});
}
