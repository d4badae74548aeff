// Attention of one query per sequence over its pages, pruned by each head's threshold.
//
// A thread block takes one run of pages of one key head of one sequence, a warp a page at a time. A page whose last
// key has decayed below the threshold of the query head is skipped, whether or not it is still there: what may be read
// follows from the sums of the gates alone, so the result does not depend on when a page is freed.
//
// Compile-time: HEAD_DIM, AT_ONCE (turns whose rows are on their way together; of no account for bits).
#include "decode.cuh"
#include "params.cuh"

constexpr int WARPS = 4;
constexpr int LANES = HEAD_DIM / 8;       // of a key
constexpr int KEYS = 32 / LANES;          // that a warp reads at once
constexpr int TURNS = PAGE / KEYS;
constexpr int LINE = 64;                  // values of a line of the cache

DEVICE void prefetch(const u16* p) {
#if !EMULATED
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

// Decay from each key of a page to its end, of which a lane has keys 2 lane and 2 lane + 1; gates beyond the last key
// are 0. Sums of the gates behind a key, not differences: a strong gate would take the digits of the others along.
DEVICE float2 decay_behind(float2 gate) {
    const int lane = threadIdx.x % 32;
    float sum = gate.x + gate.y;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_down_sync(~0u, sum, step);
        if (lane + step < 32) sum += other;
    }
    float behind = __shfl_down_sync(~0u, sum, 1);
    if (lane == 31) behind = 0.f;
    return make_float2(behind + gate.y, behind);
}

// Eight columns of the keys or values of some turns. A page has room for all its keys: what was not written yet is read,
// and not used.
DEVICE void read_rows(uint4 (&rows)[AT_ONCE], const u16* own, int turn) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
        rows[i] = *reinterpret_cast<const uint4*>(own + (turn + i) * KEYS * HEAD_DIM);
    }
}
DEVICE float dot_of(const float (&q)[8], const uint4& row) {
    const u32 words[4] = {row.x, row.y, row.z, row.w};
    float dot = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) dot += q[2 * i] * bf16_lo(words[i]) + q[2 * i + 1] * bf16_hi(words[i]);
    return dot;
}
DEVICE void add_row(float (&o)[8], float share, const uint4& row) {
    const u32 words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        o[2 * i] += share * bf16_lo(words[i]);
        o[2 * i + 1] += share * bf16_hi(words[i]);
    }
}

// Whether a full page is remembered by a query head of its key head, as far as can be said before the gates of this
// step are there: what is forgotten now stays so.
DEVICE bool may_be_read(const DecodeAttention& p, const DecodeToken& row, const DecodeTable& table, int page) {
    if (p.window > 0 && row.position + 1 - p.window >= (page + 1) * PAGE) return false;
    if (!p.gated) return true;
    const int group = p.heads / p.kv_heads, lane = threadIdx.x % 32, head = blockIdx.y * group + lane;
    bool is_remembered = false;
    if (lane < group) {
        const double before = p.now[(size_t(row.slot) * p.layers + p.layer) * p.heads + head];
        is_remembered = !(before - table.ends[size_t(page) * p.heads + head] < p.thresholds[head]);
    }
    return __any_sync(~0u, is_remembered);
}

// With narrow heads and many rows, five thread blocks on a multiprocessor.
#if HEAD_DIM == 64 && AT_ONCE < 16
#define LAUNCH_BOUNDS __launch_bounds__(32 * WARPS, 5)
#else
#define LAUNCH_BOUNDS __launch_bounds__(32 * WARPS)
#endif
extern "C" __global__ void LAUNCH_BOUNDS decode_attention(const __grid_constant__ DecodeAttention p) {
    __shared__ float scores[WARPS][PAGE];
    __shared__ __align__(16) float outs[WARPS][HEAD_DIM];
    __shared__ float tops[WARPS], weights[WARPS];
    let_successor_begin();
    const DecodeToken row = p.rows[blockIdx.z];
    const int run = blockIdx.x, kv_head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row.slot < 0) return;
    const Runs runs(row.position);
    if (run >= runs.count) return;
    const DecodeTable table = p.tables[size_t(row.slot) * p.layers + p.layer];
    const int group = p.heads / p.kv_heads;
    const int end = min((run + 1) * runs.each, runs.pages);
    const int part = lane % LANES, key_of_lane = lane / LANES;
    const int first_page = run * runs.each + warp;
    // Full pages do not change any more: the first one of each warp comes nearer while others still compute.
    if (first_page < end && (first_page + 1) * PAGE <= row.position && may_be_read(p, row, table, first_page)) {
        const Page page = table.pages[size_t(first_page) * p.kv_heads + kv_head];
        for (int at = lane * LINE; page.k && at < PAGE * HEAD_DIM; at += 32 * LINE) {
            prefetch(page.k + at);
            prefetch(page.v + at);
        }
    }
    const auto part_of = [&](int head) {
        return p.parts + ((size_t(blockIdx.z) * p.heads + head) * MAX_RUNS + run) * (HEAD_DIM + 4);
    };
    // A run that is forgotten needs nothing of this step but its turn to write.
    bool is_read = false;
    for (int n = first_page; n < end && !is_read; n += WARPS) {
        is_read = (n + 1) * PAGE > row.position || may_be_read(p, row, table, n);
    }
    if (!__syncthreads_or(is_read)) {
        wait_for_predecessor();
        for (int i = threadIdx.x; i < group * (HEAD_DIM + 2); i += 32 * WARPS) {
            const int column = i % (HEAD_DIM + 2);
            part_of(kv_head * group + i / (HEAD_DIM + 2))[column] = column == HEAD_DIM ? NEG_INF : 0.f;
        }
        return;
    }
    wait_for_predecessor();

    for (int g = 0; g < group; ++g) {
        const int head = kv_head * group + g;
        // With the scale of the softmax in base 2.
        float q[8], o[8] = {}, top = NEG_INF, weight = 0.f;
        load<8>(q, p.q + (size_t(blockIdx.z) * p.heads + head) * HEAD_DIM + 8 * part);
#pragma unroll
        for (int i = 0; i < 8; ++i) q[i] *= LOG2_E;
        const double now = p.gated ? p.now[(size_t(row.slot) * p.layers + p.layer) * p.heads + head] : 0.0;
        for (int n = first_page; n < end; n += WARPS) {
            const int first = n * PAGE, count = min(PAGE, row.position + 1 - first);
            // Keys from here on are inside of the window.
            const int visible = p.window > 0 ? row.position + 1 - p.window - first : 0;
            if (visible >= PAGE) continue;
            float decay = 0.f;
            if (p.gated && count == PAGE) {
                const double behind = now - table.ends[size_t(n) * p.heads + head];
                if (behind < p.thresholds[head]) continue;
                decay = float(behind);
            }
            const Page page = table.pages[size_t(n) * p.kv_heads + kv_head];
            const int own = key_of_lane * HEAD_DIM + 8 * part;
            uint4 rows[AT_ONCE];
#pragma unroll
            for (int base = 0; base < TURNS; base += AT_ONCE) {
                read_rows(rows, page.k + own, base);
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    const float dot = lanes_sum<LANES>(dot_of(q, rows[i]));
                    if (part == 0) scores[warp][(base + i) * KEYS + key_of_lane] = dot;
                }
            }
            // The first values are on their way while the weights are computed.
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
            // Nothing is visible only where scores are no numbers.
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
            for (int base = 0; base < TURNS; base += AT_ONCE) {
                if (base > 0) read_rows(rows, page.v + own, base);
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
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
        if (key_of_lane == 0) store<8>(outs[warp] + 8 * part, o);
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
        float* to = part_of(head);
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
