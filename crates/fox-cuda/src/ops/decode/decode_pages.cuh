// Keys and values of a page, for decode_attention.cu and decode_attend.cu; a warp takes a page.
//
// Compile-time: HEAD_DIM, ROWS_IN_FLIGHT (passes whose rows are loaded together; does not affect bits).
#pragma once
#include "decode.cuh"
#include "params.cuh"

constexpr int LANES = HEAD_DIM / 8;       // lanes per key
constexpr int KEYS = 32 / LANES;          // keys that a warp loads per pass
constexpr int PASSES = PAGE / KEYS;
constexpr int LINE = 64;                  // values of an L2 cache line

DEVICE void prefetch(const u16* p) {
#if !EMULATED
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

// Decay from each key of a page to its end; a lane has keys 2 lane and 2 lane + 1, and gates beyond the last key are 0.
// Suffix sums instead of differences of prefix sums: a strong gate would cancel the digits of the others.
DEVICE float2 decay_behind(float2 gate) {
    const int lane = threadIdx.x % 32;
    float sum = gate.x + gate.y;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_down_sync(~0u, sum, step);
        if (lane + step < 32) sum += other;
    }
    float behind = __shfl_down_sync(~0u, sum, 1);
    if (lane == 31) behind = 0.f;
    return make_float2(behind + gate.y, behind);
}

// Eight columns of the keys or values of some passes. Rows that were not written yet are read too, and masked later.
DEVICE void read_rows(uint4 (&rows)[ROWS_IN_FLIGHT], const u16* own, int pass) {
#pragma unroll
    for (int i = 0; i < ROWS_IN_FLIGHT; ++i) {
        rows[i] = *reinterpret_cast<const uint4*>(own + (pass + i) * KEYS * HEAD_DIM);
    }
}
DEVICE float dot_of(const float (&q)[8], const uint4& row) {
    const u32 words[4] = {row.x, row.y, row.z, row.w};
    float dot = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) dot += q[2 * i] * bf16_lo(words[i]) + q[2 * i + 1] * bf16_hi(words[i]);
    return dot;
}
DEVICE void add_row(float (&o)[8], float share, const uint4& row) {
    const u32 words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        o[2 * i] += share * bf16_lo(words[i]);
        o[2 * i + 1] += share * bf16_hi(words[i]);
    }
}
