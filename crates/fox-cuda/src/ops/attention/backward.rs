//! Attention backward: row statistics, tile plan, main kernel, conversion of dQ, gate gradient.

use std::sync::Arc;

use fox_tensor::Mask;
use half::bf16;

use super::Attention;
use super::gates::GradientInputs;
use super::launch_cache::TileKey;
use super::plan::{PlanRanges, PlanSpans};
use super::rows::{COUNTER_INTS, SUMS, dq_parts, dq_scratch_len};
use super::spans::{SpanGradients, dq_len};
use super::tensor_map::TensorMap;
use super::tiles::TileConfig;
use super::tiling::{BlockRef, Segment, SpanTables, Tiling};
use crate::params::{ConstPtr, Float2, Float4, Int2, Ptr, kernel_params};
use crate::source::source;
use crate::{Buffer, Error, Float, Result, Source};

pub(super) const BACKWARD_SM90: Source = source!(
    "attention_bwd_sm90",
    ["backward_fragments.cuh", "backward_consumer.cuh", "backward_wide_consumers.cuh"],
    [Segment, BlockRef, BackwardParams]
);

/// Result of the backward.
#[derive(Debug)]
pub struct AttentionGrads<T> {
    /// `[R_q, H * d]`.
    pub dq: Buffer<T>,
    /// `[R_k, H_kv * d]`.
    pub dk: Buffer<T>,
    /// `[R_k, H_kv * d]`.
    pub dv: Buffer<T>,
    /// `[R_k, H]`; present when there are gates.
    pub dlog_gates: Option<Buffer<f32>>,
}

kernel_params! {
    struct BackwardParams {
        /// `[R_k, H_kv * d]`, like `dv`.
        dk: Ptr<bf16>,
        dv: Ptr<bf16>,
        /// `[heads][gate_stride]`.
        column_sums: Ptr<f32>,
        /// `[heads][m_tiles][DQ_PARTS][DQ_FLOATS]`.
        dq: Ptr<f32>,
        /// `[heads][m_tiles][DQ_PARTS]`.
        semaphores: Ptr<i32>,
        /// `[heads][gate_stride]`.
        gates: ConstPtr<Float2>,
        /// Gate prefix hi, lo, delta, lse, `[heads][m_tiles * BLOCK_M]`.
        rows: ConstPtr<Float4>,
        segments: ConstPtr<Segment>,
        /// In scheduling order.
        n_tiles: ConstPtr<BlockRef>,
        /// Query tiles `begin, end` of each key tile `[heads][n_tiles]`; bidirectional: at and after its keys, then before.
        ranges: ConstPtr<Int2>,
        /// Key tiles `begin, end` of each query tile `[heads][m_tiles]`.
        spans: ConstPtr<Int2>,
        next_tile: Ptr<i32>,
        n_tile_count: usize,
        m_tile_count: usize,
        heads: usize,
        kv_heads: usize,
        /// Key heads processed together, to fit the L2 cache.
        group_heads: usize,
        /// Key heads at the end of the schedule that run first keys first.
        reversed_heads: usize,
        head_dim: usize,
        gate_stride: usize,
        window: usize,
        scale: f32,
        scale_log2: f32,
    }
}

/// Visible tile ranges of the backward.
pub(in crate::ops) struct BackwardPlan {
    /// Key tiles `begin, end` of each query tile `[heads][m_tiles][2]`.
    pub(in crate::ops) spans: Buffer<i32>,
    /// Query tiles `begin, end` of each key tile `[heads][n_tiles][2]`; twice as many where the mask is bidirectional.
    ranges: Buffer<i32>,
}

impl<T: Float> Attention<'_, T> {
    /// Gradients of [`forward`](Attention::forward) from its result and the gradient of its output,
    /// `[R_q, H * d]`.
    pub fn backward(
        &self,
        o: &Buffer<T>,
        lse: &Buffer<f32>,
        d_out: &Buffer<T>,
    ) -> Result<AttentionGrads<T>> {
        let grads = self.alloc_gradients()?;
        self.backward_into((o, lse), d_out, &grads)?;
        Ok(grads)
    }

    /// [`backward`](Attention::backward) into existing buffers of the operands' sizes.
    pub fn backward_into(
        &self,
        (o, lse): (&Buffer<T>, &Buffer<f32>),
        d_out: &Buffer<T>,
        grads: &AttentionGrads<T>,
    ) -> Result<()> {
        let gates = |g: Option<&Buffer<f32>>| g.map(Buffer::len);
        let made = (grads.dq.len(), grads.dk.len(), grads.dv.len());
        let inputs = &self.inputs;
        if made != (inputs.q.len(), inputs.k.len(), inputs.v.len())
            || gates(grads.dlog_gates.as_ref()) != gates(inputs.log_gates)
            || (o.len(), lse.len()) != (inputs.q.len(), self.q_rows * self.spec.heads)
            || self.sinks.is_some_and(|sinks| sinks.len() != self.spec.heads)
            || [o, d_out, &grads.dq, &grads.dk, &grads.dv].iter().any(|x| !self.gpu.owns(x))
            || [Some(lse), grads.dlog_gates.as_ref()].iter().flatten().any(|x| !self.gpu.owns(x))
        {
            let saved = (o.len(), lse.len());
            let detail =
                format!("outputs of {saved:?} and gradients of {made:?} elements do not fit");
            return Err(Error::argument("attention_bwd", detail));
        }
        let key = self.tile_key(false);
        let tile = self.tile(key)?;
        let tiling = self.tiling(&tile)?;
        self.check_gradient(d_out)?;
        self.clear_uncovered_gradients(&tiling, grads)?;
        if tiling.m_tile_count == 0 {
            return Ok(());
        }
        if tile.source == BACKWARD_SM90 {
            self.backward_hopper(&tiling, (key, &tile), (o, lse), d_out, grads)
        } else {
            self.backward_two_pass(&tiling, (key, &tile), (o, lse), d_out, grads)
        }
    }

    /// Buffers for the gradients, zeroed for rows that no query reaches.
    pub(in crate::ops) fn alloc_cleared_gradients(
        &self,
        tiling: &Tiling,
        d_out: &Buffer<T>,
    ) -> Result<AttentionGrads<T>> {
        self.check_gradient(d_out)?;
        let grads = self.alloc_gradients()?;
        self.clear_uncovered_gradients(tiling, &grads)?;
        Ok(grads)
    }

    fn check_gradient(&self, d_out: &Buffer<T>) -> Result<()> {
        if d_out.len() != self.inputs.q.len() {
            return Err(Error::argument(
                "attention_bwd",
                format!("d_out has {} elements, q {}", d_out.len(), self.inputs.q.len()),
            ));
        }
        Ok(())
    }

    fn alloc_gradients(&self) -> Result<AttentionGrads<T>> {
        Ok(AttentionGrads {
            dq: self.gpu.alloc(self.inputs.q.len())?,
            dk: self.gpu.alloc(self.inputs.k.len())?,
            dv: self.gpu.alloc(self.inputs.v.len())?,
            dlog_gates: match self.inputs.log_gates {
                Some(g) => Some(self.gpu.alloc(g.len())?),
                None => None,
            },
        })
    }

    /// Rows outside every segment, and keys without queries, have gradient zero.
    fn clear_uncovered_gradients(&self, tiling: &Tiling, grads: &AttentionGrads<T>) -> Result<()> {
        if tiling.q_covered < self.q_rows {
            self.gpu.zero(&grads.dq)?;
        }
        if tiling.k_covered < self.k_rows || tiling.m_tile_count == 0 {
            self.gpu.zero(&grads.dk)?;
            self.gpu.zero(&grads.dv)?;
            if let Some(dlog_gates) = &grads.dlog_gates {
                self.gpu.zero(dlog_gates)?;
            }
        }
        Ok(())
    }

    fn backward_hopper(
        &self,
        tiling: &Tiling,
        (key, tile): (TileKey, &TileConfig),
        (o, lse): (&Buffer<T>, &Buffer<f32>),
        d_out: &Buffer<T>,
        grads: &AttentionGrads<T>,
    ) -> Result<()> {
        let (heads, kv_heads) = (self.spec.heads, self.spec.kv_heads);
        let head_dim = self.spec.head_dim;
        let gates = self.gate_prefix(tiling)?;
        let m_tiles = heads * tiling.m_tile_count;
        // Tile counter and semaphores.
        let counters = self.gpu.alloc::<i32>(COUNTER_INTS + dq_parts(head_dim) * m_tiles)?;
        let rows =
            self.backward_rows(tiling, tile, (o, lse), d_out, gates.as_ref(), Some(&counters))?;
        let plan = self.plan_backward(tiling, tile, gates.as_ref())?;
        let dq = self.gpu.alloc::<f32>(m_tiles * dq_scratch_len(head_dim, self.spec.mask))?;
        let column_sums = self.gpu.alloc::<f32>(heads * tiling.gate_stride)?;
        // Q, dO and the f32 dQ of a head's queries are reused by all of its key tiles.
        let group_heads = self.heads_per_group(tiling.longest_q * (heads / kv_heads), 8 * head_dim);
        // Enough reversed heads to fill the GPU twice; see the kernel.
        let reversed_heads = match self.spec.mask {
            Mask::Causal => {
                (2 * self.gpu.processors() as usize).div_ceil(tiling.n_tile_count).min(kv_heads / 2)
            }
            Mask::Bidirectional => 0,
        };
        let params = BackwardParams {
            dk: grads.dk.address().into(),
            dv: grads.dv.address().into(),
            column_sums: column_sums.address().into(),
            dq: dq.address().into(),
            semaphores: (counters.address() + 4 * COUNTER_INTS as u64).into(),
            gates: gates.as_ref().map_or(0, Buffer::address).into(),
            rows: rows.address().into(),
            segments: tiling.segments.address().into(),
            n_tiles: tiling.n_tiles.address().into(),
            ranges: plan.ranges.address().into(),
            spans: plan.spans.address().into(),
            next_tile: counters.address().into(),
            n_tile_count: tiling.n_tile_count,
            m_tile_count: tiling.m_tile_count,
            heads,
            kv_heads,
            group_heads,
            reversed_heads,
            head_dim,
            gate_stride: tiling.gate_stride,
            window: self.window(),
            scale: self.spec.scale,
            scale_log2: self.scale_log2(),
        };
        let q = TensorMap::new(self.inputs.q, heads, head_dim, tile.block_m)?;
        let k = TensorMap::new(self.inputs.k, kv_heads, head_dim, tile.block_n)?;
        let v = TensorMap::new(self.inputs.v, kv_heads, head_dim, tile.block_n)?;
        let d = TensorMap::new(d_out, heads, head_dim, tile.block_m)?;
        let kernel = self.main_kernel(key, tile, "attention_bwd")?;
        let work = tiling.n_tile_count * kv_heads;
        let blocks = (self.gpu.processors() as usize).min(work);
        let launch = kernel.launch([blocks, 1, 1], tile.threads).shared(tile.shared);
        let launch = launch.opaque(q).opaque(k).opaque(v).opaque(d).params(params)?;
        // SAFETY: `new` and `backward_into` checked the operands; scratch is allocated for this tiling.
        unsafe { launch.run(|| self.shapes())? };
        let row_sums = self.finish_dq(tiling, tile, &dq, &grads.dq)?;
        if self.spec.mask == Mask::Bidirectional {
            let sums = (&column_sums, &row_sums);
            return self.gate_gradient_of_rows(tiling, tile, sums, grads.dlog_gates.as_ref());
        }
        if let Some(dlog_gates) = &grads.dlog_gates {
            let inputs = GradientInputs {
                column_sums: column_sums.address().into(),
                row_sums: row_sums.address().into(),
                rows: rows.address().into(),
                sinks: self.sinks.map_or(0, Buffer::address).into(),
                gate_stride: tiling.gate_stride,
                m_tile_count: tiling.m_tile_count,
                block_m: tile.block_m,
                rows_per_sum: tile.block_m / SUMS,
            };
            self.gate_gradient(tiling, inputs, dlog_gates)?;
        }
        Ok(())
    }

    /// The main kernel over spans: dK without the scale and dV `[R_k, H_kv * d]`, dQ without the scale in the order of
    /// accumulators `[heads][m_tiles][dq_scratch_len]`, and column sums `[heads][gate_stride]`. `rows` are the
    /// statistics of `q_rows` queries `[heads][q_rows]`.
    pub(super) fn backward_spans(
        &self,
        tables: &SpanTables,
        d_out: &Buffer<T>,
        x: &SpanGradients<'_, T>,
    ) -> Result<()> {
        let key = self.tile_key(false);
        let tile = self.tile(key)?;
        let (heads, kv_heads) = (self.spec.heads, self.spec.kv_heads);
        let head_dim = self.spec.head_dim;
        let fits = self.q_rows.is_multiple_of(tile.block_m)
            && d_out.len() == self.inputs.q.len()
            && x.rows.len() >= 4 * heads * self.q_rows
            && x.dq.len() >= heads * dq_len(head_dim, self.q_rows)
            && x.dk.len() == self.inputs.k.len()
            && x.dv.len() == self.inputs.k.len()
            && x.column_sums.len() >= heads * x.gate_stride;
        if !fits {
            return Err(Error::argument("attention over spans", "gradients unlike the operands"));
        }
        let m_tile_count = self.q_rows / tile.block_m;
        let counters = self.zeros(COUNTER_INTS + dq_parts(head_dim) * heads * m_tile_count)?;
        let params = BackwardParams {
            dk: x.dk.address().into(),
            dv: x.dv.address().into(),
            column_sums: x.column_sums.address().into(),
            dq: x.dq.address().into(),
            semaphores: (counters.address() + 4 * COUNTER_INTS as u64).into(),
            gates: x.gates.map_or(0, Buffer::address).into(),
            rows: x.rows.address().into(),
            segments: tables.segments.address().into(),
            n_tiles: tables.n_tiles.address().into(),
            ranges: tables.ranges.address().into(),
            // Read for reversed heads only.
            spans: 0.into(),
            next_tile: counters.address().into(),
            n_tile_count: tables.n_tile_count,
            m_tile_count,
            heads,
            kv_heads,
            // The tiles of keys of a span run together, of all heads: they share its queries, and the shortest come last.
            group_heads: kv_heads,
            reversed_heads: 0,
            head_dim,
            gate_stride: x.gate_stride,
            window: 0,
            scale: 1.0,
            scale_log2: self.scale_log2(),
        };
        let q = TensorMap::new(self.inputs.q, heads, head_dim, tile.block_m)?;
        let k = TensorMap::new(self.inputs.k, kv_heads, head_dim, tile.block_n)?;
        let v = TensorMap::new(self.inputs.v, kv_heads, head_dim, tile.block_n)?;
        let d = TensorMap::new(d_out, heads, head_dim, tile.block_m)?;
        let kernel = self.main_kernel(key, &tile, "attention_bwd")?;
        let blocks = (self.gpu.processors() as usize).min(tables.n_tile_count * kv_heads);
        let launch = kernel.launch([blocks, 1, 1], tile.threads).shared(tile.shared);
        let launch = launch.opaque(q).opaque(k).opaque(v).opaque(d).params(params)?;
        // SAFETY: rows and gradients fit these queries and keys, whose rows the tables stay within: they were cut from
        // segments that `new` checked.
        unsafe { launch.run(|| self.shapes()) }
    }

    pub(in crate::ops) fn plan_backward(
        &self,
        tiling: &Tiling,
        tile: &TileConfig,
        gates: Option<&Buffer<f32>>,
    ) -> Result<Arc<BackwardPlan>> {
        self.plan(tiling, &tiling.backward_plans, |bounds| {
            let (heads, m_count, n_count) =
                (self.spec.heads, tiling.m_tile_count, tiling.n_tile_count);
            let p = self.plan_params(tiling, tile, gates, bounds);
            let spans = self.gpu.alloc::<i32>(2 * heads * m_count)?;
            let sides = if self.spec.mask == Mask::Causal { 1 } else { 2 };
            let ranges = self.gpu.alloc::<i32>(2 * heads * n_count * sides)?;
            let grid = |tiles: usize| [(heads * tiles).div_ceil(128), 1, 1];
            let params = PlanSpans { p, spans: spans.address().into() };
            self.run_plan("plan_backward_spans", grid(m_count), 128, params)?;
            let params = PlanRanges {
                p,
                spans: spans.address().into(),
                n_tiles: tiling.n_tiles.address().into(),
                n_tile_count: n_count,
                ranges: ranges.address().into(),
            };
            self.run_plan("plan_backward_ranges", grid(n_count), 128, params)?;
            Ok(BackwardPlan { spans, ranges })
        })
    }
}
