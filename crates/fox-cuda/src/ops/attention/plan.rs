//! Tile scheduling: visited tiles and their order; bounds on the logits for adaptive computation pruning.

use std::sync::Arc;

use fox_tensor::{Acp, LogitBound, Tensor};

use super::Attention;
use super::forward::{ForwardTile, PlanForward, PlanScan, PlanScatter, SortParams};
use super::tiles::TileConfig;
use super::tiling::{BlockRef, PlanKey, Segment, Tiling};
use crate::backend::f32_buffer;
use crate::lru::LruCache;
use crate::params::{ConstPtr, Float2, Int2, KernelParams, Ptr, Real, kernel_params};
use crate::source::source;
use crate::{Buffer, Float, Result, Source};

const PLAN: Source = source!(
    "attention_plan",
    [],
    [
        Segment,
        BlockRef,
        ForwardTile,
        PlanParams,
        SortParams,
        PlanForward,
        PlanScan,
        PlanScatter,
        PlanSpans,
        PlanRanges,
        NormParams,
        BoundsFromWeights
    ]
);

kernel_params! {
    /// Inputs of the tile scheduler.
    pub(super) struct PlanParams {
        segments: ConstPtr<Segment>,
        m_tiles: ConstPtr<BlockRef>,
        /// `[heads][gate_stride]`; null without gates.
        gates: ConstPtr<Float2>,
        /// Bound on the magnitude of the logits `[segments][heads]`; null without pruning.
        bounds: ConstPtr<f32>,
        m_tile_count: usize,
        heads: usize,
        kv_heads: usize,
        gate_stride: usize,
        block_m: usize,
        block_n: usize,
        mask: i32,
        /// 0 for none.
        window: usize,
        log_tolerance: f32,
    }

    pub(super) list struct PlanSpans {
        pub(super) p: PlanParams,
        /// Key tiles `begin, end` of each query tile `[heads][m_tiles]`.
        pub(super) spans: Ptr<Int2>,
    }

    pub(super) list struct PlanRanges {
        pub(super) p: PlanParams,
        /// `[heads][m_tiles]`.
        pub(super) spans: ConstPtr<Int2>,
        pub(super) n_tiles: ConstPtr<BlockRef>,
        pub(super) n_tile_count: usize,
        /// Query tiles `begin, end` of each key tile `[heads][n_tiles]`; two ranges where the mask is bidirectional.
        pub(super) ranges: Ptr<Int2>,
    }

    struct NormParams {
        /// `[segments][heads]`.
        bounds: Ptr<f32>,
        /// Largest squared norms `[segments][heads + kv_heads]`, then a counter; zeroed.
        largest: Ptr<u32>,
        /// `[R_q, H * d]`.
        q: ConstPtr<Real>,
        /// `[R_k, H_kv * d]`.
        k: ConstPtr<Real>,
        segments: ConstPtr<Segment>,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        scale: f32,
    }

    list struct BoundsFromWeights {
        /// `[segments][heads]`.
        bounds: Ptr<f32>,
        /// `[H * d]`, or `[d]` if it is shared by all heads.
        q: ConstPtr<f32>,
        /// `[H_kv * d]`, or `[d]` if it is shared by all heads.
        k: ConstPtr<f32>,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        q_shared: bool,
        k_shared: bool,
        scale: f32,
    }
}

/// Rows per block of `logit_bounds`.
const NORM_ROWS: usize = 256;

/// All variants, for compilation checks.
pub(super) fn variants() -> Vec<(Source, Vec<String>)> {
    [0, 1].map(|wide| (PLAN, vec![format!("WIDE={wide}")])).into()
}

impl<T: Float> Attention<'_, T> {
    /// The plan that `make` returns for these bounds on the logits. Without pruning there are no bounds, the plan depends
    /// on shapes only and is cached.
    pub(super) fn plan<P>(
        &self,
        tiling: &Tiling,
        kept: &LruCache<PlanKey, P>,
        make: impl FnOnce(Option<&Buffer<f32>>) -> Result<P>,
    ) -> Result<Arc<P>> {
        match self.logit_bounds(tiling)? {
            Some(bounds) => Ok(Arc::new(make(Some(&bounds))?)),
            None => kept.get(self.plan_key(), || make(None)),
        }
    }

    /// Bounds on the magnitude of the logits `[segments][heads]`; `None` without pruning.
    pub(in crate::ops) fn logit_bounds(&self, tiling: &Tiling) -> Result<Option<Buffer<f32>>> {
        let Acp::On { bound, .. } = &self.spec.acp else { return Ok(None) };
        if self.inputs.log_gates.is_none() {
            return Ok(None);
        }
        match bound {
            LogitBound::QkNorm { q, k } => self.bounds_from_weights(q, k).map(Some),
            LogitBound::Given(bounds) => self.gpu.copy_of(f32_buffer(bounds)?).map(Some),
            LogitBound::Norms => self.bounds_from_norms(tiling).map(Some),
        }
    }

    /// Bounds `[segments][heads]` from the largest norms of queries and keys.
    fn bounds_from_norms(&self, tiling: &Tiling) -> Result<Buffer<f32>> {
        let (heads, kv_heads) = (self.spec.heads, self.spec.kv_heads);
        let segments = self.spec.segments.len();
        let bounds = self.gpu.alloc::<f32>(segments * heads)?;
        let largest = self.zeros(segments * (heads + kv_heads) + 1)?;
        let params = NormParams {
            bounds: bounds.address().into(),
            largest: largest.address().into(),
            q: self.inputs.q.address().into(),
            k: self.inputs.k.address().into(),
            segments: tiling.segments.address().into(),
            heads,
            kv_heads,
            head_dim: self.spec.head_dim,
            scale: self.spec.scale,
        };
        let rows = tiling.longest_q.max(tiling.longest_k);
        let grid = [heads + kv_heads, rows.div_ceil(NORM_ROWS), segments];
        self.run_plan("logit_bounds", grid, 256, params)?;
        Ok(bounds)
    }

    /// Bounds `[segments][heads]` from the QK-norm weights.
    fn bounds_from_weights(&self, q: &Tensor, k: &Tensor) -> Result<Buffer<f32>> {
        let (heads, segments) = (self.spec.heads, self.spec.segments.len());
        let bounds = self.gpu.alloc::<f32>(segments * heads)?;
        let shared = |w: &Tensor| w.len() == self.spec.head_dim;
        let params = BoundsFromWeights {
            bounds: bounds.address().into(),
            q: f32_buffer(q)?.address().into(),
            k: f32_buffer(k)?.address().into(),
            heads,
            kv_heads: self.spec.kv_heads,
            head_dim: self.spec.head_dim,
            q_shared: shared(q),
            k_shared: shared(k),
            scale: self.spec.scale,
        };
        self.run_plan("bounds_from_weights", [heads, segments, 1], 32, params)?;
        Ok(bounds)
    }

    pub(super) fn plan_params(
        &self,
        tiling: &Tiling,
        tile: &TileConfig,
        gates: Option<&Buffer<f32>>,
        bounds: Option<&Buffer<f32>>,
    ) -> PlanParams {
        PlanParams {
            segments: tiling.segments.address().into(),
            m_tiles: tiling.m_tiles.address().into(),
            gates: gates.map_or(0, Buffer::address).into(),
            bounds: bounds.map_or(0, Buffer::address).into(),
            m_tile_count: tiling.m_tile_count,
            heads: self.spec.heads,
            kv_heads: self.spec.kv_heads,
            gate_stride: tiling.gate_stride,
            block_m: tile.block_m,
            block_n: tile.block_n,
            mask: self.mask_code(),
            window: self.window(),
            log_tolerance: self.spec.acp.log_tolerance(),
        }
    }

    pub(super) fn run_plan<P: KernelParams>(
        &self,
        entry: &'static str,
        grid: [usize; 3],
        block: usize,
        params: P,
    ) -> Result<()> {
        self.launch_helper(PLAN, entry, grid, block, params)
    }
}
