//! Held-out loss during training, as a mean and by position.

use std::sync::Arc;

use fox_base::random::mix;
use fox_data::{Dataset, DocumentChunk, DocumentChunks, IGNORED_LABEL, Tokenizer};
use fox_dist::Group;
use fox_model::{ForwardOptions, Model, Pass};
use fox_tensor::{Segments, Tape};
use serde::{Deserialize, Serialize};

use crate::masking::Masking;
use crate::{Error, Result};

/// Mean loss of the positions `from .. to` of their sequences.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PositionLoss {
    /// First position.
    pub from: usize,
    /// The position after the last.
    pub to: usize,
    /// Mean loss in nats per token.
    pub loss: f64,
}

/// The loss on held-out sequences.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Mean over all positions, in nats per token.
    pub loss: f64,
    /// Sequences that were read; 0 in files of earlier versions.
    #[serde(default)]
    pub sequences: u64,
    /// Positions that were predicted.
    pub predictions: u64,
    /// Whether these are the masked tokens of an encoder.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub masked: bool,
    /// Means by position, in windows that double: 0-15, 16-31, 32-63 and so on.
    pub by_position: Vec<PositionLoss>,
}

impl Evaluation {
    /// What the mean is called: a figure of this name is the same wherever it stands.
    pub fn name(&self) -> String {
        let length = self.by_position.last().map_or(0, |window| window.to);
        match self.predictions == self.sequences * length as u64 {
            _ if self.masked => format!("held-out loss ({} masked tokens)", self.predictions),
            true => format!("held-out loss ({} x {length} tokens)", self.sequences),
            // In the data of tasks only answers are predicted.
            false => format!("held-out loss ({} answers)", self.predictions),
        }
    }
}

/// Where position windows begin: 0, 16, 32, 64 and so on, below `length`.
fn window_starts(length: usize) -> Vec<usize> {
    let doubling = std::iter::successors(Some(16), |start| Some(2 * start));
    std::iter::once(0).chain(doubling.take_while(|start| *start < length)).collect()
}

/// The first chunks of all held-out documents, then their second chunks ([`DocumentChunks`]): always the same ones, and those
/// that `fox eval loss` measures.
pub struct Evaluator {
    data: Arc<dyn Dataset>,
    chunks: Vec<DocumentChunk>,
    length: usize,
    rows: usize,
    masking: Option<Masking>,
}

impl Evaluator {
    /// `sequences` sequences of `length` tokens, `rows` at a time; fewer when the data have fewer.
    ///
    /// # Errors
    /// No document of that length.
    pub fn new(
        data: Arc<dyn Dataset>,
        sequences: usize,
        length: usize,
        rows: usize,
    ) -> Result<Evaluator> {
        let chunks: Vec<DocumentChunk> =
            DocumentChunks::new(data.lengths(), length).take(sequences).collect();
        if chunks.is_empty() {
            return Err(Error::HeldOutTooShort { length, longest: data.lengths().longest() });
        }
        Ok(Evaluator { data, chunks, length, rows: rows.max(1), masking: None })
    }

    /// The evaluation of an encoder: the loss of masked tokens, always the same ones.
    #[must_use]
    pub fn masked(self, masking: Option<Masking>) -> Evaluator {
        Evaluator { masking: masking.map(Masking::held_out), ..self }
    }

    /// Bytes of text per token of the sequences; `None` for data that are not text or not predicted throughout.
    pub fn bytes_per_token(&self, tokenizer: &Tokenizer) -> Result<Option<f64>> {
        if matches!(tokenizer, Tokenizer::Synthetic(_)) || self.masking.is_some() {
            return Ok(None);
        }
        let (mut ids, mut labelled) = (vec![0; self.length], vec![true; self.length]);
        let mut bytes = 0;
        for chunk in &self.chunks {
            self.data.read_labelled(chunk.document, chunk.start, &mut ids, &mut labelled)?;
            if labelled.contains(&false) {
                return Ok(None);
            }
            bytes += match tokenizer {
                // Exact where a sequence begins or ends inside of a character.
                Tokenizer::Bytes(_) => ids.iter().filter(|id| **id < 256).count(),
                _ => tokenizer.decode(&ids)?.len(),
            };
        }
        Ok(Some(bytes as f64 / (self.chunks.len() * self.length) as f64).filter(|x| *x > 0.0))
    }

    /// The loss of a model.
    pub fn run(&self, model: &Model, options: &ForwardOptions) -> Result<Evaluation> {
        self.run_in(model, options, &Group::alone())
    }

    /// The loss of a model that several processes have: each computes a range of the sequences, and all add up the
    /// losses of all tokens in the same order, so that the result has the bits of one process.
    pub(crate) fn run_in(
        &self,
        model: &Model,
        options: &ForwardOptions,
        group: &Group,
    ) -> Result<Evaluation> {
        let parts: Vec<&[DocumentChunk]> = self.chunks.chunks(self.rows).collect();
        let share = |rank: usize| rank * parts.len() / group.size();
        let mut own: Vec<f32> = Vec::new();
        let range = share(group.rank())..share(group.rank() + 1);
        // Where weights are sharded, all processes compute as many parts; what is too much is not counted.
        let most = (0..group.size()).map(|r| share(r + 1) - share(r)).max().unwrap_or(0);
        let sharded = model.params().is_sharded();
        for at in (range.start..range.start + most).take(if sharded { most } else { range.len() }) {
            let (inputs, labels) = self.read(parts[at.min(parts.len() - 1)])?;
            let losses = self.losses(model, &inputs, &labels, options)?;
            own.extend(Some(losses).filter(|_| range.contains(&at)).into_iter().flatten());
        }
        let losses = group.all_values(&own)?;
        let (_, labels) = self.read(&self.chunks)?;
        let mut sums = vec![0.0; self.length];
        let mut counts = vec![0u64; self.length];
        for (i, (loss, label)) in losses.iter().zip(&labels).enumerate() {
            if *label != IGNORED_LABEL {
                sums[i % self.length] += f64::from(*loss);
                counts[i % self.length] += 1;
            }
        }
        let evaluation = summarize(self.chunks.len(), &sums, &counts);
        Ok(Evaluation { masked: self.masking.is_some(), ..evaluation })
    }

    /// What the model reads and should predict, `[chunks, length]` each.
    fn read(&self, chunks: &[DocumentChunk]) -> Result<(Vec<i32>, Vec<i32>)> {
        let bos = self.data.bos() as i32;
        let (mut ids, mut labelled) = (vec![0; self.length], vec![true; self.length]);
        let (mut inputs, mut labels) = (Vec::new(), Vec::new());
        for chunk in chunks {
            self.data.read_labelled(chunk.document, chunk.start, &mut ids, &mut labelled)?;
            if let Some(masking) = &self.masking {
                let key = mix(chunk.document) ^ chunk.start;
                let (masked, predicted) = masking.sequence(key, &ids);
                inputs.extend(masked);
                labels.extend(predicted);
                continue;
            }
            inputs.push(bos);
            inputs.extend(ids[..self.length - 1].iter().map(|id| *id as i32));
            let label = |(id, labelled): (&u32, &bool)| match labelled {
                true => *id as i32,
                false => IGNORED_LABEL,
            };
            labels.extend(ids.iter().zip(&labelled).map(label));
        }
        Ok((inputs, labels))
    }

    fn losses(
        &self,
        model: &Model,
        inputs: &[i32],
        labels: &[i32],
        options: &ForwardOptions,
    ) -> Result<Vec<f32>> {
        let (device, positions) = (model.device(), inputs.len());
        let mut tape = Tape::inference(device);
        let _weights = model.params().begin_pass(Pass::Evaluation);
        let loss = model.loss(
            &mut tape,
            &device.from_i32(inputs, [positions])?,
            &device.from_i32(labels, [positions])?,
            &device.full([positions], 0.0)?,
            &Segments::uniform(positions / self.length, self.length),
            options,
        )?;
        Ok(loss.per_token.to_f32()?)
    }
}

fn summarize(sequences: usize, sums: &[f64], counts: &[u64]) -> Evaluation {
    let mean = |range: std::ops::Range<usize>| {
        let count: u64 = counts[range.clone()].iter().sum();
        sums[range].iter().sum::<f64>() / count.max(1) as f64
    };
    let starts = window_starts(sums.len());
    let ends = starts.iter().skip(1).copied().chain([sums.len()]);
    let by_position = starts
        .iter()
        .zip(ends)
        // Tasks have windows without an answer.
        .filter(|(from, to)| counts[**from..*to].iter().any(|count| *count > 0))
        .map(|(&from, to)| PositionLoss { from, to, loss: mean(from..to) })
        .collect();
    Evaluation {
        loss: mean(0..sums.len()),
        sequences: sequences as u64,
        predictions: counts.iter().sum(),
        masked: false,
        by_position,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fox_data::MemoryDataset;
    use fox_model::ModelConfig;

    #[test]
    fn windows_double() {
        assert_eq!(window_starts(100), [0, 16, 32, 64]);
        assert_eq!(window_starts(64), [0, 16, 32]);
        assert_eq!(window_starts(5), [0]);
    }

    #[test]
    fn means_are_by_window() {
        let sums: Vec<f64> = (0..20).map(|i| if i < 16 { 2.0 } else { 8.0 }).collect();
        let evaluation = summarize(2, &sums, &[2; 20]);
        assert_eq!(evaluation.name(), "held-out loss (2 x 20 tokens)");
        assert_eq!(evaluation.loss, (16.0 + 16.0) / 20.0);
        assert_eq!(evaluation.predictions, 40);
        assert_eq!(evaluation.by_position[0], PositionLoss { from: 0, to: 16, loss: 1.0 });
        assert_eq!(evaluation.by_position[1], PositionLoss { from: 16, to: 20, loss: 4.0 });
    }

    #[test]
    fn fresh_model_has_uniform_loss_on_small_data() {
        let config = ModelConfig::fox_llama(32, 1, 2).with_vocab(50);
        let model = Model::init(&config, 0, &fox_cpu::device()).unwrap();
        let documents = vec![(0..70u32).map(|i| i % 50).collect()];
        let data = Arc::new(MemoryDataset::new(documents, 50, 0, "test"));
        let evaluator = Evaluator::new(data, 4, 32, 4).unwrap();
        let evaluation = evaluator.run(&model, &ForwardOptions::default()).unwrap();
        assert_eq!(evaluation.predictions, 64);
        assert!((evaluation.loss - 50f64.ln()).abs() < 0.1, "{}", evaluation.loss);
    }

    #[test]
    fn every_chunk_starts_with_bos() {
        let data = Arc::new(MemoryDataset::new(vec![(1..7).collect()], 50, 49, "test"));
        let evaluator = Evaluator::new(data, 2, 3, 2).unwrap();
        let (inputs, labels) = evaluator.read(&evaluator.chunks).unwrap();
        assert_eq!(inputs, [49, 1, 2, 49, 4, 5]);
        assert_eq!(labels, [1, 2, 3, 4, 5, 6]);
    }
}
