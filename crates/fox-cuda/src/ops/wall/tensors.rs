//! The op trait of Wall attention.
//!
//! The kernels want queries and keys in the same rows. Segments with fewer queries than keys, and past blocks, are
//! copied to such rows first; that is the case in decoding, where the rows are few.

use fox_tensor::{
    Acp, AttentionOut, AttentionSpec, DType, Memory, Segment, Segments, Tensor, WALL_BLOCK,
    WallBlock, WallGrads, WallInputs, WallOps, tile_words,
};
use half::bf16;

use super::super::attention::Attention;
use super::super::attention::tensors::typed;
use super::{FORWARD, Past, PastBlock, THREADS, Wall, WallParams, tile};
use crate::backend::storage::{Activation, Data};
use crate::backend::{Cuda, Operand, Precision};
use crate::{Buffer, Result};

/// Operands whose queries and keys have the same rows.
struct SharedRows {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decays: Tensor,
    log_gates: Option<Tensor>,
    spec: AttentionSpec,
    /// Row of the first query of each segment.
    starts: Vec<usize>,
}

impl SharedRows {
    fn inputs(&self) -> WallInputs<'_> {
        WallInputs {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            log_decays: &self.log_decays,
            log_gates: self.log_gates.as_ref(),
        }
    }
}

/// Whether queries and keys have the same rows already.
fn share_rows(inputs: &WallInputs<'_>, spec: &AttentionSpec) -> bool {
    let same = |s: &Segment| s.q_start == s.k_start && s.q_len == s.k_len;
    inputs.q.rows() == inputs.k.rows() && spec.segments.as_slice().iter().all(same)
}

/// Visible tiles of each head, in blocks that are counted from the first key held: none are pruned.
fn tile_counts(past: &[Vec<WallBlock<'_>>], spec: &AttentionSpec) -> u64 {
    let of = |(index, s): (usize, &Segment)| {
        let first = past.get(index).map_or(0, Vec::len) * WALL_BLOCK + s.offset();
        let blocks = first / WALL_BLOCK..(first + s.q_len).div_ceil(WALL_BLOCK);
        let oldest = |block: usize| {
            let row = (block * WALL_BLOCK).max(first);
            spec.window.map_or(0, |window| (row + 1).saturating_sub(window) / WALL_BLOCK)
        };
        blocks.map(|block| (block + 1 - oldest(block)) as u64).sum::<u64>()
    };
    let segments = spec.segments.as_slice().iter().enumerate().filter(|(_, s)| s.q_len > 0);
    segments.map(of).sum()
}

impl Cuda {
    /// Rows `from` of `x` in rows `to` of a tensor of `rows` rows, the others 0.
    fn scattered(
        &self,
        x: &Tensor,
        rows: usize,
        places: impl Iterator<Item = (usize, usize, usize)>,
    ) -> fox_tensor::Result<Tensor> {
        let mut out = x.device().zeros([rows, x.cols()], x.dtype())?;
        for (from, to, count) in places.filter(|(_, _, count)| *count > 0) {
            self.copy_rows(x, from, &mut out, to, count)?;
        }
        Ok(out)
    }

    /// The operands with past blocks and keys of each segment in consecutive rows, which its queries share.
    fn share_rows(
        &self,
        inputs: &WallInputs<'_>,
        past: &[Vec<WallBlock<'_>>],
        spec: &AttentionSpec,
    ) -> fox_tensor::Result<SharedRows> {
        let segments = spec.segments.as_slice();
        let held = |index: usize| past.get(index).map_or(0, Vec::len) * WALL_BLOCK;
        let mut rows = 0;
        let (mut first, mut starts, mut placed) = (Vec::new(), Vec::new(), Vec::new());
        for (index, s) in segments.iter().enumerate() {
            first.push(rows + held(index));
            starts.push(rows + held(index) + s.offset());
            let len = if s.q_len > 0 { held(index) + s.k_len } else { 0 };
            placed.push(Segment { q_start: rows, q_len: len, k_start: rows, k_len: len });
            rows += held(index) + s.k_len;
        }
        let queries = segments.iter().zip(&starts).map(|(s, &start)| (s.q_start, start, s.q_len));
        let keys = || segments.iter().zip(&first).map(|(s, &at)| (s.k_start, at, s.k_len));
        let own = |x: &Tensor| self.scattered(x, rows, keys());
        // Keys of past blocks are not in the bounds on the logits.
        let acp = if past.iter().all(Vec::is_empty) { spec.acp.clone() } else { Acp::Off };
        let mut shared = SharedRows {
            q: self.scattered(inputs.q, rows, queries)?,
            k: own(inputs.k)?,
            v: own(inputs.v)?,
            log_decays: own(inputs.log_decays)?,
            log_gates: inputs.log_gates.map(own).transpose()?,
            spec: AttentionSpec { segments: Segments::new(placed)?, acp, ..spec.clone() },
            starts,
        };
        for (index, blocks) in past.iter().enumerate() {
            for (n, block) in blocks.iter().enumerate() {
                let row = first[index] - held(index) + n * WALL_BLOCK;
                self.copy_rows(block.v, 0, &mut shared.v, row, WALL_BLOCK)?;
                if let (Some(from), Some(to)) = (block.log_gates, &mut shared.log_gates) {
                    self.copy_rows(from, 0, to, row, WALL_BLOCK)?;
                }
            }
        }
        Ok(shared)
    }

    /// The rows of the queries of `x`, whose rows are shared, as a tensor like `like`; other rows are `rest`.
    fn query_rows(
        &self,
        x: &Tensor,
        (starts, segments): (&[usize], &Segments),
        rows: usize,
        rest: f32,
    ) -> fox_tensor::Result<Tensor> {
        let device = x.device();
        let mut out = device.zeros([rows, x.cols()], x.dtype())?;
        if rest != 0.0 {
            self.fill(&mut out, rest)?;
        }
        for (s, &start) in segments.as_slice().iter().zip(starts).filter(|(s, _)| s.q_len > 0) {
            self.copy_rows(x, start, &mut out, s.q_start, s.q_len)?;
        }
        Ok(out)
    }

    fn wall_forward<T: Activation>(
        &self,
        inputs: &WallInputs<'_>,
        past: &[Vec<WallBlock<'_>>],
        spec: &AttentionSpec,
    ) -> Result<AttentionOut> {
        let decays = self.operand(inputs.log_decays, DType::F32)?;
        let segments = spec.segments.as_slice();
        let mut held: Vec<Operand<'_>> = Vec::new();
        let (mut blocks, mut tile0) = (Vec::new(), 0);
        for (s, own) in segments.iter().zip(past).filter(|(s, _)| s.k_len > 0) {
            for (n, block) in own.iter().enumerate() {
                let (far, decay) =
                    (self.activation(block.k)?, self.operand(block.decay, DType::F32)?);
                blocks.push(PastBlock {
                    far: far.address(),
                    decay: decay.address(),
                    row: s.k_start + n * WALL_BLOCK,
                    tile: tile0 + n,
                });
                held.extend([far, decay]);
            }
            tile0 += s.k_len.div_ceil(WALL_BLOCK);
        }
        let past = match blocks.is_empty() {
            true => None,
            false => {
                let closed: Vec<i32> = past.iter().map(|blocks| blocks.len() as i32).collect();
                Some(Past { closed: self.gpu.upload(&closed)?, blocks })
            }
        };
        self.output_of::<T>(&inputs.attention(), spec, |attention| {
            let log_decays: &Buffer<f32> = typed(&decays)?;
            Wall { attention: *attention, log_decays, past }.forward()
        })
    }

    fn wall_gradients<T: Activation>(
        &self,
        d_out: &Tensor,
        inputs: &WallInputs<'_>,
        out: &AttentionOut,
        spec: &AttentionSpec,
    ) -> Result<WallGrads> {
        let decays = self.operand(inputs.log_decays, DType::F32)?;
        let (o, lse) = (self.activation(&out.o)?, self.operand(&out.lse, DType::F32)?);
        let mut dlog_decays = None;
        let backward = |attention: Attention<'_, T>, d_out: &Buffer<T>| {
            let wall = Wall { attention, log_decays: typed(&decays)?, past: None };
            let grads = wall.backward(typed(&o)?, typed(&lse)?, d_out)?;
            dlog_decays = Some(grads.dlog_decays);
            Ok(grads.attention)
        };
        let grads = self.gradients_of::<T>(d_out, &inputs.attention(), spec, backward)?;
        let like = inputs.log_decays;
        // The closure has run, or there was an error.
        let dlog_decays = match dlog_decays {
            Some(x) => x,
            None => self.gpu.zeros(like.len())?,
        };
        let dlog_decays = self.tensor(Data::F32(dlog_decays), like.shape(), like.device());
        Ok(WallGrads {
            dq: grads.dq,
            dk: grads.dk,
            dv: grads.dv,
            dlog_decays,
            dlog_gates: grads.dlog_gates,
        })
    }
}

impl WallOps for Cuda {
    fn wall_attention_fwd(
        &self,
        inputs: &WallInputs<'_>,
        past: &[Vec<WallBlock<'_>>],
        spec: &AttentionSpec,
    ) -> fox_tensor::Result<AttentionOut> {
        fox_tensor::check_wall_attention_fwd(self, inputs, past, spec)?;
        let _span = self.span("wall fwd")?;
        let forward = |inputs: &WallInputs<'_>, spec: &AttentionSpec| match self.precision {
            Precision::F32 => self.wall_forward::<f32>(inputs, past, spec),
            Precision::Bf16 => self.wall_forward::<bf16>(inputs, past, spec),
        };
        if past.is_empty() && share_rows(inputs, spec) {
            return Ok(forward(inputs, spec)?);
        }
        let shared = self.share_rows(inputs, past, spec)?;
        let out = forward(&shared.inputs(), &shared.spec)?;
        let places = (&shared.starts[..], &spec.segments);
        let counts = vec![[tile_counts(past, spec); 2]; spec.heads];
        Ok(AttentionOut {
            o: self.query_rows(&out.o, places, inputs.q.rows(), 0.0)?,
            lse: self.query_rows(&out.lse, places, inputs.q.rows(), f32::NEG_INFINITY)?,
            tiles: inputs.q.device().from_i32(&tile_words(&counts), [spec.heads, 4])?,
        })
    }

    fn wall_attention_bwd(
        &self,
        d_out: &Tensor,
        inputs: &WallInputs<'_>,
        out: &AttentionOut,
        spec: &AttentionSpec,
    ) -> fox_tensor::Result<WallGrads> {
        fox_tensor::check_wall_attention_bwd(self, d_out, inputs, out, spec)?;
        let _span = self.span("wall bwd")?;
        let backward = |d_out: &Tensor,
                        inputs: &WallInputs<'_>,
                        out: &AttentionOut,
                        spec: &AttentionSpec| match self.precision {
            Precision::F32 => self.wall_gradients::<f32>(d_out, inputs, out, spec),
            Precision::Bf16 => self.wall_gradients::<bf16>(d_out, inputs, out, spec),
        };
        if share_rows(inputs, spec) {
            return Ok(backward(d_out, inputs, out, spec)?);
        }
        // Queries in the rows of their keys; rows without a query have no gradient.
        let (segments, rows) = (spec.segments.as_slice(), inputs.k.rows());
        let starts: Vec<usize> = segments.iter().map(|s| s.k_start + s.offset()).collect();
        let place = |x: &Tensor| {
            let places = segments.iter().zip(&starts);
            self.scattered(x, rows, places.map(|(s, &start)| (s.q_start, start, s.q_len)))
        };
        let full = |s: &Segment| {
            let len = if s.q_len > 0 { s.k_len } else { 0 };
            Segment { q_start: s.k_start, q_len: len, k_start: s.k_start, k_len: len }
        };
        let aligned = AttentionSpec {
            segments: Segments::new(segments.iter().map(full).collect())?,
            ..spec.clone()
        };
        let q = place(inputs.q)?;
        let out =
            AttentionOut { o: place(&out.o)?, lse: place(&out.lse)?, tiles: out.tiles.clone() };
        let inputs_here = WallInputs { q: &q, ..inputs.clone() };
        let grads = backward(&place(d_out)?, &inputs_here, &out, &aligned)?;
        let dq = self.query_rows(&grads.dq, (&starts, &spec.segments), inputs.q.rows(), 0.0)?;
        Ok(WallGrads { dq, ..grads })
    }

    fn wall_close_block(
        &self,
        k: &Tensor,
        log_decays: &Tensor,
        head_dim: usize,
    ) -> fox_tensor::Result<(Tensor, Tensor)> {
        fox_tensor::check_wall_close_block(self, k, log_decays, head_dim)?;
        let _span = self.span("wall close")?;
        let (width, device) = (log_decays.cols(), k.device());
        let (keys, decays) = (self.activation(k)?, self.operand(log_decays, DType::F32)?);
        let (far, far_at) = self.output([WALL_BLOCK, width], self.activations(), device)?;
        let (decay, decay_at) = self.output([1, width], DType::F32, device)?;
        let params = WallParams {
            k: keys.address().into(),
            log_decays: decays.address().into(),
            far: far_at.into(),
            decay: decay_at.into(),
            heads: width / head_dim,
            kv_heads: k.cols() / head_dim,
            head_dim,
            ..WallParams::default()
        };
        let config = tile(FORWARD, head_dim, false, self.precision == Precision::F32);
        let kernel = self.gpu.kernel(FORWARD, &config.defines, "wall_close")?;
        let launch = kernel.launch([width / head_dim, 1, 1], THREADS);
        // SAFETY: the operands are validated at entry; the outputs are allocated from their shapes.
        unsafe { launch.params(params)?.run(|| format!("k [{WALL_BLOCK}, {}]", k.cols()))? };
        Ok((far, decay))
    }
}
