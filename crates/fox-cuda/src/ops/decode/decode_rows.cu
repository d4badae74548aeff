// Row-wise kernels of decode steps: residual stream and norms; queries, keys, values and gates; output of attention.
//
// Compile-time: HEAD_DIM, ITEMS (chunks of 1024 columns of the residual stream), SLABS (`blocked` in decode.cuh).
#include "decode_heads.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

// h = embedding of the token, or h + delta; x = rms(h) * w, blocked. One thread block per row. The matmul before has
// left delta as p.k_splits partial sums [k_splits][rows, width].
extern "C" __global__ void __launch_bounds__(THREADS) decode_norm(const __grid_constant__ DecodeNorm p) {
    let_successor_begin();
    const int row = blockIdx.x;
    const DecodeToken own = p.rows[row];
    float w[ITEMS][4], h[ITEMS][4];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int column = 4 * (threadIdx.x + i * THREADS);
        if (column < p.width) load<4>(w[i], p.norm + column);
    }
    wait_for_predecessor();
    const int token = p.embeddings && own.sampled_by >= 0 ? max(p.sampled[own.sampled_by], 0) : own.token;
    // Issues all loads before the first addition.
    float splits[ITEMS][MAX_K_SPLITS][4];
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
        for (int split = 0; split < MAX_K_SPLITS; ++split) {
            if (split < p.k_splits) load<4>(splits[i][split], p.delta + size_t(split) * gridDim.x * p.width + at);
        }
    }
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int column = 4 * (threadIdx.x + i * THREADS);
        if (column >= p.width) continue;
#pragma unroll
        for (int split = 1; split < MAX_K_SPLITS; ++split) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if (!p.embeddings && split < p.k_splits) splits[i][0][k] += splits[i][split][k];
            }
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (!p.embeddings) h[i][k] += splits[i][0][k];
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

// Copies a row-major tensor [rows, width] to the blocked layout of a matmul.
extern "C" __global__ void __launch_bounds__(THREADS) decode_block(const __grid_constant__ DecodeBlocked p) {
    for (size_t i = blockIdx.x * size_t(THREADS) + threadIdx.x; i < size_t(p.rows) * p.width;
         i += size_t(gridDim.x) * THREADS) {
        p.to[blocked(i / p.width, i % p.width, p.width, p.padded)] = p.from[i];
    }
}

// Writes queries to `q`, keys, values and gates to their pages, and updates the gate sums and last raw rows of the slot.
// One warp per row and head of queries, keys and values.
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
    // Only this warp writes the last raw row and the gate sum of its head, so both may be read before the wait.
    const DecodeTable table = p.tables[place];
    const Page page = table.pages[size_t(row.position / PAGE) * p.kv_heads + head];
    const Preparation preparation(p, is_value ? nullptr : p.k_norm, head, p.k_shared, row.position);
    u16* last = p.last + (place * 2 + is_value) * p.kv_heads * HEAD_DIM + head * HEAD_DIM;
    float before[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) before[i] = shift >= 0 ? bf16_to_float(last[lane + 32 * i]) : 0.f;
    double* now = p.gate_sums + place * p.heads + gate_head;
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

// Merges the split-KV partial results of a head in order, then applies output norm and gate: y blocked. One warp per
// row and head.
extern "C" __global__ void __launch_bounds__(THREADS) decode_merge(const __grid_constant__ DecodeMerge p) {
    let_successor_begin();
    const int head = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    const DecodeToken row = p.rows[blockIdx.y];
    if (head >= p.heads || row.slot < 0) return;
    const int splits = KvSplits(row.position).count;
    const float* partials = p.partials + (size_t(blockIdx.y) * p.heads + head) * MAX_KV_SPLITS * (HEAD_DIM + 4);
    float norm[OWN], gate[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) norm[i] = p.norm ? p.norm[head * HEAD_DIM + lane + 32 * i] : 1.f;
    const float sink = p.sinks ? LOG2_E * p.sinks[head] : NEG_INF;
    wait_for_predecessor();
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const size_t at = size_t(blockIdx.y) * p.stride + p.gate + head * HEAD_DIM + lane + 32 * i;
        gate[i] = p.gate >= 0 ? p.raw[at] : 0.f;
    }
    float top = NEG_INF;
    for (int split = lane; split < splits; split += 32) top = fmaxf(top, partials[split * (HEAD_DIM + 4) + HEAD_DIM]);
    top = fmaxf(warp_max(top), sink);
    // A sink has a weight, but no value.
    float o[OWN] = {}, weight = p.sinks ? exp2_fast(sink - top) : 0.f;
    for (int split = 0; split < splits; ++split) {
        const float* partial = partials + split * (HEAD_DIM + 4);
        // The newest key is never masked, so `top` is finite.
        const float share = exp2_fast(partial[HEAD_DIM] - top);
        weight += share * partial[HEAD_DIM + 1];
#pragma unroll
        for (int i = 0; i < OWN; ++i) o[i] += share * partial[lane + 32 * i];
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
