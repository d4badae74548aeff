// AdamW, linear combinations of two tensors, and sums of squares in fixed order. Each is one multi-tensor launch:
// tensors are divided into chunks of CHUNK elements, a thread block per chunk.
//
// Compile-time: BF16 (not used), VEC (not used).
#include "params.cuh"
#include "real.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int CHUNK = 16 * 1024;

// Index of the entry that chunk `chunk` belongs to; `first` is the number of the first chunk of an entry.
template <typename Entry>
DEVICE int entry_of(const Entry* entries, int count, int chunk) {
    int low = 0, high = count;  // the answer is in [low, high)
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (entries[middle].first <= chunk) low = middle;
        else high = middle;
    }
    return low;
}

// Loads N values from index i of a tensor of `count` values, stored as f32 or as two halves (see Data::Halves).
template <int N>
DEVICE void load_values(float (&x)[N], const float* p, bool halves, size_t count, size_t i) {
    if (!halves) return load<N>(x, p + i);
    const u16* high = reinterpret_cast<const u16*>(p) + i;
    u16 h[N], l[N];
    if constexpr (N == 4) {
        const uint2 a = *reinterpret_cast<const uint2*>(high);
        const uint2 b = *reinterpret_cast<const uint2*>(high + count);
        h[0] = u16(a.x), h[1] = u16(a.x >> 16), h[2] = u16(a.y), h[3] = u16(a.y >> 16);
        l[0] = u16(b.x), l[1] = u16(b.x >> 16), l[2] = u16(b.y), l[3] = u16(b.y >> 16);
    } else {
#pragma unroll
        for (int j = 0; j < N; ++j) h[j] = high[j], l[j] = high[count + j];
    }
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = from_halves(h[j], l[j]);
}
// Stores to a parameter and, if present, to its bf16 copy.
template <int N, typename Entry>
DEVICE void store_param(const Entry& e, size_t i, const float (&x)[N]) {
    if (!e.halves) {
        store<N>(e.param + i, x);
        if (e.copy) store<N>(e.copy + i, x);
        return;
    }
    u16* high = reinterpret_cast<u16*>(e.param) + i;
    u16 h[N], l[N];
#pragma unroll
    for (int j = 0; j < N; ++j) to_halves(x[j], h[j], l[j]);
    if constexpr (N == 4) {
        *reinterpret_cast<uint2*>(high) = make_uint2(h[0] | u32(h[1]) << 16, h[2] | u32(h[3]) << 16);
        *reinterpret_cast<uint2*>(high + e.count) =
            make_uint2(l[0] | u32(l[1]) << 16, l[2] | u32(l[3]) << 16);
    } else {
#pragma unroll
        for (int j = 0; j < N; ++j) high[j] = h[j], high[e.count + j] = l[j];
    }
}

DEVICE void adamw_one(float& p, float g, float& m, float& v, const AdamParams& a) {
    g *= a.scale;
    m = a.beta1 * m + (1.f - a.beta1) * g;
    v = a.beta2 * v + (1.f - a.beta2) * g * g;
    const float direction = m * a.correct1 / (sqrtf(v * a.correct2) + a.eps);
    p -= a.lr * (direction + a.decay * p);
}
template <int N>
DEVICE void adamw_some(const AdamEntry& e, size_t i) {
    float ps[N], ms[N], vs[N], gs[N];
    load_values<N>(ps, e.param, e.halves, e.count, i);
    load<N>(ms, e.m + i);
    load<N>(vs, e.v + i);
    load<N>(gs, e.grad + i);
#pragma unroll
    for (int j = 0; j < N; ++j) adamw_one(ps[j], gs[j], ms[j], vs[j], e.step);
    store_param<N>(e, i, ps);
    store<N>(e.m + i, ms);
    store<N>(e.v + i, vs);
}

// Grid: all chunks.
extern "C" __global__ void __launch_bounds__(THREADS) adamw(PARAMS(AdamWAll)) {
    const AdamEntry e = entries[entry_of(entries, count, blockIdx.x)];
    const size_t begin = size_t(blockIdx.x - e.first) * CHUNK;
    const size_t end = min(begin + CHUNK, e.count), whole = end / 4 * 4;
    for (size_t i = begin + threadIdx.x * 4; i < whole; i += THREADS * 4) adamw_some<4>(e, i);
    const size_t rest = max(whole, begin) + threadIdx.x;
    if (rest < end) adamw_some<1>(e, rest);
}

template <int N>
DEVICE void blend_some(const BlendEntry& e, size_t i) {
    float ps[N], xs[N];
    load_values<N>(ps, e.param, e.halves, e.count, i);
    load_values<N>(xs, e.x, e.x_halves, e.count, i);
#pragma unroll
    for (int j = 0; j < N; ++j) ps[j] = fmaf(e.add, xs[j], e.keep * ps[j]);
    store_param<N>(e, i, ps);
}
// Grid: all chunks.
extern "C" __global__ void __launch_bounds__(THREADS) blend(PARAMS(BlendAll)) {
    const BlendEntry e = entries[entry_of(entries, count, blockIdx.x)];
    const size_t begin = size_t(blockIdx.x - e.first) * CHUNK;
    const size_t end = min(begin + CHUNK, e.count), whole = end / 4 * 4;
    for (size_t i = begin + threadIdx.x * 4; i < whole; i += THREADS * 4) blend_some<4>(e, i);
    const size_t rest = max(whole, begin) + threadIdx.x;
    if (rest < end) blend_some<1>(e, rest);
}

// Storage of a tensor.
enum { F32, NARROW, HALVES };
template <typename T>
DEVICE double squares_of(const T* x, size_t begin, size_t end) {
    double sum = 0.0;
    const size_t whole = end / 4 * 4;
    for (size_t i = begin + threadIdx.x * 4; i < whole; i += THREADS * 4) {
        float v[4], squares = 0.f;
        load<4>(v, x + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) squares += v[j] * v[j];
        sum += double(squares);
    }
    const size_t rest = max(whole, begin) + threadIdx.x;
    if (rest < end) {
        float v[1];
        load<1>(v, x + rest);
        sum += double(v[0] * v[0]);
    }
    return sum;
}
DEVICE double squares_of_halves(const u16* x, size_t count, size_t begin, size_t end) {
    double sum = 0.0;
    for (size_t i = begin + threadIdx.x; i < end; i += THREADS) {
        const float v = from_halves(x[i], x[count + i]);
        sum += double(v * v);
    }
    return sum;
}
// partial[chunk] = sum of squares of the chunk. Grid: all chunks.
extern "C" __global__ void __launch_bounds__(THREADS)
    sum_squares(PARAMS(SumSquares)) {
    const SquaresEntry e = entries[entry_of(entries, count, blockIdx.x)];
    const size_t begin = size_t(blockIdx.x - e.first) * CHUNK;
    const size_t end = min(begin + CHUNK, e.count);
    const u16* narrow = static_cast<const u16*>(e.x);
    const double sum = e.kind == HALVES   ? squares_of_halves(narrow, e.count, begin, end)
                       : e.kind == NARROW ? squares_of(narrow, begin, end)
                                          : squares_of(static_cast<const float*>(e.x), begin, end);
    const double all = block_sum_f64<WARPS>(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = all;
}
extern "C" __global__ void __launch_bounds__(THREADS)
    sum_f64(PARAMS(SumDoubles)) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < count; i += THREADS) sum += x[i];
    sum = block_sum_f64<WARPS>(sum);
    if (threadIdx.x == 0) *out = sum;
}
