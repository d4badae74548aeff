// Online softmax over blocks of keys, on the accumulator fragments of a warpgroup.
//
// A thread holds two rows (r and r + 8 of its warp's 16): element s[4g + e] is column
// 8g + 2 (lane % 4) + (e & 1) of row e / 2. Logits are in the log2 domain.
#pragma once
#include "attention.cuh"

// The running maximum is raised only when a logit exceeds it by more than this: until then the
// exponentials stay below 2^8, bf16 and f32 lose nothing, and the output needs no rescaling.
constexpr float MAXIMUM_SLACK = 8.f;

struct SoftmaxState {
    float maximum[2] = {NEG_INF, NEG_INF};
    float sum[2] = {0.f, 0.f};  // of this thread's columns only; the epilogue reduces over the quad
};

// Replaces the products q.k of one block by exp2(logit - maximum).
//
// `frame[r]`: the bias of a logit is frame[r] - w[column]. With BIDIRECTIONAL masks `sign` is -1 for
// blocks after the queries, and 0 for blocks that hold both kinds.
// Returns whether the output must be rescaled, by `rescale[r]`.
template <int COLUMNS, bool GATED, bool MASKED, int KIND>
DEVICE bool softmax_block(float (&s)[COLUMNS / 2], SoftmaxState& state, float (&rescale)[2],
                          const float* w, float frame0, float frame1, int sign, float scale,
                          Visible v0, Visible v1) {
    const int column0 = 2 * (threadIdx.x % 4);
    // One chain of maxima and one of sums per row: more chains spill at head dim 64 and gain nothing at 128.
    float top[2] = {NEG_INF, NEG_INF};
    float frame[2] = {frame0, frame1};
#pragma unroll
    for (int g = 0; g < COLUMNS / 8; ++g) {
        float2 bias = make_float2(0.f, 0.f);
        if (GATED) bias = *reinterpret_cast<const float2*>(w + 8 * g + column0);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float wj = e & 1 ? bias.y : bias.x;
            float& x = s[4 * g + e];
            if (KIND == MASK_BIDIRECTIONAL && GATED) {
                float b = sign > 0 ? -wj : sign < 0 ? wj : -fabsf(frame[e / 2] - wj);
                x = fmaf(x, scale, b);
            } else {
                x = fmaf(x, scale, -wj);
            }
            if (MASKED) {
                int column = 8 * g + column0 + (e & 1);
                Visible v = e / 2 ? v1 : v0;
                x = column >= v.lo && column < v.hi ? x : NEG_INF;
            }
            top[e / 2] = fmaxf(top[e / 2], x);
        }
    }
    if (KIND == MASK_BIDIRECTIONAL && GATED) {
        frame[0] *= float(sign);
        frame[1] *= float(sign);
    }
    bool raise = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        raise |= top[r] + frame[r] > state.maximum[r] + MAXIMUM_SLACK;
    }
    // A lane's maximum decides; the reduction over the row is only needed when the maximum rises.
    raise = __any_sync(~0u, raise);
    if (raise) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float next = fmaxf(state.maximum[r], quad_max(top[r]) + frame[r]);
            rescale[r] = next == NEG_INF ? 1.f : exp2_fast(state.maximum[r] - next);
            state.sum[r] *= rescale[r];
            state.maximum[r] = next;
        }
    }
    float base[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        base[r] = state.maximum[r] == NEG_INF ? 0.f : state.maximum[r] - frame[r];
    }
#pragma unroll
    for (int g = 0; g < COLUMNS / 8; ++g) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float& x = s[4 * g + e];
            x = exp2_fast(x - base[e / 2]);
            state.sum[e / 2] += x;
        }
    }
    return raise;
}

// Largest sum of probabilities of a block before its maximum must be computed.
constexpr float SUM_LIMIT = 18446744073709551616.f;  // 2^64

// Fast path for a block that all rows see (`sign` 1 or -1): exponentials relative to the running maximum, without
// computing the block's own, packed as left operands of P V. bf16 and f32 have exponent range to spare, so nothing is
// lost while sums stay below SUM_LIMIT. Returns false, without side effects on `state`, where a sum of the warp exceeds
// that limit or a row has no maximum yet; the block then goes through `softmax_block`.
template <int COLUMNS, bool GATED, int KIND>
DEVICE bool exponentials(const float (&s)[COLUMNS / 2], u32 (&p)[COLUMNS / 4], SoftmaxState& state,
                         const float* w, float frame0, float frame1, int sign, float scale) {
    const int column0 = 2 * (threadIdx.x % 4);
    const float direction = KIND == MASK_BIDIRECTIONAL ? float(sign) : 1.f;
    const float base[2] = {state.maximum[0] - direction * frame0, state.maximum[1] - direction * frame1};
    float sum[2] = {0.f, 0.f};
#pragma unroll
    for (int g = 0; g < COLUMNS / 8; ++g) {
        float2 bias = make_float2(0.f, 0.f);
        if (GATED) bias = *reinterpret_cast<const float2*>(w + 8 * g + column0);
        float x[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            x[e] = fmaf(s[4 * g + e], scale, -base[e / 2]);
            if (GATED) x[e] -= direction * (e & 1 ? bias.y : bias.x);
            x[e] = exp2_fast(x[e]);
            sum[e / 2] += x[e];
        }
        p[2 * g] = pack_bf16(x[0], x[1]);
        p[2 * g + 1] = pack_bf16(x[2], x[3]);
    }
    if (!__all_sync(~0u, fmaxf(sum[0], sum[1]) < SUM_LIMIT)) return false;
    state.sum[0] += sum[0];
    state.sum[1] += sum[1];
    return true;
}

// Packs accumulators as the left operand of the next product.
template <int COLUMNS>
DEVICE void pack_fragments(const float (&s)[COLUMNS / 2], u32 (&p)[COLUMNS / 4]) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; ++i) p[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
}
