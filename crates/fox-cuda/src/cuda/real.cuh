// Activations: f32 or bf16 (`real`) in memory, f32 in registers.
//
// Compile-time: BF16 (0 or 1), and VEC, the elements per access: 8 where the width is a multiple of 8 (4 for mostly f32
// data), else 1.
#pragma once
#include "ptx.cuh"

#if BF16
typedef u16 real;
DEVICE float to_float(real x) { return bf16_to_float(x); }
DEVICE real to_real(float x) { return float_to_bf16(x); }
#else
typedef float real;
DEVICE float to_float(real x) { return x; }
DEVICE real to_real(float x) { return x; }
#endif

// N elements at once: eight bf16 and four f32 are one access of 16 bytes.
template <int N>
DEVICE void load(float (&x)[N], const float* p) {
    if constexpr (N == 8) {
        float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
        x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    } else if constexpr (N == 4) {
        float4 a = *reinterpret_cast<const float4*>(p);
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = p[i];
    }
}
template <int N>
DEVICE void load(float (&x)[N], const u16* p) {
    if constexpr (N == 8) {
        uint4 a = *reinterpret_cast<const uint4*>(p);
        const u32 words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) x[2 * i] = bf16_lo(words[i]), x[2 * i + 1] = bf16_hi(words[i]);
    } else if constexpr (N == 4) {
        uint2 a = *reinterpret_cast<const uint2*>(p);
        x[0] = bf16_lo(a.x), x[1] = bf16_hi(a.x), x[2] = bf16_lo(a.y), x[3] = bf16_hi(a.y);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = bf16_to_float(p[i]);
    }
}
template <int N>
DEVICE void store(float* p, const float (&x)[N]) {
    if constexpr (N == 8) {
        reinterpret_cast<float4*>(p)[0] = make_float4(x[0], x[1], x[2], x[3]);
        reinterpret_cast<float4*>(p)[1] = make_float4(x[4], x[5], x[6], x[7]);
    } else if constexpr (N == 4) {
        *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) p[i] = x[i];
    }
}
template <int N>
DEVICE void store(u16* p, const float (&x)[N]) {
    if constexpr (N == 8) {
        *reinterpret_cast<uint4*>(p) = make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]),
                                                  pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
    } else if constexpr (N == 4) {
        *reinterpret_cast<uint2*>(p) = make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) p[i] = float_to_bf16(x[i]);
    }
}

// Splits an f32 into its bf16 rounding (ties away from zero, so that the remainder fits 16 bits) and the remainder.
DEVICE void to_halves(float x, u16& high, u16& low) {
    const u32 bits = __float_as_uint(x);
    const bool nan = x != x;  // rounding its bits could give a number
    high = nan ? 0x7fff : u16((bits + 0x8000u) >> 16);
    low = nan ? 0 : u16(bits);
}
DEVICE float from_halves(u16 high, u16 low) {
    return __uint_as_float((u32(high) << 16) + u32(int(short(low))));
}

#if BF16
// Approximate versions: their error of a few ulps of f32 vanishes in the rounding to bf16 that follows, and the exact
// ones cost more than the memory accesses.
DEVICE float sigmoid(float x) {
    // exp(-x) may be infinite: its reciprocal is the right 0.
    return __fdividef(1.f, 1.f + __expf(-x));
}
DEVICE float reciprocal_root(float x) { return rsqrtf(x); }
DEVICE float exponential(float x) { return __expf(x); }
#else
DEVICE float sigmoid(float x) {
    // Never overflows: the exponent is not positive.
    float e = expf(-fabsf(x));
    return x >= 0.f ? 1.f / (1.f + e) : e / (1.f + e);
}
DEVICE float reciprocal_root(float x) { return 1.f / sqrtf(x); }
DEVICE float exponential(float x) { return expf(x); }
#endif
DEVICE float log_sigmoid(float x) { return fminf(x, 0.f) - log1pf(expf(-fabsf(x))); }

constexpr int ACT_SIGMOID = 0;
constexpr int ACT_SILU = 1;

// act(x) and its slope.
DEVICE float2 activation(int act, float x) {
    const float s = sigmoid(x);
    return act == ACT_SIGMOID ? make_float2(s, s * (1.f - s))
                              : make_float2(x * s, s + x * s * (1.f - s));
}

// Sum over the COUNT consecutive lanes of a warp that share a row; COUNT is a power of two.
template <int COUNT>
DEVICE float lanes_sum(float x) {
#pragma unroll
    for (int step = COUNT / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// Sum over a block of COUNT warps, returned to all threads.
template <int COUNT>
DEVICE float block_sum(float x) {
    x = lanes_sum<32>(x);
    if constexpr (COUNT == 1) return x;
    __shared__ float parts[COUNT];
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < COUNT; ++w) sum += parts[w];
    return sum;
}
// The same in f64; callable once per kernel, because its shared memory is not protected by a leading barrier.
template <int COUNT>
DEVICE double block_sum_f64(double x) {
    __shared__ double parts[COUNT];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    double sum = 0.0;
    for (int w = 0; w < COUNT; ++w) sum += parts[w];
    return sum;
}
template <int COUNT>
DEVICE float block_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    if constexpr (COUNT == 1) return x;
    __shared__ float parts[COUNT];
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    float top = parts[0];
#pragma unroll
    for (int w = 1; w < COUNT; ++w) top = fmaxf(top, parts[w]);
    return top;
}
