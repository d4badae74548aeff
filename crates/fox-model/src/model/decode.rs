//! Decoding: new tokens of each sequence against a decode state.

use fox_cache::Cache;
use fox_tensor::{DType, DecodeShape, DecodeStep, Segment, Segments, Tape, Tensor, Var};

use super::{ForwardOptions, Model};
use crate::block::Block;
use crate::{Error, Result};

impl Model {
    /// Feeds each sequence its new tokens and returns the logits after the last of them
    /// `[batch, V]`. The row of a sequence without new tokens is 0.
    pub fn decode(
        &self,
        tokens: &[&[i32]],
        cache: &mut Cache,
        options: &ForwardOptions,
    ) -> Result<Tensor> {
        let mut segments = Vec::with_capacity(tokens.len());
        let mut start = 0;
        for new in tokens {
            let len = new.len();
            segments.push(Segment { q_start: start, q_len: len, k_start: start, k_len: len });
            start += len;
        }
        if start == 0 {
            return Err(Error::Argument("a decode step without tokens".into()));
        }
        let segments = Segments::new(segments)?;
        let ids = self.device.from_i32(&tokens.concat(), [start])?;
        let mut tape = Tape::inference(&self.device);
        if let Some(logits) = self.decode_step(&mut tape, &ids, &segments, cache)? {
            return Ok(logits);
        }
        let hidden = self.forward(&mut tape, &ids, &segments, Some(cache), options)?;
        let states = hidden.states.value();
        let mut last = self.device.zeros([tokens.len(), states.cols()], DType::F32)?;
        for (b, s) in segments.as_slice().iter().enumerate().filter(|(_, s)| s.q_len > 0) {
            self.device.backend().copy_rows(states, s.q_start + s.q_len - 1, &mut last, b, 1)?;
        }
        Ok(self.logits(&mut tape, &Var::constant(last))?.value().clone())
    }

    /// What all blocks have in common; `None` where they differ, or only go op by op.
    pub(super) fn decode_shape(&self) -> Option<DecodeShape> {
        let mut shapes = self.structure.blocks.iter().map(Block::decode_shape);
        let first = shapes.next()?;
        if shapes.all(|other| other == first) { first } else { None }
    }

    /// [`Model::decode`] of one token for each sequence, where the device does that as a whole.
    fn decode_step(
        &self,
        tape: &mut Tape<'_>,
        ids: &Tensor,
        segments: &Segments,
        cache: &mut Cache,
    ) -> Result<Option<Tensor>> {
        let Some(decode) = self.device.backend().caps().decode else { return Ok(None) };
        let single = segments.as_slice().iter().all(|s| s.q_len == 1);
        let Some(shape) = self.decode_shape().filter(|_| single) else { return Ok(None) };
        let placed = cache.begin(segments)?;
        cache.reserve_one()?;
        let layers = self.structure.blocks.iter().zip(cache.layers_mut());
        let blocks = layers.map(|(block, state)| block.decode(&self.params, state.past()?));
        let Some(blocks) = blocks.collect::<Option<Vec<_>>>() else { return Ok(None) };
        let table = self.params.var(self.structure.embeddings);
        let h = tape.embedding(&table, ids, self.config.untrained_token())?;
        let step = DecodeStep {
            h: h.value(),
            segments: &placed,
            shape,
            blocks,
            norm: self.params.value(self.structure.norm),
            head: self.params.value(self.structure.lm_head),
        };
        let Some(out) = decode.decode_step(step)? else { return Ok(None) };
        cache.stage(out.last, out.log_gates);
        cache.commit(segments)?;
        Ok(Some(out.logits))
    }
}
