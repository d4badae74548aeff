// Embedding lookup and its gradient.
//
// Compile-time: BF16, VEC.
#include "flat.cuh"
#include "params.cuh"

// y[row] = table[ids[row]], `count` = rows * width.
extern "C" __global__ void embedding_fwd(PARAMS(EmbeddingForward)) {
    FOR_EACH(i, count / VEC) {
        const size_t row = i * VEC / width, column = i * VEC % width;
        float v[VEC];
        load<VEC>(v, table + size_t(ids[row]) * width + column);
        store<VEC>(y + i * VEC, v);
    }
}

// dtable[id] += sum of dy over the rows of that id, in ascending order: `groups` lists (id, first, end)
// into `order`. Grid (groups, blocks of columns).
extern "C" __global__ void embedding_bwd(PARAMS(EmbeddingBackward)) {
    const int column = (blockIdx.y * blockDim.x + threadIdx.x) * VEC;
    if (column >= width) return;
    const int id = groups[3 * blockIdx.x], end = groups[3 * blockIdx.x + 2];
    float sum[VEC] = {};
#pragma unroll 4
    for (int i = groups[3 * blockIdx.x + 1]; i < end; ++i) {
        float v[VEC];
        load<VEC>(v, dy + size_t(order[i]) * width + column);
#pragma unroll
        for (int j = 0; j < VEC; ++j) sum[j] += v[j];
    }
    float* out = dtable + size_t(id) * width + column;
    float old[VEC];
    load<VEC>(old, out);
#pragma unroll
    for (int j = 0; j < VEC; ++j) sum[j] += old[j];
    store<VEC>(out, sum);
}
