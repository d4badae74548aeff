// Attention of decode steps in one launch, from raw projections to the input of the output projection, with the bits of
// decode_heads, decode_attention and decode_merge. For models with as many key heads as query heads.
//
// A warp takes one row and head: it writes the key, value and gate of the token, then attends over the pages that the
// gates have not forgotten. These are the last ones, because sums of log gates only fall; what decode_attention adds for
// the others is exactly zero. Partial results of at most OWN_SPLITS KV splits stay in shared memory. Longer suffixes are
// divided over the warps of the thread block, and their partial results go through device memory.
//
// Compile-time: HEAD_DIM, ROWS_IN_FLIGHT, SLABS.
#include "decode_attend.cuh"

constexpr int WARPS = 4;
constexpr int PREFETCHED = 4;  // pages

// A head of a row, in shared memory.
struct __align__(16) Unit {
    float q[HEAD_DIM];
    double now;       // sum of its log gates
    int first_split;  // the first KV split with a page that may be live
    int is_long;
};
// Scratch memory of a warp.
struct __align__(16) Scratch {
    SplitPartials split;
    float partials[OWN_SPLITS][HEAD_DIM + 4];
    float scores[PAGE];
};

// Attends over a KV split in the order of decode_attention.
DEVICE void attend_split(const DecodeAttentionParams& p, const DecodeToken& row, const DecodeTable& table, int head,
                         const Unit& unit, Scratch& own, int split, float* to) {
#pragma unroll 1
    for (int w = 0; w < SPLIT_WARPS; ++w) {
        attend_pages(p, row, table, head, unit.q, unit.now, split, w, own.scores, own.split);
    }
    __syncwarp();
    join_warps(own.split, to);
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
