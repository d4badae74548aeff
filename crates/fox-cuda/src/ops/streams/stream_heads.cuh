// One head of one decode row: its query, its newest key and value, and what becomes of its output.
#pragma once

constexpr int OWN = HEAD_DIM / 32;  // elements of a lane, lane + 32 i

// x = rope(rms(x) * w).
DEVICE void prepare(float (&x)[OWN], const StreamAttention& p, const float* weights, int head, bool shared,
                    int position) {
    const int lane = threadIdx.x % 32;
    if (weights) {
        float norm[OWN], squares = 0.f;
#pragma unroll
        for (int i = 0; i < OWN; ++i) norm[i] = weights[(shared ? 0 : head * HEAD_DIM) + lane + 32 * i];
#pragma unroll
        for (int i = 0; i < OWN; ++i) squares += x[i] * x[i];
        const float scale = 1.f / sqrtf(warp_sum(squares) / HEAD_DIM + p.qk_eps);
#pragma unroll
        for (int i = 0; i < OWN; ++i) x[i] *= scale * norm[i];
    }
    if (!p.rope) return;
    const float2* angles = p.rope + size_t(position) * (HEAD_DIM / 2);
#pragma unroll
    for (int i = 0; i < OWN / 2; ++i) {
        const float2 angle = angles[lane + 32 * i];
        const float a = x[i], b = x[i + OWN / 2];
        x[i] = a * angle.x - b * angle.y;
        x[i + OWN / 2] = a * angle.y + b * angle.x;
    }
}

// A query, times the scale of the scores, in base 2; `to` is the warp's own.
DEVICE void write_query(float* to, const StreamAttention& p, const float* raw, int head, int position) {
    const int lane = threadIdx.x % 32;
    float x[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) x[i] = raw[p.start[0] + head * HEAD_DIM + lane + 32 * i];
    prepare(x, p, p.q_norm, head, p.q_shared, position);
#pragma unroll
    for (int i = 0; i < OWN; ++i) to[lane + 32 * i] = x[i] * p.scale * LOG2_E;
    __syncwarp();
}

// The newest key or value of a head to its page, and the raw row for the token shift of the next step. Nobody else
// touches them in this step, so what was there is read before the projections have ended.
struct Newest {
    u16 *to, *last;
    int start, shift;
    float before[OWN];

    // With `is_used` false there is nothing to write.
    DEVICE Newest(const StreamAttention& p, const Page& page, size_t place, int slot, int head, bool is_value,
                  bool is_used) {
        const int lane = threadIdx.x % 32;
        to = (is_value ? page.v : page.k) + slot * HEAD_DIM;
        last = p.last + ((place * 2 + is_value) * p.kv_heads + head) * HEAD_DIM;
        start = p.start[is_value ? 2 : 1] + head * HEAD_DIM, shift = p.start[is_value ? 4 : 3];
#pragma unroll
        for (int i = 0; i < OWN; ++i) before[i] = is_used && shift >= 0 ? bf16_to_float(last[lane + 32 * i]) : 0.f;
    }
    DEVICE void write(const StreamAttention& p, const float* raw, int head, bool is_value, int position) const {
        const int lane = threadIdx.x % 32;
        float x[OWN];
#pragma unroll
        for (int i = 0; i < OWN; ++i) x[i] = raw[start + lane + 32 * i];
        if (shift >= 0) {
            const float a = sigmoid(raw[shift + head]);
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                last[lane + 32 * i] = float_to_bf16(x[i]);
                x[i] = a * before[i] + (1.f - a) * x[i];
            }
        }
        if (!is_value) prepare(x, p, p.k_norm, head, p.k_shared, position);
#pragma unroll
        for (int i = 0; i < OWN; ++i) to[lane + 32 * i] = float_to_bf16(x[i]);
    }
};

// o / weight, then output norm and gate: y, blocked.
DEVICE void write_output(float (&o)[OWN], float weight, const StreamAttention& p, const float* raw, int head) {
    const int lane = threadIdx.x % 32;
    float norm[OWN], gate[OWN], squares = 0.f;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int column = head * HEAD_DIM + lane + 32 * i;
        norm[i] = p.output_norm ? p.output_norm[column] : 1.f;
        gate[i] = p.output_gate >= 0 ? raw[p.output_gate + column] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        o[i] /= weight;
        squares += o[i] * o[i];
    }
    const float scale = 1.f / sqrtf(warp_sum(squares) / HEAD_DIM + p.norm_eps);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int column = head * HEAD_DIM + lane + 32 * i;
        if (p.output_norm) o[i] *= scale * norm[i];
        if (p.output_gate >= 0) o[i] *= activation(p.act, gate[i]).x;
        p.y[blocked(blockIdx.z, column, p.heads * HEAD_DIM, gridDim.z)] = float_to_bf16(o[i]);
    }
}

// What a run of a head's keys gave: `out` of HEAD_DIM elements, the highest score and the sum of the weights.
DEVICE float* part_of(const StreamAttention& p, int head, int run) {
    return p.parts + ((size_t(blockIdx.z) * p.heads + head) * MAX_RUNS + run) * (HEAD_DIM + 4);
}
// The runs put together, in order. Other thread blocks have written them.
DEVICE void merge_runs(const StreamAttention& p, const float* raw, int head, int runs) {
    const int lane = threadIdx.x % 32;
    float top = NEG_INF;
    for (int run = lane; run < runs; run += 32) top = fmaxf(top, load_fresh(part_of(p, head, run) + HEAD_DIM));
    top = warp_max(top);
    float o[OWN] = {}, weight = 0.f;
    for (int run = 0; run < runs; ++run) {
        const float* part = part_of(p, head, run);
        // The newest key is never hidden, so `top` is a number.
        const float share = exp2_fast(load_fresh(part + HEAD_DIM) - top);
        weight += share * load_fresh(part + HEAD_DIM + 1);
#pragma unroll
        for (int i = 0; i < OWN; ++i) o[i] += share * load_fresh(part + lane + 32 * i);
    }
    write_output(o, weight, p, raw, head);
}
