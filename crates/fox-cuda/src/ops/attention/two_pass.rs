//! The backward in two passes, over keys and over queries: with mma.sync (GPUs other than Hopper, bidirectional masks
//! with head dims above 128) or in f32; and the forward in f32.

use super::launch_cache::TileKey;
use super::tiles::{self, TileConfig};
use super::tiling::{BlockRef, Segment, Tiling};
use super::{Attention, AttentionGrads};
use crate::params::{ConstPtr, Float2, Float4, Int2, Ptr, Real, kernel_params};
use crate::source::source;
use crate::{Buffer, Float, Result, Source};

pub(super) const BACKWARD: Source =
    source!("attention_bwd", [], [Segment, BlockRef, TwoPassParams]);

/// f32 kernels of both directions.
pub(super) const ATTENTION_F32: Source =
    source!("attention_f32", [], [Segment, BlockRef, TwoPassParams]);

kernel_params! {
    #[derive(Default)]
    pub(super) struct TwoPassParams {
        /// `[R_q, H * d]`, like `d_out`, `o` and `dq`.
        q: ConstPtr<Real>,
        /// `[R_k, H_kv * d]`, like `v`, `dk` and `dv`.
        k: ConstPtr<Real>,
        v: ConstPtr<Real>,
        d_out: ConstPtr<Real>,
        /// Output of the forward, like `lse`; null in the backward.
        pub(super) o: Ptr<Real>,
        /// `[R_q, H]`.
        pub(super) lse: Ptr<f32>,
        /// Gradients; null in the forward.
        dq: Ptr<Real>,
        dk: Ptr<Real>,
        dv: Ptr<Real>,
        /// `[heads][gate_stride]`.
        column_sums: Ptr<f32>,
        /// `[heads][m_tiles * 64]`.
        row_sums: Ptr<f32>,
        /// Gate prefix hi, lo, delta, log2(e) lse, `[heads][m_tiles * 64]`.
        rows: ConstPtr<Float4>,
        /// `[heads][gate_stride]`, or null.
        gates: ConstPtr<Float2>,
        segments: ConstPtr<Segment>,
        m_tiles: ConstPtr<BlockRef>,
        n_tiles: ConstPtr<BlockRef>,
        /// Key tiles `begin, end` of each query tile `[heads][m_tiles]`.
        spans: ConstPtr<Int2>,
        m_tile_count: usize,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        gate_stride: usize,
        /// Used by the f32 kernels; a compile-time constant of the others.
        mask: i32,
        window: usize,
        scale: f32,
        /// Softmax scale times log2(e).
        scale_log2: f32,
    }
}

impl<T: Float> Attention<'_, T> {
    pub(super) fn two_pass_params(
        &self,
        tiling: &Tiling,
        gates: Option<&Buffer<f32>>,
        spans: &Buffer<i32>,
    ) -> TwoPassParams {
        TwoPassParams {
            q: self.inputs.q.address().into(),
            k: self.inputs.k.address().into(),
            v: self.inputs.v.address().into(),
            gates: gates.map_or(0, Buffer::address).into(),
            segments: tiling.segments.address().into(),
            m_tiles: tiling.m_tiles.address().into(),
            n_tiles: tiling.n_tiles.address().into(),
            spans: spans.address().into(),
            m_tile_count: tiling.m_tile_count,
            heads: self.spec.heads,
            kv_heads: self.spec.kv_heads,
            head_dim: self.spec.head_dim,
            gate_stride: tiling.gate_stride,
            mask: self.mask_code(),
            window: self.window(),
            scale: self.spec.scale,
            scale_log2: self.scale_log2(),
            ..TwoPassParams::default()
        }
    }

    pub(super) fn backward_two_pass(
        &self,
        tiling: &Tiling,
        (key, tile): (TileKey, &TileConfig),
        (o, lse): (&Buffer<T>, &Buffer<f32>),
        d_out: &Buffer<T>,
        grads: &AttentionGrads<T>,
    ) -> Result<()> {
        let (heads, kv_heads, head_dim) = (self.spec.heads, self.spec.kv_heads, self.spec.head_dim);
        let gates = self.gate_prefix(tiling)?;
        let rows = self.backward_rows(tiling, tile, (o, lse), d_out, gates.as_ref(), None)?;
        let plan = self.plan_backward(tiling, tile, gates.as_ref())?;
        let column_sums = self.gpu.alloc::<f32>(heads * tiling.gate_stride)?;
        let row_sums = self.gpu.alloc::<f32>(heads * tiling.m_tile_count * tile.block_m)?;
        let params = TwoPassParams {
            d_out: d_out.address().into(),
            dq: grads.dq.address().into(),
            dk: grads.dk.address().into(),
            dv: grads.dv.address().into(),
            column_sums: column_sums.address().into(),
            row_sums: row_sums.address().into(),
            rows: rows.address().into(),
            ..self.two_pass_params(tiling, gates.as_ref(), &plan.spans)
        };
        let (over_keys, over_queries, parts) = match T::WIDE {
            true => {
                let parts = tiles::f32_row_splits(head_dim);
                ("attention_bwd_keys_f32", "attention_bwd_queries_f32", [parts, parts])
            }
            false => {
                let parts = tiles::portable_column_splits(head_dim);
                ("attention_bwd_keys", "attention_bwd_queries", [parts, 1])
            }
        };
        let grid = [tiling.n_tile_count, kv_heads, parts[0]];
        self.run_two_pass((key, tile), over_keys, grid, params)?;
        let grid = [tiling.m_tile_count, heads, parts[1]];
        self.run_two_pass((key, tile), over_queries, grid, params)?;
        let sums = (&column_sums, &row_sums);
        self.gate_gradient_of_rows(tiling, tile, sums, grads.dlog_gates.as_ref())
    }

    pub(super) fn run_two_pass(
        &self,
        (key, tile): (TileKey, &TileConfig),
        entry: &'static str,
        grid: [usize; 3],
        params: TwoPassParams,
    ) -> Result<()> {
        let kernel = self.main_kernel(key, tile, entry)?;
        let launch = kernel.launch(grid, tile.threads).shared(tile.shared);
        // SAFETY: `new` and `backward_into` checked the operands; scratch is allocated for this tiling.
        unsafe { launch.params(params)?.run(|| self.shapes()) }
    }

    pub(super) fn forward_f32(
        &self,
        tiling: &Tiling,
        (key, tile): (TileKey, &TileConfig),
        gates: Option<&Buffer<f32>>,
        o: &Buffer<T>,
        lse: &Buffer<f32>,
    ) -> Result<()> {
        let plan = self.plan_backward(tiling, tile, gates)?;
        let mut params = self.two_pass_params(tiling, gates, &plan.spans);
        params.o = o.address().into();
        params.lse = lse.address().into();
        let parts = tiles::f32_row_splits(self.spec.head_dim);
        let grid = [tiling.m_tile_count, self.spec.heads, parts];
        self.run_two_pass((key, tile), "attention_fwd_f32", grid, params)
    }
}
