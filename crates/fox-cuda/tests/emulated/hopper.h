// Hopper on a CPU: barriers, bulk copies and wgmma; stands in for tma.cuh and warpgroup.cuh.
//
// Loads arrive at once, but a barrier turns only when its arrivals and its bytes are complete. Products run when the
// kernel waits for them, and bulk stores when it waits for their sources, so that an operand that is overwritten too
// early gives wrong results.
#pragma once
#include <map>

// The number of this block among those that run at once.
inline u32 block_rank() { return current / block_threads; }

// Named barriers of the blocks, by number.
static std::map<unsigned, std::map<int, Meeting>> named_barriers;

// The blocks' shared memory, filled with NaN, each as large as any.
struct alignas(1024) BlockMemory {
    u8 bytes[228 << 10];
};
static std::map<unsigned, std::unique_ptr<BlockMemory>> block_memories;
inline u8* block_memory(size_t bytes) {
    if (threadIdx.x == 0) {
        named_barriers[block_rank()].clear();
        auto& own = block_memories[block_rank()];
        if (!own) own.reset(new BlockMemory);
        memset(own->bytes, 0xff, bytes);
    }
    __syncthreads();
    return block_memories[block_rank()]->bytes;
}
inline u32 smem_address(const void* p) { return u32(u64(p) - u64(block_memories[block_rank()]->bytes)); }
inline u8* smem_pointer(u32 address) { return block_memories[block_rank()]->bytes + address; }

struct Barrier {
    int arrivals, waits_for;
    long bytes;
    u32 phase;
    void turn() {
        if (waits_for == 0 && bytes == 0) phase ^= 1, waits_for = arrivals;
    }
};
static std::map<const void*, Barrier> barriers;
constexpr int WARP_ARRIVALS = 1;
inline void mbarrier_init(u64* barrier, int arrivals) { barriers[barrier] = {arrivals, arrivals, 0, 0}; }
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(u64* barrier) {
    Barrier& b = barriers.at(barrier);
    if (--b.waits_for < 0) printf("one arrival too many\n"), exit(1);
    b.turn();
}
inline void mbarrier_arrive_warp(u64* barrier) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}
inline void mbarrier_expect(u64* barrier, u32 bytes) {
    barriers.at(barrier).bytes += bytes;
    mbarrier_arrive(barrier);
}
inline void receive(u64* barrier, u32 bytes) {
    Barrier& b = barriers.at(barrier);
    b.bytes -= bytes;
    b.turn();
}
// A wait in vain is an error.
inline void wait_while(std::function<bool()> holds, const char* what) {
    for (volatile int looks = 0; holds(); ++looks) {
        if (looks > 100000) printf("thread %d of block %d waits for %s in vain\n", threadIdx.x, blockIdx.x, what), exit(1);
        pass_turn();
    }
}
inline void mbarrier_wait(u64* barrier, u32 parity) {
    const Barrier& b = barriers.at(barrier);
    wait_while([&] { return b.phase == parity; }, "an mbarrier");
}
template <int SIZE>
struct Ring {
    int stage = 0;
    u32 phase = 0;
    void next() {
        if (++stage == SIZE) stage = 0, phase ^= 1;
    }
};

inline long arrive(Meeting& meeting, int threads) {
    const long round = meeting.round;
    meeting.members = threads, ++meeting.arrived;
    meeting.check();
    return round;
}
inline void barrier_arrive(int id, int threads) { arrive(named_barriers[block_rank()][id], threads); }
inline void barrier_sync(int id, int threads) {
    Meeting& meeting = named_barriers[block_rank()][id];
    const long round = arrive(meeting, threads);
    wait_while([&] { return meeting.round == round; }, "a named barrier");
}

inline int load_acquire(const int* p) {
    pass_turn();
    return *p;
}
inline void store_release(int* p, int value) { *p = value; }
inline void fence_async_proxy() {}
inline void fence_async_proxies() {}
template <int>
void registers_grow() {}
template <int>
void registers_shrink() {}

// A tensor [rows][heads][columns] of bf16, and the rows and heads of a box of 64 columns.
struct TensorMap {
    const u16* data;
    int columns, heads, rows, box, box_heads = 1;
};
inline void tma_load(void* dst, const TensorMap* map, int column, int head, int row, u64* barrier) {
    for (int r = 0; r < map->box * map->box_heads; ++r) {
        const int own_row = row + r / map->box_heads, own_head = head + r % map->box_heads;
        for (int c = 0; c < 64; ++c) {
            const bool is_inside = own_row < map->rows && own_head < map->heads && column + c < map->columns;
            u16* to = reinterpret_cast<u16*>(static_cast<u8*>(dst) + r * 128 + (c / 8 ^ r % 8) * 16) + c % 8;
            *to = is_inside ? map->data[(size_t(own_row) * map->heads + own_head) * map->columns + column + c] : 0;
        }
    }
    receive(barrier, map->box * map->box_heads * 128);
}
inline void bulk_load(void* dst, const void* src, u32 bytes, u64* barrier) {
    memcpy(dst, src, bytes);
    receive(barrier, bytes);
}
struct BulkStore {
    void* dst;
    const void* src;
    u32 bytes;
    bool adds;
};
static std::map<int, std::vector<BulkStore>> bulk_stores;  // by thread
inline void bulk_store(void* dst, const void* src, u32 bytes) { bulk_stores[current].push_back({dst, src, bytes, false}); }
inline void bulk_add_f32(void* dst, const void* src, u32 bytes) {
    bulk_stores[current].push_back({dst, src, bytes, true});
}
inline void bulk_commit() {}
inline void bulk_wait_read() {
    for (const BulkStore& s : bulk_stores[current]) {
        for (u32 i = 0; i < s.bytes / 4; ++i) {
            float& to = static_cast<float*>(s.dst)[i];
            to = (s.adds ? to : 0.f) + static_cast<const float*>(s.src)[i];
        }
    }
    bulk_stores[current].clear();
}
inline void bulk_wait() { bulk_wait_read(); }

// Rows that all lanes name, of 8 x 8 matrices.
inline void exchange_rows(u16* (&rows)[32], u32 address) {
    static u16* all[64][32];
    const int warp = current / 32;
    all[warp][current % 32] = reinterpret_cast<u16*>(smem_pointer(address));
    __syncwarp();
    memcpy(rows, all[warp], sizeof rows);
    __syncwarp();
}
inline void load_matrices(u32* a, u32 address) {
    u16* rows[32];
    exchange_rows(rows, address);
    const int lane = current % 32;
    for (int m = 0; m < 4; ++m) memcpy(&a[m], rows[8 * m + lane / 4] + 2 * (lane % 4), 4);
}
inline void load_matrices_transposed(u32* a, u32 address) {
    u16* rows[32];
    exchange_rows(rows, address);
    const int lane = current % 32;
    for (int m = 0; m < 4; ++m) {
        u16* const* own = rows + 8 * m + 2 * (lane % 4);
        a[m] = own[0][lane / 4] | u32(own[1][lane / 4]) << 16;
    }
}
inline void store_matrices(u32 address, const u32* a) {
    u16* rows[32];
    exchange_rows(rows, address);
    const int lane = current % 32;
    for (int m = 0; m < 4; ++m) memcpy(rows[8 * m + lane / 4] + 2 * (lane % 4), &a[m], 4);
    __syncwarp();
}

// Products of a warpgroup. A descriptor is an address, with the stride of slabs in kilobytes above.
constexpr u32 SLAB_ROW_BYTES = 128, ATOM_BYTES = 1024;
enum Major { K_MAJOR = 0, MN_MAJOR = 1 };
inline u64 matrix_descriptor(const void* tile, u32 slab_stride) { return u64(tile) | u64(slab_stride / 1024) << 48; }
inline u64 descriptor_here(u64 descriptor) { return descriptor; }
inline u64 descriptor_advance(u64 descriptor, u32 bytes) { return descriptor + bytes; }
inline float swizzled(u64 descriptor, int row, int column) {
    const u64 byte = descriptor % 1024 + 2 * column;
    const u64 at = descriptor / 1024 * 1024 + row * 128 + (byte / 16 ^ row % 8) * 16 + byte % 16;
    return bf16_to_float(*reinterpret_cast<const u16*>(at));
}
// Element `k` of the contraction for row `row` of a left operand or column `row` of a right one.
inline float operand(u64 descriptor, Major major, int row, int k) {
    const u64 stride = (descriptor >> 48) * 1024, tile = descriptor & (1ull << 48) - 1;
    return major == K_MAJOR ? swizzled(tile, row, k) : swizzled(tile + row / 64 * stride, k, row % 64);
}
struct Product {
    float* d;
    int columns;
    u64 a, b;
    Major a_major, b_major;
    bool from_registers, accumulates;
    float left[2][16];  // of this thread's two rows

    void run() const {
        const int first = threadIdx.x / 32 % 4 * 16 + current % 32 / 4;
        float x[2][16], y[16];
        for (int half = 0; half < 2; ++half) {
            for (int k = 0; k < 16; ++k) x[half][k] = from_registers ? left[half][k] : operand(a, a_major, first + half * 8, k);
        }
        for (int column = 0; column < columns / 4; ++column) {
            const int at = column / 2 * 4 + column % 2;
            for (int k = 0; k < 16; ++k) y[k] = operand(b, b_major, column / 2 * 8 + 2 * (current % 4) + column % 2, k);
            for (int half = 0; half < 2; ++half) {
                double sum = 0.0;
                for (int k = 0; k < 16; ++k) sum += x[half][k] * y[k];
                float& to = d[at + 2 * half];
                to = (accumulates ? to : 0.f) + float(sum);
            }
        }
    }
};
static std::map<int, std::vector<std::vector<Product>>> product_groups;  // by thread; the last one is open
inline void wgmma_fence() {}
inline std::vector<std::vector<Product>>& own_groups() {
    auto& groups = product_groups[current];
    if (groups.empty()) groups.emplace_back();
    return groups;
}
inline void wgmma_commit() { own_groups().emplace_back(); }
template <int PENDING>
void wgmma_wait() {
    auto& groups = own_groups();
    while (int(groups.size()) > PENDING + 1) {
        for (const Product& product : groups.front()) product.run();
        groups.erase(groups.begin());
    }
}
template <int N>
struct Wgmma {
    template <Major A, Major B>
    static void ss(float (&d)[N / 2], u64 a, u64 b, int accumulate) {
        own_groups().back().push_back({d, N, a, b, A, B, false, accumulate != 0});
    }
    template <Major B>
    static void rs(float (&d)[N / 2], const u32* a, u64 b, int accumulate) {
        static u32 fragments[64][32][4];
        const int warp = current / 32, lane = current % 32;
        memcpy(fragments[warp][lane], a, sizeof fragments[warp][lane]);
        __syncwarp();
        Product product{d, N, 0, b, K_MAJOR, B, true, accumulate != 0};
        for (int half = 0; half < 2; ++half) {
            for (int k = 0; k < 16; ++k) {
                const u32 pair = fragments[warp][lane / 4 * 4 + k % 8 / 2][half + k / 8 * 2];
                product.left[half][k] = k % 2 ? bf16_hi(pair) : bf16_lo(pair);
            }
        }
        __syncwarp();
        own_groups().back().push_back(product);
    }
};
