//! Stick-breaking attention; see `stick.cu`.

use std::sync::Arc;

use fox_tensor::{AttentionInputs, AttentionSpec, StickOps, Tensor};
use half::bf16;

use super::attention::tiles::{self, TileConfig, padded_head_dim};
use super::attention::tiling::{BlockRef, Segment, Tiling};
use super::attention::{Attention, AttentionGrads, AttentionOut};
use crate::backend::storage::Activation;
use crate::backend::{Cuda, Precision};
use crate::params::{ConstPtr, Float2, Ptr, Real, kernel_params};
use crate::source::source;
use crate::{Buffer, Float, Result, Source};

/// Limit on the scratch of the backward's first pass in bytes; heads are processed in groups that fit.
const CARRY_BYTES: usize = 512 << 20;

const STICK: Source = source!("stick", [], [Segment, BlockRef, StickParams]);

kernel_params! {
    #[derive(Default)]
    struct StickParams {
        /// `[R_q, H * d]`, like `d_out`, `o` and `dq`.
        q: ConstPtr<Real>,
        /// `[R_k, H_kv * d]`, like `v`, `dk` and `dv`.
        k: ConstPtr<Real>,
        v: ConstPtr<Real>,
        d_out: ConstPtr<Real>,
        o: Ptr<Real>,
        dq: Ptr<Real>,
        dk: Ptr<Real>,
        dv: Ptr<Real>,
        /// Natural logarithm of the remaining stick `[R_q, H]`.
        lse: Ptr<f32>,
        /// Visited and visible tiles `[heads][2]`.
        blocks: Ptr<u64>,
        /// `[heads][gate_stride]`.
        gates: ConstPtr<Float2>,
        segments: ConstPtr<Segment>,
        m_tiles: ConstPtr<BlockRef>,
        n_tiles: ConstPtr<BlockRef>,
        /// Carries of the first pass of the backward for heads `head0 ..`: log2 of the remaining stick and sum of newer g,
        /// `[head - head0][m_tile][key tile][64]`.
        carries: Ptr<Float2>,
        /// Sum of g over all keys `[heads][m_tile][64]`.
        row_sums: Ptr<f32>,
        /// The oldest visited key tile `[heads][m_tile]`.
        oldest: Ptr<i32>,
        /// Sum of g over all queries `[heads][gate_stride]`.
        column_sums: Ptr<f32>,
        m_tile_count: usize,
        key_blocks: usize,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        head0: usize,
        gate_stride: usize,
        window: usize,
        scale: f32,
        /// In base 2.
        tolerance: f32,
    }
}

/// Typical variants, for compilation checks.
pub(super) fn variants() -> Vec<(Source, Vec<String>)> {
    let kinds = [(64, false), (128, false), (256, false), (64, true), (256, true)];
    let of = |(head_dim, wide)| {
        [true, false].map(|gates| (STICK, stick_tile(head_dim, gates, wide).defines))
    };
    kinds.into_iter().flat_map(of).collect()
}

/// Launch configuration of either direction. Shared memory holds four blocks of rows (in bf16 only; f32 reads them from
/// device memory) and two tiles of weights. Head dims above 128 exceed the shared memory of sm_86 and sm_89.
fn stick_tile(head_dim: usize, gates: bool, wide: bool) -> TileConfig {
    let head_dim = padded_head_dim(head_dim);
    // In f32 the gate prefixes of the keys are float pairs.
    let (rows, size, prefixes) = if wide { (8, 4, 2) } else { (64 * (head_dim + 8), 2, 1) };
    let shared = (4 * rows + 2 * 64 * 72) * size + (prefixes + 4) * 64 * 4 + 16;
    let defines = vec![
        format!("HEAD_DIM={head_dim}"),
        format!("WIDE={}", i32::from(wide)),
        format!("GATES={}", i32::from(gates)),
        format!("SHARED_BYTES={shared}"),
    ];
    TileConfig { source: STICK, block_m: 64, block_n: 64, threads: 128, shared, defines }
}

impl<T: Float> Attention<'_, T> {
    /// Stick-breaking attention with forget gates; `lse` is the logarithm of the remaining stick.
    pub fn stick_breaking(&self) -> Result<AttentionOut<T>> {
        let heads = self.spec.heads;
        let tile = self.stick_tile_config();
        let tiling = self.tiling(&tile)?;
        let (o, lse) = self.alloc_cleared_output(&tiling)?;
        let blocks = Arc::new(self.gpu.zeros::<i32>(4 * heads)?);
        if tiling.m_tile_count > 0 {
            let gates = self.gate_prefix(&tiling)?;
            let params = StickParams {
                o: o.address().into(),
                lse: lse.address().into(),
                blocks: blocks.address().into(),
                ..self.stick_params(&tiling, gates.as_ref())
            };
            self.run_stick(&tile, "stick_fwd", [tiling.m_tile_count, heads, 1], params)?;
        }
        Ok(AttentionOut { o, lse, tiles: blocks })
    }

    /// Gradients of [`stick_breaking`](Attention::stick_breaking) from that of its output, `[R_q, H * d]`.
    pub(crate) fn stick_breaking_backward(&self, d_out: &Buffer<T>) -> Result<AttentionGrads<T>> {
        let tile = self.stick_tile_config();
        let tiling = self.tiling(&tile)?;
        let grads = self.alloc_cleared_gradients(&tiling, d_out)?;
        if tiling.m_tile_count == 0 {
            return Ok(grads);
        }
        let (heads, kv_heads) = (self.spec.heads, self.spec.kv_heads);
        let (m_tiles, group) = (tiling.m_tile_count, heads / kv_heads);
        let key_blocks = tiling.longest_k.div_ceil(tile.block_n);
        let per_head = m_tiles * key_blocks * tile.block_m * 2;
        let kv_step = (CARRY_BYTES / (4 * per_head * group)).clamp(1, kv_heads);
        let gates = self.gate_prefix(&tiling)?;
        let carries = self.gpu.alloc::<f32>(kv_step * group * per_head)?;
        let row_sums = self.gpu.alloc::<f32>(heads * m_tiles * tile.block_m)?;
        let oldest = self.gpu.alloc::<i32>(heads * m_tiles)?;
        let column_sums = self.gpu.alloc::<f32>(heads * tiling.gate_stride)?;
        let column_splits = tiles::portable_column_splits(self.spec.head_dim);
        for kv_head in (0..kv_heads).step_by(kv_step) {
            let kv_count = kv_step.min(kv_heads - kv_head);
            let params = StickParams {
                d_out: d_out.address().into(),
                dq: grads.dq.address().into(),
                dk: grads.dk.address().into(),
                dv: grads.dv.address().into(),
                carries: carries.address().into(),
                row_sums: row_sums.address().into(),
                oldest: oldest.address().into(),
                column_sums: column_sums.address().into(),
                key_blocks,
                head0: kv_head * group,
                ..self.stick_params(&tiling, gates.as_ref())
            };
            let over_queries = [m_tiles, kv_count * group, 1];
            let over_keys = [tiling.n_tile_count, kv_count, column_splits];
            self.run_stick(&tile, "stick_carries", over_queries, params)?;
            self.run_stick(&tile, "stick_bwd_keys", over_keys, params)?;
            self.run_stick(&tile, "stick_bwd_queries", over_queries, params)?;
        }
        let sums = (&column_sums, &row_sums);
        self.gate_gradient_of_rows(&tiling, &tile, sums, grads.dlog_gates.as_ref())?;
        Ok(grads)
    }

    fn stick_tile_config(&self) -> TileConfig {
        stick_tile(self.spec.head_dim, self.inputs.log_gates.is_some(), T::WIDE)
    }

    fn stick_params(&self, tiling: &Tiling, gates: Option<&Buffer<f32>>) -> StickParams {
        StickParams {
            q: self.inputs.q.address().into(),
            k: self.inputs.k.address().into(),
            v: self.inputs.v.address().into(),
            gates: gates.map_or(0, Buffer::address).into(),
            segments: tiling.segments.address().into(),
            m_tiles: tiling.m_tiles.address().into(),
            n_tiles: tiling.n_tiles.address().into(),
            m_tile_count: tiling.m_tile_count,
            heads: self.spec.heads,
            kv_heads: self.spec.kv_heads,
            head_dim: self.spec.head_dim,
            gate_stride: tiling.gate_stride,
            window: self.window(),
            scale: self.spec.scale,
            tolerance: self.spec.stick_tolerance() * std::f32::consts::LOG2_E,
            ..StickParams::default()
        }
    }

    fn run_stick(
        &self,
        tile: &TileConfig,
        entry: &str,
        grid: [usize; 3],
        params: StickParams,
    ) -> Result<()> {
        let kernel = self.gpu.kernel(tile.source, &tile.defines, entry)?;
        let launch = kernel.launch(grid, tile.threads).shared(tile.shared);
        // SAFETY: `new` and `alloc_cleared_gradients` checked the operands; scratch is allocated for this tiling.
        unsafe { launch.params(params)?.run(|| self.shapes()) }
    }
}

impl Cuda {
    pub(crate) fn stick_breaking_forward(
        &self,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
    ) -> Result<fox_tensor::AttentionOut> {
        match self.precision {
            Precision::F32 => self.output_of::<f32>(inputs, spec, |x| x.stick_breaking()),
            Precision::Bf16 => self.output_of::<bf16>(inputs, spec, |x| x.stick_breaking()),
        }
    }

    fn stick_breaking_gradients<T: Activation>(
        &self,
        d_out: &Tensor,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
    ) -> Result<fox_tensor::AttentionGrads> {
        self.gradients_of::<T>(d_out, inputs, spec, |x, d_out| x.stick_breaking_backward(d_out))
    }
}

impl StickOps for Cuda {
    fn stick_breaking_fwd(
        &self,
        inputs: &AttentionInputs<'_>,
        spec: &AttentionSpec,
    ) -> fox_tensor::Result<fox_tensor::AttentionOut> {
        fox_tensor::check_stick_breaking_fwd(self, inputs, spec)?;
        let _span = self.span("stick-breaking fwd")?;
        Ok(self.stick_breaking_forward(inputs, spec)?)
    }

    fn stick_breaking_bwd(
        &self,
        d_out: &Tensor,
        inputs: &AttentionInputs<'_>,
        out: &fox_tensor::AttentionOut,
        spec: &AttentionSpec,
    ) -> fox_tensor::Result<fox_tensor::AttentionGrads> {
        fox_tensor::check_stick_breaking_bwd(self, d_out, inputs, out, spec)?;
        let _span = self.span("stick-breaking bwd")?;
        Ok(match self.precision {
            Precision::F32 => self.stick_breaking_gradients::<f32>(d_out, inputs, spec)?,
            Precision::Bf16 => self.stick_breaking_gradients::<bf16>(d_out, inputs, spec)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::tiles::{HOPPER_SHARED, LEAST_SHARED};
    use super::*;

    #[test]
    fn tiles_fit_shared_memory() {
        for head_dim in [8, 64, 72, 96, 128, 160, 192, 256] {
            let least = if head_dim <= 128 { LEAST_SHARED } else { HOPPER_SHARED };
            assert!(stick_tile(head_dim, true, false).shared <= least, "{head_dim}");
            assert!(stick_tile(head_dim, true, true).shared <= LEAST_SHARED, "{head_dim}");
        }
    }
}
