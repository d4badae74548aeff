// One new token for each of a few sequences: products of a few rows with weights, and attention over a
// cache. Both are bound by how fast memory is read, and by the time from one launch to the next: so the
// norm in front of a product is part of it, and so is all that happens to a head before attention.
//
// Compile-time: ROWS (sequences: 1, 2, 4 or 8), CHUNKS (pieces of 256 columns that a warp reads at once),
// HEAD_DIM (64, 128 or 256).
#define BF16 1
#define VEC 8
#include "real.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

// Each launch may begin before the one in front of it has ended. Until `wait_for_predecessor`, a kernel may
// only read what no launch of the step writes: weights, and keys and values of earlier steps.
DEVICE void let_successor_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Rows of one weight matrix [rows, width] and where their products go.
struct Part {
    const u16* w;
    const float* bias;  // or null
    void* y;            // [batch, rows], f32 or bf16
    int rows, wide;
};

constexpr int MAX_PARTS = 7;

struct MatvecParams {
    // The input: rms(h + delta) * norm where there is a norm, else h. The first block writes the sum.
    const u16 *h, *delta;
    const float* norm;
    u16* sum;
    int width, batch;
    float eps;
    int part_count;
    // With `glu`, row n of the only part is paired with row n + rows: y = act(g) * u.
    int glu, act, items, unused;
    Part parts[MAX_PARTS];
};

// The input to shared memory, in bf16 as everywhere else.
DEVICE void load_input(u16* x, const MatvecParams& p) {
    float first_norm[8] = {};
    if (p.norm && 8 * int(threadIdx.x) < p.width) load<8>(first_norm, p.norm + 8 * threadIdx.x);
    wait_for_predecessor();
    for (int b = 0; b < ROWS; ++b) {
        u16* row = x + b * p.width;
        float squares = 0.f;
        for (int c = 8 * threadIdx.x; c < p.width; c += 8 * THREADS) {
            float v[8] = {};
            if (b < p.batch) load<8>(v, p.h + size_t(b) * p.width + c);
            if (b < p.batch && p.delta) {
                float d[8];
                load<8>(d, p.delta + size_t(b) * p.width + c);
#pragma unroll
                for (int i = 0; i < 8; ++i) v[i] = to_float(to_real(v[i] + d[i]));
            }
            if (p.sum && blockIdx.x == 0 && b < p.batch) store<8>(p.sum + size_t(b) * p.width + c, v);
#pragma unroll
            for (int i = 0; i < 8; ++i) squares += v[i] * v[i];
            store<8>(row + c, v);
        }
        if (!p.norm) continue;
        const float scale = 1.f / sqrtf(block_sum<WARPS>(squares) / p.width + p.eps);
        for (int c = 8 * threadIdx.x; c < p.width; c += 8 * THREADS) {
            float v[8], w[8];
            load<8>(v, row + c);
            if (c >= 8 * THREADS) load<8>(w, p.norm + c);
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] *= scale * (c < 8 * THREADS ? first_norm[i] : w[i]);
            store<8>(row + c, v);
        }
    }
    __syncthreads();
}

// A warp's work is a list of pieces of rows: item after item (with `glu` two rows each), row after row,
// 256 * CHUNKS columns at a time.
struct Piece {
    int item, half, first;  // item < 0: no more
};
struct Item {
    const Part* part;
    int row;
};
DEVICE Item find_item(const MatvecParams& p, int n) {
    int part = 0;
    while (part + 1 < p.part_count && n >= p.parts[part].rows) n -= p.parts[part++].rows;
    return Item{p.parts + part, n};
}
DEVICE Piece next_piece(const MatvecParams& p, Piece at) {
    at.first += 256 * CHUNKS;
    if (at.first < p.width) return at;
    at.first = 0;
    if (p.glu && at.half == 0) return Piece{at.item, 1, 0};
    at.item += gridDim.x * WARPS;
    return Piece{at.item < p.items ? at.item : -1, 0, 0};
}

DEVICE void load_weights(uint4 (&w)[CHUNKS], const MatvecParams& p, const Piece& at) {
    if (at.item < 0) return;
    const Item item = find_item(p, at.item);
    const u16* row = item.part->w + size_t(item.row + at.half * item.part->rows) * p.width;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int column = at.first + 256 * c + 8 * (threadIdx.x % 32);
        w[c] = column < p.width ? __ldcs(reinterpret_cast<const uint4*>(row + column))
                                : make_uint4(0, 0, 0, 0);
    }
}

// sum[b] += the lane's part of <w, x[b]>.
DEVICE void add_products(float (&sum)[ROWS], const uint4 (&w)[CHUNKS], const u16* x, int first,
                         int width) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int column = first + 256 * c + 8 * (threadIdx.x % 32);
        if (column >= width) continue;
        const u32 words[4] = {w[c].x, w[c].y, w[c].z, w[c].w};
#pragma unroll
        for (int b = 0; b < ROWS; ++b) {
            float v[8];
            load<8>(v, x + b * width + column);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum[b] = fmaf(bf16_lo(words[i]), v[2 * i], sum[b]);
                sum[b] = fmaf(bf16_hi(words[i]), v[2 * i + 1], sum[b]);
            }
        }
    }
}

DEVICE void write(const Part& part, int row, int batch, const float (&sum)[ROWS]) {
    const float bias = part.bias ? part.bias[row] : 0.f;
#pragma unroll
    for (int b = 0; b < ROWS; ++b) {
        if (b >= batch) continue;
        const size_t at = size_t(b) * part.rows + row;
        if (part.wide) static_cast<float*>(part.y)[at] = sum[b] + bias;
        else static_cast<u16*>(part.y)[at] = float_to_bf16(sum[b] + bias);
    }
}

// Items are rows of all parts, one warp each.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    matvec(const __grid_constant__ MatvecParams p) {
    extern __shared__ __align__(16) u16 x[];
    const int n = blockIdx.x * WARPS + threadIdx.x / 32;
    let_successor_start();
    Piece at{n < p.items ? n : -1, 0, 0};
    uint4 ready[CHUNKS], coming[CHUNKS];
    // Weights do not depend on the input: they are on their way while the norm is computed.
    load_weights(ready, p, at);
    load_input(x, p);
    float sum[ROWS] = {}, gate[ROWS];
    while (at.item >= 0) {
        const Piece next = next_piece(p, at);
        load_weights(coming, p, next);
        add_products(sum, ready, x, at.first, p.width);
        if (next.item != at.item || next.half != at.half) {
            // The row is complete.
#pragma unroll
            for (int b = 0; b < ROWS; ++b) sum[b] = warp_sum(sum[b]);
            if (next.item == at.item) {
#pragma unroll
                for (int b = 0; b < ROWS; ++b) gate[b] = sum[b];
            } else {
#pragma unroll
                for (int b = 0; b < ROWS; ++b) {
                    if (p.glu) sum[b] *= activation(p.act, gate[b]).x;
                }
                const Item item = find_item(p, at.item);
                if (threadIdx.x % 32 == 0) write(*item.part, item.row, p.batch, sum);
            }
#pragma unroll
            for (int b = 0; b < ROWS; ++b) sum[b] = 0.f;
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) ready[c] = coming[c];
        at = next;
    }
}

// ---- attention ----

constexpr int LANES = HEAD_DIM / 8;    // of a key's row, 16 bytes each
constexpr int KEYS = THREADS / LANES;  // keys at a time
constexpr int TURNS = 8;               // all of which are read before anything else happens
constexpr int SPLIT = KEYS * TURNS;    // keys of one thread block
constexpr int MAX_GROUP = 8;                  // query heads of a key head
constexpr int MAX_BATCH = 8;

struct AttendParams {
    const float *q, *k, *v;        // raw projections [batch, heads * d], [batch, kv_heads * d]
    const float *k_shift, *v_shift;  // logits [batch, kv_heads], or null
    const float *gate, *gate_bias;   // logits [batch, heads] and bias [heads], or null
    const u16 *last_k, *last_v;    // raw rows of the step before [batch, kv_heads * d], or null
    u16 *next_k, *next_v;          // raw rows of this step, or null
    const float *q_norm, *k_norm;  // [heads * d] or [d], or null
    const float2* rope;            // [positions][d / 2], or null
    u16 *k_cache, *v_cache;        // [rows, kv_heads * d]
    float* gate_cache;             // [rows, heads], or null
    float* partial;                // [batch][heads][splits][d + 4]: sum of p v; maximum, sum of p, decay
    // After attention: rms(o) * act(z).
    u16* y;                        // [batch, heads * d]
    const float* out_norm;         // [heads * d], or null
    const float* out_gate;         // logits [batch, heads * d], or null
    int heads, kv_heads, splits, window;
    int q_shared, k_shared, act, unused;
    float scale, qk_eps, out_eps;
    int k_start[MAX_BATCH], k_len[MAX_BATCH];
};

struct Shared {
    float q[MAX_GROUP][HEAD_DIM];
    float new_k[HEAD_DIM], new_v[HEAD_DIM];
    float head[HEAD_DIM];
    float s[MAX_GROUP][SPLIT];
    float o[THREADS / 32][HEAD_DIM];
    float parts[WARPS], total;
};

// Norm and rotation of one head in shared memory, by the first warp: x = rope(rms(x) * w).
DEVICE void prepare(float* x, const float* w, float eps, const float2* rope) {
    const int lane = threadIdx.x % 32;
    __syncwarp();
    if (w) {
        float squares = 0.f;
        for (int c = lane; c < HEAD_DIM; c += 32) squares += x[c] * x[c];
        const float scale = 1.f / sqrtf(warp_sum(squares) / HEAD_DIM + eps);
        for (int c = lane; c < HEAD_DIM; c += 32) x[c] *= scale * w[c];
        __syncwarp();
    }
    if (rope) {
        for (int m = lane; m < HEAD_DIM / 2; m += 32) {
            const float2 t = rope[m];
            const float a = x[m], b = x[m + HEAD_DIM / 2];
            x[m] = a * t.x - b * t.y;
            x[m + HEAD_DIM / 2] = a * t.y + b * t.x;
        }
        __syncwarp();
    }
}

// The new row of keys (or values) of one key head, by one warp: shift, norm, rotation, to the cache.
DEVICE void append(float* x, u16* cache, const float* raw, const float* shift, const u16* last, u16* next,
                   const float* norm, float eps, const float2* rope, size_t at, int kv_index) {
    const int lane = threadIdx.x % 32;
    const float a = shift ? sigmoid(shift[kv_index]) : 0.f;
    for (int c = lane; c < HEAD_DIM; c += 32) {
        const size_t i = size_t(kv_index) * HEAD_DIM + c;
        const float now = raw[i];
        x[c] = shift ? a * bf16_to_float(last[i]) + (1.f - a) * now : now;
        if (next) next[i] = float_to_bf16(now);
    }
    prepare(x, norm, eps, rope);
    for (int c = lane; c < HEAD_DIM; c += 32) {
        const u16 rounded = float_to_bf16(x[c]);
        cache[at + c] = rounded;
        x[c] = bf16_to_float(rounded);
    }
}

// s[key] = decay from the key to the end of the split, in nats; returns the decay of the whole split.
// decay(j) = sum of the log gates after j.
DEVICE float suffix_sums(float (&s)[SPLIT], const float* gates, int count, int heads, float* parts) {
    // Thread t has key count - 1 - t: an ordinary prefix sum, without the key's own gate.
    const int t = threadIdx.x, lane = t % 32, warp = t / 32, key = count - 1 - t;
    const float own = key >= 0 ? gates[size_t(key) * heads] : 0.f;
    float sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    __syncthreads();
    if (lane == 31) parts[warp] = sum;
    __syncthreads();
    float before = 0.f, all = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        if (w < warp) before += parts[w];
        all += parts[w];
    }
    if (key >= 0) s[key] = before + (sum - own);
    return all;
}

// Output norm and gate of one head, whose d values are in shared memory; by one warp.
DEVICE void finish_head(float* o, const AttendParams& p, int b, int head) {
    const int lane = threadIdx.x % 32;
    const size_t at = (size_t(b) * p.heads + head) * HEAD_DIM;
    __syncwarp();
    float scale = 1.f;
    if (p.out_norm) {
        float squares = 0.f;
        for (int c = lane; c < HEAD_DIM; c += 32) squares += o[c] * o[c];
        scale = 1.f / sqrtf(warp_sum(squares) / HEAD_DIM + p.out_eps);
    }
    for (int c = lane; c < HEAD_DIM; c += 32) {
        float x = o[c];
        if (p.out_norm) x *= scale * p.out_norm[head * HEAD_DIM + c];
        if (p.out_gate) x *= activation(p.act, p.out_gate[at + c]).x;
        p.y[at + c] = float_to_bf16(x);
    }
}

// A row of eight columns from the cache, or of the newest key or value from shared memory.
DEVICE void unpack(float (&x)[8], uint4 cached, const float* newest, bool is_newest) {
    const u32 words[4] = {cached.x, cached.y, cached.z, cached.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) x[2 * i] = bf16_lo(words[i]), x[2 * i + 1] = bf16_hi(words[i]);
    if (is_newest) load<8>(x, newest);
}

// Queries of the group ready in shared memory; in the last split also the new key, value and gate, which
// go to the cache. The warps share the work.
DEVICE void get_ready(Shared& sh, const AttendParams& p, int kv_head, int b, bool last_split) {
    const int group = p.heads / p.kv_heads, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int len = p.k_len[b], kv_index = b * p.kv_heads + kv_head;
    const float2* rope = p.rope ? p.rope + size_t(len - 1) * (HEAD_DIM / 2) : nullptr;
    const size_t newest = size_t(p.k_start[b] + len - 1);
    for (int g = warp; g < group; g += WARPS) {
        const int head = kv_head * group + g;
        const float* raw = p.q + (size_t(b) * p.heads + head) * HEAD_DIM;
        for (int c = lane; c < HEAD_DIM; c += 32) sh.q[g][c] = raw[c];
        prepare(sh.q[g], p.q_norm ? p.q_norm + (p.q_shared ? 0 : head * HEAD_DIM) : nullptr, p.qk_eps,
                rope);
        for (int c = lane; c < HEAD_DIM; c += 32) sh.q[g][c] *= p.scale;
        if (p.gate_cache && last_split && lane == 0) {
            p.gate_cache[newest * p.heads + head] =
                log_sigmoid(p.gate[size_t(b) * p.heads + head] + p.gate_bias[head]);
        }
    }
    if (!last_split) return;
    const size_t at = (newest * p.kv_heads + kv_head) * HEAD_DIM;
    if (warp == WARPS - 1) {
        append(sh.new_k, p.k_cache, p.k, p.k_shift, p.last_k, p.next_k,
               p.k_norm ? p.k_norm + (p.k_shared ? 0 : kv_head * HEAD_DIM) : nullptr, p.qk_eps, rope, at,
               kv_index);
    } else if (warp == WARPS - 2) {
        append(sh.new_v, p.v_cache, p.v, p.v_shift, p.last_v, p.next_v, nullptr, 0.f, nullptr, at,
               kv_index);
    }
}

// One query head against the keys of the split; the products with q are still to be made.
DEVICE void attend_head(Shared& sh, const AttendParams& p, int head, int g, int b, int split, int count,
                        float decay, const uint4 (&keys)[TURNS], const uint4 (&values)[TURNS],
                        int newest) {
    const int part = threadIdx.x % LANES, slot = threadIdx.x / LANES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = split * SPLIT, len = p.k_len[b];
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int key = turn * KEYS + slot;
        float k[8], dot = 0.f;
        unpack(k, keys[turn], sh.new_k + 8 * part, key == newest);
#pragma unroll
        for (int i = 0; i < 8; ++i) dot += k[i] * sh.q[g][8 * part + i];
        dot = lanes_sum<LANES>(dot);
        const bool seen = p.window == 0 || first + key > len - 1 - p.window;
        if (part == 0 && key < count) sh.s[g][key] = seen ? sh.s[g][key] + dot : NEG_INF;
    }
    __syncthreads();
    const int t = threadIdx.x;
    const float x = t < count ? sh.s[g][t] : NEG_INF;
    const float top = block_max<WARPS>(x);
    const float weight = x == NEG_INF ? 0.f : exp2f((x - top) * LOG2_E);
    if (t < SPLIT) sh.s[g][t] = weight;
    const float sum = block_sum<WARPS>(weight);
    float o[8] = {};
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int key = turn * KEYS + slot;
        float v[8];
        unpack(v, values[turn], sh.new_v + 8 * part, key == newest);
        const float w = sh.s[g][key];
#pragma unroll
        for (int i = 0; i < 8; ++i) o[i] = fmaf(w, v[i], o[i]);
    }
    // Sum over the lanes of a warp that hold the same columns, then over the warps.
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int step = 16; step >= LANES; step /= 2) o[i] += __shfl_xor_sync(~0u, o[i], step);
    }
    if (lane < LANES) {
#pragma unroll
        for (int i = 0; i < 8; ++i) sh.o[warp][8 * part + i] = o[i];
    }
    __syncthreads();
    if (warp > 0) return;
    const bool whole = p.splits == 1;
    for (int c = lane; c < HEAD_DIM; c += 32) {
        float all = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) all += sh.o[w][c];
        sh.head[c] = whole ? all / sum : all;
    }
    if (whole) {
        finish_head(sh.head, p, b, head);
        return;
    }
    float* out = p.partial + ((size_t(b) * p.heads + head) * p.splits + split) * (HEAD_DIM + 4);
    for (int c = lane; c < HEAD_DIM; c += 32) out[c] = sh.head[c];
    if (lane == 0) out[HEAD_DIM] = top, out[HEAD_DIM + 1] = sum, out[HEAD_DIM + 2] = decay;
}

// Grid (splits, kv_heads, batch).
extern "C" __global__ void __launch_bounds__(THREADS, 2) attend(const __grid_constant__ AttendParams p) {
    __shared__ Shared sh;
    let_successor_start();
    const int split = blockIdx.x, kv_head = blockIdx.y, b = blockIdx.z;
    const int len = p.k_len[b], splits = (len + SPLIT - 1) / SPLIT;
    if (split >= splits) return;
    const int first = split * SPLIT, count = min(SPLIT, len - first), newest = len - 1 - first;
    const int kv_width = p.kv_heads * HEAD_DIM, group = p.heads / p.kv_heads;
    const int part = threadIdx.x % LANES, slot = threadIdx.x / LANES;
    const size_t base = size_t(p.k_start[b] + first);
    uint4 keys[TURNS], values[TURNS];
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int key = turn * KEYS + slot;
        const size_t at = (base + key) * kv_width + kv_head * HEAD_DIM + 8 * part;
        const bool old = key < min(count, newest);
        const uint4 zero = make_uint4(0, 0, 0, 0);
        keys[turn] = old ? *reinterpret_cast<const uint4*>(p.k_cache + at) : zero;
        values[turn] = old ? *reinterpret_cast<const uint4*>(p.v_cache + at) : zero;
    }
    wait_for_predecessor();
    get_ready(sh, p, kv_head, b, split == splits - 1);
    // The new gate is read back below, by other threads of this block.
    __threadfence_block();
    __syncthreads();
    for (int g = 0; g < group; ++g) {
        const int head = kv_head * group + g;
        float decay = 0.f;
        if (p.gate_cache) {
            const float* gates = p.gate_cache + base * p.heads + head;
            decay = suffix_sums(sh.s[g], gates, count, p.heads, sh.parts);
        } else if (int(threadIdx.x) < SPLIT) {
            sh.s[g][threadIdx.x] = 0.f;
        }
        __syncthreads();
        attend_head(sh, p, head, g, b, split, count, decay, keys, values, newest);
        __syncthreads();
    }
}

// Adds up the splits of a head. Grid (heads, batch), block 32.
extern "C" __global__ void __launch_bounds__(32) attend_splits(const __grid_constant__ AttendParams p) {
    __shared__ float o[HEAD_DIM];
    const int head = blockIdx.x, b = blockIdx.y, lane = threadIdx.x;
    let_successor_start();
    wait_for_predecessor();
    const int splits = (p.k_len[b] + SPLIT - 1) / SPLIT;
    const float* in = p.partial + (size_t(b) * p.heads + head) * p.splits * (HEAD_DIM + 4);
    constexpr int STRIDE = HEAD_DIM + 4;
    float all[HEAD_DIM / 32] = {}, top = NEG_INF, sum = 0.f;
    double decay = 0.0;
    for (int s = splits - 1; s >= 0; --s) {
        const float* x = in + size_t(s) * STRIDE;
        const float here = x[HEAD_DIM] + float(decay);
        const float next = fmaxf(top, here);
        if (next != NEG_INF) {
            const float old = exp2f((top - next) * LOG2_E), weight = exp2f((here - next) * LOG2_E);
            sum = sum * old + x[HEAD_DIM + 1] * weight;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 32; ++i) all[i] = all[i] * old + x[lane + 32 * i] * weight;
            top = next;
        }
        decay += double(x[HEAD_DIM + 2]);
    }
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 32; ++i) o[lane + 32 * i] = all[i] / sum;
    finish_head(o, p, b, head);
}
