// Just enough of CUDA to run kernels on a CPU: the threads of a block are fibers that switch where they wait for each
// other, and blocks run one after the other. Stands in for ptx.cuh and mma.cuh.
#pragma once
#include <csetjmp>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <ucontext.h>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define DEVICE inline
#define NEG_INF (-INFINITY)

struct Index {
    unsigned x, y, z;
};
static Index threadIdx, blockIdx, gridDim, blockDim;

struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct alignas(8) uint2 {
    u32 x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(8) int2 {
    int x, y;
};
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

template <class To, class From>
To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline float __uint_as_float(u32 x) { return bits_as<float>(x); }
inline u32 __float_as_uint(float x) { return bits_as<u32>(x); }
inline double __longlong_as_double(u64 x) { return bits_as<double>(x); }

inline u32 __byte_perm(u32 x, u32 y, u32 selector) {
    const u64 bytes = u64(y) << 32 | x;
    u32 all = 0;
    for (int i = 0; i < 4; ++i) all |= u32(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return all;
}
inline float __fmul_rn(float a, float b) { return a * b; }

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float exp2_fast(float x) { return exp2f(x); }
inline float log2_fast(float x) { return log2f(x); }
inline u16 float_to_bf16(float x) {
    const u32 bits = __float_as_uint(x);
    return x != x ? 0x7fff : u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float bf16_to_float(u16 x) { return __uint_as_float(u32(x) << 16); }
inline float bf16_lo(u32 x) { return bf16_to_float(u16(x)); }
inline float bf16_hi(u32 x) { return bf16_to_float(u16(x >> 16)); }
inline u32 pack_bf16(float lo, float hi) { return float_to_bf16(lo) | u32(float_to_bf16(hi)) << 16; }
inline float clamp_log_gate(float x) { return x < -1e3f ? -1e3f : x; }

// Shared memory whose size the launch says.
alignas(16) static u8 emulated_memory[227 << 10];

// Fibers that synchronize: those of a warp, or of the block.
struct Meeting {
    int members = 0, arrived = 0;
    long round = 0;
    void check() {
        if (arrived > 0 && arrived >= members) arrived = 0, ++round;
    }
};
struct Fiber {
    std::unique_ptr<char[]> stack;
    ucontext_t start;
    jmp_buf at;
    bool begun, ended;
};
static std::vector<Fiber> fibers;
static std::vector<Meeting> warps, blocks;
static jmp_buf scheduler;
static int current, block_threads;
static std::function<void()> kernel;

// Lets the other threads run.
inline void pass_turn() {
    if (_setjmp(fibers[current].at) == 0) _longjmp(scheduler, 1);
}
inline void meet(Meeting& meeting) {
    const long round = meeting.round;
    ++meeting.arrived;
    for (meeting.check(); meeting.round == round; meeting.check()) pass_turn();
}
inline void __syncthreads() { meet(blocks[current / block_threads]); }
inline bool __syncthreads_or(bool value) {
    static bool any;
    __syncthreads();
    any = false;
    __syncthreads();
    any |= value;
    __syncthreads();
    return any;
}
inline void __syncwarp() { meet(warps[current / 32]); }

inline void run_fiber() {
    kernel();
    fibers[current].ended = true;
    --blocks[current / block_threads].members, --warps[current / 32].members;
    _longjmp(scheduler, 1);
}
// Blocks `first` to `first + count` of a row, at once.
inline void run_blocks(Index first, unsigned count, int threads) {
    constexpr size_t STACK = 64 << 10;
    fibers.resize(count * threads);
    warps.assign(count * threads / 32, Meeting{32});
    blocks.assign(count, Meeting{threads});
    block_threads = threads;
    blockDim = {unsigned(threads), 1, 1};
    for (Fiber& fiber : fibers) {
        if (!fiber.stack) fiber.stack.reset(new char[STACK]);
        fiber.begun = fiber.ended = false;
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = fiber.stack.get();
        fiber.start.uc_stack.ss_size = STACK;
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, run_fiber, 0);
    }
    bool running = true;
    while (running) {
        running = false;
        for (current = 0; current < int(fibers.size()); ++current) {
            Fiber& fiber = fibers[current];
            if (fiber.ended) continue;
            running = true;
            threadIdx = {unsigned(current % threads), 0, 0};
            blockIdx = {first.x + current / threads, first.y, first.z};
            if (_setjmp(scheduler) != 0) continue;
            if (fiber.begun) _longjmp(fiber.at, 1);
            fiber.begun = true;
            setcontext(&fiber.start);
        }
    }
}
inline void launch(Index grid, int threads, std::function<void()> body) {
    kernel = body;
    gridDim = grid;
    for (unsigned z = 0; z < grid.z; ++z) {
        for (unsigned y = 0; y < grid.y; ++y) {
            for (unsigned x = 0; x < grid.x; ++x) {
                run_blocks({x, y, z}, 1, threads);
            }
        }
    }
}

// The same with all blocks at once, each with its own shared memory.
inline void launch_together(unsigned count, int threads, std::function<void()> body) {
    kernel = body;
    gridDim = {count, 1, 1};
    run_blocks({0, 0, 0}, count, threads);
}

// Values of the lanes of every warp, exchanged.
template <class T>
T shuffle(T value, int from) {
    static u64 values[64][32];
    const int warp = current / 32, lane = current % 32;
    memcpy(&values[warp][lane], &value, sizeof value);
    __syncwarp();
    T other;
    memcpy(&other, &values[warp][from], sizeof other);
    __syncwarp();
    return other;
}
template <class T>
T __shfl_xor_sync(u32, T value, int mask) {
    return shuffle(value, current % 32 ^ mask);
}
template <class T>
T __shfl_down_sync(u32, T value, int by) {
    const int lane = current % 32;
    return shuffle(value, lane + by < 32 ? lane + by : lane);
}
template <class T>
T __shfl_up_sync(u32, T value, int by) {
    const int lane = current % 32;
    return shuffle(value, lane >= by ? lane - by : lane);
}
inline u32 __ballot_sync(u32, bool value) {
    u32 all = u32(value) << current % 32;
    for (int step = 16; step > 0; step /= 2) all |= __shfl_xor_sync(~0u, all, step);
    return all;
}
inline bool __any_sync(u32 mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline float warp_sum(float x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
inline float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
template <class T>
T __shfl_sync(u32, T value, int from) {
    return shuffle(value, from);
}
template <class T, class By>
T atomicAdd(T* sum, By x) {
    *sum += x;
    return *sum - x;
}
inline u32 atomicMax(u32* most, u32 x) {
    const u32 before = *most;
    *most = x > before ? x : before;
    return before;
}
inline u32 __ldcg(const u32* p) { return *p; }
inline void __threadfence() {}

// c[16][8] += a[16][16] b[8][16]^T, spread over the lanes as mma.m16n8k16 has them.
inline void mma(float* c, const u32* a, u32 b0, u32 b1) {
    static float left[64][16][16], right[64][8][16];
    const int warp = current / 32, lane = current % 32, group = lane / 4, pair = 2 * (lane % 4);
    const auto put = [](float* to, u32 x) { to[0] = bf16_lo(x), to[1] = bf16_hi(x); };
    for (int i = 0; i < 4; ++i) put(left[warp][group + i % 2 * 8] + pair + i / 2 * 8, a[i]);
    put(right[warp][group] + pair, b0), put(right[warp][group] + pair + 8, b1);
    __syncwarp();
    for (int i = 0; i < 4; ++i) {
        const float *x = left[warp][group + i / 2 * 8], *y = right[warp][pair + i % 2];
        // In f64 the order inside of an instruction is of no account.
        double sum = 0.0;
        for (int k = 0; k < 16; ++k) sum += x[k] * y[k];
        c[i] += float(sum);
    }
    __syncwarp();
}

// Four 8 x 8 matrices: lane n gives the address of row n % 8 of matrix n / 8.
inline void ldmatrix(u32 (&r)[4], const u16* p) {
    static const u16* rows[64][32];
    const int warp = current / 32, lane = current % 32;
    rows[warp][lane] = p;
    __syncwarp();
    for (int m = 0; m < 4; ++m) memcpy(&r[m], rows[warp][8 * m + lane / 4] + 2 * (lane % 4), 4);
    __syncwarp();
}

inline void ldmatrix_transposed(u32 (&r)[4], const u16* p) {
    static const u16* rows[64][32];
    const int warp = current / 32, lane = current % 32;
    rows[warp][lane] = p;
    __syncwarp();
    for (int m = 0; m < 4; ++m) {
        const u16* const* own = rows[warp] + 8 * m + 2 * (lane % 4);
        r[m] = own[0][lane / 4] | u32(own[1][lane / 4]) << 16;
    }
    __syncwarp();
}

// The products of mma.cuh on operands in shared memory: element (row, k) of A and (k, column) of B for every element of c.
template <int N, int K, class A, class B>
void multiply_fragments(float (&c)[N / 2], A a, B b) {
    const int lane = current % 32;
    __syncwarp();
    for (int i = 0; i < N / 2; ++i) {
        const int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
        double sum = 0.0;
        for (int k = 0; k < K; ++k) sum += bf16_to_float(a(row, k)) * double(bf16_to_float(b(k, column)));
        c[i] += float(sum);
    }
    __syncwarp();
}
template <int N, int K, int PITCH>
void mma_nt(float (&c)[N / 2], const u16* a, const u16* b) {
    multiply_fragments<N, K>(
        c, [&](int row, int k) { return a[row * PITCH + k]; }, [&](int k, int n) { return b[n * PITCH + k]; });
}
template <int N, int K, int A_PITCH, int B_PITCH>
void mma_nn(float (&c)[N / 2], const u16* a, const u16* b) {
    multiply_fragments<N, K>(
        c, [&](int row, int k) { return a[row * A_PITCH + k]; }, [&](int k, int n) { return b[k * B_PITCH + n]; });
}
template <int N, int K, int A_PITCH, int B_PITCH>
void mma_tn(float (&c)[N / 2], const u16* a, const u16* b) {
    multiply_fragments<N, K>(
        c, [&](int row, int k) { return a[k * A_PITCH + row]; }, [&](int k, int n) { return b[k * B_PITCH + n]; });
}

// Asynchronous copies arrive at once.
inline void copy_async(u16* dst, const u16* src, bool valid) {
    if (valid) memcpy(dst, src, 16);
    else memset(dst, 0, 16);
}
inline void copy_commit() {}
template <int ROWS, int COLUMNS, int PITCH, int THREADS>
void load_rows_async(u16* tile, const u16* x, int rows, int row_stride, int head_dim) {
    for (int i = threadIdx.x; i < ROWS * (COLUMNS / 8); i += THREADS) {
        const int row = i / (COLUMNS / 8), column = i % (COLUMNS / 8) * 8;
        const bool valid = row < rows && column < head_dim;
        copy_async(tile + row * PITCH + column, x + (valid ? size_t(row) * row_stride + column : 0), valid);
    }
}
template <int PENDING>
void copy_wait() {}

#include "hopper.h"

// For the tests: normal-like numbers, the same each time, and a check that also fails for NaN.
static u64 state = 88172645463325252ull;
inline void reset_numbers() { state = 88172645463325252ull; }
inline float number() {
    float sum = 0.f;
    for (int i = 0; i < 4; ++i) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        sum += float(state >> 40) / float(1 << 24) - 0.5f;
    }
    return 1.7f * sum;
}
inline std::vector<float> numbers(size_t count, float offset = 0.f, float scale = 1.f) {
    std::vector<float> all(count);
    for (float& x : all) x = offset + scale * number();
    return all;
}
inline std::vector<u16> narrow_numbers(size_t count) {
    std::vector<u16> all(count);
    for (u16& x : all) x = float_to_bf16(number());
    return all;
}
inline void expect_close(double got, double want, double tolerance, const char* what, int row, int column) {
    if (fabs(got - want) <= tolerance * (1.0 + fabs(want))) return;
    printf("%s [%d, %d] is %g, and should be %g\n", what, row, column, got, want);
    exit(1);
}
