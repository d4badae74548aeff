// Hopper: TMA and bulk copies, and the mbarriers they complete on.
#pragma once
#include "ptx.cuh"

// Opaque descriptor of a tensor, made by the driver on the host.
struct alignas(64) TensorMap {
    u8 opaque[128];
};

// By convention `full` barriers count arriving bytes, `empty` ones count the consumers that have read a stage.
DEVICE void mbarrier_init(u64* bar, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(bar)), "r"(arrivals));
}
DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void mbarrier_arrive(u64* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(bar)) : "memory");
}
// Arrivals per consumer warp: one, by the first lane after __syncwarp. With RACECHECK every lane arrives, because
// compute-sanitizer does not track the ordering by __syncwarp.
#if RACECHECK
constexpr int WARP_ARRIVALS = 32;
#else
constexpr int WARP_ARRIVALS = 1;
#endif
DEVICE void mbarrier_arrive_warp(u64* bar) {
    if (threadIdx.x % 32 < WARP_ARRIVALS) mbarrier_arrive(bar);
}
DEVICE void mbarrier_expect(u64* bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(bar)),
                 "r"(bytes)
                 : "memory");
}
DEVICE bool mbarrier_try(u64* bar, u32 parity) {
    u32 done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(smem_address(bar)), "r"(parity)
        : "memory");
    return done;
}
DEVICE void mbarrier_wait(u64* bar, u32 parity) {
    while (!mbarrier_try(bar, parity)) {
    }
}

// Stage and phase of a ring buffer. A consumer waits for `phase`, a producer for `phase ^ 1`, so that its first pass
// over the ring does not block.
template <int DEPTH>
struct Ring {
    int stage = 0;
    u32 phase = 0;
    DEVICE void next() {
        if (++stage == DEPTH) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// TMA load of a box of a (column, head, row) tensor, zero-filled outside of the tensor.
DEVICE void tma_load(void* dst, const TensorMap* map, int column, int head, int row, u64* bar) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(smem_address(dst)),
        "l"(map), "r"(smem_address(bar)), "r"(column), "r"(head), "r"(row)
        : "memory");
}

// Bulk copy of contiguous bytes, a multiple of 16.
DEVICE void bulk_load(void* dst, const void* src, u32 bytes, u64* bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            smem_address(dst)),
        "l"(src), "r"(bytes), "r"(smem_address(bar))
        : "memory");
}

// Makes generic-proxy writes to shared memory visible to wgmma and bulk copies.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same for all memory.
DEVICE void fence_async_proxies() { asm volatile("fence.proxy.async;" ::: "memory"); }

DEVICE void bulk_store(void* dst, const void* src, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst),
                 "r"(smem_address(src)), "r"(bytes)
                 : "memory");
}
DEVICE void bulk_add_f32(void* dst, const void* src, u32 bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst),
        "r"(smem_address(src)), "r"(bytes)
        : "memory");
}
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the source may be overwritten.
DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Waits until the result has reached device memory.
DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

template <int REGISTERS>
DEVICE void registers_grow() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
DEVICE void registers_shrink() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
