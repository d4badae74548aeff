// Quantization of weights to int8 and back, see int8.cuh.
//
// Compile-time: BF16 (the type after dequantization), VEC.
#include "int8.cuh"
#include "overlap.cuh"
#include "real.cuh"
#include "params.cuh"

constexpr int THREADS = 256;

// Rounds to int8; NaN becomes 0.
DEVICE int to_int8(float x, float factor) {
    // __fmul_rn prevents fusing with the addition of roundf.
    const int q = int(roundf(__fmul_rn(x, factor)));
    return q > 127 ? 127 : q < -128 ? -128 : q;
}

// One warp per block of INT8_BLOCK values, two values per lane.
extern "C" __global__ void __launch_bounds__(THREADS) quantize_int8(const __grid_constant__ QuantInt8 p) {
    const int lane = threadIdx.x % 32, blocks = int8_blocks(p.width);
    const u32 count = u32(p.rows) * blocks, warps = gridDim.x * (THREADS / 32);
    for (u32 n = blockIdx.x * (THREADS / 32) + threadIdx.x / 32; n < count; n += warps) {
        const int column = n % blocks * INT8_BLOCK + 2 * lane;
        const float* row = p.x + size_t(n / blocks) * p.width;
        const float a = column < p.width ? row[column] : 0.f, b = column + 1 < p.width ? row[column + 1] : 0.f;
        const float scale = block_max<1>(fmaxf(fabsf(a), fabsf(b))) / 127.f;
        const float factor = scale > 0.f ? 1.f / scale : 0.f;
        const u32 pair = (to_int8(a, factor) & 0xff) | (to_int8(b, factor) & 0xff) << 8;
        reinterpret_cast<u16*>(p.values)[size_t(n) * (INT8_BLOCK / 2) + lane] = u16(pair);
        if (lane == 0) p.scales[n] = scale;
    }
}

// Dequantizes vector i of a matrix.
DEVICE void load_vector(float (&y)[VEC], const DequantMatrix& matrix, u32 i, int width) {
    const u32 vectors = width / VEC, row = i / vectors, column = i % vectors * VEC;
    const size_t at = size_t(row) * int8_blocks(width) * INT8_BLOCK + column;
    const float scale = matrix.scales[at / INT8_BLOCK];
#if VEC == 8
    int8_values(y, *reinterpret_cast<const uint2*>(matrix.values + at), scale);
#else
    y[0] = float(matrix.values[at]) * scale;
#endif
}

// Dequantizes matrices of one width, one per grid.y. Weights are constant, so the first vector is read before the wait; the
// destination may still be in use until then. Does not call let_successor_begin: the matmul that follows reads its weights
// before it waits.
extern "C" __global__ void __launch_bounds__(THREADS) dequantize_int8(const __grid_constant__ DequantInt8 p) {
    const DequantMatrix matrix = p.matrices[blockIdx.y];
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    float y[VEC];
    if (i < u32(matrix.vectors)) load_vector(y, matrix, i, p.width);
    wait_for_predecessor();
    while (i < u32(matrix.vectors)) {
        store<VEC>(matrix.to + size_t(i) * VEC, y);
        i += gridDim.x * THREADS;
        if (i < u32(matrix.vectors)) load_vector(y, matrix, i, p.width);
    }
}
