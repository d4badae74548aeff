// Tokens that rows choose, against a sorted vocabulary.
#include "decode_sample.cu"
#include <algorithm>

static int wanted(const float* logits, int vocab, const DrawParams& d) {
    const float* end = logits + vocab;
    const float top = *std::max_element(logits, end);
    if (std::any_of(logits, end, [](float x) { return x != x; }) || top == NEG_INF) return -1;
    if (d.inverse_temperature == 0.f) return std::find(logits, end, top) - logits;
    const auto weight = [&](int id) { return exp((logits[id] - double(top)) * d.inverse_temperature); };
    const auto sum = [&](const std::vector<int>& ids) {
        double sum = 0.0;
        for (int id : ids) sum += weight(id);
        return sum;
    };
    std::vector<int> ids(vocab);
    for (int id = 0; id < vocab; ++id) ids[id] = id;
    std::stable_sort(ids.begin(), ids.end(), [&](int a, int b) { return weight(a) > weight(b); });
    if (d.top_k > 0) ids.resize(d.top_k);
    if (d.top_p < 1.f) {
        const double enough = d.top_p * sum(ids);
        size_t kept = 0;
        for (double sum = 0.0; kept == 0 || sum < enough; ++kept) sum += weight(ids[kept]);
        ids.resize(kept);
    }
    ids.erase(std::remove_if(ids.begin(), ids.end(), [&](int id) { return weight(id) < d.min_p; }), ids.end());
    std::sort(ids.begin(), ids.end());
    double left = bits_as<double>(u64(d.uniform)) * sum(ids);
    for (int id : ids) {
        if ((left -= weight(id)) < 0.0) return id;
    }
    return ids.back();
}

int main() {
    const int vocab = 1300, rows = 12;
    std::vector<float> logits = numbers(rows * vocab, 0.f, 3.f);
    const auto row = [&](int r) { return logits.data() + r * vocab; };
    row(0)[7] = row(0)[9] = 50.f;
    row(1)[1200] = NAN;
    std::fill(row(2), row(3), NEG_INF);
    // Many equals.
    for (int id = 0; id < vocab; ++id) row(11)[id] = 0.5f * (id % 5);
    for (int trial = 0; trial < 4; ++trial) {
        std::vector<DrawParams> draws(rows);
        for (int r = 0; r < rows; ++r) {
            const double turn = 0.618 * trial + 0.37 * r;
            DrawParams& d = draws[r];
            d = DrawParams{bits_as<u64>(turn - floor(turn)), r < 3 ? 0.f : 1.25f, 1.f, 0.f, 0};
            if (r == 4 || r == 7 || r == 11) d.top_k = 17;
            if (r == 5 || r == 7 || r == 10 || r == 11) d.top_p = 0.6f;
            if (r == 6 || r == 10) d.min_p = 0.1f;
            if (r == 8) d.top_k = 1;
            if (r == 9) d.top_p = 1e-4f;
        }
        std::vector<int> ids(rows, -7);
        std::vector<float> scores(rows, NAN);
        const DecodeSample p{logits.data(), draws.data(), ids.data(), scores.data(), vocab};
        launch({rows, 1, 1}, THREADS, [&] { decode_sample(p); });
        for (int r = 0; r < rows; ++r) {
            const int id = wanted(row(r), vocab, draws[r]);
            expect_close(ids[r], id, 0.0, "id", trial, r);
            if (id < 0) continue;
            double sum = 0.0;
            for (int i = 0; i < vocab; ++i) sum += exp(double(row(r)[i]) - row(r)[id]);
            expect_close(scores[r], -log(sum), 1e-5, "score", trial, r);
        }
    }
}
