// The delta rule forward; the algorithm is described in scan_delta.cuh.
#include "scan_delta.cuh"

// Grid (chunks, heads): factors, Y, and M V in `errors`.
extern "C" __global__ void __launch_bounds__(THREADS) delta_prepare(const DeltaParams p) {
    extern __shared__ __align__(16) u8 memory[];
    PrepareShared& sh = *reinterpret_cast<PrepareShared*>(memory);
    const ChunkHead at = chunk_head(p);
    copy_reading_keys(sh.k, p, at);
    copy_values<VALUE_COLUMNS>(sh.values, p.x.v, p, at, 0);
    copy_commit();
    prepare(sh, p, at);
    for (int column = 0; column < DV; column += VALUE_COLUMNS) {
        if (column > 0) {
            __syncthreads();
            copy_values<VALUE_COLUMNS>(sh.values, p.x.v, p, at, column);
            copy_commit();
            copy_wait<0>();
            __syncthreads();
        }
        Accumulator<CHUNK, VALUE_COLUMNS> u = {};
        u.template add<CHUNK, RowMajor, RowMajor>(sh.m, SQUARE, sh.values, pitch(VALUE_COLUMNS));
        store_scratch<DV>(p.errors, u, at, column);
    }
}

struct StatesShared {
    struct Stage {
        alignas(16) real y[tile_size(CHUNK, DK)], k[tile_size(CHUNK, DK)];
        alignas(16) real u[tile_size(CHUNK, STATE_COLUMNS)];
        Factors factors;
    } stages[STAGES];
    alignas(16) real state[tile_size(DK, STATE_COLUMNS)];
    alignas(16) real writes[tile_size(CHUNK, STATE_COLUMNS)];
};
static_assert(sizeof(StatesShared) <= STATES_BYTES);

// Grid (DV / 32, heads, segments): the states before all chunks, and E.
extern "C" __global__ void __launch_bounds__(THREADS) delta_states(const DeltaParams p) {
    extern __shared__ __align__(16) u8 memory[];
    StatesShared& sh = *reinterpret_cast<StatesShared*>(memory);
    const int column0 = blockIdx.x * STATE_COLUMNS, head = blockIdx.y;
    const ChunkedSegment segment = p.segments[blockIdx.z];
    State state = {};
    if (p.x.state) each_element(state, p, [&](float& x, size_t at) { x = p.x.state[at]; });
    state.store(sh.state, COLUMNS);
    auto prefetch = [&](int n) {
        const ChunkHead at = chunk_head(p, segment.first + n, chunk_of(segment, n), head);
        StatesShared::Stage& stage = sh.stages[n % STAGES];
        copy_scratch<CHUNK, DK, DK>(stage.y, p.y, at, 0);
        copy_writing_keys(stage.k, p, at);
        copy_scratch<CHUNK, STATE_COLUMNS, DV>(stage.u, p.errors, at, column0);
        copy_factors(stage.factors, p, at);
    };
    pipeline_begin<STAGES>(segment.count, prefetch);
    for (int n = 0; n < segment.count; ++n) {
        pipeline_wait<STAGES>(n, prefetch);
        const StatesShared::Stage& stage = sh.stages[n % STAGES];
        const Factors& f = stage.factors;
        const ChunkHead at = chunk_head(p, segment.first + n, chunk_of(segment, n), head);
        Accumulator<CHUNK, STATE_COLUMNS> e = {};
        e.template add<DK, RowMajor, RowMajor>(stage.y, KEYS, sh.state, COLUMNS);
        // Overlaps with the mma latency.
        pipeline_refill<STAGES>(n, segment.count, prefetch);
        store_state(p.states + at.tile * DK * DV + column0, sh.state);
        e.each_pair([&](int i, int j, float& x, float& y) {
            const float2 u = load_pair(stage.u + i * COLUMNS + j);
            x = u.x - x, y = u.y - y;
        });
        store_scratch<DV>(p.errors, e, at, column0);
        e.each([&](int i, int, float& x) { x *= f.s[i] * f.b[i]; });
        e.store(sh.writes, COLUMNS);
        __syncthreads();
        state.each([&](int i, int, float& x) { x *= whole_decay(f, p, at, i); });
        state.template add<CHUNK, Transposed, RowMajor>(stage.k, KEYS, sh.writes, COLUMNS);
        state.store(sh.state, COLUMNS);
    }
    if (p.last_state) each_element(state, p, [&](float x, size_t at) { p.last_state[at] = x; });
}

struct OutputShared {
    alignas(16) real q[tile_size(CHUNK, DK)], k[tile_size(CHUNK, DK)];
    alignas(16) real state[tile_size(DK, VALUE_COLUMNS)];
    alignas(16) real errors[tile_size(CHUNK, VALUE_COLUMNS)];
    alignas(16) real scores[tile_size(CHUNK, CHUNK)];
    Factors factors;
};
static_assert(sizeof(OutputShared) <= OUTPUT_BYTES);

// Grid (chunks, heads): the output, from the states and E.
extern "C" __global__ void __launch_bounds__(THREADS) delta_output(const DeltaParams p) {
    extern __shared__ __align__(16) u8 memory[];
    OutputShared& sh = *reinterpret_cast<OutputShared*>(memory);
    const ChunkHead at = chunk_head(p);
    const Factors& f = sh.factors;
    auto prefetch = [&](int column) {
        copy_scratch<DK, VALUE_COLUMNS, DV>(sh.state, p.states, at, column);
        copy_scratch<CHUNK, VALUE_COLUMNS, DV>(sh.errors, p.errors, at, column);
        copy_commit();
    };
    copy_queries(sh.q, p, at);
    if (!CHANNEL) copy_keys(sh.k, p.x.k, p, at);
    copy_factors(sh.factors, p, at);
    copy_commit();
    prefetch(0);
    copy_wait<1>();
    __syncthreads();
    load_scores(sh.scores, sh.q, sh.k, f, p, at, [&](int j) { return f.b[j]; });
    const float skip = p.x.skip ? p.x.skip[at.head] : 0.f;
    for (int column = 0; column < DV; column += VALUE_COLUMNS) {
        if (column > 0) {
            __syncthreads();
            prefetch(column);
        }
        copy_wait<0>();
        __syncthreads();
        Accumulator<CHUNK, VALUE_COLUMNS> o = {};
        o.template add<DK, RowMajor, RowMajor>(sh.q, KEYS, sh.state, pitch(VALUE_COLUMNS));
        o.each([&](int i, int, float& x) { x *= f.p[i]; });
        o.template add<CHUNK, RowMajor, RowMajor>(sh.scores, SQUARE, sh.errors, pitch(VALUE_COLUMNS));
        const real* v = value_rows(p.x.v, p, at) + column;
        const int width = p.x.value_dim - column;
        o.each([&](int i, int j, float& x) {
            x *= p.x.scale;
            if (p.x.skip && i < at.chunk.rows && j < width) x += skip * to_float(v[i * value_stride(p.x) + j]);
        });
        o.store_rows(value_rows(p.o, p, at) + column, at.chunk.rows, value_stride(p.x), width);
    }
}

// Token by token, for segments of a few tokens: 32 columns of the state in the registers of a block, rows over warps.
// Grid as delta_states.
extern "C" __global__ void __launch_bounds__(THREADS) delta_steps(const DeltaParams p) {
    constexpr int WARPS = THREADS / 32, ROWS = DK / WARPS;
    __shared__ float key[DK], query[DK], decay[CHANNEL ? DK : 1], parts[2][WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row0 = warp * ROWS;
    const int column = blockIdx.x * 32 + lane, head = blockIdx.y, index = blockIdx.z;
    const ChunkedSegment segment = p.segments[index];
    const bool inside = column < p.x.value_dim;
    const size_t whole = (size_t(index) * p.x.heads + head) * p.x.key_dim * p.x.value_dim + column;
    float state[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const bool there = p.x.state && inside && row0 + r < p.x.key_dim;
        state[r] = there ? p.x.state[whole + size_t(row0 + r) * p.x.value_dim] : 0.f;
    }
    auto over_warps = [&](float (&sums)[WARPS][32], float x) {
        sums[warp][lane] = x;
        __syncthreads();
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += sums[w][lane];
        return sum;
    };
    for (int n = 0; n < segment.count; ++n) {
        const ChunkHead at = chunk_head(p, segment.first + n, chunk_of(segment, n), head);
        for (int t = 0; t < at.chunk.rows; ++t) {
            const size_t gate = size_t(at.chunk.row + t) * p.x.heads + head;
            const size_t value = t * value_stride(p.x) + column;
            __syncthreads();
            for (int i = threadIdx.x; i < DK; i += THREADS) {
                const size_t from = t * key_stride(p.x) + i;
                key[i] = i < p.x.key_dim ? to_float(key_rows(p.x.k, p, at)[from]) : 0.f;
                query[i] = i < p.x.key_dim ? to_float(key_rows(p.x.q, p, at)[from]) : 0.f;
                if (CHANNEL) decay[i] = i < p.x.key_dim ? expf(p.x.log_decay[gate * p.x.key_dim + i]) : 1.f;
            }
            __syncthreads();
            const float a = !CHANNEL && p.x.log_decay ? expf(p.x.log_decay[gate]) : 1.f, b = p.x.write ? p.x.write[gate] : 1.f;
            const float v = inside ? to_float(value_rows(p.x.v, p, at)[value]) : 0.f;
            float held = 0.f, read = 0.f;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                state[r] *= CHANNEL ? decay[row0 + r] : a;
                held += key[row0 + r] * state[r];
            }
            const float written = b * (v - over_warps(parts[0], held));
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                state[r] += key[row0 + r] * written;
                read += query[row0 + r] * state[r];
            }
            const float o = p.x.scale * over_warps(parts[1], read) + (p.x.skip ? p.x.skip[head] * v : 0.f);
            if (warp == 0 && inside) value_rows(p.o, p, at)[value] = to_real(o);
        }
    }
    if (!p.last_state || !inside) return;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (row0 + r < p.x.key_dim) p.last_state[whole + size_t(row0 + r) * p.x.value_dim] = state[r];
    }
}
