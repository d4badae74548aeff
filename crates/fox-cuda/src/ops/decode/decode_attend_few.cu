// Attention of decode steps in one launch for few rows, with the bits of decode_attend.
//
// A thread block takes one row and head, two KV splits at a time: a warp takes those pages of a split, of the ones that
// the gates have not forgotten, that a warp of decode_attention would. With one warp per row and head (decode_attend), a
// few rows would leave the GPU idle while each warp reads page after page. The first four warps also prepare the query
// and write the key, value and gate of the token.
//
// Compile-time: HEAD_DIM, ROWS_IN_FLIGHT, SLABS.
#include "decode_attend.cuh"

constexpr int SPLITS = 2;  // at a time
constexpr int WARPS = SPLITS * SPLIT_WARPS;

// A key or value as a lane has it: mixed with the raw row of the previous token, which is replaced.
struct ShiftedRow {
    float before[OWN];
    u16* last;
    int start, shift;

    // Before the wait: only this thread block writes the raw rows of its head.
    DEVICE ShiftedRow(const DecodeHeads& p, const DecodeToken& row, int head, bool is_value)
        : start(p.start[is_value ? 2 : 1]), shift(p.start[is_value ? 4 : 3]) {
        const size_t place = size_t(row.slot) * p.layers + p.layer;
        last = p.last + ((place * 2 + is_value) * p.heads + head) * HEAD_DIM + threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < OWN; ++i) before[i] = shift >= 0 ? bf16_to_float(last[32 * i]) : 0.f;
    }
    DEVICE void mix(float (&x)[OWN], const float* raw, int head) const {
#pragma unroll
        for (int i = 0; i < OWN; ++i) x[i] = raw[start + head * HEAD_DIM + threadIdx.x % 32 + 32 * i];
        if (shift < 0) return;
        const float a = sigmoid(raw[shift + head]);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            last[32 * i] = float_to_bf16(x[i]);
            x[i] = a * before[i] + (1.f - a) * x[i];
        }
    }
};

DEVICE void store_row(u16* to, const float (&x)[OWN]) {
#pragma unroll
    for (int i = 0; i < OWN; ++i) to[threadIdx.x % 32 + 32 * i] = float_to_bf16(x[i]);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) decode_attend_few(
    const __grid_constant__ DecodeHeads h, const __grid_constant__ DecodeAttentionParams a,
    const __grid_constant__ DecodeMerge m) {
    __shared__ __align__(16) float query[HEAD_DIM];
    __shared__ double now;  // sum of the head's log gates
    __shared__ SplitPartials splits[SPLITS];
    __shared__ float scores[WARPS][PAGE];
    __shared__ float own[OWN_SPLITS][HEAD_DIM + 4];
    let_successor_begin();
    const DecodeToken row = h.rows[blockIdx.y];
    if (row.slot < 0) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x, group = warp / SPLIT_WARPS;
    const size_t place = size_t(row.slot) * h.layers + h.layer;
    const DecodeTable table = h.tables[place];
    const int newest = row.position / PAGE, slot = row.position % PAGE;
    const KvSplits all(row.position);
    const bool has_gate = h.start[5] >= 0;
    double* sum = h.gate_sums + place * h.heads + head;
    const double before = has_gate ? *sum : 0.0;
    const int first = first_live_page(a, row, table, head, before), first_split = first / all.each;
    // The first page of each warp; full pages are immutable.
    const int own_page = (first_split + group) * all.each + warp % SPLIT_WARPS;
    if (own_page >= first && own_page <= newest) prefetch_page(table.pages[size_t(own_page) * h.heads + head]);
    const Page page = table.pages[size_t(newest) * h.heads + head];
    Ending ending(m, head);
    const bool is_value = warp == 2;
    const ShiftedRow shifted(h, row, head, is_value);
    const bool is_query = warp == 0;
    const Preparation preparation(h, is_query ? h.q_norm : h.k_norm, head, is_query ? h.q_shared : h.k_shared,
                                  row.position);
    const float gate_bias = has_gate ? h.gate_bias[head] : 0.f;
    // All warps have read the sum of the gates before one of them replaces it.
    __syncthreads();
    wait_for_predecessor();

    const float* raw = h.raw + size_t(blockIdx.y) * h.stride;
    float x[OWN];
    if (is_query) {
#pragma unroll
        for (int i = 0; i < OWN; ++i) x[i] = raw[h.start[0] + head * HEAD_DIM + lane + 32 * i];
        ending.load_gate(m, blockIdx.y, head);
        preparation.apply(x, h.q_norm, h.rope, h.qk_eps);
#pragma unroll
        for (int i = 0; i < OWN; ++i) query[lane + 32 * i] = x[i] * h.scale;
    } else if (warp == 1) {
        shifted.mix(x, raw, head);
        preparation.apply(x, h.k_norm, h.rope, h.qk_eps);
        store_row(page.k + slot * HEAD_DIM, x);
    } else if (is_value) {
        shifted.mix(x, raw, head);
        store_row(page.v + slot * HEAD_DIM, x);
    } else if (warp == 3 && lane == 0) {
        now = 0.0;
        if (has_gate) {
            const float gate = log_sigmoid(raw[h.start[5] + head] + gate_bias);
            page.gates[slot] = gate;
            const double next = before + clamp_log_gate(gate);
            *sum = now = next;
            if (slot == PAGE - 1) table.ends[size_t(newest) * h.heads + head] = next;
        }
    }
    // Makes the query and the token's row of the newest page visible to all warps.
    __syncthreads();

    const bool is_long = all.count - first_split > OWN_SPLITS;
    const size_t unit = size_t(blockIdx.y) * a.heads + head;
    float* partials = is_long ? a.partials + (unit * MAX_KV_SPLITS + first_split) * (HEAD_DIM + 4) : own[0];
#pragma unroll 1
    for (int base = first_split; base < all.count; base += SPLITS) {
        const int split = base + group;
        if (split < all.count) {
            attend_pages(a, row, table, head, query, now, split, warp % SPLIT_WARPS, scores[warp], splits[group]);
        }
        __syncthreads();
        if (warp % SPLIT_WARPS == 0 && split < all.count) {
            join_warps(splits[group], partials + (split - first_split) * (HEAD_DIM + 4));
        }
        // The partial results of the warps have been read, and those of the splits are visible.
        __syncthreads();
    }
    if (is_query) ending.merge(m, blockIdx.y, gridDim.y, head, partials, all.count - first_split);
}
