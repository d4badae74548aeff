// Weights to 8 bits and back, see int8.cuh.
//
// Compile-time: BF16 (what is unpacked to), VEC.
#include "int8.cuh"
#include "overlap.cuh"
#include "real.cuh"
#include "params.cuh"

constexpr int THREADS = 256;

// The nearest value of 8 bits; what is not a number becomes 0.
DEVICE int to_int8(float x, float factor) {
    // Not to be fused with what rounding adds.
    const int q = int(roundf(__fmul_rn(x, factor)));
    return q > 127 ? 127 : q < -128 ? -128 : q;
}

// A warp takes a block of values at a time, a lane two of them.
extern "C" __global__ void __launch_bounds__(THREADS) pack_int8(const __grid_constant__ PackInt8 p) {
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

// The values of piece i of a matrix, VEC at a time.
DEVICE void load_piece(float (&y)[VEC], const UnpackPart& part, u32 i, int width) {
    const u32 pieces = width / VEC, row = i / pieces, column = i % pieces * VEC;
    const size_t at = size_t(row) * int8_blocks(width) * INT8_BLOCK + column;
    const float scale = part.scales[at / INT8_BLOCK];
#if VEC == 8
    int8_values(y, *reinterpret_cast<const uint2*>(part.values + at), scale);
#else
    y[0] = float(part.values[at]) * scale;
#endif
}

// Matrices of one width in 8 bits to real numbers, one for each y of the grid. The weights never change, so a first piece
// is read before the wait; what is written may still be read by others until then. Nobody is let begin early: the product
// that follows reads its weights before it waits.
extern "C" __global__ void __launch_bounds__(THREADS) unpack_int8(const __grid_constant__ UnpackInt8 p) {
    const UnpackPart part = p.parts[blockIdx.y];
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    float y[VEC];
    if (i < u32(part.pieces)) load_piece(y, part, i, p.width);
    wait_for_predecessor();
    while (i < u32(part.pieces)) {
        store<VEC>(part.to + size_t(i) * VEC, y);
        i += gridDim.x * THREADS;
        if (i < u32(part.pieces)) load_piece(y, part, i, p.width);
    }
}
