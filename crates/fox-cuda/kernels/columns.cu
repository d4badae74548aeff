// Sums over rows, in fixed order: one launch sums slices of rows, a second one the slices.
//
// Compile-time: BF16 (type of the input), VEC (not used).
#include "real.cuh"

// out[slice][column] = sum of the slice's rows, plus acc[column] where there is one. Grid (columns / 32,
// slices), block 1024: 32 columns, 32 rows at a time.
template <typename T>
DEVICE void column_sums_of(float* out, const float* acc, const T* x, int rows, int width,
                           int rows_per_slice) {
    __shared__ float parts[32][33];
    const int column = blockIdx.x * 32 + threadIdx.x % 32, lane = threadIdx.x / 32;
    const int first = blockIdx.y * rows_per_slice, last = min(first + rows_per_slice, rows);
    float sum = 0.f;
    if (column < width) {
#pragma unroll 8
        for (int row = first + lane; row < last; row += 32) {
            if constexpr (sizeof(T) == 2) sum += bf16_to_float(x[size_t(row) * width + column]);
            else sum += x[size_t(row) * width + column];
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

extern "C" __global__ void __launch_bounds__(1024)
    column_sums(float* out, const float* acc, const real* x, int rows, int width,
                int rows_per_slice) {
    column_sums_of(out, acc, x, rows, width, rows_per_slice);
}

// x[row][column] += bias[column].
extern "C" __global__ void add_bias(real* x, const float* bias, size_t count, int width) {
    const size_t stride = size_t(gridDim.x) * blockDim.x;
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
        x[i] = to_real(to_float(x[i]) + bias[i % width]);
    }
}

// Matrices of f32 side by side: part i has columns `end[i - 1] .. end[i]` of the whole. Columns after the
// last part are padding.
constexpr int PARTS = 4;
struct Parts {
    float* at[PARTS];
    int end[PARTS];
    int add[PARTS];  // whether split_columns adds to what is there
};
// Where element i of the whole, which has rows of `width`, lies; null in the padding. And the part's `add`.
DEVICE float* part_of(const Parts& p, u32 i, u32 width, int& add) {
    const u32 row = i / width;
    const int column = int(i - row * width);
    float* found = nullptr;
    int begin = add = 0;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const int end = p.end[part];
        if (column >= begin && column < end) {
            found = p.at[part] + size_t(row) * (end - begin) + (column - begin);
            add = p.add[part];
        }
        begin = end;
    }
    return found;
}
extern "C" __global__ void join_columns(real* y, u32 count, u32 width, const Parts p) {
    const u32 stride = gridDim.x * blockDim.x;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        int add;
        const float* from = part_of(p, i, width, add);
        y[i] = to_real(from ? *from : 0.f);
    }
}
extern "C" __global__ void split_columns(const float* x, u32 count, u32 width, const Parts p) {
    const u32 stride = gridDim.x * blockDim.x;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        int add;
        float* to = part_of(p, i, width, add);
        if (to) *to = x[i] + (add ? *to : 0.f);
    }
}
