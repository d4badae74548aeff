// The next token of each row and its log-probability: greedy, or sampled with temperature, top-k, top-p and min-p. One
// thread block per row; no compile-time parameters.
//
// As on the host, every filter keeps a prefix of the tokens in descending order of weight, the lowest id first among
// equals. The end of the prefix is found by bisection on the bits of the weights, which have the order of the weights.
// All sums have a fixed order.
#include "decode.cuh"
#include "params.cuh"

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / 32;
constexpr u32 ONE = 0x3f800000u;    // bits of the largest weight, 1
constexpr u32 LEAST = 0x00800000u;  // bits of the smallest weight that counts, the smallest normal number

// Calls `f(value, id)` for every logit of this thread, in order; loads BATCH logits ahead.
template <class F>
DEVICE void each_logit(const float* logits, int vocab, F f) {
    constexpr int BATCH = 16;
    for (int first = threadIdx.x; first < vocab; first += BATCH * THREADS) {
        float x[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            if (first + k * THREADS < vocab) x[k] = logits[first + k * THREADS];
        }
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            if (first + k * THREADS < vocab) f(x[k], first + k * THREADS);
        }
    }
}

// The lowest index of the largest value; a NaN wins.
struct Best {
    float value;
    int at;
    DEVICE void take(float other, int where) {
        const bool nan = other != other, mine = value != value;
        const bool higher = nan ? !mine || where < at : !mine && (other > value || (other == value && where < at));
        if (higher) value = other, at = where;
    }
};

DEVICE Best find_best(const float* logits, int vocab) {
    __shared__ float values[WARPS];
    __shared__ int places[WARPS];
    Best best{NEG_INF, 0x7fffffff};
    each_logit(logits, vocab, [&](float x, int i) { best.take(x, i); });
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const float value = __shfl_xor_sync(~0u, best.value, step);
        const int at = __shfl_xor_sync(~0u, best.at, step);
        best.take(value, at);
    }
    if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = best.value, places[threadIdx.x / 32] = best.at;
    __syncthreads();
    for (int w = 0; w < WARPS; ++w) best.take(values[w], places[w]);
    return best;
}

// Sum over the thread block, returned to all threads.
DEVICE double sum_all(double x) {
    __shared__ double parts[WARPS];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    double sum = 0.0;
    for (int w = 0; w < WARPS; ++w) sum += parts[w];
    return sum;
}

// Exclusive prefix sum over the threads.
DEVICE double sum_before(double x) {
    __shared__ double parts[WARPS];
    const int lane = threadIdx.x % 32;
    double sum = x;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const double other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    double before = __shfl_up_sync(~0u, sum, 1);
    if (lane == 0) before = 0.0;
    __syncthreads();
    if (lane == 31) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    double front = 0.0;
    for (int w = 0; w < int(threadIdx.x) / 32; ++w) front += parts[w];
    return front + before;
}

// The weights of a row. Kept are those with bits above `cut`, and those equal to `cut` with an id up to `last`.
struct Weights {
    const float* logits;
    int vocab;
    float top, inverse_temperature;
    u32 cut;
    int last;

    DEVICE u32 bits(int i) const { return bits_of(logits[i]); }
    DEVICE u32 bits_of(float logit) const {
        const float x = (logit - top) * inverse_temperature;
        // False for NaN too.
        return x > -87.f ? __float_as_uint(fminf(expf(x), 1.f)) : 0u;
    }
    DEVICE bool keeps(u32 own, int i) const { return own > cut || (own == cut && i <= last); }

    // Number and sum of the weights with bits of at least `from`.
    DEVICE double count(u32 from) const {
        int number = 0;
        each_logit(logits, vocab, [&](float x, int) { number += bits_of(x) >= from; });
        return sum_all(number);
    }
    DEVICE double sum(u32 from) const {
        double sum = 0.0;
        each_logit(logits, vocab, [&](float x, int) {
            const u32 own = bits_of(x);
            if (own >= from) sum += __uint_as_float(own);
        });
        return sum_all(sum);
    }
    // Contiguous range of ids of this thread, for sums in order of the ids.
    DEVICE int first() const { return min(vocab, int(threadIdx.x) * each()); }
    DEVICE int each() const { return (vocab + THREADS - 1) / THREADS; }
    DEVICE int end() const { return min(vocab, first() + each()); }

    // Keeps weights with bits above `at`, and the first `number` of those equal to it.
    DEVICE void keep_first(u32 at, double number) {
        __shared__ int found;
        int own = 0;
        for (int i = first(); i < end(); ++i) own += bits(i) == at;
        double before = sum_before(own);
        if (threadIdx.x == 0) found = 0x7fffffff;
        __syncthreads();
        if (before < number && before + own >= number) {
            for (int i = first(); i < end(); ++i) {
                if (bits(i) == at && ++before >= number) {
                    found = i;
                    break;
                }
            }
        }
        __syncthreads();
        // The intersection of both cuts.
        if (at > cut || (at == cut && found < last)) cut = at, last = found;
        __syncthreads();
    }
    // The largest bits for which enough(bits) holds; LEAST if it never does.
    template <class Enough>
    DEVICE u32 bisect(Enough enough) const {
        u32 low = LEAST, high = ONE;
        while (low < high) {
            const u32 middle = low + (high - low + 1) / 2;
            if (enough(middle)) low = middle;
            else high = middle - 1;
        }
        return low;
    }
};

DEVICE int draw(Weights& w, const DrawParams& d) {
    __shared__ int chosen;
    if (d.top_k > 0 && d.top_k < w.vocab) {
        const u32 at = w.bisect([&](u32 from) { return w.count(from) >= d.top_k; });
        w.keep_first(at, d.top_k - w.count(at + 1));
    }
    if (d.top_p < 1.f) {
        double kept = 0.0;
        each_logit(w.logits, w.vocab, [&](float x, int i) {
            const u32 own = w.bits_of(x);
            if (w.keeps(own, i)) kept += __uint_as_float(own);
        });
        const double wanted = double(d.top_p) * sum_all(kept);
        const u32 at = w.bisect([&](u32 from) { return w.sum(from) >= wanted; });
        w.keep_first(at, fmax(1.0, ceil((wanted - w.sum(at + 1)) / __uint_as_float(at))));
    }
    if (d.min_p > 0.f && __float_as_uint(d.min_p) > w.cut) w.cut = __float_as_uint(d.min_p), w.last = 0x7fffffff;
    double own = 0.0;
    for (int i = w.first(); i < w.end(); ++i) {
        const u32 bits = w.bits(i);
        if (w.keeps(bits, i)) own += __uint_as_float(bits);
    }
    const double before = sum_before(own), target = __longlong_as_double(d.uniform) * sum_all(own);
    if (threadIdx.x == 0) chosen = -1;
    __syncthreads();
    // The thread in whose range the target lies; none, if rounding put it behind the last.
    const bool is_mine = own > 0.0 && before <= target && target < before + own;
    if (is_mine) {
        double sum = before;
        int last = -1;
        for (int i = w.first(); i < w.end(); ++i) {
            const u32 bits = w.bits(i);
            if (!w.keeps(bits, i)) continue;
            last = i;
            sum += __uint_as_float(bits);
            if (target < sum) break;
        }
        chosen = last;
    }
    __syncthreads();
    return chosen;
}

extern "C" __global__ void __launch_bounds__(THREADS) decode_sample(const __grid_constant__ DecodeSample p) {
    let_successor_begin();
    wait_for_predecessor();
    const float* logits = p.logits + size_t(blockIdx.x) * p.vocab;
    const Best best = find_best(logits, p.vocab);
    double sum = 0.0;
    each_logit(logits, p.vocab, [&](float x, int) { sum += expf(x - best.value); });
    sum = sum_all(sum);
    // A row with a NaN, or with minus infinity alone, has no next token.
    const bool none = best.value != best.value || best.value == NEG_INF;
    const DrawParams d = p.draws[blockIdx.x];
    int id = best.at;
    if (!none && d.inverse_temperature > 0.f) {
        Weights w{logits, p.vocab, best.value, d.inverse_temperature, LEAST, 0x7fffffff};
        id = draw(w, d);
        if (id < 0) id = best.at;
    }
    if (threadIdx.x > 0) return;
    p.ids[blockIdx.x] = none ? -1 : id;
    p.logprobs[blockIdx.x] = none ? 0.f : float(double(logits[id]) - best.value - log(sum));
}
