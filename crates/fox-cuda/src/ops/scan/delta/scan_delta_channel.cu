// The parts of the delta rule that depend on decays per channel; see scan_delta.cuh. With G the prefix sums of log decays
// of a chunk and n its last token, a factor e^(G_i - G_j), j <= i, is computed from the difference or as a product of two
// such factors, over a token between j and i, so that nothing overflows. Both are at most 1.
#include "scan_delta.cuh"

constexpr int SLAB = 32;             // channels at a time
constexpr int LINE = SLAB + 1;       // pitch of a slab

// Queries, keys and prefix sums (base 2, in two floats) of a slab of channels; zero beyond the chunk and the keys.
struct Slab {
    float q[CHUNK][LINE], k[CHUNK][LINE];
    float2 sums[CHUNK][LINE];

    DEVICE void load(const DeltaParams& p, const ChunkHead& at, int first) {
        for_each_in_block<CHUNK * SLAB>([&](int n) {
            const int t = n / SLAB, c = n % SLAB, channel = first + c;
            const bool there = t < at.chunk.rows && channel < p.x.key_dim;
            const size_t key = t * key_stride(p.x) + channel;
            const size_t gate = (size_t(at.chunk.row + t) * p.x.heads + at.head) * p.x.key_dim + channel;
            q[t][c] = there ? to_float(key_rows(p.x.q, p, at)[key]) : 0.f;
            k[t][c] = there ? to_float(key_rows(p.x.k, p, at)[key]) : 0.f;
            sums[t][c].x = there ? p.x.log_decay[gate] : 0.f;
        });
        __syncthreads();
        if (threadIdx.x < SLAB) {
            double sum = 0.0;
            for (int t = 0; t < CHUNK; ++t) {
                sum += double(sums[t][threadIdx.x].x) * 1.4426950408889634;
                const float high = float(sum);
                sums[t][threadIdx.x] = make_float2(high, float(sum - high));
            }
        }
        __syncthreads();
    }
    // Decays of channel c from the chunk's start to token t, from token t to the chunk's end, and from j to i >= j.
    DEVICE float prefix(int t, int c) const { return decay_between(make_float2(0.f, 0.f), sums[t][c]); }
    DEVICE float suffix(int t, int c) const { return decay_between(sums[t][c], sums[CHUNK - 1][c]); }
    DEVICE float between(int j, int i, int c) const { return decay_between(sums[j][c], sums[i][c]); }
};

// Grid (chunks, heads): the decayed tiles, K K^T * D below the diagonal and Q K^T * D.
extern "C" __global__ void __launch_bounds__(THREADS, 3) delta_channel(const DeltaParams p) {
    __shared__ Slab slab;
    const ChunkHead at = chunk_head(p);
    // A thread has 4 x 4 elements of both products, on or below the diagonal.
    constexpr int SQUARES = CHUNK / 4 * (CHUNK / 4 + 1) / 2;
    int line = 0;
    while ((line + 1) * (line + 2) / 2 <= int(threadIdx.x)) ++line;
    const int i0 = line * 4, j0 = (threadIdx.x - line * (line + 1) / 2) * 4;
    float overlaps[4][4] = {}, scores[4][4] = {};
    for (int first = 0; first < DK; first += SLAB) {
        slab.load(p, at, first);
        for_each_in_block<CHUNK * SLAB>([&](int n) {
            const int t = n / SLAB, c = n % SLAB;
            const size_t here = (at.tile * CHUNK + t) * DK + first + c;
            const float prefix = slab.prefix(t, c);
            p.reading_keys[here] = to_real(slab.k[t][c] * prefix);
            p.reading_queries[here] = to_real(slab.q[t][c] * prefix);
            p.writing_keys[here] = to_real(slab.k[t][c] * slab.suffix(t, c));
            if (t == CHUNK - 1) p.whole[at.tile * DK + first + c] = prefix;
        });
        if (threadIdx.x < SQUARES && j0 < i0) {
            // By way of the last of the keys.
#pragma unroll 1
            for (int c = 0; c < SLAB; ++c) {
                float decayed[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    decayed[j] = slab.k[j0 + j][c];
                    if (j < 3) decayed[j] *= slab.between(j0 + j, j0 + 3, c);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float factor = slab.between(j0 + 3, i0 + i, c);
                    const float key = slab.k[i0 + i][c] * factor, query = slab.q[i0 + i][c] * factor;
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        overlaps[i][j] = fmaf(key, decayed[j], overlaps[i][j]);
                        scores[i][j] = fmaf(query, decayed[j], scores[i][j]);
                    }
                }
            }
        } else if (threadIdx.x < SQUARES) {
            for (int c = 0; c < SLAB; ++c) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float key = slab.k[j0 + j][c];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        if (j0 + j > i0 + i) continue;
                        const float decayed = key * slab.between(j0 + j, i0 + i, c);
                        overlaps[i][j] = fmaf(slab.k[i0 + i][c], decayed, overlaps[i][j]);
                        scores[i][j] = fmaf(slab.q[i0 + i][c], decayed, scores[i][j]);
                    }
                }
            }
        }
        __syncthreads();
    }
    if (threadIdx.x >= SQUARES) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const size_t here = (at.tile * CHUNK + i0 + i) * CHUNK + j0;
        store<4>(p.overlaps + here, overlaps[i]);
        store<4>(p.scores + here, scores[i]);
    }
}

// Tokens of a group: factors between groups are products, of a token and of a pair of a token and a group.
constexpr int GROUP = 16;

struct ChannelShared {
    Slab slab;
    float d_scores[CHUNK][CHUNK], d_overlaps[CHUNK][CHUNK];
    float flow[CHUNK][LINE];
    // Keys decayed to the end of their group of tokens, and queries and keys from the last token before it.
    float ended[CHUNK][LINE], begun_q[CHUNK][LINE], begun_k[CHUNK][LINE];
    float through[SLAB];
};
static_assert(sizeof(ChannelShared) <= CHANNEL_BYTES);

// Grid (chunks, heads, DK / 32): gradients of queries, keys and log decays, from those of the decayed tiles and products.
//
// A log decay of token t multiplies every term from a token before t, or the state before the chunk, to t or a later
// token, or the state after the chunk: the sum over s >= t of q dq + k dk of keys that read - k dk of keys that write,
// plus <S', G> of the channel, which holds what earlier tokens and the state before gave to the state after.
extern "C" __global__ void __launch_bounds__(THREADS, 2) delta_channel_gradients(const DeltaParams p) {
    extern __shared__ __align__(16) u8 memory[];
    ChannelShared& sh = *reinterpret_cast<ChannelShared*>(memory);
    const ChunkHead at = chunk_head(p);
    const int first = blockIdx.z * SLAB, c = threadIdx.x % 32, warp = threadIdx.x / 32, channel = first + c;
    constexpr int WARPS = THREADS / 32;
    for_each_in_block<CHUNK * CHUNK>([&](int n) {
        sh.d_scores[n / CHUNK][n % CHUNK] = p.d_scores[at.tile * CHUNK * CHUNK + n];
        sh.d_overlaps[n / CHUNK][n % CHUNK] = p.d_overlaps[at.tile * CHUNK * CHUNK + n];
    });
    sh.slab.load(p, at, first);
    for_each_in_block<CHUNK * SLAB>([&](int n) {
        const int t = n / SLAB, c = n % SLAB, begin = t / GROUP * GROUP;
        sh.ended[t][c] = sh.slab.k[t][c] * sh.slab.between(t, begin + GROUP - 1, c);
        const float factor = begin > 0 ? sh.slab.between(begin - 1, t, c) : 0.f;
        sh.begun_q[t][c] = sh.slab.q[t][c] * factor, sh.begun_k[t][c] = sh.slab.k[t][c] * factor;
    });
    __syncthreads();
    // <S, G> of each channel; a warp has one of them at a time.
    for (int row = warp; row < SLAB; row += WARPS) {
        const size_t state = (at.tile * DK + first + row) * DV;
        float sum = 0.f;
        for (int v = c; v < DV; v += 32) sum += to_float(p.states[state + v]) * to_float(p.d_states[state + v]);
        sum = warp_sum(sum);
        if (c == 0) sh.through[row] = sum;
    }
    const bool parts = p.dq_parts;
    for (int t = warp; t < CHUNK; t += WARPS) {
        const size_t tile = (at.tile * CHUNK + t) * DK + channel;
        const float q = sh.slab.q[t][c], k = sh.slab.k[t][c], prefix = sh.slab.prefix(t, c);
        float dq = p.d_reading_queries[tile] * prefix, d_reading = p.d_reading_keys[tile] * prefix;
        float d_writing = p.d_writing_keys[tile] * sh.slab.suffix(t, c);
        const int begin = t / GROUP * GROUP, end = begin + GROUP;
#pragma unroll 1
        for (int group = 0; group < begin; group += GROUP) {
            float scores = 0.f, overlaps = 0.f;
#pragma unroll 8
            for (int j = group; j < group + GROUP; ++j) {
                const float decayed = sh.ended[j][c];
                scores = fmaf(sh.d_scores[t][j], decayed, scores);
                overlaps = fmaf(sh.d_overlaps[t][j], decayed, overlaps);
            }
            const float factor = sh.slab.between(group + GROUP - 1, t, c);
            dq = fmaf(scores, factor, dq), d_reading = fmaf(overlaps, factor, d_reading);
        }
        for (int j = begin; j < t; ++j) {
            const float decayed = sh.slab.k[j][c] * sh.slab.between(j, t, c);
            dq = fmaf(sh.d_scores[t][j], decayed, dq);
            d_reading = fmaf(sh.d_overlaps[t][j], decayed, d_reading);
        }
#pragma unroll 1
        for (int group = end; group < CHUNK; group += GROUP) {
            float given = 0.f;
#pragma unroll 8
            for (int i = group; i < group + GROUP; ++i) {
                given = fmaf(sh.d_scores[i][t], sh.begun_q[i][c], given);
                given = fmaf(sh.d_overlaps[i][t], sh.begun_k[i][c], given);
            }
            d_writing = fmaf(given, sh.slab.between(t, group - 1, c), d_writing);
        }
        for (int i = t + 1; i < end; ++i) {
            const float given = sh.d_scores[i][t] * sh.slab.q[i][c] + sh.d_overlaps[i][t] * sh.slab.k[i][c];
            d_writing = fmaf(given, sh.slab.between(t, i, c), d_writing);
        }
        sh.flow[t][c] = q * dq + k * (d_reading - d_writing);
        if (t >= at.chunk.rows || channel >= p.x.key_dim) continue;
        // The diagonal of the scores does not decay.
        dq = fmaf(sh.d_scores[t][t], k, dq);
        const float dk = fmaf(sh.d_scores[t][t], q, d_reading + d_writing);
        if (parts) {
            const size_t own = (size_t(at.chunk.row + t) * p.x.heads + at.head) * p.x.key_dim + channel;
            p.dq_parts[own] = dq, p.dk_parts[own] = dk;
        } else {
            const size_t own = t * key_stride(p.x) + channel;
            key_rows(p.dq, p, at)[own] = to_real(dq), key_rows(p.dk, p, at)[own] = to_real(dk);
        }
    }
    __syncthreads();
    if (warp != 0 || channel >= p.x.key_dim) return;
    float sum = sh.through[c] * sh.slab.prefix(CHUNK - 1, c);
    for (int t = 0; t < CHUNK; ++t) {
        const float d = p.d_writing_keys[(at.tile * CHUNK + t) * DK + channel];
        sum = fmaf(sh.slab.k[t][c] * sh.slab.suffix(t, c), d, sum);
    }
    for (int t = CHUNK - 1; t >= 0; --t) {
        sum += sh.flow[t][c];
        const size_t own = (size_t(at.chunk.row + t) * p.x.heads + at.head) * p.x.key_dim + channel;
        if (t < at.chunk.rows) p.dlog_decay[own] = sum;
    }
}
