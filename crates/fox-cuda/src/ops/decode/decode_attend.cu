// Attention of decode steps in one launch, from raw projections to the input of the output projection, with the bits of
// decode_heads, decode_attention and decode_merge. For models with as many key heads as query heads.
//
// A warp takes one row and head: it writes the key, value and gate of the token, then attends over the pages that the
// gates have not forgotten. These are the last ones, because sums of log gates only fall; what decode_attention adds for
// the others is exactly zero. Partial results of at most OWN_SPLITS KV splits stay in shared memory. Longer suffixes are
// divided over the warps of the thread block, and their partial results go through device memory.
//
// PageSoftmax and Ending repeat the arithmetic of decode_attention and decode_merge, whose machine code must not change
// while this is a candidate.
//
// Compile-time: HEAD_DIM, ROWS_IN_FLIGHT, SLABS.
#include "decode_heads.cuh"
#include "decode_pages.cuh"

constexpr int WARPS = 4;
constexpr int SPLIT_WARPS = 4;  // warps of a thread block of decode_attention
constexpr int OWN_SPLITS = 2;
constexpr int PREFETCHED = 4;   // pages

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

// A head of a row, in shared memory.
struct __align__(16) Unit {
    float q[HEAD_DIM];
    double now;       // sum of its log gates
    int first_split;  // the first KV split with a page that may be live
    int is_long;
};
// Scratch memory of a warp.
struct __align__(16) Scratch {
    float outs[SPLIT_WARPS][HEAD_DIM];
    float partials[OWN_SPLITS][HEAD_DIM + 4];
    float scores[PAGE];
    float tops[SPLIT_WARPS], weights[SPLIT_WARPS];
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

// Attends over a KV split in the order of decode_attention, each of whose warps takes every fourth page.
DEVICE void attend_split(const DecodeAttentionParams& p, const DecodeToken& row, const DecodeTable& table, int head,
                         const Unit& unit, Scratch& own, int split, float* to) {
    const int lane = threadIdx.x % 32, chunk = lane % LANES;
    const KvSplits splits(row.position);
    const int end = min((split + 1) * splits.each, splits.pages);
    float q[8];
    load<8>(q, unit.q + 8 * chunk);
#pragma unroll
    for (int i = 0; i < 8; ++i) q[i] *= LOG2_E;
#pragma unroll 1
    for (int w = 0; w < SPLIT_WARPS; ++w) {
        PageSoftmax softmax;
#pragma unroll 1
        for (int n = split * splits.each + w; n < end; n += SPLIT_WARPS) {
            const int first = n * PAGE, count = min(PAGE, row.position + 1 - first);
            const int visible = p.window > 0 ? row.position - p.window - first + 1 : 0;
            if (visible >= PAGE) continue;
            float decay = 0.f;
            // The newest page ends with this token at the latest, without decay.
            if (p.gated && n < row.position / PAGE) {
                const double behind = unit.now - table.ends[size_t(n) * p.heads + head];
                const bool is_forgotten = behind < p.thresholds[head];
                if (is_forgotten) continue;
                decay = float(behind);
            }
            softmax.add(q, table.pages[size_t(n) * p.heads + head], p.gated, 0, decay, count, visible, own.scores);
        }
        if (softmax.top != NEG_INF) {
            softmax.sum_lanes();
            if (lane < LANES) store<8>(own.outs[w] + 8 * chunk, softmax.o);
        }
        if (lane == 0) own.tops[w] = softmax.top, own.weights[w] = softmax.weight;
    }
    __syncwarp();
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

// Writes the key, value and gate of a token to their pages and its query to `unit`, as decode_heads does. Waits for the
// predecessor when all that does not depend on it has been read.
DEVICE void write_token(const DecodeHeads& p, const DecodeAttentionParams& a, const DecodeMerge& m, const DecodeToken& row,
                        const DecodeTable& table, int head, Unit& unit, Ending& ending) {
    const int lane = threadIdx.x % 32, newest = row.position / PAGE, slot = row.position % PAGE;
    const size_t place = size_t(row.slot) * p.layers + p.layer;
    const bool has_gate = p.start[5] >= 0;
    // Only this warp writes the last raw rows and the gate sum of its head.
    u16* last = p.last + (place * 2 * p.heads + head) * HEAD_DIM + lane;
    const int values = p.heads * HEAD_DIM;
    double* sum = p.gate_sums + place * p.heads + head;
    const double before = has_gate ? *sum : 0.0;
    float k_before[OWN], v_before[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        k_before[i] = p.start[3] >= 0 ? bf16_to_float(last[32 * i]) : 0.f;
        v_before[i] = p.start[4] >= 0 ? bf16_to_float(last[values + 32 * i]) : 0.f;
    }
    const float gate_bias = has_gate ? p.gate_bias[head] : 0.f;
    const Page page = table.pages[size_t(newest) * p.heads + head];
    const Preparation of_q(p, p.q_norm, head, p.q_shared, row.position);
    const Preparation of_k(p, p.k_norm, head, p.k_shared, row.position);
    const int first = first_live_page(a, row, table, head, before);
    for (int n = max(first, newest - PREFETCHED); n <= newest; ++n) {
        prefetch_page(table.pages[size_t(n) * p.heads + head]);
    }
    wait_for_predecessor();

    const float* raw = p.raw + size_t(blockIdx.y) * p.stride;
    float q[OWN], k[OWN], v[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int column = head * HEAD_DIM + lane + 32 * i;
        q[i] = raw[p.start[0] + column], k[i] = raw[p.start[1] + column], v[i] = raw[p.start[2] + column];
    }
    const float k_shift = p.start[3] >= 0 ? raw[p.start[3] + head] : 0.f;
    const float v_shift = p.start[4] >= 0 ? raw[p.start[4] + head] : 0.f;
    const float raw_gate = has_gate ? raw[p.start[5] + head] : 0.f;
    ending.load_gate(m, blockIdx.y, head);
    if (p.start[3] >= 0) {
        const float a = sigmoid(k_shift);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            last[32 * i] = float_to_bf16(k[i]);
            k[i] = a * k_before[i] + (1.f - a) * k[i];
        }
    }
    if (p.start[4] >= 0) {
        const float a = sigmoid(v_shift);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            last[values + 32 * i] = float_to_bf16(v[i]);
            v[i] = a * v_before[i] + (1.f - a) * v[i];
        }
    }
    of_q.apply(q, p.q_norm, p.rope, p.qk_eps);
    of_k.apply(k, p.k_norm, p.rope, p.qk_eps);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int column = lane + 32 * i;
        page.k[slot * HEAD_DIM + column] = float_to_bf16(k[i]);
        page.v[slot * HEAD_DIM + column] = float_to_bf16(v[i]);
        unit.q[column] = q[i] * p.scale;
    }
    const KvSplits splits(row.position);
    if (lane == 0) {
        unit.now = 0.0;
        unit.first_split = first / splits.each;
        unit.is_long = splits.count - unit.first_split > OWN_SPLITS;
    }
    if (has_gate && lane == 0) {
        const float gate = log_sigmoid(raw_gate + gate_bias);
        page.gates[slot] = gate;
        const double next = before + clamp_log_gate(gate);
        *sum = unit.now = next;
        if (slot == PAGE - 1) table.ends[size_t(newest) * p.heads + head] = next;
    }
    // The rows of the page that this warp has written are read by its other lanes.
    __syncwarp();
}

// Limits registers for an occupancy of 16 warps per multiprocessor at head dim 64.
#if HEAD_DIM == 64
#define LAUNCH_BOUNDS __launch_bounds__(32 * WARPS, 4)
#else
#define LAUNCH_BOUNDS __launch_bounds__(32 * WARPS)
#endif
extern "C" __global__ void LAUNCH_BOUNDS decode_attend(const __grid_constant__ DecodeHeads h,
                                                       const __grid_constant__ DecodeAttentionParams a,
                                                       const __grid_constant__ DecodeMerge m) {
    __shared__ Unit units[WARPS];
    __shared__ Scratch scratch[WARPS];
    let_successor_begin();
    const DecodeToken row = h.rows[blockIdx.y];
    if (row.slot < 0) return;
    const int warp = threadIdx.x / 32, first_head = blockIdx.x * WARPS, head = first_head + warp;
    const bool exists = head < h.heads;
    const DecodeTable table = h.tables[size_t(row.slot) * h.layers + h.layer];
    const int count = KvSplits(row.position).count;
    Scratch& own = scratch[warp];
    Ending ending(m, exists ? head : 0);
    if (exists) {
        write_token(h, a, m, row, table, head, units[warp], ending);
    } else {
        wait_for_predecessor();
    }
    const auto partials_of = [&](int head) {
        return a.partials + (size_t(blockIdx.y) * a.heads + head) * MAX_KV_SPLITS * (HEAD_DIM + 4);
    };
    const bool is_long = exists && units[warp].is_long, any_long = __syncthreads_or(is_long);
#pragma unroll 1
    for (int u = any_long ? 0 : warp; u < (any_long ? min(WARPS, h.heads - first_head) : exists ? warp + 1 : 0); ++u) {
        const Unit& unit = units[u];
        if (!unit.is_long && u != warp) continue;
        float* partials = unit.is_long ? partials_of(first_head + u) : own.partials[0] - unit.first_split * (HEAD_DIM + 4);
#pragma unroll 1
        for (int split = unit.first_split + (unit.is_long ? warp : 0); split < count; split += unit.is_long ? WARPS : 1) {
            attend_split(a, row, table, first_head + u, unit, own, split, partials + split * (HEAD_DIM + 4));
        }
    }
    // Makes the partial results visible to the warp that merges them.
    if (any_long) __syncthreads();
    if (!exists) return;
    const int first_split = units[warp].first_split;
    const float* partials = is_long ? partials_of(head) + first_split * (HEAD_DIM + 4) : own.partials[0];
    ending.merge(m, blockIdx.y, gridDim.y, head, partials, count - first_split);
}
