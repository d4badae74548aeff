// Main loop of a consumer warpgroup over half blocks of keys: while the exponentials of one half run, the tensor cores
// compute P V of the other half and Q K^T of its successor. Queries stay in registers: a wgmma of 64 columns with both
// operands in shared memory is bound by shared-memory bandwidth (about 57 instead of 32 cycles).
//
// Unmasked halves skip the search for their maximum (see `exponentials`).
//
// Lost: full blocks with the maximum computed every time (426 against 500 TFLOP/s at head dim 64).
//
// Included by attention_fwd_sm90.cu.
constexpr int HALF = BLOCK_N / 2;

struct Consumer : ConsumerBase {
    // Register state of a tile's rows.
    struct Rows {
        u32 q[HEAD_DIM / 4];
        float s[2][HALF / 2];
        u32 probabilities[2][HALF / 4];
        float o[HEAD_DIM / 2];
        SoftmaxState state;
        float2 c0, c1;
        int unmasked_begin, unmasked_end;
    };

    // wgmma descriptor of half INDEX of a block, by an offset from that of the first stage.
    template <int INDEX>
    static DEVICE u64 half_descriptor(u64 first_stage, u32 index) {
        return descriptor_advance(first_stage, index % STAGES * (SLABS * KV_SLAB) +
                                                   INDEX * HALF * SLAB_ROW_BYTES);
    }

    // S = Q K^T for half of the block that `index` counts; committed, not waited for.
    template <int INDEX>
    DEVICE void multiply_keys(Rows& r, u32 index) {
        if (INDEX == 0) mbarrier_wait(&sh.k_full[index % STAGES], index / STAGES % 2);
        wgmma_fence();
        gemm_rt<HALF, HEAD_DIM, KV_SLAB>(
            r.s[INDEX], r.q, half_descriptor<INDEX>(matrix_descriptor(sh.k, 0), index));
        wgmma_commit();
    }
    // O += P V for half of the block that `index` counts; committed, not waited for.
    template <int INDEX>
    DEVICE void multiply_values(Rows& r, u32 index) {
        if (INDEX == 0) mbarrier_wait(&sh.v_full[index % STAGES], index / STAGES % 2);
        wgmma_fence();
        gemm_rn<HEAD_DIM, HALF>(r.o, r.probabilities[INDEX],
                                half_descriptor<INDEX>(matrix_descriptor(sh.v, KV_SLAB), index), true);
        wgmma_commit();
    }

    // Softmax of half INDEX of block n: scores to probabilities.
    template <int INDEX>
    DEVICE void softmax(Rows& r, const ForwardTile& t, int n, float frame0, float frame1) {
        const int half_index = 2 * n + INDEX, first = half_index * HALF;
        const float* bias = sh.bias[block % BIAS_STAGES] + INDEX * HALF;
        const int sign = GATES ? gate_sign(t, first, HALF) : 1;
        const bool masked =
            half_index >= r.unmasked_end || (WINDOW && half_index < r.unmasked_begin) || sign == 0;
        if (!masked && exponentials<HALF, GATES, MASK>(r.s[INDEX], r.probabilities[INDEX], r.state, bias,
                                                       frame0, frame1, sign, p.scale)) {
            return;
        }
        const int position = t.position + row();
        Visible v0 = visible_columns<MASK, WINDOW>(position, t.k_len, first, p.window);
        Visible v1 = visible_columns<MASK, WINDOW>(position + 8, t.k_len, first, p.window);
        float rescale[2];
        if (softmax_block<HALF, GATES, true, MASK>(r.s[INDEX], r.state, rescale, bias, frame0, frame1,
                                                   sign, p.scale, v0, v1)) {
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 2; ++i) r.o[i] *= rescale[i / 2 % 2];
        }
        pack_fragments<HALF>(r.s[INDEX], r.probabilities[INDEX]);
    }

    // Block n. On entry the scores of its first half and the probabilities of the previous block's second half are
    // in registers; on exit the same holds for the next block.
    template <bool FIRST, bool LAST>
    DEVICE void both_halves(Rows& r, const ForwardTile& t, int n) {
        if (!FIRST) multiply_values<1>(r, block - 1);
        multiply_keys<1>(r, block);
        float frame0 = 0.f, frame1 = 0.f;
        if (GATES) {
            mbarrier_wait(&sh.bias_full[block % BIAS_STAGES], block / BIAS_STAGES % 2);
            const float2 reference = sh.reference[block % BIAS_STAGES];
            frame0 = gate_difference(r.c0, reference);
            frame1 = gate_difference(r.c1, reference);
        }
        softmax<0>(r, t, n, frame0, frame1);
        multiply_values<0>(r, block);
        if (!LAST) multiply_keys<0>(r, block + 1);
        wgmma_wait<LAST ? 1 : 2>();  // all but the products of the last two lines
        release(&sh.k_empty[block % STAGES]);
        if (!FIRST) release(&sh.v_empty[(block - 1) % STAGES]);
        softmax<1>(r, t, n, frame0, frame1);
        if (GATES) {
            __syncwarp();
            release(&sh.bias_empty[block % BIAS_STAGES]);
        }
        wgmma_wait<0>();
        ++block;
    }

    // Releases blocks that the causal mask hides from these rows, down to `last`; other warpgroups use them.
    DEVICE void skip_blocks(int& n, int last) {
        for (; n > last; --n, ++block) {
            mbarrier_wait(&sh.k_full[block % STAGES], block / STAGES % 2);
            mbarrier_wait(&sh.v_full[block % STAGES], block / STAGES % 2);
            if (GATES) mbarrier_wait(&sh.bias_full[block % BIAS_STAGES], block / BIAS_STAGES % 2);
            __syncwarp();
            release(&sh.k_empty[block % STAGES]);
            release(&sh.v_empty[block % STAGES]);
            if (GATES) release(&sh.bias_empty[block % BIAS_STAGES]);
        }
    }

    DEVICE void tile(const ForwardTile& t, u32 q_phase) {
        Rows r;
        load_prefixes(t, r.c0, r.c1);
        find_unmasked(t, HALF, r.unmasked_begin, r.unmasked_end);
        const int n_begin = t.n_begin;
        int n = t.n_end - 1;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) r.o[i] = 0.f;

        mbarrier_wait(&sh.q_full, q_phase);
        load_left<HEAD_DIM, Q_SLAB>(r.q, queries());
        __syncwarp();
        release(&sh.q_empty);
        if (MASK == MASK_CAUSAL) {
            const int last_row = min(t.position + 64 * warpgroup + 63, t.k_len - 1);
            skip_blocks(n, max(last_row / BLOCK_N, n_begin));
        }
        multiply_keys<0>(r, block);
        wgmma_wait<0>();
        if (n == n_begin) {
            both_halves<true, true>(r, t, n);
        } else {
            both_halves<true, false>(r, t, n);
            for (--n; n > n_begin; --n) both_halves<false, false>(r, t, n);
            both_halves<false, true>(r, t, n);
        }
        multiply_values<1>(r, block - 1);
        wgmma_wait<0>();
        release(&sh.v_empty[(block - 1) % STAGES]);
        store(t, r.o, r.state);
    }
};
