// Inverse of a triangular system of 64 unknowns, by a block of 256 threads.
#pragma once
#include "tiles.cuh"

constexpr int SYSTEM = 64 + 4;  // pitch of a system

// inverse = (I + system)^-1 for a strictly lower triangular `system`: diagonal blocks of 16 by forward substitution,
// then the blocks at distance 1, 2 and 3 from the diagonal as products. Blocks above the diagonal of `inverse` are not
// written, those of `system` are scratch.
DEVICE void invert(float* inverse, float* system) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp < 4 && lane < 16) {
        const float* own = system + warp * 16 * (SYSTEM + 1);
        float x[16];
#pragma unroll
        for (int r = 0; r < 16; ++r) {
            float line[4][4], sums[2] = {r == lane ? 1.f : 0.f, 0.f};
#pragma unroll
            for (int k = 0; k < r; k += 4) load<4>(line[k / 4], own + r * SYSTEM + k);
#pragma unroll
            for (int k = 0; k < r; ++k) sums[k % 2] -= line[k / 4][k % 4] * x[k];
            x[r] = sums[0] + sums[1];
            inverse[(warp * 16 + r) * SYSTEM + warp * 16 + lane] = x[r];
        }
    }
    __syncthreads();
    // 128 threads per block of 16 x 16, two rows per thread.
    const int row = threadIdx.x / 16 % 8, column = threadIdx.x % 16;
    // Rows `row` and `row + 8` of A B, for A of 16 rows and `count` columns.
    auto rows_of = [&](const float* a, const float* b, int count) {
        float2 sum = make_float2(0.f, 0.f);
        for (int k = 0; k < count; k += 4) {
            const float4 upper = *reinterpret_cast<const float4*>(a + row * SYSTEM + k);
            const float4 lower = *reinterpret_cast<const float4*>(a + (row + 8) * SYSTEM + k);
            const float* x = b + k * SYSTEM + column;
            const float x0 = x[0], x1 = x[SYSTEM], x2 = x[2 * SYSTEM], x3 = x[3 * SYSTEM];
            sum.x += upper.x * x0 + upper.y * x1 + upper.z * x2 + upper.w * x3;
            sum.y += lower.x * x0 + lower.y * x1 + lower.z * x2 + lower.w * x3;
        }
        return sum;
    };
#pragma unroll 1
    for (int distance = 1; distance < 4; ++distance) {
        for (int block = threadIdx.x / 128; block < 4 - distance; block += 2) {
            const int i = 16 * (block + distance), j = 16 * block;
            const float2 sum = rows_of(system + i * SYSTEM + j, inverse + j * SYSTEM + j, i - j);
            float* out = system + (j + row) * SYSTEM + i + column;
            out[0] = sum.x, out[8 * SYSTEM] = sum.y;
        }
        __syncthreads();
        for (int block = threadIdx.x / 128; block < 4 - distance; block += 2) {
            const int i = 16 * (block + distance), j = 16 * block;
            const float2 sum = rows_of(inverse + i * SYSTEM + i, system + j * SYSTEM + i, 16);
            float* out = inverse + (i + row) * SYSTEM + j + column;
            out[0] = -sum.x, out[8 * SYSTEM] = -sum.y;
        }
        __syncthreads();
    }
}
