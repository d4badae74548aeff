// From raw projections to the output of attention, over pages, and the norms of the stream, against f64.
#include "decode_heads.cuh"
#include "decode_pages.cuh"
namespace rows {
#include "decode_rows.cu"
}
namespace attention {
#include "decode_attention.cu"
}
#include "decode_attend.cuh"
namespace attend {
#include "decode_attend.cu"
}
namespace attend_few {
#include "decode_attend_few.cu"
}

typedef std::vector<float> Floats;
typedef std::vector<double> Doubles;

constexpr int D = HEAD_DIM, LAYERS = 2, LAYER = 1, SLOTS = 5, ROWS = 8;

struct Options {
    int heads, kv_heads;
    bool gated;
    int window;
    bool shifted, turned, normed, shared;
    double threshold;
    bool sinks;
};

// Pages of a sequence, full of NaN where nothing was written, and the same by position.
struct Sequence {
    std::vector<std::vector<u16>> memory;
    std::vector<Floats> gates;
    std::vector<Page> pages;
    Doubles ends;
    std::vector<Floats> k, v;
    std::vector<Doubles> sums;

    Sequence(int length, const Options& o) {
        const int count = length / PAGE + 1, group = o.heads / o.kv_heads;
        ends.assign(count * o.heads, INFINITY);
        for (int n = 0; n < count * o.kv_heads; ++n) {
            for (int i = 0; i < 2; ++i) memory.emplace_back(PAGE * D, 0x7fff);
            gates.emplace_back(PAGE * group, NAN);
        }
        for (int n = 0; n < count * o.kv_heads; ++n) {
            pages.push_back(Page{memory[2 * n].data(), memory[2 * n + 1].data(), gates[n].data()});
        }
        Doubles sum(o.heads, -3.0);
        for (int t = 0; t < length; ++t) {
            k.emplace_back(), v.emplace_back();
            for (int i = 0; i < o.kv_heads * D; ++i) {
                const Page& page = pages[t / PAGE * o.kv_heads + i / D];
                const int at = t % PAGE * D + i % D;
                page.k[at] = float_to_bf16(number()), page.v[at] = float_to_bf16(number());
                k[t].push_back(bf16_to_float(page.k[at])), v[t].push_back(bf16_to_float(page.v[at]));
            }
            for (int h = 0; h < o.heads; ++h) {
                const float gate = -fabsf(number()) * (h % 2 ? 0.3f : 0.01f);
                gates[t / PAGE * o.kv_heads + h / group][h % group * PAGE + t % PAGE] = gate;
                sum[h] += gate;
                if (t % PAGE == PAGE - 1) ends[t / PAGE * o.heads + h] = sum[h];
            }
            sums.push_back(sum);
        }
    }
};

static Doubles prepared(const float* x, const Options& o, const Floats& norm, int head, const float2* angles) {
    Doubles y(x, x + D);
    double squares = 0.0;
    for (double value : y) squares += value * value;
    for (int i = 0; i < D && o.normed; ++i) {
        y[i] *= norm[(o.shared ? 0 : head * D) + i] / sqrt(squares / D + 1e-5);
    }
    for (int m = 0; m < D / 2 && o.turned; ++m) {
        const double a = y[m], b = y[m + D / 2];
        y[m] = a * angles[m].x - b * angles[m].y;
        y[m + D / 2] = a * angles[m].y + b * angles[m].x;
    }
    return y;
}

static void check(const Options& o, const std::vector<int>& lengths) {
    const int heads = o.heads, kv_heads = o.kv_heads, group = heads / kv_heads, raw_width = kv_heads * D;
    const int slot_of[3] = {3, 0, 4}, row_of[3] = {5, 0, 2};
    // Queries, keys, values, their shifts, gates, output gates.
    int start[8] = {};
    const int widths[7] = {heads * D, raw_width, raw_width, kv_heads, kv_heads, heads, heads * D};
    for (int n = 0; n < 7; ++n) start[n + 1] = start[n] + widths[n];
    const int stride = start[7];

    std::vector<Sequence> sequences;
    for (int length : lengths) sequences.emplace_back(length, o);
    std::vector<DecodeToken> tokens(ROWS, DecodeToken{-1, 0, 0, -1});
    std::vector<DecodeTable> tables(SLOTS * LAYERS);
    Doubles now(SLOTS * LAYERS * heads);
    std::vector<u16> last = narrow_numbers(SLOTS * LAYERS * 2 * raw_width);
    int most = 1;
    for (size_t s = 0; s < sequences.size(); ++s) {
        const int place = slot_of[s] * LAYERS + LAYER, length = lengths[s];
        tokens[row_of[s]] = DecodeToken{slot_of[s], 0, length, -1};
        tables[place] = DecodeTable{sequences[s].pages.data(), sequences[s].ends.data()};
        for (int h = 0; h < heads && length > 0; ++h) now[place * heads + h] = sequences[s].sums.back()[h];
        most = std::max(most, KvSplits(length).count);
    }
    const Floats raw = numbers(ROWS * stride), gate_bias = numbers(heads, 1.f, 0.2f);
    const Floats q_norm = numbers(o.shared ? D : heads * D, 1.f, 0.2f), out_norm = numbers(heads * D, 1.f, 0.2f);
    const Floats k_norm = numbers(o.shared ? D : raw_width, 1.f, 0.2f);
    // From a sink without weight to one that takes nearly all.
    Floats sinks;
    for (int head = 0; head < heads; ++head) sinks.push_back(head % 3 == 0 ? -300.f : 6.f * (head % 3) - 5.f);
    std::vector<float2> angles;
    for (int position = 0; position < 1024; ++position) {
        for (int m = 0; m < D / 2; ++m) {
            const double angle = position * pow(100.0, -2.0 * m / D);
            angles.push_back(float2{float(cos(angle)), float(sin(angle))});
        }
    }
    const std::vector<u16> last_before = last;
    const Doubles now_before = now, thresholds(heads, o.threshold);
    Floats q(ROWS * heads * D, NAN), partials(size_t(ROWS) * heads * MAX_KV_SPLITS * (D + 4), NAN);
    std::vector<u16> y(ROWS * heads * D);

    DecodeHeads h{};
    h.rows = tokens.data(), h.raw = raw.data(), h.q = q.data(), h.tables = tables.data();
    h.last = last.data(), h.gate_sums = now.data(), h.gate_bias = gate_bias.data();
    h.q_norm = o.normed ? q_norm.data() : nullptr, h.k_norm = o.normed ? k_norm.data() : nullptr;
    h.rope = o.turned ? angles.data() : nullptr;
    for (int n = 0; n < 6; ++n) h.start[n] = start[n];
    if (!o.shifted) h.start[3] = h.start[4] = -1;
    if (!o.gated) h.start[5] = -1;
    h.stride = stride, h.layers = LAYERS, h.layer = LAYER, h.heads = heads, h.kv_heads = kv_heads;
    h.q_shared = h.k_shared = o.shared, h.qk_eps = 1e-5f, h.scale = 1.f / sqrtf(D);
    launch({unsigned(heads + 2 * kv_heads + 7) / 8, ROWS, 1}, 256, [&] { rows::decode_heads(h); });

    DecodeAttentionParams a{};
    a.rows = tokens.data(), a.tables = tables.data(), a.q = q.data(), a.gate_sums = now.data();
    a.thresholds = thresholds.data(), a.partials = partials.data(), a.layers = LAYERS, a.layer = LAYER;
    a.heads = heads, a.kv_heads = kv_heads, a.window = o.window, a.gated = o.gated;
    const Index grid{unsigned(most), unsigned(kv_heads), ROWS};
    launch(grid, 128, [&] { attention::decode_attention(a); });

    DecodeMerge m{};
    m.rows = tokens.data(), m.partials = partials.data(), m.raw = raw.data(), m.y = y.data();
    // An output norm would hide what the sinks take.
    m.norm = o.sinks ? nullptr : out_norm.data(), m.sinks = o.sinks ? sinks.data() : nullptr;
    m.stride = stride, m.heads = heads, m.gate = start[6], m.act = ACT_SIGMOID, m.eps = 1e-6f;
    launch({unsigned(heads + 7) / 8, ROWS, 1}, 256, [&] { rows::decode_merge(m); });

    if (heads == kv_heads) {
        // One launch for the three, for many rows and for few: the same bits of outputs, pages and state, from the same
        // state.
        const std::vector<Sequence> want = sequences;
        const std::vector<u16> last_want = last;
        const Doubles now_want = now;
        for (const bool few : {false, true}) {
            std::vector<u16> y_one(y.size());
            for (size_t s = 0; s < sequences.size(); ++s) {
                for (int head = 0; head < heads; ++head) {
                    const int n = lengths[s] / PAGE, slot = lengths[s] % PAGE;
                    Page& page = sequences[s].pages[n * heads + head];
                    for (int e = 0; e < D; ++e) page.k[slot * D + e] = page.v[slot * D + e] = 0x7fff;
                    page.gates[slot] = NAN;
                    sequences[s].ends[n * heads + head] = INFINITY;
                }
            }
            last = last_before, now = now_before;
            std::fill(partials.begin(), partials.end(), NAN);
            m.y = y_one.data();
            if (few) launch({unsigned(heads), ROWS, 1}, 256, [&] { attend_few::decode_attend_few(h, a, m); });
            else launch({unsigned(heads + 3) / 4, ROWS, 1}, 128, [&] { attend::decode_attend(h, a, m); });
            const auto same = [&](bool is, const char* what) {
                if (!is) printf("decode_attend%s has other %s\n", few ? "_few" : "", what), exit(1);
            };
            same(y_one == y, "outputs");
            same(last == last_want, "raw rows");
            same(now == now_want, "sums of gates");
            for (size_t s = 0; s < sequences.size(); ++s) {
                same(sequences[s].memory == want[s].memory, "keys or values");
                same(sequences[s].ends == want[s].ends, "ends of pages");
                for (size_t n = 0; n < sequences[s].gates.size(); ++n) {
                    const size_t bytes = sizeof(float) * sequences[s].gates[n].size();
                    same(memcmp(sequences[s].gates[n].data(), want[s].gates[n].data(), bytes) == 0, "gates");
                }
            }
        }
    }

    for (size_t s = 0; s < sequences.size(); ++s) {
        Sequence& own = sequences[s];
        const int row = row_of[s], position = lengths[s], place = slot_of[s] * LAYERS + LAYER;
        const float* u = raw.data() + row * stride;
        const float2* turn = angles.data() + position * (D / 2);
        own.k.emplace_back(), own.v.emplace_back(), own.sums.emplace_back();
        for (int i = 0; i < 2 * raw_width; ++i) {
            const int is_value = i / raw_width, head = i % raw_width / D;
            Floats x(D);
            for (int e = 0; e < D; ++e) {
                const int at = place * 2 * raw_width + is_value * raw_width + head * D + e;
                const float raw_now = u[start[1 + is_value] + head * D + e], before = bf16_to_float(last_before[at]);
                const float share = o.shifted ? 1.f / (1.f + expf(-u[start[3 + is_value] + head])) : 0.f;
                x[e] = share * before + (1.f - share) * raw_now;
                if (o.shifted) expect_close(last[at], float_to_bf16(raw_now), 0.0, "raw row", row, at);
            }
            const Doubles ready = is_value ? Doubles(x.begin(), x.end()) : prepared(x.data(), o, k_norm, head, turn);
            (is_value ? own.v : own.k).back().push_back(bf16_to_float(float_to_bf16(ready[i % D])));
        }
        for (int head = 0; head < heads; ++head) {
            const int at = place * heads + head;
            const double gate = o.gated ? -log1p(exp(-(u[start[5] + head] + gate_bias[head]))) : 0.0;
            own.sums.back().push_back(now_before[at] + gate);
            expect_close(now[at], now_before[at] + gate, 1e-6, "sum of gates", row, head);
        }
        for (int head = 0; head < heads; ++head) {
            const Doubles query = prepared(u + head * D, o, q_norm, head, turn);
            const auto decay = [&](int key) {
                return o.gated ? own.sums[position][head] - own.sums[key][head] : 0.0;
            };
            Doubles out(D);
            double weights = 0.0, squares = 0.0;
            for (int key = 0; key <= position; ++key) {
                const int end = key / PAGE * PAGE + PAGE - 1;
                if (o.window > 0 && key + o.window <= position) continue;
                if (o.gated && end <= position && decay(end) < o.threshold) continue;
                double score = 0.0;
                for (int e = 0; e < D; ++e) score += query[e] * own.k[key][head / group * D + e];
                const double weight = exp(score / sqrt(D) + decay(key));
                weights += weight;
                for (int e = 0; e < D; ++e) out[e] += weight * own.v[key][head / group * D + e];
            }
            if (o.sinks) weights += exp(double(sinks[head]));
            for (double& x : out) squares += (x /= weights) * x;
            for (int e = 0; e < D; ++e) {
                const int column = head * D + e;
                const double gate = 1.0 / (1.0 + exp(-u[start[6] + column]));
                const double norm = o.sinks ? 1.0 : out_norm[column] / sqrt(squares / D + 1e-6), want = out[e] * norm * gate;
                expect_close(bf16_to_float(y[blocked(row, column, heads * D, ROWS)]), want, 0.01, "output", row, column);
            }
        }
    }
}

// The stream begins with embedded tokens, every other one as a row of the step before has sampled it (token 0 where it
// could not sample); then a product is added, which may have been left in runs.
static void check_norms(int runs) {
    const int width = 1088;
    std::vector<DecodeToken> tokens;
    std::vector<int> sampled(ROWS);
    for (int row = 0; row < ROWS; ++row) {
        const int by = ROWS - 1 - row;
        if (row % 2) tokens.push_back(DecodeToken{0, 7 << 20, 0, by}), sampled[by] = row % 3 ? row % 3 : -1;
        else tokens.push_back(DecodeToken{0, row % 3, 0, -1});
    }
    const std::vector<u16> embeddings = narrow_numbers(3 * width);
    const Floats delta = numbers(runs * ROWS * width), norm = numbers(width, 1.f, 0.1f);
    Floats h(ROWS * width, NAN);
    std::vector<u16> x(ROWS * width);
    DecodeNorm p{};
    p.rows = tokens.data(), p.embeddings = embeddings.data(), p.h = h.data(), p.delta = delta.data();
    p.sampled = sampled.data(), p.norm = norm.data(), p.x = x.data(), p.width = width, p.k_splits = runs, p.eps = 1e-6f;
    launch({ROWS, 1, 1}, 256, [&] { rows::decode_norm(p); });
    p.embeddings = nullptr;
    launch({ROWS, 1, 1}, 256, [&] { rows::decode_norm(p); });
    for (int row = 0; row < ROWS; ++row) {
        Doubles want(width);
        double squares = 0.0;
        for (int c = 0; c < width; ++c) {
            want[c] = bf16_to_float(embeddings[row % 3 * width + c]);
            for (int run = 0; run < runs; ++run) want[c] += delta[(run * ROWS + row) * width + c];
            expect_close(h[row * width + c], want[c], 1e-6, "stream", row, c);
            squares += want[c] * want[c];
        }
        for (int c = 0; c < width; ++c) {
            const double normed = want[c] / sqrt(squares / width + 1e-6) * norm[c];
            expect_close(bf16_to_float(x[blocked(row, c, width, ROWS)]), normed, 0.01, "norm", row, c);
        }
    }
}

int main() {
    check(Options{4, 4, true, 0, true, false, true, false, -INFINITY}, {700, 63, 0});
    // A threshold at which what is skipped matters.
    check(Options{4, 2, true, 0, true, true, true, true, -1.0}, {700, 64, 1});
    check(Options{8, 2, true, 150, false, false, false, false, -20.0}, {400, 127, 65});
    check(Options{2, 2, false, 0, true, true, true, false, -INFINITY}, {300, 5, 63});
    check(Options{4, 2, true, 0, false, true, true, false, -20.0, true}, {400, 64, 0});
    check(Options{5, 5, true, 0, true, false, true, false, -3.0}, {700, 127, 63});
    check(Options{2, 2, true, 150, true, true, true, false, -20.0, true}, {400, 64, 1});
    // More pages than 64 KV splits of four.
    if (D == 64) check(Options{1, 1, true, 0, true, false, true, false, -200.0}, {17000, 900});
    for (int runs : {1, 4, 8}) check_norms(runs);
}
