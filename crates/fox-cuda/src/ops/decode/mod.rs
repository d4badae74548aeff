//! Steps of one token: the whole model in one launch.

mod shape;
mod tables;

use std::sync::{Mutex, PoisonError};

use fox_tensor::{
    DType, DecodeBlock, DecodeKeys, DecodeOps, DecodeOut, DecodeShape, DecodeStep, Segment, Tensor,
};

use crate::backend::{Cuda, Precision};
use crate::ops::linear::thin::MAX_BATCH;
use crate::ops::packed::Int8;
use crate::ops::paged::Page;
use crate::params::int;
use crate::source::source;
use crate::{Buffer, Result, Source};
use shape::{Build, MAX_GROUP, Params, Stage, THREADS, shape_params};
use tables::{Layer, Sequence, Tables};

const DECODE: Source = source!(
    "decode",
    ["decode.cuh", "decode_attention.cuh"],
    [Page, Sequence, Layer, Stage, Params]
);

/// Typical variants, for compilation checks.
pub(super) fn variants() -> Vec<(Source, Vec<String>)> {
    shape::typical().map(|build| (DECODE, build.defines())).collect()
}

/// The words of value and epoch that thread blocks exchange, and the epoch that comes next; see decode.cuh. The
/// memory is kept, because words of earlier steps must not look like new ones.
#[derive(Default)]
pub(crate) struct Exchange(Mutex<Option<(Buffer<u64>, i32)>>);

impl Cuda {
    /// What the kernel must be for this step, where it can be done in one launch at all.
    fn build_of(&self, step: &DecodeStep<'_>) -> Option<Build> {
        let (batch, width, shape) = (step.h.rows(), step.h.cols(), &step.shape);
        let inner = step.blocks.first()?.down.cols();
        let widest = width.max(inner).max(shape.heads * shape.head_dim);
        let single = |(b, s): (usize, &Segment)| s.q_len == 1 && s.q_start == b;
        let own = |block: &DecodeBlock<'_>| match &block.keys {
            DecodeKeys::Rows { k, v, gates } => {
                k.dtype() == DType::Bf16
                    && !(k.is_shared() || v.is_shared())
                    && gates.as_ref().is_none_or(|gates| !gates.is_shared())
            }
            DecodeKeys::Pages(_) => true,
        };
        // The kernel reads bf16.
        let wide = |w: &Tensor| matches!(Int8::of(w), Ok(None));
        let readable = |block: &DecodeBlock<'_>| {
            let weights = [block.q.weight, block.k.weight, block.v.weight, block.o_proj];
            let others = [block.gate_up, block.down].into_iter().chain(block.output_gate);
            weights.into_iter().chain(others).all(wide)
        };
        let fits = self.precision == Precision::Bf16
            && self.gpu.architecture().major >= 9
            && (1..=MAX_BATCH).contains(&batch)
            && [width, inner].iter().all(|width| width.is_multiple_of(8))
            && matches!(shape.head_dim, 64 | 128 | 256)
            && shape.heads / shape.kv_heads <= MAX_GROUP
            && step.segments.len() == batch
            && step.segments.as_slice().iter().enumerate().all(single)
            && step.blocks.iter().all(|block| own(block) && readable(block))
            && wide(step.head);
        let limit = self.gpu.shared_bytes();
        let build = Build::new((width, widest), step.blocks.len(), shape.head_dim, batch, limit);
        build.filter(|_| fits)
    }

    /// The logits of one token for each sequence; `None` when the step is not of the kind the kernel knows.
    pub(crate) fn decode(&self, mut step: DecodeStep<'_>) -> Result<Option<DecodeOut>> {
        let Some(build) = self.build_of(&step) else { return Ok(None) };
        let device = step.h.device().clone();
        let batch = step.h.rows();
        let DecodeShape { heads, head_dim, .. } = step.shape;
        let mut last = Vec::with_capacity(step.blocks.len());
        let mut tables = Tables::default();
        for block in &mut step.blocks {
            last.push(self.add_layer(block, batch, &mut tables)?);
        }
        let paged = !tables.dropped.is_empty();
        let mut params = shape_params(&step, build);
        let log_gates = match paged && params.gated {
            true => Some(self.output([tables.layers.len() * batch, heads], DType::F32, &device)?),
            false => None,
        };
        let layers =
            self.upload_tables(tables, batch, heads, log_gates.as_ref().map_or(0, |x| x.1))?;
        let rope = match step.shape.rope {
            Some(rope) => Some(self.rope_table(rope, head_dim, step.segments)?),
            None => None,
        };
        let h = self.activation(step.h)?;
        let (logits, logits_at) = self.output([batch, step.head.rows()], DType::F32, &device)?;
        params = Params {
            layers: layers.address().into(),
            input: h.address().into(),
            norm: self.real_address(step.norm)?.into(),
            head: self.weight_address(step.head)?.into(),
            logits: logits_at.into(),
            rope: rope.as_ref().map_or(0, |table| table.address()).into(),
            ..params
        };
        self.run_step(params, build, head_dim)?;
        // Memory of the stages goes back now: whatever uses it next comes later in the stream.
        Ok(Some(DecodeOut { logits, last, log_gates: log_gates.map(|(gates, _)| gates) }))
    }

    fn run_step(&self, mut params: Params, build: Build, head_dim: usize) -> Result<()> {
        let defines = build.defines();
        self.gpu.bind()?;
        let kernel = self
            .step_kernels
            .get(defines.clone(), || self.gpu.kernel(DECODE, &defines, "decode_step"))?;
        let grid = self.gpu.processors() as usize;
        let Params { batch, width, heads, splits, layer_count, .. } = params;
        let partial = if splits > 1 { batch * heads * splits * (head_dim + 4) } else { 0 };
        let exchanged = layer_count * params.layer_words;
        // Launches must get to the stream in the order of their epochs.
        let mut exchange = self.exchange.0.lock().unwrap_or_else(PoisonError::into_inner);
        let epoch = exchange.as_ref().map_or(1, |(_, epoch)| *epoch);
        if exchange.as_ref().is_none_or(|(words, _)| words.len() < exchanged + partial) {
            let len = (exchanged + partial).next_power_of_two();
            *exchange = Some((self.gpu.zeros(len)?, epoch));
        }
        let Some((words, next)) = exchange.as_mut() else { return Ok(()) };
        params.exchange = words.address().into();
        params.partial = (words.address() + (8 * exchanged) as u64).into();
        params.epoch = epoch;
        let after = epoch.wrapping_add(int("decode_step", "layer_count", layer_count)?);
        let launch = kernel.launch([grid, 1, 1], THREADS + 32).shared(build.shared).cooperative();
        let shapes = || format!("{batch} rows of {width}, {layer_count} layers");
        // SAFETY: the buffers have the sizes that the parameters say, and the caches have room for every
        // segment's keys.
        unsafe { launch.params(params)?.run(shapes)? };
        *next = after;
        Ok(())
    }
}

impl DecodeOps for Cuda {
    fn decode_step(&self, step: DecodeStep<'_>) -> fox_tensor::Result<Option<DecodeOut>> {
        Ok(self.timed("decode step", || self.decode(step))?)
    }
}
