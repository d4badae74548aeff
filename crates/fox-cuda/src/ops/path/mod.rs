//! PaTH attention; the algorithm is described in `path.cuh`.

mod params;
mod passes;
pub(super) mod spans;
pub(super) mod table;

use std::sync::Arc;

use fox_tensor::{
    AttentionOut, AttentionSpec, DType, PATH_BLOCK, PathGrads, PathInputs, PathOps, Tensor,
};
use half::bf16;

use super::attention::tiles::TileConfig;
use super::attention::tiling::Tiling;
use super::attention::{self, Attention};
use crate::backend::storage::Activation;
use crate::backend::{Cuda, Operand, Precision};
use crate::{Buffer, Error, Float, Result};
use params::PathParams;
use passes::{Pass, PathShape, WALK};
pub(super) use passes::{span_variants, variants};
use spans::{OlderSpans, span_sizes};
pub(crate) use table::PathTable;

/// Limit on the queries and gradients that the backward stores for each tile and older block, in bytes. Heads, and then
/// tiles, are processed in groups that fit.
const STORED_BYTES: usize = 1 << 30;
/// A call: operands, tables and scratch of the forward.
struct PathCall<'a, T> {
    attention: &'a Attention<'a, T>,
    shape: PathShape,
    tiling: Arc<Tiling>,
    tile: TileConfig,
    table: Arc<PathTable>,
    params: PathParams,
    gates: Option<Buffer<f32>>,
    _bounds: Option<Buffer<f32>>,
    _scratch: [Buffer<T>; 4],
    /// Present where tiles have older spans.
    older: Option<OlderSpans<T>>,
}

impl<'a, T: Float> PathCall<'a, T> {
    /// Prepares the blocks of keys, and spans for the forward or the backward.
    fn new(attention: &'a Attention<'a, T>, u: u64, backward: bool) -> Result<Self> {
        let (gpu, spec) = (attention.gpu, attention.spec);
        let shape = PathShape::new(spec.head_dim, T::WIDE);
        let tile = TileConfig {
            source: WALK,
            block_m: PATH_BLOCK,
            block_n: PATH_BLOCK,
            threads: 128,
            shared: 0,
            defines: Vec::new(),
        };
        let tiling = attention.tiling(&tile)?;
        let (gates, bounds) = (attention.gate_prefix(&tiling)?, attention.logit_bounds(&tiling)?);
        let sizes = span_sizes(attention, bounds.is_some());
        let table = gpu
            .attention
            .paths
            .get((spec.segments.clone(), sizes), || PathTable::new(gpu, &spec.segments, sizes))?;
        let (blocks, width) = (table.block_count * spec.kv_heads, shape.width);
        let square = blocks * PATH_BLOCK * PATH_BLOCK;
        let scratch = [
            gpu.alloc(square)?,
            gpu.alloc(square)?,
            gpu.alloc(blocks * PATH_BLOCK * width)?,
            gpu.alloc(table.products() * spec.kv_heads * width * width)?,
        ];
        let [t, n, kh, e] = scratch.each_ref().map(Buffer::address);
        let optional = |x: &Option<Buffer<f32>>| x.as_ref().map_or(0, Buffer::address);
        let params = PathParams {
            q: attention.inputs.q.address().into(),
            k: attention.inputs.k.address().into(),
            v: attention.inputs.v.address().into(),
            u: u.into(),
            gates: optional(&gates).into(),
            bounds: optional(&bounds).into(),
            blocks: table.blocks.address().into(),
            tiles: table.tiles.address().into(),
            t: t.into(),
            n: n.into(),
            kh: kh.into(),
            e: e.into(),
            heads: spec.heads,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            gate_stride: tiling.gate_stride,
            row_sum_stride: tiling.m_tile_count * PATH_BLOCK,
            tile_count: table.tile_count(),
            spans: table.span_table.address().into(),
            es: (e + (blocks * width * width * size_of::<T>()) as u64).into(),
            sizes,
            levels: table.levels.len(),
            block_count: table.block_count,
            k_rows: attention.inputs.k.len() / (spec.kv_heads * spec.head_dim),
            virtual_tiles: table.virtual_tiles(),
            scale: spec.scale,
            log_tolerance: spec.acp.log_tolerance(),
            ..PathParams::default()
        };
        let mut call = PathCall {
            attention,
            shape,
            tiling,
            tile,
            table,
            params,
            gates,
            _bounds: bounds,
            _scratch: scratch,
            older: None,
        };
        if call.table.tile_count() > 0 {
            call.run(Pass::Prepare, [call.table.block_count, spec.kv_heads])?;
        }
        if !call.table.spans.is_empty() {
            call.prepare_spans(backward)?;
        }
        Ok(call)
    }

    fn run(&self, pass: Pass, [x, y]: [usize; 2]) -> Result<()> {
        self.run_grid(pass, [x, y, 1])
    }

    fn run_grid(&self, pass: Pass, grid: [usize; 3]) -> Result<()> {
        let (gpu, shared) = (self.attention.gpu, self.shape.shared(pass));
        if shared > gpu.shared_bytes() {
            let (d, have) = (self.attention.spec.head_dim, gpu.shared_bytes());
            let detail = format!(
                "heads of width {d} need {shared} bytes of shared memory, the GPU has {have}; use bf16 or heads of 64"
            );
            return Err(Error::argument("path_attention", detail));
        }
        let (source, entry, threads) = pass.kernel();
        let kernel = gpu.cached_kernel(source, entry, self.shape, |shape| shape.defines())?;
        let launch = kernel.launch(grid, threads).shared(shared).params(self.params)?;
        // SAFETY: `Attention::new` and the callers checked the operands; scratch has the sizes that `PathParams`
        // documents.
        unsafe { launch.run(|| self.attention.shapes()) }
    }

    fn forward(mut self) -> Result<attention::AttentionOut<T>> {
        let heads = self.attention.spec.heads;
        let (o, lse) = self.attention.alloc_cleared_output(&self.tiling)?;
        let tiles = Arc::new(self.attention.gpu.zeros::<i32>(4 * heads)?);
        self.params.o = o.address().into();
        self.params.lse = lse.address().into();
        self.params.counts = tiles.address().into();
        if self.table.tile_count() > 0 {
            self.run(Pass::Forward, [self.table.tile_count(), heads])?;
            self.spans_forward()?;
        }
        Ok(attention::AttentionOut { o, lse, tiles })
    }

    /// Gradients; `du` is the address of `[R_k, H_kv * d]`, zeros.
    fn backward(
        mut self,
        (o, lse): (u64, u64),
        d_out: &Buffer<T>,
        du: u64,
    ) -> Result<attention::AttentionGrads<T>> {
        let (gpu, spec) = (self.attention.gpu, self.attention.spec);
        let grads = self.attention.alloc_cleared_gradients(&self.tiling, d_out)?;
        let (tiles, blocks) = (self.table.tile_count(), self.table.block_count);
        if tiles == 0 {
            return Ok(grads);
        }
        let (heads, group) = (spec.heads, spec.heads / spec.kv_heads);
        let delta = gpu.alloc::<f32>(d_out.len() / spec.head_dim)?;
        let first = gpu.alloc::<i32>(heads * tiles)?;
        let row_sums = gpu.zeros::<f32>(heads * self.params.row_sum_stride)?;
        let levels = self.table.levels.len().max(1);
        let column_sums = gpu.zeros::<f32>(levels * heads * self.tiling.gate_stride)?;
        self.params = PathParams {
            d_out: d_out.address().into(),
            o: o.into(),
            lse: lse.into(),
            delta: delta.address().into(),
            first: first.address().into(),
            row_sums: row_sums.address().into(),
            column_sums: column_sums.address().into(),
            dq: grads.dq.address().into(),
            dk: grads.dk.address().into(),
            dv: grads.dv.address().into(),
            du: du.into(),
            ..self.params
        };
        let rows = PATH_BLOCK * self.shape.width;
        self.spans_backward(&column_sums)?;
        let slot = 2 * rows * size_of::<T>();
        let all = self.table.slots[tiles].max(1);
        let kv_step = (STORED_BYTES / (all * slot * group)).clamp(1, spec.kv_heads);
        let ranges = match all * slot * group <= STORED_BYTES {
            true => std::iter::once(0..tiles).collect(),
            false => self.table.ranges((STORED_BYTES / (slot * group)).max(1)),
        };
        for kv_head in (0..spec.kv_heads).step_by(kv_step) {
            let kv_count = kv_step.min(spec.kv_heads - kv_head);
            let own = blocks * kv_count * group;
            let (squares, widths) = (PATH_BLOCK * PATH_BLOCK, self.shape.width * self.shape.width);
            let sums = [rows, rows, widths].map(|len| gpu.zeros::<f32>(blocks * kv_count * len));
            let [dkh_sums, dv_sums, de_sums] = sums;
            let (dkh_sums, dv_sums, de_sums) = (dkh_sums?, dv_sums?, de_sums?);
            // `Pass::Own` writes them for blocks that have queries.
            let room = |len: usize| match tiles == blocks {
                true => gpu.alloc::<f32>(own * len),
                false => gpu.zeros::<f32>(own * len),
            };
            let (dt, dn) = (room(squares)?, room(squares)?);
            let (dk, du, dv) = (room(rows)?, room(rows)?, room(rows)?);
            self.params = PathParams {
                dkh_sums: dkh_sums.address().into(),
                dv_sums: dv_sums.address().into(),
                de_sums: de_sums.address().into(),
                dt_own: dt.address().into(),
                dn_own: dn.address().into(),
                dk_own: dk.address().into(),
                du_own: du.address().into(),
                dv_own: dv.address().into(),
                head0: kv_head * group,
                head_count: kv_count * group,
                ..self.params
            };
            if let Some(smallest) = self.table.levels.first() {
                self.run(Pass::SpanBackward, [smallest.len(), kv_count])?;
            }
            for range in &ranges {
                let slots = self.table.slots[range.end] - self.table.slots[range.start];
                let stored = kv_count * group * slots.max(1) * rows;
                let (x, dx) = (gpu.alloc::<T>(stored)?, gpu.alloc::<T>(stored)?);
                let dx_start = gpu.alloc::<T>(kv_count * group * range.len() * rows)?;
                self.params = PathParams {
                    x: x.address().into(),
                    dx: dx.address().into(),
                    dx_start: dx_start.address().into(),
                    tile0: range.start,
                    tile_step: range.len(),
                    slot0: self.table.slots[range.start],
                    slot_count: slots,
                    ..self.params
                };
                let over_tiles = [range.len(), kv_count * group];
                self.run(Pass::Queries, over_tiles)?;
                self.run(Pass::BackWalk, over_tiles)?;
                self.run(Pass::Own, over_tiles)?;
                self.run(Pass::Keys, [blocks, kv_count])?;
            }
            self.run(Pass::PrepareBackward, [blocks, kv_count])?;
        }
        let sums = (&column_sums, &row_sums);
        let dlog_gates = grads.dlog_gates.as_ref();
        self.attention.gate_gradient_of_rows(&self.tiling, &self.tile, sums, dlog_gates)?;
        Ok(grads)
    }
}

impl Cuda {
    /// The forward pass; the operands are validated.
    pub(crate) fn path_forward(
        &self,
        inputs: &PathInputs<'_>,
        spec: &AttentionSpec,
    ) -> Result<AttentionOut> {
        let (u, plain) = (self.real(inputs.u)?, inputs.attention());
        let at = u.address();
        match self.precision {
            Precision::F32 => {
                self.output_of::<f32>(&plain, spec, |x| PathCall::new(x, at, false)?.forward())
            }
            Precision::Bf16 => {
                self.output_of::<bf16>(&plain, spec, |x| PathCall::new(x, at, false)?.forward())
            }
        }
    }

    fn path_gradients<T: Activation>(
        &self,
        d_out: &Tensor,
        inputs: &PathInputs<'_>,
        out: &AttentionOut,
        spec: &AttentionSpec,
    ) -> Result<PathGrads> {
        let u: Operand<'_> = self.real(inputs.u)?;
        let (o, lse) = (self.activation(&out.o)?, self.real(&out.lse)?);
        let (mut du, _) = self.output(inputs.u.shape(), DType::F32, inputs.u.device())?;
        // Rows outside every segment have no gradient.
        self.fill_with(&mut du, 0.0)?;
        let du_at = crate::backend::storage::memory(&du)?.data.address();
        let grads = self.gradients_of::<T>(d_out, &inputs.attention(), spec, |x, d_out| {
            PathCall::new(&x, u.address(), true)?.backward(
                (o.address(), lse.address()),
                d_out,
                du_at,
            )
        })?;
        Ok(PathGrads { dq: grads.dq, dk: grads.dk, dv: grads.dv, du, dlog_gates: grads.dlog_gates })
    }
}

impl PathOps for Cuda {
    fn path_attention_fwd(
        &self,
        inputs: &PathInputs<'_>,
        spec: &AttentionSpec,
    ) -> fox_tensor::Result<AttentionOut> {
        fox_tensor::check_path_attention_fwd(self, inputs, spec)?;
        let _span = self.span("path fwd")?;
        Ok(self.path_forward(inputs, spec)?)
    }

    fn path_attention_bwd(
        &self,
        d_out: &Tensor,
        inputs: &PathInputs<'_>,
        out: &AttentionOut,
        spec: &AttentionSpec,
    ) -> fox_tensor::Result<PathGrads> {
        fox_tensor::check_path_attention_bwd(self, d_out, inputs, out, spec)?;
        let _span = self.span("path bwd")?;
        Ok(match self.precision {
            Precision::F32 => self.path_gradients::<f32>(d_out, inputs, out, spec)?,
            Precision::Bf16 => self.path_gradients::<bf16>(d_out, inputs, out, spec)?,
        })
    }
}
