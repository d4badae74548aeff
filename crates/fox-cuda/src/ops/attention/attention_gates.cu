// Prefix sums of the log gates, and the suffix scan from column sums of dS to the gradient of the gates.
//
// Two-level scan over chunks of CHUNK positions: one launch sums each chunk, a second one adds the chunks before (or
// after) its own in fixed order and scans inside. In f64: exact over millions of gates, and deterministic.
#include "attention.cuh"

constexpr int CHUNK = 256;  // threads of a block, one position each

DEVICE double shuffle_up(double x, int n) { return __shfl_up_sync(~0u, x, n); }

// Inclusive prefix sum over the block.
DEVICE double block_scan(double x) {
    __shared__ double totals[CHUNK / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        double y = shuffle_up(x, step);
        if (lane >= step) x += y;
    }
    __syncthreads();
    if (lane == 31) totals[warp] = x;
    __syncthreads();
    double before = 0.0;
    for (int w = 0; w < warp; ++w) before += totals[w];
    return before + x;
}

// Sum over the block in fixed order, returned to all threads.
DEVICE double block_sum(double x) {
    __shared__ double result;
    double sum = block_scan(x);
    __syncthreads();
    if (threadIdx.x == CHUNK - 1) result = sum;
    __syncthreads();
    return result;
}

// Sum of totals[begin..end).
DEVICE double sum_totals(const double* totals, int begin, int end) {
    double x = 0.0;
    for (int i = begin + threadIdx.x; i < end; i += CHUNK) x += totals[i];
    return block_sum(x);
}

// totals[head][chunk] = sum of the log gates of the chunk. Grid (chunks, heads).
extern "C" __global__ void gate_totals(PARAMS(GateTotals)) {
    ChunkRef c = chunks[blockIdx.x];
    Segment s = segments[c.segment];
    const int t = c.chunk * CHUNK + threadIdx.x, head = blockIdx.y;
    double x = t < s.k_len ? clamp_log_gate(log_gates[size_t(s.k_start + t) * heads + head]) : 0.f;
    double sum = block_sum(x);
    if (threadIdx.x == 0) totals[size_t(head) * gridDim.x + blockIdx.x] = sum;
}

// gates[head][c_base + t] = log2(e) * (sum of the log gates up to t), as hi + lo.
extern "C" __global__ void gate_prefix(PARAMS(GatePrefix)) {
    ChunkRef c = chunks[blockIdx.x];
    Segment s = segments[c.segment];
    const int t = c.chunk * CHUNK + threadIdx.x, head = blockIdx.y;
    double before = sum_totals(totals + size_t(head) * gridDim.x, c.first, c.first + c.chunk);
    double x = t < s.k_len ? clamp_log_gate(log_gates[size_t(s.k_start + t) * heads + head]) : 0.f;
    double sum = (before + block_scan(x)) * 1.4426950408889634;
    float hi = float(sum);
    if (t < s.k_len) {
        gates[size_t(head) * gate_stride + s.c_base + t] = make_float2(hi, float(sum - double(hi)));
    }
}

// Sum of a row of dS in exact arithmetic: zero, or the part that an attention sink absorbs.
DEVICE float exact_row_sum(const GradientInputs& in, size_t tile0, int head, int i) {
    const float4 row = reinterpret_cast<const float4*>(in.rows)[tile0 * in.block_m + i];
    // Rows without visible keys.
    return row.w == NEG_INF ? 0.f : row.z * exp2f(in.sinks[head] * LOG2_E - row.w);
}

// dc_t = row sum - column sum of dS. Row sums differ from exact_row_sum by the rounding of delta and are known as sums
// over `rows_per_sum` queries; the difference is distributed evenly over these queries, so that rounding errors do not
// accumulate over a long sequence.
DEVICE double gate_gradient_term(const GradientInputs& in, const Segment& s, int head, int t) {
    if (t >= s.k_len) return 0.0;
    double x = -double(in.column_sums[size_t(head) * in.gate_stride + s.c_base + t]);
    const int i = t - (s.k_len - s.q_len);
    if (i >= 0) {
        const int sums = in.block_m / in.rows_per_sum;
        const size_t tile0 = size_t(head) * in.m_tile_count + s.m_tile0;
        const int group = i / in.rows_per_sum;
        const int rows = min(in.rows_per_sum, s.q_len - group * in.rows_per_sum);
        double rest = in.row_sums[tile0 * sums + group];
        if (in.sinks) {
            x += exact_row_sum(in, tile0, head, i);
            for (int r = 0; r < rows; ++r) rest -= exact_row_sum(in, tile0, head, group * in.rows_per_sum + r);
        }
        x += rest / rows;
    }
    return x;
}

extern "C" __global__ void gate_gradient_totals(PARAMS(GradientTotals)) {
    ChunkRef c = chunks[blockIdx.x];
    Segment s = segments[c.segment];
    double sum = block_sum(gate_gradient_term(inputs, s, blockIdx.y, c.chunk * CHUNK + threadIdx.x));
    if (threadIdx.x == 0) totals[size_t(blockIdx.y) * gridDim.x + blockIdx.x] = sum;
}

// dlog_gates[k_start + t][head] = sum over s >= t of dc_s.
extern "C" __global__ void gate_gradient(PARAMS(GateGradient)) {
    ChunkRef c = chunks[blockIdx.x];
    Segment s = segments[c.segment];
    const int head = blockIdx.y, t = c.chunk * CHUNK + (CHUNK - 1 - int(threadIdx.x));
    double after = sum_totals(totals + size_t(head) * gridDim.x, c.first + c.chunk + 1,
                              c.first + c.count);
    double sum = after + block_scan(gate_gradient_term(inputs, s, head, t));
    if (t < s.k_len) dlog_gates[size_t(s.k_start + t) * heads + head] = float(sum);
}
