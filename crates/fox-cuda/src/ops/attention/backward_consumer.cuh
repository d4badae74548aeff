// Main loop and epilogue of a consumer warpgroup of the backward, which owns 64 keys.
//
// Included by attention_bwd_sm90.cu.
struct Consumer {
    Shared& sh;
    const BackwardParams& p;
    u32 step = 0;
    int warpgroup;

    static DEVICE int lane() { return threadIdx.x % 32; }
    // Key of the tile that this thread's first accumulator row is.
    static DEVICE int row() { return int(threadIdx.x) / 32 * 16 - 64 + lane() / 4; }
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

    // This warpgroup's half of dQ of step `index`, from the dS of both warpgroups; committed, not waited for. With two
    // sides also the sums of dS per query, every column of `sums` the same.
    DEVICE void multiply_dq(float (&dq)[32], float (&sums)[4], u32 index) {
        const u8* ds = sh.ds[index % 3] + (DS_SLABS == 2 ? warpgroup * KV_SLAB : 0);
        const u64 keys = matrix_descriptor(sh.k + (SLABS == 2 ? warpgroup * KV_SLAB : 0), 0);
        if (TWO_SIDES) {
            constexpr u32 ONES = 0x3f803f80;
            sums[0] = sums[1] = sums[2] = sums[3] = 0.f;
            // The sums take four registers, and there are none left beside two accumulators of 128 columns.
            constexpr int RING = GATES && SLABS == 2 ? 2 : FRAGMENTS<64>;
            gemm_stream_tn<64, BLOCK_N, RING>(dq, ds, keys, [&](const u32* fragment) {
                if (GATES) mma(sums, fragment, ONES, ONES);
            });
        } else {
            wgmma_fence();
            gemm_tn<64, BLOCK_N>(dq, matrix_descriptor(ds, 0), keys);
            wgmma_commit();
        }
    }

    DEVICE void publish_dq(const float (&dq)[32], const float (&row_sums)[4], float sum, u32 index,
                           bool mirrored) {
        mbarrier_wait(&sh.dq_empty[warpgroup], index % 2 ^ 1);
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

    DEVICE void wait_ds(u32 index) { mbarrier_wait(&sh.ds_full[index % 3], index / 3 % 2); }

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

    // s = S^T of step `index`; committed, not waited for.
    DEVICE void multiply_scores(float (&s)[BLOCK_M / 2], u32 index) {
        const int stage = index % STAGES;
        mbarrier_wait(&sh.q_full[stage], index / STAGES % 2);
        const u8* keys = sh.k + warpgroup * 64 * SLAB_ROW_BYTES;
        const u64 queries = matrix_descriptor(sh.q[stage], 0);
        if (TWO_SIDES) {
            gemm_stream_nt<BLOCK_M, HEAD_DIM, KV_SLAB, Q_SLAB>(s, keys, queries);
        } else {
            wgmma_fence();
            gemm_nt<BLOCK_M, HEAD_DIM, KV_SLAB, Q_SLAB>(s, matrix_descriptor(keys, 0), queries);
            wgmma_commit();
        }
    }

    // Part PART of dP^T = V dO^T of a stage; committed, not waited for.
    template <int PART>
    DEVICE void multiply_values(float (&dp)[BLOCK_M / 2], int stage) {
        const u8* values = sh.v + warpgroup * 64 * SLAB_ROW_BYTES;
        const u64 d_out = matrix_descriptor(sh.d_out[stage], 0);
        if (TWO_SIDES) {
            u32 batch[4 * DP_STEPS];
            load_left_from<16 * DP_STEPS, KV_SLAB>(batch, values, DP_STEPS * PART);
            wgmma_fence();
#pragma unroll
            for (int k = DP_STEPS * PART; k < DP_STEPS * (PART + 1); ++k) {
                Wgmma<BLOCK_M>::template rs<K_MAJOR>(
                    dp, batch + k % DP_STEPS * 4, descriptor_advance(d_out, k / 4 * Q_SLAB + k % 4 * 32), k > 0);
            }
        } else {
            wgmma_fence();
            gemm_nt<BLOCK_M, HEAD_DIM, KV_SLAB, Q_SLAB>(dp, matrix_descriptor(values, 0), d_out);
        }
        wgmma_commit();
    }

    // dP^T of this step, and the exponentials beside its parts.
    template <int PART = 0>
    DEVICE void multiply_values_beside(float (&dp)[BLOCK_M / 2], float (&s)[BLOCK_M / 2], int stage,
                                       float w0, float w1, const BackwardTile& t, int position,
                                       bool mirrored) {
        multiply_values<PART>(dp, stage);
        if (PART == 0) mbarrier_wait(&sh.rows_full[stage], step / STAGES % 2);
        const int key0 = t.n * BLOCK_N + warpgroup * 64;
        const bool masked =
            TWO_SIDES && mirrored
                ? key0 < position + BLOCK_M || key0 + 63 >= t.k_len || (WINDOW && key0 + 63 - position >= p.window)
                : key0 + 63 > position || (WINDOW && position + BLOCK_M - 1 - key0 >= p.window);
        if (masked) {
            probabilities<true, PART>(s, stage, w0, w1, t.n * BLOCK_N + row(), position, t.k_len, mirrored);
        } else {
            probabilities<false, PART>(s, stage, w0, w1, 0, 0, 0, mirrored);
        }
        wgmma_wait<0>();
        if constexpr (PART + 1 < DP_PARTS) {
            multiply_values_beside<PART + 1>(dp, s, stage, w0, w1, t, position, mirrored);
        }
    }

    // One block of queries. S^T is in registers on entry, that of the next block on exit. dQ is that of the previous
    // block, whose dS the other warpgroup has written meanwhile. All products but dP are independent of this step's
    // arithmetic and are issued back to back. `sums` are the sums of dS over the queries, `tile_sum` those stored
    // with dQ.
    template <bool FIRST, bool LAST>
    DEVICE void block(const BackwardTile& t, int m, bool mirrored, float w0, float w1, float (&s)[BLOCK_M / 2],
                      float (&dk)[HEAD_DIM / 2], float (&dv)[HEAD_DIM / 2], float2& sums,
                      float& tile_sum) {
        const int stage = step % STAGES;
        float dp[BLOCK_M / 2], dq[32], part[SUMS], row_sums[4];
        u32 pf[BLOCK_M / 4], df[BLOCK_M / 4];

        mbarrier_wait(&sh.do_full[stage], step / STAGES % 2);
        multiply_values_beside(dp, s, stage, w0, w1, t, t.offset + m * BLOCK_M, mirrored);
        float2 column_sums = gradient(s, dp, pf, df, part, stage);
        __syncwarp();
        release(&sh.rows_empty[stage]);

        // The dS buffer of three steps ago was last read by dQ two steps ago, before the other warpgroup wrote dS of
        // the last step: waiting for the latter covers both.
        if (!FIRST) wait_ds(step - 1);
        store_ds(df, sh.ds[step % 3]);
        fence_async_proxy();
        __syncwarp();
        release(&sh.ds_full[step % 3]);
        barrier_sync(TURN_BARRIER + warpgroup, 256);
        wgmma_fence();
        gemm_rn<HEAD_DIM, BLOCK_M>(dv, pf, matrix_descriptor(sh.d_out[stage], Q_SLAB), true);
        gemm_rn<HEAD_DIM, BLOCK_M>(dk, df, matrix_descriptor(sh.q[stage], Q_SLAB), true);
        wgmma_commit();
        if (!LAST) multiply_scores(s, step + 1);
        // dV and dK are finished: their operands' registers are free for dQ. With two sides there are none for the
        // fragments of S, too.
        wgmma_wait<LAST || TWO_SIDES ? 0 : 1>();
        release(&sh.do_empty[stage]);
        release(&sh.q_empty[stage]);
        if (!FIRST) multiply_dq(dq, row_sums, step - 1);
        wgmma_wait<0>();
        barrier_arrive(TURN_BARRIER + (warpgroup ^ 1), 256);
        if (!FIRST) publish_dq(dq, row_sums, tile_sum, step - 1, mirrored);
        if (!TWO_SIDES) tile_sum = transposed_sum(part);
        sums.x += column_sums.x;
        sums.y += column_sums.y;
        ++step;
    }

    // dQ of the last step on a side of a tile.
    DEVICE void finish_dq(float tile_sum, bool mirrored) {
        float dq[32], row_sums[4];
        wait_ds(step - 1);
        multiply_dq(dq, row_sums, step - 1);
        wgmma_wait<0>();
        publish_dq(dq, row_sums, tile_sum, step - 1, mirrored);
    }

    DEVICE void tile(const BackwardTile& t) {
        float dk[HEAD_DIM / 2], dv[HEAD_DIM / 2];
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) dk[i] = dv[i] = 0.f;
        const int group = p.heads / p.kv_heads;
        for (int head = t.kv_head * group; head < (t.kv_head + 1) * group; ++head) {
            float w0 = 0.f, w1 = 0.f;
            if (GATES) {
                const float2* gates = p.gates + size_t(head) * p.gate_stride + t.c_base;
                const int key = t.n * BLOCK_N + row(), last = t.k_len - 1;
                float2 reference = gates[min(t.n * BLOCK_N + BLOCK_N - 1, last)];
                w0 = gate_difference(gates[min(key, last)], reference);
                w1 = gate_difference(gates[min(key + 8, last)], reference);
            }
            float2 sums = make_float2(0.f, 0.f);
#pragma unroll 1
            for (int side = TWO_SIDES; side >= 0; --side) {
                const bool mirrored = side;
                if (TWO_SIDES) {
                    w0 = -w0, w1 = -w1;
                    sums = make_float2(-sums.x, -sums.y);
                }
                const int2 range = query_range(p, t, head, mirrored);
                float s[BLOCK_M / 2], tile_sum = 0.f;
                const int count = range.y - range.x, step_m = t.reversed ? -1 : 1;
                int m = t.reversed ? range.y - 1 : range.x;
                if (count > 0) {
                    multiply_scores(s, step);
                    wgmma_wait<0>();
                    if (count == 1) {
                        block<true, true>(t, m, mirrored, w0, w1, s, dk, dv, sums, tile_sum);
                    } else {
                        block<true, false>(t, m, mirrored, w0, w1, s, dk, dv, sums, tile_sum);
                        m += step_m;
                        for (int i = 2; i < count; ++i, m += step_m) {
                            block<false, false>(t, m, mirrored, w0, w1, s, dk, dv, sums, tile_sum);
                        }
                        block<false, true>(t, m, mirrored, w0, w1, s, dk, dv, sums, tile_sum);
                    }
                    finish_dq(tile_sum, mirrored);
                }
            }
            if (GATES) store_column_sums(t, head, sums);
        }
        release(&sh.kv_empty);
        store(t, dk, p.dk, p.scale);
        store(t, dv, p.dv, 1.f);
    }

    DEVICE void run() {
        if (warpgroup == 1) barrier_arrive(TURN_BARRIER, 256);
        for (u32 count = 0;; ++count) {
            const int slot = count % 2;
            mbarrier_wait(&sh.tile_full[slot], count / 2 % 2);
            if (sh.tile[slot].kv_head < 0) return;
            mbarrier_wait(&sh.kv_full, count % 2);
            tile(sh.tile[slot]);
            __syncwarp();
            release(&sh.tile_empty[slot]);
        }
    }
};
