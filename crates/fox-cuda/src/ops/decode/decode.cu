// One new token for each of a few sequences through the whole model, in one launch: every multiprocessor
// runs one thread block from the first layer to the logits.
//
// Reading the weights takes the time, and it does not depend on the token. So one warp of each thread block
// copies its share of all matrices into a ring of slots in shared memory, ahead of the computation by as much as
// fits there, and goes on while the thread blocks wait for each other.
//
// Compile-time: HEAD_DIM (64, 128 or 256), BATCH (sequences, at most), SLOT_TURNS (columns of a slot by TURN),
// RING (slots), IN_FLIGHT (slots on their way at once), SCRATCH (bytes). Since Hopper, whose copies it needs.
#define BF16 1
#define VEC 8
#include "mma.cuh"
#include "real.cuh"
#include "decode.cuh"
#include "decode_attention.cuh"

// ---- the stream of weights ----

// Weights of a tile: those of one part of the projections, or of one of the other matrices.
struct Place {
    int part, row;
};
DEVICE Place place(const Params& p, int stage, int tile) {
    if (stage != PROJECT) return Place{PARTS - 1 + stage, tile * (stage == GATE_UP ? ROWS / 2 : ROWS)};
    int part = 0;
    while (tile >= p.part_tiles[part]) tile -= p.part_tiles[part++];
    return Place{part, tile * ROWS};
}

// Row `own` of a tile of weights; null beyond the last.
DEVICE const u16* weight_row(const Params& p, const Layer* layers, int layer, int stage, int tile,
                             int own) {
    const Place at = place(p, stage, tile);
    const u16* w = stage == HEAD ? p.head : layers[layer].weights[at.part];
    const int rows = stage == PROJECT ? p.part_rows[at.part] : p.stages[stage].rows;
    // A tile of gate and up has four rows of each.
    const bool pairs = stage == GATE_UP;
    const int row = at.row + (pairs ? own % 4 : own);
    const int line = pairs && own >= 4 ? rows + row : row;
    return row < rows ? w + size_t(line) * p.stages[stage].width : nullptr;
}

// First of the tiles of a stage that belong to this thread block: tiles are dealt out in turn, on and on
// through all stages. `dealt` is the number of tiles so far, modulo the grid.
DEVICE int first_tile(int dealt) {
    const int first = int(blockIdx.x) - dealt;
    return first < 0 ? first + int(gridDim.x) : first;
}

// Copies this thread block's tiles of all stages into the ring, by one warp, a row to a lane. No more copies are
// in flight at once than are needed to saturate the memory: the reads of the other warps, whose latency counts,
// would queue behind them.
DEVICE void stream_weights(const Memory& m, const Params& p) {
    const int lane = threadIdx.x % 32;
    Ring<RING> at, oldest;
    int copies = 0, dealt = 0;
    for (int n = 0; n < products(p); ++n) {
        const int stage = stage_of(p, n), width = p.stages[stage].width, tiles = p.stages[stage].tiles;
        for (int tile = first_tile(dealt); tile < tiles; tile += gridDim.x) {
            const u16* row =
                lane < ROWS ? weight_row(p, m.layers, n / PER_LAYER, stage, tile, lane) : nullptr;
            const int rows = __popc(__ballot_sync(~0u, row != nullptr));
            for (int column = 0; column < width; column += SLOT) {
                const u32 bytes = 2 * min(SLOT, width - column);
                mbarrier_wait(m.empty + at.stage, at.phase ^ 1);
                if (copies == IN_FLIGHT) {
                    mbarrier_wait(m.full + oldest.stage, oldest.phase);
                    oldest.next();
                } else {
                    ++copies;
                }
                if (lane == 0) mbarrier_expect(m.full + at.stage, rows * bytes);
                __syncwarp();
                if (row) {
                    bulk_load(m.ring + (at.stage * ROWS + lane) * PITCH, row + column, bytes,
                              m.full + at.stage);
                }
                at.next();
            }
        }
        dealt = (dealt + tiles) % int(gridDim.x);
    }
}

// ---- products ----

// Weights of a norm into shared memory; they do not depend on other thread blocks.
DEVICE void load_norm(const Memory& m, const float* w, int width) {
#pragma unroll 1
    for (int c = 4 * threadIdx.x; c < width; c += 4 * THREADS) {
        *reinterpret_cast<float4*>(m.norm + c) = __ldg(reinterpret_cast<const float4*>(w + c));
    }
}

// What other thread blocks have published, to shared memory: the columns that a warp will multiply, four at a time
// to a lane. In front of a norm it is added to the residual stream.
DEVICE void receive_columns(const Memory& m, const Params& p, const Channel& from, int stage, bool to_stream) {
    constexpr int AT_ONCE = 5;
    const int width = p.stages[stage].width;
    const int rows = p.stages[stage].slots * SLOT_TURNS * BATCH;  // of 32 columns, a turn of a sequence each
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = 32 * warp + 4 * (lane % 8);
    // One lane polls until the first word is there: all of them would load the memory.
    if (from.words && lane == 0 && 32 * warp < width) receive(from.words + 16 * warp, from.epoch);
    __syncwarp();
    for (int begin = lane / 8; begin < rows; begin += 4 * AT_ONCE) {
        u64 a[AT_ONCE][2];
        int at[AT_ONCE];  // b * width + column; -1 beyond the last column
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int row = begin + 4 * i, b = row % BATCH, column = row / BATCH * TURN + first;
            at[i] = row < rows && b < p.batch && column < width ? b * width + column : -1;
        }
        bool all = false;
        while (!all) {
            all = true;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                a[i][0] = a[i][1] = u64(from.epoch) << 32;
                if (at[i] >= 0 && from.words) read_words(a[i][0], a[i][1], from.words + at[i] / 2);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) all &= is_from(a[i][0], from.epoch) && is_from(a[i][1], from.epoch);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (begin + 4 * i >= rows) break;
            uint2 v = make_uint2(u32(a[i][0]), u32(a[i][1]));
            const int row = begin + 4 * i;
            const int slot = ((row / BATCH * WARPS + warp) * BATCH + row % BATCH) * 8 + lane % 8;
            if (to_stream) {
                uint2& stream = reinterpret_cast<uint2*>(m.stream)[slot];
                if (from.words) {
                    v.x = pack_bf16(bf16_lo(stream.x) + bf16_lo(v.x), bf16_hi(stream.x) + bf16_hi(v.x));
                    v.y = pack_bf16(bf16_lo(stream.y) + bf16_lo(v.y), bf16_hi(stream.y) + bf16_hi(v.y));
                } else if (at[i] >= 0) {
                    v = *reinterpret_cast<const uint2*>(p.input + at[i]);
                }
                stream = v;
            }
            reinterpret_cast<uint2*>(m.x)[slot] = v;
        }
    }
    __syncwarp();
}

// The input of a product, rms(stream) * norm where there is a norm.
DEVICE void load_input(const Memory& m, const Params& p, const Channel& from, int stage) {
    const bool norm = stage == PROJECT || stage == GATE_UP || stage == HEAD;
    receive_columns(m, p, from, stage, norm);
    if (!norm) return sync();
    const int width = p.stages[stage].width, turns = p.stages[stage].slots * SLOT_TURNS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, sequence = lane / 4;
    const bool active = sequence < p.batch;
    const int first = 32 * warp + 8 * (lane % 4), stride = WARPS * 4 * BATCH;
    uint4* x = m.x + warp * 4 * BATCH + lane;
    float squares = 0.f;
    for (int k = 0; k < turns && active; ++k) {
        float v[8];
        load<8>(v, reinterpret_cast<const u16*>(x + k * stride));
#pragma unroll
        for (int i = 0; i < 8; ++i) squares += v[i] * v[i];
    }
    squares = quad_sum(squares);
    if (active && lane % 4 == 0) m.scratch->squares[warp][sequence] = squares;
    sync();
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += m.scratch->squares[w][sequence];
    const float scale = 1.f / sqrtf(total / width + p.norm_eps);
    for (int k = 0; k < turns && active; ++k) {
        const int column = k * TURN + first;
        if (column >= width) break;
        float v[8], w[8];
        load<8>(v, reinterpret_cast<const u16*>(x + k * stride));
        load<8>(w, m.norm + column);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] *= scale * w[i];
        store<8>(reinterpret_cast<u16*>(x + k * stride), v);
    }
    __syncwarp();
}

// Tiles that are finished together, an element to a thread.
constexpr int GROUP = THREADS / ROWS / BATCH;

// Where a thread leaves its element, if it has one.
struct Target {
    u64* word;      // to other thread blocks
    float* result;  // or out of here
    float bias;
    u32 epoch;

    // `tile` is the first of the group.
    DEVICE Target(const Params& p, const Layer& layer, int n_layer, int stage, int tile)
        : word(), result(), bias(), epoch() {
        const int own = threadIdx.x % ROWS, b = threadIdx.x / ROWS % BATCH, n = threadIdx.x / ROWS / BATCH;
        tile += n * gridDim.x;
        if (b >= p.batch || tile >= p.stages[stage].tiles) return;
        if (stage == GATE_UP && own >= ROWS / 2) return;
        const Place at = place(p, stage, tile);
        const int rows = stage == PROJECT ? p.part_rows[at.part] : p.stages[stage].rows, row = at.row + own;
        if (row >= rows) return;
        const int out = b * rows + row;
        if (stage == HEAD) {
            result = p.logits + out;
            return;
        }
        const int kind = stage == PROJECT ? RAW : stage == OUTPUT ? MIXED : stage == GATE_UP ? INNER : DELTA;
        const Channel to = channel(p, n_layer, kind);
        epoch = to.epoch;
        if (stage == PROJECT) {
            if (at.part < BIASES && layer.bias[at.part]) bias = layer.bias[at.part][row];
            word = to.words + p.raw_start[at.part] + out;
        } else {
            word = to.words + out / 2;
        }
    }

    // Adds up the warps' sums. By whole warps, of which the last may have nothing to do.
    DEVICE void finish(const Memory& m, const Params& p, int stage) const {
        if (!__any_sync(~0u, word || result)) return;
        float sum = bias, up = 0.f;
        if (word || result) {
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                sum += m.scratch->sums[w][threadIdx.x];
                if (stage == GATE_UP) up += m.scratch->sums[w][threadIdx.x + ROWS / 2];
            }
        }
        if (stage == GATE_UP) sum = activation(p.mlp_act, sum).x * up;
        const float next = __shfl_down_sync(~0u, sum, 1);
        if (result) *result = sum;
        if (!word) return;
        if (stage == PROJECT) publish(word, __float_as_uint(sum), epoch);
        else if (threadIdx.x % 2 == 0) publish(word, pack_bf16(sum, next), epoch);
    }
};

// y[batch, rows] = x w^T for this thread block's tiles of a stage.
//
// A lane reads eight columns of a row of weights, as four registers that are the first operand of one matrix
// instruction as they are: columns 0, 1, 4 and 5 as row g of the instruction, columns 2, 3, 6 and 7 as row g + 8.
// The second operand has two columns for each sequence, one with the input that belongs to each kind of row; of
// the products, those of a row with the other kind's column mean nothing.
DEVICE void product(const Memory& m, const Params& p, const Layer& layer, int n_layer, Target target,
                    Ring<RING>& at, int stage, int dealt) {
    constexpr int HALVES = (BATCH + 3) / 4;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tiles = p.stages[stage].tiles, slots = p.stages[stage].slots, width = p.stages[stage].width;
    const int first = 32 * warp + 8 * (lane % 4);
    const u16* weights = m.ring + lane / 4 * PITCH + first;
    u32 x[HALVES][SLOT_TURNS][2];
    const auto load_x = [&](int slot) {
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            const int sequence = 4 * h + lane / 8;
#pragma unroll
            for (int k = 0; k < SLOT_TURNS; ++k) {
                const int turn = slot * SLOT_TURNS + k;
                const u32* own = reinterpret_cast<const u32*>(m.x) + (turn * WARPS + warp) * 16 * BATCH +
                                 16 * sequence + 4 * (lane % 4) + lane / 4 % 2;
                x[h][k][0] = sequence < BATCH ? own[0] : 0;
                x[h][k][1] = sequence < BATCH ? own[2] : 0;
            }
        }
    };
    load_x(0);
    for (int tile = first_tile(dealt); tile < tiles;) {
        for (int n = 0; n < GROUP && tile < tiles; ++n, tile += gridDim.x) {
            float sums[HALVES][2][4] = {};
            for (int slot = 0; slot < slots; ++slot) {
                if (slots > 1) load_x(slot);
                mbarrier_wait(m.full + at.stage, at.phase);
                const u16* here = weights + at.stage * ROWS * PITCH;
                uint4 w[SLOT_TURNS];
#pragma unroll
                for (int k = 0; k < SLOT_TURNS; ++k) {
                    // Beyond the last column lies whatever was there before.
                    const bool inside = (slot * SLOT_TURNS + k) * TURN + first < width;
                    w[k] = inside ? *reinterpret_cast<const uint4*>(here + k * TURN) : make_uint4(0, 0, 0, 0);
                }
#pragma unroll
                for (int h = 0; h < HALVES; ++h) {
#pragma unroll
                    for (int k = 0; k < SLOT_TURNS; ++k) {
                        const u32 a[4] = {w[k].x, w[k].y, w[k].z, w[k].w};
                        mma(sums[h][k % 2], a, x[h][k][0], x[h][k][1]);
                    }
                }
                __syncwarp();
                mbarrier_arrive_warp(m.empty + at.stage);
                at.next();
            }
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                const int sequence = 4 * h + lane % 4;
                if (sequence < BATCH) {
                    const float sum = sums[h][0][0] + sums[h][0][3] + (sums[h][1][0] + sums[h][1][3]);
                    m.scratch->sums[warp][(n * BATCH + sequence) * ROWS + lane / 4] = sum;
                }
            }
        }
        sync();
        target.finish(m, p, stage);
        if (tile < tiles) {
            target = Target(p, layer, n_layer, stage, tile);
            sync();
        }
    }
}

// ---- the whole step ----

// What a product waits for; nothing in the beginning.
DEVICE Channel input_of(const Params& p, int n, int stage) {
    const int layer = n / PER_LAYER;
    switch (stage) {
        case OUTPUT: return channel(p, layer, ATTENDED);
        case GATE_UP: return channel(p, layer, MIXED);
        case DOWN: return channel(p, layer, INNER);
        default: return n == 0 ? Channel{nullptr, 0} : channel(p, layer - 1, DELTA);
    }
}

// Grid: as many thread blocks as run at once.
extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) decode_step(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) u8 shared[];
    const Memory m = carve(shared, p);
    constexpr int WORDS = sizeof(Layer) / 8;
    for (int i = threadIdx.x; i < p.layer_count * WORDS; i += blockDim.x) {
        reinterpret_cast<u64*>(m.layers)[i] = reinterpret_cast<const u64*>(p.layers)[i];
    }
    if (threadIdx.x < RING) {
        mbarrier_init(m.full + threadIdx.x, 1);
        mbarrier_init(m.empty + threadIdx.x, WARPS * WARP_ARRIVALS);
        mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x >= THREADS) return stream_weights(m, p);
    Ring<RING> at;
    int dealt = 0;
    for (int n = 0; n < products(p); ++n) {
        const int stage = stage_of(p, n);
        // The last product has no layer of its own.
        const int n_layer = min(n / PER_LAYER, p.layer_count - 1);
        const Layer& layer = m.layers[n_layer];
        // What does not depend on the others comes before the wait.
        if (stage == PROJECT) load_norm(m, layer.mixer_norm, p.width);
        if (stage == OUTPUT) attention(m, p, layer, n_layer);
        if (stage == GATE_UP) load_norm(m, layer.mlp_norm, p.width);
        if (stage == HEAD) load_norm(m, p.norm, p.width);
        const Target target(p, layer, n_layer, stage, first_tile(dealt));
        const Channel input = input_of(p, n, stage);
        load_input(m, p, input, stage);
        product(m, p, layer, n_layer, target, at, stage, dealt);
        dealt = (dealt + p.stages[stage].tiles) % int(gridDim.x);
    }
#endif
}
