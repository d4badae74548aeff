// Keys and values in pages: new ones to their places, and all of them into rows for attention of many queries.
// (Attention of one query per sequence reads the pages where they lie: decode_attention.cuh.)
//
// Compile-time: BF16, VEC.
#include "flat.cuh"
#include "params.cuh"

constexpr int PAGE = 64;

// A log gate that leaves nothing, and little enough that sums with it stay accurate.
constexpr float FORGET_ALL = -200.f;

DEVICE void copy(real* to, const real* from) {
    float x[VEC];
    load<VEC>(x, from);
    store<VEC>(to, x);
}

extern "C" __global__ void write_pages(const __grid_constant__ PagedParams p) {
    const int pieces = p.head_dim / VEC;
    FOR_EACH(i, size_t(p.count) * p.kv_heads * pieces) {
        const int piece = i % pieces, h = i / pieces % p.kv_heads, t = i / pieces / p.kv_heads;
        const int position = p.first + t, slot = position % PAGE;
        const Page page = p.table[size_t(position / PAGE) * p.kv_heads + h];
        const size_t head = size_t(p.row + t) * p.kv_heads + h;
        const size_t from = head * p.head_dim + piece * VEC, to = size_t(slot) * p.head_dim + piece * VEC;
        copy(page.k + to, p.k + from);
        copy(page.v + to, p.v + from);
        for (int g = piece; p.gates && g < p.group; g += pieces) {
            page.gates[g * PAGE + slot] = p.gates[head * p.group + g];
        }
    }
}

// What a head has dropped must have no weight where another head still holds its keys: zeros, and then a gate
// that forgets them.
extern "C" __global__ void gather_pages(const __grid_constant__ PagedParams p) {
    const int pieces = p.head_dim / VEC;
    FOR_EACH(i, size_t(p.count) * p.kv_heads * pieces) {
        const int piece = i % pieces, h = i / pieces % p.kv_heads, t = i / pieces / p.kv_heads;
        const int position = p.first + t, slot = position % PAGE, held = p.dropped[h] * PAGE;
        const Page page = p.table[size_t(position / PAGE) * p.kv_heads + h];
        const size_t head = size_t(p.row + t) * p.kv_heads + h;
        const size_t to = head * p.head_dim + piece * VEC, from = size_t(slot) * p.head_dim + piece * VEC;
        if (position < held) {
            const float zeros[VEC] = {};
            store<VEC>(p.k + to, zeros);
            store<VEC>(p.v + to, zeros);
        } else {
            copy(p.k + to, page.k + from);
            copy(p.v + to, page.v + from);
        }
        for (int g = piece; p.gates && g < p.group; g += pieces) {
            float gate = 0.f;
            if (position >= held) gate = page.gates[g * PAGE + slot];
            if (position == held && held > p.first) gate = FORGET_ALL;
            p.gates[head * p.group + g] = gate;
        }
    }
}
