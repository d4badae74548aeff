// Products of several matrices for two row blocks, against sums in f64. Prints a checksum of the first 16 rows, which
// are the same in all variants.
#ifndef HOPPER
#define HOPPER 0
#endif
#if HOPPER
#include "stream_product_sm90.cu"
#define stream_tiles stream_product_sm90
#elif TILES
#include "stream_tiles.cu"
#endif
#if HOPPER || TILES
constexpr int ROWS = 2 * BN, WIDE = BM / 16, RUNS = SPLIT ? PARTS : 1;
#else
#include "stream_product.cu"
constexpr int ROWS = 16 * NT, WIDE = 1, RUNS = 1;
#endif

// With GLU one matrix of gates and values.
static void check(int width) {
    const int sizes[3] = {GLU ? 64 : 40, 24, 129}, count = GLU ? 1 : 3, rows = ROWS;
    std::vector<u16> inner(rows * sizes[0], 0x7fff), w[3];
    const std::vector<float> bias = numbers(sizes[0]);
    StreamProduct p{};
    int blocks = 0;
    for (int n = 0; n < count; ++n) {
        w[n] = narrow_numbers(sizes[n] * width * (GLU ? 2 : 1));
        p.parts[n] = StreamPart{w[n].data(), n == 0 && !GLU && RUNS == 1 ? bias.data() : nullptr, sizes[n], p.stride, blocks};
        p.stride += sizes[n];
        blocks += (sizes[n] + WIDE * RESULTS - 1) / (WIDE * RESULTS);
    }
    const std::vector<u16> x = narrow_numbers(rows * width);
    std::vector<u16> input(x.size());
    for (int i = 0; i < rows * width; ++i) input[blocked(i / width, i % width, width, rows)] = x[i];
    std::vector<float> y(RUNS * rows * p.stride, NAN);
    p.x = input.data(), p.y = y.data(), p.inner = inner.data();
    p.part_count = count, p.width = width, p.act = ACT_SILU;
#if HOPPER || TILES
    launch({2, unsigned(blocks), RUNS}, THREADS, [&] { stream_tiles(p); });
    // As stream_norm does.
    for (int run = 1; run < RUNS && !GLU; ++run) {
        for (int i = 0; i < rows * p.stride; ++i) y[i] += y[run * rows * p.stride + i];
    }
#else
    launch({2, unsigned(blocks), 1}, THREADS, [&] { stream_product(p); });
#endif

    u64 checksum = 0;
    for (int i = 0; i < 16 * p.stride; ++i) {
        const int row = i / p.stride, result = i % p.stride;
        const u32 bits = GLU ? inner[blocked(row, result, p.stride, rows)] : __float_as_uint(y[i]);
        checksum = checksum * 6364136223846793005ull + bits;
    }
    printf("%llx ", checksum);

    const auto dot = [&](int n, int result, int row) {
        double sum = 0.0;
        for (int c = 0; c < width; ++c) {
            sum += double(bf16_to_float(w[n][result * width + c])) * bf16_to_float(x[row * width + c]);
        }
        return sum;
    };
    for (int row = 0; row < rows; ++row) {
        for (int n = 0; n < count; ++n) {
            for (int i = 0; i < sizes[n]; ++i) {
                const double sum = dot(n, i, row);
                if (GLU) {
                    const double want = sum / (1.0 + exp(-sum)) * dot(n, sizes[n] + i, row);
                    expect_close(bf16_to_float(inner[blocked(row, i, sizes[n], rows)]), want, 0.01, "inner", row, i);
                } else {
                    const double got = y[row * p.stride + p.parts[n].start + i];
                    expect_close(got, sum + (n == 0 && RUNS == 1 ? bias[i] : 0.f), 1e-4, "y", row, i);
                }
            }
        }
    }
}

int main() {
    // Every width begins with the same numbers, however many rows the one before had.
    for (int width : {WIDTHS}) {
        reset_numbers();
        check(width);
    }
}
