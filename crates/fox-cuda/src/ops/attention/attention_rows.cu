// Row passes of the backward: statistics before the main kernel, dQ after it.
//
// Compile-time: WIDE, whether operands are f32 rather than bf16.
#define BF16 !WIDE
#include "attention.cuh"
#include "real.cuh"

constexpr int COUNTER_INTS = 32;  // before the semaphores; the host's constant of that name

// rows[head][m_tile * block_m + r] = (gate prefix hi, gate prefix lo, delta, log2(e) lse), with delta = <do, o>.
// Padding rows get probability zero. Grid (m_tiles, heads), block 4 * block_m: four lanes per row. Zeroes the counters of
// the Hopper kernel, if there are any: that of tiles and `parts` semaphores for each tile of queries.
extern "C" __global__ void backward_rows(PARAMS(BackwardRows)) {
    if (counters) {
        const size_t tile = size_t(blockIdx.y) * gridDim.x + blockIdx.x;
        if (threadIdx.x < parts) counters[COUNTER_INTS + tile * parts + threadIdx.x] = 0;
        if (tile == 0 && threadIdx.x == parts) counters[0] = 0;
    }
    const BlockRef ref = m_tiles[blockIdx.x];
    const Segment s = segments[ref.segment];
    const int block_m = blockDim.x / 4, row = threadIdx.x / 4, lane = threadIdx.x % 4;
    const int i = ref.block * block_m + row, head = blockIdx.y;
    float delta = 0.f;
    const size_t index = size_t(s.q_start + i) * heads + head;
    if (i < s.q_len) {
        for (int j = 8 * lane; j < head_dim; j += 32) {
            float x[8], y[8];
            load<8>(x, o + index * head_dim + j);
            load<8>(y, d_out + index * head_dim + j);
#pragma unroll
            for (int k = 0; k < 8; ++k) delta += x[k] * y[k];
        }
    }
    delta = quad_sum(delta);
    if (lane == 0) {
        float4 out = make_float4(0.f, 0.f, 0.f, -NEG_INF);
        if (i < s.q_len) {
            float2 c = make_float2(0.f, 0.f);
            if (gates) c = gates[size_t(head) * gate_stride + s.c_base + s.k_len - s.q_len + i];
            out = make_float4(c.x, c.y, delta, lse[index] * LOG2_E);
        }
        rows[(size_t(head) * gridDim.x + blockIdx.x) * block_m + row] = out;
    }
}

// 4 x 4 transpose over a quad: lane n gets the n-th word of each lane.
DEVICE uint4 quad_transpose(u32 a, u32 b, u32 c, u32 d) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    u32 first = __shfl_xor_sync(~0u, odd ? a : b, 1), second = __shfl_xor_sync(~0u, odd ? c : d, 1);
    const uint2 low = odd ? make_uint2(first, b) : make_uint2(a, first);
    const uint2 up = odd ? make_uint2(second, d) : make_uint2(c, second);
    const uint2 send = high ? low : up, keep = high ? up : low;
    const uint2 other = make_uint2(__shfl_xor_sync(~0u, send.x, 2), __shfl_xor_sync(~0u, send.y, 2));
    return high ? make_uint4(other.x, other.y, keep.x, keep.y)
                : make_uint4(keep.x, keep.y, other.x, other.y);
}

// Converts dQ from the accumulator order of the Hopper kernel to rows of bf16, and sums dS over each eighth of a tile,
// row_sums[head][m_tile][8], or copies its sum per query, row_sums[head][m_tile][block_m]. Grid (m_tiles, heads), block
// 128 times the parts of dQ, each 64 x 64: a thread reads the accumulators it would own.
extern "C" __global__ void finish_dq(PARAMS(FinishDq)) {
    const BlockRef ref = m_tiles[blockIdx.x];
    const Segment s = segments[ref.segment];
    const int head = blockIdx.y, floats = 64 * 64, sums = 8;  // of a part, and of a warp
    const int stride = floats + (sum_per_query ? 64 : 4 * sums), parts = blockDim.x / 128;
    const size_t tile = size_t(head) * gridDim.x + blockIdx.x;
    const float* tile_parts = scratch + tile * parts * stride;
    const int part = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32;
    const float* src = tile_parts + part * stride;
    const int row = thread / 32 * 16 + lane / 4 + (block_m == 128 ? 64 * part : 0);
    const int column0 = block_m == 128 ? 0 : 64 * part;
    // All loads before the first store: the compiler may not reorder them, as the pointers could alias.
    float4 x[8];
#pragma unroll
    for (int g = 0; g < 8; ++g) x[g] = reinterpret_cast<const float4*>(src)[g * 128 + thread];
    // A quad holds two columns per lane of rows r and r + 8; after the transpose each lane has eight columns of a row.
    const int upper = lane % 2, bottom = lane / 2 % 2;
    const int i = ref.block * block_m + row + 8 * bottom;
#pragma unroll
    for (int g = 0; g < 8; g += 2) {
        const uint4 out = quad_transpose(
            pack_bf16(x[g].x * scale, x[g].y * scale), pack_bf16(x[g + 1].x * scale, x[g + 1].y * scale),
            pack_bf16(x[g].z * scale, x[g].w * scale), pack_bf16(x[g + 1].z * scale, x[g + 1].w * scale));
        const int column = column0 + 8 * (g + upper);
        if (i < s.q_len && column < head_dim) {
            *reinterpret_cast<uint4*>(dq + (size_t(s.q_start + i) * heads + head) * head_dim +
                                      column) = out;
        }
    }
    if (sum_per_query) {
        // At 64 queries per tile both parts have the same sums.
        if (threadIdx.x < block_m) {
            row_sums[tile * block_m + threadIdx.x] =
                tile_parts[threadIdx.x / 64 * stride + floats + threadIdx.x % 64];
        }
    } else if (threadIdx.x < sums) {
        float sum = 0.f;
        for (int w = 0; w < 4 * parts; ++w) {
            sum += tile_parts[w / 4 * stride + floats + w % 4 * sums + threadIdx.x];
        }
        row_sums[tile * sums + threadIdx.x] = sum;
    }
}

extern "C" __global__ void fill(PARAMS(FillRows)) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] = value;
}
