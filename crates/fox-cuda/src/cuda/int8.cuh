// int8 weights: INT8_BLOCK values of a row share a scale, and rows are zero-padded to whole blocks. A matmul reads a value
// as q * scale, rounded to its type. All kernels dequantize with the functions below, so that their bits agree.
#pragma once
#include "constants.cuh"
#include "ptx.cuh"

// Blocks of a row, which is also the number of its scales.
DEVICE int int8_blocks(int width) { return (width + INT8_BLOCK - 1) / INT8_BLOCK; }

// Byte i of a word whose sign bits are flipped, as a float. Avoids the conversion instruction, which has a low throughput:
// as the low mantissa bits of 2^23 the byte adds q + 128.
DEVICE float int8_value(u32 flipped, int i) {
    return __uint_as_float(__byte_perm(flipped, 0x4b000000, 0x7540 + i)) - 8388736.f;
}

// Dequantizes eight values.
DEVICE void int8_values(float (&y)[8], uint2 q, float scale) {
    q.x ^= 0x80808080u, q.y ^= 0x80808080u;
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = int8_value(q.x, i) * scale, y[i + 4] = int8_value(q.y, i) * scale;
}
