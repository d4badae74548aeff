// Shared by the attention kernels: gate prefix sums and masks.
//
// Gate prefixes. c_t = log2(e) * (sum of log gates up to position t) is stored as a pair of floats
// (hi + lo, from an f64 scan), laid out [head][padded position]: a segment starts at `c_base`, a
// multiple of 128. Differences of pairs are accurate relative to the difference itself, however
// long the sequence, so each tile works with small f32 numbers relative to one reference position.
#pragma once
#include "params.cuh"

constexpr int MASK_CAUSAL = 0;
constexpr int MASK_BIDIRECTIONAL = 1;

// c_a - c_b
DEVICE float gate_difference(float2 a, float2 b) { return (a.x - b.x) + (a.y - b.y); }
// In f64, for comparisons with a threshold when b is far away.
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
