// The delta rule, S_t = a_t S_{t-1} + k_t (b_t e_t)^T with e_t = v_t - (a_t S_{t-1})^T k_t, in chunks of 64 tokens.
//
// With D_ij = a_{j+1} ... a_i (j <= i), p_i = a_1 ... a_i and s_j = a_{j+1} ... a_n of a chunk, and the triangular
// M = (I + strictly lower (K K^T * D) diag(b))^-1:
//
//     E = M V - Y S,   Y = M diag(p) K           writes of the chunk, given the state S before it
//     O = scale (diag(p) Q S + (Q K^T * D) diag(b) E)               S' = p_n S + K^T diag(s b) E
//
// Only S and E depend on the previous chunk. So M, Y and M V are computed in parallel over chunks (delta_prepare), then
// one thread block per head and 32 columns of the state iterates over the chunks with two products each (delta_states),
// then all outputs in parallel (delta_output). The backward, with G the gradient of the state after a chunk:
//
//     F = diag(b) (scale (Q K^T * D)^T dO + diag(s) K G)            delta_prepare_bwd, delta_states_bwd
//     G' = p_n G + scale Q^T diag(p) dO - Y^T F                     delta_states_bwd
//     dV = X = M^T F, and from X, E, S, G, dO everything else       delta_gradients
//
// With a decay per channel (CHANNEL) the decays do not factor out of the products of keys. Then scan_delta_channel.cu
// computes K K^T * D and Q K^T * D element by element, and diag(p) K, diag(s) K, diag(p) Q as tiles; the kernels here use
// those with p = s = D = 1, and its second kernel turns the gradients of these products and tiles into the rest.
//
// Scratch is laid out in tiles, one per chunk and head, of widths rounded up to DK and DV.
//
// Compile-time: BF16, VEC, DK and DV (multiples of 32), VALUE_COLUMNS (columns of values at a time in delta_prepare and
// delta_output), CHANNEL, STAGES, STAGES_BWD and STAGES_GRADIENTS (pipeline depths), NARROW (in the backward, tiles of
// keys share memory: for keys too wide to be held side by side), and the *_BYTES of shared memory that each kernel gets.
#pragma once
#define WARPS_ACROSS 2
#include "scan.cuh"
#include "triangular.cuh"

constexpr int CHUNK = 64;
constexpr int STATE_COLUMNS = 32;  // columns of the state per block of delta_states, and per step of delta_gradients
constexpr int KEYS = pitch(DK), COLUMNS = pitch(STATE_COLUMNS), SQUARE = pitch(CHUNK);  // pitches
// Writes are clamped away from zero by this, because the gradient of a write strength divides by it.
constexpr float LEAST_WRITE = 1e-20f;

// Chunk n of a segment.
DEVICE Chunk chunk_of(const ChunkedSegment& segment, int n) {
    return Chunk{segment.row + n * CHUNK, min(CHUNK, segment.rows - n * CHUNK)};
}

// One head of one chunk.
struct ChunkHead {
    Chunk chunk;
    int head, key_head;
    size_t tile;  // index of its scratch tiles
};
DEVICE ChunkHead chunk_head(const DeltaParams& p, int number, Chunk chunk, int head) {
    return ChunkHead{chunk, head, head / p.group, size_t(number) * p.x.heads + head};
}
// For kernels with grid (chunks, heads).
DEVICE ChunkHead chunk_head(const DeltaParams& p) {
    return chunk_head(p, blockIdx.x, p.chunks[blockIdx.x], blockIdx.y);
}
// First row of the chunk in queries or keys, and in values.
template <typename T>
DEVICE T* key_rows(T* x, const DeltaParams& p, const ChunkHead& at) {
    return x + at.chunk.row * key_stride(p.x) + at.key_head * p.x.key_dim;
}
template <typename T>
DEVICE T* value_rows(T* x, const DeltaParams& p, const ChunkHead& at) {
    return x + at.chunk.row * value_stride(p.x) + at.head * p.x.value_dim;
}
DEVICE void copy_keys(real* tile, const real* x, const DeltaParams& p, const ChunkHead& at) {
    copy_tile<CHUNK, DK>(tile, key_rows(x, p, at), at.chunk.rows, key_stride(p.x), p.x.key_dim);
}
// N columns from `column` on.
template <int N>
DEVICE void copy_values(real* tile, const real* x, const DeltaParams& p, const ChunkHead& at, int column) {
    copy_tile<CHUNK, N>(tile, value_rows(x, p, at) + column, at.chunk.rows, value_stride(p.x), p.x.value_dim - column);
}
// Copies ROWS x N elements of a scratch tile with rows of WIDTH elements.
template <int ROWS, int N, int WIDTH>
DEVICE void copy_scratch(real* tile, const real* x, const ChunkHead& at, int column) {
    copy_tile<ROWS, N>(tile, x + at.tile * ROWS * WIDTH + column, ROWS, WIDTH, N);
}
// Keys that read the state, keys that write it, and queries. Decays per channel are in them already.
DEVICE void copy_reading_keys(real* tile, const DeltaParams& p, const ChunkHead& at) {
    if constexpr (CHANNEL) copy_scratch<CHUNK, DK, DK>(tile, p.reading_keys, at, 0);
    else copy_keys(tile, p.x.k, p, at);
}
DEVICE void copy_writing_keys(real* tile, const DeltaParams& p, const ChunkHead& at) {
    if constexpr (CHANNEL) copy_scratch<CHUNK, DK, DK>(tile, p.writing_keys, at, 0);
    else copy_keys(tile, p.x.k, p, at);
}
DEVICE void copy_queries(real* tile, const DeltaParams& p, const ChunkHead& at) {
    if constexpr (CHANNEL) copy_scratch<CHUNK, DK, DK>(tile, p.reading_queries, at, 0);
    else copy_keys(tile, p.x.q, p, at);
}
// Stores an accumulator to a scratch tile.
template <int WIDTH, int ROWS, int N>
DEVICE void store_scratch(real* x, Accumulator<ROWS, N>& c, const ChunkHead& at, int column) {
    c.store(x + at.tile * ROWS * WIDTH + column, WIDTH);
}

// Decays and writes of a chunk: prefix sums of log decays, p, s, b.
struct alignas(16) Factors {
    float2 sums[CHUNK];
    float p[CHUNK], s[CHUNK], b[CHUNK];
};

// c *= D on and below the diagonal, undefined above it; a no-op without decays.
DEVICE void apply_decays(Accumulator<CHUNK, CHUNK>& c, const Factors& f, const DeltaParams& p) {
    if (!CHANNEL && p.x.log_decay) c.each([&](int i, int j, float& x) { x *= decay_between(f.sums[j], f.sums[i]); });
}

// Decay of row `i` of the state over the whole chunk.
DEVICE float whole_decay(const Factors& f, const DeltaParams& p, const ChunkHead& at, int i) {
    return CHANNEL ? p.whole[at.tile * DK + i] : f.p[CHUNK - 1];
}

// Computes the factors of a chunk and head, by the first warp.
DEVICE void make_factors(Factors& f, const DeltaParams& p, const ChunkHead& at) {
    const size_t first = size_t(at.chunk.row) * p.x.heads + at.head;
    decay_sums(f.sums, !CHANNEL && p.x.log_decay ? p.x.log_decay + first : nullptr, at.chunk.rows, CHUNK, p.x.heads);
    __syncwarp();
    for (int t = threadIdx.x; t < CHUNK; t += 32) {
        const float write = p.x.write && t < at.chunk.rows ? p.x.write[first + size_t(t) * p.x.heads] : 1.f;
        f.p[t] = decay_between(make_float2(0.f, 0.f), f.sums[t]);
        f.s[t] = decay_between(f.sums[t], f.sums[CHUNK - 1]);
        f.b[t] = fabsf(write) < LEAST_WRITE ? LEAST_WRITE : write;
    }
}
DEVICE void copy_factors(Factors& f, const DeltaParams& p, const ChunkHead& at) {
    const u16* from = reinterpret_cast<const u16*>(p.factors + at.tile * (sizeof(Factors) / 4));
    for_each_in_block<sizeof(Factors) / 16>(
        [&](int i) { copy_async(reinterpret_cast<u16*>(&f) + 8 * i, from + 8 * i, true); });
}

// tile[CHUNK][CHUNK] = factor(j) (Q K^T * D)_ij, zero above the diagonal. `q` and `k` are tiles.
template <typename F>
DEVICE void load_scores(real* tile, const real* q, const real* k, const Factors& f, const DeltaParams& p,
                        const ChunkHead& at, F factor) {
    if constexpr (CHANNEL) {
        for_each_in_block<CHUNK * CHUNK>([&](int n) {
            const int i = n / CHUNK, j = n % CHUNK;
            const float x = j <= i ? factor(j) * p.scores[at.tile * CHUNK * CHUNK + n] : 0.f;
            tile[i * SQUARE + j] = to_real(x);
        });
    } else {
        Accumulator<CHUNK, CHUNK> scores = {};
        scores.template add<DK, RowMajor, Transposed>(q, KEYS, k, KEYS);
        apply_decays(scores, f, p);
        scores.each([&](int i, int j, float& x) { x = j <= i ? factor(j) * x : 0.f; });
        scores.store(tile, SQUARE);
    }
}

struct PrepareShared {
    alignas(16) real k[tile_size(CHUNK, DK)];
    alignas(16) real values[tile_size(CHUNK, VALUE_COLUMNS)];
    // The triangular system; in the backward reused for scale Q K^T * D.
    alignas(16) float system[CHUNK * SYSTEM];
    alignas(16) float inverse[CHUNK * SYSTEM];
    alignas(16) real m[tile_size(CHUNK, CHUNK)], mp[tile_size(CHUNK, CHUNK)];  // M, M diag(p)
    Factors factors;
    alignas(16) real q[tile_size(CHUNK, DK)];  // backward only: not allocated in the forward
};
static_assert(sizeof(PrepareShared) <= PREPARE_BYTES);
static_assert(sizeof(real) * SQUARE <= sizeof(float) * SYSTEM);

// Computes factors, M and Y of a chunk and head whose keys are being copied. M is in `sh.m` after the next barrier.
DEVICE void prepare(PrepareShared& sh, const DeltaParams& p, const ChunkHead& at) {
    const Factors& f = sh.factors;
    if (threadIdx.x < 32) make_factors(sh.factors, p, at);
    copy_wait<0>();
    __syncthreads();
    for_each_in_block<sizeof(Factors) / 4>([&](int i) {
        p.factors[at.tile * (sizeof(Factors) / 4) + i] = reinterpret_cast<const float*>(&f)[i];
    });
    if constexpr (CHANNEL) {
        for_each_in_block<CHUNK * CHUNK>([&](int n) {
            const int i = n / CHUNK, j = n % CHUNK;
            sh.system[i * SYSTEM + j] = j < i ? p.overlaps[at.tile * CHUNK * CHUNK + n] * f.b[j] : 0.f;
        });
    } else {
        Accumulator<CHUNK, CHUNK> overlaps = {};
        overlaps.template add<DK, RowMajor, Transposed>(sh.k, KEYS, sh.k, KEYS);
        apply_decays(overlaps, f, p);
        overlaps.each([&](int i, int j, float x) { sh.system[i * SYSTEM + j] = j < i ? x * f.b[j] : 0.f; });
    }
    __syncthreads();
    invert(sh.inverse, sh.system);
    for_each_in_block<CHUNK * CHUNK / 4>([&](int n) {
        const int i = n / (CHUNK / 4), j = n % (CHUNK / 4) * 4;
        float x[4] = {}, scaled[4];
        if (j / 16 <= i / 16) load<4>(x, sh.inverse + i * SYSTEM + j);
#pragma unroll
        for (int e = 0; e < 4; ++e) scaled[e] = x[e] * f.p[j + e];
        store<4>(sh.m + i * SQUARE + j, x);
        store<4>(sh.mp + i * SQUARE + j, scaled);
    });
    __syncthreads();
    Accumulator<CHUNK, DK> y = {};
    y.template add<CHUNK, RowMajor, RowMajor>(sh.mp, SQUARE, sh.k, KEYS);
    store_scratch<DK>(p.y, y, at, 0);
}

// Software pipeline of STAGE_COUNT stages: `prefetch(n)` issues the copies of step n. pipeline_wait(n) returns when
// they have arrived; pipeline_refill(n), later in the same step, issues those of step n + STAGE_COUNT - 1.
template <int STAGE_COUNT, typename F>
DEVICE void pipeline_begin(int count, F prefetch) {
#pragma unroll
    for (int n = 0; n + 1 < STAGE_COUNT; ++n) {
        if (n < count) prefetch(n);
        copy_commit();
    }
}
template <int STAGE_COUNT, typename F>
DEVICE void pipeline_wait(int n, F prefetch) {
    if constexpr (STAGE_COUNT == 1) {
        __syncthreads();
        prefetch(n);
        copy_commit();
        copy_wait<0>();
    } else {
        copy_wait<STAGE_COUNT - 2>();
    }
    __syncthreads();
}
template <int STAGE_COUNT, typename F>
DEVICE void pipeline_refill(int n, int count, F prefetch) {
    if constexpr (STAGE_COUNT > 1) {
        if (n + STAGE_COUNT - 1 < count) prefetch(n + STAGE_COUNT - 1);
        copy_commit();
    }
}

// The state columns of a block of delta_states.
typedef Accumulator<DK, STATE_COLUMNS> State;
// In kernels with grid (DV / 32, heads, segments): calls f(element, index in [segments, H, dk, dv]) for the elements of
// the state that are not padding.
template <typename F>
DEVICE void each_element(State& state, const DeltaParams& p, F f) {
    const int column = blockIdx.x * STATE_COLUMNS, width = p.x.value_dim;
    const size_t first = (size_t(blockIdx.z) * p.x.heads + blockIdx.y) * p.x.key_dim * width + column;
    state.each([&](int i, int j, float& x) {
        if (i < p.x.key_dim && column + j < width) f(x, first + size_t(i) * width + j);
    });
}
// Stores the bf16 or f32 tile of the state to device memory.
DEVICE void store_state(real* out, const real* tile) {
    constexpr int VECTORS = STATE_COLUMNS / VECTOR;
    for_each_in_block<DK * VECTORS>([&](int i) {
        const int row = i / VECTORS, column = i % VECTORS * VECTOR;
        *reinterpret_cast<uint4*>(out + row * DV + column) =
            *reinterpret_cast<const uint4*>(tile + row * COLUMNS + column);
    });
}
