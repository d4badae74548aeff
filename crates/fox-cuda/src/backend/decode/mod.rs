//! Steps of one token: the whole model in one launch.

mod shape;
mod tables;

use std::sync::{Mutex, PoisonError};

use fox_tensor::{DType, DecodeBlock, DecodeKeys, DecodeOut, DecodeShape, DecodeStep, Segment};

use super::thin::MAX_BATCH;
use super::{Cuda, Precision};
use crate::{Buffer, Result, Source};
pub(super) use shape::variants;
use shape::{Build, MAX_GROUP, Params, THREADS, shape_params};
use tables::Tables;

/// What thread blocks have sent each other, and the epoch that comes next; see decode.cuh. The memory is kept,
/// because words of the past must not look like new ones.
#[derive(Default)]
pub(super) struct Mailbox(Mutex<Option<(Buffer<u64>, i32)>>);

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
        let fits = self.precision == Precision::Bf16
            && self.gpu.architecture().major >= 9
            && (1..=MAX_BATCH).contains(&batch)
            && [width, inner].iter().all(|width| width.is_multiple_of(8))
            && matches!(shape.head_dim, 64 | 128 | 256)
            && shape.heads / shape.kv_heads <= MAX_GROUP
            && step.segments.len() == batch
            && step.segments.as_slice().iter().enumerate().all(single)
            && step.blocks.iter().all(own);
        let limit = self.gpu.shared_bytes();
        let build = Build::new((width, widest), step.blocks.len(), shape.head_dim, batch, limit);
        build.filter(|_| fits)
    }

    /// The logits of one token for each sequence; `None` when the step is not of the kind the kernel knows.
    pub(super) fn decode(&self, mut step: DecodeStep<'_>) -> Result<Option<DecodeOut>> {
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
        let log_gates = match paged && params.gated == 1 {
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
            layers: layers.address(),
            input: h.address(),
            norm: self.real_address(step.norm)?,
            head: self.weight_address(step.head)?,
            logits: logits_at,
            rope: rope.as_ref().map_or(0, |table| table.address()),
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
            .get(defines.clone(), || self.gpu.kernel(Source::DECODE, &defines, "decode_step"))?;
        let grid = self.gpu.processors();
        let (batch, width) = (params.batch, params.width);
        let layers = params.layer_count as usize;
        let (heads, splits) = (params.heads as usize, params.splits as usize);
        let partial = if splits > 1 { batch as usize * heads * splits * (head_dim + 4) } else { 0 };
        let mail = layers * params.layer_words as usize;
        // Launches must get to the stream in the order of their epochs.
        let mut mailbox = self.mailbox.0.lock().unwrap_or_else(PoisonError::into_inner);
        let epoch = mailbox.as_ref().map_or(1, |(_, epoch)| *epoch);
        if mailbox.as_ref().is_none_or(|(words, _)| words.len() < mail + partial) {
            let room = (mail + partial).next_power_of_two();
            *mailbox = Some((self.gpu.zeros(room)?, epoch));
        }
        let Some((words, next)) = mailbox.as_mut() else { return Ok(()) };
        params.mail = words.address();
        params.partial = words.address() + (8 * mail) as u64;
        params.epoch = epoch;
        let launch = kernel.launch([grid, 1, 1], THREADS as u32 + 32).shared(build.shared as u32);
        let shapes = || format!("{batch} rows of {width}, {} layers", params.layer_count);
        // SAFETY: parameters as declared in decode.cuh; the buffers have the sizes named there, and the
        // caches have room for every segment's keys.
        unsafe { launch.cooperative().arg(&params).run(shapes)? };
        *next = epoch.wrapping_add(params.layer_count);
        Ok(())
    }
}
