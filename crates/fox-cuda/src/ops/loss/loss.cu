// Cross-entropy of rows of logits, and its gradient.
//
// Compile-time: BF16 (type of logits and gradient), VEC.
#include "params.cuh"

constexpr int WARPS = 16;
constexpr int THREADS = 32 * WARPS;
constexpr int IGNORE = -100;

// One block per row. loss[row]; with weights also the gradient weight (softmax - one-hot), in place of the
// logits. Rows whose label is ignored get 0.
extern "C" __global__ void __launch_bounds__(THREADS)
    cross_entropy(PARAMS(CrossEntropy)) {
    const int row = blockIdx.x, label = labels[row];
    real* x = logits + size_t(row) * vocab;
    if (label == IGNORE) {
        if (threadIdx.x == 0) loss[row] = 0.f;
        if (!weights) return;
        const float zeros[VEC] = {};
        for (int c = threadIdx.x * VEC; c < vocab; c += THREADS * VEC) store<VEC>(x + c, zeros);
        return;
    }
    // Read before anybody writes: there are barriers in between.
    const float own = to_float(x[label]);
    float top = NEG_INF, sum = 0.f;
    for (int c = threadIdx.x * VEC; c < vocab; c += THREADS * VEC) {
        float v[VEC], next = top;
        load<VEC>(v, x + c);
#pragma unroll
        for (int i = 0; i < VEC; ++i) next = fmaxf(next, v[i]);
        // A row of -inf so far: keep the sum at 0 rather than make it NaN.
        if (next == NEG_INF) continue;
        sum *= exponential(top - next);
        top = next;
#pragma unroll
        for (int i = 0; i < VEC; ++i) sum += exponential(v[i] - top);
    }
    const float all = block_max<WARPS>(top);
    sum = block_sum<WARPS>(top == NEG_INF ? 0.f : sum * exponential(top - all));
    const float lse = all + logf(sum);
    if (threadIdx.x == 0) loss[row] = lse - own;
    if (!weights) return;
    const float weight = weights[row];
    for (int c = threadIdx.x * VEC; c < vocab; c += THREADS * VEC) {
        float v[VEC];
        load<VEC>(v, x + c);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            v[i] = weight * (exponential(v[i] - lse) - (c + i == label ? 1.f : 0.f));
        }
        store<VEC>(x + c, v);
    }
}
