// Weights in 8 bits: INT8_BLOCK values of a row share a scale, and rows are padded with zeros to whole blocks. A
// product reads a value as q * scale, rounded to its type: all kernels dequantize through this function, so that bits
// agree.
#pragma once
#include "ptx.cuh"

constexpr int INT8_BLOCK = 64;

// Blocks of a row, which are also its scales.
DEVICE int int8_blocks(int width) { return (width + INT8_BLOCK - 1) / INT8_BLOCK; }

// Byte i of a word whose bytes have their first bits flipped, without a conversion, of which a GPU does few at a time:
// as the last bits of 2^23 it is q + 128 above that.
DEVICE float int8_value(u32 flipped, int i) {
    return __uint_as_float(__byte_perm(flipped, 0x4b000000, 0x7540 + i)) - 8388736.f;
}

// Eight values times their scale.
DEVICE void int8_values(float (&y)[8], uint2 q, float scale) {
    q.x ^= 0x80808080u, q.y ^= 0x80808080u;
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = int8_value(q.x, i) * scale, y[i + 4] = int8_value(q.y, i) * scale;
}
