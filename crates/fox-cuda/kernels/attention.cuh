// What the attention kernels share: descriptions of segments and tiles, gate prefixes, masks.
//
// Gate prefixes. c_t = log2(e) * (sum of log gates up to position t) is kept as a pair of floats
// (hi + lo, from an f64 scan), laid out [head][padded position]: a segment starts at `c_base`, a
// multiple of 128. Differences of pairs are accurate relative to the difference itself, however
// long the sequence, so each tile works with small f32 numbers relative to one reference position.
#pragma once
#include "ptx.cuh"

constexpr int MASK_CAUSAL = 0;
constexpr int MASK_BIDIRECTIONAL = 1;

// One sequence; mirrors `Segment` of the Rust side, with the derived offsets.
struct Segment {
    int q_start, q_len, k_start, k_len;
    int c_base;   // first padded position
    int m_tile0;  // index of its first block of queries in the list of such blocks
    int n_tile0;  // same for blocks of keys
    int unused;
};

// A block of queries (or keys): which segment, which block of it.
struct BlockRef {
    int segment, block;
};

// Everything the forward kernel needs to know about one tile of queries of one head.
struct alignas(16) ForwardTile {
    int head, kv_head;  // head < 0: no more work
    int q_row, q_valid; // first row in the tensor, rows that exist
    int position;       // of the first row, counted from the segment's first key
    int k_row, k_len;
    int c_base;
    int n_begin, n_end;  // blocks of keys to visit
    int unused[2];
};

// c_a - c_b
DEVICE float gate_difference(float2 a, float2 b) { return (a.x - b.x) + (a.y - b.y); }
// The same where b is far away and the order of additions must not lose it: exact enough for tests
// against a threshold.
DEVICE double gate_difference_f64(float2 a, float2 b) {
    return (double(a.x) - double(b.x)) + (double(a.y) - double(b.y));
}

// Columns [lo, hi) of a block of keys that a query may see; `first` is the block's first position.
struct Visible {
    int lo, hi;
};

template <int KIND, bool WINDOWED>
DEVICE Visible visible_columns(int position, int k_len, int first, int window) {
    int hi = KIND == MASK_CAUSAL ? min(position + 1, k_len) : k_len;
    int lo = 0;
    if (WINDOWED) {
        lo = position - window + 1;
        if (KIND == MASK_BIDIRECTIONAL) hi = min(hi, position + window);
    }
    return Visible{lo - first, hi - first};
}

// Whether some of the queries at [position, position + rows) cannot see some of the keys at
// [first, first + columns): only such tiles pay for masking.
template <int KIND, bool WINDOWED>
DEVICE bool needs_mask(int position, int rows, int k_len, int first, int columns, int window) {
    int end = first + columns;
    bool mask = end > k_len;
    if (KIND == MASK_CAUSAL) mask |= end > position + 1;
    if (WINDOWED) {
        mask |= first < position + rows - window;
        if (KIND == MASK_BIDIRECTIONAL) mask |= end > position + window;
    }
    return mask;
}
