// Warp-level mma for Ampere and later: 16 x N += (16 x K) (K x N), bf16 operands, f32 accumulators, in the register
// layout of one warp of a wgmma accumulator.
//
// Operands in shared memory have rows of `PITCH` elements, eight more than their width, so that the eight rows of one
// ldmatrix are free of bank conflicts.
#pragma once
#include "ptx.cuh"

DEVICE void ldmatrix(u32 (&r)[4], const u16* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_address(p)));
}
DEVICE void ldmatrix_transposed(u32 (&r)[4], const u16* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_address(p)));
}

DEVICE void mma(float* c, const u32* a, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
        " {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c += A[16 x K] B[N x K]^T, both in shared memory.
template <int N, int K, int PITCH>
DEVICE void mma_nt(float (&c)[N / 2], const u16* a, const u16* b) {
    const int lane = threadIdx.x % 32;
    a += lane % 16 * PITCH + lane / 16 * 8;
    b += (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 8;
#pragma unroll
    for (int k = 0; k < K; k += 16) {
        u32 fa[4];
        ldmatrix(fa, a + k);
#pragma unroll
        for (int n = 0; n < N; n += 16) {
            u32 fb[4];
            ldmatrix(fb, b + n * PITCH + k);
            mma(c + n / 2, fa, fb[0], fb[1]);
            mma(c + n / 2 + 4, fa, fb[2], fb[3]);
        }
    }
}

// c += A[16 x K] B[K x N], A as packed accumulators in registers, B in shared memory.
template <int N, int K, int PITCH>
DEVICE void mma_rn(float (&c)[N / 2], const u32* a, const u16* b) {
    const int lane = threadIdx.x % 32;
    b += lane % 16 * PITCH + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < K; k += 16) {
#pragma unroll
        for (int n = 0; n < N; n += 16) {
            u32 fb[4];
            ldmatrix_transposed(fb, b + k * PITCH + n);
            mma(c + n / 2, a + k / 4, fb[0], fb[1]);
            mma(c + n / 2 + 4, a + k / 4, fb[2], fb[3]);
        }
    }
}

// c += A[16 x K] B[K x N], both in shared memory.
template <int N, int K, int A_PITCH, int B_PITCH>
DEVICE void mma_nn(float (&c)[N / 2], const u16* a, const u16* b) {
    const int lane = threadIdx.x % 32;
    a += lane % 16 * A_PITCH + lane / 16 * 8;
    u32 fa[K / 4];
#pragma unroll
    for (int k = 0; k < K; k += 16) {
        ldmatrix(*reinterpret_cast<u32(*)[4]>(fa + k / 4), a + k);
    }
    mma_rn<N, K, B_PITCH>(c, fa, b);
}

// c += A[K x 16]^T B[K x N], both in shared memory.
template <int N, int K, int A_PITCH, int B_PITCH>
DEVICE void mma_tn(float (&c)[N / 2], const u16* a, const u16* b) {
    const int lane = threadIdx.x % 32;
    a += (lane % 8 + lane / 16 * 8) * A_PITCH + lane / 8 % 2 * 8;
    u32 fa[K / 4];
#pragma unroll
    for (int k = 0; k < K; k += 16) {
        ldmatrix_transposed(*reinterpret_cast<u32(*)[4]>(fa + k / 4), a + k * A_PITCH);
    }
    mma_rn<N, K, B_PITCH>(c, fa, b);
}

// Asynchronous copy of 16 bytes; zero-fills without reading where `valid` is false.
DEVICE void copy_async(u16* dst, const u16* src, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address(dst)), "l"(src),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING groups are in flight; with RACECHECK for all of them, because racecheck does not count
// groups.
template <int PENDING>
DEVICE void copy_wait() {
#if RACECHECK
    asm volatile("cp.async.wait_all;" ::: "memory");
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// Copies `rows` rows of one head into a tile of ROWS x COLUMNS; `x` points at the first. Columns beyond the head dim
// and rows beyond the last are zero-filled.
template <int ROWS, int COLUMNS, int PITCH, int BLOCK>
DEVICE void load_rows_async(u16* tile, const u16* x, int rows, int row_stride, int head_dim) {
    for (int i = threadIdx.x; i < ROWS * (COLUMNS / 8); i += BLOCK) {
        const int row = i / (COLUMNS / 8), column = i % (COLUMNS / 8) * 8;
        const bool valid = row < rows && column < head_dim;
        copy_async(tile + row * PITCH + column,
                   x + (valid ? size_t(row) * row_stride + column : 0), valid);
    }
}
