// Products of a warpgroup over a full contraction; the caller fences, commits and waits.
#pragma once
#include "warpgroup.cuh"

// d = or += A[64 x K] B[N x K]^T, both K-major in slabs of `A_SLAB` and `B_SLAB` bytes.
template <int N, int K, u32 A_SLAB, u32 B_SLAB>
DEVICE void gemm_nt(float (&d)[N / 2], u64 a, u64 b) {
#pragma unroll
    for (int k = 0; k < K / 16; ++k) {
        u32 slab = k / 4, column = (k % 4) * 32;
        Wgmma<N>::template ss<K_MAJOR, K_MAJOR>(d, descriptor_advance(a, slab * A_SLAB + column),
                                                descriptor_advance(b, slab * B_SLAB + column), k > 0);
    }
}

// The same with A in registers.
template <int N, int K, u32 B_SLAB>
DEVICE void gemm_rt(float (&d)[N / 2], const u32 (&a)[K / 4], u64 b) {
#pragma unroll
    for (int k = 0; k < K / 16; ++k) {
        Wgmma<N>::template rs<K_MAJOR>(
            d, a + 4 * k, descriptor_advance(b, k / 4 * B_SLAB + k % 4 * 32), k > 0);
    }
}

// A warpgroup's 64 rows of a K-major tile, as left operand in registers.
template <int K, u32 A_SLAB>
DEVICE void load_left(u32 (&a)[K / 4], const u8* tile) {
    // The row and the half of 16 columns that ldmatrix wants from this lane.
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16, half = threadIdx.x % 32 / 16;
    const u32 base = smem_address(tile) + row * SLAB_ROW_BYTES;
#pragma unroll
    for (int k = 0; k < K / 16; ++k) {
        const int chunk = 2 * k + half;
        load_matrices(a + 4 * k, base + chunk / 8 * A_SLAB + (chunk % 8 ^ row % 8) * 16);
    }
}

// The same for K columns from 16 k0 on. Tiles are aligned, so the swizzle is an exclusive or with a constant: one address
// in registers instead of eight, without which the backward pass spills.
template <int K, u32 A_SLAB>
DEVICE void load_left_from(u32 (&a)[K / 4], const u8* tile, int k0) {
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16, half = threadIdx.x % 32 / 16;
    const u32 base = smem_address(tile) + row * SLAB_ROW_BYTES + (half ^ row % 8) * 16;
#pragma unroll
    for (int k = 0; k < K / 16; ++k) {
        load_matrices(a + 4 * k, (base ^ (k0 + k) % 4 * 32) + (k0 + k) / 4 * A_SLAB);
    }
}

// The same for an MN-major slab, which has a row per column of the operand.
template <int K>
DEVICE void load_left_transposed(u32 (&a)[K / 4], const u8* slab, int k0) {
    const int row = threadIdx.x % 8 + threadIdx.x % 32 / 16 * 8;
    const int chunk = threadIdx.x / 32 % 4 * 2 + threadIdx.x / 8 % 2;
    const u32 base = smem_address(slab) + row * SLAB_ROW_BYTES + (chunk ^ row % 8) * 16;
#pragma unroll
    for (int k = 0; k < K / 16; ++k) {
        load_matrices_transposed(a + 4 * k, base + (k0 + k) * 2 * ATOM_BYTES);
    }
}

// d += A[64 x K] B[K x N], A in registers, B MN-major.
template <int N, int K>
DEVICE void gemm_rn(float (&d)[N / 2], const u32* a, u64 b, bool accumulate) {
#pragma unroll
    for (int k = 0; k < K / 16; ++k) {
        Wgmma<N>::template rs<MN_MAJOR>(d, a + 4 * k, descriptor_advance(b, k * 2 * ATOM_BYTES),
                                        accumulate || k > 0);
    }
}

// d = A[K x 64]^T B[K x N], both MN-major.
template <int N, int K>
DEVICE void gemm_tn(float (&d)[N / 2], u64 a, u64 b) {
#pragma unroll
    for (int k = 0; k < K / 16; ++k) {
        Wgmma<N>::template ss<MN_MAJOR, MN_MAJOR>(d, descriptor_advance(a, k * 2 * ATOM_BYTES),
                                                  descriptor_advance(b, k * 2 * ATOM_BYTES), k > 0);
    }
}

// Products whose left operand passes through registers, because a wgmma of 64 columns with both operands in shared
// memory is bound by its bandwidth (57 instead of 32 cycles). One fragment of 16 columns is loaded while the tensor
// cores work on the others of a ring. They commit every step; the last ones are not waited for.
template <int N>
constexpr int FRAGMENTS = N >= 128 ? 2 : 3;  // in the ring: 64 cycles of products cover a load

// d = A[64 x K] B[N x K]^T, both K-major.
template <int N, int K, u32 A_SLAB, u32 B_SLAB>
DEVICE void gemm_stream_nt(float (&d)[N / 2], const u8* a, u64 b) {
    u32 ring[FRAGMENTS<N>][4];
#pragma unroll
    for (int k = 0; k < K / 16; ++k) {
        u32(&fragment)[4] = ring[k % FRAGMENTS<N>];
        if (k >= FRAGMENTS<N>) wgmma_wait<FRAGMENTS<N> - 1>();
        load_left_from<16, A_SLAB>(fragment, a, k);
        wgmma_fence();
        Wgmma<N>::template rs<K_MAJOR>(d, fragment, descriptor_advance(b, k / 4 * B_SLAB + k % 4 * 32), k > 0);
        wgmma_commit();
    }
}

// d = A[K x 64]^T B[K x N], both MN-major, with a ring of RING fragments. Calls each(fragment) for those of A.
template <int N, int K, int RING, class F>
DEVICE void gemm_stream_tn(float (&d)[N / 2], const u8* a, u64 b, F each) {
    u32 ring[RING][4];
#pragma unroll
    for (int k = 0; k < K / 16; ++k) {
        u32(&fragment)[4] = ring[k % RING];
        if (k >= RING) wgmma_wait<RING - 1>();
        load_left_transposed<16>(fragment, a, k);
        each(fragment);
        wgmma_fence();
        Wgmma<N>::template rs<MN_MAJOR>(d, fragment, descriptor_advance(b, k * 2 * ATOM_BYTES), k > 0);
        wgmma_commit();
    }
}
