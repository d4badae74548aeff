// Weights to 8 bits, against the rule in f64, and back.
#include "packed.cu"

static void check(int width) {
    const int rows[2] = {5, 2}, blocks = int8_blocks(width), padded = blocks * INT8_BLOCK;
    std::vector<signed char> values[2];
    std::vector<float> scales[2], x[2];
    std::vector<real> y[2];
    DequantInt8 unpack{};
    unpack.width = width;
    for (int n = 0; n < 2; ++n) {
        x[n] = numbers(rows[n] * width);
        // Blocks of nothing but zeros, of one large value, and of values between two of 8 bits.
        for (int c = 0; c < width; ++c) {
            if (n == 1 && c < INT8_BLOCK) x[n][c] = 0.f;
            if (n == 1 && c >= INT8_BLOCK) x[n][c] = c % INT8_BLOCK ? 0.5f + c % 100 : -127.f;
            if (n == 1) x[n][width + c] = c ? 1e-3f : 1e6f;
        }
        values[n].assign(rows[n] * padded, 77), scales[n].assign(rows[n] * blocks, NAN);
        QuantInt8 p{values[n].data(), scales[n].data(), x[n].data(), rows[n], width};
        launch({2, 1, 1}, THREADS, [&] { quantize_int8(p); });
        y[n].assign(rows[n] * width + 8, to_real(77.f));
        unpack.matrices[n] = DequantMatrix{values[n].data(), scales[n].data(), y[n].data(), rows[n] * width / VEC};
    }
    launch({1, 2, 1}, THREADS, [&] { dequantize_int8(unpack); });
    for (int n = 0; n < 2; ++n) {
        for (int i = 0; i < rows[n] * padded; ++i) {
            const int row = i / padded, column = i % padded, first = column / INT8_BLOCK * INT8_BLOCK;
            float largest = 0.f;
            for (int c = first; c < min(first + INT8_BLOCK, width); ++c) {
                largest = fmaxf(largest, fabsf(x[n][row * width + c]));
            }
            const float scale = scales[n][i / INT8_BLOCK];
            expect_close(scale, largest / 127.f, 0.0, "scale", row, column);
            if (column >= width) {
                expect_close(values[n][i], 0.0, 0.0, "padding", row, column);
                continue;
            }
            const float factor = scale > 0.f ? 1.f / scale : 0.f;
            expect_close(values[n][i], roundf(x[n][row * width + column] * factor), 0.0, "value", row, column);
            const float want = to_float(to_real(values[n][i] * scale));
            expect_close(to_float(y[n][row * width + column]), want, 0.0, "unpacked", row, column);
        }
        for (int i = 0; i < 8; ++i) expect_close(to_float(y[n][rows[n] * width + i]), 77.0, 0.0, "what is behind", n, i);
    }
}

int main() {
    for (int width : {WIDTHS}) check(width);
}
