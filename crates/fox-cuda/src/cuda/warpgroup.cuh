// Instructions of warpgroups: wgmma, 64 x N += (64 x 16) (16 x N) per warpgroup, bf16 operands, f32 accumulators; and
// ldmatrix and stmatrix at addresses of shared memory.
//
// Shared-memory operands are tiles of 64-column slabs, each [rows][64] bf16 in TMA's 128-byte swizzle. K-major
// descriptors contract over the columns of a slab; MN-major ones contract over its rows, i.e. read it transposed.
#pragma once
#include "ptx.cuh"

constexpr u32 SLAB_ROW_BYTES = 128;  // so 8 rows make a 1024-byte swizzle atom
constexpr u32 ATOM_BYTES = 1024;

// Four 8 x 8 matrices of bf16: lane n has the address of row n % 8 of matrix n / 8. They are the left operand of a warp
// where matrices 0 and 1 are its upper and lower rows, 2 and 3 the same for the next 8 columns.
DEVICE void load_matrices(u32* a, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address)
                 : "memory");
}
DEVICE void load_matrices_transposed(u32* a, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address)
                 : "memory");
}
DEVICE void store_matrices(u32 address, const u32* a) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
                 : "memory");
}

// `slab_stride`: bytes from one slab to the next, used by MN-major operands wider than 64.
DEVICE u64 matrix_descriptor(const void* tile, u32 slab_stride) {
    return u64((smem_address(tile) & 0x3ffff) >> 4) | (u64((slab_stride & 0x3ffff) >> 4) << 16) |
           (u64(ATOM_BYTES >> 4) << 32) | (1ull << 62);
}
// The same value, which the compiler computes here: descriptors that do not change over a loop would otherwise be kept in
// registers, two for each step of a contraction, and spill.
DEVICE u64 descriptor_here(u64 desc) {
    asm volatile("" : "+l"(desc));
    return desc;
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
