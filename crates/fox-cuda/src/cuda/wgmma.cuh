// wgmma: 64 x N += (64 x 16) (16 x N) per warpgroup, bf16 operands, f32 accumulators.
//
// Shared-memory operands are tiles of 64-column slabs, each [rows][64] bf16 in TMA's 128-byte swizzle. K-major
// descriptors contract over the columns of a slab; MN-major ones contract over its rows, i.e. read it transposed.
#pragma once
#include "ptx.cuh"

constexpr u32 SLAB_ROW_BYTES = 128;  // so 8 rows make a 1024-byte swizzle atom
constexpr u32 ATOM_BYTES = 1024;

// `slab_stride`: bytes from one slab to the next, used by MN-major operands wider than 64.
DEVICE u64 matrix_descriptor(const void* tile, u32 slab_stride) {
    return u64((smem_address(tile) & 0x3ffff) >> 4) | (u64((slab_stride & 0x3ffff) >> 4) << 16) |
           (u64(ATOM_BYTES >> 4) << 32) | (1ull << 62);
}
// K-major: step along the columns of a slab; MN-major: step along its rows. `bytes` is a constant.
DEVICE u64 descriptor_advance(u64 desc, u32 bytes) { return desc + (bytes >> 4); }

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

enum Major { K_MAJOR = 0, MN_MAJOR = 1 };

template <int N>
struct Wgmma;

#define ACC_00 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
#define ACC_16 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define ACC_16_HALF "%16,%17,%18,%19,%20,%21,%22,%23"
#define ACC_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define ACC_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define ACC_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define ACC_80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define ACC_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define ACC_112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define ACC_N32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define ACC_N48 ACC_00 ACC_16_HALF
#define ACC_N64 ACC_00 ACC_16
#define ACC_N96 ACC_N64 ACC_32
#define ACC_N128 ACC_N96 ACC_48
#define ACC_N192 ACC_N128 ACC_64 ACC_80
#define ACC_N256 ACC_N192 ACC_96 ACC_112

#define REGS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define REGS_16(i) REGS_4(i), REGS_4(i + 4), REGS_4(i + 8), REGS_4(i + 12)
#define REGS_N32 REGS_16(0)
#define REGS_N48 REGS_16(0), REGS_4(16), REGS_4(20)
#define REGS_N64 REGS_16(0), REGS_16(16)
#define REGS_N96 REGS_N64, REGS_16(32)
#define REGS_N128 REGS_N96, REGS_16(48)
#define REGS_N192 REGS_N128, REGS_16(64), REGS_16(80)
#define REGS_N256 REGS_N192, REGS_16(96), REGS_16(112)

// `I0`..`I6`: numbers of the operands after the accumulators.
#define DEFINE_WGMMA(N, I0, I1, I2, I3, I4, I5, I6)                                               \
    template <>                                                                                   \
    struct Wgmma<N> {                                                                             \
        /* Both operands from shared memory. `accumulate` 0 starts from zero. */                  \
        template <Major A, Major B>                                                               \
        static DEVICE void ss(float (&d)[N / 2], u64 a, u64 b, int accumulate) {                  \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I2                                 \
                         ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N                             \
                         "k16.f32.bf16.bf16 {" ACC_N##N "}, %" #I0 ", %" #I1 ", p, 1, 1, %" #I3   \
                         ", %" #I4 ";\n}"                                                         \
                         : REGS_N##N                                                              \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(int(A)), "n"(int(B)));            \
        }                                                                                         \
        /* The left operand from registers: four bf16 pairs of a fragment. */                     \
        template <Major B>                                                                        \
        static DEVICE void rs(float (&d)[N / 2], const u32* a, u64 b, int accumulate) {           \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I5                                 \
                         ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N                             \
                         "k16.f32.bf16.bf16 {" ACC_N##N "}, {%" #I0 ",%" #I1 ",%" #I2 ",%" #I3    \
                         "}, %" #I4 ", p, 1, 1, %" #I6 ";\n}"                                     \
                         : REGS_N##N                                                              \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),   \
                           "n"(int(B)));                                                          \
        }                                                                                         \
    };

DEFINE_WGMMA(32, 16, 17, 18, 19, 20, 21, 22)
DEFINE_WGMMA(48, 24, 25, 26, 27, 28, 29, 30)
DEFINE_WGMMA(64, 32, 33, 34, 35, 36, 37, 38)
DEFINE_WGMMA(96, 48, 49, 50, 51, 52, 53, 54)
DEFINE_WGMMA(128, 64, 65, 66, 67, 68, 69, 70)
DEFINE_WGMMA(192, 96, 97, 98, 99, 100, 101, 102)
DEFINE_WGMMA(256, 128, 129, 130, 131, 132, 133, 134)

// Products over a full contraction; the caller fences, commits and waits.

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
        const u32 address = base + chunk / 8 * A_SLAB + (chunk % 8 ^ row % 8) * 16;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a[4 * k]), "=r"(a[4 * k + 1]), "=r"(a[4 * k + 2]), "=r"(a[4 * k + 3])
                     : "r"(address)
                     : "memory");
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
