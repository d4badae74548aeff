// Dropout with counter-based masks: the mask of an element is 16 bits of a hash of the seed and of the element's index in
// the whole batch, so that nothing is saved for the backward pass, which is the same kernel.
//
// Compile-time: BF16, VEC.
#include "flat.cuh"
#include "params.cuh"

// Number `index` of SplitMix64's sequence, as in fox-base.
DEVICE u64 splitmix(u64 seed, u64 index) {
    u64 x = seed + (index + 1) * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}
// y[row][c] = x[row][c] scale where the hash is at least `threshold`, otherwise 0. Rows are numbered
// first + row / run * stride + row % run. Divides in 32 bits (the caller checks the range), as gate_of of glu.cu.
extern "C" __global__ void dropout(PARAMS(DropoutRows)) {
    FOR_EACH(i, count / VEC) {
        const u32 vectors = u32(width) / VEC, row = u32(i) / vectors, column = (u32(i) - row * vectors) * VEC;
        const u64 number = first + u64(row / u32(run)) * stride + row % u32(run);
        const u64 index = number * width + column;
        float v[VEC];
        load<VEC>(v, x + i * VEC);
        u64 hashes = 0;
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            // One hash has the bits of four elements; vectors of eight begin with a group.
            if (j % 4 == 0) hashes = splitmix(seed, (index + j) / 4);
            const u32 lane = VEC == 1 ? u32(index % 4) : j % 4;
            const u32 hash = u32(hashes >> (16 * lane)) & 0xffff;
            v[j] = hash >= u32(threshold) ? v[j] * scale : 0.f;
        }
        store<VEC>(y + i * VEC, v);
    }
}
