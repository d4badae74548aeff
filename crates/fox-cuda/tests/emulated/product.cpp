// Products of several matrices for two row blocks, against sums in f64, with the norm of the rows taken behind them; with
// RESIDUAL one product that is added to the stream. Prints a checksum of the first 16 rows, which are the same in all
// variants.
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
#define RESIDUAL 0
constexpr int ROWS = 2 * BN, WIDE = BM / 16, RUNS = SPLIT ? PARTS : 1;
#else
#include "stream_product.cu"
constexpr int ROWS = 16 * NT, WIDE = 1, RUNS = 1;
#endif

// Squares of the tiles of rows [width / 16][rows], and the scales that stream_norm would give them.
struct Stream {
    std::vector<float> squares, scales;

    Stream(const std::vector<float>& h, int rows, int width) : squares(rows * width / 16), scales(rows) {
        const int tiles = width / 16;
        for (int row = 0; row < rows; ++row) {
            std::vector<float> runs(16);
            for (int tile = 0; tile < tiles; ++tile) {
                squares[tile * rows + row] = tile_square(h.data() + row * width + 16 * tile);
            }
            for (int run = 0; run < 16; ++run) {
                for (int tile = run * tiles / 16; tile < (run + 1) * tiles / 16; ++tile) runs[run] += squares[tile * rows + row];
            }
            for (int step = 1; step < 16; step *= 2) {
                for (int run = 0; run < 16; run += 2 * step) runs[run] += runs[run + step];
            }
            scales[row] = norm_scale(runs[0], width, 1e-5f);
        }
    }
};

// With GLU one matrix of gates and values.
static void check(int width) {
    const int sizes[3] = {GLU || RESIDUAL ? 64 : 40, 24, 129}, count = GLU || RESIDUAL ? 1 : 3, rows = ROWS;
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
    // The first rows have the same numbers however many there are.
    reset_numbers();
    const std::vector<float> norm = numbers(p.stride, 1.f, 0.2f);
    reset_numbers();
    const Stream stream(numbers(rows * width), rows, width);
    reset_numbers();
    const std::vector<float> before = numbers(rows * p.stride);
    std::vector<float> h = before, next_squares(rows * p.stride / 16, NAN);
    std::vector<u16> next(rows * p.stride, 0x7fff);
    // What is added to the stream, and what is split, has no norm in front.
    const bool is_normed = !RESIDUAL && RUNS == 1;
    if (is_normed) p.squares = stream.squares.data(), p.scales = stream.scales.data();
    p.h = h.data(), p.norm = norm.data(), p.next = next.data(), p.next_squares = next_squares.data(), p.eps = 1e-5f;
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
        const u32 bits = GLU ? inner[blocked(row, result, p.stride, rows)] : __float_as_uint(RESIDUAL ? h[i] : y[i]);
        checksum = checksum * 6364136223846793005ull + bits;
    }
    printf("%llx ", checksum);

    const auto dot = [&](int n, int result, int row) {
        double sum = 0.0;
        for (int c = 0; c < width; ++c) {
            sum += double(bf16_to_float(w[n][result * width + c])) * bf16_to_float(x[row * width + c]);
        }
        return sum * (is_normed ? stream.scales[row] : 1.f);
    };
    for (int row = 0; row < rows; ++row) {
        for (int n = 0; n < count; ++n) {
            for (int i = 0; i < sizes[n]; ++i) {
                const double sum = dot(n, i, row);
                if (GLU) {
                    const double want = sum / (1.0 + exp(-sum)) * dot(n, sizes[n] + i, row);
                    expect_close(bf16_to_float(inner[blocked(row, i, sizes[n], rows)]), want, 0.01, "inner", row, i);
                } else if (RESIDUAL) {
                    const int at = row * p.stride + i;
                    expect_close(h[at], before[at] + sum + bias[i], 1e-4, "stream", row, i);
                    const float scaled = bf16_to_float(float_to_bf16(h[at] * norm[i]));
                    expect_close(bf16_to_float(next[blocked(row, i, p.stride, rows)]), scaled, 0.0, "next", row, i);
                    const float square = tile_square(h.data() + at / 16 * 16);
                    expect_close(next_squares[i / 16 * rows + row], square, 0.0, "square", row, i);
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
