// What decode steps do row by row: the residual stream and its norms, queries, keys, values and gates, and the output
// of attention.
//
// Compile-time: HEAD_DIM (of the entries that know heads), ITEMS (1024 columns of the stream each), SLABS (`blocked`).
#include "decode.cuh"
#include "params.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int OWN = HEAD_DIM / 32;
constexpr int MAX_PARTS = 8;  // runs of delta, at most

// h = the embedded token, or h + delta; x = rms(h) * w, blocked. One thread block for each row. A product that was split
// left the runs of delta behind one another.
extern "C" __global__ void __launch_bounds__(THREADS) decode_norm(const __grid_constant__ DecodeNorm p) {
    let_successor_begin();
    const int row = blockIdx.x, token = p.rows[row].token;
    float w[ITEMS][4], h[ITEMS][4];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int column = 4 * (threadIdx.x + i * THREADS);
        if (column < p.width) load<4>(w[i], p.norm + column);
    }
    wait_for_predecessor();
    // Everything is on its way before anything is added.
    float runs[ITEMS][MAX_PARTS][4];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int column = 4 * (threadIdx.x + i * THREADS);
        if (column >= p.width) continue;
        const size_t at = size_t(row) * p.width + column;
        if (p.embeddings) {
            load<4>(h[i], p.embeddings + size_t(token) * p.width + column);
            continue;
        }
        load<4>(h[i], p.h + at);
#pragma unroll
        for (int run = 0; run < MAX_PARTS; ++run) {
            if (run < p.runs) load<4>(runs[i][run], p.delta + size_t(run) * gridDim.x * p.width + at);
        }
    }
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int column = 4 * (threadIdx.x + i * THREADS);
        if (column >= p.width) continue;
#pragma unroll
        for (int run = 1; run < MAX_PARTS; ++run) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if (!p.embeddings && run < p.runs) runs[i][0][k] += runs[i][run][k];
            }
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (!p.embeddings) h[i][k] += runs[i][0][k];
            squares += h[i][k] * h[i][k];
        }
        store<4>(p.h + size_t(row) * p.width + column, h[i]);
    }
    const float scale = 1.f / sqrtf(block_sum<WARPS>(squares) / p.width + p.eps);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int column = 4 * (threadIdx.x + i * THREADS);
        if (column >= p.width) continue;
        float x[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) x[k] = h[i][k] * scale * w[i][k];
        store<4>(p.x + blocked(row, column, p.width, gridDim.x), x);
    }
}

// Rows of a tensor as a product wants them.
extern "C" __global__ void __launch_bounds__(THREADS) decode_block(const __grid_constant__ DecodeBlocked p) {
    for (size_t i = blockIdx.x * size_t(THREADS) + threadIdx.x; i < size_t(p.rows) * p.width;
         i += size_t(gridDim.x) * THREADS) {
        p.to[blocked(i / p.width, i % p.width, p.width, p.padded)] = p.from[i];
    }
}

// x = rope(rms(x) * w), of which a lane has the elements lane + 32 i. What it takes beside x is there before the step.
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

// Queries to `q`, keys, values and gates to their pages; the sums of the gates and the raw rows of the slot. A warp
// for each head of queries, keys and values of each row.
extern "C" __global__ void __launch_bounds__(THREADS) decode_heads(const __grid_constant__ DecodeHeads p) {
    let_successor_begin();
    const int unit = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    const DecodeToken row = p.rows[blockIdx.y];
    if (unit >= p.heads + 2 * p.kv_heads || row.slot < 0) return;
    const float* raw = p.raw + size_t(blockIdx.y) * p.stride;
    float x[OWN];
    if (unit < p.heads) {
        const Preparation preparation(p, p.q_norm, unit, p.q_shared, row.position);
        wait_for_predecessor();
#pragma unroll
        for (int i = 0; i < OWN; ++i) x[i] = raw[p.start[0] + unit * HEAD_DIM + lane + 32 * i];
        preparation.apply(x, p.q_norm, p.rope, p.qk_eps);
        float* q = p.q + (size_t(blockIdx.y) * p.heads + unit) * HEAD_DIM;
#pragma unroll
        for (int i = 0; i < OWN; ++i) q[lane + 32 * i] = x[i] * p.scale;
        return;
    }
    const bool is_value = unit >= p.heads + p.kv_heads;
    const int head = unit - p.heads - (is_value ? p.kv_heads : 0), slot = row.position % PAGE;
    const int start = p.start[is_value ? 2 : 1], shift = p.start[is_value ? 4 : 3], group = p.heads / p.kv_heads;
    const size_t place = size_t(row.slot) * p.layers + p.layer;
    const bool has_gate = !is_value && p.start[5] >= 0 && lane < group;
    const int gate_head = head * group + lane;
    // Only this warp writes the raw row and the sum of its head, once in a step.
    const DecodeTable table = p.tables[place];
    const Page page = table.pages[size_t(row.position / PAGE) * p.kv_heads + head];
    const Preparation preparation(p, is_value ? nullptr : p.k_norm, head, p.k_shared, row.position);
    u16* last = p.last + (place * 2 + is_value) * p.kv_heads * HEAD_DIM + head * HEAD_DIM;
    float before[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) before[i] = shift >= 0 ? bf16_to_float(last[lane + 32 * i]) : 0.f;
    double* now = p.now + place * p.heads + gate_head;
    const double sum = has_gate ? *now : 0.0;
    const float gate_bias = has_gate ? p.gate_bias[gate_head] : 0.f;
    wait_for_predecessor();

#pragma unroll
    for (int i = 0; i < OWN; ++i) x[i] = raw[start + head * HEAD_DIM + lane + 32 * i];
    const float raw_shift = shift >= 0 ? raw[shift + head] : 0.f;
    const float raw_gate = has_gate ? raw[p.start[5] + gate_head] : 0.f;
    if (shift >= 0) {
        const float a = sigmoid(raw_shift);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            last[lane + 32 * i] = float_to_bf16(x[i]);
            x[i] = a * before[i] + (1.f - a) * x[i];
        }
    }
    if (!is_value) preparation.apply(x, p.k_norm, p.rope, p.qk_eps);
    u16* to = (is_value ? page.v : page.k) + slot * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < OWN; ++i) to[lane + 32 * i] = float_to_bf16(x[i]);
    if (!has_gate) return;
    const float gate = log_sigmoid(raw_gate + gate_bias);
    page.gates[lane * PAGE + slot] = gate;
    const double next = sum + clamp_log_gate(gate);
    *now = next;
    if (slot == PAGE - 1) table.ends[size_t(row.position / PAGE) * p.heads + gate_head] = next;
}

// The runs of a head's keys put together, in order, then output norm and gate: y blocked. A warp for each head.
extern "C" __global__ void __launch_bounds__(THREADS) decode_merge(const __grid_constant__ DecodeMerge p) {
    let_successor_begin();
    const int head = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    const DecodeToken row = p.rows[blockIdx.y];
    if (head >= p.heads || row.slot < 0) return;
    const int runs = Runs(row.position).count;
    const float* parts = p.parts + (size_t(blockIdx.y) * p.heads + head) * MAX_RUNS * (HEAD_DIM + 4);
    float norm[OWN], gate[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) norm[i] = p.norm ? p.norm[head * HEAD_DIM + lane + 32 * i] : 1.f;
    wait_for_predecessor();
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const size_t at = size_t(blockIdx.y) * p.stride + p.gate + head * HEAD_DIM + lane + 32 * i;
        gate[i] = p.gate >= 0 ? p.raw[at] : 0.f;
    }
    float top = NEG_INF;
    for (int run = lane; run < runs; run += 32) top = fmaxf(top, parts[run * (HEAD_DIM + 4) + HEAD_DIM]);
    top = warp_max(top);
    float o[OWN] = {}, weight = 0.f;
    for (int run = 0; run < runs; ++run) {
        const float* part = parts + run * (HEAD_DIM + 4);
        // The newest key is never hidden, so `top` is a number.
        const float share = exp2_fast(part[HEAD_DIM] - top);
        weight += share * part[HEAD_DIM + 1];
#pragma unroll
        for (int i = 0; i < OWN; ++i) o[i] += share * part[lane + 32 * i];
    }
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        o[i] /= weight;
        squares += o[i] * o[i];
    }
    const float scale = 1.f / sqrtf(warp_sum(squares) / HEAD_DIM + p.eps);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int column = head * HEAD_DIM + lane + 32 * i;
        if (p.norm) o[i] *= scale * norm[i];
        if (p.gate >= 0) o[i] *= activation(p.act, gate[i]).x;
        p.y[blocked(blockIdx.y, column, p.heads * HEAD_DIM, gridDim.y)] = float_to_bf16(o[i]);
    }
}
