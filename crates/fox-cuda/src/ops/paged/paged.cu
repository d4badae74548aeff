// The paged KV cache: writes new keys, values, gates and transitions into pages; gathers pages into rows for attention of many
// queries; sums log gates; scatters small writes. (decode_attention.cu reads pages in place.)
//
// Compile-time: BF16, VEC.
#include "constants.cuh"
#include "flat.cuh"
#include "params.cuh"

// A log gate that forgets everything before it, yet small enough for accurate prefix sums.
constexpr float FORGET_ALL = -200.f;

DEVICE void copy(real* to, const real* from) {
    float x[VEC];
    load<VEC>(x, from);
    store<VEC>(to, x);
}

// Vector number `i` of all keys: its index within the head, key head and token.
struct VectorIndex {
    int vector, h, t;
};

DEVICE VectorIndex vector_index(size_t i, const PagedParams& p) {
    const u32 vectors = p.head_dim / VEC, heads = p.kv_heads;
    // 32-bit divisions are several times as fast.
    if (i >> 32 == 0) {
        const u32 head = u32(i) / vectors;
        return {int(u32(i) % vectors), int(head % heads), int(head / heads)};
    }
    const size_t head = i / vectors;
    return {int(i % vectors), int(head % heads), int(head / heads)};
}

extern "C" __global__ void write_pages(const __grid_constant__ PagedParams p) {
    const int vectors = p.head_dim / VEC;
    FOR_EACH(i, size_t(p.count) * p.kv_heads * vectors) {
        const auto [vector, h, t] = vector_index(i, p);
        const int position = p.first + t, slot = position % PAGE;
        const Page page = p.table[size_t(position / PAGE) * p.kv_heads + h];
        const size_t head = size_t(p.row + t) * p.kv_heads + h;
        const size_t from = head * p.head_dim + vector * VEC, to = size_t(slot) * p.head_dim + vector * VEC;
        copy(page.k + to, p.k + from);
        copy(page.v + to, p.v + from);
        for (int g = vector; p.gates && g < p.group; g += vectors) {
            page.gates[g * PAGE + slot] = p.gates[head * p.group + g];
        }
        for (int c = vector; p.transitions && c < p.transition; c += vectors) {
            page.transitions[slot * p.transition + c] = p.transitions[head * p.transition + c];
        }
    }
}

// Keys that a head has evicted while another head still holds them get no weight: zeros, followed by a gate that forgets
// them.
extern "C" __global__ void gather_pages(const __grid_constant__ PagedParams p) {
    const int vectors = p.head_dim / VEC;
    FOR_EACH(i, size_t(p.count) * p.kv_heads * vectors) {
        const auto [vector, h, t] = vector_index(i, p);
        const int position = p.first + t, slot = position % PAGE, held = p.dropped ? p.dropped[h] * PAGE : 0;
        const Page page = p.table[size_t(position / PAGE) * p.kv_heads + h];
        const size_t head = size_t(p.row + t) * p.kv_heads + h;
        const size_t to = head * p.head_dim + vector * VEC, from = size_t(slot) * p.head_dim + vector * VEC;
        if (position < held) {
            const float zeros[VEC] = {};
            store<VEC>(p.k + to, zeros);
            store<VEC>(p.v + to, zeros);
        } else {
            copy(p.k + to, page.k + from);
            copy(p.v + to, page.v + from);
        }
        for (int g = vector; p.gates && g < p.group; g += vectors) {
            float gate = 0.f;
            if (position >= held) gate = page.gates[g * PAGE + slot];
            if (position == held && held > p.first) gate = FORGET_ALL;
            p.gates[head * p.group + g] = gate;
        }
        for (int c = vector; p.transitions && c < p.transition; c += vectors) {
            // A transition of zeros changes nothing.
            const float x = position < held ? 0.f : page.transitions[slot * p.transition + c];
            p.transitions[head * p.transition + c] = x;
        }
    }
}

// totals[range][head] = sum of the log gates of a range of rows; one warp each, in fixed order.
extern "C" __global__ void gate_totals(const __grid_constant__ TotalsParams p) {
    const int i = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (i >= p.count) return;
    const RowRange range = p.ranges[i / p.heads];
    double sum = 0.0;
    for (int t = range.first + lane; t < range.end; t += 32) {
        sum += clamp_log_gate(p.gates[size_t(t) * p.heads + i % p.heads]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) p.totals[i] = sum;
}

// Many small writes of 8-byte words, one thread block each.
extern "C" __global__ void scatter(const __grid_constant__ ScatterParams p) {
    const ScatterWrite write = p.writes[blockIdx.x];
    for (int i = threadIdx.x; i < write.count; i += blockDim.x) write.to[i] = p.words[write.first + i];
}
