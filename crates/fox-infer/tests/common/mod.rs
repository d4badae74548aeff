//! What the tests of the engine share.
#![allow(clippy::unwrap_used, clippy::expect_used, dead_code)] // every test uses a part of it

use std::path::PathBuf;

use fox_infer::{Event, Finished, ScoredToken};
use fox_model::{ForwardOptions, Model};
use fox_tensor::{Segments, Tape};

/// A reference model.
pub fn fixture(name: &str) -> Model {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
    Model::from_checkpoint(&root.join(name), &fox_cpu::device()).unwrap()
}

/// Some ids below 60.
pub fn prompt(seed: usize, len: usize) -> Vec<i32> {
    (0..len).map(|i| ((i * 31 + seed * 17 + i * i * 7) % 60) as i32).collect()
}

/// Prompt scores, tokens and the end.
pub fn read(events: impl Iterator<Item = Event>) -> (Vec<ScoredToken>, Vec<ScoredToken>, Finished) {
    let (mut prompt, mut tokens) = (Vec::new(), Vec::new());
    for event in events {
        match event {
            Event::Prompt(scores) => prompt.extend(scores),
            Event::Token(scored) => tokens.push(scored),
            Event::Finished(finished) => return (prompt, tokens, *finished),
            _ => {}
        }
    }
    panic!("the engine is gone");
}

/// Log-probabilities of `ids[1..]` by one forward pass.
pub fn reference(model: &Model, ids: &[i32]) -> Vec<f64> {
    let device = model.device();
    let tokens = device.from_i32(ids, [ids.len()]).unwrap();
    let mut tape = Tape::inference(device);
    let options = ForwardOptions::default();
    let hidden =
        model.forward(&mut tape, &tokens, &Segments::uniform(1, ids.len()), None, &options);
    let logits = model.logits(&mut tape, &hidden.unwrap().states).unwrap();
    let (logits, vocab) = (logits.value().to_f64().unwrap(), model.config().vocab_size);
    let norm = |row: &[f64]| row.iter().map(|x| x.exp()).sum::<f64>().ln();
    logits.chunks(vocab).zip(&ids[1..]).map(|(row, &id)| row[id as usize] - norm(row)).collect()
}
