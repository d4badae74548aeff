//! Embeddings: one vector for a text, from the hidden states of its tokens.

use fox_tensor::{Segments, Tape};

use super::{ForwardOptions, Model};
use crate::{Error, Result};

/// How the states of the tokens become one vector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean.
    #[default]
    Mean,
    /// The largest value of every channel.
    Max,
    /// The state of the first token.
    First,
    /// The state of the last token, the only one of a causal model that has seen the whole text.
    Last,
}

impl Model {
    /// A vector `[D]` of `tokens`, pooled from the states in front of the output projection. `start` is a start marker that
    /// is read, but not pooled: causal models are trained with one, encoders without.
    ///
    /// Every text is a forward pass by itself, so its vector does not depend on others.
    ///
    /// # Errors
    /// No tokens, or ids outside of the vocabulary.
    pub fn embed(
        &self,
        start: Option<i32>,
        tokens: &[i32],
        pooling: Pooling,
        options: &ForwardOptions,
    ) -> Result<Vec<f32>> {
        if tokens.is_empty() {
            return Err(Error::Argument("a text without tokens has no embedding".into()));
        }
        let ids: Vec<i32> = start.iter().chain(tokens).copied().collect();
        let (rows, width) = (ids.len(), self.config.hidden_size);
        let mut tape = Tape::inference(&self.device);
        let ids = self.device.from_i32(&ids, [rows])?;
        let segments = Segments::uniform(1, rows);
        let states = self.forward(&mut tape, &ids, &segments, None, options)?.states;
        let states = states.value().to_f32()?;
        let states = &states[usize::from(start.is_some()) * width..];
        let channel = |c: usize| states.iter().skip(c).step_by(width);
        Ok(match pooling {
            Pooling::Mean => {
                let sum = |c| channel(c).map(|x| f64::from(*x)).sum::<f64>();
                (0..width).map(|c| (sum(c) / tokens.len() as f64) as f32).collect()
            }
            Pooling::Max => {
                (0..width).map(|c| channel(c).copied().fold(f32::NEG_INFINITY, f32::max)).collect()
            }
            Pooling::First => states[..width].to_vec(),
            Pooling::Last => states[states.len() - width..].to_vec(),
        })
    }
}
