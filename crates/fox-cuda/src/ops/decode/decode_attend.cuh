// Attention of a head over the pages that its gates have not forgotten, for decode_attend.cu and decode_attend_few.cu.
//
// PageSoftmax and Ending repeat the arithmetic of decode_attention and decode_merge: a step has the same bits with one
// launch and with three, which tests/emulated/steps.cpp compares.
//
// Compile-time: HEAD_DIM, ROWS_IN_FLIGHT, SLABS.
#pragma once
#include "decode_heads.cuh"
#include "decode_pages.cuh"

constexpr int SPLIT_WARPS = 4;  // warps of a thread block of decode_attention
constexpr int OWN_SPLITS = 2;   // KV splits whose partial results stay in shared memory

DEVICE void prefetch_page(const Page& page) {
    for (int at = threadIdx.x % 32 * LINE; page.k && at < PAGE * HEAD_DIM; at += 32 * LINE) {
        prefetch(page.k + at);
        prefetch(page.v + at);
    }
}

// The online softmax of a query over pages; a lane has eight columns, and sums the values of every KEYS-th key.
struct PageSoftmax {
    float o[8] = {}, top = NEG_INF, weight = 0.f;

    // Adds the first `count` keys of a page from `visible` on. `decay` is the log decay behind the page, and `gate_row`
    // the query head's row of its gates. `scores` [PAGE] belongs to the warp.
    DEVICE void add(const float (&q)[8], const Page& page, bool is_gated, int gate_row, float decay, int count,
                    int visible, float* scores) {
        const int lane = threadIdx.x % 32, chunk = lane % LANES, key_of_lane = lane / LANES;
        const int own = key_of_lane * HEAD_DIM + 8 * chunk;
        uint4 rows[ROWS_IN_FLIGHT];
#pragma unroll
        for (int base = 0; base < PASSES; base += ROWS_IN_FLIGHT) {
            read_rows(rows, page.k + own, base);
#pragma unroll
            for (int i = 0; i < ROWS_IN_FLIGHT; ++i) {
                const float dot = lanes_sum<LANES>(dot_of(q, rows[i]));
                if (chunk == 0) scores[(base + i) * KEYS + key_of_lane] = dot;
            }
        }
        // Prefetches the first values while the softmax weights are computed.
        read_rows(rows, page.v + own, 0);
        float2 bias = make_float2(0.f, 0.f);
        if (is_gated) {
            const float* gates = page.gates + gate_row * PAGE + 2 * lane;
            bias.x = 2 * lane < count ? clamp_log_gate(gates[0]) : 0.f;
            bias.y = 2 * lane + 1 < count ? clamp_log_gate(gates[1]) : 0.f;
            bias = decay_behind(bias);
        }
        __syncwarp();
        float s[2] = {scores[2 * lane] + LOG2_E * (decay + bias.x),
                      scores[2 * lane + 1] + LOG2_E * (decay + bias.y)};
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
        scores[2 * lane] = e[0];
        scores[2 * lane + 1] = e[1];
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 8; ++i) o[i] *= shrink;
#pragma unroll
        for (int base = 0; base < PASSES; base += ROWS_IN_FLIGHT) {
            if (base > 0) read_rows(rows, page.v + own, base);
#pragma unroll
            for (int i = 0; i < ROWS_IN_FLIGHT; ++i) {
                const int key = (base + i) * KEYS + key_of_lane;
                add_row(o, scores[key], key < count ? rows[i] : make_uint4(0, 0, 0, 0));
            }
        }
        __syncwarp();
    }
    // Sums the values of all keys: every lane then has its columns.
    DEVICE void sum_lanes() {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
            for (int step = LANES; step < 32; step *= 2) o[i] += __shfl_xor_sync(~0u, o[i], step);
        }
    }
};

// Output norm and gate of a head as a lane needs them; the norm is loaded before the wait, the gate after it.
struct Ending {
    float norm[OWN], gate[OWN], sink;

    DEVICE Ending(const DecodeMerge& p, int head) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < OWN; ++i) norm[i] = p.norm ? p.norm[head * HEAD_DIM + lane + 32 * i] : 1.f;
        sink = p.sinks ? LOG2_E * p.sinks[head] : NEG_INF;
    }
    DEVICE void load_gate(const DecodeMerge& p, u32 row, int head) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const size_t at = size_t(row) * p.stride + p.gate + head * HEAD_DIM + lane + 32 * i;
            gate[i] = p.gate >= 0 ? p.raw[at] : 0.f;
        }
    }
    // Merges partial results [splits][HEAD_DIM + 4] in order, then applies output norm and gate: y blocked.
    DEVICE void merge(const DecodeMerge& p, u32 row, u32 rows, int head, const float* partials, int splits) const {
        const int lane = threadIdx.x % 32;
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
            p.y[blocked(row, column, p.heads * HEAD_DIM, rows)] = float_to_bf16(o[i]);
        }
    }
};

// The first page that a head may read, from the sum of its log gates before this token: a page that is forgotten stays
// forgotten. The newest page is always read.
DEVICE int first_live_page(const DecodeAttentionParams& p, const DecodeToken& row, const DecodeTable& table, int head,
                           double before) {
    const int lane = threadIdx.x % 32;
    const int oldest = p.window > 0 ? max(0, row.position + 1 - p.window) / PAGE : 0;
    if (!p.gated) return oldest;
    const double threshold = p.thresholds[head];
    int first = row.position / PAGE;
    while (first > oldest) {
        const int page = first - 1 - lane;
        const bool is_live = page >= oldest && !(before - table.ends[size_t(page) * p.heads + head] < threshold);
        const int live = __popc(__ballot_sync(~0u, is_live));
        first -= live;
        if (live < 32) break;
    }
    return first;
}

// Partial results of the warps of decode_attention for a KV split, each of which takes every fourth page.
struct __align__(16) SplitPartials {
    float outs[SPLIT_WARPS][HEAD_DIM];
    float tops[SPLIT_WARPS], weights[SPLIT_WARPS];
};

// Attends over the pages that warp `w` of decode_attention has of a split. `query` [HEAD_DIM] and `scores` [PAGE] are in
// shared memory; `now` is the sum of the head's log gates.
DEVICE void attend_pages(const DecodeAttentionParams& p, const DecodeToken& row, const DecodeTable& table, int head,
                         const float* query, double now, int split, int w, float* scores, SplitPartials& to) {
    const int lane = threadIdx.x % 32, chunk = lane % LANES;
    const KvSplits splits(row.position);
    const int end = min((split + 1) * splits.each, splits.pages);
    float q[8];
    load<8>(q, query + 8 * chunk);
#pragma unroll
    for (int i = 0; i < 8; ++i) q[i] *= LOG2_E;
    PageSoftmax softmax;
#pragma unroll 1
    for (int n = split * splits.each + w; n < end; n += SPLIT_WARPS) {
        const int first = n * PAGE, count = min(PAGE, row.position + 1 - first);
        const int visible = p.window > 0 ? row.position - p.window - first + 1 : 0;
        if (visible >= PAGE) continue;
        float decay = 0.f;
        // The newest page ends with this token at the latest, without decay.
        if (p.gated && n < row.position / PAGE) {
            const double behind = now - table.ends[size_t(n) * p.heads + head];
            const bool is_forgotten = behind < p.thresholds[head];
            if (is_forgotten) continue;
            decay = float(behind);
        }
        softmax.add(q, table.pages[size_t(n) * p.heads + head], p.gated, 0, decay, count, visible, scores);
    }
    if (softmax.top != NEG_INF) {
        softmax.sum_lanes();
        if (lane < LANES) store<8>(to.outs[w] + 8 * chunk, softmax.o);
    }
    if (lane == 0) to.tops[w] = softmax.top, to.weights[w] = softmax.weight;
}

// The partial result of a split, [HEAD_DIM + 4], from those of its warps.
DEVICE void join_warps(const SplitPartials& own, float* to) {
    const int lane = threadIdx.x % 32;
    float highest = own.tops[0];
#pragma unroll
    for (int w = 1; w < SPLIT_WARPS; ++w) highest = fmaxf(highest, own.tops[w]);
    float share[SPLIT_WARPS], sum = 0.f;
#pragma unroll
    for (int w = 0; w < SPLIT_WARPS; ++w) {
        share[w] = highest == NEG_INF ? 0.f : exp2_fast(own.tops[w] - highest);
        sum += share[w] * own.weights[w];
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int column = lane + 32 * i;
        float out = 0.f;
#pragma unroll
        for (int w = 0; w < SPLIT_WARPS; ++w) {
            if (own.tops[w] != NEG_INF) out += share[w] * own.outs[w][column];
        }
        to[column] = out;
    }
    if (lane == 0) to[HEAD_DIM] = highest, to[HEAD_DIM + 1] = sum;
    __syncwarp();
}
