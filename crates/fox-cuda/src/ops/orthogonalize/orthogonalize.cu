// Kernels between the GEMMs of a Newton-Schulz iteration, for a batch of matrices [rows, cols] of one shape. The GEMMs
// use contiguous matrices of `real`, zero-padded to [padded_rows, padded_cols].
//
// Compile-time: BF16 (0 or 1), VEC (not used).
#include "params.cuh"
#include "real.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int CHUNK = 16 * 1024;

// partial[matrix][chunk] = sum of squares of a chunk, in f64 and fixed order.
// Grid: chunks of a matrix, matrices.
extern "C" __global__ void __launch_bounds__(THREADS)
    square_chunks(PARAMS(SquareChunks)) {
    const float* x = entries[blockIdx.y].matrix;
    const size_t begin = size_t(blockIdx.x) * CHUNK, end = min(begin + CHUNK, count);
    double sum = 0.0;
    for (size_t i = begin + threadIdx.x; i < end; i += THREADS) sum += double(x[i]) * double(x[i]);
    sum = block_sum_f64<WARPS>(sum);
    if (threadIdx.x == 0) partial[size_t(blockIdx.y) * gridDim.x + blockIdx.x] = sum;
}

// x = matrix / |matrix|, padded; zeros where it is zero. Grid: blocks, matrices.
extern "C" __global__ void __launch_bounds__(THREADS)
    normalize(PARAMS(Normalize)) {
    const size_t matrix = blockIdx.y;
    double sum = 0.0;
    for (int i = threadIdx.x; i < chunks; i += THREADS) sum += partial[matrix * chunks + i];
    sum = block_sum_f64<WARPS>(sum);
    const double inverse = sum > 0.0 ? 1.0 / sqrt(sum) : 0.0;
    const float* from = entries[matrix].matrix;
    const size_t count = size_t(padded_rows) * padded_cols;
    const size_t stride = size_t(gridDim.x) * THREADS;
    for (size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x; i < count; i += stride) {
        const size_t r = i / padded_cols, c = i % padded_cols;
        const bool inside = r < rows && c < cols;
        const float value = inside ? float(from[r * cols + c] * inverse) : 0.f;
        x[matrix * count + i] = to_real(value);
    }
}

// square = a + b gram + c square, for matrices [n, n]. Grid: blocks, matrices.
extern "C" __global__ void __launch_bounds__(THREADS)
    polynomial(PARAMS(Polynomial)) {
    const size_t count = size_t(n) * n, first = blockIdx.y * count;
    const size_t stride = size_t(gridDim.x) * THREADS;
    for (size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x; i < count; i += stride) {
        const float identity = i / n == i % n ? a : 0.f;
        const float g = to_float(gram[first + i]), s = to_float(square[first + i]);
        square[first + i] = to_real(identity + b * g + c * s);
    }
}

// matrix = factor * x, without the padding. Grid: blocks, matrices.
extern "C" __global__ void __launch_bounds__(THREADS)
    unpad(PARAMS(Unpad)) {
    const OrthogonalizeEntry e = entries[blockIdx.y];
    const size_t count = size_t(rows) * cols;
    const real* from = x + blockIdx.y * (size_t(padded_rows) * padded_cols);
    const size_t stride = size_t(gridDim.x) * THREADS;
    for (size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x; i < count; i += stride) {
        const size_t r = i / cols, c = i % cols;
        e.matrix[i] = e.factor * to_float(from[r * padded_cols + c]);
    }
}
