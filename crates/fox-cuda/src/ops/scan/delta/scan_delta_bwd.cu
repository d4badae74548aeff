// The delta rule backward; the algorithm is described in scan_delta.cuh.
#include "scan_delta.cuh"

// Grid (chunks, heads): factors, M, Y, and scale (Q K^T * D)^T dO in `d_errors`.
extern "C" __global__ void __launch_bounds__(THREADS) delta_prepare_bwd(const DeltaParams p) {
    extern __shared__ __align__(16) u8 memory[];
    PrepareShared& sh = *reinterpret_cast<PrepareShared*>(memory);
    const ChunkHead at = chunk_head(p);
    copy_reading_keys(sh.k, p, at);
    if (!CHANNEL) copy_keys(sh.q, p.x.q, p, at);
    copy_values<VALUE_COLUMNS>(sh.values, p.x.d_out, p, at, 0);
    copy_commit();
    prepare(sh, p, at);
    for_each_in_block<CHUNK * CHUNK / VECTOR>([&](int n) {
        const uint4* from = reinterpret_cast<const uint4*>(sh.m + n / (CHUNK / VECTOR) * SQUARE) + n % (CHUNK / VECTOR);
        reinterpret_cast<uint4*>(p.inverse + at.tile * CHUNK * CHUNK)[n] = *from;
    });
    real* tile = reinterpret_cast<real*>(sh.system);
    load_scores(tile, sh.q, sh.k, sh.factors, p, at, [&](int) { return p.x.scale; });
    for (int column = 0; column < DV; column += VALUE_COLUMNS) {
        if (column > 0) {
            __syncthreads();
            copy_values<VALUE_COLUMNS>(sh.values, p.x.d_out, p, at, column);
            copy_commit();
            copy_wait<0>();
        }
        __syncthreads();
        Accumulator<CHUNK, VALUE_COLUMNS> d = {};
        d.template add<CHUNK, Transposed, RowMajor>(tile, SQUARE, sh.values, pitch(VALUE_COLUMNS));
        store_scratch<DV>(p.d_errors, d, at, column);
    }
}

struct StatesBwdShared {
    struct Stage {
        // Writing keys, queries and Y; with NARROW one after the other.
        alignas(16) real keys[NARROW ? 1 : 3][tile_size(CHUNK, DK)];
        alignas(16) real d_errors[tile_size(CHUNK, STATE_COLUMNS)], d_out[tile_size(CHUNK, STATE_COLUMNS)];
        Factors factors;
    } stages[STAGES_BWD];
    alignas(16) real d_state[tile_size(DK, STATE_COLUMNS)];
    alignas(16) real reads[tile_size(CHUNK, STATE_COLUMNS)], writes[tile_size(CHUNK, STATE_COLUMNS)];
};
static_assert(sizeof(StatesBwdShared) <= STATES_BWD_BYTES);

// Grid (DV / 32, heads, segments): G of all chunks, F, and the gradient of the state before each segment.
extern "C" __global__ void __launch_bounds__(THREADS) delta_states_bwd(const DeltaParams p) {
    extern __shared__ __align__(16) u8 memory[];
    StatesBwdShared& sh = *reinterpret_cast<StatesBwdShared*>(memory);
    const int column0 = blockIdx.x * STATE_COLUMNS, head = blockIdx.y;
    const ChunkedSegment segment = p.segments[blockIdx.z];
    State d_state = {};
    if (p.d_last) each_element(d_state, p, [&](float& x, size_t at) { x = p.d_last[at]; });
    d_state.store(sh.d_state, COLUMNS);
    // Chunks from the last to the first.
    auto chunk = [&](int n) {
        const int m = segment.count - 1 - n;
        return chunk_head(p, segment.first + m, chunk_of(segment, m), head);
    };
    auto copy_tile_of = [&](int which, real* tile, const ChunkHead& at) {
        if (which == 0) copy_writing_keys(tile, p, at);
        else if (which == 1) copy_queries(tile, p, at);
        else copy_scratch<CHUNK, DK, DK>(tile, p.y, at, 0);
    };
    // Tile 1 or 2 of a stage. With NARROW it replaces the one before, whose readers are waited for.
    auto tile_of = [&](int which, StatesBwdShared::Stage& stage, const ChunkHead& at) -> const real* {
        if constexpr (!NARROW) return stage.keys[which];
        __syncthreads();
        copy_tile_of(which, stage.keys[0], at);
        copy_commit();
        copy_wait<0>();
        __syncthreads();
        return stage.keys[0];
    };
    auto prefetch = [&](int n) {
        const ChunkHead at = chunk(n);
        StatesBwdShared::Stage& stage = sh.stages[n % STAGES_BWD];
#pragma unroll
        for (int which = 0; which < (NARROW ? 1 : 3); ++which) copy_tile_of(which, stage.keys[which], at);
        copy_scratch<CHUNK, STATE_COLUMNS, DV>(stage.d_errors, p.d_errors, at, column0);
        copy_values<STATE_COLUMNS>(stage.d_out, p.x.d_out, p, at, column0);
        copy_factors(stage.factors, p, at);
    };
    pipeline_begin<STAGES_BWD>(segment.count, prefetch);
    for (int n = 0; n < segment.count; ++n) {
        pipeline_wait<STAGES_BWD>(n, prefetch);
        StatesBwdShared::Stage& stage = sh.stages[n % STAGES_BWD];
        const Factors& f = stage.factors;
        const ChunkHead at = chunk(n);
        Accumulator<CHUNK, STATE_COLUMNS> d = {};
        d.template add<DK, RowMajor, RowMajor>(stage.keys[0], KEYS, sh.d_state, COLUMNS);
        // Overlaps with the mma latency.
        pipeline_refill<STAGES_BWD>(n, segment.count, prefetch);
        store_state(p.d_states + at.tile * DK * DV + column0, sh.d_state);
        for_each_in_block<CHUNK * STATE_COLUMNS / VECTOR>([&](int i) {
            const int row = i / (STATE_COLUMNS / VECTOR), here = row * COLUMNS + i % (STATE_COLUMNS / VECTOR) * VECTOR;
            float x[VECTOR];
            load<VECTOR>(x, stage.d_out + here);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) x[e] *= p.x.scale * f.p[row];
            store<VECTOR>(sh.reads + here, x);
        });
        d.each_pair([&](int i, int j, float& x, float& y) {
            const float2 inside = load_pair(stage.d_errors + i * COLUMNS + j);
            x = f.b[i] * (inside.x + f.s[i] * x), y = f.b[i] * (inside.y + f.s[i] * y);
        });
        store_scratch<DV>(p.d_errors, d, at, column0);
        d.each([](int, int, float& x) { x = -x; });
        d.store(sh.writes, COLUMNS);
        __syncthreads();
        d_state.each([&](int i, int, float& x) { x *= whole_decay(f, p, at, i); });
        d_state.template add<CHUNK, Transposed, RowMajor>(tile_of(1, stage, at), KEYS, sh.reads, COLUMNS);
        d_state.template add<CHUNK, Transposed, RowMajor>(tile_of(2, stage, at), KEYS, sh.writes, COLUMNS);
        d_state.store(sh.d_state, COLUMNS);
    }
    if (p.d_first) each_element(d_state, p, [&](float x, size_t at) { p.d_first[at] = x; });
}

static_assert(!NARROW || (STAGES_BWD == 1 && STAGES_GRADIENTS == 1));

struct GradientsShared {
    struct Stage {
        alignas(16) real state[tile_size(DK, STATE_COLUMNS)], d_state[tile_size(DK, STATE_COLUMNS)];
        alignas(16) real d_out[tile_size(CHUNK, STATE_COLUMNS)], errors[tile_size(CHUNK, STATE_COLUMNS)];
        alignas(16) real d_errors[tile_size(CHUNK, STATE_COLUMNS)];
    };
    struct Keys {
        alignas(16) real q[tile_size(CHUNK, DK)], k[tile_size(CHUNK, DK)];
    };
    // With NARROW, queries and keys replace the stages, after the last of them was read.
    static constexpr size_t BOTH = STAGES_GRADIENTS * sizeof(Stage) + sizeof(Keys);
    static constexpr size_t LARGER = sizeof(Stage) > sizeof(Keys) ? sizeof(Stage) : sizeof(Keys);
    alignas(16) u8 first[NARROW ? LARGER : BOTH];
    alignas(16) real inverse[tile_size(CHUNK, CHUNK)];
    alignas(16) real x[tile_size(CHUNK, STATE_COLUMNS)];
    // Gradients of Q K^T and of K K^T.
    alignas(16) real d_scores[tile_size(CHUNK, CHUNK)], d_overlaps[tile_size(CHUNK, CHUNK)];
    Factors factors;
    // Partial row sums, one per column of warps, and partial column sums, one per row of warps.
    float dwrite[WARP_COLUMNS * CHUNK], given[WARP_COLUMNS * CHUNK], received[3][WARP_COLUMNS * CHUNK];
    float passed[WARP_ROWS][CHUNK];

    DEVICE Stage& stage(int n) { return reinterpret_cast<Stage*>(first)[n % STAGES_GRADIENTS]; }
    DEVICE Keys& keys() {
        return *reinterpret_cast<Keys*>(first + (NARROW ? 0 : STAGES_GRADIENTS * sizeof(Stage)));
    }
};
static_assert(sizeof(GradientsShared) <= GRADIENTS_BYTES);

// Accumulators over the columns of values, STATE_COLUMNS at a time.
struct Sums {
    Accumulator<CHUNK, CHUNK> d_scores, d_overlaps;       // dO E^T, X E^T
    Accumulator<CHUNK, DK> dq, dk_end, dk_start;          // dO S^T, E G^T, X S^T
    float dwrite[2], through, dskip;                  // rows of X * E; S * G, dO * V
};

// X = M^T F of the next columns, and all sums over these columns.
DEVICE void add_slice(Sums& sums, GradientsShared& sh, const GradientsShared::Stage& stage, const DeltaParams& p,
                      const ChunkHead& at, int column) {
    const int width = p.x.value_dim - column;
    Accumulator<CHUNK, STATE_COLUMNS> x = {};
    x.template add<CHUNK, Transposed, RowMajor>(sh.inverse, SQUARE, stage.d_errors, COLUMNS);
    x.store(sh.x, COLUMNS);
#pragma unroll
    for (int g = 0; g < x.FN; ++g) {
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            const float2 error = load_pair(stage.errors + x.row_of(0, e) * COLUMNS + x.column_of(g, e));
            sums.dwrite[e / 2] += x.c[0][g][e] * error.x + x.c[0][g][e + 1] * error.y;
        }
    }
    if (p.x.skip) {
        const float skip = p.x.skip[at.head];
        const real* v = value_rows(p.x.v, p, at) + column;
        x.each([&](int i, int j, float& e) {
            if (i >= at.chunk.rows || j >= width) return;
            const float d = to_float(stage.d_out[i * COLUMNS + j]);
            e += skip * d;
            sums.dskip += d * to_float(v[i * value_stride(p.x) + j]);
        });
    }
    x.store_rows(value_rows(p.dv, p, at) + column, at.chunk.rows, value_stride(p.x), width);
    if (!CHANNEL && p.dlog_decay) {
        for_each_in_block<DK * STATE_COLUMNS / VECTOR>([&](int n) {
            const int here = n / (STATE_COLUMNS / VECTOR) * COLUMNS + n % (STATE_COLUMNS / VECTOR) * VECTOR;
            float s[VECTOR], g[VECTOR];
            load<VECTOR>(s, stage.state + here);
            load<VECTOR>(g, stage.d_state + here);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) sums.through += s[e] * g[e];
        });
    }
    sums.dq.template add<STATE_COLUMNS, RowMajor, Transposed>(stage.d_out, COLUMNS, stage.state, COLUMNS);
    sums.dk_end.template add<STATE_COLUMNS, RowMajor, Transposed>(stage.errors, COLUMNS, stage.d_state, COLUMNS);
    sums.d_scores.template add<STATE_COLUMNS, RowMajor, Transposed>(stage.d_out, COLUMNS, stage.errors, COLUMNS);
    __syncthreads();
    sums.d_overlaps.template add<STATE_COLUMNS, RowMajor, Transposed>(sh.x, COLUMNS, stage.errors, COLUMNS);
    sums.dk_start.template add<STATE_COLUMNS, RowMajor, Transposed>(sh.x, COLUMNS, stage.state, COLUMNS);
}

// Flows that decays multiply: from tokens to the state after the chunk (given), from the state before it and from
// earlier tokens (received), and to later tokens (passed).
DEVICE void decay_flows(Sums& sums, GradientsShared& sh) {
    auto with = [](const real* keys) {
        return [=](int i, int j, float x) { return x * to_float(keys[i * KEYS + j]); };
    };
    const real *q = sh.keys().q, *k = sh.keys().k;
    sums.dk_end.row_sums(sh.given, with(k));
    sums.dq.row_sums(sh.received[0], with(q));
    sums.dk_start.row_sums(sh.received[1], with(k));
    Accumulator<CHUNK, CHUNK> flow = {}, other = {};
    flow.template add<DK, RowMajor, Transposed>(q, KEYS, k, KEYS);
    other.template add<DK, RowMajor, Transposed>(k, KEYS, k, KEYS);
    constexpr int GROUPS = Accumulator<CHUNK, CHUNK>::FN;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            // The diagonal does not decay.
            const bool own = flow.row_of(0, e) == flow.column_of(g, e);
            const float scores = own ? 0.f : flow.c[0][g][e] * sums.d_scores.c[0][g][e];
            flow.c[0][g][e] = scores + other.c[0][g][e] * sums.d_overlaps.c[0][g][e];
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float sum = flow.c[0][g][e] + flow.c[0][g][e + 2];
#pragma unroll
            for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
            if (threadIdx.x % 32 < 4) sh.passed[flow.warp_row()][flow.column_of(g, e)] = sum;
        }
    }
    flow.row_sums(sh.received[2], [](int, int, float x) { return x; });
}

// The gradient of the log decay of token t is the total flow from before t to t and later: from the state before the
// chunk to the one after it (`through`), from tokens before t to the latter, from the former to later tokens, and
// between tokens of the chunk. By one warp.
DEVICE void store_decay_gradient(const GradientsShared& sh, const DeltaParams& p, const ChunkHead& at, float through) {
    const int lane = threadIdx.x;
    float given[2], received[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int t = 2 * lane + i;
        given[i] = Accumulator<CHUNK, DK>::finish_row_sum(sh.given, t);
        received[i] = 0.f;
        for (int n = 0; n < 3; ++n) received[i] += Accumulator<CHUNK, DK>::finish_row_sum(sh.received[n], t);
        for (int w = 0; w < WARP_ROWS; ++w) received[i] -= sh.passed[w][t];
    }
    const float own = given[0] + given[1];
    float before = own, after = received[0] + received[1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float x = __shfl_up_sync(~0u, before, step), y = __shfl_down_sync(~0u, after, step);
        if (lane >= step) before += x;
        if (lane + step < 32) after += y;
    }
    before += through - own;
    const float sums[2] = {before + after, before + given[0] + after - received[0]};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int t = 2 * lane + i;
        if (t < at.chunk.rows) p.dlog_decay[size_t(at.chunk.row + t) * p.x.heads + at.head] = sums[i];
    }
}

// Stores gradients of queries or keys: final, or this head's term of the sum over heads that share keys.
DEVICE void store_keys(real* x, float* parts, const DeltaParams& p, const ChunkHead& at, Accumulator<CHUNK, DK>& d) {
    if (!parts) return d.store_rows(key_rows(x, p, at), at.chunk.rows, key_stride(p.x), p.x.key_dim);
    float* first = parts + (size_t(at.chunk.row) * p.x.heads + at.head) * p.x.key_dim;
    d.each([&](int i, int j, float x) {
        if (i < at.chunk.rows && j < p.x.key_dim) first[size_t(i) * p.x.heads * p.x.key_dim + j] = x;
    });
}

// Stores an accumulator to a scratch tile of rows of N floats.
template <int N>
DEVICE void store_floats(float* x, Accumulator<CHUNK, N>& c, const ChunkHead& at) {
    c.each([&](int i, int j, float value) { x[(at.tile * CHUNK + i) * N + j] = value; });
}
// Stores the gradients of the decayed tiles and products for delta_channel_gradients.
DEVICE void store_channel_gradients(Sums& sums, const DeltaParams& p, const ChunkHead& at) {
    store_floats<DK>(p.d_reading_queries, sums.dq, at);
    store_floats<DK>(p.d_writing_keys, sums.dk_end, at);
    store_floats<DK>(p.d_reading_keys, sums.dk_start, at);
    store_floats<CHUNK>(p.d_scores, sums.d_scores, at);
    store_floats<CHUNK>(p.d_overlaps, sums.d_overlaps, at);
}

// Grid (chunks, heads): all gradients, from the states, E, G, M and F.
extern "C" __global__ void __launch_bounds__(THREADS) delta_gradients(const DeltaParams p) {
    extern __shared__ __align__(16) u8 memory[];
    GradientsShared& sh = *reinterpret_cast<GradientsShared*>(memory);
    const ChunkHead at = chunk_head(p);
    const Factors& f = sh.factors;
    constexpr int SLICES = DV / STATE_COLUMNS;
    auto prefetch = [&](int n) {
        GradientsShared::Stage& stage = sh.stage(n);
        const int column = n * STATE_COLUMNS;
        if (n == 0) {
            copy_scratch<CHUNK, CHUNK, CHUNK>(sh.inverse, p.inverse, at, 0);
            copy_factors(sh.factors, p, at);
        }
        copy_scratch<DK, STATE_COLUMNS, DV>(stage.state, p.states, at, column);
        copy_scratch<DK, STATE_COLUMNS, DV>(stage.d_state, p.d_states, at, column);
        copy_values<STATE_COLUMNS>(stage.d_out, p.x.d_out, p, at, column);
        copy_scratch<CHUNK, STATE_COLUMNS, DV>(stage.errors, p.errors, at, column);
        copy_scratch<CHUNK, STATE_COLUMNS, DV>(stage.d_errors, p.d_errors, at, column);
        if (!NARROW && n == SLICES - 1) {
            copy_keys(sh.keys().q, p.x.q, p, at);
            copy_keys(sh.keys().k, p.x.k, p, at);
        }
    };
    Sums sums = {};
    pipeline_begin<STAGES_GRADIENTS>(SLICES, prefetch);
#pragma unroll 1
    for (int n = 0; n < SLICES; ++n) {
        pipeline_wait<STAGES_GRADIENTS>(n, prefetch);
        pipeline_refill<STAGES_GRADIENTS>(n, SLICES, prefetch);
        add_slice(sums, sh, sh.stage(n), p, at, n * STATE_COLUMNS);
    }
    if (NARROW && !CHANNEL) {
        __syncthreads();
        copy_keys(sh.keys().q, p.x.q, p, at);
        copy_keys(sh.keys().k, p.x.k, p, at);
        copy_commit();
        copy_wait<0>();
        __syncthreads();
    }
    sums.dq.each([&](int i, int, float& x) { x *= p.x.scale * f.p[i]; });
    sums.dk_end.each([&](int i, int, float& x) { x *= f.s[i] * f.b[i]; });
    sums.dk_start.each([&](int i, int, float& x) { x *= -f.p[i]; });
    apply_decays(sums.d_scores, f, p);
    apply_decays(sums.d_overlaps, f, p);
    sums.d_scores.each([&](int i, int j, float& x) { x = j <= i ? p.x.scale * f.b[j] * x : 0.f; });
    sums.d_overlaps.each([&](int i, int j, float& x) { x = j < i ? -f.b[j] * x : 0.f; });
    sums.d_scores.store(sh.d_scores, SQUARE);
    sums.d_overlaps.store(sh.d_overlaps, SQUARE);
    Accumulator<CHUNK, STATE_COLUMNS>::store_row_partials(sh.dwrite, sums.dwrite);
    if (!CHANNEL && p.dlog_decay) decay_flows(sums, sh);
    const float through = !CHANNEL && p.dlog_decay ? f.p[CHUNK - 1] * block_sum<THREADS / 32>(sums.through) : 0.f;
    const float dskip = p.dskip ? block_sum<THREADS / 32>(sums.dskip) : 0.f;
    __syncthreads();
    if (!CHANNEL && p.dlog_decay && threadIdx.x < 32) store_decay_gradient(sh, p, at, through);
    if (p.dskip && threadIdx.x == 0) p.dskip[at.tile] = dskip;
    if (p.dwrite && threadIdx.x < at.chunk.rows) {
        const int t = threadIdx.x;
        const float sum = Accumulator<CHUNK, STATE_COLUMNS>::finish_row_sum(sh.dwrite, t);
        p.dwrite[size_t(at.chunk.row + t) * p.x.heads + at.head] = sum / f.b[t];
    }
    if constexpr (CHANNEL) return store_channel_gradients(sums, p, at);
    const real *q = sh.keys().q, *k = sh.keys().k;
    sums.dq.template add<CHUNK, RowMajor, RowMajor>(sh.d_scores, SQUARE, k, KEYS);
    store_keys(p.dq, p.dq_parts, p, at, sums.dq);
    Accumulator<CHUNK, DK>& dk = sums.dk_end;
    dk.plus(sums.dk_start);
    dk.template add<CHUNK, Transposed, RowMajor>(sh.d_scores, SQUARE, q, KEYS);
    dk.template add<CHUNK, RowMajor, RowMajor>(sh.d_overlaps, SQUARE, k, KEYS);
    dk.template add<CHUNK, Transposed, RowMajor>(sh.d_overlaps, SQUARE, k, KEYS);
    store_keys(p.dk, p.dk_parts, p, at, dk);
}

// out[row][group of keys][dk] = sum of parts[row][head][dk] over the heads that share the keys.
extern "C" __global__ void delta_share_keys(PARAMS(ShareKeys)) {
    const size_t step = size_t(gridDim.x) * blockDim.x;
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        const float* own = parts + i / p.x.key_dim * p.group * p.x.key_dim + i % p.x.key_dim;
        float sum = 0.f;
        for (int h = 0; h < p.group; ++h) sum += own[size_t(h) * p.x.key_dim];
        out[i] = to_real(sum);
    }
}
