//! Held-out loss during training, as a mean and by position.

use std::sync::Arc;

use fox_data::{Dataset, IGNORED_LABEL, Layout, Loader, LoaderConfig, Order};
use fox_model::{ForwardOptions, Model};
use fox_tensor::Tape;
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::step::segments;

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
    /// Positions that were predicted.
    pub predictions: u64,
    /// Means by position, in windows that double: 0-15, 16-31, 32-63 and so on.
    pub by_position: Vec<PositionLoss>,
}

/// Where position windows begin: 0, 16, 32, 64 and so on, below `length`.
fn window_starts(length: usize) -> Vec<usize> {
    let doubling = std::iter::successors(Some(16), |start| Some(2 * start));
    std::iter::once(0).chain(doubling.take_while(|start| *start < length)).collect()
}

/// The first sequences of held-out data, always the same ones.
pub struct Evaluator {
    loader: Loader,
    batches: u64,
    length: usize,
}

impl Evaluator {
    /// `sequences` sequences of `length` tokens, `rows` at a time; fewer when the data have fewer.
    pub fn new(
        data: Arc<dyn Dataset>,
        sequences: usize,
        length: usize,
        rows: usize,
    ) -> Result<Evaluator> {
        let rows = rows.clamp(1, sequences.max(1));
        let config = |batch| LoaderConfig {
            layout: Layout::Windows,
            order: Order::Sequential,
            epochs: Some(1),
            ..LoaderConfig::new(length, batch)
        };
        // Data with fewer sequences than one portion are read one by one.
        let loader = match Loader::new(data.clone(), config(rows)) {
            Err(fox_data::Error::BatchTooLarge { .. }) => Loader::new(data, config(1))?,
            other => other?,
        };
        let wanted = sequences.div_ceil(loader.config().batch) as u64;
        let batches = loader.batches_per_epoch().min(wanted);
        Ok(Evaluator { loader, batches, length })
    }

    /// The loss of a model.
    pub fn run(&self, model: &Model, options: &ForwardOptions) -> Result<Evaluation> {
        let mut sums = vec![0.0; self.length];
        let mut counts = vec![0u64; self.length];
        let device = model.device();
        for number in 0..self.batches {
            let batch = self.loader.batch(number)?;
            let positions = batch.inputs.len();
            let mut tape = Tape::inference(device);
            let loss = model.loss(
                &mut tape,
                &device.from_i32(&batch.inputs, [positions])?,
                &device.from_i32(&batch.labels, [positions])?,
                &device.full([positions], 0.0)?,
                &segments(&batch, 0, batch.batch)?,
                options,
            )?;
            let losses = loss.per_token.to_f32()?;
            for (i, (loss, label)) in losses.iter().zip(&batch.labels).enumerate() {
                if *label != IGNORED_LABEL {
                    sums[i % self.length] += f64::from(*loss);
                    counts[i % self.length] += 1;
                }
            }
        }
        Ok(summarize(&sums, &counts))
    }
}

fn summarize(sums: &[f64], counts: &[u64]) -> Evaluation {
    let mean = |range: std::ops::Range<usize>| {
        let count: u64 = counts[range.clone()].iter().sum();
        sums[range].iter().sum::<f64>() / count.max(1) as f64
    };
    let starts = window_starts(sums.len());
    let ends = starts.iter().skip(1).copied().chain([sums.len()]);
    let by_position = starts
        .iter()
        .zip(ends)
        .map(|(&from, to)| PositionLoss { from, to, loss: mean(from..to) })
        .collect();
    Evaluation { loss: mean(0..sums.len()), predictions: counts.iter().sum(), by_position }
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
        let evaluation = summarize(&sums, &[2; 20]);
        assert_eq!(evaluation.loss, (16.0 + 16.0) / 20.0);
        assert_eq!(evaluation.predictions, 40);
        assert_eq!(evaluation.by_position[0], PositionLoss { from: 0, to: 16, loss: 1.0 });
        assert_eq!(evaluation.by_position[1], PositionLoss { from: 16, to: 20, loss: 4.0 });
    }

    #[test]
    fn a_fresh_model_is_nearly_uniform_and_small_data_are_enough() {
        let mut config = ModelConfig::fox_llama(32, 1, 2);
        config.vocab_size = 50;
        let model = Model::init(&config, 0, &fox_cpu::device()).unwrap();
        let documents = vec![(0..70u32).map(|i| i % 50).collect()];
        let data = Arc::new(MemoryDataset::new(documents, 50, 0, "test"));
        let evaluator = Evaluator::new(data, 4, 32, 4).unwrap();
        let evaluation = evaluator.run(&model, &ForwardOptions::default()).unwrap();
        assert_eq!(evaluation.predictions, 64);
        assert!((evaluation.loss - 50f64.ln()).abs() < 0.1, "{}", evaluation.loss);
    }
}
