// Cross-entropy of rows of logits, and its gradient.
//
// Compile-time: BF16 (type of logits and gradient), VEC.
#include "real.cuh"

constexpr int WARPS = 16;
constexpr int THREADS = 32 * WARPS;
constexpr int IGNORE = -100;

// Pieces of a row that a thread has on their way from memory at once, one every STRIDE columns.
constexpr int BATCH = 4;
constexpr int STRIDE = THREADS * VEC;
typedef float Pieces[BATCH][VEC];

DEVICE void load_pieces(Pieces& v, const real* x, int first, int vocab) {
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
        const int c = first + b * STRIDE;
        if (c < vocab) {
            load<VEC>(v[b], x + c);
        } else {
#pragma unroll
            for (int i = 0; i < VEC; ++i) v[b][i] = NEG_INF;
        }
    }
}
DEVICE void store_pieces(real* x, const Pieces& v, int first, int vocab) {
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
        const int c = first + b * STRIDE;
        if (c < vocab) store<VEC>(x + c, v[b]);
    }
}

// One block per row. loss[row]; with weights also the gradient weight (softmax - one-hot), in place of the
// logits. Rows whose label is ignored get 0. With `keep`, the row stays in shared memory in between; each
// thread reads there what it wrote itself.
extern "C" __global__ void __launch_bounds__(THREADS)
    cross_entropy(float* loss, real* logits, const int* labels, const float* weights, int vocab,
                  int keep) {
    extern __shared__ float4 row_memory[];
    real* kept = reinterpret_cast<real*>(row_memory);
    const int row = blockIdx.x, label = labels[row], own_first = threadIdx.x * VEC;
    real* x = logits + size_t(row) * vocab;
    if (label == IGNORE) {
        if (threadIdx.x == 0) loss[row] = 0.f;
        if (!weights) return;
        const float zeros[VEC] = {};
        for (int c = own_first; c < vocab; c += STRIDE) store<VEC>(x + c, zeros);
        return;
    }
    // Read before anybody writes: there are barriers in between.
    const float own = to_float(x[label]);
    float top = NEG_INF, sum = 0.f;
    for (int first = own_first; first < vocab; first += BATCH * STRIDE) {
        Pieces v;
        load_pieces(v, x, first, vocab);
        if (keep) store_pieces(kept, v, first, vocab);
        float next = top, terms[BATCH] = {};
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
#pragma unroll
            for (int i = 0; i < VEC; ++i) next = fmaxf(next, v[b][i]);
        }
        // A row of -inf so far: keep the sum at 0 rather than make it NaN.
        if (next == NEG_INF) continue;
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
#pragma unroll
            for (int i = 0; i < VEC; ++i) terms[b] += exponential(v[b][i] - next);
        }
        sum *= exponential(top - next);
#pragma unroll
        for (int b = 0; b < BATCH; ++b) sum += terms[b];
        top = next;
    }
    const float all = block_max<WARPS>(top);
    sum = block_sum<WARPS>(top == NEG_INF ? 0.f : sum * exponential(top - all));
    const float lse = all + logf(sum);
    if (threadIdx.x == 0) loss[row] = lse - own;
    if (!weights) return;
    const float weight = weights[row];
    for (int first = own_first; first < vocab; first += BATCH * STRIDE) {
        Pieces v;
        load_pieces(v, keep ? kept : x, first, vocab);
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int c = first + b * STRIDE;
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                v[b][i] = weight * (exponential(v[b][i] - lse) - (c + i == label ? 1.f : 0.f));
            }
        }
        store_pieces(x, v, first, vocab);
    }
}
