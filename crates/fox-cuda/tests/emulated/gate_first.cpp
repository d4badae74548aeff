// The norm of gated rows, forward and backward, against its definition in f64.
#include "gate_first.cu"

constexpr double TOLERANCE = BF16 ? 1e-2 : 1e-5;
constexpr double FLOOR = 1e-3;
#include "compare.h"

static void check(int rows, int width, int act, unsigned blocks) {
    std::vector<real> x(size_t(rows) * width), z(x), dy(x), y(x.size(), to_real(NAN)), dx(y), dgate(y);
    for (auto* all : {&x, &z, &dy}) {
        for (real& value : *all) value = to_real(number());
    }
    const std::vector<float> norm = numbers(width, 1.f, 0.3f);
    std::vector<float> partial(size_t(blocks) * width, NAN), dnorm(width, 0.f);
    GateFirst p = {};
    p.x = x.data(), p.gate = z.data(), p.norm = norm.data(), p.rows = rows, p.width = width, p.act = act, p.eps = 1e-3f;
    std::vector<double> wanted(x.size()), ddx(x.size()), dz(x.size()), dw(width);
    for (int row = 0; row < rows; ++row) {
        const size_t base = size_t(row) * width;
        const auto u = [&](int c) {
            const double gate = to_float(z[base + c]), s = 1.0 / (1.0 + exp(-gate));
            return double(to_float(x[base + c])) * (act == ACT_SILU ? gate * s : s);
        };
        double squares = 0.0, along = 0.0;
        for (int c = 0; c < width; ++c) squares += u(c) * u(c);
        const double r = 1.0 / sqrt(squares / width + 1e-3);
        for (int c = 0; c < width; ++c) along += norm[c] * to_float(dy[base + c]) * u(c) * r / width;
        for (int c = 0; c < width; ++c) {
            const double gate = to_float(z[base + c]), s = 1.0 / (1.0 + exp(-gate)), d = to_float(dy[base + c]);
            const double value = act == ACT_SILU ? gate * s : s, own = s * (1 - s);
            const double slope = act == ACT_SILU ? s + gate * own : own;
            const double du = r * (norm[c] * d - u(c) * r * along);
            wanted[base + c] = u(c) * r * norm[c], dw[c] += d * u(c) * r;
            ddx[base + c] = du * value, dz[base + c] = du * to_float(x[base + c]) * slope;
        }
    }
    launch({blocks, 1, 1}, THREADS, [&] { gate_first_fwd(y.data(), p); });
    compare("y", y, wanted);
    // Recomputed over the gradient.
    launch({blocks, 1, 1}, THREADS, [&] {
        gate_first_bwd(dx.data(), dgate.data(), dy.data(), partial.data(), dy.data(), p);
    });
    for (size_t i = 0; i < partial.size(); ++i) dnorm[i % width] += partial[i];
    compare("dx", dx, ddx), compare("dgate", dgate, dz), compare("dnorm", dnorm, dw), compare("y again", dy, wanted);
}

int main() {
    check(5, WIDTH, ACT_SILU, 2);
    check(1, WIDTH - VEC, ACT_SIGMOID, 1);
}
