// What the kernels of decode steps share.
//
// Their launches overlap: each must wait for its predecessor before it touches what others write. What never changes
// during a step may be read before.
#pragma once
#define BF16 1
#define VEC 8
#include "overlap.cuh"
#include "real.cuh"

constexpr int PAGE = 64;
// Runs of pages that a sequence's keys are divided into, at most.
constexpr int MAX_RUNS = 64;

// Where a column of a slab of 64 lies in its row for Hopper's products: pieces of 16 bytes change places from row to row.
DEVICE int slab_place(int row, int column) { return (column / 8 ^ row % 8) * 8 + column % 8; }

// A lane has read eight columns of a row of weights, the four lanes of the row 32 of them. An instruction multiplies 16
// that follow each other, four of each lane: what this one has of the first 16, and of the last.
DEVICE uint4 sixteens(const uint4& own) {
    const bool is_behind = threadIdx.x & 2;
    const u32 x = __shfl_xor_sync(~0u, is_behind ? own.x : own.z, 2);
    const u32 y = __shfl_xor_sync(~0u, is_behind ? own.y : own.w, 2);
    return is_behind ? make_uint4(x, y, own.z, own.w) : make_uint4(own.x, own.y, x, y);
}
// Where a column of 32 lies so that a lane reads those of the rows that go with them.
DEVICE int sixteens_place(int column) {
    const int four = column % 16 / 4;
    return (four % 2 * 2 + four / 2) * 8 + column / 16 * 4 + column % 4;
}

// Where element (row, column) of the right operand of a product of so many rows lies: in blocks of 8 rows and 32 columns;
// with SLABS, for Hopper's products, in slabs of 64 columns.
DEVICE size_t blocked(int row, int column, int width, size_t rows) {
#if SLABS
    return (column / 64 * rows + row) * 64 + slab_place(row, column % 64);
#else
    return (size_t(row / 8) * (width / 32) + column / 32) * 256 + row % 8 * 32 + sixteens_place(column % 32);
#endif
}

// The matrix that a thread block of a product of several has to do with.
template <class Product>
DEVICE auto part_of_block(const Product& p) {
    int n = 0;
    while (n + 1 < p.part_count && int(blockIdx.y) >= p.parts[n + 1].first_block) ++n;
    return p.parts[n];
}

DEVICE float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// How the keys up to `position` are divided: a matter of the sequence's own length.
struct Runs {
    int pages, each, count;
    DEVICE explicit Runs(int position) {
        pages = position / PAGE + 1;
        each = 4;
        while (each * MAX_RUNS < pages) each *= 2;
        count = (pages + each - 1) / each;
    }
};
