// Products of several matrices for two row blocks, against sums in f64. Prints a checksum of the first 16 rows, which
// are the same in all variants. With ROUNDED all matrices but one have weights of 8 bits, and with INT8 lie so.
#ifndef HOPPER
#define HOPPER 0
#endif
#ifndef ROUNDED
#define ROUNDED 0
#endif
#ifndef INT8
#define INT8 0
#endif
#if HOPPER
#include "decode_matmul_sm90.cu"
#elif TILES
#include "decode_matmul_tiled.cu"
#endif
#if HOPPER || TILES
constexpr int ROWS = 2 * BN, WIDE = BM / 16, SPLITS = SPLIT ? K_SPLITS : 1;
#else
#include "decode_matmul.cu"
constexpr int ROWS = 16 * NT, WIDE = 1, SPLITS = 1;
#endif

#if INT8
constexpr int BLOCK = INT8_BLOCK;
#else
constexpr int BLOCK = 64;
#endif

// A matrix in 8 bits, and what it is in bf16.
struct Int8 {
    std::vector<signed char> values;
    std::vector<float> scales;
    std::vector<u16> unpacked;

    Int8(int rows, int width) {
        const int blocks = (width + BLOCK - 1) / BLOCK;
        for (int n = 0; n < rows * blocks; ++n) {
            scales.push_back(0.02f + 0.01f * fabsf(number()));
            for (int i = 0; i < BLOCK; ++i) {
                // All values occur, the least and the largest too; what is beyond a row would be noticed.
                const bool is_inside = n % blocks * BLOCK + i < width;
                values.push_back(is_inside ? n + i == 0 ? -128 : int(127.99f * fmaxf(-1.f, fminf(1.f, number()))) : 99);
                if (is_inside) unpacked.push_back(float_to_bf16(values.back() * scales.back()));
            }
        }
    }
};

// With GLU one matrix of gates and values.
static void check(int width) {
    const int sizes[3] = {GLU ? 64 : 40, 24, 129}, count = GLU ? 1 : 3, rows = ROWS;
    std::vector<u16> inner(rows * sizes[0], 0x7fff), w[3];
    std::vector<Int8> packed;
    packed.reserve(3);
    const std::vector<float> bias = numbers(sizes[0]);
    DecodeMatmul p{};
    int blocks = 0;
    for (int n = 0; n < count; ++n) {
        const int matrix_rows = sizes[n] * (GLU ? 2 : 1);
        const void* weights = nullptr;
        const float* scales = nullptr;
        if (ROUNDED && n != 1) {
            packed.emplace_back(matrix_rows, width);
            w[n] = packed.back().unpacked;
            if (INT8) weights = packed.back().values.data(), scales = packed.back().scales.data();
        } else {
            w[n] = narrow_numbers(matrix_rows * width);
        }
        if (!scales) weights = w[n].data();
        p.matrices[n] = DecodeMatrix{static_cast<const u16*>(weights), scales, n == 0 && !GLU && SPLITS == 1 ? bias.data() : nullptr,
                                sizes[n], p.stride, blocks};
        p.stride += sizes[n];
        blocks += (sizes[n] + WIDE * RESULTS - 1) / (WIDE * RESULTS);
    }
    const std::vector<u16> x = narrow_numbers(rows * width);
    std::vector<u16> input(x.size());
    for (int i = 0; i < rows * width; ++i) input[blocked(i / width, i % width, width, rows)] = x[i];
    std::vector<float> y(SPLITS * rows * p.stride, NAN);
    p.x = input.data(), p.y = y.data(), p.inner = inner.data();
    p.matrix_count = count, p.width = width, p.act = ACT_SILU;
#if HOPPER
    WeightMaps maps{};
    for (int n = 0; n < count; ++n) {
        maps.maps[n] = TensorMap{w[n].data(), width, sizes[n], GLU ? 2 : 1, GLU ? 2 : 1, GLU ? 8 : BM};
    }
    launch({2, unsigned(blocks), SPLITS}, THREADS, [&] { decode_matmul_sm90(maps, p); });
#elif TILES
    launch({2, unsigned(blocks), SPLITS}, THREADS, [&] { decode_matmul_tiled(p); });
#endif
#if HOPPER || TILES
    // As decode_norm does.
    for (int run = 1; run < SPLITS && !GLU; ++run) {
        for (int i = 0; i < rows * p.stride; ++i) y[i] += y[run * rows * p.stride + i];
    }
#else
    launch({2, unsigned(blocks), 1}, THREADS, [&] { decode_matmul(p); });
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
                    const double got = y[row * p.stride + p.matrices[n].start + i];
                    expect_close(got, sum + (n == 0 && SPLITS == 1 ? bias[i] : 0.f), 1e-4, "y", row, i);
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
