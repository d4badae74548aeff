//! Measurements of forget gates: half-lives per head, and the fraction of attention tiles that pruning skips.

use std::cell::RefCell;

use fox_data::Batch;
use fox_model::{AttentionView, ForwardOptions, Model, Observer, Pass};
use fox_tensor::{Segments, Tensor, tile_counts};

use crate::Result;
use crate::step::segments;

/// A gate that is 1 to the last bit forgets nothing; JSON has no infinity.
const LONGEST: f64 = 1e9;

/// The median half-life in tokens, `ln(1/2) / lf`, per layer and head over the first `tokens` of a batch's first row.
///
/// Empty inner lists for layers without gates. Runs a separate inference pass.
pub fn half_lives(
    model: &Model,
    batch: &Batch,
    tokens: usize,
    options: &ForwardOptions,
) -> Result<Vec<Vec<f64>>> {
    let device = model.device();
    let starts = segments(batch, 0, 1)?.as_slice().iter().map(|s| s.q_start).collect::<Vec<_>>();
    let cuts = starts.into_iter().filter(|start| *start < tokens).chain([tokens]);
    let segments = Segments::packed(&cuts.collect::<Vec<_>>())?;
    let ids = device.from_i32(&batch.inputs[..tokens], [tokens])?;
    let medians = Medians(RefCell::new(vec![Vec::new(); model.config().num_layers]));
    let _weights = model.params().begin_pass(Pass::Observation);
    model.observe(&ids, &segments, options, &medians)?;
    Ok(medians.0.into_inner())
}

/// Median half-lives of every layer and head.
struct Medians(RefCell<Vec<Vec<f64>>>);

impl Observer for Medians {
    fn attention(&self, view: &AttentionView<'_>) -> fox_tensor::Result<()> {
        let Some(gates) = view.log_gates else { return Ok(()) };
        let (heads, values) = (gates.cols(), gates.to_f32()?);
        let of_head = |h: usize| values.iter().skip(h).step_by(heads).copied().collect();
        self.0.borrow_mut()[view.layer] =
            (0..heads).map(|h| half_life(median(of_head(h)))).collect();
        Ok(())
    }
}

fn half_life(log_gate: f32) -> f64 {
    let half_life = 0.5f64.ln() / f64::from(log_gate);
    if half_life.is_finite() { half_life.clamp(0.0, LONGEST) } else { LONGEST }
}

/// The middle value; the lower of two.
fn median(mut values: Vec<f32>) -> f32 {
    if values.is_empty() {
        return 0.0;
    }
    let middle = (values.len() - 1) / 2;
    *values.select_nth_unstable_by(middle, f32::total_cmp).1
}

/// The part of the attention tiles of each layer that was not visited, over the parts of a batch.
///
/// `tiles[part][layer]` are those of [`fox_tensor::AttentionOut`].
pub(crate) fn pruned_fractions(tiles: &[Vec<Tensor>]) -> Result<Vec<f64>> {
    let layers = tiles.first().map_or(0, Vec::len);
    let mut counts = vec![(0u64, 0u64); layers];
    for part in tiles {
        for (count, tensor) in counts.iter_mut().zip(part) {
            for [visited, all] in tile_counts(tensor)? {
                count.0 += visited;
                count.1 += all;
            }
        }
    }
    let fraction = |(visited, all): (u64, u64)| 1.0 - visited as f64 / all.max(1) as f64;
    Ok(counts.into_iter().map(fraction).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use fox_data::LoaderState;
    use fox_model::{DecayTime, ForgetGate, ForgettingConfig, ModelConfig};

    #[test]
    fn medians_and_half_lives() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), 2.0);
        assert_eq!(half_life(0.0), LONGEST);
        assert!((half_life(0.5f32.ln()) - 1.0).abs() < 1e-6);
    }

    #[test]
    fn half_lives_of_fixed_gates() {
        let mut config = ModelConfig::fox_llama(32, 2, 4).with_vocab(16);
        config.mixer = Box::new(ForgettingConfig {
            gate: ForgetGate::Fixed { decay_time: Some(DecayTime { min: 2.0, max: 128.0 }) },
            ..ForgettingConfig::fox_llama(4)
        });
        let model = Model::init(&config, 0, &fox_cpu::device()).unwrap();
        let state = LoaderState { next_batch: 1, fingerprint: 0 };
        let ids: Vec<i32> = (0..40).map(|i| i % 16).collect();
        let boundaries = Some(vec![0, 7, 20, 40]);
        let batch =
            Batch { inputs: ids.clone(), labels: ids, batch: 2, time: 20, boundaries, state };
        let lives = half_lives(&model, &batch, batch.time, &ForwardOptions::default()).unwrap();
        assert_eq!(lives.len(), 2);
        for (h, life) in lives[1].iter().enumerate() {
            let want = 2f64.ln() * 2.0 * 4f64.powi(h as i32);
            assert!((life / want - 1.0).abs() < 1e-4, "head {h}: {life}, not {want}");
        }
    }

    /// Gates of the second layer depend on what the first has attended to.
    #[test]
    fn half_lives_respect_document_boundaries() {
        let config = ModelConfig::fox_llama(32, 2, 4).with_vocab(16);
        let model = Model::init(&config, 0, &fox_cpu::device()).unwrap();
        let state = LoaderState { next_batch: 1, fingerprint: 0 };
        // The same document twice.
        let ids: Vec<i32> = (0..20).map(|i| i % 10).collect();
        let boundaries = Some(vec![0, 10, 20]);
        let batch =
            Batch { inputs: ids.clone(), labels: ids, batch: 1, time: 20, boundaries, state };
        let lives = |tokens: usize| {
            half_lives(&model, &batch, tokens, &ForwardOptions::default()).unwrap().concat()
        };
        for (twice, once) in lives(20).into_iter().zip(lives(10)) {
            assert!((twice / once - 1.0).abs() < 1e-5, "{twice} {once}");
        }
    }

    #[test]
    fn fractions_count_blocks() {
        let device = fox_cpu::device();
        let tensor = |counts: [[u64; 2]; 2]| {
            device.from_i32(&fox_tensor::tile_words(&counts), [2, 4]).unwrap()
        };
        let parts = [vec![tensor([[1, 2], [2, 2]])], vec![tensor([[0, 2], [0, 2]])]];
        assert_eq!(pruned_fractions(&parts).unwrap(), [5.0 / 8.0]);
        assert!(pruned_fractions(&[]).unwrap().is_empty());
    }
}
