// Shared by the kernels of decode steps.
//
// Their launches overlap (programmatic dependent launch): a kernel waits for its predecessor before it touches anything
// that a step writes. Weights and other constants may be read before the wait.
#pragma once
#define BF16 1
#define VEC 8
#include "constants.cuh"
#include "overlap.cuh"
#include "real.cuh"

// Position of a column of a 64-column slab in its row, in the 128-byte swizzle that wgmma reads: chunks of 16 bytes are
// permuted by the row.
DEVICE int swizzled_column(int row, int column) { return (column / 8 ^ row % 8) * 8 + column % 8; }

// Turns the eight columns of a weight row that a lane has loaded into the operands of two k16 instructions. Four lanes
// hold 32 columns of a row; an instruction takes 16 adjacent columns, four from each lane. x and y are this lane's
// operands for the first 16 columns, z and w for the last 16.
DEVICE uint4 exchange_k16(const uint4& own) {
    const bool is_behind = threadIdx.x & 2;
    const u32 x = __shfl_xor_sync(~0u, is_behind ? own.x : own.z, 2);
    const u32 y = __shfl_xor_sync(~0u, is_behind ? own.y : own.w, 2);
    return is_behind ? make_uint4(x, y, own.z, own.w) : make_uint4(own.x, own.y, x, y);
}
// Position of a column of 32 such that a lane loads the activations that match its weights after exchange_k16.
DEVICE int exchange_k16_position(int column) {
    const int four = column % 16 / 4;
    return (four % 2 * 2 + four / 2) * 8 + column / 16 * 4 + column % 4;
}

// Offset of element (row, column) of the right operand [rows, width] of a matmul: in blocks of 8 rows and 32 columns, or
// with SLABS (for wgmma) in swizzled slabs of 64 columns.
DEVICE size_t blocked(int row, int column, int width, size_t rows) {
#if SLABS
    return (column / 64 * rows + row) * 64 + swizzled_column(row, column % 64);
#else
    return (size_t(row / 8) * (width / 32) + column / 32) * 256 + row % 8 * 32 + exchange_k16_position(column % 32);
#endif
}

// The number of the weight matrix that this thread block multiplies by.
template <class Matmul>
DEVICE int matrix_index(const Matmul& p) {
    int n = 0;
    while (n + 1 < p.matrix_count && int(blockIdx.y) >= p.matrices[n + 1].first_block) ++n;
    return n;
}
// The matrix itself.
template <class Matmul>
DEVICE auto matrix_of_block(const Matmul& p) {
    return p.matrices[matrix_index(p)];
}

DEVICE float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// How attention splits the keys up to `position` over thread blocks (split-KV). It depends on the sequence's length
// alone, so that results are batch-invariant.
struct KvSplits {
    int pages, each, count;
    DEVICE explicit KvSplits(int position) {
        pages = position / PAGE + 1;
        each = 4;
        while (each * MAX_KV_SPLITS < pages) each *= 2;
        count = (pages + each - 1) / each;
    }
};
