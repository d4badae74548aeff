// Main loops of the two consumer warpgroups of the backward for head dims 192 and 256, which share 64 keys.
//
// The accumulators of dK and dV take 96 (128) registers each, so each warpgroup has one of them and computes the scores
// that it needs: ScoreConsumer S^T, P^T and dV += P^T dO, GradientConsumer dP^T, dS^T and dK += dS^T Q. P^T is passed
// on in f32, in the order of accumulators, by shared memory; dS^T, which dQ = dS K needs from both, in bf16.
// The columns of dQ are divided over both, 64 at a time.
//
// Scores are up to a step ahead of gradients, so that the tensor cores have work of one warpgroup during the arithmetic
// of the other. dQ is that of the previous step: neither warpgroup waits for its dS.
//
// Included by attention_bwd_sm90.cu.
template <int FIRST_PART, int PARTS>
struct WideConsumer : ConsumerBase {
    static_assert(PARTS == 1 || PARTS == 2);
    u32 published = 0;

    // Part PART of this warpgroup's columns of dQ of step `index`; committed, not waited for.
    template <int PART>
    DEVICE void multiply_dq(float (&dq)[32], u32 index) {
        if (PART == 0) mbarrier_wait(&sh.ds_full[index % DS_STAGES], index / DS_STAGES % 2);
        wgmma_fence();
        gemm_tn<64, BLOCK_N>(dq, matrix_descriptor(sh.ds[index % DS_STAGES], 0),
                             matrix_descriptor(sh.k + (FIRST_PART + PART) * KV_SLAB, 0));
        wgmma_commit();
    }

    // `sum`: sums of dS, stored once, with the last part.
    template <int PART>
    DEVICE void publish(const float (&dq)[32], float sum) {
        const float row_sums[4] = {};
        publish_dq(dq, row_sums, FIRST_PART + PART == DQ_PARTS - 1 ? sum : 0.f, published++, false);
    }

    // dQ of the last step of a head.
    DEVICE void finish_dq(float sum) {
        float dq[32];
        multiply_dq<0>(dq, step - 1);
        wgmma_wait<0>();
        publish<0>(dq, sum);
        if constexpr (PARTS == 2) {
            multiply_dq<1>(dq, step - 1);
            wgmma_wait<0>();
            publish<1>(dq, sum);
        }
        __syncwarp();
        release(&sh.ds_empty[(step - 1) % DS_STAGES]);
    }

    // Biases of this thread's two keys, relative to the tile's last key.
    DEVICE float2 key_biases(const BackwardTile& t, int head) const {
        if (!GATES) return make_float2(0.f, 0.f);
        const float2* gates = p.gates + size_t(head) * p.gate_stride + t.c_base;
        const int key = t.n * BLOCK_N + row(), last = t.k_len - 1;
        const float2 reference = gates[min(t.n * BLOCK_N + BLOCK_N - 1, last)];
        return make_float2(gate_difference(gates[min(key, last)], reference),
                           gate_difference(gates[min(key + 8, last)], reference));
    }

    // Takes tiles until there are none: f(tile) for each.
    template <class F>
    DEVICE void for_each_tile(F f) {
        for (u32 count = 0;; ++count) {
            const int slot = count % 2;
            mbarrier_wait(&sh.tile_full[slot], count / 2 % 2);
            if (sh.tile[slot].kv_head < 0) return;
            mbarrier_wait(&sh.kv_full, count % 2);
            f(sh.tile[slot]);
            __syncwarp();
            release(&sh.tile_empty[slot]);
        }
    }
};

// S^T, P^T and dV.
struct ScoreConsumer : WideConsumer<0, FIRST_DQ_PARTS> {
    // S^T of step `index`; committed, not waited for.
    DEVICE void multiply_scores(float (&s)[BLOCK_M / 2], u32 index) {
        const int stage = index % STAGES;
        mbarrier_wait(&sh.q_full[stage], index / STAGES % 2);
        wgmma_fence();
        gemm_nt<BLOCK_M, HEAD_DIM, KV_SLAB, Q_SLAB>(s, descriptor_here(matrix_descriptor(sh.k, 0)),
                                                    matrix_descriptor(sh.q[stage], 0));
        wgmma_commit();
    }

    // P^T of this step in place of S^T.
    DEVICE void exponentials(float (&s)[BLOCK_M / 2], const BackwardTile& t, int m, float2 w) {
        const int stage = step % STAGES, position = t.offset + m * BLOCK_M, key0 = t.n * BLOCK_N;
        mbarrier_wait(&sh.rows_full[stage], step / STAGES % 2);
        if (key0 + BLOCK_N - 1 > position || (WINDOW && position + BLOCK_M - 1 - key0 >= p.window)) {
            probabilities<true, 0>(s, stage, w.x, w.y, key0 + row(), position, t.k_len, false);
        } else {
            probabilities<false, 0>(s, stage, w.x, w.y, 0, 0, 0, false);
        }
        __syncwarp();
        release(&sh.rows_empty[stage]);
    }

    // One block of queries. S^T is in registers on entry, that of the next block on exit. dQ is that of the block before.
    template <bool FIRST, bool LAST>
    DEVICE void block(const BackwardTile& t, int m, float2 w, float (&s)[BLOCK_M / 2], float (&dv)[HEAD_DIM / 2]) {
        const int do_stage = step % DO_STAGES;
        float dq[32];
        u32 pf[BLOCK_M / 4];
        if (!FIRST) multiply_dq<0>(dq, step - 1);
        exponentials(s, t, m, w);
        mbarrier_wait(&sh.p_empty, step % 2 ^ 1);
        float4* shared_p = reinterpret_cast<float4*>(sh.probabilities) + threadIdx.x % 128;
#pragma unroll
        for (int g = 0; g < BLOCK_M / 8; ++g) {
            shared_p[g * 128] = make_float4(s[4 * g], s[4 * g + 1], s[4 * g + 2], s[4 * g + 3]);
        }
        __syncwarp();
        release(&sh.p_full);
        if (!FIRST) {
            wgmma_wait<0>();
            publish<0>(dq, 0.f);
        }
#pragma unroll
        for (int i = 0; i < BLOCK_M / 4; ++i) pf[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
        constexpr bool SECOND = !FIRST && FIRST_DQ_PARTS == 2;
        mbarrier_wait(&sh.do_full[do_stage], step / DO_STAGES % 2);
        wgmma_fence();
        gemm_rn<HEAD_DIM, BLOCK_M>(dv, pf, matrix_descriptor(sh.d_out[do_stage], Q_SLAB), true);
        wgmma_commit();
        if (SECOND) multiply_dq<FIRST_DQ_PARTS - 1>(dq, step - 1);
        wgmma_wait<SECOND>();
        release(&sh.do_empty[do_stage]);
        // No registers are left for S^T before P^T and dQ are read.
        wgmma_wait<0>();
        if (!FIRST) release(&sh.ds_empty[(step - 1) % DS_STAGES]);
        if (!LAST) multiply_scores(s, step + 1);
        if (SECOND) publish<FIRST_DQ_PARTS - 1>(dq, 0.f);
        wgmma_wait<0>();
        if (!LAST) release(&sh.q_empty[(step + 1) % STAGES]);
        ++step;
    }

    DEVICE void tile(const BackwardTile& t) {
        float dv[HEAD_DIM / 2], s[BLOCK_M / 2];
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) dv[i] = 0.f;
        const int group = p.heads / p.kv_heads;
        for (int head = t.kv_head * group; head < (t.kv_head + 1) * group; ++head) {
            const float2 w = key_biases(t, head);
            const int2 range = query_range(p, t, head, false);
            const int count = range.y - range.x, step_m = t.reversed ? -1 : 1;
            int m = t.reversed ? range.y - 1 : range.x;
            if (count <= 0) continue;
            multiply_scores(s, step);
            wgmma_wait<0>();
            release(&sh.q_empty[step % STAGES]);
            if (count == 1) {
                block<true, true>(t, m, w, s, dv);
            } else {
                block<true, false>(t, m, w, s, dv);
                m += step_m;
                for (int i = 2; i < count; ++i, m += step_m) block<false, false>(t, m, w, s, dv);
                block<false, true>(t, m, w, s, dv);
            }
            finish_dq(0.f);
        }
        release(&sh.kv_empty);
        store(t, dv, p.dv, 1.f);
    }

    DEVICE void run() {
        for_each_tile([&](const BackwardTile& t) { tile(t); });
    }
};

// dP^T, dS^T and dK.
struct GradientConsumer : WideConsumer<FIRST_DQ_PARTS, DQ_PARTS - FIRST_DQ_PARTS> {
    static constexpr int OWN_PARTS = DQ_PARTS - FIRST_DQ_PARTS;

    // dP^T of step `index`; committed, not waited for.
    DEVICE void multiply_values(float (&dp)[BLOCK_M / 2], u32 index) {
        const int stage = index % DO_STAGES;
        mbarrier_wait(&sh.do_full[stage], index / DO_STAGES % 2);
        wgmma_fence();
        gemm_nt<BLOCK_M, HEAD_DIM, KV_SLAB, Q_SLAB>(dp, descriptor_here(matrix_descriptor(sh.v, 0)),
                                                    descriptor_here(matrix_descriptor(sh.d_out[stage], 0)));
        wgmma_commit();
    }

    // dS = P (dP - delta), packed as left operand. Returns its sums over the queries, and in `sums` this thread's sums
    // over its keys and each eighth of the queries.
    DEVICE float2 gradient(const float (&dp)[BLOCK_M / 2], u32 (&df)[BLOCK_M / 4], float (&sums)[SUMS]) {
        const int stage = step % STAGES, column0 = 2 * (lane() % 4);
        mbarrier_wait(&sh.rows_full[stage], step / STAGES % 2);
        mbarrier_wait(&sh.p_full, step % 2);
        const float4* shared_p = reinterpret_cast<const float4*>(sh.probabilities) + threadIdx.x % 128;
        float2 total = make_float2(0.f, 0.f);
#pragma unroll
        for (int g = 0; g < BLOCK_M / 8; ++g) {
            const float2 delta = *reinterpret_cast<const float2*>(&sh.row_delta[stage][8 * g + column0]);
            const float4 weight = shared_p[g * 128];
            const float d0 = weight.x * (dp[4 * g] - delta.x), d1 = weight.y * (dp[4 * g + 1] - delta.y);
            const float d2 = weight.z * (dp[4 * g + 2] - delta.x), d3 = weight.w * (dp[4 * g + 3] - delta.y);
            df[2 * g] = pack_bf16(d0, d1);
            df[2 * g + 1] = pack_bf16(d2, d3);
            total.x += d0 + d1;
            total.y += d2 + d3;
            static_assert(GROUPS_PER_SUM == 1);
            sums[g] = (d0 + d1) + (d2 + d3);
        }
        __syncwarp();
        release(&sh.p_empty);
        release(&sh.rows_empty[stage]);
        return total;
    }

    // One block of queries. dP^T is in registers on entry, that of the next block on exit; dQ and `tile_sum` are those
    // of the block before. `sums` are the sums of dS over the queries.
    template <bool FIRST, bool LAST>
    DEVICE void block(float (&dp)[BLOCK_M / 2], float (&dk)[HEAD_DIM / 2], float2& sums, float& tile_sum) {
        const int stage = step % STAGES, slot = step % DS_STAGES;
        float dq[32], part[SUMS];
        u32 df[BLOCK_M / 4];
        if (!FIRST) multiply_dq<0>(dq, step - 1);
        const float2 column_sums = gradient(dp, df, part);
        sums.x += column_sums.x;
        sums.y += column_sums.y;
        mbarrier_wait(&sh.ds_empty[slot], step / DS_STAGES % 2 ^ 1);
        store_ds(df, sh.ds[slot]);
        fence_async_proxy();
        __syncwarp();
        release(&sh.ds_full[slot]);
        const float next_sum = transposed_sum(part);
        if (!FIRST) {
            wgmma_wait<0>();
            publish<0>(dq, tile_sum);
        }
        mbarrier_wait(&sh.q_full[stage], step / STAGES % 2);
        wgmma_fence();
        gemm_rn<HEAD_DIM, BLOCK_M>(dk, df, matrix_descriptor(sh.q[stage], Q_SLAB), true);
        wgmma_commit();
        constexpr bool SECOND = !FIRST && OWN_PARTS == 2;
        if (SECOND) multiply_dq<OWN_PARTS - 1>(dq, step - 1);
        wgmma_wait<SECOND>();
        release(&sh.q_empty[stage]);
        wgmma_wait<0>();
        if (!FIRST) release(&sh.ds_empty[(step - 1) % DS_STAGES]);
        if (!LAST) multiply_values(dp, step + 1);
        if (SECOND) publish<OWN_PARTS - 1>(dq, tile_sum);
        wgmma_wait<0>();
        if (!LAST) release(&sh.do_empty[(step + 1) % DO_STAGES]);
        tile_sum = next_sum;
        ++step;
    }

    DEVICE void tile(const BackwardTile& t) {
        float dk[HEAD_DIM / 2], dp[BLOCK_M / 2];
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) dk[i] = 0.f;
        const int group = p.heads / p.kv_heads;
        for (int head = t.kv_head * group; head < (t.kv_head + 1) * group; ++head) {
            const int2 range = query_range(p, t, head, false);
            const int count = range.y - range.x;
            float2 sums = make_float2(0.f, 0.f);
            float tile_sum = 0.f;
            if (count > 0) {
                multiply_values(dp, step);
                wgmma_wait<0>();
                release(&sh.do_empty[step % DO_STAGES]);
                if (count == 1) {
                    block<true, true>(dp, dk, sums, tile_sum);
                } else {
                    block<true, false>(dp, dk, sums, tile_sum);
                    for (int i = 2; i < count; ++i) block<false, false>(dp, dk, sums, tile_sum);
                    block<false, true>(dp, dk, sums, tile_sum);
                }
                finish_dq(tile_sum);
            }
            if (GATES) store_column_sums(t, head, sums);
        }
        release(&sh.kv_empty);
        store(t, dk, p.dk, p.scale);
    }

    DEVICE void run() {
        for_each_tile([&](const BackwardTile& t) { tile(t); });
    }
};
