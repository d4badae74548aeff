// y[rows, N] = x[rows, K] w[N, K]^T for decode rows, with the same bits for a row in any company.
//
// Weights are the left operand of the matrix instructions and rows the right one, so a row is a column of the
// accumulators. The columns of K are divided into PARTS runs; a warp adds up one run in order, and the runs are added
// in order. So an element's order of additions depends on K alone: how many rows a warp carries (8 NT), how many
// weights (16 MT) and how many warps share the rows (GROUPS) decides only who computes it.
//
// x lies in blocks [rows / 8][K / 32][8][32] (`blocked` in stream.cuh): the right operand of a step of 32 columns for
// 8 rows is 512 bytes in a row. A lane's eight columns of the weights are as good as any for a sum, if the right
// operand takes the same ones: what a lane has read is the operand of two instructions.
//
// Compile-time: NT, MT, GROUPS, PARTS, DEPTH (steps of weights on their way), GLU (pairs of rows become act(g) u).
#include "stream.cuh"
#include "mma.cuh"
#include "params.cuh"

constexpr int WARPS = PARTS * GROUPS;
constexpr int THREADS = 32 * WARPS;
// Tiles of eight rows whose runs are added up at once.
constexpr int AT_ONCE = NT < 2 ? NT : 2;
// Tiles of eight rows and steps that are on their way together, as far as registers allow.
constexpr int CARRIED = NT < 8 ? NT : 8;
constexpr int TOGETHER = NT * DEPTH <= 16 ? DEPTH : 1;
constexpr int TILE = 128;  // values of 16 weights times 8 rows
// Rows of weights of a tile that are results.
constexpr int RESULTS = GLU ? 8 : 16;

DEVICE uint4 stream_weights(const u16* p) {
#if EMULATED
    return *reinterpret_cast<const uint4*>(p);
#else
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(p));
    return x;
#endif
}

// Where a lane reads the upper and the lower half of a tile; null beyond the last row.
struct Rows {
    const u16 *top, *bottom;

    DEVICE Rows() : top(nullptr), bottom(nullptr) {}
    DEVICE Rows(const StreamPart& part, int tile, int width) {
        const int row = tile * RESULTS + threadIdx.x % 32 / 4, other = GLU ? part.rows + row : row + 8;
        top = row < part.rows ? part.w + size_t(row) * width : nullptr;
        bottom = (GLU ? row : other) < part.rows ? part.w + size_t(other) * width : nullptr;
    }
    DEVICE void load(uint4 (&w)[2], int step) const {
        const int column = 32 * step + 8 * (threadIdx.x % 4);
        const uint4 zero = make_uint4(0, 0, 0, 0);
        w[0] = top ? stream_weights(top + column) : zero;
        w[1] = bottom ? stream_weights(bottom + column) : zero;
    }
};

// A step of 32 columns for the tiles of rows from `first` on.
DEVICE void multiply(float (&c)[MT][NT][4], const uint4 (&w)[MT][2], const uint4 (&b)[CARRIED], int first) {
#pragma unroll
    for (int t = 0; t < CARRIED; ++t) {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            const uint4 &top = w[m][0], &bottom = w[m][1];
            const u32 left[4] = {top.x, bottom.x, top.y, bottom.y};
            const u32 right[4] = {top.z, bottom.z, top.w, bottom.w};
            mma(c[m][first + t], left, b[t].x, b[t].y);
            mma(c[m][first + t], right, b[t].z, b[t].w);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) stream_product(const __grid_constant__ StreamProduct p) {
    __shared__ float sums[WARPS * MT * AT_ONCE * TILE];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int run = warp % PARTS, group = warp / PARTS;
    // The part that this block's weights belong to, and its first tile in it.
    int n = 0;
    while (n + 1 < p.part_count && int(blockIdx.y) >= p.parts[n + 1].first_block) ++n;
    const StreamPart part = p.parts[n];
    const int first_tile = (blockIdx.y - part.first_block) * GROUPS * MT;
    const int steps = p.width / 32;
    const int begin = run * steps / PARTS, count = (run + 1) * steps / PARTS - begin;

    Rows rows[MT];
#pragma unroll
    for (int m = 0; m < MT; ++m) rows[m] = Rows(part, first_tile + group * MT + m, p.width);
    uint4 w[DEPTH][MT][2];
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
        if (i < count) {
#pragma unroll
            for (int m = 0; m < MT; ++m) rows[m].load(w[i][m], begin + i);
        }
    }
    // The weights do not depend on what came before; all else does.
    wait_for_predecessor();
    let_successor_begin();

    float c[MT][NT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
        for (int t = 0; t < NT; ++t) c[m][t][0] = c[m][t][1] = c[m][t][2] = c[m][t][3] = 0.f;
    }
    const u16* x = p.x + (size_t(blockIdx.x) * NT * steps + begin) * 256 + 8 * lane;
    for (int base = 0; base < count; base += DEPTH) {
#pragma unroll
        for (int first = 0; first < DEPTH; first += TOGETHER) {
#pragma unroll
            for (int half = 0; half < NT; half += CARRIED) {
                uint4 b[TOGETHER][CARRIED];
#pragma unroll
                for (int j = 0; j < TOGETHER; ++j) {
                    const int i = base + first + j;
#pragma unroll
                    for (int t = 0; t < CARRIED; ++t) {
                        const u16* own = x + (size_t(half + t) * steps + i) * 256;
                        if (i < count) b[j][t] = *reinterpret_cast<const uint4*>(own);
                    }
                }
#pragma unroll
                for (int j = 0; j < TOGETHER; ++j) {
                    if (base + first + j < count) multiply(c, w[first + j], b[j], half);
                }
            }
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j) {
                const int next = base + first + j + DEPTH;
                if (next < count) {
#pragma unroll
                    for (int m = 0; m < MT; ++m) rows[m].load(w[first + j][m], begin + next);
                }
            }
        }
    }

    // The runs of an element lie at the same place of the areas of PARTS warps: [MT][AT_ONCE][4][32] each.
    constexpr int AREA = MT * AT_ONCE * TILE;
#pragma unroll
    for (int first = 0; first < NT; first += AT_ONCE) {
        if (first > 0) __syncthreads();
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int t = 0; t < AT_ONCE; ++t) {
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    sums[warp * AREA + ((m * AT_ONCE + t) * 4 + r) * 32 + lane] = c[m][first + t][r];
                }
            }
        }
        __syncthreads();
        constexpr int VALUES = GLU ? 2 : 4;  // of a lane that are results: with GLU, those of the gates
        constexpr int EACH = MT * AT_ONCE * VALUES * 32;
        for (int e = threadIdx.x; e < GROUPS * EACH; e += THREADS) {
            const int g = e / EACH, m = e / (AT_ONCE * VALUES * 32) % MT, t = e / (VALUES * 32) % AT_ONCE;
            const int r = e / 32 % VALUES, l = e % 32;
            const float* own = sums + g * PARTS * AREA + ((m * AT_ONCE + t) * 4 + r) * 32 + l;
            float sum = own[0], up = GLU ? own[64] : 0.f;
#pragma unroll
            for (int s = 1; s < PARTS; ++s) {
                sum += own[s * AREA];
                if (GLU) up += own[s * AREA + 64];
            }
            const int row = (blockIdx.x * NT + first + t) * 8 + 2 * (l % 4) + r % 2;
            const int result = (first_tile + g * MT + m) * RESULTS + l / 4 + (!GLU && r >= 2 ? 8 : 0);
            if (result >= part.rows) continue;
            if (GLU) {
                p.inner[blocked(row, result, part.rows)] = float_to_bf16(activation(p.act, sum).x * up);
            } else {
                if (part.bias) sum += part.bias[result];
                p.y[size_t(row) * p.stride + part.start + result] = sum;
            }
        }
    }
}
