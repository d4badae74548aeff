// y[rows, N] = x[rows, K] w[N, K]^T for 17 and more decode rows on Hopper, by wgmma.
//
// Outputs have the bits of decode_matmul: the same K_SPLITS ranges of K, each reduced in the same order in k16 steps, and
// partial sums added in order. (wgmma and mma reduce 16 products alike in hardware; the self-test verifies it.) A
// warpgroup takes 64 weight rows. With SPLIT a thread block takes one K split, y is [K_SPLITS][rows, stride], and the
// consumer of y adds the partial sums.
//
// x lies in swizzled slabs [K / 64][rows][64] (`blocked` in decode.cuh), so that the rows of a slab are one bulk copy.
// Weights are plain row-major; every thread copies chunks of eight to their swizzled positions.
//
// Compile-time: BM weight rows (with GLU half of them gates), BN rows, K_SPLITS, STAGES, SPLIT, GLU.
#define SLABS 1
#include "decode.cuh"
#include "mma.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
#include "params.cuh"

constexpr int THREADS = 2 * BM;
constexpr int RESULTS = GLU ? 8 : 16;      // outputs of 16 weight rows
constexpr int EIGHTS = 8;                  // chunks of eight columns in a slab
constexpr int WEIGHTS = BM * 64;           // weights per stage
constexpr int STAGE = WEIGHTS + BN * 64;
constexpr int OWN = BM * EIGHTS / THREADS; // chunks per thread
constexpr u32 ROW_BYTES = BN * 128;

// Iterates over the slabs of a thread block's K splits.
struct Cursor {
    int slabs, split, last, at, end;

    DEVICE Cursor(int slabs, int split, int last) : slabs(slabs), split(split), last(last) { begin(); }
    DEVICE bool is_inside() const { return split < last; }
    DEVICE void next() {
        if (++at >= end && ++split < last) begin();
    }
    DEVICE bool begins_split() const { return at == split * slabs / K_SPLITS; }
    DEVICE bool ends_split() const { return at + 1 >= end; }

  private:
    // Moves to the first slab of this split, or of the next one that is not empty.
    DEVICE void begin() {
        for (; split < last; ++split) {
            at = split * slabs / K_SPLITS, end = (split + 1) * slabs / K_SPLITS;
            if (at < end) return;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) decode_matmul_sm90(const __grid_constant__ DecodeMatmul p) {
#if EMULATED
    static __align__(1024) u16 memory[STAGES * (STAGE + 4)];
#else
    extern __shared__ __align__(1024) u16 memory[];
#endif
    u64* arrived = reinterpret_cast<u64*>(memory + STAGES * STAGE);
    let_successor_begin();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // The matrix of this block, and its first tile of 16 weight rows.
    const DecodeMatrix matrix = matrix_of_block(p);
    const int first_tile = (blockIdx.y - matrix.first_block) * (BM / 16);
    const int slabs = p.width / 64;
    const int first_split = SPLIT ? blockIdx.z : 0, last_split = SPLIT ? first_split + 1 : K_SPLITS;
    // The first thread uses the barriers before the others do, which synchronize below.
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) mbarrier_init(arrived + s, 1);
        mbarrier_init_fence();
    }

    // A thread copies the same columns of every (THREADS / EIGHTS)-th row, from first_row on.
    const int first_row = threadIdx.x / EIGHTS, column = threadIdx.x % EIGHTS * 8;
    const auto copy_weights = [&](int slot, const Cursor& c) {
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int row = first_row + i * (THREADS / EIGHTS), half = row % 16 / 8;
            const int result = (first_tile + row / 16) * RESULTS + (GLU ? row % 8 : row % 16);
            const int source = GLU && half ? matrix.rows + result : result;
            const bool exists = result < matrix.rows;
            copy_async(memory + slot * STAGE + row * 64 + swizzled_column(row, column),
                       matrix.w + (exists ? size_t(source) * p.width + 64 * c.at + column : 0), exists);
        }
    };
    const size_t rows = size_t(gridDim.x) * BN;
    const auto copy_rows = [&](int slot, const Cursor& c) {
        if (threadIdx.x > 0) return;
        mbarrier_expect(arrived + slot, ROW_BYTES);
        bulk_load(memory + slot * STAGE + WEIGHTS, p.x + (c.at * rows + size_t(blockIdx.x) * BN) * 64, ROW_BYTES,
                  arrived + slot);
    };

    // Only weights may be read before the predecessor has ended. Two stages are in use by wgmma.
    constexpr int AHEAD = STAGES - 2;
    Cursor ahead(slabs, first_split, last_split), now = ahead;
    for (int s = 0; s < AHEAD; ++s) {
        if (ahead.is_inside()) copy_weights(s, ahead), ahead.next();
        copy_commit();
    }
    wait_for_predecessor();
    ahead = now;
    for (int s = 0; s < AHEAD && ahead.is_inside(); ++s, ahead.next()) copy_rows(s, ahead);

    float c[BN / 2], total[BN / 2];
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) c[i] = total[i] = 0.f;
    // Makes the barriers visible to all threads.
    __syncthreads();
    Ring<STAGES> ring;
    for (; now.is_inside(); now.next(), ring.next()) {
        copy_wait<AHEAD - 1>();
        fence_async_proxy();
        mbarrier_wait(arrived + ring.stage, ring.phase);
        // All threads have waited for the wgmma that read the stage about to be refilled.
        __syncthreads();
        if (ahead.is_inside()) {
            const int free = (ring.stage + AHEAD) % STAGES;
            copy_weights(free, ahead);
            copy_rows(free, ahead);
            ahead.next();
        }
        copy_commit();
        const u16* stage = memory + ring.stage * STAGE;
        const u64 left = matrix_descriptor(stage + threadIdx.x / 128 * (64 * 64), 0);
        const u64 right = matrix_descriptor(stage + WEIGHTS, 0);
        const int is_later = !now.begins_split();
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            Wgmma<BN>::template ss<K_MAJOR, K_MAJOR>(c, descriptor_advance(left, 32 * k),
                                                     descriptor_advance(right, 32 * k), k > 0 || is_later);
        }
        wgmma_commit();
        if (now.ends_split()) {
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < BN / 2; ++i) total[i] += c[i];
        } else {
            wgmma_wait<1>();
        }
    }

    float* y = p.y + (SPLIT ? first_split * rows * p.stride : 0);
    const int tile = first_tile + warp;
#pragma unroll
    for (int t = 0; t < BN / 8; ++t) {
#pragma unroll
        for (int r = 0; r < (GLU ? 2 : 4); ++r) {
            const int row = blockIdx.x * BN + t * 8 + 2 * (lane % 4) + r % 2;
            const int result = tile * RESULTS + lane / 4 + (r >= 2 ? 8 : 0);
            if (result >= matrix.rows) continue;
            float sum = total[4 * t + r];
            if (GLU) {
                const float up = total[4 * t + r + 2];
                p.inner[blocked(row, result, matrix.rows, rows)] = float_to_bf16(activation(p.act, sum).x * up);
            } else {
                if (matrix.bias) sum += matrix.bias[result];
                y[size_t(row) * p.stride + matrix.start + result] = sum;
            }
        }
    }
}
