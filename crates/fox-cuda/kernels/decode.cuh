// What the parts of a decode step share: parameters, shared memory, waiting for each other.
#pragma once
#include "ptx.cuh"
#include "tma.cuh"

constexpr int WARPS = 8;                // that compute; one more sees to the stream of weights
constexpr int THREADS = 32 * WARPS;
constexpr int TURN = 32 * WARPS;        // columns of a row that all warps multiply at once, 8 to a lane
constexpr int SLOT = SLOT_TURNS * TURN;  // columns of a row in one slot of the ring
constexpr int PITCH = SLOT + 32;        // rows of a slot lie in different banks
constexpr int ROWS = 8;                 // of weights in a tile
constexpr int MAX_BATCH = 8;            // sequences, of which BATCH have room

// The products: four of each layer, and the last.
constexpr int PROJECT = 0, OUTPUT = 1, GATE_UP = 2, DOWN = 3, PER_LAYER = 4, HEAD = 4;

// The matrices of PROJECT.
constexpr int QUERY = 0, KEY = 1, VALUE = 2, KEY_SHIFT = 3, VALUE_SHIFT = 4, FORGET = 5, OUTPUT_GATE = 6;
constexpr int PARTS = 7, BIASES = 3;

// Where a page lies: keys and values [PAGE, d], log gates [group, PAGE].
constexpr int PAGE = 64;
struct Page {
    u16 *k, *v;
    float* gates;
};

// What one layer has of one sequence.
struct Sequence {
    const u16 *last_k, *last_v;  // raw rows of the step before [kv_heads * d], or null
    u16 *next_k, *next_v;        // raw rows of this step, or null
    const Page* pages;           // [page][kv_heads], or null: rows of the cache
    const int* dropped;          // pages gone from the front [kv_heads]
};

// Addresses of one layer.
struct Layer {
    const u16* weights[PARTS + 3];  // the parts, then OUTPUT, GATE_UP and DOWN
    const float* bias[BIASES];      // of queries, keys and values, or null
    const float *mixer_norm, *mlp_norm;
    const float* gate_bias;               // [heads], or null
    const float *q_norm, *k_norm;         // [heads * d] or [d], or null
    const float* out_norm;                // [heads * d], or null
    u16 *k_cache, *v_cache;               // [rows, kv_heads * d], where there are no pages
    float* gate_cache;                    // [rows, heads], or null
    const Sequence* sequences;            // [batch]
    float* new_gates;                     // log gates of this step [batch, heads], or null
};

// One kind of product: w [rows, width] (all parts together for PROJECT, pairs of rows for GATE_UP).
struct Stage {
    int rows, width, tiles, slots;  // slots of a tile
};

// What thread blocks send to each other: f32 projections, part by part [batch, rows], and pairs of bf16 of
// attention [batch, heads * d], of the output projection [batch, D], inside the MLP [batch, I] and of the
// MLP [batch, D].
constexpr int RAW = 0, ATTENDED = 1, MIXED = 2, INNER = 3, DELTA = 4, KINDS = 5;

struct Params {
    const Layer* layers;
    const u16* input;  // the embedded tokens [batch, D]
    u64* mail;         // [layer_count][layer_words]
    u64* partial;      // [batch][heads][splits][d + 4]: sum of p v; maximum, sum of p, decay
    const float* norm;  // after the last layer [D]
    const u16* head;   // [V, D]
    float* logits;     // [batch, V]
    const float2* rope;  // [positions][d / 2], or null
    int epoch, layer_count, batch, width;
    int heads, kv_heads, splits, window;
    int q_shared, k_shared, output_act, mlp_act;
    float scale, norm_eps, qk_eps;
    int gated;         // whether anything is forgotten
    int most_slots;    // of all stages
    int layer_words;
    int mail_start[KINDS];
    Stage stages[HEAD + 1];
    int part_rows[PARTS], part_tiles[PARTS], raw_start[PARTS];
    int k_start[MAX_BATCH], k_len[MAX_BATCH];
};

DEVICE int products(const Params& p) { return PER_LAYER * p.layer_count + 1; }
DEVICE int stage_of(const Params& p, int n) { return n < PER_LAYER * p.layer_count ? n % PER_LAYER : HEAD; }

// Of the threads that compute; the warp of the stream goes its own way.
DEVICE void sync() { barrier_sync(1, THREADS); }

// ---- between thread blocks ----

// A word of mail has a value and the epoch that it belongs to, of which every layer of every step has its own.
// Whoever needs the value reads the word until it has the right epoch. So nobody has to wait for anything else,
// and there is nothing to put in order. Every layer has places of its own, which only the next step uses again.
DEVICE void post(u64* word, u32 value, u32 epoch) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(u64(epoch) << 32 | value) : "memory");
}
DEVICE void look(u64& a, const u64* word) {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(a) : "l"(word) : "memory");
}
DEVICE void look(u64& a, u64& b, const u64* words) {
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
        for (int i = 0; i < COUNT; ++i) look(a[i], words + i * step);
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

// Where mail of a kind begins, and the epoch that it must have.
struct Mail {
    u64* words;
    u32 epoch;
};
DEVICE Mail mail(const Params& p, int layer, int kind) {
    return Mail{p.mail + size_t(layer) * p.layer_words + p.mail_start[kind], u32(p.epoch + layer)};
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
