// Output norm and gate per head, y = rms(x) * act(gate), and its gradients. Work decomposition: head_fragments.cuh.
//
// Compile-time: BF16, VEC, LANES (a power of two up to 32), CHUNKS.
#include "params.cuh"
#include "head_fragments.cuh"

// y = rms(x) * act(gate). Grid (slices, blocks of groups).
extern "C" __global__ void gated_norm_fwd(PARAMS(GatedForward)) {
    const HeadLane at = head_lane(p.groups);
    const int d = p.width / p.groups, column = at.head * d;
    const int first = blockIdx.x * p.rows_per_slice, last = min(first + p.rows_per_slice, p.rows);
    Fragment weights;
    if (p.norm) load_fragment(weights, p.norm + at.head * p.norm_stride, at.lane, d);
    PackedFragment next_x, next_z;
    const size_t begin = size_t(first) * p.width + column;
    fetch(next_x, p.x + begin, at.lane, d);
    if (p.gate) fetch(next_z, p.gate + begin, at.lane, d);
    for (int row = first; row < last; ++row) {
        const size_t here = size_t(row) * p.width + column;
        Fragment x, z;
        unpack(x, next_x);
        unpack(z, next_z);
        if (row + 1 < last) {
            fetch(next_x, p.x + here + p.width, at.lane, d);
            if (p.gate) fetch(next_z, p.gate + here + p.width, at.lane, d);
        }
        if (p.norm) {
            const float scale = reciprocal_root(dot(x, x) * (1.f / d) + p.eps);
            FOR_FRAGMENT(c, i) x[c][i] *= scale * weights[c][i];
        }
        if (p.gate) {
            FOR_FRAGMENT(c, i) x[c][i] *= activation(p.act, z[c][i]).x;
        }
        store_fragment(y + here, x, at.lane, d, at.active);
    }
}

// Prefetched operands of one row of the gradient.
struct GatedRow {
    PackedFragment x, g, z;
};
DEVICE void fetch_row(GatedRow& r, const GatedParams& p, const real* dy, size_t here, int lane, int d) {
    fetch(r.x, p.x + here, lane, d);
    fetch(r.g, dy + here, lane, d);
    if (p.gate) fetch(r.z, p.gate + here, lane, d);
}

// partial[slice][width] are partial gradients of the norm weights. The next row is prefetched. With `y`, recomputes the
// output; `y` may alias dy.
extern "C" __global__ void gated_norm_bwd(PARAMS(GatedBackward)) {
    const HeadLane at = head_lane(p.groups);
    const int d = p.width / p.groups, column = at.head * d;
    const int first = blockIdx.x * p.rows_per_slice, last = min(first + p.rows_per_slice, p.rows);
    Fragment weights, dnorm = {};
    if (p.norm) load_fragment(weights, p.norm + at.head * p.norm_stride, at.lane, d);
    GatedRow next;
    fetch_row(next, p, dy, size_t(first) * p.width + column, at.lane, d);
    for (int row = first; row < last; ++row) {
        const size_t here = size_t(row) * p.width + column;
        Fragment x, g, z, out;
        unpack(x, next.x);
        unpack(g, next.g);
        unpack(z, next.z);
        if (row + 1 < last) fetch_row(next, p, dy, here + p.width, at.lane, d);
        float scale = 1.f;
        if (p.norm) {
            scale = reciprocal_root(dot(x, x) * (1.f / d) + p.eps);
            FOR_FRAGMENT(c, i) x[c][i] *= scale;
        }
        if (p.gate) {
            FOR_FRAGMENT(c, i) {
                const float2 act = activation(p.act, z[c][i]);
                const float scaled = x[c][i] * (p.norm ? weights[c][i] : 1.f);
                z[c][i] = g[c][i] * scaled * act.y;
                g[c][i] *= act.x;
                out[c][i] = scaled * act.x;
            }
            store_fragment(dgate + here, z, at.lane, d, at.active);
        } else if (y) {
            FOR_FRAGMENT(c, i) out[c][i] = x[c][i] * (p.norm ? weights[c][i] : 1.f);
        }
        if (y) store_fragment(y + here, out, at.lane, d, at.active);
        if (p.norm) {
            FOR_FRAGMENT(c, i) {
                dnorm[c][i] += g[c][i] * x[c][i];
                g[c][i] *= weights[c][i];
            }
            const float mean = dot(g, x) * (1.f / d);
            FOR_FRAGMENT(c, i) g[c][i] = scale * (g[c][i] - x[c][i] * mean);
        }
        store_fragment(dx + here, g, at.lane, d, at.active);
    }
    if (p.norm) store_fragment(partial + size_t(blockIdx.x) * p.width + column, dnorm, at.lane, d, at.active);
}
