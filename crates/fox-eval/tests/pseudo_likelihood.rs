//! Pseudo-likelihood of encoders.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use fox_data::MemoryDataset;
use fox_eval::Subject;
use fox_eval::loss::{LossOptions, evaluate_loss};
use fox_model::{ForwardOptions, Model, ModelConfig, Pruning};
use fox_tensor::{Segments, Tape};

const MASK: i32 = 64;
const LENGTH: usize = 20;

fn encoder() -> Model {
    let mut config = ModelConfig::fox_encoder(32, 2, 2);
    (config.vocab_size, config.tokens.mask) = (65, Some(MASK as usize));
    config.mlp.intermediate_size = Some(48);
    config.initializer_range = 0.2;
    Model::init(&config, 1, &fox_cpu::device()).unwrap()
}

fn document(seed: u32) -> Vec<u32> {
    (0..LENGTH as u32).map(|i| (i * 7 + seed * 13 + i * i) % 64).collect()
}

fn losses(
    model: &Model,
    documents: Vec<Vec<u32>>,
    mask_every: usize,
) -> fox_eval::Result<Vec<f64>> {
    let subject = Subject { name: "encoder", model, training_length: None };
    let count = documents.len() as u64;
    let data = MemoryDataset::new(documents, 64, 0, "test");
    let options =
        LossOptions { length: LENGTH, documents: count, pruning: Pruning::Off, mask_every };
    Ok(evaluate_loss(&subject, &data, &options, None, |_| ())?.mean())
}

/// The loss of one token from all that are not masked.
fn loss_of(model: &Model, tokens: &[u32], at: usize, masked: impl Fn(usize) -> bool) -> f64 {
    let device = model.device();
    let mask = |(i, id): (usize, &u32)| if masked(i) { MASK } else { *id as i32 };
    let ids: Vec<i32> = tokens.iter().enumerate().map(mask).collect();
    let mut tape = Tape::inference(device);
    let ids = device.from_i32(&ids, [LENGTH]).unwrap();
    let segments = Segments::uniform(1, LENGTH);
    let options = ForwardOptions::default();
    let hidden = model.forward(&mut tape, &ids, &segments, None, &options).unwrap();
    let logits = model.logits(&mut tape, &hidden.states).unwrap().value().to_f64().unwrap();
    let row = &logits[at * 65..(at + 1) * 65];
    let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = row.iter().map(|x| (x - largest).exp()).sum();
    largest + sum.ln() - row[tokens[at] as usize]
}

#[test]
fn every_token_is_predicted_from_unmasked_ones() {
    let (model, tokens) = (encoder(), document(1));
    for every in [2, 7, LENGTH, 64] {
        let got = losses(&model, vec![tokens.clone()], every).unwrap();
        for (at, got) in got.into_iter().enumerate() {
            let want = loss_of(&model, &tokens, at, |i| i % every == at % every);
            assert!((got - want).abs() < 1e-4, "1 of {every}, position {at}: {got} {want}");
        }
    }
}

#[test]
fn later_tokens_change_earlier_losses() {
    let (model, mut changed) = (encoder(), document(1));
    let before = losses(&model, vec![document(1)], 8).unwrap();
    changed[19] = (changed[19] + 5) % 64;
    let after = losses(&model, vec![changed], 8).unwrap();
    assert!((before[17] - after[17]).abs() > 1e-5);
    // Position 3 and position 19 are masked together.
    assert_eq!(before[3], after[3]);
}

#[test]
fn rejects_encoder_without_mask_token() {
    let mut model = encoder();
    let mut config = model.config().clone();
    config.tokens.mask = None;
    model.reconfigure(&config).unwrap();
    let error = losses(&model, vec![document(1)], 8).unwrap_err().to_string();
    assert!(error.contains("has no `mask_token_id`"), "{error}");
}
