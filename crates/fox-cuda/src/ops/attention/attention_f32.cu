// Forgetting attention in f32 without tensor cores, forward and backward: must agree with the oracle to f32 rounding.
// Written for correctness, not speed.
//
// Blocks of 64 queries and 64 keys, as the oracle counts visited tiles. RESIDENT rows stay in shared memory, LANES
// threads per row; the other operand streams by in steps of STEP rows.
//
// Compile-time: HEAD_DIM (64, 128 or 256; heads are padded to it with zeros).
#define BF16 0
#include "attention.cuh"

constexpr int BLOCK = 64;
constexpr int THREADS = 256;
constexpr int RESIDENT = HEAD_DIM > 128 ? 32 : 64;
constexpr int LANES = THREADS / RESIDENT;
constexpr int STEP = HEAD_DIM > 128 ? 8 : 16;
constexpr int PER_LANE = STEP / LANES;
constexpr int COLUMNS = HEAD_DIM / LANES;
constexpr int PITCH = HEAD_DIM + 1;

DEVICE float lanes_sum(float x) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}
DEVICE float lanes_max(float x) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

template <int ROWS>
DEVICE void load_rows(float (*tile)[PITCH], const float* x, int row, int rows, int heads, int head,
                      int head_dim) {
    for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS) {
        const int r = i / HEAD_DIM, c = i % HEAD_DIM;
        tile[r][c] = r < rows && c < head_dim
                         ? x[(size_t(row + r) * heads + head) * head_dim + c]
                         : 0.f;
    }
}

DEVICE bool sees(const TwoPassParams& p, int i, int j) {
    const int distance = i > j ? i - j : j - i;
    return (p.window == 0 || distance < p.window) && (p.mask == MASK_BIDIRECTIONAL || j <= i);
}
// Gate bias of a logit in the log2 domain, for either order of query and key.
DEVICE float decay(float2 a, float2 b) { return -fabsf(gate_difference(a, b)); }

DEVICE float dot_rows(const float* a, const float* b) {
    float sum = 0.f;
#pragma unroll 8
    for (int c = 0; c < HEAD_DIM; ++c) sum = fmaf(a[c], b[c], sum);
    return sum;
}

struct RowLane {
    int row, lane;
};
DEVICE RowLane row_lane() { return RowLane{int(threadIdx.x) / LANES, int(threadIdx.x) % LANES}; }

// Grid (m_tiles, heads, BLOCK / RESIDENT).
extern "C" __global__ void __launch_bounds__(THREADS) attention_fwd_f32(const TwoPassParams p) {
    extern __shared__ float memory[];
    auto q = reinterpret_cast<float(*)[PITCH]>(memory);
    auto kv = q + RESIDENT;
    auto weights = reinterpret_cast<float(*)[STEP]>(kv + STEP);
    const BlockRef ref = p.m_tiles[blockIdx.x];
    const Segment s = p.segments[ref.segment];
    const int head = blockIdx.y, kv_head = head / (p.heads / p.kv_heads);
    const RowLane at = row_lane();
    const int q0 = ref.block * BLOCK + blockIdx.z * RESIDENT, queries = min(RESIDENT, s.q_len - q0);
    if (queries <= 0) return;
    const int position = s.k_len - s.q_len + q0 + at.row;
    const float2* gates = p.gates + size_t(head) * p.gate_stride + s.c_base;
    float2 c_row = make_float2(0.f, 0.f);
    if (p.gates) c_row = gates[min(position, s.k_len - 1)];
    load_rows<RESIDENT>(q, p.q, s.q_start + q0, queries, p.heads, head, p.head_dim);
    float o[COLUMNS] = {}, top = NEG_INF, sum = 0.f;
    const int2 span = p.spans[size_t(head) * p.m_tile_count + blockIdx.x];
    for (int first = span.x * BLOCK; first < min(span.y * BLOCK, s.k_len); first += STEP) {
        const int count = min(STEP, s.k_len - first);
        __syncthreads();
        load_rows<STEP>(kv, p.k, s.k_start + first, count, p.kv_heads, kv_head, p.head_dim);
        __syncthreads();
        float x[PER_LANE], next = top;
#pragma unroll
        for (int e = 0; e < PER_LANE; ++e) {
            const int j = at.lane + LANES * e, key = first + j;
            x[e] = NEG_INF;
            if (key < s.k_len && sees(p, position, key)) {
                x[e] = dot_rows(q[at.row], kv[j]) * p.scale * LOG2_E;
                if (p.gates) x[e] += decay(c_row, gates[key]);
            }
            next = fmaxf(next, x[e]);
        }
        next = lanes_max(next);
        const float rescale = next == NEG_INF ? 1.f : exp2f(top - next);
        top = next;
        sum *= rescale;
#pragma unroll
        for (int e = 0; e < PER_LANE; ++e) {
            const float w = x[e] == NEG_INF ? 0.f : exp2f(x[e] - top);
            weights[at.row][at.lane + LANES * e] = w;
            sum += w;
        }
        __syncthreads();
        load_rows<STEP>(kv, p.v, s.k_start + first, count, p.kv_heads, kv_head, p.head_dim);
        __syncthreads();
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) o[c] *= rescale;
        for (int j = 0; j < STEP; ++j) {
            const float w = weights[at.row][j];
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) o[c] = fmaf(w, kv[j][at.lane + LANES * c], o[c]);
        }
    }
    sum = lanes_sum(sum);
    if (at.row >= queries) return;
    const size_t index = size_t(s.q_start + q0 + at.row) * p.heads + head;
    for (int c = 0; c < COLUMNS; ++c) {
        const int column = at.lane + LANES * c;
        if (column < p.head_dim) p.o[index * p.head_dim + column] = sum > 0.f ? o[c] / sum : 0.f;
    }
    if (at.lane == 0) p.lse[index] = sum > 0.f ? (top + log2f(sum)) * LN_2 : NEG_INF;
}

// P and dS of a query and a key, from q.k and do.v.
struct ScoreGradient {
    float p, ds;
};
DEVICE ScoreGradient score_gradient(const TwoPassParams& p, float s, float dp, float2 c_i, float2 c_j,
                                    float4 row, int i, int j) {
    if (!sees(p, i, j)) return ScoreGradient{0.f, 0.f};
    const float bias = p.gates ? decay(c_i, c_j) : 0.f;
    const float w = exp2f(s * p.scale * LOG2_E + bias - row.w);
    return ScoreGradient{w, w * (dp - row.z)};
}

// dK, dV and column sums of dS. Grid (n_tiles, kv_heads, BLOCK / RESIDENT).
extern "C" __global__ void __launch_bounds__(THREADS) attention_bwd_keys_f32(const TwoPassParams p) {
    extern __shared__ float memory[];
    auto k = reinterpret_cast<float(*)[PITCH]>(memory);
    auto v = k + RESIDENT;
    auto q = v + RESIDENT;
    auto d_out = q + STEP;
    auto ps = reinterpret_cast<float(*)[STEP]>(d_out + STEP);
    auto ds = ps + RESIDENT;
    const BlockRef ref = p.n_tiles[blockIdx.x];
    const Segment s = p.segments[ref.segment];
    const int kv_head = blockIdx.y, n = ref.block, group = p.heads / p.kv_heads;
    const RowLane at = row_lane();
    const int first = n * BLOCK + blockIdx.z * RESIDENT, keys = min(RESIDENT, s.k_len - first);
    if (keys <= 0) return;
    const int key = first + at.row, offset = s.k_len - s.q_len;
    load_rows<RESIDENT>(k, p.k, s.k_start + first, keys, p.kv_heads, kv_head, p.head_dim);
    load_rows<RESIDENT>(v, p.v, s.k_start + first, keys, p.kv_heads, kv_head, p.head_dim);
    float dk[COLUMNS] = {}, dv[COLUMNS] = {};
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        const float2* gates = p.gates + size_t(head) * p.gate_stride + s.c_base;
        float2 c_row = make_float2(0.f, 0.f);
        if (p.gates) c_row = gates[min(key, s.k_len - 1)];
        float sum = 0.f;
        for (int q0 = 0; q0 < s.q_len; q0 += STEP) {
            const size_t tile = size_t(head) * p.m_tile_count + s.m_tile0 + q0 / BLOCK;
            const int2 span = p.spans[tile];
            if (n < span.x || n >= span.y) continue;
            const int count = min(STEP, s.q_len - q0);
            __syncthreads();
            load_rows<STEP>(q, p.q, s.q_start + q0, count, p.heads, head, p.head_dim);
            load_rows<STEP>(d_out, p.d_out, s.q_start + q0, count, p.heads, head, p.head_dim);
            __syncthreads();
#pragma unroll
            for (int e = 0; e < PER_LANE; ++e) {
                const int i = at.lane + LANES * e, position = offset + q0 + i;
                ScoreGradient x{0.f, 0.f};
                if (i < count && key < s.k_len) {
                    const float4 row = p.rows[tile * BLOCK + q0 % BLOCK + i];
                    x = score_gradient(p, dot_rows(k[at.row], q[i]), dot_rows(v[at.row], d_out[i]),
                             make_float2(row.x, row.y), c_row, row, position, key);
                }
                ps[at.row][i] = x.p;
                ds[at.row][i] = x.ds;
                sum += key <= position ? x.ds : -x.ds;
            }
            __syncwarp();
            for (int i = 0; i < STEP; ++i) {
                const float a = ps[at.row][i], b = ds[at.row][i];
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    dv[c] = fmaf(a, d_out[i][at.lane + LANES * c], dv[c]);
                    dk[c] = fmaf(b, q[i][at.lane + LANES * c], dk[c]);
                }
            }
        }
        sum = lanes_sum(sum);
        if (p.gates && at.lane == 0 && key < s.k_len) {
            p.column_sums[size_t(head) * p.gate_stride + s.c_base + key] = sum;
        }
    }
    if (at.row >= keys) return;
    const size_t index = (size_t(s.k_start + key) * p.kv_heads + kv_head) * p.head_dim;
    for (int c = 0; c < COLUMNS; ++c) {
        const int column = at.lane + LANES * c;
        if (column >= p.head_dim) continue;
        p.dk[index + column] = dk[c] * p.scale;
        p.dv[index + column] = dv[c];
    }
}

// dQ and row sums of dS. Grid (m_tiles, heads, BLOCK / RESIDENT).
extern "C" __global__ void __launch_bounds__(THREADS) attention_bwd_queries_f32(const TwoPassParams p) {
    extern __shared__ float memory[];
    auto q = reinterpret_cast<float(*)[PITCH]>(memory);
    auto d_out = q + RESIDENT;
    auto k = d_out + RESIDENT;
    auto v = k + STEP;
    auto ds = reinterpret_cast<float(*)[STEP]>(v + STEP);
    const BlockRef ref = p.m_tiles[blockIdx.x];
    const Segment s = p.segments[ref.segment];
    const int head = blockIdx.y, kv_head = head / (p.heads / p.kv_heads);
    const RowLane at = row_lane();
    const int start = blockIdx.z * RESIDENT, q0 = ref.block * BLOCK + start;
    const int queries = min(RESIDENT, s.q_len - q0);
    const size_t tile = size_t(head) * p.m_tile_count + blockIdx.x;
    if (queries <= 0) {
        if (at.lane == 0) p.row_sums[tile * BLOCK + start + at.row] = 0.f;
        return;
    }
    const float4 row = p.rows[tile * BLOCK + start + at.row];
    const int position = s.k_len - s.q_len + q0 + at.row;
    const float2* gates = p.gates + size_t(head) * p.gate_stride + s.c_base;
    load_rows<RESIDENT>(q, p.q, s.q_start + q0, queries, p.heads, head, p.head_dim);
    load_rows<RESIDENT>(d_out, p.d_out, s.q_start + q0, queries, p.heads, head, p.head_dim);
    const int2 span = p.spans[tile];
    float dq[COLUMNS] = {}, sum = 0.f;
    for (int first = span.x * BLOCK; first < min(span.y * BLOCK, s.k_len); first += STEP) {
        const int count = min(STEP, s.k_len - first);
        __syncthreads();
        load_rows<STEP>(k, p.k, s.k_start + first, count, p.kv_heads, kv_head, p.head_dim);
        load_rows<STEP>(v, p.v, s.k_start + first, count, p.kv_heads, kv_head, p.head_dim);
        __syncthreads();
#pragma unroll
        for (int e = 0; e < PER_LANE; ++e) {
            const int j = at.lane + LANES * e, key = first + j;
            ScoreGradient x{0.f, 0.f};
            if (j < count && at.row < queries) {
                const float2 c = p.gates ? gates[key] : make_float2(0.f, 0.f);
                x = score_gradient(p, dot_rows(q[at.row], k[j]), dot_rows(d_out[at.row], v[j]),
                         make_float2(row.x, row.y), c, row, position, key);
            }
            ds[at.row][j] = x.ds;
            sum += key <= position ? x.ds : -x.ds;
        }
        __syncwarp();
        for (int j = 0; j < STEP; ++j) {
            const float b = ds[at.row][j];
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) dq[c] = fmaf(b, k[j][at.lane + LANES * c], dq[c]);
        }
    }
    sum = lanes_sum(sum);
    if (at.lane == 0) p.row_sums[tile * BLOCK + start + at.row] = sum;
    if (at.row >= queries) return;
    const size_t index = (size_t(s.q_start + q0 + at.row) * p.heads + head) * p.head_dim;
    for (int c = 0; c < COLUMNS; ++c) {
        const int column = at.lane + LANES * c;
        if (column < p.head_dim) p.dq[index + column] = dq[c] * p.scale;
    }
}
