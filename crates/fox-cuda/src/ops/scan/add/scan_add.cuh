// Shared by the kernels of the additive scan: work decomposition, addressing and gates of a chunk.
//
// Compile-time: BF16, VEC, CHUNK (tokens of a chunk: 64, 32 or 16), DK and DV (64 or 128: padded widths of keys and
// values), CHANNELS (0: a decay per head or none; 1: a decay per channel, i.e. per row of the state).
#pragma once
#include "scan.cuh"

// Heads that share keys and are processed by one thread block, one after the other; a warp scans the decays of each.
// Their gates must leave shared memory for two blocks of the forward's kernels. The backward, of which one block fits,
// takes more (scan_add_bwd.cu).
#ifndef MOST_HEADS
#define MOST_HEADS 16
#endif
constexpr int MAX_HEADS = CHANNELS ? 1 : MOST_HEADS;
constexpr int STATE = DK * DV;
// Pipeline stages: heads in flight or in shared memory.
constexpr int STAGES = BF16 && DK * DV <= 128 * 64 ? 2 : 1;

// Heads of one chunk that share a key head, processed by one thread block.
struct HeadGroup {
    int chunk, row, tokens, key_head, split, first_head, heads;
};
// Grid (chunks, key_heads * partials).
DEVICE HeadGroup this_head_group(const ScanAddParams& p) {
    const Chunk chunk = p.chunks[blockIdx.x];
    HeadGroup u = {int(blockIdx.x), chunk.row, chunk.rows};
    const int group = p.x.heads / p.x.key_heads;
    u.key_head = blockIdx.y / p.splits, u.split = blockIdx.y % p.splits;
    const int first = u.split * p.heads_per_block;
    u.first_head = u.key_head * group + first;
    u.heads = min(p.heads_per_block, group - first);
    return u;
}

// Offsets of the first row of queries or keys, of the values of a head, and of a state.
DEVICE size_t key_at(const ScanAddParams& p, const HeadGroup& u) {
    return u.row * key_stride(p.x) + size_t(u.key_head) * p.x.key_dim;
}
DEVICE size_t value_at(const ScanAddParams& p, const HeadGroup& u, int head) {
    return u.row * value_stride(p.x) + size_t(head) * p.x.value_dim;
}
DEVICE size_t state_at(const ScanAddParams& p, int chunk, int head) {
    return (size_t(chunk) * p.x.heads + head) * STATE;
}

// Prefix sums of log decays and write strengths of all heads, a warp per head. Padding tokens neither decay nor write.
struct Gates {
    float2 sums[MAX_HEADS][CHUNK];
    float write[MAX_HEADS][CHUNK];

    DEVICE void load(const ScanAddParams& p, const HeadGroup& u) {
        const int lane = threadIdx.x % 32;
        for (int h = threadIdx.x / 32; h < u.heads; h += THREADS / 32) {
            const size_t at = size_t(u.row) * p.x.heads + u.first_head + h;
            if (!CHANNELS) {
                const float* log_decay = p.x.log_decay ? p.x.log_decay + at : nullptr;
                decay_sums(sums[h], log_decay, u.tokens, CHUNK, p.x.heads);
            }
            for (int t = lane; t < CHUNK; t += 32) {
                const float b = p.x.write && t < u.tokens ? p.x.write[at + size_t(t) * p.x.heads] : 1.f;
                write[h][t] = t < u.tokens ? b : 0.f;
            }
        }
    }
    // Decay from the chunk's start to a token (inclusive), and from a token to the chunk's end.
    DEVICE float prefix(int h, int t) const { return decay_between(make_float2(0.f, 0.f), sums[h][t]); }
    DEVICE float suffix(int h, int t) const { return decay_between(sums[h][t], sums[h][CHUNK - 1]); }
};
