// Column sums in fixed order (one launch sums slices of rows, a second one the slices), bias add, and splitting and
// joining of columns.
//
// Compile-time: BF16 (type of `real`), VEC (not used).
#include "flat.cuh"
#include "params.cuh"

// out[slice][column] = sum of the slice's rows, plus acc[column] where there is one. Grid (columns / 32,
// slices), block 1024: 32 columns, 32 rows at a time.
extern "C" __global__ void __launch_bounds__(1024) column_sums(PARAMS(ColumnSums)) {
    __shared__ float parts[32][33];
    const int column = blockIdx.x * 32 + threadIdx.x % 32, lane = threadIdx.x / 32;
    const int first = blockIdx.y * rows_per_slice, last = min(first + rows_per_slice, rows);
    float sum = 0.f;
    if (column < width) {
#pragma unroll 8
        for (int row = first + lane; row < last; row += 32) {
            sum += to_float(x[size_t(row) * width + column]);
        }
    }
    parts[lane][threadIdx.x % 32] = sum;
    __syncthreads();
    sum = lanes_sum<32>(parts[threadIdx.x % 32][lane]);
    const int own = blockIdx.x * 32 + lane;
    if (threadIdx.x % 32 == 0 && own < width) {
        out[size_t(blockIdx.y) * width + own] = sum + (acc ? acc[own] : 0.f);
    }
}

// x[row][column] += bias[column].
extern "C" __global__ void add_bias(PARAMS(AddBias)) {
    FOR_EACH(i, count) x[i] = to_real(to_float(x[i]) + bias[i % width]);
}

// to[row][0..width] = from[row][0..width], N elements per access; zeros where `from` is null, added to `to` with `add`.
// Indices are divided in 32 bits: a 64-bit division would cost more than the copy.
template <int N, typename To, typename From>
DEVICE void copy_block(const ColumnCopy& c) {
    const u32 per_row = c.width / N, accesses = c.accesses, step = gridDim.x * blockDim.x;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < accesses; i += step) {
        const u32 row = i / per_row, column = (i - row * per_row) * N;
        float x[N] = {};
        if (c.from) load<N>(x, static_cast<const From*>(c.from) + size_t(row) * c.from_stride + column);
        To* to = static_cast<To*>(c.to) + size_t(row) * c.to_stride + column;
        if (c.add) {
            float old[N];
            load<N>(old, to);
#pragma unroll
            for (int j = 0; j < N; ++j) x[j] += old[j];
        }
        store<N>(to, x);
    }
}

// Grid (blocks, copies).
extern "C" __global__ void copy_columns(const __grid_constant__ ColumnCopies p) {
    const ColumnCopy& c = p.copies[blockIdx.y];
    if (c.vectorized) copy_block<8, real, real>(c);
    else copy_block<1, real, real>(c);
}
// From f32.
extern "C" __global__ void convert_columns(const __grid_constant__ ColumnCopies p) {
    const ColumnCopy& c = p.copies[blockIdx.y];
    if (c.vectorized) copy_block<8, real, float>(c);
    else copy_block<1, real, float>(c);
}
