// PTX instructions and types; no CUDA toolkit header is needed.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
#define NEG_INF (__int_as_float(0xff800000))

// 2^x, flushing denormals: one MUFU instruction.
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two floats as a bf16 pair, `lo` in the low half (the lower address).
DEVICE u32 pack_bf16(float lo, float hi) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}

DEVICE float bf16_lo(u32 x) { return __uint_as_float(x << 16); }
DEVICE float bf16_hi(u32 x) { return __uint_as_float(x & 0xffff0000u); }
DEVICE float bf16_to_float(u16 x) { return __uint_as_float(u32(x) << 16); }
DEVICE u16 float_to_bf16(float x) { return u16(pack_bf16(x, 0.f) & 0xffff); }

// Clamps a log gate to LOG_GATE_FLOOR of the host, so that sums of gates of -3e38 stay finite. NaN stays NaN.
DEVICE float clamp_log_gate(float x) { return x < -1e3f ? -1e3f : x; }

DEVICE u32 smem_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// Reductions over the four lanes that share a row of an accumulator fragment.
DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
DEVICE float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

DEVICE void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Semaphores in device memory that order the work of different thread blocks.
DEVICE int load_acquire(const int* p) {
    int v;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE void store_release(int* p, int v) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
