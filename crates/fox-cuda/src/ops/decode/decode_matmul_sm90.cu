// y[rows, N] = x[rows, K] w[N, K]^T for many decode rows, by Hopper's products.
//
// A result has the bits that decode_matmul gives it: the columns of K are divided into the same PARTS runs, a run is
// added up in the same order, 16 columns at once, the same ones, and the runs are added in order. (That an instruction of
// a warpgroup adds 16 products to a sum as one of a warp does is a matter of the hardware; the self-test compares.) A
// warpgroup has 64 rows of weights. With SPLIT a thread block does one run, and whoever reads the results adds up the
// runs: y is [PARTS][rows, stride] then.
//
// x lies in slabs [K / 64][rows][64], swizzled (`blocked` in decode.cuh), so that the rows of a slab are one copy. The
// weights lie as they are, and every thread copies eight at a time to where the products expect them.
//
// Compile-time: BM rows of weights (with GLU half of them gates), BN rows, PARTS, STAGES, SPLIT, GLU.
#define SLABS 1
#include "decode.cuh"
#include "mma.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
#include "params.cuh"

constexpr int THREADS = 2 * BM;
constexpr int RESULTS = GLU ? 8 : 16;      // of 16 rows of weights
constexpr int EIGHTS = 8;                  // of columns in a slab
constexpr int WEIGHTS = BM * 64;           // values of a stage
constexpr int STAGE = WEIGHTS + BN * 64;
constexpr int OWN = BM * EIGHTS / THREADS; // of a thread
constexpr u32 ROW_BYTES = BN * 128;

// Goes through the slabs of a thread block's runs.
struct Cursor {
    int slabs, run, last, at, end;

    DEVICE Cursor(int slabs, int run, int last) : slabs(slabs), run(run), last(last) { begin(); }
    DEVICE bool is_inside() const { return run < last; }
    DEVICE void next() {
        if (++at >= end && ++run < last) begin();
    }
    DEVICE bool begins_run() const { return at == run * slabs / PARTS; }
    DEVICE bool ends_run() const { return at + 1 >= end; }

  private:
    // The run's first slab, or that of the next one which has any.
    DEVICE void begin() {
        for (; run < last; ++run) {
            at = run * slabs / PARTS, end = (run + 1) * slabs / PARTS;
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
    // The part that this block's weights belong to, and its first tile in it.
    const DecodeMatrix part = part_of_block(p);
    const int first_tile = (blockIdx.y - part.first_block) * (BM / 16);
    const int slabs = p.width / 64;
    const int first_run = SPLIT ? blockIdx.z : 0, last_run = SPLIT ? first_run + 1 : PARTS;
    // The first thread uses them before the others do.
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) mbarrier_init(arrived + s, 1);
        mbarrier_init_fence();
    }

    // A thread has the same columns of some rows, the first of which is this one.
    const int first_row = threadIdx.x / EIGHTS, column = threadIdx.x % EIGHTS * 8;
    const auto copy_weights = [&](int slot, const Cursor& c) {
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int row = first_row + i * (THREADS / EIGHTS), half = row % 16 / 8;
            const int result = (first_tile + row / 16) * RESULTS + (GLU ? row % 8 : row % 16);
            const int source = GLU && half ? part.rows + result : result;
            const bool exists = result < part.rows;
            copy_async(memory + slot * STAGE + row * 64 + slab_place(row, column),
                       part.w + (exists ? size_t(source) * p.width + 64 * c.at + column : 0), exists);
        }
    };
    const size_t rows = size_t(gridDim.x) * BN;
    const auto copy_rows = [&](int slot, const Cursor& c) {
        if (threadIdx.x > 0) return;
        mbarrier_expect(arrived + slot, ROW_BYTES);
        bulk_load(memory + slot * STAGE + WEIGHTS, p.x + (c.at * rows + size_t(blockIdx.x) * BN) * 64, ROW_BYTES,
                  arrived + slot);
    };

    // The weights do not depend on what came before; all else does. Two slots are in use by products.
    constexpr int AHEAD = STAGES - 2;
    Cursor ahead(slabs, first_run, last_run), now = ahead;
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
    // The barriers are there for all.
    __syncthreads();
    Ring<STAGES> ring;
    for (; now.is_inside(); now.next(), ring.next()) {
        copy_wait<AHEAD - 1>();
        fence_async_proxy();
        mbarrier_wait(arrived + ring.stage, ring.phase);
        // Everybody has seen the products of the slot before the last one end.
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
        const int is_later = !now.begins_run();
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            Wgmma<BN>::template ss<K_MAJOR, K_MAJOR>(c, descriptor_advance(left, 32 * k),
                                                     descriptor_advance(right, 32 * k), k > 0 || is_later);
        }
        wgmma_commit();
        if (now.ends_run()) {
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < BN / 2; ++i) total[i] += c[i];
        } else {
            wgmma_wait<1>();
        }
    }

    float* y = p.y + (SPLIT ? first_run * rows * p.stride : 0);
    const int tile = first_tile + warp;
#pragma unroll
    for (int t = 0; t < BN / 8; ++t) {
#pragma unroll
        for (int r = 0; r < (GLU ? 2 : 4); ++r) {
            const int row = blockIdx.x * BN + t * 8 + 2 * (lane % 4) + r % 2;
            const int result = tile * RESULTS + lane / 4 + (r >= 2 ? 8 : 0);
            if (result >= part.rows) continue;
            float sum = total[4 * t + r];
            if (GLU) {
                const float up = total[4 * t + r + 2];
                p.inner[blocked(row, result, part.rows, rows)] = float_to_bf16(activation(p.act, sum).x * up);
            } else {
                if (part.bias) sum += part.bias[result];
                y[size_t(row) * p.stride + part.start + result] = sum;
            }
        }
    }
}
