//! Decoding: new tokens of each sequence against a decode state.

use fox_cache::Cache;
use fox_tensor::{DType, Segment, Segments, Tape, Tensor, Var};

use super::{ForwardOptions, Model};
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
        let hidden = self.forward(&mut tape, &ids, &segments, Some(cache), options)?;
        let states = hidden.states.value();
        let mut last = self.device.zeros([tokens.len(), states.cols()], DType::F32)?;
        for (b, s) in segments.as_slice().iter().enumerate().filter(|(_, s)| s.q_len > 0) {
            self.device.backend().copy_rows(states, s.q_start + s.q_len - 1, &mut last, b, 1)?;
        }
        Ok(self.logits(&mut tape, &Var::constant(last))?.value().clone())
    }
}
