//! What the kernels of decode steps are given.

use half::bf16;

use crate::ops::paged::Page;
use crate::params::{ConstPtr, Float2, Ptr, kernel_params};

/// Matrices that a product has, at most: queries, keys, values, their shifts, forget gate, output gate.
pub(super) const PARTS: usize = 7;

kernel_params! {
    /// One of the matrices of a product.
    #[derive(Default)]
    pub(super) struct DecodeMatrix {
        /// `[rows, width]`; with GLU `[2 rows, width]`. In 8 bits where there are scales, see `int8.cuh`.
        pub(super) w: ConstPtr<bf16>,
        /// A scale for every 64 weights of a row, or null.
        pub(super) scales: ConstPtr<f32>,
        /// `[rows]`, or null.
        pub(super) bias: ConstPtr<f32>,
        /// Results.
        pub(super) rows: usize,
        /// Where they begin in a row of `y`.
        pub(super) start: usize,
        /// The first of the thread blocks that compute them.
        pub(super) first_block: usize,
    }
}

kernel_params! {
    #[derive(Default)]
    pub(super) struct DecodeMatmul {
        /// Blocked `[rows, width]`.
        pub(super) x: ConstPtr<bf16>,
        /// `[rows, stride]`; that for each run of columns where they are split.
        pub(super) y: Ptr<f32>,
        /// With GLU, blocked `[rows, part rows]`.
        pub(super) inner: Ptr<bf16>,
        pub(super) parts: [DecodeMatrix; PARTS],
        pub(super) part_count: usize,
        pub(super) width: usize,
        pub(super) stride: usize,
        pub(super) act: i32,
    }
}

kernel_params! {
    /// A row of a step.
    pub(super) table struct DecodeToken align(16) {
        /// -1 for a row that only fills the step up.
        pub(super) slot: i32,
        pub(super) token: i32,
        /// Tokens before this one.
        pub(super) position: usize,
        pub(super) unused: i32,
    }
}

kernel_params! {
    /// Where the pages of one layer of a slot lie.
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
        /// `[V, width]` where the stream begins, else null.
        pub(super) embeddings: ConstPtr<bf16>,
        /// `[rows, width]`.
        pub(super) h: Ptr<f32>,
        /// `[runs][rows, width]`.
        pub(super) delta: ConstPtr<f32>,
        /// `[width]`.
        pub(super) norm: ConstPtr<f32>,
        /// Blocked `[rows, width]`.
        pub(super) x: Ptr<bf16>,
        pub(super) width: usize,
        pub(super) runs: usize,
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
        /// Rows of the product.
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
        /// `[rows, heads * d]`, times the scale of the scores.
        pub(super) q: Ptr<f32>,
        /// `[slots][layers]`.
        pub(super) tables: ConstPtr<DecodeTable>,
        /// Raw rows of keys and values of the step before `[slots][layers][2][kv_heads * d]`.
        pub(super) last: Ptr<bf16>,
        /// Sums of the log gates `[slots][layers][heads]`.
        pub(super) now: Ptr<f64>,
        /// `[heads * d]` or `[d]`, or null.
        pub(super) q_norm: ConstPtr<f32>,
        pub(super) k_norm: ConstPtr<f32>,
        /// `[heads]`, or null.
        pub(super) gate_bias: ConstPtr<f32>,
        /// `[positions][d / 2]`, or null.
        pub(super) rope: ConstPtr<Float2>,
        /// Columns of `raw` at which queries, keys, values, their shifts and the gates begin; -1 for what is absent.
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
    pub(super) struct DecodeAttention {
        pub(super) rows: ConstPtr<DecodeToken>,
        pub(super) tables: ConstPtr<DecodeTable>,
        /// `[rows, heads * d]`.
        pub(super) q: ConstPtr<f32>,
        /// `[slots][layers][heads]`.
        pub(super) now: ConstPtr<f64>,
        /// `[heads]`.
        pub(super) thresholds: ConstPtr<f64>,
        /// Sum of p v, maximum and sum of p of each run of pages `[rows][heads][runs][d + 4]`.
        pub(super) parts: Ptr<f32>,
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
        /// As above.
        pub(super) parts: ConstPtr<f32>,
        /// `[rows, stride]`.
        pub(super) raw: ConstPtr<f32>,
        /// `[heads * d]`, or null.
        pub(super) norm: ConstPtr<f32>,
        /// Blocked `[rows, heads * d]`.
        pub(super) y: Ptr<bf16>,
        pub(super) stride: usize,
        pub(super) heads: usize,
        /// Column of `raw` at which the output gate begins; -1 without one.
        pub(super) gate: i32,
        pub(super) act: i32,
        pub(super) eps: f32,
    }
}

kernel_params! {
    /// How the next token of a row is drawn.
    #[derive(Default)]
    pub(super) table struct TokenDraw {
        /// The bits of a number from 0 to 1, in f64.
        pub(super) uniform: u64,
        /// 1 over the temperature; 0 takes the likeliest.
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
        pub(super) draws: ConstPtr<TokenDraw>,
        /// `[rows]`.
        pub(super) ids: Ptr<i32>,
        /// `[rows]`.
        pub(super) scores: Ptr<f32>,
        pub(super) vocab: usize,
    }
}
