// Main loop of a consumer warpgroup over full blocks of keys: Q K^T of the next block and P V of the last one are in
// flight during the softmax. For head dims 192 and 256, whose output accumulators leave no registers for Q.
//
// Included by attention_fwd_sm90.cu.
struct Consumer : ConsumerBase {
    // s = Q K^T for the block that `index` counts; committed, not waited for.
    DEVICE void multiply_keys(float (&s)[BLOCK_N / 2], u32 index) {
        mbarrier_wait(&sh.k_full[index % STAGES], index / STAGES % 2);
        wgmma_fence();
        gemm_nt<BLOCK_N, HEAD_DIM, Q_SLAB, KV_SLAB>(
            s, matrix_descriptor(queries(), 0),
            matrix_descriptor(sh.k[index % STAGES], 0));
        wgmma_commit();
    }
    // o += P V.
    DEVICE void multiply_values(float (&o)[HEAD_DIM / 2], const u32* probabilities, u32 index) {
        mbarrier_wait(&sh.v_full[index % STAGES], index / STAGES % 2);
        wgmma_fence();
        gemm_rn<HEAD_DIM, BLOCK_N>(o, probabilities,
                                   matrix_descriptor(sh.v[index % STAGES], KV_SLAB), true);
        wgmma_commit();
    }

    // Softmax of block n: scores to probabilities.
    DEVICE bool softmax(float (&s)[BLOCK_N / 2], SoftmaxState& state, float (&rescale)[2],
                        const ForwardTile& t, u32 index, int n, bool masked, float2 c0, float2 c1) {
        const int stage = index % BIAS_STAGES;
        const int sign = gate_sign(t, n * BLOCK_N, BLOCK_N);
        float frame0 = 0.f, frame1 = 0.f;
        if (GATES) {
            mbarrier_wait(&sh.bias_full[stage], index / BIAS_STAGES % 2);
            float2 reference = sh.reference[stage];
            frame0 = gate_difference(c0, reference);
            frame1 = gate_difference(c1, reference);
        }
        bool raised;
        if (masked) {
            int position = t.position + row(), first = n * BLOCK_N;
            Visible v0 = visible_columns<MASK, WINDOW>(position, t.k_len, first, p.window);
            Visible v1 = visible_columns<MASK, WINDOW>(position + 8, t.k_len, first, p.window);
            raised = softmax_block<BLOCK_N, GATES, true, MASK>(
                s, state, rescale, sh.bias[stage], frame0, frame1, sign, p.scale, v0, v1);
        } else {
            raised = softmax_block<BLOCK_N, GATES, false, MASK>(
                s, state, rescale, sh.bias[stage], frame0, frame1, sign, p.scale, {}, {});
        }
        if (GATES) {
            __syncwarp();
            release(&sh.bias_empty[stage]);
        }
        return raised;
    }

    DEVICE void tile(const ForwardTile& t, u32 q_phase) {
        float2 c0, c1;
        load_prefixes(t, c0, c1);
        int unmasked_begin, unmasked_end;
        find_unmasked(t, BLOCK_N, unmasked_begin, unmasked_end);
        const int n_begin = t.n_begin;
        int n = t.n_end - 1;
        auto is_masked = [&](int n) { return n >= unmasked_end || (WINDOW && n < unmasked_begin); };

        float o[HEAD_DIM / 2], s[BLOCK_N / 2], rescale[2];
        u32 probabilities[BLOCK_N / 4];
        SoftmaxState state;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) o[i] = 0.f;

        mbarrier_wait(&sh.q_full, q_phase);
        multiply_keys(s, block);
        wgmma_wait<0>();
        release(&sh.k_empty[block % STAGES]);
        softmax(s, state, rescale, t, block, n, is_masked(n), c0, c1);
        pack_fragments<BLOCK_N>(s, probabilities);

        for (--n; n >= n_begin; --n) {
            multiply_keys(s, block + 1);
            multiply_values(o, probabilities, block);
            wgmma_wait<1>();
            release(&sh.k_empty[(block + 1) % STAGES]);
            bool raised = softmax(s, state, rescale, t, block + 1, n, is_masked(n), c0, c1);
            wgmma_wait<0>();
            release(&sh.v_empty[block % STAGES]);
            ++block;
            if (raised) {
#pragma unroll
                for (int i = 0; i < HEAD_DIM / 2; ++i) o[i] *= rescale[i / 2 % 2];
            }
            pack_fragments<BLOCK_N>(s, probabilities);
        }
        release(&sh.q_empty);
        multiply_values(o, probabilities, block);
        wgmma_wait<0>();
        release(&sh.v_empty[block % STAGES]);
        ++block;
        store(t, o, state);
    }
};
