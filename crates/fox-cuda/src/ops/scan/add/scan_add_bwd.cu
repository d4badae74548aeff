// The additive scan backward, given the states S before and the state gradients G after every chunk (scan_add.cu). With
// W = diag(b) V, and D, p, s as there:
//   dW  = diag(s) K G + scale (Q K^T * D)^T dO       dV = diag(b) dW + skip dO, db = <dW, v>
//   dA  = scale (dO W^T) * D                         gradient of the scores
//   dQ  = dA K + scale diag(p) dO S^T
//   dK  = dA^T Q + diag(s) W G^T
// A log decay multiplies everything that flows from earlier to later tokens: its gradient is the suffix sum over the
// chunk of <q, dq> - <k, dk>, plus <G, S'> at the end. The diagonal of the scores does not decay; it is excluded from
// these products and added last.
//
// Compile-time: see scan_add.cuh.
#define MOST_HEADS 24
#include "scan_channel.cuh"

// Gradients of the values of one head, and partial sums for those of its write strengths, from dW.
DEVICE void store_values(Accumulator<CHUNK, DV>& dw, const ScanAddParams& p, const HeadGroup& u,
                         const Gates& gates, int h, const real* values, const real* d_out, float* partials) {
    const float skip = p.x.skip ? p.x.skip[u.first_head + h] : 0.f;
    if (p.d_write) dw.row_dots(partials, values, pitch(DV));
    dw.each_pair([&](int t, int c, float& x, float& y) {
        const float2 d = load_pair(d_out + t * pitch(DV) + c);
        const float write = gates.write[h][t];
        x = fmaf(skip, d.x, write * x), y = fmaf(skip, d.y, write * y);
    });
    dw.store_rows(p.dv + value_at(p, u, u.first_head + h), u.tokens, value_stride(p.x), p.x.value_dim);
}

// Finishes the gradients of the write strengths from `partials`, after a __syncthreads().
DEVICE void store_strengths(const ScanAddParams& p, const HeadGroup& u, int h, const float* partials) {
    const int t = threadIdx.x;
    if (p.d_write && t < u.tokens)
        p.d_write[size_t(u.row + t) * p.x.heads + u.first_head + h] =
            Accumulator<CHUNK, DV>::finish_row_sum(partials, t);
}

// Sum of <dO_t, v_t> over the chunk, by the first warp.
DEVICE void store_skip(const ScanAddParams& p, const HeadGroup& u, int h, const float* diagonal) {
    if (!p.d_skip || threadIdx.x >= 32) return;
    float sum = 0.f;
    for (int t = threadIdx.x; t < CHUNK; t += 32) sum += diagonal[t];
    sum = warp_sum(sum);
    if (threadIdx.x == 0) p.d_skip[size_t(u.chunk) * p.x.heads + u.first_head + h] = sum;
}

// Stores an element of dQ or dK: final, or the partial sum of this split.
DEVICE void store_key(void* to, const ScanAddParams& p, const HeadGroup& u, int t, int c, float x) {
    if (t >= u.tokens || c >= p.x.key_dim) return;
    const size_t at = key_at(p, u) + t * key_stride(p.x) + c;
    if (p.splits == 1) static_cast<real*>(to)[at] = to_real(x);
    else static_cast<float*>(to)[u.split * (p.row_count * key_stride(p.x)) + at] = x;
}

// Adds up the partials of dQ or dK: `from` is [partials][count].
extern "C" __global__ void __launch_bounds__(256) scan_sum(PARAMS(ScanSum)) {
    const size_t i = (size_t(blockIdx.x) * 256 + threadIdx.x) * VEC;
    if (i >= count) return;
    float sum[VEC] = {};
    for (int part = 0; part < splits; ++part) {
        float x[VEC];
        load(x, from + part * count + i);
#pragma unroll
        for (int e = 0; e < VEC; ++e) sum[e] += x[e];
    }
    store(to + i, sum);
}

#if !CHANNELS
// One head in shared memory: values, output gradients, state before, gradient of the state after.
struct HeadTiles {
    static constexpr int SIZE = 2 * tile_size(CHUNK, DV) + 2 * tile_size(DK, DV);
    real *values, *d_out, *state, *d_state;

    DEVICE explicit HeadTiles(real* memory)
        : values(memory),
          d_out(values + tile_size(CHUNK, DV)),
          state(d_out + tile_size(CHUNK, DV)),
          d_state(state + tile_size(DK, DV)) {}

    DEVICE void fetch(const ScanAddParams& p, const HeadGroup& u, int head) {
        const size_t at = value_at(p, u, head), place = state_at(p, u.chunk, head);
        copy_tile<CHUNK, DV>(values, p.x.v + at, u.tokens, value_stride(p.x), p.x.value_dim);
        copy_tile<CHUNK, DV>(d_out, p.x.d_out + at, u.tokens, value_stride(p.x), p.x.value_dim);
        copy_tile<DK, DV>(state, p.states + place, DK, DV, DV);
        copy_tile<DK, DV>(d_state, p.d_states + place, DK, DV, DV);
        copy_commit();
    }
};

// Partial row sums, exchanged between warps.
struct RowSums {
    float write[WARP_COLUMNS][CHUNK], query[WARP_COLUMNS][CHUNK], key[WARP_COLUMNS][CHUNK];
    float diagonal[CHUNK];  // <dO_t, v_t>
};

// Gradients of the log decays of one head, by the last warp, two tokens per lane.
DEVICE void store_decays(const ScanAddParams& p, const HeadGroup& u, int h, const RowSums& sums) {
    const int lane = threadIdx.x - (THREADS - 32);
    if (!p.d_log_decay || lane < 0) return;
    float after = 0.f;
    const float* flows = p.flows + (size_t(u.chunk) * p.x.heads + u.first_head + h) * DK;
    for (int c = lane; c < DK; c += 32) after += flows[c];
    after = warp_sum(after);
    float flow[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int t = 2 * lane + e;
        flow[e] = t < CHUNK ? Accumulator<CHUNK, DK>::finish_row_sum(sums.query[0], t) -
                                  Accumulator<CHUNK, DK>::finish_row_sum(sums.key[0], t)
                            : 0.f;
    }
    float sum = flow[0] + flow[1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_down_sync(~0u, sum, step);
        if (lane + step < 32) sum += other;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int t = 2 * lane + e;
        const float later = e == 0 ? sum : sum - flow[0];
        if (t < u.tokens) p.d_log_decay[size_t(u.row + t) * p.x.heads + u.first_head + h] = later + after;
    }
}

// Grid (chunks, key_heads * partials).
extern "C" __global__ void __launch_bounds__(THREADS, 1) scan_grads(const ScanAddParams p) {
    extern __shared__ __align__(16) u8 memory[];
    real* queries = reinterpret_cast<real*>(memory);
    real* keys = queries + tile_size(CHUNK, DK);
    real* weights = keys + tile_size(CHUNK, DK);            // [key][query]: scale A
    real* d_scores = weights + tile_size(CHUNK, CHUNK);     // [key][query]: dA without its diagonal
    real* stages = d_scores + tile_size(CHUNK, CHUNK);
    __shared__ Gates gates;
    __shared__ RowSums both[2];  // one is written while the other is read
    const HeadGroup u = this_head_group(p);
    copy_tile<CHUNK, DK>(queries, p.x.q + key_at(p, u), u.tokens, key_stride(p.x), p.x.key_dim);
    copy_tile<CHUNK, DK>(keys, p.x.k + key_at(p, u), u.tokens, key_stride(p.x), p.x.key_dim);
    copy_commit();
    HeadTiles(stages).fetch(p, u, u.first_head);
    gates.load(p, u);
    copy_wait<1>();
    __syncthreads();
    // Transposed: a row per key.
    Accumulator<CHUNK, CHUNK> scores;
    scores.clear();
    scores.template add<DK, RowMajor, Transposed>(keys, pitch(DK), queries, pitch(DK));
    Accumulator<CHUNK, DK> dq, dk;
    dq.clear(), dk.clear();
    float own = 0.f;  // of token threadIdx.x: dA_tt, over all heads
    for (int h = 0; h < u.heads; ++h) {
        const HeadTiles head(stages + h % STAGES * HeadTiles::SIZE);
        RowSums& sums = both[h % 2];
        if (STAGES == 1 && h > 0) HeadTiles(stages).fetch(p, u, u.first_head + h);
        if (STAGES == 2 && h + 1 < u.heads)
            HeadTiles(stages + (h + 1) % 2 * HeadTiles::SIZE).fetch(p, u, u.first_head + h + 1);
        else copy_commit();
        copy_wait<STAGES - 1>();
        __syncthreads();
        {
            Accumulator<CHUNK, CHUNK> overlap;  // V dO^T
            overlap.clear();
            overlap.template add<DV, RowMajor, Transposed>(head.values, pitch(DV), head.d_out, pitch(DV));
            overlap.each_pair_with(scores, [&](int j, int i, float2 x, float2 score) {
                const float2 from = gates.sums[h][j];
                const float first = p.x.scale * decay_between(from, gates.sums[h][i]);
                const float second = p.x.scale * decay_between(from, gates.sums[h][i + 1]);
                if (i == j) sums.diagonal[j] = x.x;
                if (i + 1 == j) sums.diagonal[j] = x.y;
                const int at = j * pitch(CHUNK) + i;
                scores.store_pair(weights + at, i < j ? 0.f : first * score.x,
                                  i + 1 < j ? 0.f : second * score.y);
                const float write = gates.write[h][j];
                scores.store_pair(d_scores + at, i <= j ? 0.f : first * write * x.x,
                                  i < j ? 0.f : second * write * x.y);
            });
        }
        __syncthreads();
        {
            Accumulator<CHUNK, DV> dw;
            dw.clear();
            dw.template add<DK, RowMajor, RowMajor>(keys, pitch(DK), head.d_state, pitch(DV));
            dw.each([&](int j, int, float& x) { x *= gates.suffix(h, j); });
            dw.template add<CHUNK, RowMajor, RowMajor>(weights, pitch(CHUNK), head.d_out, pitch(DV));
            store_values(dw, p, u, gates, h, head.values, head.d_out, sums.write[0]);
        }
        Accumulator<CHUNK, DK> part;
        part.clear();
        part.template add<DV, RowMajor, Transposed>(head.values, pitch(DV), head.d_state, pitch(DV));
        part.each([&](int j, int, float& x) { x *= gates.suffix(h, j) * gates.write[h][j]; });
        part.template add<CHUNK, RowMajor, RowMajor>(d_scores, pitch(CHUNK), queries, pitch(DK));
        part.row_dots(sums.key[0], keys, pitch(DK));
        dk.plus(part);
        part.clear();
        part.template add<DV, RowMajor, Transposed>(head.d_out, pitch(DV), head.state, pitch(DV));
        part.each([&](int i, int, float& x) { x *= p.x.scale * gates.prefix(h, i); });
        part.template add<CHUNK, Transposed, RowMajor>(d_scores, pitch(CHUNK), keys, pitch(DK));
        part.row_dots(sums.query[0], queries, pitch(DK));
        dq.plus(part);
        if (threadIdx.x < CHUNK)
            own += p.x.scale * gates.write[h][threadIdx.x] * sums.diagonal[threadIdx.x];
        __syncthreads();
        store_strengths(p, u, h, sums.write[0]);
        store_skip(p, u, h, sums.diagonal);
        store_decays(p, u, h, sums);
    }
    __syncthreads();
    RowSums& sums = both[0];
    if (threadIdx.x < CHUNK) sums.diagonal[threadIdx.x] = own;
    __syncthreads();
    dq.each([&](int t, int c, float x) {
        store_key(p.dq, p, u, t, c, x + sums.diagonal[t] * to_float(keys[t * pitch(DK) + c]));
    });
    dk.each([&](int t, int c, float x) {
        store_key(p.dk, p, u, t, c, x + sums.diagonal[t] * to_float(queries[t * pitch(DK) + c]));
    });
}
#else
// Gradients of one block of tokens and one channel. `dq` and `dk` hold the contributions of other blocks (f32 tiles,
// decayed to the block's ends); adds those inside the block and stores the sums. Leaves the suffix sums of the
// log-decay gradients in `dq`, and their total in `whole`.
DEVICE void finish_block(float* dq, float* dk, const real* d_scores, Channels& channels, const ScanAddParams& p,
                         const HeadGroup& u, int block, int c) {
    float a[BLOCK], q[BLOCK], k[BLOCK], d_keys[BLOCK], flow[BLOCK];
    block_decays(a, p, u, block, c);
    block_rows(q, p.x.q, p, u, block, c);
    block_rows(k, p.x.k, p, u, block, c);
    const int first = block * BLOCK;
    const auto d_score = [&](int i, int j) {
        return to_float(d_scores[(first + i) * pitch(CHUNK) + first + j]);
    };
    float product = 1.f;
#pragma unroll
    for (int j = BLOCK - 1; j >= 0; --j) {
        d_keys[j] = dk[(first + j) * DK + c] * product;
        product *= a[j];
    }
    product = 1.f;
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
        product *= a[i];
        float d_query = dq[(first + i) * DK + c] * product, between = a[i];
#pragma unroll
        for (int j = i - 1; j >= 0; --j) {
            const float d = d_score(i, j) * between;
            d_query = fmaf(d, k[j], d_query);
            d_keys[j] = fmaf(d, q[i], d_keys[j]);
            between *= a[j];
        }
        flow[i] = q[i] * d_query;
        store_key(p.dq, p, u, first + i, c, fmaf(d_score(i, i), k[i], d_query));
    }
    float sum = 0.f;
#pragma unroll
    for (int i = BLOCK - 1; i >= 0; --i) {
        sum += flow[i] - k[i] * d_keys[i];
        dq[(first + i) * DK + c] = sum;
        store_key(p.dk, p, u, first + i, c, fmaf(d_score(i, i), q[i], d_keys[i]));
    }
    channels.whole[block][c] = sum;
}

// Grid (chunks, key_heads * partials); one head each.
extern "C" __global__ void __launch_bounds__(THREADS, 1) scan_grads(const ScanAddParams p) {
    extern __shared__ __align__(16) u8 memory[];
    real* queries = reinterpret_cast<real*>(memory);       // decayed to their block's start
    real* keys = queries + tile_size(CHUNK, DK);           // decayed to their block's end
    real* far_keys = keys + tile_size(CHUNK, DK);          // decayed to the chunk's end
    real* values = far_keys + tile_size(CHUNK, DK);
    real* d_out = values + tile_size(CHUNK, DV);
    real* weights = d_out + tile_size(CHUNK, DV);          // [query][key]: scale A
    real* d_scores = weights + tile_size(CHUNK, CHUNK);    // [query][key]: dA
    real* state = d_scores + tile_size(CHUNK, CHUNK);
    real* d_state = state + tile_size(DK, DV);
    __shared__ Gates gates;
    __shared__ Channels channels;
    __shared__ float partials[WARP_COLUMNS][CHUNK], diagonal[CHUNK];
    const HeadGroup u = this_head_group(p);
    const size_t at = value_at(p, u, u.first_head), place = state_at(p, u.chunk, u.first_head);
    copy_tile<CHUNK, DV>(values, p.x.v + at, u.tokens, value_stride(p.x), p.x.value_dim);
    copy_tile<CHUNK, DV>(d_out, p.x.d_out + at, u.tokens, value_stride(p.x), p.x.value_dim);
    copy_tile<DK, DV>(state, p.states + place, DK, DV, DV);
    copy_tile<DK, DV>(d_state, p.d_states + place, DK, DV, DV);
    copy_commit();
    gates.load(p, u);
    load_blocks(queries, keys, channels, p, u);
    copy_wait<0>();
    __syncthreads();
    load_far_keys(far_keys, channels, p, u);
    channel_scores(weights, queries, keys, channels, [&](int) { return p.x.scale; });
    {
        Accumulator<CHUNK, CHUNK> overlap;  // dO V^T
        overlap.clear();
        overlap.template add<DV, RowMajor, Transposed>(d_out, pitch(DV), values, pitch(DV));
        overlap.each([&](int i, int j, float x) {
            if (i == j) diagonal[i] = x;
            d_scores[i * pitch(CHUNK) + j] = to_real(j > i ? 0.f : p.x.scale * gates.write[0][j] * x);
        });
    }
    __syncthreads();
    {
        Accumulator<CHUNK, DV> dw;
        dw.clear();
        dw.template add<DK, RowMajor, RowMajor>(far_keys, pitch(DK), d_state, pitch(DV));
        dw.template add<CHUNK, Transposed, RowMajor>(weights, pitch(CHUNK), d_out, pitch(DV));
        store_values(dw, p, u, gates, 0, values, d_out, partials[0]);
    }
    // A warp has the rows of one block: contributions from outside decay through one block after the other.
    Accumulator<CHUNK, DK> dq, dk;
    const int block = dq.warp_row();
    dk.clear();
    dk.template add<DV, RowMajor, Transposed>(values, pitch(DV), d_state, pitch(DV));
    dk.each([&](int j, int, float& x) { x *= gates.write[0][j]; });
    for (int other = BLOCKS - 1; other > block; --other) {
        dk.each([&](int, int c, float& x) { x *= channels.whole[other][c]; });
        dk.template add<BLOCK, Transposed, RowMajor>(d_scores + other * BLOCK * pitch(CHUNK), pitch(CHUNK),
                                              queries + other * BLOCK * pitch(DK), pitch(DK));
    }
    dq.clear();
    dq.template add<DV, RowMajor, Transposed>(d_out, pitch(DV), state, pitch(DV));
    dq.each([&](int, int, float& x) { x *= p.x.scale; });
    for (int other = 0; other < min(block, BLOCKS); ++other) {
        dq.each([&](int, int c, float& x) { x *= channels.whole[other][c]; });
        dq.template add<BLOCK, RowMajor, RowMajor>(d_scores + other * BLOCK, pitch(CHUNK),
                                             keys + other * BLOCK * pitch(DK), pitch(DK));
    }
    __syncthreads();
    float* d_queries = reinterpret_cast<float*>(queries);
    float* d_keys = d_queries + CHUNK * DK;
    dq.each([&](int t, int c, float x) { d_queries[t * DK + c] = x; });
    dk.each([&](int t, int c, float x) { d_keys[t * DK + c] = x; });
    store_strengths(p, u, 0, partials[0]);
    store_skip(p, u, 0, diagonal);
    __syncthreads();
    each_block_channel(
        [&](int block, int c) { finish_block(d_queries, d_keys, d_scores, channels, p, u, block, c); });
    __syncthreads();
    if (!p.d_log_decay) return;
    const float* flows = p.flows + (size_t(u.chunk) * p.x.heads + u.first_head) * DK;
    for (int i = threadIdx.x; i < u.tokens * DK; i += THREADS) {
        const int t = i / DK, c = i % DK;
        float sum = d_queries[t * DK + c] + flows[c];
        for (int later = t / BLOCK + 1; later < BLOCKS; ++later) sum += channels.whole[later][c];
        if (c < p.x.key_dim)
            p.d_log_decay[(size_t(u.row + t) * p.x.heads + u.first_head) * p.x.key_dim + c] = sum;
    }
}
#endif
