//! The parameters of PaTH's kernels.

use super::table::{PathBlock, PathSpan, PathTile, SpanSizes};
use crate::params::{ConstPtr, Float2, Float4, Ptr, Real, kernel_params};

kernel_params! {
    #[derive(Default)]
    pub(super) struct PathParams {
        /// `[R_q, H * d]`, like `d_out`, `o` and `dq`.
        pub(super) q: ConstPtr<Real>,
        /// `[R_k, H_kv * d]`, like `v`, `u`, `dk`, `dv` and `du`.
        pub(super) k: ConstPtr<Real>,
        pub(super) v: ConstPtr<Real>,
        pub(super) u: ConstPtr<f32>,
        pub(super) d_out: ConstPtr<Real>,
        pub(super) o: Ptr<Real>,
        /// `[R_q, H]`, like `delta`, `<d_out, o>`.
        pub(super) lse: Ptr<f32>,
        pub(super) delta: Ptr<f32>,
        /// Visited and total tiles `[heads][2]`.
        pub(super) counts: Ptr<u64>,
        /// `[heads][gate_stride]`, or null.
        pub(super) gates: ConstPtr<Float2>,
        /// Bounds on the logits `[segments][heads]`; null without pruning.
        pub(super) bounds: ConstPtr<f32>,
        pub(super) blocks: ConstPtr<PathBlock>,
        pub(super) tiles: ConstPtr<PathTile>,
        /// T and N `[block][kv_head][64][64]`.
        pub(super) t: Ptr<Real>,
        pub(super) n: Ptr<Real>,
        /// Keys at the end of their block `[block][kv_head][64][D]`.
        pub(super) kh: Ptr<Real>,
        /// Products of blocks, and behind them of spans, `[product][kv_head][D][D]`.
        pub(super) e: Ptr<Real>,
        /// Queries as they meet older blocks, and gradients of those that the next older block meets,
        /// `[head - head0][slot - slot0][64][D]`.
        pub(super) x: Ptr<Real>,
        pub(super) dx: Ptr<Real>,
        /// Gradients of queries at the start of their block `[tile - tile0][head - head0][64][D]`.
        pub(super) dx_start: Ptr<Real>,
        /// The first visited block `[heads][tiles]`.
        pub(super) first: Ptr<i32>,
        /// Sums of the gradients of scores `[heads][row_sum_stride]` and `[levels][heads][gate_stride]`.
        pub(super) row_sums: Ptr<f32>,
        pub(super) column_sums: Ptr<f32>,
        /// Gradients from later tiles, of kh (without the scale) and of values `[block][kv_head][64][D]`, and of E
        /// `[block][kv_head][D][D]`.
        pub(super) dkh_sums: Ptr<f32>,
        pub(super) dv_sums: Ptr<f32>,
        pub(super) de_sums: Ptr<f32>,
        /// Gradients from the own block of a tile, `[block][head - head0]`: `[64][64]` and `[64][D]`.
        pub(super) dt_own: Ptr<f32>,
        pub(super) dn_own: Ptr<f32>,
        pub(super) dk_own: Ptr<f32>,
        pub(super) du_own: Ptr<f32>,
        pub(super) dv_own: Ptr<f32>,
        pub(super) dq: Ptr<Real>,
        pub(super) dk: Ptr<Real>,
        pub(super) dv: Ptr<Real>,
        pub(super) du: Ptr<f32>,
        pub(super) spans: ConstPtr<PathSpan>,
        /// Products F of the newer parts of a span, of the shape of `e`, null in the forward; those in `e` of spans.
        pub(super) f: Ptr<Real>,
        pub(super) es: Ptr<Real>,
        /// Keys at the end of their span, and their values, `[levels, R_k, H_kv * d]`; values are null with one level.
        pub(super) kl: Ptr<Real>,
        pub(super) vl: Ptr<Real>,
        /// Virtual queries `[virtual_tiles * 64, H * d]`, like their outputs, and the gradients of these, which those of
        /// x after each span replace; statistics `[virtual_tiles * 64, H]`.
        pub(super) xs: Ptr<Real>,
        pub(super) os: ConstPtr<Real>,
        pub(super) ds: Ptr<Real>,
        pub(super) lses: ConstPtr<f32>,
        /// Gate prefix hi and lo, delta, log2(e) lse of virtual queries `[heads][virtual_tiles * 64]`.
        pub(super) rows: Ptr<Float4>,
        /// From the backward of forgetting attention: gradients of virtual queries in the order of accumulators, and of
        /// keys and values, all without the scale. Those of larger spans are added to keys and values of smaller ones.
        pub(super) dq_tiles: ConstPtr<f32>,
        pub(super) dkl: Ptr<Real>,
        pub(super) dvl: Ptr<Real>,
        /// Gradients of queries at the start of their span `[tile][head][64][D]`.
        pub(super) dx_spans: Ptr<f32>,
        /// Gradients of products of spans `[kv_head][D][D]`: sums over virtual tiles `[sums]`; from larger spans
        /// `[span]`, and what their keys add to those of newer parts, without the scale.
        pub(super) de_parts: Ptr<f32>,
        pub(super) de_spans: Ptr<f32>,
        pub(super) df_keys: Ptr<f32>,
        /// Blocks of a span at each level, and levels with spans.
        pub(super) sizes: SpanSizes,
        pub(super) levels: usize,
        pub(super) block_count: usize,
        pub(super) k_rows: usize,
        /// The first span of this launch.
        pub(super) span0: usize,
        pub(super) virtual_tiles: usize,
        pub(super) sum_tiles: usize,
        pub(super) heads: usize,
        pub(super) kv_heads: usize,
        pub(super) head_dim: usize,
        pub(super) gate_stride: usize,
        pub(super) row_sum_stride: usize,
        pub(super) tile_count: usize,
        /// Tiles, scratch tiles and query heads of this launch: the first, and their number.
        pub(super) tile0: usize,
        pub(super) tile_step: usize,
        pub(super) slot0: usize,
        pub(super) slot_count: usize,
        pub(super) head0: usize,
        pub(super) head_count: usize,
        pub(super) scale: f32,
        pub(super) log_tolerance: f32,
    }
}
