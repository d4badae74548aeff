// Elementwise kernels: conversions, fills, sums.
//
// Compile-time: BF16, VEC.
#include "flat.cuh"
#include "params.cuh"

extern "C" __global__ void narrow(PARAMS(Narrow)) {
    FOR_EACH(i, count / VEC) {
        float v[VEC];
        load<VEC>(v, x + i * VEC);
        store<VEC>(y + i * VEC, v);
    }
}
extern "C" __global__ void widen(PARAMS(Widen)) {
    FOR_EACH(i, count / VEC) {
        float v[VEC];
        load<VEC>(v, x + i * VEC);
        store<VEC>(y + i * VEC, v);
    }
}
// bf16 halves of all elements, then the remainders of all elements.
extern "C" __global__ void to_halves_all(PARAMS(Narrow)) {
    FOR_EACH(i, count) to_halves(x[i], y[i], y[count + i]);
}
extern "C" __global__ void from_halves_all(PARAMS(Widen)) {
    FOR_EACH(i, count) y[i] = from_halves(x[i], x[count + i]);
}
extern "C" __global__ void fill(PARAMS(Fill)) {
    FOR_EACH(i, count) x[i] = to_real(value);
}
extern "C" __global__ void fill_i32(PARAMS(FillInts)) {
    FOR_EACH(i, count) x[i] = value;
}
// y = a + b; y may be either.
extern "C" __global__ void add(PARAMS(Add)) {
    FOR_EACH(i, count / VEC) {
        float u[VEC], v[VEC];
        load<VEC>(u, a + i * VEC);
        load<VEC>(v, b + i * VEC);
#pragma unroll
        for (int j = 0; j < VEC; ++j) u[j] += v[j];
        store<VEC>(y + i * VEC, u);
    }
}
