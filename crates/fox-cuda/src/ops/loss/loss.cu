// Cross-entropy of rows of logits, and its gradient.
//
// Compile-time: BF16 (type of logits and gradient), VEC.
#include "params.cuh"

constexpr int WARPS = 16;
constexpr int THREADS = 32 * WARPS;
constexpr int IGNORE = -100;

// Log-sum-exp of a row, returned to all threads of the block.
DEVICE float row_lse(const real* x, int vocab) {
    float top = NEG_INF, sum = 0.f;
    for (int c = threadIdx.x * VEC; c < vocab; c += THREADS * VEC) {
        float v[VEC], next = top;
        load<VEC>(v, x + c);
#pragma unroll
        for (int i = 0; i < VEC; ++i) next = fmaxf(next, v[i]);
        // Only -inf so far: the sum stays 0 instead of NaN.
        if (next == NEG_INF) continue;
        sum *= exponential(top - next);
        top = next;
#pragma unroll
        for (int i = 0; i < VEC; ++i) sum += exponential(v[i] - top);
    }
    const float all = block_max<WARPS>(top);
    sum = block_sum<WARPS>(top == NEG_INF ? 0.f : sum * exponential(top - all));
    return all + logf(sum);
}

// One thread block per row. loss[row]; with weights also the gradient weight (softmax - target), in place of the
// logits. The target is the label, or, with a teacher's logits, (1 - teacher_weight) label + teacher_weight
// softmax(teacher). Rows whose label is IGNORE get 0.
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
    // Read before the row is overwritten: row_lse has barriers.
    const float own = to_float(x[label]);
    const float lse = row_lse(x, vocab);
    if (threadIdx.x == 0) loss[row] = lse - own;
    if (!weights) return;
    const float weight = weights[row];
    if (teacher) {
        const real* t = teacher + size_t(row) * vocab;
        const float teacher_lse = row_lse(t, vocab);
        for (int c = threadIdx.x * VEC; c < vocab; c += THREADS * VEC) {
            float v[VEC], u[VEC];
            load<VEC>(v, x + c);
            load<VEC>(u, t + c);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                const float target =
                    (c + i == label ? 1.f - teacher_weight : 0.f) + teacher_weight * exponential(u[i] - teacher_lse);
                v[i] = weight * (exponential(v[i] - lse) - target);
            }
            store<VEC>(x + c, v);
        }
        return;
    }
    // From the last column to the first: what `row_lse` has read last is still in the L2 cache, which the rows of all
    // resident blocks together exceed.
    const int own_columns = max(vocab - int(threadIdx.x) * VEC, 0);
    const int last = (own_columns + THREADS * VEC - 1) / (THREADS * VEC) - 1;
    for (int c = (last * THREADS + int(threadIdx.x)) * VEC; c >= 0; c -= THREADS * VEC) {
        float v[VEC];
        load<VEC>(v, x + c);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            v[i] = weight * (exponential(v[i] - lse) - (c + i == label ? 1.f : 0.f));
        }
        store<VEC>(x + c, v);
    }
}
