// Shared-memory tiles and block-wide matrix products: bf16 by mma, f32 by FMA.
//
// A tile has rows of `real`, padded by 16 bytes against bank conflicts. A product is partitioned over the warps of a
// block, four rows of warps and WARPS_ACROSS columns, each warp with multiples of 16 x 16; products too small for that
// leave warps idle. Both types map elements to threads in the same way, so epilogues do not depend on the type.
//
// Compile-time: BF16, VEC (8 where all widths are multiples of it, else 1), and WARPS_ACROSS (4 unless the
// including file says otherwise).
#pragma once
#include "mma.cuh"
#include "real.cuh"

#ifndef WARPS_ACROSS
#define WARPS_ACROSS 4
#endif
constexpr int WARP_ROWS = 4, WARP_COLUMNS = WARPS_ACROSS;
constexpr int THREADS = 32 * WARP_ROWS * WARP_COLUMNS;

// The largest count of at most `warps` that divides `tiles`.
DEVICE constexpr int even_split(int tiles, int warps) {
    while (tiles % warps != 0) --warps;
    return warps;
}

// Elements from one row of a tile of this width to the next.
DEVICE constexpr int pitch(int columns) { return columns + 16 / int(sizeof(real)); }
// Elements of a tile.
DEVICE constexpr int tile_size(int rows, int columns) { return rows * pitch(columns); }

// Elements of a 16-byte vector.
constexpr int VECTOR = 16 / sizeof(real);

// Calls f(0) ... f(COUNT - 1), distributed over the block.
template <int COUNT, class F>
DEVICE void for_each_in_block(F f) {
#pragma unroll
    for (int n = 0; n < COUNT; n += THREADS) {
        const int i = n + threadIdx.x;
        if (COUNT % THREADS == 0 || i < COUNT) f(i);
    }
}

// Two neighbouring elements.
DEVICE float2 load_pair(const u16* p) {
    const u32 x = *reinterpret_cast<const u32*>(p);
    return make_float2(bf16_lo(x), bf16_hi(x));
}
DEVICE float2 load_pair(const float* p) { return *reinterpret_cast<const float2*>(p); }

// Layout of an operand in its tile: M x K (left) or K x N (right) row by row, or transposed.
enum Layout { RowMajor, Transposed };

// An M x N accumulator in f32, distributed over the block.
template <int M, int N>
struct Accumulator {
    static constexpr int DOWN = even_split(M / 16, WARP_ROWS), ACROSS = even_split(N / 16, WARP_COLUMNS);
    static constexpr int FM = M / DOWN / 16, FN = N / ACROSS / 8;
    float c[FM][FN][4];

    DEVICE static int warp_row() { return threadIdx.x / 32 / WARP_COLUMNS; }
    DEVICE static int warp_column() { return threadIdx.x / 32 % WARP_COLUMNS; }
    // Whether this warp owns elements.
    DEVICE static bool active() { return warp_row() < DOWN && warp_column() < ACROSS; }
    DEVICE static int row_of(int f, int e) {
        return warp_row() * 16 * FM + f * 16 + e / 2 * 8 + threadIdx.x % 32 / 4;
    }
    DEVICE static int column_of(int g, int e) {
        return warp_column() * 8 * FN + g * 8 + threadIdx.x % 4 * 2 + e % 2;
    }

    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < FM * FN * 4; ++i) (&c[0][0][0])[i] = 0.f;
    }

    DEVICE void plus(const Accumulator& other) {
#pragma unroll
        for (int i = 0; i < FM * FN * 4; ++i) (&c[0][0][0])[i] += (&other.c[0][0][0])[i];
    }

    // f(row, column, element) for all elements of this thread.
    template <class F>
    DEVICE void each(F f) {
        if (!active()) return;
#pragma unroll
        for (int m = 0; m < FM; ++m)
#pragma unroll
            for (int n = 0; n < FN; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) f(row_of(m, e), column_of(n, e), c[m][n][e]);
    }
    // f(row, column, element, next element) for pairs of neighbours in a row.
    template <class F>
    DEVICE void each_pair(F f) {
        if (!active()) return;
#pragma unroll
        for (int m = 0; m < FM; ++m)
#pragma unroll
            for (int n = 0; n < FN; ++n)
#pragma unroll
                for (int e = 0; e < 4; e += 2)
                    f(row_of(m, e), column_of(n, e), c[m][n][e], c[m][n][e + 1]);
    }

    // The same together with the pair at the same position of another accumulator.
    template <class F>
    DEVICE void each_pair_with(const Accumulator& other, F f) {
        if (!active()) return;
#pragma unroll
        for (int m = 0; m < FM; ++m)
#pragma unroll
            for (int n = 0; n < FN; ++n)
#pragma unroll
                for (int e = 0; e < 4; e += 2)
                    f(row_of(m, e), column_of(n, e), make_float2(c[m][n][e], c[m][n][e + 1]),
                      make_float2(other.c[m][n][e], other.c[m][n][e + 1]));
    }

    // += A B over K terms. `a` and `b` point at the first row and column of the operands.
    template <int K, Layout A, Layout B>
    DEVICE void add(const real* a, int a_pitch, const real* b, int b_pitch) {
        if (!active()) return;
#if BF16
        const int lane = threadIdx.x % 32, low = lane % 16, high = lane / 16 * 8;
        const int mixed = lane % 8 + lane / 16 * 8, middle = lane / 8 % 2 * 8;
        const int row = warp_row() * 16 * FM, column = warp_column() * 8 * FN;
        a += A == RowMajor ? (row + low) * a_pitch + high : mixed * a_pitch + row + middle;
        b += B == RowMajor ? low * b_pitch + column + high : (column + mixed) * b_pitch + middle;
        // Consecutive mma on one accumulator serialize: small products alternate between two.
        constexpr int SETS = FM * FN <= 2 ? 2 : 1;
        float sets[SETS][FM][FN][4] = {};
#pragma unroll
        for (int k = 0; k < K; k += 16) {
            u32 fa[FM][4];
#pragma unroll
            for (int m = 0; m < FM; ++m) {
                if (A == RowMajor) ldmatrix(fa[m], a + m * 16 * a_pitch + k);
                else ldmatrix_transposed(fa[m], a + k * a_pitch + m * 16);
            }
#pragma unroll
            for (int n = 0; n < FN; n += 2) {
                u32 fb[4];
                if (B == RowMajor) ldmatrix_transposed(fb, b + k * b_pitch + n * 8);
                else ldmatrix(fb, b + n * 8 * b_pitch + k);
#pragma unroll
                for (int m = 0; m < FM; ++m) {
                    float(*to)[4] = k / 16 % SETS ? sets[1 % SETS][m] : c[m];
                    mma(to[n], fa[m], fb[0], fb[1]);
                    mma(to[n + 1], fa[m], fb[2], fb[3]);
                }
            }
        }
        if constexpr (SETS == 2) {
#pragma unroll
            for (int i = 0; i < FM * FN * 4; ++i) (&c[0][0][0])[i] += (&sets[1][0][0][0])[i];
        }
#else
        for (int k = 0; k < K; ++k) {
            float left[FM][2], right[FN][2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int m = 0; m < FM; ++m) {
                    const int at = row_of(m, 2 * i);
                    left[m][i] = a[A == RowMajor ? at * a_pitch + k : k * a_pitch + at];
                }
#pragma unroll
                for (int n = 0; n < FN; ++n) {
                    const int at = column_of(n, i);
                    right[n][i] = b[B == RowMajor ? k * b_pitch + at : at * b_pitch + k];
                }
            }
#pragma unroll
            for (int m = 0; m < FM; ++m)
#pragma unroll
                for (int n = 0; n < FN; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        c[m][n][e] = fmaf(left[m][e / 2], right[n][e % 2], c[m][n][e]);
        }
#endif
    }

    // Into a tile.
    DEVICE void store(real* tile, int tile_pitch) {
        each_pair([&](int row, int column, float x, float y) {
            store_pair(tile + row * tile_pitch + column, x, y);
        });
    }

    // Into the first `rows` rows and `width` columns of a matrix in device memory.
    DEVICE void store_rows(real* x, int rows, size_t stride, int width) {
        each_pair([&](int row, int column, float a, float b) {
            if (row >= rows) return;
            real* at = x + row * stride + column;
            if constexpr (VEC == 8) {
                if (column < width) store_pair(at, a, b);
            } else {
                if (column < width) at[0] = to_real(a);
                if (column + 1 < width) at[1] = to_real(b);
            }
        });
    }

    DEVICE static void store_pair(real* p, float x, float y) {
#if BF16
        *reinterpret_cast<u32*>(p) = pack_bf16(x, y);
#else
        *reinterpret_cast<float2*>(p) = make_float2(x, y);
#endif
    }

    // Sums f(row, column, element) over the columns of each row; `partials` has ACROSS * M elements, which
    // `finish_row_sum` adds up after a __syncthreads().
    template <class F>
    DEVICE void row_sums(float* partials, F f) {
        if (!active()) return;
#pragma unroll
        for (int m = 0; m < FM; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float sum = 0.f;
#pragma unroll
                for (int n = 0; n < FN; ++n)
#pragma unroll
                    for (int e = 2 * i; e < 2 * i + 2; ++e)
                        sum += f(row_of(m, e), column_of(n, e), c[m][n][e]);
                sum = quad_sum(sum);
                if (threadIdx.x % 4 == 0) partials[warp_column() * M + row_of(m, 2 * i)] = sum;
            }
    }
    // Sums of the columns; `partials` has DOWN * N elements, which `finish_column_sum` adds up after a __syncthreads().
    DEVICE void column_sums(float* partials) {
        if (!active()) return;
#pragma unroll
        for (int n = 0; n < FN; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float sum = 0.f;
#pragma unroll
                for (int m = 0; m < FM; ++m) sum += c[m][n][e] + c[m][n][e + 2];
                // Lanes with the same columns.
#pragma unroll
                for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
                if (threadIdx.x % 32 < 4) partials[warp_row() * N + column_of(n, e)] = sum;
            }
    }
    DEVICE static float finish_column_sum(const float* partials, int column) {
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < DOWN; ++w) sum += partials[w * N + column];
        return sum;
    }
    // Dot products of all rows with those of a tile, finished by `finish_row_sum`.
    DEVICE void row_dots(float* partials, const real* tile, int tile_pitch) {
        if (!active()) return;
#pragma unroll
        for (int m = 0; m < FM; ++m)
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                float sum = 0.f;
#pragma unroll
                for (int n = 0; n < FN; ++n) {
                    const float2 x = load_pair(tile + row_of(m, e) * tile_pitch + column_of(n, e));
                    sum = fmaf(c[m][n][e], x.x, fmaf(c[m][n][e + 1], x.y, sum));
                }
                sum = quad_sum(sum);
                if (threadIdx.x % 4 == 0) partials[warp_column() * M + row_of(m, e)] = sum;
            }
    }
    // The same from a thread's sums of rows row_of(0, 0) and row_of(0, 2).
    DEVICE static void store_row_partials(float* partials, const float (&sums)[2]) {
        static_assert(FM == 1);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float sum = quad_sum(sums[i]);
            if (active() && threadIdx.x % 4 == 0) partials[warp_column() * M + row_of(0, 2 * i)] = sum;
        }
    }
    DEVICE static float finish_row_sum(const float* partials, int row) {
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < ACROSS; ++w) sum += partials[w * M + row];
        return sum;
    }
};

// Copies `rows` rows of `width` elements, `stride` apart, into a tile of ROWS x COLUMNS and zero-fills the rest.
// Asynchronous with VEC 8: copy_commit() and copy_wait() follow.
template <int ROWS, int COLUMNS>
DEVICE void copy_tile(real* tile, const real* x, int rows, size_t stride, int width) {
    if constexpr (VEC == 8) {
        // A thread copies the same columns of every STEP-th row. Where the rows do not fill the block, its last threads
        // are idle: copying a row twice would be a race.
        constexpr int VECTORS = COLUMNS / VECTOR, STEP = THREADS / VECTORS;
        constexpr bool EVEN = THREADS % VECTORS == 0 && ROWS % STEP == 0;
        const int row = threadIdx.x / VECTORS, column = threadIdx.x % VECTORS * VECTOR;
        const int rest = column < width ? rows - row : 0;
        tile += row * pitch(COLUMNS) + column;
        x += row * stride + column;
#pragma unroll
        for (int r = 0; r < ROWS; r += STEP) {
            if (EVEN || (row < STEP && row + r < ROWS)) {
                copy_async(reinterpret_cast<u16*>(tile + r * pitch(COLUMNS)),
                           reinterpret_cast<const u16*>(x + r * stride), r < rest);
            }
        }
    } else {
        for (int i = threadIdx.x; i < ROWS * COLUMNS; i += THREADS) {
            const int row = i / COLUMNS, column = i % COLUMNS;
            const bool valid = row < rows && column < width;
            tile[row * pitch(COLUMNS) + column] = valid ? x[row * stride + column] : to_real(0.f);
        }
    }
}

// Multiplies row t of a tile by factor(t). Every thread scales the elements it copied with copy_tile: no barrier.
template <int ROWS, int COLUMNS, class F>
DEVICE void scale_tile(real* tile, F factor) {
    constexpr int SIZE = VEC == 8 ? VECTOR : 1;
    for_each_in_block<ROWS * (COLUMNS / SIZE)>([&](int i) {
        const int row = i / (COLUMNS / SIZE);
        real* at = tile + row * pitch(COLUMNS) + i % (COLUMNS / SIZE) * SIZE;
        float values[SIZE];
        load(values, at);
        const float by = factor(row);
#pragma unroll
        for (int e = 0; e < SIZE; ++e) values[e] *= by;
        store(at, values);
    });
}
