// The short convolution, forward and backward, against its definition in f64.
#include "conv.cu"

constexpr double TOLERANCE = BF16 ? 2e-2 : 2e-5;
constexpr double FLOOR = 1e-3;
#include "compare.h"

struct Problem {
    int head_dim, heads, rows_per_slice, act;
    bool l2_norm, bias, before;
    std::vector<int> parts;  // heads of each
    int left, right;         // columns of the matrix beside the input
};
// Segments as (first row, rows); rows outside come out as zeros.
static const std::vector<std::pair<int, int>> SEGMENTS = {{0, 1}, {1, 45}, {49, 3}, {52, 2}, {60, 71}};
constexpr int ROWS = 133;

static std::vector<real> reals(size_t count) {
    std::vector<real> all(count);
    for (real& x : all) x = to_real(number());
    return all;
}

static void check(const Problem& t) {
    const int width = t.head_dim * t.heads, stride = t.left + width + t.right;
    std::vector<RowInfo> info(ROWS, RowInfo{-1, 0, 0, 0});
    for (size_t n = 0; n < SEGMENTS.size(); ++n) {
        const int rows = SEGMENTS[n].second;
        for (int i = 0; i < rows; ++i) info[SEGMENTS[n].first + i] = RowInfo{int(n), i, i, i + 1 < rows};
    }
    std::vector<real> matrix = reals(size_t(ROWS) * stride), before = reals(SEGMENTS.size() * (TAPS - 1) * width + 8);
    // What no row reads.
    for (int row = 0; row < ROWS; ++row) {
        for (int c = 0; c < stride; ++c) {
            if (info[row].segment < 0 || c < t.left || c >= t.left + width) matrix[size_t(row) * stride + c] = to_real(NAN);
        }
    }
    std::vector<float> weight = numbers(width * TAPS), bias = numbers(width);
    std::vector<std::vector<real>> y, dy;
    ConvParams p = {};
    p.x = matrix.data() + t.left, p.weight = weight.data(), p.info = info.data();
    p.bias = t.bias ? bias.data() : nullptr, p.before = t.before ? before.data() : nullptr;
    p.rows = ROWS, p.width = width, p.stride = stride, p.head_dim = t.head_dim, p.act = t.act, p.l2_norm = t.l2_norm;
    p.rows_per_slice = t.rows_per_slice, p.eps = 1e-6f;
    for (auto& part : p.parts) part.at = nullptr, part.first = width, part.width = 0;
    int first = 0;
    for (size_t n = 0; n < t.parts.size(); ++n) {
        const int own = t.parts[n] * t.head_dim;
        y.push_back(std::vector<real>(size_t(ROWS) * own, to_real(NAN))), dy.push_back(reals(size_t(ROWS) * own));
        p.parts[n].first = first, p.parts[n].width = own, first += own;
    }
    const unsigned across = (t.heads + 32 / LANES - 1) / (32 / LANES);
    const unsigned blocks = ((ROWS + t.rows_per_slice - 1) / t.rows_per_slice + WARPS - 1) / WARPS;
    for (size_t n = 0; n < y.size(); ++n) p.parts[n].at = y[n].data();
    launch({across, blocks, 1}, THREADS, [&] { short_conv_fwd(p); });

    // The definition.
    std::vector<double> wanted(size_t(ROWS) * width), ddx(size_t(ROWS) * stride), ddw(TAPS * width), ddb(width);
    const auto part_of = [&](int c) {
        size_t n = y.size() - 1;
        while (c < p.parts[n].first) --n;
        return n;
    };
    for (const auto& [start, rows] : SEGMENTS) {
        const int n = info[start].segment;
        for (int i = 0; i < rows; ++i) {
            const auto input = [&](int back, int c) -> double {
                if (back <= i) return to_float(matrix[size_t(start + i - back) * stride + t.left + c]);
                return t.before ? to_float(before[(n * (TAPS - 1) + TAPS - 1 - (back - i)) * width + c]) : 0.0;
            };
            for (int head = 0; head < t.heads; ++head) {
                std::vector<double> x(t.head_dim), act(x), slope(x), d(x);
                double sum = 1e-6, along = 0.0;
                for (int j = 0; j < t.head_dim; ++j) {
                    const int c = head * t.head_dim + j;
                    x[j] = t.bias ? bias[c] : 0.0;
                    for (int k = 0; k < TAPS; ++k) x[j] += weight[c * TAPS + k] * input(TAPS - 1 - k, c);
                    const double s = 1.0 / (1.0 + exp(-x[j]));
                    act[j] = t.act == ACT_SILU ? x[j] * s : t.act == ACT_SIGMOID ? s : x[j];
                    slope[j] = t.act == ACT_SILU ? s + x[j] * s * (1 - s) : t.act == ACT_SIGMOID ? s * (1 - s) : 1.0;
                    const size_t own = part_of(c);
                    d[j] = to_float(dy[own][size_t(start + i) * p.parts[own].width + c - p.parts[own].first]);
                    sum += act[j] * act[j], along += act[j] * d[j];
                }
                const double r = t.l2_norm ? 1.0 / sqrt(sum) : 1.0;
                for (int j = 0; j < t.head_dim; ++j) {
                    const int c = head * t.head_dim + j;
                    wanted[size_t(start + i) * width + c] = act[j] * r;
                    const double g = slope[j] * r * (d[j] - (t.l2_norm ? along * r * r * act[j] : 0.0));
                    ddb[c] += g;
                    for (int k = 0; k < TAPS; ++k) {
                        const int back = TAPS - 1 - k;
                        ddw[k * width + c] += g * input(back, c);
                        if (back <= i) ddx[size_t(start + i - back) * stride + t.left + c] += g * weight[c * TAPS + k];
                    }
                }
            }
        }
    }
    std::vector<real> joined(size_t(ROWS) * width);
    for (int row = 0; row < ROWS; ++row) {
        for (int c = 0; c < width; ++c) {
            const size_t n = part_of(c);
            joined[size_t(row) * width + c] = y[n][size_t(row) * p.parts[n].width + c - p.parts[n].first];
        }
    }
    compare("y", joined, wanted);
#if VEC <= 4
    std::vector<real> dx(size_t(ROWS) * stride, to_real(0.f));
    for (int row = 0; row < ROWS; ++row) {
        for (int c = 0; c < width; ++c) dx[size_t(row) * stride + t.left + c] = to_real(NAN);
    }
    std::vector<float> partial(size_t(blocks) * (TAPS + 1) * width, NAN), sums((TAPS + 1) * width, 0.f);
    for (size_t n = 0; n < y.size(); ++n) p.parts[n].at = dy[n].data();
    launch({across, blocks, 1}, THREADS, [&] { short_conv_bwd(dx.data() + t.left, partial.data(), p); });
    for (size_t i = 0; i < partial.size(); ++i) sums[i % sums.size()] += partial[i];
    compare("dx", dx, ddx);
    compare("dweight", std::vector<float>(sums.begin(), sums.begin() + TAPS * width), ddw);
    compare("dbias", std::vector<float>(sums.begin() + TAPS * width, sums.end()), ddb);
#endif
}

int main() {
    const int d = HEAD_DIM;
    // Slices that begin and end inside of segments, at their bounds and outside, with less and more than 32 rows.
    check({d, 5, 8, ACT_SILU, false, true, true, {5}, 0, 0});
    check({d, 41, 32, ACT_SILU, true, true, false, {30, 4, 7}, 2 * VEC, 3 * VEC});
    check({d, 3, 45, NO_ACTIVATION, true, false, true, {3}, 0, VEC});
    check({d, 3, 1, ACT_SIGMOID, true, false, true, {1, 1, 1}, VEC, 0});
    check({d, 2, 133, ACT_SIGMOID, false, true, false, {2}, 0, 0});
}
