// y[rows, N] = x[rows, K] w[N, K]^T for 17 and more decode rows: tiles of weights and rows through shared memory.
//
// Outputs have the bits of decode_matmul: the same K_SPLITS ranges of K, each reduced in the same order by the same
// instructions for the same columns, and partial sums added in order. A warp takes all K splits one after the other.
// With SPLIT a thread block takes one, y is [K_SPLITS][rows, stride], and the consumer of y adds the partial sums.
//
// Compile-time: BM weight rows (with GLU half of them gates), BN rows, WM x WN warps, K_SPLITS, STAGES, SPLIT, GLU.
#include "decode.cuh"
#include "mma.cuh"
#include "params.cuh"

constexpr int WARPS = WM * WN;
constexpr int THREADS = 32 * WARPS;
constexpr int MT = BM / 16 / WM, NT = BN / 8 / WN;  // tiles of a warp
constexpr int RESULTS = GLU ? 8 : 16;               // outputs of 16 weight rows
constexpr int STEPS = 2;                            // steps of 32 columns per stage
constexpr int CHUNKS = 4 * STEPS;                   // 16-byte chunks per row of a stage
constexpr int WEIGHTS = STEPS * BM * 32;            // weights per stage
constexpr int STAGE = WEIGHTS + STEPS * BN * 32;
constexpr int OWN_WEIGHTS = BM * CHUNKS / THREADS, OWN_ROWS = BN * CHUNKS / THREADS;  // chunks per thread
static_assert(BM * CHUNKS % THREADS == 0 && BN * CHUNKS % THREADS == 0, "every thread copies the same number of chunks");

// Iterates over the stages of a thread block's K splits.
struct Cursor {
    int steps, split, last, at, end;

    DEVICE Cursor(int steps, int split, int last) : steps(steps), split(split), last(last) { begin(); }
    DEVICE bool is_inside() const { return split < last; }
    DEVICE void next() {
        at += STEPS;
        if (at >= end && ++split < last) begin();
    }
    DEVICE bool ends_split() const { return at + STEPS >= end; }

  private:
    // Moves to the first stage of this split, or of the next one that is not empty.
    DEVICE void begin() {
        for (; split < last; ++split) {
            at = split * steps / K_SPLITS, end = (split + 1) * steps / K_SPLITS;
            if (at < end) return;
        }
    }
};

DEVICE uint4 read_shared(const u16* p) { return *reinterpret_cast<const uint4*>(p); }

extern "C" __global__ void __launch_bounds__(THREADS) decode_matmul_tiled(const __grid_constant__ DecodeMatmul p) {
#if EMULATED
    static __align__(16) u16 memory[STAGES * STAGE];
#else
    extern __shared__ __align__(16) u16 memory[];
#endif
    let_successor_begin();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_m = warp % WM, warp_n = warp / WM;
    // The matrix of this block, and its first tile of 16 weight rows.
    const DecodeMatrix matrix = matrix_of_block(p);
    const int first_tile = (blockIdx.y - matrix.first_block) * (BM / 16);
    const int steps = p.width / 32;
    const int first_split = SPLIT ? blockIdx.z : 0, last_split = SPLIT ? first_split + 1 : K_SPLITS;

    // The weight rows of this thread's chunks; null beyond the last row.
    const u16* own[OWN_WEIGHTS];
#pragma unroll
    for (int i = 0; i < OWN_WEIGHTS; ++i) {
        const int row = (threadIdx.x + i * THREADS) / CHUNKS, half = row % 16 / 8;
        const int result = (first_tile + row / 16) * RESULTS + (GLU ? row % 8 : row % 16);
        const int source = GLU && half ? matrix.rows + result : result;
        own[i] = result < matrix.rows ? matrix.w + size_t(source) * p.width : nullptr;
    }
    const auto copy_weights = [&](int slot, const Cursor& c) {
#pragma unroll
        for (int i = 0; i < OWN_WEIGHTS; ++i) {
            const int e = threadIdx.x + i * THREADS, row = e / CHUNKS, chunk = e % CHUNKS, step = chunk / 4;
            u16* to = memory + slot * STAGE + (step * BM + row) * 32 + chunk % 4 * 8;
            if (c.at + step < c.end) copy_async(to, own[i] ? own[i] + 32 * c.at + 8 * chunk : matrix.w, own[i]);
        }
    };
    const u16* x = p.x + size_t(blockIdx.x) * (BN / 8) * steps * 256;
    const auto copy_rows = [&](int slot, const Cursor& c) {
#pragma unroll
        for (int i = 0; i < OWN_ROWS; ++i) {
            const int e = threadIdx.x + i * THREADS, tile = e / (8 * CHUNKS), chunk = e % (8 * CHUNKS), step = chunk / 32;
            u16* to = memory + slot * STAGE + WEIGHTS + (step * (BN / 8) + tile) * 256 + chunk % 32 * 8;
            if (c.at + step < c.end) copy_async(to, x + (size_t(tile) * steps + c.at) * 256 + 8 * chunk, true);
        }
    };

    // Only weights may be read before the predecessor has ended.
    Cursor ahead(steps, first_split, last_split), now = ahead;
    for (int s = 0; s < STAGES - 1 && ahead.is_inside(); ++s, ahead.next()) copy_weights(s, ahead);
    wait_for_predecessor();
    ahead = now;
    for (int s = 0; s < STAGES - 1; ++s) {
        if (ahead.is_inside()) copy_rows(s, ahead), ahead.next();
        copy_commit();
    }

    float c[MT][NT][4], total[MT][NT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
        for (int t = 0; t < NT; ++t) {
#pragma unroll
            for (int r = 0; r < 4; ++r) c[m][t][r] = total[m][t][r] = 0.f;
        }
    }
    for (int slot = 0; now.is_inside(); now.next(), slot = (slot + 1) % STAGES) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        // All threads are done with the previous stage.
        if (ahead.is_inside()) {
            const int free = (slot + STAGES - 1) % STAGES;
            copy_weights(free, ahead);
            copy_rows(free, ahead);
            ahead.next();
        }
        copy_commit();
        const u16* stage = memory + slot * STAGE;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (now.at + step >= now.end) break;
            uint4 b[NT];
#pragma unroll
            for (int t = 0; t < NT; ++t) {
                b[t] = read_shared(stage + WEIGHTS + (step * (BN / 8) + warp_n * NT + t) * 256 + 8 * lane);
            }
            uint4 top[MT], bottom[MT];
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                const u16* a = stage + (step * BM + (warp_m * MT + m) * 16) * 32 + 8 * lane;
                top[m] = exchange_k16(read_shared(a)), bottom[m] = exchange_k16(read_shared(a + 8 * 32));
            }
            // Successive instructions add to different accumulators, so that they do not depend on each other.
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                const u32 left[4] = {top[m].x, bottom[m].x, top[m].y, bottom[m].y};
#pragma unroll
                for (int t = 0; t < NT; ++t) mma(c[m][t], left, b[t].x, b[t].y);
            }
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                const u32 right[4] = {top[m].z, bottom[m].z, top[m].w, bottom[m].w};
#pragma unroll
                for (int t = 0; t < NT; ++t) mma(c[m][t], right, b[t].z, b[t].w);
            }
        }
        if (now.ends_split()) {
#pragma unroll
            for (int m = 0; m < MT; ++m) {
#pragma unroll
                for (int t = 0; t < NT; ++t) {
#pragma unroll
                    for (int r = 0; r < 4; ++r) total[m][t][r] += c[m][t][r], c[m][t][r] = 0.f;
                }
            }
        }
    }

    float* y = p.y + (SPLIT ? size_t(first_split) * gridDim.x * BN * p.stride : 0);
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        const int tile = first_tile + warp_m * MT + m;
#pragma unroll
        for (int t = 0; t < NT; ++t) {
#pragma unroll
            for (int r = 0; r < (GLU ? 2 : 4); ++r) {
                const int row = blockIdx.x * BN + (warp_n * NT + t) * 8 + 2 * (lane % 4) + r % 2;
                const int result = tile * RESULTS + lane / 4 + (r >= 2 ? 8 : 0);
                if (result >= matrix.rows) continue;
                float sum = total[m][t][r];
                if (GLU) {
                    const float up = total[m][t][r + 2];
                    p.inner[blocked(row, result, matrix.rows, gridDim.x * BN)] = float_to_bf16(activation(p.act, sum).x * up);
                } else {
                    if (matrix.bias) sum += matrix.bias[result];
                    y[size_t(row) * p.stride + matrix.start + result] = sum;
                }
            }
        }
    }
}
