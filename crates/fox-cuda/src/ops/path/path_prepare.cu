// Preparation of blocks of keys for PaTH attention, and its backward; see path.cuh. Grid (blocks, key heads).
#define WARPS_ACROSS 2
#include "path.cuh"
#include "triangular.cuh"

struct PrepareShared {
    alignas(16) real u[ROWS], k[ROWS];
    alignas(16) float system[BLOCK * SYSTEM], inverse[BLOCK * SYSTEM];
    alignas(16) real t[SQUARES], n[SQUARES], z[SQUARES];
};

extern "C" __global__ void __launch_bounds__(THREADS) path_prepare(const __grid_constant__ PathParams p) {
    SHARED(PrepareShared, sh);
    const int block = blockIdx.x, kv_head = blockIdx.y;
    const PathBlock b = p.blocks[block];
    copy_keys(sh.k, p.k, p, b, kv_head);
    load_reflections(sh.u, p, b, kv_head);
    wait();
    Square overlaps = {};
    overlaps.template add<D, RowMajor, Transposed>(sh.u, RP, sh.u, RP);
    overlaps.each([&](int i, int j, float x) { sh.system[i * SYSTEM + j] = j < i ? x : 0.f; });
    Square n = {};
    n.template add<D, RowMajor, Transposed>(sh.u, RP, sh.k, RP);
    keep_lower<true>(n, 0);
    n.store(sh.n, SP);
    n.store(block_scratch(p.n, p, block, kv_head, BLOCK * BLOCK), BLOCK);
    __syncthreads();
    invert(sh.inverse, sh.system);
    real* t = block_scratch(p.t, p, block, kv_head, BLOCK * BLOCK);
    for_each_in_block<BLOCK * BLOCK>([&](int e) {
        const int i = e / BLOCK, j = e % BLOCK;
        const real x = to_real(j / 16 <= i / 16 ? sh.inverse[i * SYSTEM + j] : 0.f);
        sh.t[i * SP + j] = x;
        t[e] = x;
    });
    __syncthreads();
    Square z = {};
    z.template add<BLOCK, RowMajor, RowMajor>(sh.t, SP, sh.n, SP);
    z.store(sh.z, SP);
    Rows tu = {};
    tu.template add<BLOCK, RowMajor, RowMajor>(sh.t, SP, sh.u, RP);
    __syncthreads();
    Rows kh = {};
    kh.template add<BLOCK, Transposed, RowMajor>(sh.z, SP, sh.u, RP);
    kh.each([&](int i, int j, float& x) { x = to_float(sh.k[i * RP + j]) - x; });
    kh.store(block_scratch(p.kh, p, block, kv_head, BLOCK * D), D);
    __syncthreads();
    tu.store(sh.k, RP);
    __syncthreads();
    Accumulator<D, D> e = {};
    e.template add<BLOCK, Transposed, RowMajor>(sh.u, RP, sh.k, RP);
    negate(e);
    e.store(block_scratch(p.e, p, block, kv_head, D * D), D);
}

static_assert(sizeof(PrepareShared) <= PREPARE_BYTES);

struct PrepareBwdShared {
    alignas(16) real u[ROWS], k[ROWS], a[ROWS];
    alignas(16) real e[tile_size(D, D)];
    alignas(16) real t[SQUARES], n[SQUARES], z[SQUARES];
};

static_assert(sizeof(PrepareBwdShared) <= PREPARE_BWD_BYTES);

// Adds the gradients that the query heads of the group have left for this block.
template <int M, int N>
DEVICE void add_own(Accumulator<M, N>& c, const float* own, const PathParams& p, int block, int kv_head) {
    const int group = p.heads / p.kv_heads;
    for (int h = 0; h < group; ++h) {
        const int head = kv_head * group + h - p.head0;
        const float* x = own + (size_t(block) * p.head_count + head) * M * N;
        c.each([&](int i, int j, float& y) { y += x[i * N + j]; });
    }
}
template <int M, int N>
DEVICE void add_sums(Accumulator<M, N>& c, const float* sums, const PathParams& p, int block, int kv_head) {
    const int kv_count = p.head_count * p.kv_heads / p.heads, first = p.head0 * p.kv_heads / p.heads;
    const float* x = sums + (size_t(block) * kv_count + kv_head - first) * M * N;
    c.each([&](int i, int j, float& y) { y += x[i * N + j]; });
}

// Adds the column sums of larger spans to those of the block.
DEVICE void add_levels(const PathParams& p, const PathBlock& b, int kv_head) {
    const int group = p.heads / p.kv_heads;
    if (threadIdx.x >= BLOCK) return;
    for (int h = 0; h < group; ++h) {
        float* sums = p.column_sums + size_t(kv_head * group + h) * p.gate_stride + b.gates + threadIdx.x;
        float sum = *sums;
        for (int level = 1; level < p.levels; ++level) sum += sums[size_t(level) * p.heads * p.gate_stride];
        *sums = sum;
    }
}

// Grid (blocks, key heads of this launch): gradients of keys, values and reflections.
extern "C" __global__ void __launch_bounds__(THREADS) path_bwd_prepare(const __grid_constant__ PathParams p) {
    SHARED(PrepareBwdShared, sh);
    const int block = blockIdx.x, kv_head = p.head0 * p.kv_heads / p.heads + blockIdx.y;
    const PathBlock b = p.blocks[block];
    const size_t stride = size_t(p.kv_heads) * p.head_dim;
    if (p.gates) add_levels(p, b, kv_head);
    copy_keys(sh.k, p.k, p, b, kv_head);
    copy_square<BLOCK>(sh.t, block_scratch(p.t, p, block, kv_head, BLOCK * BLOCK));
    copy_square<BLOCK>(sh.n, block_scratch(p.n, p, block, kv_head, BLOCK * BLOCK));
    load_reflections(sh.u, p, b, kv_head);
    Rows dv = {};
    add_sums(dv, p.dv_sums, p, block, kv_head);
    add_own(dv, p.dv_own, p, block, kv_head);
    dv.store_rows(key_rows(p.dv, p, b.row, kv_head), b.rows, stride, p.head_dim);
    Rows dk = {}, du = {};
    add_sums(dk, p.dkh_sums, p, block, kv_head);
    dk.each([&](int, int, float& x) { x *= p.scale; });
    dk.store(sh.a, RP);
    wait();
    // kh = K - Z^T U with Z = T N; `a` is the gradient of kh.
    Square z = {};
    z.template add<BLOCK, RowMajor, RowMajor>(sh.t, SP, sh.n, SP);
    negate(z);
    z.store(sh.z, SP);
    Square dz = {};
    dz.template add<D, RowMajor, Transposed>(sh.u, RP, sh.a, RP);
    negate(dz);
    __syncthreads();
    du.template add<BLOCK, RowMajor, RowMajor>(sh.z, SP, sh.a, RP);
    __syncthreads();
    dz.store(sh.z, SP);
    Rows tu = {};
    tu.template add<BLOCK, RowMajor, RowMajor>(sh.t, SP, sh.u, RP);
    tu.store(sh.a, RP);
    Accumulator<D, D> de = {};
    add_sums(de, p.de_sums, p, block, kv_head);
    negate(de);
    de.store(sh.e, RP);
    __syncthreads();
    Square dt = {}, dn = {};
    dt.template add<BLOCK, RowMajor, Transposed>(sh.z, SP, sh.n, SP);
    dn.template add<BLOCK, Transposed, RowMajor>(sh.t, SP, sh.z, SP);
    add_own(dt, p.dt_own, p, block, kv_head);
    add_own(dn, p.dn_own, p, block, kv_head);
    add_own(dk, p.dk_own, p, block, kv_head);
    add_own(du, p.du_own, p, block, kv_head);
    // E = -U^T (T U); `a` is T U, `e` minus the gradient of E.
    du.template add<D, RowMajor, Transposed>(sh.a, RP, sh.e, RP);
    Rows dtu = {};
    dtu.template add<D, RowMajor, RowMajor>(sh.u, RP, sh.e, RP);
    __syncthreads();
    dtu.store(sh.a, RP);
    keep_lower<true>(dn, 0);
    dn.store(sh.n, SP);
    __syncthreads();
    dt.template add<D, RowMajor, Transposed>(sh.a, RP, sh.u, RP);
    du.template add<BLOCK, Transposed, RowMajor>(sh.t, SP, sh.a, RP);
    // N = tril(U K^T, -1); `n` is its gradient.
    du.template add<BLOCK, RowMajor, RowMajor>(sh.n, SP, sh.k, RP);
    dk.template add<BLOCK, Transposed, RowMajor>(sh.n, SP, sh.u, RP);
    dt.store(sh.z, SP);
    __syncthreads();
    // T = (I + L)^-1 with L = tril(U U^T, -1): dL = -tril(T^T dT T^T, -1).
    Square left = {};
    left.template add<BLOCK, Transposed, RowMajor>(sh.t, SP, sh.z, SP);
    left.store(sh.n, SP);
    __syncthreads();
    Square dl = {};
    dl.template add<BLOCK, RowMajor, Transposed>(sh.n, SP, sh.t, SP);
    negate(dl);
    keep_lower<true>(dl, 0);
    dl.store(sh.z, SP);
    __syncthreads();
    du.template add<BLOCK, RowMajor, RowMajor>(sh.z, SP, sh.u, RP);
    du.template add<BLOCK, Transposed, RowMajor>(sh.z, SP, sh.u, RP);
    dk.store_rows(key_rows(p.dk, p, b.row, kv_head), b.rows, stride, p.head_dim);
    float* out = key_rows(p.du, p, b.row, kv_head);
    du.each([&](int i, int j, float x) {
        if (i < b.rows && j < p.head_dim) out[i * stride + j] = x;
    });
}
