//! Parameters of the kernels of decode steps.

use half::bf16;

use crate::ops::paged::Page;
use crate::params::{ConstPtr, Float2, Ptr, kernel_params};

/// Most matrices of a matmul: queries, keys, values, shifts of keys and values, forget gate, output gate.
pub(super) const MAX_MATRICES: usize = 7;

kernel_params! {
    /// A weight matrix of a matmul.
    #[derive(Default)]
    pub(super) struct DecodeMatrix {
        /// `[rows, width]`; with GLU `[2 rows, width]`. int8 if there are scales, see `int8.cuh`.
        pub(super) w: ConstPtr<bf16>,
        /// A scale per `INT8_BLOCK` weights of a row, or null.
        pub(super) scales: ConstPtr<f32>,
        /// `[rows]`, or null.
        pub(super) bias: ConstPtr<f32>,
        /// Outputs.
        pub(super) rows: usize,
        /// Their first column in a row of `y`.
        pub(super) start: usize,
        /// The first thread block that computes them.
        pub(super) first_block: usize,
    }
}

kernel_params! {
    #[derive(Default)]
    pub(super) struct DecodeMatmul {
        /// Blocked `[rows, width]`.
        pub(super) x: ConstPtr<bf16>,
        /// `[rows, stride]`, or `[K_SPLITS][rows, stride]` with SPLIT.
        pub(super) y: Ptr<f32>,
        /// With GLU, blocked `[rows, matrix rows]`.
        pub(super) inner: Ptr<bf16>,
        pub(super) matrices: [DecodeMatrix; MAX_MATRICES],
        pub(super) matrix_count: usize,
        pub(super) width: usize,
        pub(super) stride: usize,
        pub(super) act: i32,
    }
}

kernel_params! {
    /// A row of a step.
    pub(super) table struct DecodeToken align(16) {
        /// -1 for a padding row.
        pub(super) slot: i32,
        pub(super) token: i32,
        /// Tokens before this one.
        pub(super) position: usize,
        /// Row of the step before, whose sample is the token instead; -1 for none.
        pub(super) sampled_by: i32,
    }
}

kernel_params! {
    /// The pages of one layer of a slot.
    #[derive(Default)]
    pub(super) table struct DecodeTable {
        /// `[page][kv_heads]`.
        pub(super) pages: ConstPtr<Page>,
        /// Sums of the log gates at the ends of full pages `[page][heads]`.
        pub(super) ends: Ptr<f64>,
    }
}

kernel_params! {
    #[derive(Default)]
    pub(super) struct DecodeNorm {
        pub(super) rows: ConstPtr<DecodeToken>,
        /// `[V, width]` in the first layer, else null.
        pub(super) embeddings: ConstPtr<bf16>,
        /// Ids that the step before has sampled, -1 for none.
        pub(super) sampled: ConstPtr<i32>,
        /// `[rows, width]`.
        pub(super) h: Ptr<f32>,
        /// `[k_splits][rows, width]`.
        pub(super) delta: ConstPtr<f32>,
        /// `[width]`.
        pub(super) norm: ConstPtr<f32>,
        /// Blocked `[rows, width]`.
        pub(super) x: Ptr<bf16>,
        pub(super) width: usize,
        pub(super) k_splits: usize,
        pub(super) eps: f32,
    }
}

kernel_params! {
    pub(super) struct DecodeBlocked {
        /// `[rows, width]`.
        pub(super) from: ConstPtr<bf16>,
        /// The same, blocked.
        pub(super) to: Ptr<bf16>,
        pub(super) rows: usize,
        /// Rows of the matmul.
        pub(super) padded: usize,
        pub(super) width: usize,
    }
}

kernel_params! {
    #[derive(Default)]
    pub(super) struct DecodeHeads {
        pub(super) rows: ConstPtr<DecodeToken>,
        /// `[rows, stride]`.
        pub(super) raw: ConstPtr<f32>,
        /// `[rows, heads * d]`, multiplied by the softmax scale.
        pub(super) q: Ptr<f32>,
        /// `[slots][layers]`.
        pub(super) tables: ConstPtr<DecodeTable>,
        /// Raw rows of keys and values of the previous token `[slots][layers][2][kv_heads * d]`.
        pub(super) last: Ptr<bf16>,
        /// Sums of the log gates `[slots][layers][heads]`.
        pub(super) gate_sums: Ptr<f64>,
        /// `[heads * d]` or `[d]`, or null.
        pub(super) q_norm: ConstPtr<f32>,
        pub(super) k_norm: ConstPtr<f32>,
        /// `[heads]`, or null.
        pub(super) gate_bias: ConstPtr<f32>,
        /// `[positions][d / 2]`, or null.
        pub(super) rope: ConstPtr<Float2>,
        /// First columns in `raw` of queries, keys, values, shifts of both, and gates; -1 if absent.
        pub(super) start: [i32; 6],
        pub(super) stride: usize,
        pub(super) layers: usize,
        pub(super) layer: usize,
        pub(super) heads: usize,
        pub(super) kv_heads: usize,
        pub(super) q_shared: bool,
        pub(super) k_shared: bool,
        pub(super) qk_eps: f32,
        pub(super) scale: f32,
    }
}

kernel_params! {
    #[derive(Default)]
    pub(super) struct DecodeAttentionParams {
        pub(super) rows: ConstPtr<DecodeToken>,
        pub(super) tables: ConstPtr<DecodeTable>,
        /// `[rows, heads * d]`.
        pub(super) q: ConstPtr<f32>,
        /// `[slots][layers][heads]`.
        pub(super) gate_sums: ConstPtr<f64>,
        /// `[heads]`.
        pub(super) thresholds: ConstPtr<f64>,
        /// Sum of p v, maximum and sum of p of each run of pages `[rows][heads][k_splits][d + 4]`.
        pub(super) partials: Ptr<f32>,
        pub(super) layers: usize,
        pub(super) layer: usize,
        pub(super) heads: usize,
        pub(super) kv_heads: usize,
        /// 0 for none.
        pub(super) window: usize,
        pub(super) gated: bool,
    }
}

kernel_params! {
    #[derive(Default)]
    pub(super) struct DecodeMerge {
        pub(super) rows: ConstPtr<DecodeToken>,
        /// As in [`DecodeAttentionParams`].
        pub(super) partials: ConstPtr<f32>,
        /// `[rows, stride]`.
        pub(super) raw: ConstPtr<f32>,
        /// `[heads * d]`, or null.
        pub(super) norm: ConstPtr<f32>,
        /// Attention sinks `[heads]`, or null.
        pub(super) sinks: ConstPtr<f32>,
        /// Blocked `[rows, heads * d]`.
        pub(super) y: Ptr<bf16>,
        pub(super) stride: usize,
        pub(super) heads: usize,
        /// First column of the output gate in `raw`; -1 without one.
        pub(super) gate: i32,
        pub(super) act: i32,
        pub(super) eps: f32,
    }
}

kernel_params! {
    /// Sampling parameters of a row.
    #[derive(Default)]
    pub(super) table struct DrawParams {
        /// The bits of a random f64 in [0, 1).
        pub(super) uniform: u64,
        /// 1 / temperature; 0 for greedy.
        pub(super) inverse_temperature: f32,
        pub(super) top_p: f32,
        pub(super) min_p: f32,
        pub(super) top_k: usize,
    }
}

kernel_params! {
    pub(super) struct DecodeSample {
        /// `[rows, vocab]`.
        pub(super) logits: ConstPtr<f32>,
        /// `[rows]`.
        pub(super) draws: ConstPtr<DrawParams>,
        /// `[rows]`.
        pub(super) ids: Ptr<i32>,
        /// `[rows]`.
        pub(super) logprobs: Ptr<f32>,
        pub(super) vocab: usize,
    }
}
