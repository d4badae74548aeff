// Attention of one query per sequence over its pages, pruned by each head's threshold.
//
// Split-KV: a thread block takes one split of the pages of one key head of one sequence, a warp a page at a time. A page
// whose last key has decayed below the threshold of the query head is skipped, whether or not it is still held: the sums
// of the gates alone decide, so the result does not depend on when a page is evicted.
//
// Compile-time: HEAD_DIM, ROWS_IN_FLIGHT (passes whose rows are loaded together; does not affect bits).
#include "decode_pages.cuh"

constexpr int WARPS = 4;

// Whether a query head of this key head may read a full page, decided before the gates of this step are known: a page
// that is forgotten stays forgotten, because the decay only grows.
DEVICE bool is_live(const DecodeAttentionParams& p, const DecodeToken& row, const DecodeTable& table, int page) {
    if (p.window > 0 && row.position + 1 - p.window >= (page + 1) * PAGE) return false;
    if (!p.gated) return true;
    const int group = p.heads / p.kv_heads, lane = threadIdx.x % 32, head = blockIdx.y * group + lane;
    bool is_live_here = false;
    if (lane < group) {
        const double before = p.gate_sums[(size_t(row.slot) * p.layers + p.layer) * p.heads + head];
        is_live_here = !(before - table.ends[size_t(page) * p.heads + head] < p.thresholds[head]);
    }
    return __any_sync(~0u, is_live_here);
}

// Narrow heads and many rows: limits registers for an occupancy of five thread blocks per multiprocessor.
#if HEAD_DIM == 64 && ROWS_IN_FLIGHT < 16
#define LAUNCH_BOUNDS __launch_bounds__(32 * WARPS, 5)
#else
#define LAUNCH_BOUNDS __launch_bounds__(32 * WARPS)
#endif
extern "C" __global__ void LAUNCH_BOUNDS decode_attention(const __grid_constant__ DecodeAttentionParams p) {
    __shared__ float scores[WARPS][PAGE];
    __shared__ __align__(16) float outs[WARPS][HEAD_DIM];
    __shared__ float tops[WARPS], weights[WARPS];
    let_successor_begin();
    const DecodeToken row = p.rows[blockIdx.z];
    const int split = blockIdx.x, kv_head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row.slot < 0) return;
    const KvSplits splits(row.position);
    if (split >= splits.count) return;
    const DecodeTable table = p.tables[size_t(row.slot) * p.layers + p.layer];
    const int group = p.heads / p.kv_heads;
    const int end = min((split + 1) * splits.each, splits.pages);
    const int chunk = lane % LANES, key_of_lane = lane / LANES;
    const int first_page = split * splits.each + warp;
    // Full pages are immutable: prefetches the first one of each warp into L2 while the predecessor still runs.
    if (first_page < end && (first_page + 1) * PAGE <= row.position && is_live(p, row, table, first_page)) {
        const Page page = table.pages[size_t(first_page) * p.kv_heads + kv_head];
        for (int at = lane * LINE; page.k && at < PAGE * HEAD_DIM; at += 32 * LINE) {
            prefetch(page.k + at);
            prefetch(page.v + at);
        }
    }
    const auto partial_of = [&](int head) {
        return p.partials + ((size_t(blockIdx.z) * p.heads + head) * MAX_KV_SPLITS + split) * (HEAD_DIM + 4);
    };
    // A split without live pages writes an empty partial result.
    bool has_live = false;
    for (int n = first_page; n < end && !has_live; n += WARPS) {
        has_live = (n + 1) * PAGE > row.position || is_live(p, row, table, n);
    }
    if (!__syncthreads_or(has_live)) {
        wait_for_predecessor();
        for (int i = threadIdx.x; i < group * (HEAD_DIM + 2); i += 32 * WARPS) {
            const int column = i % (HEAD_DIM + 2);
            partial_of(kv_head * group + i / (HEAD_DIM + 2))[column] = column == HEAD_DIM ? NEG_INF : 0.f;
        }
        return;
    }
    wait_for_predecessor();

    for (int g = 0; g < group; ++g) {
        const int head = kv_head * group + g;
        // Queries carry the softmax scale in base 2.
        float q[8], o[8] = {}, top = NEG_INF, weight = 0.f;
        load<8>(q, p.q + (size_t(blockIdx.z) * p.heads + head) * HEAD_DIM + 8 * chunk);
#pragma unroll
        for (int i = 0; i < 8; ++i) q[i] *= LOG2_E;
        const double now = p.gated ? p.gate_sums[(size_t(row.slot) * p.layers + p.layer) * p.heads + head] : 0.0;
        for (int n = first_page; n < end; n += WARPS) {
            const int first = n * PAGE, count = min(PAGE, row.position + 1 - first);
            // Keys from this offset on are inside the sliding window.
            const int visible = p.window > 0 ? row.position + 1 - p.window - first : 0;
            if (visible >= PAGE) continue;
            float decay = 0.f;
            if (p.gated && count == PAGE) {
                const double behind = now - table.ends[size_t(n) * p.heads + head];
                if (behind < p.thresholds[head]) continue;
                decay = float(behind);
            }
            const Page page = table.pages[size_t(n) * p.kv_heads + kv_head];
            const int own = key_of_lane * HEAD_DIM + 8 * chunk;
            uint4 rows[ROWS_IN_FLIGHT];
#pragma unroll
            for (int base = 0; base < PASSES; base += ROWS_IN_FLIGHT) {
                read_rows(rows, page.k + own, base);
#pragma unroll
                for (int i = 0; i < ROWS_IN_FLIGHT; ++i) {
                    const float dot = lanes_sum<LANES>(dot_of(q, rows[i]));
                    if (chunk == 0) scores[warp][(base + i) * KEYS + key_of_lane] = dot;
                }
            }
            // Prefetches the first values while the softmax weights are computed.
            read_rows(rows, page.v + own, 0);
            float2 bias = make_float2(0.f, 0.f);
            if (p.gated) {
                const float* gates = page.gates + g * PAGE + 2 * lane;
                bias.x = 2 * lane < count ? clamp_log_gate(gates[0]) : 0.f;
                bias.y = 2 * lane + 1 < count ? clamp_log_gate(gates[1]) : 0.f;
                bias = decay_behind(bias);
            }
            __syncwarp();
            float s[2] = {scores[warp][2 * lane] + LOG2_E * (decay + bias.x),
                          scores[warp][2 * lane + 1] + LOG2_E * (decay + bias.y)};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int key = 2 * lane + i;
                if (key >= count || key < visible) s[i] = NEG_INF;
            }
            const float higher = fmaxf(top, warp_max(fmaxf(s[0], s[1])));
            // All scores are -inf only if they are NaN upstream; avoids inf - inf.
            const float base = higher == NEG_INF ? 0.f : higher;
            const float shrink = exp2_fast(top - base);
            const float e[2] = {exp2_fast(s[0] - base), exp2_fast(s[1] - base)};
            weight = weight * shrink + warp_sum(e[0] + e[1]);
            top = higher;
            scores[warp][2 * lane] = e[0];
            scores[warp][2 * lane + 1] = e[1];
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 8; ++i) o[i] *= shrink;
#pragma unroll
            for (int base = 0; base < PASSES; base += ROWS_IN_FLIGHT) {
                if (base > 0) read_rows(rows, page.v + own, base);
#pragma unroll
                for (int i = 0; i < ROWS_IN_FLIGHT; ++i) {
                    const int key = (base + i) * KEYS + key_of_lane;
                    add_row(o, scores[warp][key], key < count ? rows[i] : make_uint4(0, 0, 0, 0));
                }
            }
            __syncwarp();
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
            for (int step = LANES; step < 32; step *= 2) o[i] += __shfl_xor_sync(~0u, o[i], step);
        }
        if (key_of_lane == 0) store<8>(outs[warp] + 8 * chunk, o);
        if (lane == 0) tops[warp] = top, weights[warp] = weight;
        __syncthreads();
        float highest = tops[0];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) highest = fmaxf(highest, tops[w]);
        float share[WARPS], sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            share[w] = highest == NEG_INF ? 0.f : exp2_fast(tops[w] - highest);
            sum += share[w] * weights[w];
        }
        float* to = partial_of(head);
        for (int c = threadIdx.x; c < HEAD_DIM; c += 32 * WARPS) {
            float out = 0.f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) out += share[w] * outs[w][c];
            to[c] = out;
        }
        if (threadIdx.x == 0) to[HEAD_DIM] = highest, to[HEAD_DIM + 1] = sum;
        __syncthreads();
    }
}
