// Accumulator fragments of the backward: probabilities, gradients of scores, and their way to memory.
//
// Included by attention_bwd_sm90.cu.
struct ConsumerBase {
    Shared& sh;
    const BackwardParams& p;
    u32 step;  // counts over the life of the thread block: stage and phase of the rings
    int warpgroup;

    static DEVICE int lane() { return threadIdx.x % 32; }
    // Key of the tile that this thread's first accumulator row is. Both warpgroups of wide heads own the same 64 keys.
    static DEVICE int row() {
        return (WIDE_HEADS ? int(threadIdx.x) / 32 % 4 * 16 : int(threadIdx.x) / 32 * 16 - 64) + lane() / 4;
    }
    static DEVICE void release(u64* bar) { mbarrier_arrive_warp(bar); }

    // Softmax from the saved row statistics: S^T to P^T, for part PART of the queries.
    template <bool MASKED, int PART>
    DEVICE void probabilities(float (&s)[BLOCK_M / 2], int stage, float w0, float w1, int key0,
                              int position, int k_len, bool mirrored) {
        constexpr int GROUPS = BLOCK_M / 8;
        const int column0 = 2 * (lane() % 4);
#pragma unroll
        for (int g = PART * GROUPS / DP_PARTS; g < (PART + 1) * GROUPS / DP_PARTS; ++g) {
            float2 base = *reinterpret_cast<const float2*>(&sh.row_base[stage][8 * g + column0]);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float x = fmaf(s[4 * g + e], p.scale_log2, e & 1 ? base.y : base.x);
                x = exp2_fast(x - (e / 2 ? w1 : w0));
                if (MASKED) {
                    int i = position + 8 * g + column0 + (e & 1);
                    int j = key0 + 8 * (e / 2);
                    if (TWO_SIDES && mirrored) {
                        if (j <= i || j >= k_len || (WINDOW && j - i >= p.window)) x = 0.f;
                    } else {
                        if (i < j || (WINDOW && i - j >= p.window)) x = 0.f;
                    }
                }
                s[4 * g + e] = x;
            }
        }
    }

    // dS = P (dP - delta); packs P and dS as left operands. Returns the sums of dS over the queries, and in `sums`
    // this thread's sums over its keys and each eighth of the queries.
    DEVICE float2 gradient(const float (&s)[BLOCK_M / 2], const float (&dp)[BLOCK_M / 2],
                           u32 (&pf)[BLOCK_M / 4], u32 (&df)[BLOCK_M / 4], float (&sums)[SUMS],
                           int stage) {
        const int column0 = 2 * (lane() % 4);
        float2 total = make_float2(0.f, 0.f);
#pragma unroll
        for (int g = 0; g < BLOCK_M / 8; ++g) {
            float2 delta = *reinterpret_cast<const float2*>(&sh.row_delta[stage][8 * g + column0]);
            float d0 = s[4 * g] * (dp[4 * g] - delta.x);
            float d1 = s[4 * g + 1] * (dp[4 * g + 1] - delta.y);
            float d2 = s[4 * g + 2] * (dp[4 * g + 2] - delta.x);
            float d3 = s[4 * g + 3] * (dp[4 * g + 3] - delta.y);
            pf[2 * g] = pack_bf16(s[4 * g], s[4 * g + 1]);
            pf[2 * g + 1] = pack_bf16(s[4 * g + 2], s[4 * g + 3]);
            df[2 * g] = pack_bf16(d0, d1);
            df[2 * g + 1] = pack_bf16(d2, d3);
            // Sums per query are those of the rounded values, and both must agree.
            const float sum0 = TWO_SIDES ? bf16_lo(df[2 * g]) + bf16_hi(df[2 * g]) : d0 + d1;
            const float sum1 = TWO_SIDES ? bf16_lo(df[2 * g + 1]) + bf16_hi(df[2 * g + 1]) : d2 + d3;
            total.x += sum0;
            total.y += sum1;
            if (TWO_SIDES) continue;
            if (g % GROUPS_PER_SUM == 0) sums[g / GROUPS_PER_SUM] = 0.f;
            sums[g / GROUPS_PER_SUM] += sum0 + sum1;
        }
        return total;
    }

    // dS^T to shared memory, in TMA's 128-byte swizzle.
    DEVICE void store_ds(const u32 (&df)[BLOCK_M / 4], u8* ds) {
        const int matrix = lane() / 8;
        const int key = row() - lane() / 4 + (matrix % 2) * 8 + lane() % 8;
        const u32 base = smem_address(ds) + key * SLAB_ROW_BYTES;
#pragma unroll
        for (int k = 0; k < BLOCK_M / 16; ++k) {
            int chunk = 2 * k + matrix / 2;
            u32 address = base + chunk / 8 * KV_SLAB + (chunk % 8 ^ key % 8) * 16;
            store_matrices(address, df + 4 * k);
        }
    }

    // Sums each of x over the warp by a butterfly; group i of 32 / SUMS lanes gets the sum of x[i].
    static DEVICE float transposed_sum(float (&x)[SUMS]) {
        int step = 16;
#pragma unroll
        for (int n = SUMS; n > 1; n /= 2, step /= 2) {
            const bool upper = lane() & step;
#pragma unroll
            for (int i = 0; i < n / 2; ++i) {
                float keep = upper ? x[i + n / 2] : x[i];
                float send = upper ? x[i] : x[i + n / 2];
                x[i] = keep + __shfl_xor_sync(~0u, send, step);
            }
        }
#pragma unroll
        for (; step > 0; step /= 2) x[0] += __shfl_xor_sync(~0u, x[0], step);
        return x[0];
    }

    // A part of dQ to the buffer of this warpgroup, with its warps' sums of dS; `count` parts were published before.
    DEVICE void publish_dq(const float (&dq)[32], const float (&row_sums)[4], float sum, u32 count,
                           bool mirrored) {
        mbarrier_wait(&sh.dq_empty[warpgroup], count % 2 ^ 1);
        float4* dst = reinterpret_cast<float4*>(sh.dq[warpgroup]) + threadIdx.x % 128;
#pragma unroll
        for (int g = 0; g < 8; ++g) {
            dst[g * 128] = make_float4(dq[4 * g], dq[4 * g + 1], dq[4 * g + 2], dq[4 * g + 3]);
        }
        const int warp = int(threadIdx.x) / 32 % 4, lanes = 32 / SUMS;
        if (TWO_SIDES) {
            float* out = sh.dq[warpgroup] + DQ_TILE + warp * 16 + lane() / 4;
            if (lane() % 4 == 0) out[0] = mirrored ? -row_sums[0] : row_sums[0];
            if (lane() % 4 == 0) out[8] = mirrored ? -row_sums[2] : row_sums[2];
        } else if (lane() % lanes == 0) sh.dq[warpgroup][DQ_TILE + warp * SUMS + lane() / lanes] = sum;
        fence_async_proxy();
        __syncwarp();
        release(&sh.dq_full[warpgroup]);
    }

    DEVICE void store(const BackwardTile& t, const float (&x)[HEAD_DIM / 2], u16* out, float factor) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int key = t.n * BLOCK_N + row() + 8 * r;
            if (key >= t.k_len) continue;
            u16* out_row = out + (size_t(t.k_start + key) * p.kv_heads + t.kv_head) * p.head_dim;
#pragma unroll
            for (int g = 0; g < HEAD_DIM / 8; ++g) {
                if (8 * g < p.head_dim) {
                    *reinterpret_cast<u32*>(out_row + 8 * g + 2 * (lane() % 4)) =
                        pack_bf16(x[4 * g + 2 * r] * factor, x[4 * g + 2 * r + 1] * factor);
                }
            }
        }
    }

    DEVICE void store_column_sums(const BackwardTile& t, int head, float2 sums) {
        float* out = p.column_sums + size_t(head) * p.gate_stride + t.c_base;
        sums.x = quad_sum(sums.x);
        sums.y = quad_sum(sums.y);
        int key = t.n * BLOCK_N + row();
        if (lane() % 4 == 0) {
            if (key < t.k_len) out[key] = sums.x;
            if (key + 8 < t.k_len) out[key + 8] = sums.y;
        }
    }
};
