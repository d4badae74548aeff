// Main loop of a consumer warpgroup of the backward, which owns 64 keys.
//
// Included by attention_bwd_sm90.cu.
struct Consumer : ConsumerBase {
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

    DEVICE void wait_ds(u32 index) { mbarrier_wait(&sh.ds_full[index % 3], index / 3 % 2); }

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
