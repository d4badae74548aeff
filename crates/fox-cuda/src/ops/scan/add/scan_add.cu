// The additive scan forward: S_t = a_t S_{t-1} + k_t (b_t v_t)^T, o_t = scale S_t^T q_t + skip v_t.
//
// Chunked scan in three launches, with S the state before a chunk, D_ij = a_{j+1} ... a_i, p and s the decays from the
// chunk's start and to its end:
//   scan_states   increment of the state by each chunk, K^T diag(s b) V; parallel over chunks
//   scan_carry    the state before every chunk, sequential over chunks, parallel over elements
//   scan_read     O = scale (diag(p) Q S + (Q K^T * D) diag(b) V) + skip V; parallel over chunks
// The gradients of the states use the first two in reverse. Segments of a few tokens use scan_step.
//
// Compile-time: see scan_add.cuh.
#include "scan_channel.cuh"

// Row factors of the right operand of scan_states: values decayed to the chunk's end, or output gradients decayed to
// its start.
DEVICE float row_factor(const ScanAddParams& p, const Gates& gates, int h, int t) {
    if (p.reverse) return p.x.scale * (CHANNELS ? 1.f : gates.prefix(h, t));
    return gates.write[h][t] * (CHANNELS ? 1.f : gates.suffix(h, t));
}

// states[chunk] = K^T diag(s b) V; with `reverse`, d_states[chunk] = scale Q^T diag(p) dO. Also the decay over the
// chunk.
extern "C" __global__ void __launch_bounds__(THREADS, CHANNELS ? 1 : 2) scan_states(const ScanAddParams p) {
    extern __shared__ __align__(16) u8 memory[];
    real* left = reinterpret_cast<real*>(memory);
    real* right = left + tile_size(CHUNK, DK);
    __shared__ Gates gates;
    const HeadGroup u = this_head_group(p);
    if (!CHANNELS)
        copy_tile<CHUNK, DK>(left, (p.reverse ? p.x.q : p.x.k) + key_at(p, u), u.tokens, key_stride(p.x), p.x.key_dim);
    copy_commit();
    // Pipeline of three heads: one in flight, one being scaled by the threads that copied it, one being multiplied.
    const auto tile_of = [&](int h) { return right + h % 3 * tile_size(CHUNK, DV); };
    const auto fetch = [&](int h) {
        if (h < u.heads)
            copy_tile<CHUNK, DV>(tile_of(h), (p.reverse ? p.x.d_out : p.x.v) + value_at(p, u, u.first_head + h),
                                 u.tokens, value_stride(p.x), p.x.value_dim);
        copy_commit();
    };
    fetch(0), fetch(1);
    gates.load(p, u);
    if constexpr (CHANNELS) {
        __shared__ Channels channels;
        load_whole(channels, p, u);
        __syncthreads();
        if (p.reverse) load_far_queries(left, channels, p, u);
        else load_far_keys(left, channels, p, u);
        float* total = p.totals + (size_t(u.chunk) * p.x.heads + u.first_head) * DK;
        if (threadIdx.x < DK) total[threadIdx.x] = between_blocks(channels, 0, BLOCKS, threadIdx.x);
    } else {
        __syncthreads();
        if (threadIdx.x < u.heads)
            p.totals[size_t(u.chunk) * p.x.heads + u.first_head + threadIdx.x] =
                gates.prefix(threadIdx.x, CHUNK - 1);
    }
    for (int h = 0; h < u.heads; ++h) {
        copy_wait<1>();
        scale_tile<CHUNK, DV>(tile_of(h), [&](int t) { return row_factor(p, gates, h, t); });
        __syncthreads();
        fetch(h + 2);
        Accumulator<DK, DV> state;
        state.clear();
        state.template add<CHUNK, Transposed, RowMajor>(left, pitch(DK), tile_of(h), pitch(DV));
        state.store((p.reverse ? p.d_states : p.states) + state_at(p, u.chunk, u.first_head + h), DV);
    }
}

// Neighbouring elements of a state per thread.
constexpr int PER_THREAD = 4, CARRY_THREADS = 128;

// Sequential pass over the chunks of a segment, from the last to the first if REVERSE.
template <bool REVERSE>
DEVICE void carry_states(const ScanAddParams& p) {
    constexpr int PREFETCH_CHUNKS = REVERSE ? 4 : 8;
    const int at = (blockIdx.y * CARRY_THREADS + threadIdx.x) * PER_THREAD, head = at / STATE;
    const int row = at % STATE / DV, column = at % DV;
    const ChunkedSegment segment = p.segments[blockIdx.x];
    const size_t step = size_t(p.x.heads) * STATE;
    const size_t outside = (size_t(blockIdx.x) * p.x.heads + head) * p.x.key_dim * p.x.value_dim +
                           size_t(row) * p.x.value_dim + column;
    const auto exists = [&](int e) { return row < p.x.key_dim && column + e < p.x.value_dim; };
    const float* given = REVERSE ? p.d_last : p.x.state;
    float carry[PER_THREAD];
#pragma unroll
    for (int e = 0; e < PER_THREAD; ++e)
        carry[e] = given && exists(e) ? given[outside + e] : 0.f;
    real* all = (REVERSE ? p.d_states : p.states) + at;
    float added[PREFETCH_CHUNKS][PER_THREAD], state[PREFETCH_CHUNKS][PER_THREAD], decay[PREFETCH_CHUNKS];
    const auto chunk_of = [&](int n) { return segment.first + (REVERSE ? segment.count - 1 - n : n); };
    const auto fetch = [&](int i, int n) {
        const int chunk = chunk_of(n);
        load(added[i], all + chunk * step);
        decay[i] = p.totals[(size_t(chunk) * p.x.heads + head) * (CHANNELS ? DK : 1) + (CHANNELS ? row : 0)];
        if (!REVERSE || !p.flows) return;
        // Without `last` the carry is zero after the last chunk, so any finite state will do there.
        if (n > 0 || !p.last) return load(state[i], p.states + at + (chunk + (n > 0 ? 1 : 0)) * step);
#pragma unroll
        for (int e = 0; e < PER_THREAD; ++e) state[i][e] = exists(e) ? p.last[outside + e] : 0.f;
    };
#pragma unroll
    for (int i = 0; i < PREFETCH_CHUNKS; ++i)
        if (i < segment.count) fetch(i, i);
    for (int first = 0; first < segment.count; first += PREFETCH_CHUNKS) {
#pragma unroll
        for (int i = 0; i < PREFETCH_CHUNKS; ++i) {
            const int n = first + i, chunk = chunk_of(n);
            if (n >= segment.count) break;
            store(all + chunk * step, carry);
            if (REVERSE && p.flows) {
                float flow = 0.f;
#pragma unroll
                for (int e = 0; e < PER_THREAD; ++e) flow += carry[e] * state[i][e];
                flow = lanes_sum<DV / PER_THREAD>(flow);
                if (column == 0) p.flows[(size_t(chunk) * p.x.heads + head) * DK + row] = flow;
            }
#pragma unroll
            for (int e = 0; e < PER_THREAD; ++e) carry[e] = fmaf(carry[e], decay[i], added[i][e]);
            if (n + PREFETCH_CHUNKS < segment.count) fetch(i, n + PREFETCH_CHUNKS);
        }
    }
    float* out = REVERSE ? p.d_first : p.last;
    if (!out) return;
#pragma unroll
    for (int e = 0; e < PER_THREAD; ++e)
        if (exists(e)) out[outside + e] = carry[e];
}

// In place: from the increment by each chunk to the state before it.
// Grid (segments, heads * STATE / (PER_THREAD * CARRY_THREADS)).
extern "C" __global__ void __launch_bounds__(CARRY_THREADS) scan_carry(const ScanAddParams p) {
    carry_states<false>(p);
}
// In place: from the increment of the state gradient by each chunk to the gradient of the state after it; also the
// gradient of the log decay there, the sum over columns of gradient times state, and that of the state before each
// segment.
extern "C" __global__ void __launch_bounds__(CARRY_THREADS) scan_carry_back(const ScanAddParams p) {
    carry_states<true>(p);
}

// Epilogue of one head: adds the skip term and stores the outputs.
DEVICE void store_output(Accumulator<CHUNK, DV>& o, const ScanAddParams& p, const HeadGroup& u, int head,
                         const real* values) {
    const float skip = p.x.skip ? p.x.skip[head] : 0.f;
    real* out = p.o + value_at(p, u, head);
    o.each_pair([&](int t, int c, float& x, float& y) {
        const float2 v = load_pair(values + t * pitch(DV) + c);
        x = fmaf(skip, v.x, x), y = fmaf(skip, v.y, y);
    });
    o.store_rows(out, u.tokens, value_stride(p.x), p.x.value_dim);
}

#if CHANNELS
extern "C" __global__ void __launch_bounds__(THREADS, 1) scan_read(const ScanAddParams p) {
    extern __shared__ __align__(16) u8 memory[];
    real* queries = reinterpret_cast<real*>(memory);
    real* keys = queries + tile_size(CHUNK, DK);
    real* values = keys + tile_size(CHUNK, DK);
    real* state = values + tile_size(CHUNK, DV);
    real* weights = state + tile_size(DK, DV);
    __shared__ Gates gates;
    __shared__ Channels channels;
    const HeadGroup u = this_head_group(p);
    gates.load(p, u);
    copy_tile<CHUNK, DV>(values, p.x.v + value_at(p, u, u.first_head), u.tokens, value_stride(p.x), p.x.value_dim);
    copy_tile<DK, DV>(state, p.states + state_at(p, u.chunk, u.first_head), DK, DV, DV);
    copy_commit();
    load_blocks(queries, keys, channels, p, u);
    __syncthreads();
    channel_scores(weights, queries, keys, channels, [&](int j) { return p.x.scale * gates.write[0][j]; });
    __syncthreads();
    load_far_queries(queries, channels, p, u);
    copy_wait<0>();
    __syncthreads();
    Accumulator<CHUNK, DV> o;
    o.clear();
    o.template add<DK, RowMajor, RowMajor>(queries, pitch(DK), state, pitch(DV));
    o.each([&](int, int, float& x) { x *= p.x.scale; });
    o.template add<CHUNK, RowMajor, RowMajor>(weights, pitch(CHUNK), values, pitch(DV));
    store_output(o, p, u, u.first_head, values);
}
#else
// Prefetches values and state of one head.
DEVICE void fetch_head(real* values, const ScanAddParams& p, const HeadGroup& u, int head) {
    copy_tile<CHUNK, DV>(values, p.x.v + value_at(p, u, head), u.tokens, value_stride(p.x), p.x.value_dim);
    copy_tile<DK, DV>(values + tile_size(CHUNK, DV), p.states + state_at(p, u.chunk, head), DK, DV, DV);
    copy_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) scan_read(const ScanAddParams p) {
    constexpr int STAGE = tile_size(CHUNK, DV) + tile_size(DK, DV);
    extern __shared__ __align__(16) u8 memory[];
    real* queries = reinterpret_cast<real*>(memory);
    real* keys = queries + tile_size(CHUNK, DK);
    real* stages = keys + tile_size(CHUNK, DK);
    real* weights = stages + STAGES * STAGE;
    __shared__ Gates gates;
    const HeadGroup u = this_head_group(p);
    copy_tile<CHUNK, DK>(queries, p.x.q + key_at(p, u), u.tokens, key_stride(p.x), p.x.key_dim);
    copy_tile<CHUNK, DK>(keys, p.x.k + key_at(p, u), u.tokens, key_stride(p.x), p.x.key_dim);
    copy_commit();
    fetch_head(stages, p, u, u.first_head);
    gates.load(p, u);
    copy_wait<1>();
    __syncthreads();
    Accumulator<CHUNK, CHUNK> scores;
    scores.clear();
    scores.template add<DK, RowMajor, Transposed>(queries, pitch(DK), keys, pitch(DK));
    for (int h = 0; h < u.heads; ++h) {
        const int head = u.first_head + h;
        const real* values = stages + h % STAGES * STAGE;
        const real* state = values + tile_size(CHUNK, DV);
        if (STAGES == 1 && h > 0) fetch_head(stages, p, u, head);
        if (STAGES == 2 && h + 1 < u.heads) fetch_head(stages + (h + 1) % 2 * STAGE, p, u, head + 1);
        else copy_commit();
        scores.each_pair([&](int i, int j, float x, float y) {
            const float2 to = gates.sums[h][i];
            const auto weight = [&](int j, float x) {
                return j > i ? 0.f : p.x.scale * x * decay_between(gates.sums[h][j], to) * gates.write[h][j];
            };
            scores.store_pair(weights + i * pitch(CHUNK) + j, weight(j, x), weight(j + 1, y));
        });
        copy_wait<STAGES - 1>();
        __syncthreads();
        Accumulator<CHUNK, DV> o;
        o.clear();
        o.template add<DK, RowMajor, RowMajor>(queries, pitch(DK), state, pitch(DV));
        o.each([&](int i, int, float& x) { x *= p.x.scale * gates.prefix(h, i); });
        o.template add<CHUNK, RowMajor, RowMajor>(weights, pitch(CHUNK), values, pitch(DV));
        store_output(o, p, u, head, values);
        __syncthreads();
    }
}
#endif

// Token by token for segments of a few tokens, with the state in f32 registers. Grid (segments, heads). A thread owns a
// column of the state, or one of SLICES slices of its rows.
extern "C" __global__ void __launch_bounds__(256) scan_step(const ScanAddParams p) {
    constexpr int SLICES = 256 / DV, ROWS = DK / SLICES;
    __shared__ float partials[SLICES][DV];
    const int head = blockIdx.y, column = threadIdx.x % DV, slice = threadIdx.x / DV;
    const ChunkedSegment segment = p.segments[blockIdx.x];
    const int key_head = head / (p.x.heads / p.x.key_heads);
    const size_t outside = (size_t(blockIdx.x) * p.x.heads + head) * p.x.key_dim * p.x.value_dim + column;
    const auto exists = [&](int r) { return slice * ROWS + r < p.x.key_dim && column < p.x.value_dim; };
    const auto place = [&](int r) { return outside + size_t(slice * ROWS + r) * p.x.value_dim; };
    float state[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) state[r] = p.x.state && exists(r) ? p.x.state[place(r)] : 0.f;
    for (int t = segment.row; t < segment.row + segment.rows; ++t) {
        const size_t at = size_t(t) * p.x.heads + head;
        const size_t keys = t * key_stride(p.x) + size_t(key_head) * p.x.key_dim + slice * ROWS;
        const float v = column < p.x.value_dim ? to_float(p.x.v[at * p.x.value_dim + column]) : 0.f;
        const float written = v * (p.x.write ? p.x.write[at] : 1.f);
        float decay = !CHANNELS && p.x.log_decay ? expf(p.x.log_decay[at]) : 1.f, sum = 0.f;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (slice * ROWS + r >= p.x.key_dim) continue;
            if (CHANNELS) decay = expf(p.x.log_decay[at * p.x.key_dim + slice * ROWS + r]);
            state[r] = fmaf(decay, state[r], to_float(p.x.k[keys + r]) * written);
            sum = fmaf(to_float(p.x.q[keys + r]), state[r], sum);
        }
        partials[slice][column] = sum;
        __syncthreads();
        if (slice == 0 && column < p.x.value_dim) {
            for (int s = 1; s < SLICES; ++s) sum += partials[s][column];
            const float skip = p.x.skip ? p.x.skip[head] : 0.f;
            p.o[at * p.x.value_dim + column] = to_real(fmaf(skip, v, p.x.scale * sum));
        }
        __syncthreads();
    }
    if (!p.last) return;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
        if (exists(r)) p.last[place(r)] = state[r];
}
