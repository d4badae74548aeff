// Norm and rotary embedding of a head, for decode_rows.cu and decode_attend.cu.
//
// Compile-time: HEAD_DIM.
#pragma once
#include "decode.cuh"
#include "params.cuh"

constexpr int OWN = HEAD_DIM / 32;

// x = rope(rms(x) * w); a lane has elements lane + 32 i. Norm weights and angles are loaded before the wait.
struct Preparation {
    float norm[OWN];
    float2 angles[OWN / 2];

    DEVICE Preparation(const DecodeHeads& p, const float* weights, int head, bool shared, int position) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            norm[i] = weights ? weights[(shared ? 0 : head * HEAD_DIM) + lane + 32 * i] : 1.f;
        }
#pragma unroll
        for (int i = 0; i < OWN / 2; ++i) {
            angles[i] = p.rope ? p.rope[size_t(position) * (HEAD_DIM / 2) + lane + 32 * i] : make_float2(1.f, 0.f);
        }
    }
    DEVICE void apply(float (&x)[OWN], bool has_norm, bool has_rope, float eps) const {
        if (has_norm) {
            float squares = 0.f;
#pragma unroll
            for (int i = 0; i < OWN; ++i) squares += x[i] * x[i];
            const float scale = 1.f / sqrtf(warp_sum(squares) / HEAD_DIM + eps);
#pragma unroll
            for (int i = 0; i < OWN; ++i) x[i] *= scale * norm[i];
        }
        if (!has_rope) return;
#pragma unroll
        for (int i = 0; i < OWN / 2; ++i) {
            const float2 angle = angles[i];
            const float a = x[i], b = x[i + OWN / 2];
            x[i] = a * angle.x - b * angle.y;
            x[i + OWN / 2] = a * angle.y + b * angle.x;
        }
    }
};
