// y[rows, N] = x[rows, K] w[N, K]^T for 17 and more decode rows on Hopper, by wgmma.
//
// Outputs have the bits of decode_matmul: the same K_SPLITS ranges of K, each reduced in the same order in k16 steps, and
// partial sums added in order. (wgmma and mma reduce 16 products alike in hardware; the self-test verifies it.) A
// warpgroup takes 64 weight rows. With SPLIT a thread block takes one K split, y is [K_SPLITS][rows, stride], and the
// consumer of y adds the partial sums.
//
// One thread of a further warp copies slabs of 64 columns to a ring of stages: weights by TMA from plain row-major
// matrices, with GLU 8 gates and the 8 values that belong to them in turn; rows of x, which lie in swizzled slabs
// [K / 64][rows][64] (`blocked` in decode.cuh), by bulk copies. Every thread block reads all of its rows: sharing them in
// clusters of two by multicast lost a third of the speed with 64 rows.
//
// Compile-time: BM weight rows (with GLU half of them gates), BN rows, K_SPLITS, STAGES, SPLIT, GLU.
#define SLABS 1
#include "decode.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
#include "params.cuh"

constexpr int CONSUMERS = 2 * BM;          // threads of the warpgroups
constexpr int THREADS = CONSUMERS + 32;
constexpr int RESULTS = GLU ? 8 : 16;      // outputs of 16 weight rows
constexpr int WEIGHTS = BM * 64;           // weights per stage
constexpr int STAGE = WEIGHTS + BN * 64;
constexpr u32 STAGE_BYTES = 2 * STAGE;
constexpr int MATRICES = sizeof(DecodeMatmul::matrices) / sizeof(DecodeMatrix);

// Weights as tensors [1 or with GLU 2][matrix rows][K], in the order of the matrices.
struct WeightMaps {
    TensorMap maps[MATRICES];
};

// A ring of stages and the barriers of each: bytes that have arrived, and warps that have read.
struct Stages {
    u16* memory;
    u64 *full, *empty;

    DEVICE explicit Stages(u16* memory)
        : memory(memory), full(reinterpret_cast<u64*>(memory + STAGES * STAGE)), empty(full + STAGES) {}
    DEVICE u16* weights(int stage) const { return memory + stage * STAGE; }
    DEVICE u16* rows(int stage) const { return weights(stage) + WEIGHTS; }
    DEVICE void init() const {
        if (threadIdx.x == 0) {
            for (int s = 0; s < STAGES; ++s) {
                mbarrier_init(full + s, 1);
                mbarrier_init(empty + s, CONSUMERS / 32 * WARP_ARRIVALS);
            }
            mbarrier_init_fence();
        }
        __syncthreads();
    }
    // By all lanes of a warp that has read a stage.
    DEVICE void release(int stage) const {
        __syncwarp();
        mbarrier_arrive_warp(empty + stage);
    }
};

// Copies slabs from `begin` to `end`, by one thread.
DEVICE void copy_slabs(const DecodeMatmul& p, const TensorMap* weights, int first_result, const Stages& stages,
                       int begin, int end) {
    const size_t rows = size_t(gridDim.x) * BN;
    const auto copy_weights = [&](int stage, int slab) {
        mbarrier_expect(stages.full + stage, STAGE_BYTES);
#pragma unroll
        for (int tile = 0; tile < (GLU ? BM / 16 : 1); ++tile) {
            tma_load(stages.weights(stage) + tile * 16 * 64, weights, 64 * slab, first_result + tile * RESULTS, 0,
                     stages.full + stage);
        }
    };
    const auto copy_rows = [&](int stage, int slab) {
        const u16* from = p.x + (slab * rows + size_t(blockIdx.x) * BN) * 64;
        bulk_load(stages.rows(stage), from, BN * 128, stages.full + stage);
    };
    // Only weights may be read before the predecessor has ended.
    const int filled = min(STAGES, end - begin);
    for (int s = 0; s < filled; ++s) copy_weights(s, begin + s);
    wait_for_predecessor();
    for (int s = 0; s < filled; ++s) copy_rows(s, begin + s);
    Ring<STAGES> ring;
    for (int slab = begin + filled; slab < end; ++slab, ring.next()) {
        mbarrier_wait(stages.empty + ring.stage, ring.phase);
        copy_weights(ring.stage, slab);
        copy_rows(ring.stage, slab);
    }
}

// The sums of some K splits, in the accumulators of a warpgroup.
DEVICE void multiply_slabs(float (&total)[BN / 2], const Stages& stages, int slabs, int first_split, int last_split) {
    float c[BN / 2];
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) c[i] = total[i] = 0.f;
    Ring<STAGES> ring;
    for (int split = first_split; split < last_split; ++split) {
        const int begin = split * slabs / K_SPLITS, end = (split + 1) * slabs / K_SPLITS;
        if (begin == end) continue;
        int before = 0;  // the stage of the slab before
        for (int at = begin; at < end; ++at, ring.next()) {
            mbarrier_wait(stages.full + ring.stage, ring.phase);
            const u64 left = matrix_descriptor(stages.weights(ring.stage) + threadIdx.x / 128 * (64 * 64), 0);
            const u64 right = matrix_descriptor(stages.rows(ring.stage), 0);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                Wgmma<BN>::template ss<K_MAJOR, K_MAJOR>(c, descriptor_advance(left, 32 * k),
                                                         descriptor_advance(right, 32 * k), k > 0 || at > begin);
            }
            wgmma_commit();
            wgmma_wait<1>();
            if (at > begin) stages.release(before);
            before = ring.stage;
        }
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) total[i] += c[i];
        stages.release(before);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    decode_matmul_sm90(const __grid_constant__ WeightMaps maps, const __grid_constant__ DecodeMatmul p) {
#if EMULATED
    u16* const memory = reinterpret_cast<u16*>(block_memory(STAGES * (STAGE_BYTES + 16)));
#else
    extern __shared__ __align__(1024) u16 memory[];
#endif
    let_successor_begin();
    const Stages stages(memory);
    stages.init();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // The matrix of this block, and its first tile of 16 weight rows.
    const int n = matrix_index(p);
    const DecodeMatrix matrix = p.matrices[n];
    const int first_tile = (blockIdx.y - matrix.first_block) * (BM / 16);
    const int slabs = p.width / 64;
    const int first_split = SPLIT ? blockIdx.z : 0, last_split = SPLIT ? first_split + 1 : K_SPLITS;
    if (warp == CONSUMERS / 32) {
        if (lane == 0) {
            copy_slabs(p, &maps.maps[n], first_tile * RESULTS, stages, first_split * slabs / K_SPLITS,
                       last_split * slabs / K_SPLITS);
        }
        return;
    }
    wait_for_predecessor();
    float total[BN / 2];
    multiply_slabs(total, stages, slabs, first_split, last_split);

    const size_t rows = size_t(gridDim.x) * BN;
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
