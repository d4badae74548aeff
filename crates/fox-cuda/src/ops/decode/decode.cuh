// What the parts of a decode step share: parameters, shared memory, waiting for each other.
#pragma once
#include "params.cuh"
#include "tma.cuh"

constexpr int WARPS = 8;                // that compute; one more copies weights
constexpr int THREADS = 32 * WARPS;
constexpr int TURN = 32 * WARPS;        // columns of a row that all warps multiply at once, 8 to a lane
constexpr int SLOT = SLOT_TURNS * TURN;  // columns of a row in one slot of the ring
constexpr int PITCH = SLOT + 32;        // rows of a slot lie in different banks
constexpr int ROWS = 8;                 // of weights in a tile
constexpr int MAX_BATCH = 8;            // sequences; BATCH is what a variant is compiled for

// The products: four of each layer, and the last.
constexpr int PROJECT = 0, OUTPUT = 1, GATE_UP = 2, DOWN = 3, PER_LAYER = 4, HEAD = 4;

// The matrices of PROJECT.
constexpr int QUERY = 0, KEY = 1, VALUE = 2, KEY_SHIFT = 3, VALUE_SHIFT = 4, FORGET = 5, OUTPUT_GATE = 6;
constexpr int PARTS = 7, BIASES = 3;

constexpr int PAGE = 64;  // keys of a page

// What thread blocks exchange: f32 projections, part by part [batch, rows], and pairs of bf16 of
// attention [batch, heads * d], of the output projection [batch, D], inside the MLP [batch, I] and of the
// MLP [batch, D].
constexpr int RAW = 0, ATTENDED = 1, MIXED = 2, INNER = 3, DELTA = 4, KINDS = 5;

// The host's arrays have these lengths.
static_assert(sizeof(Params::exchange_start) == sizeof(int[KINDS]) && sizeof(Params::stages) == sizeof(Stage[HEAD + 1]) &&
              sizeof(Params::part_rows) == sizeof(int[PARTS]) && sizeof(Params::k_len) == sizeof(int[MAX_BATCH]) &&
              sizeof(Layer::weights) == sizeof(u16*[PARTS + 3]) && sizeof(Layer::bias) == sizeof(float*[BIASES]));

DEVICE int products(const Params& p) { return PER_LAYER * p.layer_count + 1; }
DEVICE int stage_of(const Params& p, int n) { return n < PER_LAYER * p.layer_count ? n % PER_LAYER : HEAD; }

// Of the threads that compute, without the warp that copies weights.
DEVICE void sync() { barrier_sync(1, THREADS); }

// ---- between thread blocks ----

// Thread blocks exchange 64-bit words of a value and an epoch. Every layer of every step has its own epoch, and
// readers spin until the word has it: there is no other wait and no order of accesses to enforce. Every layer has
// words of its own, which only the next step uses again.
DEVICE void publish(u64* word, u32 value, u32 epoch) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(u64(epoch) << 32 | value) : "memory");
}
DEVICE void read_words(u64& a, const u64* word) {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(a) : "l"(word) : "memory");
}
DEVICE void read_words(u64& a, u64& b, const u64* words) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(words) : "memory");
}
DEVICE bool is_from(u64 word, u32 epoch) { return u32(word >> 32) == epoch; }

// COUNT numbers, `step` words apart.
template <int COUNT>
DEVICE void receive(float (&x)[COUNT], const u64* words, int step, u32 epoch) {
    u64 a[COUNT];
    bool all;
    do {
        all = true;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) read_words(a[i], words + i * step);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) all &= is_from(a[i], epoch);
    } while (!all);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) x[i] = __uint_as_float(u32(a[i]));
}
DEVICE float receive(const u64* word, u32 epoch) {
    float x[1];
    receive<1>(x, word, 0, epoch);
    return x[0];
}

// Where the words of a kind begin, and the epoch that they must have.
struct Channel {
    u64* words;
    u32 epoch;
};
DEVICE Channel channel(const Params& p, int layer, int kind) {
    return Channel{p.exchange + size_t(layer) * p.layer_words + p.exchange_start[kind], u32(p.epoch + layer)};
}

constexpr int MAX_GROUP = 8;                    // query heads of a key head
constexpr int LANES = HEAD_DIM / 8;             // of a key's row, 16 bytes each
constexpr int KEYS = THREADS / LANES;           // keys at a time
constexpr int KEY_TURNS = 8;                    // all of which are read before anything else happens
constexpr int SPLIT = KEYS * KEY_TURNS;         // keys that a thread block takes at once

// What attention needs of shared memory.
struct AttentionScratch {
    float q[MAX_GROUP][HEAD_DIM];
    float new_k[HEAD_DIM], new_v[HEAD_DIM], new_gate[MAX_GROUP];
    float s[THREADS];
    float o[WARPS][HEAD_DIM];
    float parts[3][WARPS];
};

// The stages do not need it at the same time.
union Scratch {
    struct {
        float sums[WARPS][THREADS];  // of the tiles of a group [tile][batch][ROWS]
        float squares[WARPS][MAX_BATCH];
    };
    AttentionScratch attention;
};
static_assert(sizeof(Scratch) <= SCRATCH, "the host's idea of the scratch memory");

// Shared memory.
struct Memory {
    u16* ring;         // [RING][ROWS][PITCH]
    u64 *full, *empty;  // [RING]
    Scratch* scratch;
    float* norm;       // [width]
    uint4* stream;     // the residual stream in bf16, eight columns each [turns][WARPS][BATCH][4]
    uint4* x;          // the input of a product, likewise
    Layer* layers;     // [layer_count]
};
DEVICE Memory carve(u8* shared, const Params& p) {
    Memory m;
    m.ring = reinterpret_cast<u16*>(shared);
    m.scratch = reinterpret_cast<Scratch*>(m.ring + RING * ROWS * PITCH);
    m.full = reinterpret_cast<u64*>(reinterpret_cast<u8*>(m.scratch) + SCRATCH);
    m.empty = m.full + RING;
    m.norm = reinterpret_cast<float*>(m.empty + RING);
    m.stream = reinterpret_cast<uint4*>(m.norm + p.width);
    m.x = m.stream + p.stages[PROJECT].slots * SLOT_TURNS * WARPS * 4 * BATCH;
    m.layers = reinterpret_cast<Layer*>(m.x + p.most_slots * SLOT_TURNS * WARPS * 4 * BATCH);
    return m;
}
