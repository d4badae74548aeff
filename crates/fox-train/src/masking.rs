//! Masked tokens: what an encoder reads in training, and what it must predict.
//!
//! A fraction of the positions is chosen. Of these most are replaced by the mask token, some by a random one, and the rest
//! stay as they are; only chosen positions have a loss. Every decision is a function of the seed, the step and the
//! position in the whole batch, so neither resuming a run nor dividing a batch changes it.

use fox_base::random::{SplitMix64, mix};
use fox_data::{Batch, IGNORED_LABEL, Layout};
use fox_model::ModelConfig;
use serde::{Deserialize, Serialize};

use crate::{Error, Recipe, Result};

/// The table `[training.masking]`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MaskingRecipe {
    /// Fraction of the positions that are predicted.
    pub fraction: f64,
    /// Fraction of these that are replaced by the mask token.
    pub masked: f64,
    /// Fraction of these that are replaced by a random token; the rest stay as they are.
    pub random: f64,
}

impl Default for MaskingRecipe {
    fn default() -> Self {
        MaskingRecipe { fraction: 0.15, masked: 0.8, random: 0.1 }
    }
}

impl MaskingRecipe {
    /// The first value that cannot be right: key and detail.
    pub(crate) fn check(&self) -> std::result::Result<(), (&'static str, &'static str)> {
        let within = |x: f64| (0.0..=1.0).contains(&x);
        match self {
            _ if !(self.fraction > 0.0 && self.fraction <= 1.0) => {
                Err(("training.masking.fraction", "must be above 0 and at most 1"))
            }
            _ if !within(self.masked) => {
                Err(("training.masking.masked", "must be between 0 and 1"))
            }
            _ if !(within(self.random) && within(self.masked + self.random)) => Err((
                "training.masking.random",
                "must be between 0 and 1, and at most 1 together with training.masking.masked",
            )),
            _ => Ok(()),
        }
    }
}

/// Draws per position: whether it is chosen, what becomes of it, and the random token.
const DRAWS: u64 = 3;

/// Seed of held-out sequences: their masked positions are the same in all runs.
const HELD_OUT: u64 = 0x6d61_736b;

/// The masking of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Masking {
    recipe: MaskingRecipe,
    seed: u64,
    /// The mask token.
    mask: i32,
    /// Token ids of the model, the mask token included.
    vocab: u64,
}

impl Masking {
    /// What an encoder reads in a step, and the labels of the positions it must predict.
    ///
    /// The loader's batch has the tokens of its sequences as labels, and a start marker in front of the inputs; an
    /// encoder reads the tokens themselves, without the marker.
    pub fn batch(&self, batch: &Batch, step: u64) -> Batch {
        let mut masked = batch.clone();
        let pairs = masked.inputs.iter_mut().zip(&masked.labels);
        // What fills up a row stays.
        pairs.filter(|(_, label)| **label != IGNORED_LABEL).for_each(|(id, label)| *id = *label);
        self.apply(step, &mut masked.inputs, &mut masked.labels);
        masked
    }

    /// The same for held-out sequences, of which `key` identifies one.
    pub(crate) fn sequence(&self, key: u64, tokens: &[u32]) -> (Vec<i32>, Vec<i32>) {
        let mut inputs: Vec<i32> = tokens.iter().map(|id| *id as i32).collect();
        let mut labels = inputs.clone();
        self.apply(key, &mut inputs, &mut labels);
        (inputs, labels)
    }

    /// Of held-out sequences, all chosen positions are masked: the loss is that of tokens that cannot be read.
    pub(crate) fn held_out(self) -> Masking {
        let recipe = MaskingRecipe { masked: 1.0, random: 0.0, ..self.recipe };
        Masking { recipe, seed: HELD_OUT, ..self }
    }

    fn apply(&self, key: u64, inputs: &mut [i32], labels: &mut [i32]) {
        let start = SplitMix64::new(mix(self.seed ^ mix(key ^ HELD_OUT.rotate_left(32))));
        let MaskingRecipe { fraction, masked, random } = self.recipe;
        for (i, (input, label)) in inputs.iter_mut().zip(labels).enumerate() {
            let mut draws = start.after(DRAWS * i as u64);
            if *label == IGNORED_LABEL {
                continue;
            }
            if !draws.chance(fraction) {
                *label = IGNORED_LABEL;
                continue;
            }
            let fate = draws.uniform();
            if fate < masked {
                *input = self.mask;
            } else if fate < masked + random && self.vocab > 1 {
                // Any token but the mask.
                let id = draws.below(self.vocab - 1) as i32;
                *input = id + i32::from(id >= self.mask);
            }
        }
    }
}

impl Recipe {
    /// The masking of an encoder; `None` for causal models.
    ///
    /// # Errors
    /// Masking of a causal model, and data that an encoder cannot be trained on.
    pub fn masking(&self, config: &ModelConfig) -> Result<Option<Masking>> {
        let refuse = |key: &str, detail: &str| Err(Error::value(&self.name, key, detail));
        if !config.is_encoder() {
            return match self.training.masking {
                None => Ok(None),
                Some(_) => refuse(
                    "training.masking",
                    "is for encoders; remove it, or set model.model_type to \"fox_encoder\"",
                ),
            };
        }
        if self.data.task.is_some() || self.data.messages.is_some() {
            let key = if self.data.task.is_some() { "data.task" } else { "data.messages" };
            return refuse(
                key,
                "has answers to a prompt, which an encoder cannot be trained on; train it on text (data.path)",
            );
        }
        if self.data.layout == Layout::PaddedWindows {
            return refuse(
                "data.layout",
                "is \"padded-windows\", but an encoder would read the padding; use \"windows\" or \"packed\"",
            );
        }
        let Some(mask) = config.tokens.mask else {
            return refuse("model.mask_token_id", "is missing; give the id of the mask token");
        };
        Ok(Some(Masking {
            recipe: self.training.masking.unwrap_or_default(),
            seed: self.training.seed,
            mask: mask as i32,
            vocab: config.vocab_size as u64,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fox_data::LoaderState;

    const MASK: i32 = 50;

    fn masking(seed: u64) -> Masking {
        Masking { recipe: MaskingRecipe::default(), seed, mask: MASK, vocab: 51 }
    }

    fn batch(rows: usize, time: usize) -> Batch {
        let labels: Vec<i32> = (0..rows * time).map(|i| (i * i % 50) as i32).collect();
        let mut inputs = vec![49];
        inputs.extend(&labels[..rows * time - 1]);
        let state = LoaderState { next_batch: 4, fingerprint: 0 };
        Batch { inputs, labels, batch: rows, time, boundaries: None, state }
    }

    #[test]
    fn fractions_are_those_of_the_recipe() {
        let plain = batch(40, 1000);
        let masked = masking(1).batch(&plain, 7);
        let chosen: Vec<usize> =
            (0..plain.labels.len()).filter(|i| masked.labels[*i] != IGNORED_LABEL).collect();
        let near = |count: usize, of: usize, want: f64| {
            let deviation = (want * (1.0 - want) / of as f64).sqrt();
            assert!((count as f64 / of as f64 - want).abs() < 4.0 * deviation, "{count} of {of}");
        };
        near(chosen.len(), plain.labels.len(), 0.15);
        let count = |holds: &dyn Fn(usize) -> bool| chosen.iter().filter(|i| holds(**i)).count();
        near(count(&|i| masked.inputs[i] == MASK), chosen.len(), 0.8);
        // One of 50 random tokens is the right one.
        let kept = count(&|i| masked.inputs[i] == plain.labels[i]);
        near(kept, chosen.len(), 0.1 + 0.1 / 50.0);
        assert!(masked.inputs.iter().all(|id| (0..=MASK).contains(id)));
        for i in 0..plain.labels.len() {
            match masked.labels[i] {
                IGNORED_LABEL => assert_eq!(masked.inputs[i], plain.labels[i], "position {i}"),
                label => assert_eq!(label, plain.labels[i]),
            }
        }
    }

    #[test]
    fn masks_depend_on_seed_step_and_position() {
        let (plain, longer) = (batch(4, 64), batch(5, 64));
        let masked = masking(1).batch(&plain, 7);
        assert_eq!(masked, masking(1).batch(&plain, 7));
        let first_rows = masking(1).batch(&longer, 7);
        assert_eq!(masked.labels[..], first_rows.labels[..4 * 64]);
        assert_eq!(masked.inputs[..], first_rows.inputs[..4 * 64]);
        assert_ne!(masked.labels, masking(2).batch(&plain, 7).labels);
        assert_ne!(masked.labels, masking(1).batch(&plain, 8).labels);
        let chosen = |row: usize| -> Vec<bool> {
            let row = &masked.labels[row * 64..(row + 1) * 64];
            row.iter().map(|label| *label != IGNORED_LABEL).collect()
        };
        assert_ne!(chosen(0), chosen(1));
    }

    #[test]
    fn padding_is_never_chosen() {
        let mut plain = batch(2, 100);
        plain.inputs[150..].fill(49);
        plain.labels[150..].fill(IGNORED_LABEL);
        let masked = masking(3).batch(&plain, 0);
        assert!(masked.inputs[150..].iter().all(|id| *id == 49));
        assert!(masked.labels[150..].iter().all(|label| *label == IGNORED_LABEL));
        assert!(masked.labelled() > 0);
    }

    #[test]
    fn held_out_tokens_are_all_masked() {
        let tokens: Vec<u32> = (0..400).map(|i| i % 50).collect();
        let (inputs, labels) = masking(1).held_out().sequence(5, &tokens);
        assert_eq!(
            (&inputs, &labels),
            (
                &masking(9).held_out().sequence(5, &tokens).0,
                &masking(9).held_out().sequence(5, &tokens).1,
            )
        );
        for (input, label) in inputs.iter().zip(&labels) {
            assert_eq!(*input == MASK, *label != IGNORED_LABEL);
        }
        assert_ne!(labels, masking(1).held_out().sequence(6, &tokens).1);
    }
}
