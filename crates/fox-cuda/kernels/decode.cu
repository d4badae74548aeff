// One new token for each of a few sequences: products of a few rows with weights, and attention over a
// cache. Both are bound by how fast memory is read, and by the time from one launch to the next: so the
// norm in front of a product is part of it, and so is all that happens to a head before attention.
//
// Compile-time: CHUNKS (pieces of 256 columns that a thread block reads at once), HEAD_DIM (64, 128 or 256).
#define BF16 1
#define VEC 8
#include "mma.cuh"
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
constexpr int BATCH = 8;   // columns of a matrix instruction
constexpr int TILE = 16;   // its rows

struct MatvecParams {
    // The input: rms(h + delta) * norm where there is a norm, else h. The first block writes the sum.
    const u16 *h, *delta;
    const float* norm;
    u16* sum;
    int width, batch;
    float eps;
    int part_count;
    // With `glu`, row n of the only part is paired with row n + rows: y = act(g) * u.
    int glu, act, tiles, unused;
    Part parts[MAX_PARTS];
};

// The input to shared memory, [batch][width] in bf16 as everywhere else.
DEVICE void load_input(u16* x, const MatvecParams& p) {
    float first_norm[8] = {};
    if (p.norm && 8 * int(threadIdx.x) < p.width) load<8>(first_norm, p.norm + 8 * threadIdx.x);
    wait_for_predecessor();
    for (int b = 0; b < p.batch; ++b) {
        u16* row = x + b * p.width;
        float squares = 0.f;
        for (int c = 8 * threadIdx.x; c < p.width; c += 8 * THREADS) {
            float v[8];
            load<8>(v, p.h + size_t(b) * p.width + c);
            if (p.delta) {
                float d[8];
                load<8>(d, p.delta + size_t(b) * p.width + c);
#pragma unroll
                for (int i = 0; i < 8; ++i) v[i] = to_float(to_real(v[i] + d[i]));
            }
            if (p.sum && blockIdx.x == 0) store<8>(p.sum + size_t(b) * p.width + c, v);
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

// 16 rows of one part; with `glu` eight gate rows and the eight up rows that belong to them.
struct Tile {
    const Part* part;
    int row;          // of the tile's first output
    const u16* top;   // rows lane / 4 of the tile's upper and lower half, or null beyond the last
    const u16* bottom;
};
DEVICE Tile find_tile(const MatvecParams& p, int n) {
    const int outputs = p.glu ? TILE / 2 : TILE;
    int part = 0;
    while (part + 1 < p.part_count && n >= (p.parts[part].rows + outputs - 1) / outputs) {
        n -= (p.parts[part++].rows + outputs - 1) / outputs;
    }
    const Part* found = p.parts + part;
    const int row = n * outputs, top = row + threadIdx.x % 32 / 4;
    const int bottom = p.glu ? top + found->rows : top + TILE / 2;
    const bool top_is = top < found->rows, bottom_is = p.glu ? top_is : bottom < found->rows;
    return Tile{found, row, top_is ? found->w + size_t(top) * p.width : nullptr,
                bottom_is ? found->w + size_t(bottom) * p.width : nullptr};
}

// Columns that a lane reads of a row in turn k of its warp: the warps of a block share a row, 32 columns
// each, a quarter of them to a lane.
DEVICE int column_of(int k) {
    return 32 * (k * WARPS + int(threadIdx.x) / 32) + 8 * (threadIdx.x % 4);
}

// CHUNKS turns from turn `first` on.
DEVICE void load_weights(uint4 (&w)[CHUNKS][2], const Tile& t, int first, int width) {
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        const int column = column_of(first + k);
        const uint4 zero = make_uint4(0, 0, 0, 0);
        const bool inside = column < width;
        w[k][0] = inside && t.top ? __ldcs(reinterpret_cast<const uint4*>(t.top + column)) : zero;
        w[k][1] = inside && t.bottom ? __ldcs(reinterpret_cast<const uint4*>(t.bottom + column)) : zero;
    }
}

// c[16 rows][8 sequences] += w x^T. A lane's eight columns are as good as any for the sum, so what it has
// read is the operand of two matrix instructions, if the right operand takes the same columns.
DEVICE void multiply(float (&c)[4], const uint4 (&w)[CHUNKS][2], const u16* x, int first,
                     const MatvecParams& p) {
    const int sequence = threadIdx.x % 32 / 4;
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        const int column = column_of(first + k);
        uint4 b = make_uint4(0, 0, 0, 0);
        if (sequence < p.batch && column < p.width) {
            b = *reinterpret_cast<const uint4*>(x + sequence * p.width + column);
        }
        const u32 left[4] = {w[k][0].x, w[k][1].x, w[k][0].y, w[k][1].y};
        const u32 right[4] = {w[k][0].z, w[k][1].z, w[k][0].w, w[k][1].w};
        mma(c, left, b.x, b.y);
        mma(c, right, b.z, b.w);
    }
}

// The warps' sums of one tile, added up and written.
DEVICE void finish_tile(float* sums, const float (&c)[4], const Tile& t, const MatvecParams& p) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* own = sums + warp * TILE * BATCH + lane / 4 * BATCH + 2 * (lane % 4);
    __syncthreads();
    own[0] = c[0], own[1] = c[1];
    own[TILE / 2 * BATCH] = c[2], own[TILE / 2 * BATCH + 1] = c[3];
    __syncthreads();
    const int row = threadIdx.x / BATCH, b = threadIdx.x % BATCH, outputs = p.glu ? TILE / 2 : TILE;
    if (row >= outputs || b >= p.batch || t.row + row >= t.part->rows) return;
    float sum = 0.f, other = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        sum += sums[(w * TILE + row) * BATCH + b];
        if (p.glu) other += sums[(w * TILE + row + TILE / 2) * BATCH + b];
    }
    if (p.glu) sum = activation(p.act, sum).x * other;
    if (t.part->bias) sum += t.part->bias[t.row + row];
    const size_t at = size_t(b) * t.part->rows + t.row + row;
    if (t.part->wide) static_cast<float*>(t.part->y)[at] = sum;
    else static_cast<u16*>(t.part->y)[at] = float_to_bf16(sum);
}

// A thread block takes tiles of 16 rows in turn; its warps share the columns. All of a tile that fits is on
// its way before anything else happens: weights do not depend on the launch in front.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    matvec(const __grid_constant__ MatvecParams p) {
    extern __shared__ __align__(16) u16 x[];
    __shared__ float sums[WARPS * TILE * BATCH];
    let_successor_start();
    uint4 w[CHUNKS][2];
    Tile t = find_tile(p, blockIdx.x);
    load_weights(w, t, 0, p.width);
    load_input(x, p);
    for (int n = blockIdx.x; n < p.tiles;) {
        float c[4] = {};
        multiply(c, w, x, 0, p);
        for (int k = CHUNKS; 32 * WARPS * k < p.width; k += CHUNKS) {
            load_weights(w, t, k, p.width);
            multiply(c, w, x, k, p);
        }
        const Tile done = t;
        n += gridDim.x;
        if (n < p.tiles) {
            t = find_tile(p, n);
            load_weights(w, t, 0, p.width);
        }
        finish_tile(sums, c, done, p);
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
    float new_k[HEAD_DIM], new_v[HEAD_DIM], new_gate[MAX_GROUP];
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
//
// Thread t has the gate `own` of key count - 1 - t: an ordinary prefix sum, without the key's own gate.
DEVICE float suffix_sums(float* s, float own, int count, float* parts) {
    const int t = threadIdx.x, lane = t % 32, warp = t / 32, key = count - 1 - t;
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
            const float gate = log_sigmoid(p.gate[size_t(b) * p.heads + head] + p.gate_bias[head]);
            p.gate_cache[newest * p.heads + head] = gate;
            sh.new_gate[g] = gate;
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
    // The gates of earlier steps, too: thread t has that of key count - 1 - t, in turn for each head.
    const int own_key = count - 1 - int(threadIdx.x);
    const bool has_gate = p.gate_cache && own_key >= 0 && own_key != newest;
    const float* gates = p.gate_cache + (base + max(own_key, 0)) * p.heads + kv_head * group;
    float gate = has_gate ? gates[0] : 0.f;
    wait_for_predecessor();
    get_ready(sh, p, kv_head, b, split == splits - 1);
    __syncthreads();
    for (int g = 0; g < group; ++g) {
        const int head = kv_head * group + g;
        float decay = 0.f;
        if (p.gate_cache) {
            if (own_key == newest) gate = sh.new_gate[g];
            decay = suffix_sums(sh.s[g], gate, count, sh.parts);
            if (has_gate && g + 1 < group) gate = gates[g + 1];
        } else if (int(threadIdx.x) < SPLIT) {
            sh.s[g][threadIdx.x] = 0.f;
        }
        __syncthreads();
        attend_head(sh, p, head, g, b, split, count, decay, keys, values, newest);
        __syncthreads();
    }
}

// Adds up the splits of a head, SPLIT_BLOCK of them at a time from the last to the first. Grid (heads,
// batch).
constexpr int SPLIT_BLOCK = THREADS;

extern "C" __global__ void __launch_bounds__(THREADS)
    attend_splits(const __grid_constant__ AttendParams p) {
    constexpr int STRIDE = HEAD_DIM + 4, GROUPS = THREADS / HEAD_DIM;
    __shared__ float o[HEAD_DIM], weights[SPLIT_BLOCK], parts[WARPS], columns[GROUPS][HEAD_DIM];
    let_successor_start();
    wait_for_predecessor();
    const int head = blockIdx.x, b = blockIdx.y, t = threadIdx.x;
    const int splits = (p.k_len[b] + SPLIT - 1) / SPLIT;
    const float* in = p.partial + (size_t(b) * p.heads + head) * p.splits * STRIDE;
    const int column = t % HEAD_DIM, group = t / HEAD_DIM;
    float all = 0.f, top = NEG_INF, sum = 0.f;
    double decay = 0.0;
    for (int end = splits; end > 0; end -= SPLIT_BLOCK) {
        const int first = max(end - SPLIT_BLOCK, 0), count = end - first, own = count - 1 - t;
        const float* x = in + size_t(first + max(own, 0)) * STRIDE + HEAD_DIM;
        // weights[s]: first the decay from split s to the end of the block, then its weight.
        const float block_decay = suffix_sums(weights, own >= 0 ? x[2] : 0.f, count, parts);
        __syncthreads();
        const float here = own >= 0 ? x[0] + weights[own] + float(decay) : NEG_INF;
        const float next = fmaxf(top, block_max<WARPS>(here));
        const float weight = here == NEG_INF ? 0.f : exp2f((here - next) * LOG2_E);
        const float old = next == NEG_INF ? 1.f : exp2f((top - next) * LOG2_E);
        sum = sum * old + block_sum<WARPS>(own >= 0 ? x[1] * weight : 0.f);
        if (own >= 0) weights[own] = weight;
        __syncthreads();
        all *= old;
#pragma unroll 4
        for (int s = group; s < count; s += GROUPS) {
            all = fmaf(weights[s], in[size_t(first + s) * STRIDE + column], all);
        }
        top = next;
        decay += double(block_decay);
        __syncthreads();
    }
    columns[group][column] = all;
    __syncthreads();
    if (t >= 32) return;
    for (int c = t; c < HEAD_DIM; c += 32) {
        float x = 0.f;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) x += columns[g][c];
        o[c] = x / sum;
    }
    finish_head(o, p, b, head);
}
