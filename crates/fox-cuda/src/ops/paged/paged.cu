// Keys and values in pages: new ones to their places, and all of them into rows for attention of many queries. Sums of
// the gates of what was written. Small writes, many at once.
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

// Number `i` of all pieces of rows of heads.
struct Piece {
    int piece, h, t;
};

DEVICE Piece piece_of(size_t i, const PagedParams& p) {
    const u32 pieces = p.head_dim / VEC, heads = p.kv_heads;
    // Divisions of 64 bits take several times as long.
    if (i >> 32 == 0) {
        const u32 head = u32(i) / pieces;
        return {int(u32(i) % pieces), int(head % heads), int(head / heads)};
    }
    const size_t head = i / pieces;
    return {int(i % pieces), int(head % heads), int(head / heads)};
}

extern "C" __global__ void write_pages(const __grid_constant__ PagedParams p) {
    const int pieces = p.head_dim / VEC;
    FOR_EACH(i, size_t(p.count) * p.kv_heads * pieces) {
        const auto [piece, h, t] = piece_of(i, p);
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
        const auto [piece, h, t] = piece_of(i, p);
        const int position = p.first + t, slot = position % PAGE, held = p.dropped ? p.dropped[h] * PAGE : 0;
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

// totals[run][head] = sum of the log gates of the run's rows: a warp for each, in one order.
extern "C" __global__ void gate_totals(const __grid_constant__ TotalsParams p) {
    const int i = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (i >= p.count) return;
    const GateRun run = p.runs[i / p.heads];
    double sum = 0.0;
    for (int t = run.first + lane; t < run.end; t += 32) {
        sum += clamp_log_gate(p.gates[size_t(t) * p.heads + i % p.heads]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) p.totals[i] = sum;
}

// Writes of words to where they belong, a thread block for each.
extern "C" __global__ void scatter(const __grid_constant__ ScatterParams p) {
    const ScatterPiece piece = p.pieces[blockIdx.x];
    for (int i = threadIdx.x; i < piece.count; i += blockDim.x) piece.to[i] = p.words[piece.first + i];
}
